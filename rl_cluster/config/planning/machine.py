"""What the run may use: the configuration and this machine in, a Machine out, without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

import psutil

from rl_cluster.config.run import ClusterConfig

GIB = 2**30
ASSUMED_GPU_MEMORY = 80 * GIB
"""Planning for GPUs that are not in this machine, without cluster.gpu_memory_gib."""


@dataclass(frozen=True)
class Machine:
    """One node of `num_nodes` equal ones. cores: what this process may use. memory in bytes.

    described: the numbers are the configuration's (another machine is planned for), not measured here.
    """

    cores: int
    memory: int
    gpus: int
    gpu_memory: int
    num_nodes: int = 1
    described: bool = False

    @property
    def total_gpus(self) -> int:
        return self.gpus * self.num_nodes

    @property
    def total_cores(self) -> int:
        return self.cores * self.num_nodes


def find_machine(cluster: ClusterConfig) -> Machine:
    """Measure this machine; what the configuration says of the nodes takes precedence."""
    memories = _gpu_memories()
    gpus = len(memories) if cluster.num_gpus_per_node is None else cluster.num_gpus_per_node
    gpu_memory = min(memories) if memories else ASSUMED_GPU_MEMORY
    if cluster.gpu_memory_gib is not None:
        gpu_memory = int(cluster.gpu_memory_gib * GIB)
    return Machine(
        cores=cluster.num_cpus_per_node or len(os.sched_getaffinity(0)),
        memory=_memory(),
        gpus=0 if cluster.device == "cpu" else gpus,
        gpu_memory=gpu_memory,
        num_nodes=cluster.num_nodes,
        described=cluster.num_gpus_per_node is not None or cluster.num_cpus_per_node is not None,
    )


def _memory() -> int:
    """Bytes of memory, or the container's limit where that is less."""
    total = int(psutil.virtual_memory().total)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                limit = file.read().strip()
        except OSError:  # no such control group on this kernel
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def _gpu_memories() -> list[int]:
    """Bytes of each visible GPU; asks the driver's own tool, so that torch need not be imported."""
    tool = shutil.which("nvidia-smi")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if tool is None or visible == "":
        return []
    command = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # a tool without a working driver: no GPU
        return []
    found = [int(float(line)) * 2**20 for line in answer.splitlines() if line.strip()[:1].isdigit()]
    return found if visible is None else found[: len(visible.split(","))]
