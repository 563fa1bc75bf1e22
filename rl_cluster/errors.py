"""Every error that the project raises on purpose; all of them pickle, because they cross processes."""

from __future__ import annotations


class RLClusterError(Exception):
    """Root of the tree. `launch.py` prints it without a traceback and exits with 1."""

    def __reduce__(self) -> tuple[type[RLClusterError], tuple[object, ...]]:
        return (type(self), self.args)


class BadInputError(RLClusterError, ValueError):
    """The user gave something that cannot work; `launch.py` exits with 2.

    The message names the field (or file and line), the value and the remedy.
    """


class _NamedError(RLClusterError):
    """args: (who, cause)."""

    def __str__(self) -> str:
        return ": ".join(str(part) for part in self.args)


class ScorerError(_NamedError):
    """A scorer raised, timed out, or answered with NaN or a wrong length. args: (scorer, cause)."""


class EpisodeError(RLClusterError):
    """An environment raised, hung, or paid what is no number. args: (kind, message, its traceback or "").

    kind: raised, timeout or not_finite, as in ScoreFailure.
    """

    def __str__(self) -> str:
        kind, message, _ = self.args
        return f"environment: {kind}: {message}"


class WorkerDiedError(_NamedError):
    """A Ray worker ended without being asked to. args: (worker name, cause)."""


class DeadlineError(RLClusterError):
    """Something did not happen in time. The message says what, after how long, and who is missing."""


class WeightSyncError(RLClusterError):
    """Publishing weights failed, or an engine does not serve the version that it should."""


class HealthError(RLClusterError):
    """A run that went on would train on rubbish: a limit of the section `health` was crossed."""


class CheckpointError(RLClusterError):
    """A checkpoint, or another file of the run, could not be written or read; earlier ones are untouched."""


class NoSignalError(RLClusterError):
    """So many groups in a row were dropped that no batch can be formed."""


class PipelineError(RLClusterError):
    """A call on a ForwardBackwardPipeline failed; the model is as it was before the call."""


class ResultTimeoutError(DeadlineError, TimeoutError):
    """`future.result(timeout)` gave up waiting; the call itself goes on."""


class NonFiniteError(HealthError):
    """NaN or infinity where a number must be: in logits that are sampled from, in weights that shall be kept,
    or in so many updates in a row that training has come to nothing."""
