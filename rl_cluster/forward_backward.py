"""The pipeline under the import path that the source documents use; all of it is rl_cluster.pipeline."""

from rl_cluster.pipeline import (
    AsyncTrainingClient,
    AsyncTrainingFuture,
    ForwardBackwardOutput,
    ForwardBackwardPipeline,
    OptimStepOutput,
    WeightedLoss,
)

__all__ = [
    "AsyncTrainingClient",
    "AsyncTrainingFuture",
    "ForwardBackwardOutput",
    "ForwardBackwardPipeline",
    "OptimStepOutput",
    "WeightedLoss",
]
