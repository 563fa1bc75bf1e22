"""Queued forward-backward, optimizer, sampling and checkpoint calls on one model, in the manner of Tinker."""

from rl_cluster.pipeline.client import AsyncTrainingClient
from rl_cluster.pipeline.future import AsyncTrainingFuture
from rl_cluster.pipeline.learner_backend import LearnerBackend
from rl_cluster.pipeline.outputs import ForwardBackwardOutput, OptimStepOutput, WeightedLoss
from rl_cluster.pipeline.pipeline import ForwardBackwardPipeline

__all__ = [
    "AsyncTrainingClient",
    "AsyncTrainingFuture",
    "ForwardBackwardOutput",
    "ForwardBackwardPipeline",
    "LearnerBackend",
    "OptimStepOutput",
    "WeightedLoss",
]
