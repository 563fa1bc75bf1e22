"""One rank in this process on the plain engine, against transformers and PyTorch used directly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learners.rank import LearnerRank
from learners.start import start_local_learner
from rl_cluster.algorithms.steps import CrossEntropyStep, PolicyStep, ValueStep
from rl_cluster.algorithms.weights import row_weights
from rl_cluster.batch import TokenBatch
from rl_cluster.config.algorithm import PolicyLossConfig
from rl_cluster.config.run import LoRAConfig, OptimizerConfig
from rl_cluster.errors import BadInputError
from rl_cluster.modeling.scratch import save_scratch_model
from rl_cluster.protocols import OptimParams
from tests.learners.learner_cases import (
    STEP,
    TINY,
    gradients_of,
    layout_of,
    make_batch,
    make_model,
    relative_difference,
    spec_of,
    weights_of,
)


async def test_forward_equals_transformers_row_by_row_in_input_order(model_path: str) -> None:
    batch = make_batch()
    learner = start_local_learner(spec_of(model_path, tokens_per_micro_batch=40))
    output = await learner.forward(batch, layout_of(batch))
    lm = AutoModelForCausalLM.from_pretrained(model_path)
    expected, expected_entropy = np.zeros(len(batch.tokens)), np.zeros(len(batch.tokens))
    for row in range(batch.num_rows):
        part = slice(batch.offsets[row], batch.offsets[row + 1])
        tokens = torch.from_numpy(batch.tokens[part].astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(lm(tokens[None]).logits[0] / 0.9, dim=-1)
        expected[part][1:] = logprobs[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
        expected_entropy[part][1:] = -(logprobs.exp() * logprobs).sum(-1)[:-1].numpy()
    assert np.abs(output.logprobs - expected * batch.action_mask).max() < 1e-5
    assert np.abs(output.entropy - expected_entropy * batch.action_mask).max() < 1e-5
    assert output.values is None


@pytest.mark.parametrize("own_decay", [0.0, 0.1])
async def test_every_optimizer_setting_may_come_with_the_step(model_path: str, own_decay: float) -> None:
    """Plain sums of the loss, divided by their number at the step, against plain AdamW on the mean."""
    batch = make_batch()
    rank = LearnerRank(spec_of(model_path, optimizer=OptimizerConfig(weight_decay=own_decay)))
    lm = AutoModelForCausalLM.from_pretrained(model_path)
    groups = [
        {"params": [p for p in lm.parameters() if p.dim() >= 2]},
        {"params": [p for p in lm.parameters() if p.dim() < 2]},
    ]
    reference = torch.optim.AdamW(groups, lr=1.0, fused=True)
    count = int(batch.action_counts.sum())
    steps = [
        (1e-3, 0.2, (0.7, 0.9), 1e-4, 0.3),
        (3e-3, 0.0, (0.5, 0.8), 1e-3, 0.0),
        (1e-3, 9.0, (0.9, 0.99), 1e-5, 1.0),
    ]
    for rate, norm, betas, eps, decay in steps:
        rank.forward_backward(batch, [range(6), range(6, 13)], np.ones(13), CrossEntropyStep())
        result = rank.optim_step(OptimParams(rate, norm, betas, eps, decay, 1.0 / count))
        (_nll_of(lm, batch) / count).backward()
        expected = torch.nn.utils.get_total_norm([p.grad for p in lm.parameters()])
        if norm > 0:
            torch.nn.utils.clip_grad_norm_(lm.parameters(), norm)
        for group, its_decay in zip(reference.param_groups, (decay, 0.0), strict=True):
            group.update(lr=rate, betas=betas, eps=eps, weight_decay=its_decay)
        reference.step()
        reference.zero_grad()
        assert (result.learning_rate, result.grad_norm) == (rate, pytest.approx(expected.item(), rel=1e-4))
    ours = weights_of(rank)
    for name, parameter in lm.named_parameters():
        if name in ours:
            assert np.abs(ours[name] - parameter.detach().numpy()).max() < 2e-5


def _nll_of(lm: Any, batch: TokenBatch) -> torch.Tensor:
    """Row by row, summed over the actions."""
    loss = torch.zeros(())
    for row in range(batch.num_rows):
        part = slice(batch.offsets[row], batch.offsets[row + 1])
        tokens = torch.from_numpy(batch.tokens[part].astype(np.int64))
        labels = tokens.masked_fill(~torch.from_numpy(batch.action_mask[part]), -100)
        logits = lm(tokens[None]).logits[0]
        loss = loss + torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
    return loss


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (OptimParams(betas=(0.9, 1.0)), "betas"),
        (OptimParams(eps=-1.0), "eps"),
        (OptimParams(weight_decay=float("nan")), "weight_decay"),
        (OptimParams(gradient_scale=0.0), "gradient_scale"),
        (OptimParams(learning_rate=float("inf")), "learning rate"),
    ],
)
def test_settings_that_would_spoil_the_weights_are_refused_and_the_gradient_stays(
    model_path: str, params: OptimParams, message: str
) -> None:
    rank, other = LearnerRank(spec_of(model_path)), LearnerRank(spec_of(model_path))
    for one in (rank, other):
        one.forward_backward(make_batch(), [range(13)], np.ones(13), STEP)
    with pytest.raises(BadInputError, match=message):
        rank.optim_step(params)
    assert rank.optim_step(OptimParams()) == other.optim_step(OptimParams())


def test_a_backward_pass_tells_the_log_probabilities_that_its_loss_saw(model_path: str) -> None:
    batch, rank = make_batch(), LearnerRank(spec_of(model_path))
    rows = [9, 2, 5, 0]
    _, part = rank.forward_backward(batch, [rows[:1], rows[1:]], np.ones(13), STEP)
    _, forward = rank.forward_part(batch, [range(13)], reference=False)
    _, ours = rank.assemble_logprobs(len(batch.tokens), part)
    _, whole = rank.assemble(len(batch.tokens), forward)
    chosen = np.isin(batch.row_of_token, rows) & batch.action_mask
    assert ours.dtype == np.float32
    assert np.array_equal(ours != 0.0, chosen)
    assert np.abs(ours[chosen] - whole.logprobs[chosen]).max() < 1e-6


@pytest.mark.parametrize("several", [False, True])
async def test_targets_are_given_and_need_not_be_the_tokens(model_path: str, several: bool) -> None:
    """Against transformers, a row at a time; K ids with weights, one of them absent."""
    batch, rng = make_batch(), np.random.default_rng(5)
    shape = (len(batch.tokens), 3) if several else (len(batch.tokens),)
    ids = rng.integers(3, 20, shape).astype(np.int32)
    weights = rng.uniform(-1, 2, shape).astype(np.float32) if several else None
    if weights is not None:
        weights[::2, 1] = 0.0
    batch = batch.with_columns(
        target_ids=ids, target_weights=weights, weights=np.ones(len(batch.tokens), np.float32)
    )
    learner = start_local_learner(spec_of(model_path, tokens_per_micro_batch=60))
    layout = layout_of(batch)
    forward = await learner.forward(batch, layout)
    sums, logprobs = await learner.forward_backward(batch, layout, range(13), CrossEntropyStep(0.9))
    result = await learner.optim_step()
    lm, expected = AutoModelForCausalLM.from_pretrained(model_path), torch.zeros(())
    for row in range(batch.num_rows):
        part = slice(batch.offsets[row], batch.offsets[row + 1])
        table = (
            lm(torch.from_numpy(batch.tokens[part].astype(np.int64))[None]).logits[0].div(0.9).log_softmax(-1)
        )
        mask = torch.from_numpy(batch.action_mask[part])[1:]
        wanted = torch.from_numpy(ids[part][1:].astype(np.int64)).view(len(mask), -1)
        each = table[:-1].gather(1, wanted)[mask]
        factors = torch.ones_like(each) if weights is None else torch.from_numpy(weights[part])[1:][mask]
        expected = expected - (factors * each).sum()
        for ours in (logprobs, forward.logprobs):
            there = ours[part][1:][mask.numpy()].reshape(len(each), -1)
            assert np.abs(there - each.detach().numpy()).max() < 1e-5
    expected.backward()
    assert logprobs.shape == shape
    assert not logprobs[~batch.action_mask].any()
    assert sums["loss_sum"] == pytest.approx(expected.item(), rel=1e-4)
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in lm.parameters()]))
    assert result.grad_norm == pytest.approx(norm, rel=1e-4)
    assert np.array_equal(
        batch.select([3, 1]).target_ids,
        ids[np.isin(batch.row_of_token, [3])].tolist() + ids[np.isin(batch.row_of_token, [1])].tolist(),
    )


def test_a_forgotten_or_loaded_over_gradient_leaves_no_trace(model_path: str, tmp_path: Path) -> None:
    batch, rank, other = make_batch(), LearnerRank(spec_of(model_path)), LearnerRank(spec_of(model_path))
    rank.save(tmp_path)
    for forget in (rank.forget_gradient, lambda: rank.load(tmp_path)):
        rank.forward_backward(make_batch(seed=4), [range(13)], np.ones(13), STEP)
        forget()
    for one in (rank, other):
        one.forward_backward(batch, [range(13)], np.ones(13), STEP)
    assert rank.optim_step(OptimParams()) == other.optim_step(OptimParams())
    assert all(np.array_equal(weights_of(rank)[name], w) for name, w in weights_of(other).items())


async def test_cross_entropy_update_equals_adamw_on_transformers_loss(model_path: str) -> None:
    batch = make_batch()
    optimizer = OptimizerConfig(learning_rate=1e-3, max_grad_norm=0.2, weight_decay=0.1)
    rank = LearnerRank(spec_of(model_path, optimizer=optimizer))
    lm = AutoModelForCausalLM.from_pretrained(model_path)
    matrices = [p for p in lm.parameters() if p.dim() >= 2]
    vectors = [p for p in lm.parameters() if p.dim() < 2]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3
    )
    for _ in range(3):
        weights = row_weights("token_mean", batch.action_counts, 128)
        rank.forward_backward(batch, [range(6), range(6, 13)], weights, CrossEntropyStep())
        rank.optim_step(OptimParams())
        loss = torch.zeros(())
        for row in range(batch.num_rows):
            part = slice(batch.offsets[row], batch.offsets[row + 1])
            tokens = torch.from_numpy(batch.tokens[part].astype(np.int64))
            labels = tokens.masked_fill(~torch.from_numpy(batch.action_mask[part]), -100)
            logits = lm(tokens[None]).logits[0]
            loss = loss + torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
        (loss / batch.action_counts.sum()).backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 0.2)
        reference.step()
        reference.zero_grad()
    ours = weights_of(rank)
    for name, parameter in lm.named_parameters():
        assert (ours[name] - parameter.detach()).abs().max() < 2e-6, name


def test_gradients_do_not_depend_on_micro_batches_and_packing(model_path: str) -> None:
    batch = make_batch()
    weights = row_weights("sequence_mean", batch.action_counts, 128)
    gradients = []
    for micro_batches in ([range(13)], [range(4), range(4, 9), range(9, 13)], [(row,) for row in range(13)]):
        rank = LearnerRank(spec_of(model_path))
        rank.forward_backward(batch, micro_batches, weights, STEP)
        gradients.append(gradients_of(rank))
    assert np.abs(gradients[0]).max() > 1e-3
    assert relative_difference(gradients[1], gradients[0]) < 1e-5
    assert relative_difference(gradients[2], gradients[0]) < 1e-5


def test_dummy_micro_batches_change_nothing(model_path: str) -> None:
    batch = make_batch()
    weights = row_weights("token_mean", batch.action_counts, 128)
    results = []
    for micro_batches in ([range(13)], [(), range(13), ()]):
        rank = LearnerRank(spec_of(model_path, kind="policy_with_values"))
        metrics, _ = rank.forward_backward(batch, micro_batches, weights, replace(STEP, value_coef=0.5))
        results.append((metrics, gradients_of(rank)))
    assert results[0][0] == results[1][0]
    assert np.array_equal(results[0][1], results[1][1])


def test_weights_of_the_batch_replace_the_row_weights(model_path: str) -> None:
    batch = make_batch()
    row = row_weights("token_mean", batch.action_counts, 128)
    own = np.where(batch.action_mask, row[batch.row_of_token], 0).astype(np.float32)
    gradients = []
    for candidate, weights in ((batch, row), (batch.with_columns(weights=own), np.zeros(13))):
        rank = LearnerRank(spec_of(model_path))
        rank.forward_backward(candidate, [range(13)], weights, STEP)
        gradients.append(gradients_of(rank))
    assert relative_difference(gradients[1], gradients[0]) < 1e-6


def test_lora_trains_only_adapters_and_its_reference_is_the_base(model_path: str) -> None:
    batch = make_batch()
    lora = LoRAConfig(rank=4, alpha=8.0, dropout=0.2)
    rank = LearnerRank(spec_of(model_path, lora=lora))
    base = LearnerRank(spec_of(model_path))
    frozen = {n: p.detach().clone() for n, p in rank.model.named_parameters() if not p.requires_grad}
    names = [name for group in rank.weight_groups() for name, _ in group]
    assert names[0] == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert len(names) == 2 * 7 * 2
    weights = row_weights("token_mean", batch.action_counts, 128)
    for _ in range(3):
        rank.forward_backward(batch, [range(13)], weights, STEP)
        rank.optim_step(OptimParams())
    assert all(torch.equal(p, frozen[n]) for n, p in rank.model.named_parameters() if n in frozen)
    _, trained = rank.forward_part(batch, [range(13)], reference=False)
    _, reference = rank.forward_part(batch, [range(13)], reference=True)
    _, expected = base.forward_part(batch, [range(13)], reference=False)
    _, again = rank.forward_part(batch, [range(13)], reference=False)
    assert np.array_equal(trained.logprobs, again.logprobs), "dropout is for training alone"
    assert np.array_equal(reference.logprobs, expected.logprobs)
    assert np.abs(trained.logprobs - expected.logprobs).max() > 1e-3


def test_a_reference_beside_the_policy_gives_its_logprobs_and_the_whole_divergence(
    model_path: str, tmp_path: Path
) -> None:
    """Against the logits of transformers, row by row; also after the policy has moved."""
    batch = make_batch()
    other = make_model(tmp_path, seed=7)
    rank = LearnerRank(spec_of(model_path, reference_path=other, kind="policy_with_values"))
    weights = row_weights("token_mean", batch.action_counts, 128)
    rank.forward_backward(batch, [range(13)], weights, STEP)
    rank.optim_step(OptimParams())
    rank.export(tmp_path / "moved")
    policy, reference = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "moved", other))
    _, output = rank.assemble(len(batch.tokens), rank.forward_part(batch, [range(6), range(6, 13)], True)[1])
    assert output.kl is not None and output.values is None
    expected_kl, expected = np.zeros(len(batch.tokens)), np.zeros(len(batch.tokens))
    for begin, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        ids = torch.from_numpy(batch.tokens[begin:end].astype(np.int64))
        with torch.no_grad():
            own, frozen = (m(ids[None]).logits[0, :-1].double() / 0.9 for m in (policy, reference))
        own, frozen = own.log_softmax(-1), frozen.log_softmax(-1)
        expected_kl[begin + 1 : end] = (own.exp() * (own - frozen)).sum(-1)
        expected[begin + 1 : end] = frozen.gather(-1, ids[1:, None])[:, 0]
    assert np.abs(output.kl - expected_kl * batch.action_mask).max() < 1e-5
    assert np.abs(output.logprobs - expected * batch.action_mask).max() < 1e-5
    assert expected_kl[batch.action_mask].min() > 1e-4
    _, before = rank.forward_part(batch, [range(13)], False)
    assert before.kl is None and before.values is not None


def test_a_reference_of_another_vocabulary_is_refused(model_path: str, tmp_path: Path) -> None:
    save_scratch_model(TINY.model_copy(update={"alphabet": "0123"}), tmp_path)
    with pytest.raises(BadInputError, match=r"reference_path: .* has a vocabulary of \d tokens"):
        LearnerRank(spec_of(model_path, reference_path=str(tmp_path)))


def test_a_separate_critic_learns_the_returns(model_path: str) -> None:
    batch = make_batch(4).with_columns(values=None)
    batch = batch.with_columns(
        values=np.zeros(len(batch.tokens), np.float32),
        returns=np.full(len(batch.tokens), 0.7, np.float32),
    )
    optimizer = OptimizerConfig(learning_rate=3e-3)
    rank = LearnerRank(spec_of(model_path, kind="critic", optimizer=optimizer))
    weights = row_weights("token_mean", batch.action_counts, 128)
    for _ in range(60):
        rank.forward_backward(batch, [range(4)], weights, ValueStep(clip_value=10.0))
        rank.optim_step(OptimParams())
    _, part = rank.forward_part(batch, [range(4)], reference=False)
    assert part.values is not None
    assert np.abs(part.values - 0.7).max() < 0.05
    assert not part.logprobs.any()


def test_values_alone_can_warm_up_on_a_shared_trunk(model_path: str) -> None:
    batch = make_batch()
    step = PolicyStep(PolicyLossConfig(), 0.9, value_coef=1.0, train_policy=False)
    rank = LearnerRank(spec_of(model_path, kind="policy_with_values"))
    weights = row_weights("token_mean", batch.action_counts, 128)
    rank.forward_backward(batch, [range(13)], weights, step)
    head = rank.model.lm.lm_head.weight.grad  # type: ignore[union-attr]
    assert float(head.abs().max()) == 0.0
    assert float(rank.model.value_head.scalar.weight.grad.abs().max()) > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_while_the_values_warm_up_the_policy_stays_as_it_is_to_the_bit(
    model_path: str, weight_decay: float, dtype: str
) -> None:
    batch = make_batch()
    rate = 0.25 if dtype == "bfloat16" else 1e-2
    optimizer = OptimizerConfig(learning_rate=rate, weight_decay=weight_decay, betas=(0.9, 0.99))
    rank = LearnerRank(spec_of(model_path, kind="policy_with_values", optimizer=optimizer, dtype=dtype))
    weights = row_weights("token_mean", batch.action_counts, 128)
    alone = PolicyStep(PolicyLossConfig(entropy_coef=0.1), 0.9, value_coef=1.0, train_policy=False)
    both = replace(alone, train_policy=True, loss=PolicyLossConfig())
    before = rank.forward_part(batch, [range(13)], reference=False)[1]
    start = weights_of(rank)
    policy = [name for name in start if not name.startswith("value_head")]
    for _ in range(25):
        for rows in (range(6), range(6, 13)):
            rank.forward_backward(batch, [rows], weights, alone)
        assert not rank.optim_step(OptimParams()).skipped
    after = rank.forward_part(batch, [range(13)], reference=False)[1]
    assert np.array_equal(before.logprobs, after.logprobs)
    assert all(torch.equal(start[name], weights_of(rank)[name]) for name in policy)
    assert before.values is not None and after.values is not None
    assert np.abs(after.values - before.values).max() > 0.05, "the values have learned"
    # AdamW's first update moves every number with a gradient by the learning rate, whatever came before it.
    rank.forward_backward(batch, [range(13)], weights, replace(both, value_coef=0.0))
    rank.optim_step(OptimParams())
    name = "model.layers.0.mlp.up_proj.weight"
    kept = start[name].float() * (1 - rate * weight_decay)
    moved = (weights_of(rank)[name].float() - kept).abs().flatten()
    assert float(moved.median()) == pytest.approx(rate, rel=0.05)
