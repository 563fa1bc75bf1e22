"""Models handed over as objects: what workers load from a folder is the same, or they are refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2ForCausalLM

import rl_cluster
from rl_cluster.errors import BadInputError
from rl_cluster.modeling.scratch import build_tokenizer
from rl_cluster.trainers.grpo.config import GRPOConfig
from rl_cluster.trainers.grpo.trainer import GRPOTrainer
from rl_cluster.trainers.ppo.config import PPOConfig
from rl_cluster.trainers.ppo.trainer import PPOTrainer
from rl_cluster.trainers.rloo.config import RLOOConfig
from rl_cluster.trainers.rloo.trainer import RLOOTrainer
from tests.modeling.architectures import CASES, config_of
from tests.trainers.test_fit_fronts import SMALL
from tests.trainers.test_ppo_trainer import BASE
from tests.trainers.test_rloo_grpo_learn import common

TOKENIZER = build_tokenizer("0123456789>", 64)
BY_KIND = {case.kind: case for case in CASES}
ROWS = [
    {"prompt": f"{i:02d}>", "chosen": str(i % 10) * (1 + i % 3), "rejected": str((i + 3) % 10) * (1 + i % 2)}
    for i in range(8)
]


def make(kind: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = config_of(BY_KIND[kind])
    config.pad_token_id, config.eos_token_id = TOKENIZER.pad_token_id, TOKENIZER.eos_token_id
    config.bos_token_id = None
    lm = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return lm


def dpo(lm: Any, folder: Path, reference: Any = None) -> Any:
    config = rl_cluster.DPOConfig(
        output_dir=str(folder), learning_rate=1e-9, batch_size=8, num_epochs=1, beta=0.1, **SMALL
    )
    return rl_cluster.DPOTrainer(config, lm, TOKENIZER, ref_model=reference).train_on_preferences


def online(front: str, lm: Any, folder: Path) -> Any:
    if front == "ppo":
        settings = PPOConfig(**{**BASE, "output_dir": str(folder)})
        return PPOTrainer(settings, lm, TOKENIZER, nothing)
    rows = [{"prompt": row["prompt"]} for row in ROWS]
    if front == "grpo":
        config = GRPOConfig(**common(folder))
        return GRPOTrainer(lm, nothing, args=config, train_dataset=rows, processing_class=TOKENIZER)
    return RLOOTrainer(RLOOConfig(**common(folder)), TOKENIZER, lm, lm, nothing, rows)


def nothing(*columns: Any, **named: Any) -> list[float]:
    raise AssertionError("the model is refused before")


class Hotter(Qwen2ForCausalLM):
    def forward(self, *args: Any, **named: Any) -> Any:
        output = super().forward(*args, **named)
        output.logits = output.logits / 2
        return output


class OwnNorm(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states * self.weight


def changed(how: str) -> tuple[PreTrainedModel, str]:
    lm: Any = make("qwen2")
    if how == "class":
        lm.__class__ = Hotter
        return lm, r"Hotter with code of your own in Hotter\.forward"
    if how == "part":
        lm.model.norm = OwnNorm(lm.model.norm)
        return lm, r"code of your own in model\.norm \(OwnNorm\)"
    if how == "patch":
        lm.model.layers[0].mlp.forward = lambda states: states
        return lm, r"code of your own in model\.layers\.0\.mlp\.forward"
    lm.model.layers[0].requires_grad_(False)
    return lm, r"frozen weights beside others .*model\.layers\.0\."


@pytest.mark.parametrize("front", ["ppo", "rloo", "grpo", "dpo"])
@pytest.mark.parametrize("how", ["class", "part", "patch", "frozen"])
def test_an_object_that_its_folder_does_not_bring_back_is_refused(
    how: str, front: str, tmp_path: Path
) -> None:
    lm, message = changed(how)
    with pytest.raises(BadInputError, match=message):
        if front == "dpo":
            dpo(lm, tmp_path / "run")(ROWS)
        else:
            online(front, lm, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@torch.no_grad()
def logprob(lm: PreTrainedModel, prompt: str, response: str) -> float:
    first = TOKENIZER(prompt)["input_ids"]
    ids = torch.tensor([[*first, *TOKENIZER(response)["input_ids"], TOKENIZER.eos_token_id]])
    table = lm(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    return float(table.gather(-1, ids[0, 1:, None])[len(first) - 1 :].sum())


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "qwen3_5_text", "bloom"])
def test_the_first_loss_of_an_object_is_that_of_plain_transformers(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy, reference = make(kind), make(kind, seed=1)
    margins = []
    for row in ROWS:
        gains = [
            logprob(policy, row["prompt"], row[side]) - logprob(reference, row["prompt"], row[side])
            for side in ("chosen", "rejected")
        ]
        margins.append(gains[0] - gains[1])
    train = dpo(policy, tmp_path / "run", reference)
    with caplog.at_level(logging.WARNING):
        train(ROWS)
    assert ("padded rows" in caplog.text) == (kind in ("qwen3_5_text", "bloom"))
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    expected = float(np.mean(np.log1p(np.exp(-0.1 * np.array(margins)))))
    assert metrics["train/loss"] == pytest.approx(expected, abs=1e-5)
