"""Real Ray, vLLM and DeepSpeed: reproducible to the bit, several workers of each kind, every algorithm."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

from actors.reference_model import ReferenceModel, ReferenceSpec
from actors.reference_worker import ReferenceHandle
from rl_cluster.errors import ScorerError
from rl_cluster.run_folder.folder import RunFolder
from tests.stack.runs import run, same_bytes, settings, weights

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600), pytest.mark.usefixtures("ray_session")]

EVERY_STEP = {
    "eps",
    "episode",
    "lr",
    "objective/kl",
    "objective/entropy",
    "objective/non_score_reward",
    "objective/rlhf_reward",
    "objective/scores",
    "policy/approxkl_avg",
    "policy/clipfrac_avg",
    "loss/policy_avg",
    "loss/value_avg",
    "val/clipfrac_avg",
    "policy/entropy_avg",
    "val/ratio",
    "val/ratio_var",
    "val/num_eos_tokens",
    "rewards/share_of_digits",
    "rewards/share_of_digits/length",
    "step",
    "time",
    "perf/step_seconds",
    "perf/generate_seconds",
    "perf/score_seconds",
    "perf/reference_seconds",
    "perf/train_seconds",
    "perf/sync_seconds",
    "perf/generated_tokens_per_second",
    "perf/trained_tokens_per_second",
    "health/logprob_gap_mean",
    "health/logprob_gap_max",
    "health/rss_bytes/rollout-0",
    "health/rss_bytes/learner-0",
}

EVALUATED = {"eval/score_mean", "eval/accuracy", "eval/mean_length", "eval/pass@1"}

SYNCHRONOUS = settings(checkpoint={"every": 2, "keep_last": 9}, eval={"every": 2, "num_prompts": 10})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> RunFolder:
    """A synchronous GRPO run of four steps with a checkpoint after the second."""
    return run(tmp_path_factory.mktemp("runs") / "undisturbed", SYNCHRONOUS)


def test_the_same_run_twice_in_a_row_gives_the_same_weights_to_the_bit(
    undisturbed: RunFolder, tmp_path: Path
) -> None:
    again = run(tmp_path / "again", SYNCHRONOUS)
    assert same_bytes(weights(undisturbed), weights(again))
    assert not same_bytes(weights(undisturbed), load_start(undisturbed)), "it has trained"
    for step in (1, 4):
        ours, theirs = (
            pyarrow.parquet.read_table(folder.trajectories / f"step-{step}.parquet")
            for folder in (undisturbed, again)
        )
        assert ours.equals(theirs)


def test_learner_and_engine_agree_before_and_after_three_published_updates(undisturbed: RunFolder) -> None:
    """On the same tokens: the engine's log-probabilities, the learner's, and for the first weights those of
    transformers, row by row."""
    from transformers import AutoModelForCausalLM

    tables = [
        pyarrow.parquet.read_table(undisturbed.trajectories / f"step-{step}.parquet").to_pydict()
        for step in (1, 2, 3, 4)
    ]
    for version, table in enumerate(tables):
        assert {v for row in table["policy_versions"] for v in row} == {-1, version}
    gaps = [row["health/logprob_gap_max"] for row in undisturbed.read_metrics()[1:]]
    assert len(gaps) == 4
    assert max(gaps) < 1e-4
    model = AutoModelForCausalLM.from_pretrained(undisturbed.path / "start" / "scratch", dtype=torch.float32)
    for table, agree in ((tables[0], True), (tables[3], False)):
        gap = 0.0
        for tokens, mask, found in zip(
            table["tokens"], table["action_mask"], table["behaviour_logprobs"], strict=True
        ):
            with torch.no_grad():
                logprobs = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1], -1)
            expected = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
            drawn = torch.tensor(mask[1:])
            gap = max(gap, float((expected - torch.tensor(found[1:]))[drawn].abs().max()))
        assert (gap < 1e-4) is agree, f"{gap}: the fourth batch comes from other weights than the first"


def test_two_rollout_workers_give_the_same_weights_to_the_bit(undisturbed: RunFolder, tmp_path: Path) -> None:
    values = settings(
        checkpoint={"every": 2, "keep_last": 9},
        eval={"every": 2, "num_prompts": 10},
        rollout={**SYNCHRONOUS["rollout"], "num_workers": 2},
    )
    other = run(tmp_path / "two", values)
    assert same_bytes(weights(undisturbed), weights(other))
    loaded = {row["step"]: row for row in other.read_metrics()}
    for row in undisturbed.read_metrics():
        for name in ("objective/scores", "eval/score_mean", "loss/policy_avg", "health/logprob_gap_max"):
            assert row.get(name) == loaded[row["step"]].get(name), f"step {row['step']}: {name}"
    assert {"health/rss_bytes/rollout-0", "health/rss_bytes/rollout-1"} <= loaded[4].keys()


def test_a_resumed_run_ends_with_the_same_weights_to_the_bit(undisturbed: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(tmp_path / "resumed")
    shutil.copytree(undisturbed.path, copy.path)
    shutil.rmtree(copy.model)
    shutil.rmtree(copy.checkpoint(4))
    run(copy.path, SYNCHRONOUS, resume=True)
    assert same_bytes(weights(undisturbed), weights(copy))
    last = [folder.read_metrics()[-1] for folder in (undisturbed, copy)]
    assert last[0]["step"] == last[1]["step"] == 4
    assert last[0]["objective/scores"] == last[1]["objective/scores"]
    assert json.loads(copy.ledger.read_text()) == json.loads(undisturbed.ledger.read_text())


def test_the_run_folder_holds_metrics_trajectories_ledger_and_a_model_that_loads(
    undisturbed: RunFolder,
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = undisturbed.read_metrics()
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    for row in rows[1:]:
        assert row.keys() >= EVERY_STEP
        assert (row.keys() >= EVALUATED) == (row["step"] in (2, 4))
        assert row["health/logprob_gap_max"] < 1e-4
        assert row["async/lag_max"] == 0
    table = pyarrow.parquet.read_table(undisturbed.trajectories / "step-4.parquet").to_pydict()
    assert len(table["tokens"]) == 16
    assert {version for row in table["policy_versions"] for version in row} == {-1, 3}
    states = json.loads(undisturbed.ledger.read_text())
    assert [states[str(group)][0] for group in range(16)] == ["trained"] * 16
    model = AutoModelForCausalLM.from_pretrained(undisturbed.model)
    tokenizer = AutoTokenizer.from_pretrained(undisturbed.model)
    prompt = tokenizer("12+34=", return_tensors="pt")["input_ids"]
    answer = model.generate(prompt, max_new_tokens=3, do_sample=False)
    assert answer.shape[1] > prompt.shape[1]
    assert (undisturbed.model / "README.md").read_text().startswith("---\nlibrary_name: transformers")


@pytest.fixture
def reference_checksums(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """SHA-256 of the reference's parameters: after its start, and before its end."""
    import ray

    found: list[str] = []
    start, close = ReferenceHandle.start, ReferenceHandle.close

    async def started(self: ReferenceHandle) -> int:
        pid = await start(self)
        found.append(await self.checksum())
        return pid

    def closing(self: ReferenceHandle) -> None:
        found.append(ray.get(self._actor.checksum.remote(), timeout=60))
        close(self)

    monkeypatch.setattr(ReferenceHandle, "start", started)
    monkeypatch.setattr(ReferenceHandle, "close", closing)
    return found


def test_ppo_with_two_ranks_two_engines_a_lag_of_one_and_a_reference_that_stays_bit_identical(
    tmp_path: Path, reference_checksums: list[str]
) -> None:
    algorithm: dict[str, Any] = {
        "name": "ppo",
        "num_epochs": 2,
        "num_mini_batches": 2,
        "kl": {"coef": 0.05, "place": "reward_token", "estimator": "k1", "controller": "adaptive"},
    }
    values = settings(
        algorithm=algorithm,
        learner={"num_ranks": 2, "zero_stage": 3},
        rollout={**SYNCHRONOUS["rollout"], "num_workers": 2},
        **{"async": {"max_policy_lag": 1}},
    )
    folder = run(tmp_path / "ppo", values)
    rows = folder.read_metrics()[1:]
    states = json.loads(folder.ledger.read_text())
    assert [states[str(group)][0] for group in range(16)] == ["trained"] * 16
    assert max(row["async/lag_max"] for row in rows) <= 1
    for row in rows:
        assert row["loss/value_avg"] > 0
        assert row["val/ratio"] == pytest.approx(1.0, abs=0.5)
        assert math.isfinite(row["objective/kl"])
        assert row["objective/rlhf_reward"] == pytest.approx(
            row["objective/scores"] + row["objective/non_score_reward"]
        )
    assert rows[-1]["objective/kl_coef"] != rows[0]["objective/kl_coef"]
    assert {"health/rss_bytes/learner-0", "health/rss_bytes/learner-1"} <= rows[-1].keys()
    start = ReferenceModel(ReferenceSpec(str(folder.path / "start" / "scratch"))).checksum()
    assert reference_checksums == [start, start]
    assert not same_bytes(load_start(folder), weights(folder)), "while the policy has moved"


def test_ppo_with_a_separate_critic_that_warms_up(tmp_path: Path) -> None:
    algorithm = {"name": "ppo", "num_epochs": 1, "critic": {"separate": True, "warmup_steps": 3}}
    folder = run(tmp_path / "critic", settings(algorithm=algorithm, run={"steps": 4, "seed": 3}))
    rows = folder.read_metrics()[1:]
    assert [row["lr"] is None for row in rows] == [True, True, True, False]
    assert rows[2]["loss/value_avg"] < rows[0]["loss/value_avg"]
    start = load_start(folder)
    assert not same_bytes(start, weights(folder))


def test_rloo_trains_and_publishes_adapters_only(tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    values = settings(
        algorithm={"name": "rloo", "kl": {"coef": 0.05, "place": "reward_sequence", "estimator": "k1"}},
        model={**SYNCHRONOUS["model"], "lora": {"rank": 8, "alpha": 16.0}},
        learner={"zero_stage": 2},
    )
    folder = run(tmp_path / "lora", values)
    rows = folder.read_metrics()[1:]
    assert rows[0]["objective/kl"] == pytest.approx(0.0, abs=1e-5)
    assert abs(rows[-1]["objective/kl"]) > 1e-4
    assert max(row["health/logprob_gap_max"] for row in rows) < 1e-3
    adapter = AutoPeftModelForCausalLM.from_pretrained(folder.model)
    trained = {name for name, _ in adapter.named_parameters() if "lora_" in name}
    assert trained
    assert all(torch.isfinite(p).all() for p in adapter.parameters())


def test_a_scorer_that_always_raises_stops_the_run_with_its_traceback(tmp_path: Path) -> None:
    values = settings(
        rewards={
            "scorers": [{"kind": "function", "function": "tests.stack.scorers:broken"}],
            "max_retries": 0,
            "max_failure_fraction": 0.05,
        },
        data={**SYNCHRONOUS["data"], "held_out": 0},
        eval={},
    )
    with pytest.raises(ScorerError, match="ZeroDivisionError"):
        run(tmp_path / "broken", values)
    assert not (tmp_path / "broken" / "model").exists()


def load_start(folder: RunFolder) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder.path / "start" / "scratch" / "model.safetensors")
