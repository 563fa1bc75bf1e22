"""What an episode is written down in: who made each token, with what probability, under which weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from actors.transcript import Transcript, turn_seed
from rl_cluster.trajectory import FinishReason

EOS = 9


@dataclass(frozen=True)
class Drawn:
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason = "stop"


class Text:
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return " ".join(str(t) for t in token_ids if not (skip_special_tokens and t == EOS))


def drawn(*tokens: int, versions: Sequence[int]) -> Drawn:
    numbers = np.array(tokens, dtype=np.int32)
    return Drawn(numbers, -0.1 * numbers.astype(np.float32), np.array(versions, dtype=np.int32))


def test_each_token_keeps_the_version_that_drew_it() -> None:
    transcript = Transcript(tokens=[])
    transcript.observe([1, 2])
    transcript.act(drawn(3, 4, 5, versions=[0, 0, 1]))
    transcript.observe([6])
    transcript.act(drawn(7, EOS, versions=[1, 2]))
    trajectory = transcript.trajectory(Text(), 2, frozenset([EOS]), "stop")
    assert trajectory.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, EOS]
    assert trajectory.action_mask.tolist() == [False, False, True, True, True, False, True, True]
    assert trajectory.policy_versions.tolist() == [-1, -1, 0, 0, 1, -1, 1, 2]
    assert trajectory.behaviour_logprobs == pytest.approx([0, 0, -0.3, -0.4, -0.5, 0, -0.7, -0.9])
    assert trajectory.response_text == "3 4 5 6 7"
    assert trajectory.ended_with_eos


def test_what_the_policy_drew_after_the_end_is_left_out_of_every_column() -> None:
    transcript = Transcript(tokens=[])
    transcript.observe([1])
    transcript.act(drawn(3, 4, EOS, versions=[5, 6, 7]), taken=2)
    trajectory = transcript.trajectory(Text(), 1, frozenset([EOS]), "length")
    assert trajectory.tokens.tolist() == [1, 3, 4]
    assert trajectory.policy_versions.tolist() == [-1, 5, 6]
    assert trajectory.behaviour_logprobs == pytest.approx([0, -0.3, -0.4])
    assert not trajectory.ended_with_eos


@pytest.mark.parametrize(
    ("last_of_policy", "last_of_environment", "ended"),
    [((4, EOS), (), True), ((4, 5), (), False), ((4, 5), (8, EOS), False), ((4, EOS), (8,), False)],
    ids=["its own end", "no end", "the environment's end", "an end that something followed"],
)
def test_only_an_end_that_the_policy_drew_last_counts_as_its_own(
    last_of_policy: tuple[int, ...], last_of_environment: tuple[int, ...], ended: bool
) -> None:
    transcript = Transcript(tokens=[])
    transcript.observe([1, EOS])
    transcript.act(drawn(*last_of_policy, versions=[0] * len(last_of_policy)))
    transcript.observe(last_of_environment)
    trajectory = transcript.trajectory(Text(), 2, frozenset([EOS]), "stop")
    assert trajectory.ended_with_eos is ended


def test_any_of_several_end_tokens_is_an_end() -> None:
    for end in (7, 8):
        transcript = Transcript(tokens=[])
        transcript.observe([1])
        transcript.act(drawn(4, end, versions=[0, 0]))
        assert transcript.trajectory(Text(), 1, frozenset([7, 8]), "stop").ended_with_eos


def test_the_seeds_of_turns_differ_from_each_other_and_between_episodes() -> None:
    assert turn_seed(5, 0) == 5
    seeds = [turn_seed(seed, turn) for seed in (5, 6, 55) for turn in range(4)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert turn_seed(5, 3) == turn_seed(5, 3)
