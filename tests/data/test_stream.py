from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rl_cluster.data.randomness import permutation
from rl_cluster.data.stream import PromptStream
from rl_cluster.errors import BadInputError
from rl_cluster.trajectory import Prompt


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", np.array([i, i + 1], dtype=np.int32), f"text {i}") for i in range(count)]


def take_ids(stream: PromptStream, count: int) -> list[str]:
    return [stream.take()[1].prompt_id for _ in range(count)]


def test_every_epoch_gives_every_prompt_once_in_an_order_of_its_own() -> None:
    stream = PromptStream(make_prompts(20), seed=3)
    first, second = take_ids(stream, 20), take_ids(stream, 20)
    assert sorted(first) == sorted(second) == sorted(f"p{i}" for i in range(20))
    assert first != second
    assert first == [f"p{i}" for i in permutation(20, "epoch", 3, 0)]


def test_group_ids_are_positions_and_find_their_prompt_again() -> None:
    stream = PromptStream(make_prompts(7), seed=3)
    taken = [stream.take() for _ in range(30)]
    assert [group_id for group_id, _ in taken] == list(range(30))
    fresh = PromptStream(make_prompts(7), seed=3)
    for group_id, prompt in reversed(taken):
        assert fresh.prompt_at(group_id).prompt_id == prompt.prompt_id
    assert fresh.position == 0


def test_a_restored_stream_goes_on_where_the_saved_one_would_have() -> None:
    original = PromptStream(make_prompts(5), seed=3)
    take_ids(original, 12)
    state = original.state()
    resumed = PromptStream(make_prompts(5), seed=3)
    resumed.load_state(state)
    assert [resumed.take()[0] for _ in range(3)] == [12, 13, 14]
    take_ids(original, 3)
    assert take_ids(resumed, 20) == take_ids(original, 20)
    assert original.epoch == 7.0


def test_another_seed_gives_another_order_and_no_shuffle_gives_the_files_order() -> None:
    orders = {tuple(take_ids(PromptStream(make_prompts(20), seed), 20)) for seed in range(10)}
    assert len(orders) == 10
    plain = PromptStream(make_prompts(3), seed=9, shuffle=False)
    assert take_ids(plain, 7) == ["p0", "p1", "p2", "p0", "p1", "p2", "p0"]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (PromptStream(make_prompts(5), seed=4), "seed=4"),
        (PromptStream(make_prompts(6), seed=3), "num_prompts=6"),
        (PromptStream(make_prompts(5), seed=3, shuffle=False), "shuffle=False"),
        (PromptStream([*make_prompts(4), *make_prompts(1)], seed=3), "fingerprint="),
    ],
)
def test_a_state_of_other_data_or_another_seed_is_refused(other: PromptStream, named: str) -> None:
    with pytest.raises(BadInputError, match=named):
        PromptStream(make_prompts(5), seed=3).load_state(other.state())


def moved(prompts: list[Prompt], **columns: Any) -> list[Prompt]:
    """The same rows, read from another place; columns: added to the first row's."""
    first, *rest = [replace(prompt, prompt_id=f"/elsewhere/{prompt.prompt_id}") for prompt in prompts]
    return [replace(first, metadata={**first.metadata, **columns}), *rest]


def test_rows_from_another_place_are_the_same_data_and_another_column_is_not() -> None:
    rows = [replace(p, metadata={"answer": str(i), "n": np.int64(i)}) for i, p in enumerate(make_prompts(5))]
    state = PromptStream(rows, seed=3).state()
    PromptStream(moved(rows), seed=3).load_state(state)
    PromptStream(moved(rows, n=0), seed=3).load_state(state)
    for columns in ({"answer": "9"}, {"hint": "x"}, {"n": 1}):
        with pytest.raises(BadInputError, match=r"begins with /elsewhere/p0.*fingerprint=.*may not change"):
            PromptStream(moved(rows, **columns), seed=3).load_state(state)


def test_the_fingerprint_of_objects_does_not_depend_on_the_process() -> None:
    streams = [PromptStream(moved(make_prompts(2), tool=object(), size={1, 2}), seed=3) for _ in range(2)]
    streams[0].load_state(streams[1].state())


def test_a_checkpoint_whose_fingerprint_holds_the_places_is_gone_on_from_while_the_data_lie_there() -> None:
    prompts = make_prompts(3)
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(prompt.prompt_id.encode() + b"\0" + str(len(prompt.tokens)).encode() + b"\0")
        digest.update(b"".join(int(token).to_bytes(4, "little") for token in prompt.tokens))
    state = {**PromptStream(prompts, seed=3).state(), "fingerprint": digest.hexdigest(), "position": 2}
    stream = PromptStream(prompts, seed=3)
    stream.load_state(state)
    assert stream.position == 2
    with pytest.raises(BadInputError, match="fingerprint="):
        PromptStream(moved(prompts), seed=3).load_state(state)


def test_no_prompts_at_all_are_refused() -> None:
    with pytest.raises(BadInputError, match="no prompt to train on"):
        PromptStream([], seed=0)
