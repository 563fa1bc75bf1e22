"""The names of the documents' module `dpo`, where `from rl_cluster.dpo import …` looks for them."""

from rl_cluster.trainers.fixed_data.dpo import DPOConfig, DPOTrainer
from rl_cluster.trainers.fixed_data.preference_dataset import PreferenceDataset

__all__ = ["DPOConfig", "DPOTrainer", "PreferenceDataset"]
