"""A RunConfig says everything about a run; `load_config` makes one from YAML and `key=value` overrides."""

from rl_cluster.config.algorithm import GRPO, PPO, RLOO, AlgorithmConfig, Reinforce
from rl_cluster.config.run import RunConfig

__all__ = ["GRPO", "PPO", "RLOO", "AlgorithmConfig", "Reinforce", "RunConfig"]
