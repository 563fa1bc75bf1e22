"""Trainers on fixed data: DPO, ORPO, KTO, reward models, SFT."""
