"""Errors in, words for the user and an exit code out."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from rl_cluster.errors import BadInputError, RLClusterError

FAILED, BAD_INPUT = 1, 2


def run_guarded(command: Callable[[], object]) -> None:
    """Run the command line and exit: 0 done, 2 bad input, 1 a failure with its cause first."""
    try:
        command()
    except BadInputError as error:
        _say("bad input", str(error))
        sys.exit(BAD_INPUT)
    except Exception as error:  # noqa: BLE001 — the last place before the user
        bad = bad_input_within(error)
        if bad is not None:
            _say("bad input", str(bad))
            sys.exit(BAD_INPUT)
        _say("failed", describe_failure(error))
        sys.exit(FAILED)


def bad_input_within(error: BaseException) -> BadInputError | None:
    """A BadInputError that a worker raised, which Ray wraps as a cause."""
    for link in _chain(error):
        if isinstance(link, BadInputError):
            return link
    return None


def describe_failure(error: BaseException) -> str:
    """The innermost cause first, then what it led to, then the log's path; a traceback for strange errors."""
    chain = _chain(error)
    ours = [link for link in chain if isinstance(link, RLClusterError)]
    cause = ours[-1] if ours else chain[-1]
    lines = [f"{type(cause).__name__}: {_text(cause)}"]
    lines += [f"which led to {type(link).__name__}: {_text(link)}" for link in chain if link is not cause][:3]
    log = next((link.log_path for link in chain if isinstance(link, LoggedFailure)), None)
    if log is not None:
        lines = [line for line in lines if not line.startswith("which led to LoggedFailure")]
        lines.append(f"The whole log: {log}")
    elif not ours:
        lines += ["", *traceback.format_exception(error)]
    return "\n".join(lines)


class LoggedFailure(Exception):  # noqa: N818 — the failure is the one it wraps
    """Wraps (as `raise … from error`) a failure whose traceback has been written to `log_path`."""

    def __init__(self, log_path: Path) -> None:
        super().__init__(str(log_path))
        self.log_path = log_path


def log_failure(log: Path, error: Exception) -> Exception:
    """Append the traceback to the run's log; the error itself where that is impossible (a full disk)."""
    try:
        with open(log, "a", encoding="utf-8") as file:
            file.write("".join(traceback.format_exception(error)))
    except OSError as problem:
        _say("no log", f"{log} cannot be written: {problem}")
        return error
    return LoggedFailure(log)


def _chain(error: BaseException) -> list[BaseException]:
    """The error and what caused it, outermost first."""
    links: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in links:
        links.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return links


def _text(error: BaseException) -> str:
    """The arguments of our errors are meant to be read; several are joined."""
    if len(error.args) > 1 and isinstance(error, RLClusterError):
        return ": ".join(str(argument) for argument in error.args)
    return str(error) or type(error).__name__


def _say(kind: str, text: str) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"{kind}:", style="bold red", end=" ")
    console.print(text, markup=False)
