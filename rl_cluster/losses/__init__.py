"""Losses that a user combines, weighs and extends: `from rl_cluster.losses import PPOLoss, CustomLoss, …`."""

from rl_cluster.losses.custom_loss import *  # noqa: F403
from rl_cluster.losses.custom_loss import __all__ as __all__
