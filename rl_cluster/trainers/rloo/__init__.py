"""RLOOTrainer, and what only it needs."""
