"""GRPOTrainer, and what only it needs."""
