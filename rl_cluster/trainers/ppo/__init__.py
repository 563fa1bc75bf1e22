"""PPOTrainer, and what only it needs."""
