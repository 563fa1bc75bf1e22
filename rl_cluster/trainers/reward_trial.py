"""The reward functions that a caller handed over and a real prompt in; BadInputError for a wrong one, out.

Each is called once, with an empty response, in the caller's process and before any worker starts; the random
states that it may draw from are put back. As for recipes (rewards/trying.py) the call refuses only what real
responses could not mend; anything else it raises is a warning.
"""

from __future__ import annotations

import asyncio
import random
import traceback
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_cluster.errors import BadInputError
from rl_cluster.rewards.safe_text import error_text
from rl_cluster.rewards.trying import TRIAL, TRIAL_SECONDS, refusal_of
from rl_cluster.trainers.background import BackgroundLoop
from rl_cluster.trainers.reward_signatures import WrongAnswerError
from rl_cluster.trajectory import Prompt

HERE = Path(__file__).parents[1]


def try_rewards(functions: Mapping[str, Callable[..., Any]], prompt: Prompt) -> None:
    """functions: name -> scorer f(prompts, responses, metadata), asynchronous."""
    for name, function in functions.items():
        try:
            with _random_states_kept():
                _in_a_loop_of_its_own(_call(function, prompt))
        except WrongAnswerError as error:
            raise BadInputError(f"reward {name}, {TRIAL}: {error}") from error
        except Exception as error:
            if refusal := _refusal(error, prompt):
                raise BadInputError(f"reward {name}, {TRIAL}: {refusal}") from error
            warnings.warn(
                f"reward {name}, {TRIAL}, raised {error_text(error)}. The training goes on.", stacklevel=2
            )


def _in_a_loop_of_its_own(call: Coroutine[Any, Any, None]) -> None:
    """On a thread: a notebook's is already in an event loop."""
    background = BackgroundLoop()
    try:
        background.call(call)
    finally:
        background.close()


async def _call(function: Callable[..., Any], prompt: Prompt) -> None:
    await asyncio.wait_for(function([prompt.text], [""], [dict(prompt.metadata)]), TRIAL_SECONDS)


def _refusal(error: Exception, prompt: Prompt) -> str:
    """Of an error that the function could not even be entered for, or of a column that is not there."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, TypeError) and frames and Path(frames[-1].filename).is_relative_to(HERE):
        return f"{error_text(error)}."
    return refusal_of(error, prompt.metadata) if isinstance(error, KeyError) else ""


@contextmanager
def _random_states_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
