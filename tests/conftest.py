"""Fixtures that several test folders share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_cluster.trajectory import Prompt, Trajectory, TrajectoryGroup
from tests.durations import LONG, SLOW

MakeGroup = Callable[..., TrajectoryGroup]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The markers slow and long, from tests/durations.py."""
    for item in items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        for marker, listed in (("slow", SLOW), ("long", LONG)):
            if name in listed or name.partition("::")[0] in listed:
                item.add_marker(marker)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray for the whole test session, with Ray's default token authentication, ended afterwards."""
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init(num_cpus=2, include_dashboard=False, address="local", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def char_tokenizer() -> Any:
    """One token per character of arithmetic; <pad> 0, <eos> 1, 64 positions."""
    from rl_cluster.modeling.scratch import build_tokenizer

    return build_tokenizer("0123456789+-*/=() ", 64)


@pytest.fixture(scope="session")
def make_group(char_tokenizer: Any) -> MakeGroup:
    def make(prompt: str, responses: Sequence[str], group_id: int = 0, **metadata: Any) -> TrajectoryGroup:
        prompt_ids = char_tokenizer(prompt)["input_ids"]
        trajectories = []
        for text in responses:
            ids = char_tokenizer(text)["input_ids"] + [char_tokenizer.eos_token_id]
            tokens = np.array(prompt_ids + ids, dtype=np.int32)
            mask = np.arange(len(tokens)) >= len(prompt_ids)
            trajectories.append(
                Trajectory(
                    tokens=tokens,
                    action_mask=mask,
                    behaviour_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
                    policy_versions=np.where(mask, 0, -1).astype(np.int32),
                    finish_reason="stop",
                    response_text=text,
                    ended_with_eos=True,
                )
            )
        row = Prompt(f"prompt {group_id}", np.array(prompt_ids, dtype=np.int32), prompt, metadata)
        return TrajectoryGroup(group_id, row, tuple(trajectories))

    return make


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small stand-ins for the models that the documents name."""
    from tests.seed_documents.stage import save_models

    folder = tmp_path_factory.mktemp("tiny-models")
    save_models(folder)
    return folder
