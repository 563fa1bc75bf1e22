"""What a vLLM engine is started with; imports no vLLM, so that the driver can make and ship it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Backend = Literal["gloo", "nccl", "ipc"]


@dataclass(frozen=True)
class EngineSpec:
    """model: folder or hub name. kv_cache_gib: CPU engines; gpu_memory_fraction: GPU engines.

    enforce_eager None: eager on CPUs, CUDA graphs on GPUs. num_threads: OpenMP threads of each worker
    process. lora_rank: set when adapters, not weights, are published. sync_backend: how weights arrive.
    """

    model: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    max_model_len: int = 1024
    max_num_seqs: int = 256
    tensor_parallel_size: int = 1
    kv_cache_gib: float = 1.0
    gpu_memory_fraction: float = 0.85
    enforce_eager: bool | None = None
    seed: int = 0
    num_threads: int = 1
    sleep_mode: bool = False
    lora_rank: int | None = None
    sync_backend: Backend = "gloo"
    trust_remote_code: bool = False

    @property
    def eager(self) -> bool:
        return self.device == "cpu" if self.enforce_eager is None else self.enforce_eager

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel_size if self.device == "cuda" else 0

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that must be set before vLLM is imported; its subprocesses inherit them.

        Idle OpenMP threads sleep rather than spin: the learner has the cores while the engine waits.
        """
        common = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "VLLM_CONFIGURE_LOGGING": "1"}
        if self.device == "cuda":
            return common
        return common | {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(self.num_threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": "0",
            "KMP_BLOCKTIME": "0",
        }
