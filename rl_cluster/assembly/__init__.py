"""A RunConfig in, running workers behind protocols out: the one place that sees both actors and learners."""

from rl_cluster.assembly.evaluate import evaluate
from rl_cluster.assembly.train import train

__all__ = ["evaluate", "train"]
