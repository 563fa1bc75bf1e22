"""Every class and function of the loss family under one name."""

from rl_cluster.losses.base import CustomLoss, CustomLossConfig
from rl_cluster.losses.combined import AdaptiveLoss, CompositeLoss
from rl_cluster.losses.contrastive_loss import ContrastiveLoss
from rl_cluster.losses.importance_sampling import ImportanceSamplingLoss
from rl_cluster.losses.kl_loss import KLDivergenceLoss, compute_kl_penalty
from rl_cluster.losses.ppo_loss import PPOLoss, compute_ppo_loss
from rl_cluster.losses.token_loss import FocalLoss, TokenLevelLoss
from rl_cluster.losses.variance_loss import VarianceLoss, variance_regularization

__all__ = [
    "CustomLossConfig",
    "CustomLoss",
    "CompositeLoss",
    "AdaptiveLoss",
    "TokenLevelLoss",
    "FocalLoss",
    "KLDivergenceLoss",
    "PPOLoss",
    "ImportanceSamplingLoss",
    "ContrastiveLoss",
    "VarianceLoss",
    "compute_kl_penalty",
    "compute_ppo_loss",
    "variance_regularization",
]
