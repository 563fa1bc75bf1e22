"""Advantages, losses and KL as pure functions of tensors and arrays."""
