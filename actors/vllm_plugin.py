"""What runs inside vLLM's own processes: registers the gloo weight-transfer engine, adds worker methods.

`register` is the entry point `rl_cluster_gloo` of `vllm.general_plugins`. The worker extension registers
too, so that a checkout that is not installed works as well.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

BACKEND = "gloo"
OWNER_VARIABLE = "RL_CLUSTER_ENGINE_OWNER"
"""Process id of the process that made the engine; its subprocesses must not outlive it."""


def end_with_owner() -> None:
    """In a child of the owner: be killed when the owner ends, however it ends (vLLM's core would live on)."""
    owner = os.environ.get(OWNER_VARIABLE)
    if sys.platform == "linux" and owner is not None and os.getppid() == int(owner):
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def register() -> None:
    """Make `WeightTransferConfig(backend="gloo")` known; may be called any number of times."""
    end_with_owner()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "actors.weight_receiver", "GlooWeightTransferEngine"
        )


class WorkerExtension:
    """Mixed into vLLM's worker class (`worker_extension_cls`); called by collective_rpc."""

    def watch_loading(self, version: int) -> None:
        """The tensors of `version` come now."""
        if not hasattr(self, "_served"):
            from actors.served_weights import ServedWeights

            model = self.model_runner.get_model()  # type: ignore[attr-defined]
            alone = self.parallel_config.world_size == 1  # type: ignore[attr-defined]
            self._served = ServedWeights(model, whole=alone)
        self._served.watch(version)

    def proof_of_loading(self) -> dict[str, Any]:
        """What was loaded since, and whether this worker serves it: see ServedWeights.proof."""
        return self._served.proof()

    def abandon_weight_update(self) -> None:
        """Put the model's tensors back in order after an update broke off, so that the next can begin.

        The weights are then a mixture: the engine must not serve until a complete update.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        receiver = self.weight_transfer_engine  # type: ignore[attr-defined]
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            finalize_layerwise_reload(receiver.model, receiver.model_config)
        self._weight_update_active = False

    def report_whole_logprobs(self) -> bool:
        """Whether log-probabilities are now those among all tokens, whatever top-k and top-p leave."""
        from actors.vllm_logprobs import report_whole_logprobs

        return report_whole_logprobs(self.model_runner.sampler)  # type: ignore[attr-defined]

    def memory_bytes(self) -> int:
        """Resident memory of this worker process."""
        import psutil

        return int(psutil.Process().memory_info().rss)


register()
