"""Preference losses and reward heads on a real rank, against transformers and plain PyTorch with padding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from learners.rank import LearnerRank
from learners.spec import LearnerSpec
from learners.start import start_local_learner
from rl_cluster.algorithms.steps import DPOStep, KTOStep, LossStep, ORPOStep, RewardStep
from rl_cluster.algorithms.weights import row_weights
from rl_cluster.batch import plan_shards
from rl_cluster.config.fit import DPO, KTO, FitDataConfig, RewardObjective
from rl_cluster.config.run import LoRAConfig, OptimizerConfig
from rl_cluster.data.pairs import FitRows, load_fit_data
from rl_cluster.errors import BadInputError
from rl_cluster.loop.fit_pass import attach, with_reference
from rl_cluster.modeling.score_model import merge_adapter
from rl_cluster.protocols import BatchLayout, OptimParams
from rl_cluster.rewards.reward_model import load_reward_model
from tests.learners.learner_cases import relative_difference

PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "1" * (1 + (a + b) % 5)}
    for a, b in ((3, 4), (10, 7), (8, 8), (25, 25), (1, 99), (4, 400), (6, 7))
]
LENGTHS = {"max_length": 40, "max_prompt_length": 20}


@pytest.fixture(scope="module")
def pairs(char_tokenizer: Any) -> FitRows:
    rows = load_fit_data(FitDataConfig(source="given", **LENGTHS), DPO(), char_tokenizer, 40, PAIRS).train
    sums = np.random.default_rng(0).normal(-8, 1, rows.batch.num_rows)
    return attach(rows, sums, None)


def reward_rows(tokenizer: Any) -> FitRows:
    data = FitDataConfig(source="given", **LENGTHS)
    return load_fit_data(data, RewardObjective(), tokenizer, 40, PAIRS).train


def spec_of(model_path: str, **settings: Any) -> LearnerSpec:
    optimizer = OptimizerConfig(learning_rate=1e-2, max_grad_norm=100.0)
    base = LearnerSpec(model_path, engine="torch", optimizer=optimizer, num_threads=1, pad_token_id=0)
    return replace(base, **settings)


def gradient(spec: LearnerSpec, rows: FitRows, step: LossStep, budget: int, ranks: int = 1) -> np.ndarray:
    """Of one optimizer step; the ranks' shares are added up here, one after another."""
    batch = rows.batch
    weights = row_weights(step.aggregation, batch.action_counts, 128)
    everything = range(batch.num_rows)
    plan = plan_shards(batch.lengths, everything, batch.units, ranks, budget, batch.group_ids)
    rank = LearnerRank(spec)
    for micro_batches in plan.micro_batches:
        rank.forward_backward(batch, micro_batches, weights, step)
    gradients = [p.grad.flatten().numpy() for p in rank.model.parameters() if p.grad is not None]
    return np.concatenate(gradients)


def single_rows(pairs: FitRows) -> FitRows:
    labels = np.zeros(len(pairs.batch.tokens), dtype=np.float32)
    labels[pairs.batch.offsets[1:] - 1] = np.where(np.arange(pairs.batch.num_rows) % 3, 1.0, -1.0)
    rows = np.arange(pairs.batch.num_rows, dtype=np.int32)
    return FitRows(pairs.batch.with_columns(labels=labels, units=rows, group_ids=rows), 1)


@pytest.mark.parametrize("step", [DPOStep(0.3), DPOStep(0.3, "ipo"), ORPOStep(), KTOStep(0.3, z0=0.1)])
def test_gradients_do_not_depend_on_ranks_micro_batches_and_packing(
    model_path: str, pairs: FitRows, step: LossStep
) -> None:
    rows = single_rows(pairs) if isinstance(step, KTOStep) else pairs
    whole = gradient(spec_of(model_path), rows, step, 10_000)
    assert np.abs(whole).max() > 1e-4
    for budget, ranks in ((1, 1), (40, 1), (40, 2), (10_000, 3)):
        assert relative_difference(gradient(spec_of(model_path), rows, step, budget, ranks), whole) < 2e-5


def test_reward_gradients_do_not_depend_on_packing_either(model_path: str, char_tokenizer: Any) -> None:
    spec, rows = spec_of(model_path, kind="reward"), reward_rows(char_tokenizer)
    whole = gradient(spec, rows, RewardStep(centre=0.1), 10_000)
    assert np.abs(whole).max() > 1e-4
    for budget, ranks in ((1, 1), (40, 2)):
        assert relative_difference(gradient(spec, rows, RewardStep(centre=0.1), budget, ranks), whole) < 2e-5


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("extra", [0, 5])
def test_dpo_equals_a_padded_implementation_whatever_the_padding(
    model_path: str, pairs: FitRows, side: str, extra: int
) -> None:
    lm = AutoModelForCausalLM.from_pretrained(model_path)
    batch = pairs.batch
    longest = int(batch.lengths.max()) + extra
    tokens = torch.zeros(batch.num_rows, longest, dtype=torch.int64)
    real, trained = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
    for row in range(batch.num_rows):
        part, length = slice(batch.offsets[row], batch.offsets[row + 1]), int(batch.lengths[row])
        place = slice(longest - length, longest) if side == "left" else slice(0, length)
        tokens[row, place] = torch.from_numpy(batch.tokens[part].astype(np.int64))
        real[row, place] = 1
        trained[row, place] = torch.from_numpy(batch.action_mask[part])
    positions = (real.cumsum(1) - 1).clamp(min=0)
    logits = lm(tokens, attention_mask=real, position_ids=positions).logits.log_softmax(-1)
    drawn = logits[:, :-1].gather(2, tokens[:, 1:, None])[..., 0] * trained[:, 1:]
    assert batch.reference_logprobs is not None
    reference = torch.from_numpy(batch.reference_logprobs[batch.offsets[1:] - 1])
    ratios = drawn.sum(1) - reference
    loss = -logsigmoid(0.3 * (ratios[0::2] - ratios[1::2])).mean()
    loss.backward()
    expected = np.concatenate([p.grad.flatten().numpy() for p in lm.parameters()])
    assert relative_difference(gradient(spec_of(model_path), pairs, DPOStep(0.3), 60), expected) < 1e-4


async def test_at_the_start_the_policy_is_its_own_reference(model_path: str, pairs: FitRows) -> None:
    learner = start_local_learner(spec_of(model_path, lora=LoRAConfig(rank=2), tokens_per_micro_batch=30))
    rows = await with_reference(learner, pairs)
    layout = BatchLayout.of(rows.batch)
    everything = range(rows.batch.num_rows)
    sums, _ = await learner.forward_backward(rows.batch, layout, everything, DPOStep(1.0))
    assert sums["loss_sum"] == pytest.approx(np.log(2), abs=1e-5)
    await learner.optim_step(OptimParams())
    moved, _ = await learner.forward_backward(rows.batch, layout, everything, DPOStep(1.0))
    assert moved["loss_sum"] < sums["loss_sum"] - 0.01
    again = await with_reference(learner, pairs)
    assert rows.batch.reference_logprobs is not None and again.batch.reference_logprobs is not None
    assert np.abs(again.batch.reference_logprobs - rows.batch.reference_logprobs).max() < 1e-5


async def train_reward_model(spec: LearnerSpec, rows: FitRows, folder: Path) -> np.ndarray:
    """Three updates, then export; the learner's own scores of all rows."""
    learner = start_local_learner(spec)
    layout = BatchLayout.of(rows.batch)
    for _ in range(3):
        await learner.forward_backward(rows.batch, layout, range(layout.num_rows), RewardStep())
        await learner.optim_step()
    output = await learner.forward(rows.batch, layout)
    await learner.export(folder)
    return output.values[rows.batch.offsets[1:] - 1]


def texts_of(rows: FitRows) -> list[np.ndarray]:
    """The rows without the token at which they are scored."""
    batch = rows.batch
    return [batch.tokens[batch.offsets[i] : batch.offsets[i + 1] - 1] for i in range(batch.num_rows)]


async def test_an_exported_reward_model_gives_the_learners_scores(
    model_path: str, char_tokenizer: Any, tmp_path: Path
) -> None:
    rows, folder = reward_rows(char_tokenizer), tmp_path / "export"
    scores = await train_reward_model(spec_of(model_path, kind="reward"), rows, folder)
    assert scores.std() > 1e-2
    char_tokenizer.save_pretrained(folder)
    scorer = load_reward_model(str(folder), char_tokenizer)
    assert scorer.score(texts_of(rows)) == pytest.approx(scores, abs=1e-5)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        alone = [
            float(model(torch.from_numpy(text.astype(np.int64))[None]).logits[0, 0])
            for text in texts_of(rows)
        ]
    assert alone == pytest.approx(scores.tolist(), abs=1e-5)
    # A learner that starts from the export goes on from its scores, it does not draw a new head.
    learner = start_local_learner(spec_of(str(folder), kind="reward", seed=5))
    output = await learner.forward(rows.batch, BatchLayout.of(rows.batch))
    assert output.values[rows.batch.offsets[1:] - 1] == pytest.approx(scores, abs=1e-5)


async def test_an_adapted_reward_model_is_merged_with_its_score(
    model_path: str, char_tokenizer: Any, tmp_path: Path
) -> None:
    rows = reward_rows(char_tokenizer)
    spec = spec_of(model_path, kind="reward", lora=LoRAConfig(rank=4))
    scores = await train_reward_model(spec, rows, tmp_path / "adapter")
    merge_adapter(model_path, tmp_path / "adapter", tmp_path / "merged", 0)
    char_tokenizer.save_pretrained(tmp_path / "merged")
    scorer = load_reward_model(str(tmp_path / "merged"), char_tokenizer)
    assert scorer.score(texts_of(rows)) == pytest.approx(scores, abs=1e-4)


def test_the_fresh_score_depends_on_the_seed_alone(model_path: str) -> None:
    heads = [
        LearnerRank(spec_of(model_path, kind="reward", seed=seed)).model.lm.score.weight.detach()  # type: ignore
        for seed in (1, 1, 2)
    ]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_a_classifier_of_several_labels_is_refused(model_path: str, tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(BadInputError, match="classifier with 3 labels"):
        LearnerRank(spec_of(str(tmp_path), kind="reward"))


async def test_kto_reference_covers_the_mismatched_rows(model_path: str, char_tokenizer: Any) -> None:
    data = [{"prompt": r["prompt"], "completion": r["chosen"], "label": True} for r in PAIRS]
    rows = load_fit_data(FitDataConfig(source="given", **LENGTHS), KTO(), char_tokenizer, 40, data).train
    rows = await with_reference(start_local_learner(spec_of(model_path)), rows)
    assert rows.mismatched is not None and rows.mismatched.reference_logprobs is not None
    lm = AutoModelForCausalLM.from_pretrained(model_path)
    tokens = torch.from_numpy(rows.mismatched.tokens[: rows.mismatched.lengths[0]].astype(np.int64))
    logprobs = lm(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    expected = float(logprobs.detach()[rows.mismatched.action_mask[1 : len(tokens)]].sum())
    assert rows.mismatched.reference_logprobs[len(tokens) - 1] == pytest.approx(expected, abs=1e-4)
