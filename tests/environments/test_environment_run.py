"""Whole runs in one process whose episodes an environment plays: two turns, whole or token by token."""

import pyarrow.parquet
import pytest

from rl_cluster.errors import BadInputError
from tests.assembly.local_runs import run, settings


def game(**options):
    environment = {
        "function": "tests.environments.game_for_runs:make",
        "options": options,
        "max_episode_tokens": 12,
    }
    return settings(
        run={"steps": 8},
        rollout={"max_new_tokens": 3, "environment": environment},
        rewards={"scorers": [{"kind": "environment"}]},
        optimizer={"learning_rate": 1e-2},
    )


@pytest.mark.parametrize("wants_tokens", [False, True])
def test_a_run_learns_from_what_its_environment_pays(tmp_path, wants_tokens):
    folder = run(tmp_path / "run", game(wants_tokens=wants_tokens))
    rows = folder.read_metrics()
    assert [row["step"] for row in rows] == list(range(9))
    for row in rows[1:]:
        assert row["rewards/environment"] == pytest.approx(row["objective/scores"])
        assert 1 <= row["rewards/environment/turns"] <= 2
        assert row["health/logprob_gap_max"] < 1e-3
    assert rows[-1]["rewards/environment"] > rows[1]["rewards/environment"] + 0.3
    assert rows[-1]["eval/score_mean"] > rows[0]["eval/score_mean"]
    samples = [row for path in sorted(folder.path.rglob("*.parquet")) for row in _rows(path)]
    assert len(samples) == 8 * 16
    for sample in samples:
        _check_turns(sample)


def _rows(path):
    return pyarrow.parquet.read_table(path).to_pylist()


MINUS = 14


def _check_turns(sample):
    """Prompt, up to 3 drawn tokens, and, where there is a second turn, a minus sign that was not drawn."""
    mask = sample["action_mask"]
    prompt = mask.index(True)
    turns = "".join("x" if drawn else "." for drawn in mask[prompt:]).split(".")
    assert 1 <= len(turns) <= 2
    assert all(1 <= len(turn) <= 3 for turn in turns)
    observed = [token for token, drawn in zip(sample["tokens"], mask, strict=True) if not drawn]
    assert observed[prompt:] == [MINUS] * (len(turns) - 1)
    assert [version == -1 for version in sample["policy_versions"]] == [not drawn for drawn in mask]


def test_an_environment_that_cannot_be_made_is_refused_before_training(tmp_path):
    with pytest.raises(BadInputError, match=r"making the environment: TypeError.*doors"):
        run(tmp_path / "run", game(doors=2))


def test_a_function_that_is_not_there_is_refused_before_anything_starts(tmp_path):
    values = game()
    values["rollout"]["environment"]["function"] = "tests.environments.game_for_runs:nothing"
    with pytest.raises(
        BadInputError, match=r"^rollout\.environment\.function='.*: 'nothing' in .* is nothing"
    ):
        run(tmp_path / "run", values)
