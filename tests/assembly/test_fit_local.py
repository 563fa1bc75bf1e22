"""Whole fits in this process: every objective learns, a resumed run equals an uninterrupted one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_cluster.assembly.fit import FitResult, fit
from rl_cluster.config.fit import FitConfig
from rl_cluster.config.reading.load import load_as, parse_as
from rl_cluster.errors import BadInputError, CheckpointError
from rl_cluster.loop.hooks import Wishes

SCRATCH = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "max_positions": 32}
PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"{a + b}{b % 10}"}
    for a in range(9)
    for b in range(8)
]
ROWS: dict[str, list[dict[str, Any]]] = {
    "dpo": PAIRS,
    "orpo": PAIRS,
    "reward": PAIRS,
    "sft": [{"prompt": r["prompt"], "completion": r["chosen"]} for r in PAIRS],
    "kto": [
        {"prompt": r["prompt"], "completion": r[side], "label": side == "chosen"}
        for r in PAIRS[:40]
        for side in ("chosen", "rejected")
    ],
}


def settings(name: str, folder: Path, **sections: Mapping[str, Any]) -> FitConfig:
    base: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder), "epochs": 2},
        "model": {"scratch": SCRATCH},
        "data": {"source": "given", "held_out": 8},
        "objective": {"name": name},
        "batch": {"rows_per_step": 10, "tokens_per_micro_batch": 128},
        "optimizer": {"learning_rate": 5e-3},
        "cluster": {"backend": "local", "device": "cpu", "cpus_per_worker": 1},
        "log": {"progress": "none", "tensorboard": False},
    }
    merged = {key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}}
    return parse_as(FitConfig, merged)


def run(name: str, folder: Path, resume: Path | None = None, hooks: Any = (), **sections: Any) -> FitResult:
    return fit(settings(name, folder, **sections), rows=ROWS[name], resume=resume, hooks=hooks)


def losses(result: FitResult) -> list[float]:
    return [row["train/loss"] for row in result.metrics if "train/loss" in row]


@pytest.mark.parametrize("name", list(ROWS))
def test_every_objective_lowers_its_held_out_loss(name: str, tmp_path: Path) -> None:
    result = run(name, tmp_path / name, run={"dir": str(tmp_path / name), "epochs": 3})
    assert result.last["eval/loss"] is not None
    assert result.last["eval/loss"] < result.metrics[0]["eval/loss"] - 0.02
    if name in ("dpo", "orpo", "reward"):
        assert result.last["eval/accuracy"] is not None
        assert result.last["eval/accuracy"] >= 0.8
    card = (result.model / "README.md").read_text()
    assert f"trained with {name.upper()}" in card
    assert load_as(FitConfig, result.folder / "config.yaml").objective.name == name


def test_the_result_is_an_ordinary_model_with_its_tokenizer(tmp_path: Path) -> None:
    """Plain transformers finds the held-out loss that the run reported last: nats per token, end included."""
    result = run("sft", tmp_path / "run", run={"dir": str(tmp_path / "run"), "steps": 2})
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    model = AutoModelForCausalLM.from_pretrained(result.model)
    nats, count = 0.0, 0
    for row in ROWS["sft"][-8:]:
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        nats -= float(sum(logprobs[len(prompt) - 1 + i, token] for i, token in enumerate(answer)))
        count += len(answer)
    assert result.last["eval/loss"] == pytest.approx(nats / count, rel=1e-5)
    start = load_file(result.folder / "start" / "scratch" / "model.safetensors")
    moved = load_file(result.model / "model.safetensors")
    assert any(not torch.equal(start[name], moved[name]) for name in start)
    assert json.loads((result.folder / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2


class StopAt:
    """A hook that ends the run after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_begin(self, step: int, last_step: int, folder: Path) -> None: ...

    def on_step(self, step: int, metrics: Mapping[str, float | None]) -> Wishes:
        return Wishes(stop=step == self._step)

    def on_evaluate(self, step: int, metrics: Mapping[str, float | None]) -> Wishes:
        return Wishes()

    def on_save(self, step: int, checkpoint: Path) -> None: ...

    def on_end(self, step: int) -> None: ...


@pytest.mark.parametrize(
    ("name", "lora"), [("dpo", None), ("kto", {"rank": 2, "dropout": 0.2}), ("reward", None)]
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(name: str, lora: Any, tmp_path: Path) -> None:
    sections = {
        "model": {"scratch": SCRATCH, "lora": lora},
        "checkpoint": {"every": 2, "keep_last": 1, "keep_best": False},
        "optimizer": {"learning_rate": 3e-3, "schedule": "cosine"},
    }
    whole = run(name, tmp_path / "whole", **sections)
    first = run(name, tmp_path / "parts", hooks=[StopAt(5)], **sections)
    assert len(losses(first)) == 5
    resumed = run(name, tmp_path / "parts", resume=tmp_path / "parts", **sections)
    assert losses(resumed) == losses(whole)
    for file in ("model.safetensors", "adapter_model.safetensors"):
        if (whole.model / file).exists():
            one, other = load_file(whole.model / file), load_file(resumed.model / file)
            assert all(torch.equal(one[key], other[key]) for key in one), file


def test_resuming_with_another_reference_file_is_refused(tmp_path: Path) -> None:
    short = {"run": {"dir": str(tmp_path / "run"), "steps": 2}, "checkpoint": {"every": 1}}
    run("dpo", tmp_path / "run", **short)
    (tmp_path / "run" / "reference.npz").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"reference\.npz cannot be read"):
        run("dpo", tmp_path / "run", resume=tmp_path / "run", **short)


def test_a_reference_of_its_own_is_used_instead_of_the_start(tmp_path: Path) -> None:
    other = run("sft", tmp_path / "sft", run={"dir": str(tmp_path / "sft"), "epochs": 2}).model
    short = {"dir": str(tmp_path / "dpo"), "steps": 1}
    result = run("dpo", tmp_path / "dpo", run=short, objective={"name": "dpo", "reference_model": str(other)})
    first = result.metrics[1]
    assert abs(first["train/chosen_rewards"]) > 0.01
    assert first["train/chosen_rewards"] == pytest.approx(
        0.1 * (first["train/chosen_logps"] - _mean_logp(other, result)), abs=1e-4
    )


def _mean_logp(model_path: Path, result: FitResult) -> float:
    """The reference's mean log-probability of the first batch's chosen responses, by transformers."""
    from rl_cluster.data.randomness import permutation

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model_path),
        AutoTokenizer.from_pretrained(model_path),
    )
    total = 0.0
    chosen = permutation(len(PAIRS) - 8, "fit epoch", 0, 0)[:10]
    for index in chosen:
        prompt = tokenizer(PAIRS[index]["prompt"])["input_ids"]
        tokens = torch.tensor([*prompt, *tokenizer(PAIRS[index]["chosen"])["input_ids"], 1])
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])
        total += float(logprobs[len(prompt) - 1 :].sum())
    return total / len(chosen)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"learner": {"num_ranks": 2}}, "learner.num_ranks = 2: the local backend is one process"),
        ({"objective": {"label_smoothing": 0.1, "loss": "ipo"}}, "objective.label_smoothing = 0.1"),
        ({"objective": {"reference_model": "./nowhere"}}, "objective.reference_model"),
        ({"objective": {"reference_free": True, "reference_model": "a/b"}}, "Remove one of the two"),
        ({"data": {"path": "x.jsonl"}}, "is not read where data.source is given"),
        ({"data": {"source": "jsonl"}}, "data.path"),
        ({"data": {"margin_column": "m"}}, "has no meaning for dpo"),
        ({"data": {"max_length": 1}}, "data.max_length = 1"),
        ({"model": {"supervised": {}}}, "model.supervised"),
        ({"model": {"path": "a/b"}}, "is given together with model.scratch"),
        ({"warmup_ratio": 0.1, "optimizer": {"warmup_steps": 3}}, "warmup_ratio = 0.1"),
        ({"data": {"held_out": 72}}, "data.held_out=72"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(
    tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    values = settings("dpo", tmp_path / "run").model_dump(mode="json")
    for section, change in sections.items():
        values[section] = {**values[section], **change} if isinstance(change, dict) else change
    with pytest.raises(BadInputError) as caught:
        fit(parse_as(FitConfig, values), rows=PAIRS)
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_given_data_must_be_handed_over(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no rows were handed over"):
        fit(settings("dpo", tmp_path / "run"))
