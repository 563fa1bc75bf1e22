"""Reward models to build, train and use: `from rl_cluster import RewardModel, RewardModelTrainer, …`."""

from rl_cluster.reward_models.config import RewardModelConfig
from rl_cluster.reward_models.export import export_classifier
from rl_cluster.reward_models.folder import load_saved_reward_model
from rl_cluster.reward_models.multi_objective import MultiObjectiveOutput, MultiObjectiveRewardModel
from rl_cluster.reward_models.pairwise import PairwiseRewardModel
from rl_cluster.reward_models.reward_model import RewardModel, RewardOutput
from rl_cluster.reward_models.trainer import RewardModelTrainer

__all__ = [
    "MultiObjectiveOutput",
    "MultiObjectiveRewardModel",
    "PairwiseRewardModel",
    "RewardModel",
    "RewardModelConfig",
    "RewardModelTrainer",
    "RewardOutput",
    "export_classifier",
    "load_saved_reward_model",
]
