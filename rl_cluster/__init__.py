"""Post-training of language models by reinforcement learning on Ray, vLLM and DeepSpeed ZeRO-3.

Importing this takes well under a second and none of torch, vllm, deepspeed or ray: the public names are
imported from their modules when they are first used.
"""

from importlib import import_module
from typing import Any

from rl_cluster.errors import BadInputError, RLClusterError

__version__ = "0.1.0"

_HOMES = {
    "rl_cluster.assembly.fit": ("FitResult", "fit"),
    "rl_cluster.config.fit": ("FitConfig",),
    "rl_cluster.environments": (
        "MultiObjectiveRewardEnv",
        "Observation",
        "PreferenceComparisonEnv",
        "RLEnvironment",
        "StepResult",
        "TextGenerationEnv",
        "Trajectory",
        "create_code_generation_env",
        "create_env_aware_reward_fn",
        "create_math_problem_env",
        "create_rl_environment",
    ),
    "rl_cluster.losses.custom_loss": (
        "AdaptiveLoss",
        "CompositeLoss",
        "ContrastiveLoss",
        "CustomLoss",
        "CustomLossConfig",
        "FocalLoss",
        "ImportanceSamplingLoss",
        "KLDivergenceLoss",
        "PPOLoss",
        "TokenLevelLoss",
        "VarianceLoss",
        "compute_kl_penalty",
        "compute_ppo_loss",
        "variance_regularization",
    ),
    "rl_cluster.trainers.ppo.trainer": ("PPOTrainer",),
    "rl_cluster.trainers.ppo.buffer": ("AdaptiveKLController", "PPOBuffer"),
    "rl_cluster.trainers.ppo.config": ("PPOConfig",),
    "rl_cluster.trainers.ppo.model": ("PPOModel", "ValueHead"),
    "rl_cluster.pipeline": (
        "AsyncTrainingClient",
        "AsyncTrainingFuture",
        "ForwardBackwardOutput",
        "ForwardBackwardPipeline",
        "OptimStepOutput",
    ),
    "rl_cluster.pipeline.on_cluster": ("cluster_client",),
    "rl_cluster.reward_models": (
        "MultiObjectiveRewardModel",
        "PairwiseRewardModel",
        "RewardModel",
        "RewardModelConfig",
        "RewardModelTrainer",
    ),
    "rl_cluster.trainers.fixed_data.dpo": ("DPOConfig", "DPOTrainer"),
    "rl_cluster.trainers.grpo.trainer": ("GRPOTrainer",),
    "rl_cluster.trainers.grpo.config": ("GRPOConfig",),
    "rl_cluster.trainers.fixed_data.kto": ("KTOConfig", "KTOTrainer"),
    "rl_cluster.trainers.fixed_data.orpo": ("ORPOConfig", "ORPOTrainer"),
    "rl_cluster.trainers.fixed_data.preference_dataset": ("PreferenceDataset",),
    "rl_cluster.trainers.fixed_data.reward": ("RewardConfig", "RewardTrainer"),
    "rl_cluster.trainers.rloo.trainer": ("RLOOTrainer",),
    "rl_cluster.trainers.rloo.config": ("RLOOConfig",),
    "rl_cluster.trainers.fixed_data.sft": ("SFTConfig", "SFTTrainer"),
}
"""Module -> the names that `from rl_cluster import …` finds there."""

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["BadInputError", "RLClusterError", "__version__", *_HOME_OF]  # noqa: PLE0604 (all are strings)


def __getattr__(name: str) -> Any:
    """Raises AttributeError for a name that is not public."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
