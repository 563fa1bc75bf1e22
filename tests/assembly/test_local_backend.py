"""The local backend: the ordinary loop in one process; reproducible to the bit, learns, refuses the rest."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from learners.group import LearnerGroup
from rl_cluster.assembly.evaluate import evaluate
from rl_cluster.assembly.given import Given
from rl_cluster.errors import BadInputError, DeadlineError, ScorerError
from rl_cluster.run_folder.folder import RunFolder
from tests.assembly.local_runs import checked, opened, run, settings

EVERY_TWO = settings(checkpoint={"every": 2, "keep_last": 9}, eval={"every": 2, "num_prompts": 10})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """GRPO, four steps, a checkpoint and an evaluation after the second."""
    return run(tmp_path_factory.mktemp("runs") / "undisturbed", EVERY_TWO)


def weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(folder.model / "model.safetensors")


def same_bytes(one: RunFolder, other: RunFolder) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_the_same_run_twice_gives_the_same_weights_to_the_bit(undisturbed: RunFolder, tmp_path: Path) -> None:
    assert same_bytes(undisturbed, run(tmp_path / "again", EVERY_TWO))
    start = load_file(undisturbed.path / "start" / "scratch" / "model.safetensors")
    assert not all(torch.equal(start[name], tensor) for name, tensor in weights(undisturbed).items())


def test_a_resumed_run_ends_with_the_same_weights_to_the_bit(undisturbed: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(tmp_path / "resumed")
    shutil.copytree(undisturbed.path, copy.path)
    shutil.rmtree(copy.model)
    shutil.rmtree(copy.checkpoint(4))
    run(copy.path, EVERY_TWO, resume=True)
    assert same_bytes(undisturbed, copy)
    last = [folder.read_metrics()[-1] for folder in (undisturbed, copy)]
    assert last[0]["step"] == last[1]["step"] == 4
    assert last[0]["objective/scores"] == last[1]["objective/scores"]
    assert last[0]["eval/score_mean"] == last[1]["eval/score_mean"]
    assert json.loads(copy.ledger.read_text()) == json.loads(undisturbed.ledger.read_text())


def test_trajectories_metrics_and_ledger_are_those_of_any_run(undisturbed: RunFolder) -> None:
    rows = undisturbed.read_metrics()
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    for row in rows[1:]:
        assert row["async/lag_max"] == 0
        assert row["health/rss_bytes/local"] > 0
        assert row["perf/sync_pause_seconds"] == 0
    states = json.loads(undisturbed.ledger.read_text())
    assert [states[str(group)][0] for group in range(16)] == ["trained"] * 16
    table = pyarrow.parquet.read_table(undisturbed.trajectories / "step-4.parquet").to_pydict()
    assert {version for row in table["policy_versions"] for version in row} == {-1, 3}
    groups = np.array(table["group_id"])
    scores = np.array(table["score"])
    for group in set(groups.tolist()):  # GRPO's advantages, worked out anew
        mine = groups == group
        expected = (scores[mine] - scores[mine].mean()) / (scores[mine].std(ddof=1) + 1e-4)
        for row, value in zip(np.flatnonzero(mine), expected, strict=True):
            advantages = np.array(table["advantages"][row])[table["action_mask"][row]]
            np.testing.assert_allclose(advantages, value, rtol=1e-3, atol=1e-4)


def test_evaluating_the_exported_model_gives_the_numbers_of_the_last_evaluation(
    undisturbed: RunFolder, tmp_path: Path
) -> None:
    data = {**EVERY_TWO["data"], "max_prompt_tokens": 16}
    values = {**EVERY_TWO, "model": {"path": str(undisturbed.model)}, "data": data}
    metrics = evaluate(*checked(tmp_path / "evaluation", values))
    last = undisturbed.read_metrics()[-1]
    assert {name: last[name] for name in metrics} == metrics
    assert metrics["eval/score_mean"] != undisturbed.read_metrics()[0]["eval/score_mean"]


ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo, shared critic, reference": {
        "algorithm": {"name": "ppo", "num_epochs": 2, "num_mini_batches": 2},
    },
    "ppo, critic of its own, adapters": {
        "algorithm": {"name": "ppo", "num_epochs": 2, "critic": {"separate": True}},
        "model": {"lora": {"rank": 4}},
    },
    "rloo, adapters, reference": {
        "algorithm": {"name": "rloo", "num_epochs": 2},
        "model": {"lora": {"rank": 4}},
    },
}


async def test_truncated_sampling_leaves_log_probabilities_and_the_divergence_those_of_all_tokens(
    tmp_path: Path,
) -> None:
    algorithm = {"name": "reinforce", "loss": {"kind": "reinforce"}, "kl": {"coef": 0.1}}
    rollout = {"temperature": 0.8, "top_p": 0.5, "top_k": 4}
    values = settings(optimizer={"learning_rate": 1e-2}, rollout=rollout, algorithm=algorithm)
    open_run, prompts, observer = await opened(tmp_path / "run", values)
    try:
        await open_run.train(prompts, 2)
    finally:
        await open_run.close()
    for step in (1, 2):
        assert observer.rows[step]["health/logprob_gap_max"] < 1e-4
    assert observer.rows[1]["objective/kl"] == pytest.approx(0.0, abs=1e-4)
    assert abs(observer.rows[2]["objective/kl"]) > 1e-3


@pytest.mark.parametrize(("cap", "weighted"), [(None, True), ("off", False)])
async def test_in_bfloat16_tokens_are_weighted_by_learner_over_sampler_unless_it_is_off(
    cap: str | None, weighted: bool, tmp_path: Path
) -> None:
    values = settings(model={"dtype": "bfloat16"}, algorithm={"name": "rloo"})
    values["async"] = {"importance_cap": cap}
    open_run, prompts, observer = await opened(tmp_path / "run", values)
    try:
        await open_run.train(prompts, 1)
    finally:
        await open_run.close()
    average = observer.rows[1]["policy/importance_weight_avg"]
    assert (average is not None) == weighted
    if weighted:
        assert average == pytest.approx(1.0, abs=0.05)
        assert average != 1.0, "the sampler computes otherwise than the learner"


@pytest.mark.parametrize("name", ALGORITHMS)
async def test_sampler_and_learner_agree_before_and_after_updates(name: str, tmp_path: Path) -> None:
    values = settings(optimizer={"learning_rate": 1e-2}, rollout={"temperature": 0.8}, **ALGORITHMS[name])
    open_run, prompts, observer = await opened(tmp_path / "run", values)
    try:
        await open_run.train(prompts, 4)
        assert isinstance(open_run.cluster.workers.learner, LearnerGroup)
    finally:
        await open_run.close()
    rows = [observer.rows[step] for step in range(1, 5)]
    for row in rows:
        assert row["health/logprob_gap_max"] < 1e-4
    assert rows[0]["objective/kl"] == pytest.approx(0.0, abs=1e-5)
    assert abs(rows[-1]["objective/kl"]) > 1e-3


def test_a_task_that_depends_on_the_prompt_is_learned(tmp_path: Path) -> None:
    values = settings(
        run={"steps": 40, "seed": 1},
        data={"train": {"source": "addition", "num_digits": 1, "answer_digits": 2}, "held_out": 20},
        rewards={"scorers": [{"kind": "function", "function": "tests.assembly.local_scorers:echo"}]},
        batch={"prompts_per_step": 16, "samples_per_prompt": 16, "tokens_per_micro_batch": 4096},
        rollout={"max_new_tokens": 1},
        optimizer={"learning_rate": 1e-2},
        eval={"num_prompts": 20},
        log={"trajectories": False},
    )
    rows = run(tmp_path / "echo", values).read_metrics()
    assert rows[0]["eval/score_mean"] <= 0.2
    assert rows[-1]["eval/score_mean"] >= 0.6


async def test_callables_score_in_this_process_and_their_failures_stop_the_run(tmp_path: Path) -> None:
    before, threads = torch.get_num_threads(), threading.enumerate()
    torch.set_num_threads(2)  # the caller's, which the run of one thread gives back
    seen: list[str] = []

    def lengths(prompts: list[str], responses: list[str], metadata: list[Any]) -> list[float]:
        seen.extend(prompts)
        return [float(len(response)) for response in responses]

    def broken(prompts: list[str], responses: list[str], metadata: list[Any]) -> list[float]:
        raise ZeroDivisionError("mine")

    rewards = {
        "scorers": [{"kind": "callable", "name": "mine"}],
        "max_retries": 0,
        "max_failure_fraction": 0.0,
    }
    values = settings(rewards=rewards, data={"held_out": 0})
    open_run, prompts, observer = await opened(tmp_path / "good", values, Given(scorers={"mine": lengths}))
    try:
        assert torch.get_num_threads() == 1
        await open_run.train(prompts, 2)
    finally:
        await open_run.close()
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
    assert len(seen) == 2 * 16
    assert 0 < observer.rows[2]["rewards/mine"] <= 6
    open_run, prompts, _ = await opened(tmp_path / "bad", values, Given(scorers={"mine": broken}))
    try:
        with pytest.raises(ScorerError, match="ZeroDivisionError: mine"):
            await open_run.train(prompts, 2)
    finally:
        await open_run.close()
    assert not [t for t in threading.enumerate() if t not in threads and not t.daemon]


async def test_a_generation_that_takes_too_long_ends_between_two_tokens(tmp_path: Path) -> None:
    values = settings(
        model={"scratch": {**settings()["model"]["scratch"], "max_positions": 4096}},
        data={"held_out": 0},
        rollout={"max_new_tokens": 4000, "deadline_seconds": 0.01},
    )
    open_run, prompts, _ = await opened(tmp_path / "late", values)
    try:
        with pytest.raises(DeadlineError, match=r"rollout\.deadline_seconds=0\.01"):
            await open_run.train(prompts, 1)
    finally:
        await open_run.close()


BAD = [
    ({"learner": {"num_ranks": 2}}, "learner.num_ranks = 2"),
    ({"rollout": {"num_workers": 2}}, "rollout.num_workers = 2"),
    ({"rollout": {"tensor_parallel_size": 2}}, "rollout.tensor_parallel_size = 2"),
    ({"cluster": {"num_nodes": 2}}, "cluster.num_nodes = 2"),
    ({"cluster": {"colocate": True}}, "cluster.colocate = true"),
    ({"async": {"max_policy_lag": 1}}, "async.max_policy_lag = 1"),
    ({"learner": {"offload_optimizer": True}}, "learner.offload_optimizer = true"),
    ({"sync": {"backend": "gloo"}}, 'sync.backend = "gloo"'),
    ({"cluster": {"backend": "process"}}, 'cluster.backend = "process"'),
]


@pytest.mark.parametrize(("sections", "shown"), BAD)
def test_what_one_process_cannot_do_is_refused_with_a_remedy(
    sections: dict[str, Any], shown: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInputError) as caught:
        run(tmp_path / "bad", settings(**sections))
    assert shown in str(caught.value)
    assert any(word in str(caught.value) for word in ("cluster.backend=ray", "Choose one of"))
    assert not (tmp_path / "bad").exists()


def test_the_local_backend_needs_neither_ray_nor_vllm() -> None:
    code = (
        "import sys, rl_cluster.assembly.local, rl_cluster.assembly.train, rl_cluster.assembly.evaluate; "
        "print([name for name in ('ray', 'vllm', 'deepspeed') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
