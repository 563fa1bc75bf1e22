"""Post-training of language models by reinforcement learning on Ray, vLLM and DeepSpeed ZeRO-3.

Importing this takes well under a second and none of torch, vllm, deepspeed or ray.
"""

from rl_cluster.errors import BadInputError, RLClusterError

__version__ = "0.1.0"

__all__ = ["BadInputError", "RLClusterError", "__version__"]
