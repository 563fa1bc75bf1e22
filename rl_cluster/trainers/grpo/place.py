"""A GRPOConfig in, where its run works (this process or Ray) out; contradictions are refused."""

from __future__ import annotations

from rl_cluster.errors import BadInputError
from rl_cluster.trainers.arguments import check_cluster, read_settings
from rl_cluster.trainers.grpo.config import GRPOConfig


def check_where(config: GRPOConfig) -> None:
    """BadInputError where cluster, backend, use_vllm and settings contradict each other."""
    settings = read_settings(config.settings)
    check_cluster("GRPOConfig", config.cluster, config.backend, settings)
    if config.use_vllm and settings.get("cluster.backend", config.backend) == "local":
        raise BadInputError(
            'GRPOConfig.use_vllm=True: backend="local" samples with the learner\'s own model. Leave use_vllm '
            'out, or set backend="ray".'
        )


def backend_of(config: GRPOConfig) -> str:
    """What use_vllm asks for counts where the backend is left open."""
    return "ray" if config.use_vllm and config.backend == "auto" else config.backend
