"""Whole loss steps: terms added up, metrics, invariance to micro-batching, and the extremes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_cluster.algorithms.inputs import LossInputs
from rl_cluster.algorithms.objectives import policy_objective
from rl_cluster.algorithms.steps import PolicyStep
from rl_cluster.config.algorithm import PolicyLossConfig

LOGPROBS = ("logprobs", "behaviour_logprobs", "proximal_logprobs", "reference_logprobs")
COLUMNS = (*LOGPROBS, "weights", "entropy", "values", "old_values", "advantages", "returns")
FULL_STEP = {"kl_coef": 0.1, "importance_cap": 1.5, "value_coef": 0.3}


def a_batch(counts=(3, 1, 4, 2), seed=0):
    """Tensors of a random batch, float64, current policy near the old ones."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(counts)
    draw = {name: torch.randn(size, generator=generator, dtype=torch.float64) for name in COLUMNS}
    base = -draw["logprobs"].abs() - 0.1
    for name in LOGPROBS:
        draw[name] = base + 0.3 * torch.randn(size, generator=generator, dtype=torch.float64)
    draw["weights"] = torch.rand(size, generator=generator, dtype=torch.float64) + 0.1
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)), draw


def objective(step, row, draw, rows=None):
    """The result, and the gradients by column, of the rows asked for."""
    chosen = torch.ones_like(row, dtype=torch.bool) if rows is None else torch.isin(row, torch.tensor(rows))
    part = {name: column[chosen].clone() for name, column in draw.items()}
    for name in ("logprobs", "entropy", "values"):
        part[name].requires_grad_()
    _, new_row = torch.unique(row[chosen], return_inverse=True)
    result = policy_objective(step, LossInputs(new_row, len(torch.unique(new_row)), **part))
    result.loss.backward()
    zero = torch.zeros(int(chosen.sum()), dtype=torch.float64)
    grads = {
        name: zero if part[name].grad is None else part[name].grad
        for name in ("logprobs", "entropy", "values")
    }
    return result, grads, chosen


def test_loss_gradients_and_metrics_do_not_depend_on_how_rows_are_spread_over_micro_batches():
    row, draw = a_batch()
    for kind in ("clip", "cispo", "sapo", "reinforce"):
        for ratio in ("token", "sequence", "sequence_mean"):
            loss = PolicyLossConfig(kind=kind, ratio=ratio, entropy_coef=0.01)
            step = PolicyStep(loss, 1.0, **FULL_STEP)
            whole, whole_grads, _ = objective(step, row, draw)
            parts = [objective(step, row, draw, rows) for rows in ([0, 2], [3], [1])]
            assert sum(p[0].loss.item() for p in parts) == pytest.approx(whole.loss.item(), rel=1e-12)
            for name, gradient in whole_grads.items():
                put_together = torch.zeros_like(gradient)
                for _, grads, chosen in parts:
                    put_together[chosen] = grads[name]
                torch.testing.assert_close(put_together, gradient)
            for name, value in whole.metrics.items():
                merge = max if name.endswith("_max") else sum
                assert merge(p[0].metrics[name] for p in parts) == pytest.approx(value, rel=1e-9), name


def test_the_loss_is_the_sum_of_its_terms():
    row, draw = a_batch()
    plain = objective(PolicyStep(PolicyLossConfig(), 1.0), row, draw)[0].loss.item()
    entropy_step = PolicyStep(PolicyLossConfig(entropy_coef=0.02), 1.0)
    weighted_entropy = (draw["weights"] * draw["entropy"]).sum().item()
    result, grads, _ = objective(entropy_step, row, draw)
    assert result.loss.item() == pytest.approx(plain - 0.02 * weighted_entropy, rel=1e-12)
    torch.testing.assert_close(grads["entropy"], -0.02 * draw["weights"])
    d = draw["reference_logprobs"] - draw["logprobs"]
    k3 = torch.exp(d) - 1 - d
    result = objective(PolicyStep(PolicyLossConfig(), 1.0, kl_coef=0.7), row, draw)[0]
    assert result.loss.item() == pytest.approx(plain + 0.7 * (draw["weights"] * k3).sum().item(), rel=1e-12)
    assert result.metrics["kl_sum"] == pytest.approx(k3.sum().item(), rel=1e-12)
    held = draw["old_values"] + (draw["values"] - draw["old_values"]).clamp(-0.1, 0.1)
    value = 0.5 * torch.maximum((draw["values"] - draw["returns"]) ** 2, (held - draw["returns"]) ** 2)
    result = objective(PolicyStep(PolicyLossConfig(), 1.0, value_coef=0.4, clip_value=0.1), row, draw)[0]
    assert result.loss.item() == pytest.approx(
        plain + 0.4 * (draw["weights"] * value).sum().item(), rel=1e-12
    )
    assert result.metrics["value_loss_sum"] == pytest.approx(value.sum().item(), rel=1e-12)


def test_the_kl_in_the_loss_pulls_the_current_policy_towards_the_reference():
    row, draw = a_batch()
    draw["advantages"] = torch.zeros_like(draw["advantages"])
    for estimator in ("k2", "k3"):
        step = PolicyStep(PolicyLossConfig(), 1.0, kl_coef=1.0, kl_estimator=estimator)
        _, grads, _ = objective(step, row, draw)
        above = draw["logprobs"] > draw["reference_logprobs"]
        assert ((grads["logprobs"] > 0) == above).all()


def test_metrics_are_plain_sums_over_the_tokens_that_train():
    row, draw = a_batch()
    draw["weights"][row == 2] = 0.0
    live = row != 2
    result, _, _ = objective(PolicyStep(PolicyLossConfig(), 1.0), row, draw)
    d = (draw["logprobs"] - draw["proximal_logprobs"])[live]
    gap = (draw["proximal_logprobs"] - draw["behaviour_logprobs"])[live].abs()
    advantages, ratio = draw["advantages"][live], torch.exp(d)
    per_token = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    expected = {
        "loss_sum": (draw["weights"][live] * per_token).sum(),
        "policy_loss_sum": per_token.sum(),
        "tokens_sum": 6,
        "rows_sum": 3,
        "approxkl_sum": (0.5 * d**2).sum(),
        "clipfrac_sum": ((advantages > 0) & (ratio > 1.2) | (advantages < 0) & (ratio < 0.8)).sum(),
        "ratio_sum": ratio.sum(),
        "ratio_sq_sum": (ratio**2).sum(),
        "entropy_sum": draw["entropy"][live].sum(),
        "gap_sum": gap.sum(),
        "gap_max": gap.max(),
    }
    assert result.metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert result.metrics[name] == pytest.approx(float(value), rel=1e-9), name


def test_without_proximal_log_probabilities_every_ratio_is_1_and_the_gap_is_to_the_current_policy():
    row, draw = a_batch()
    logprobs = draw["logprobs"].clone().requires_grad_()
    inputs = LossInputs(
        row,
        4,
        logprobs,
        draw["weights"],
        behaviour_logprobs=draw["behaviour_logprobs"],
        advantages=draw["advantages"],
    )
    result = policy_objective(PolicyStep(PolicyLossConfig(), 1.0), inputs)
    result.loss.backward()
    torch.testing.assert_close(logprobs.grad, -draw["weights"] * draw["advantages"])
    assert result.metrics["ratio_sum"] == 10
    gap = (draw["logprobs"] - draw["behaviour_logprobs"]).abs()
    assert result.metrics["gap_max"] == pytest.approx(gap.max().item())


def test_during_value_warm_up_only_the_values_have_a_gradient():
    row, draw = a_batch()
    step = PolicyStep(
        PolicyLossConfig(entropy_coef=0.1), 1.0, kl_coef=1.0, value_coef=1.0, train_policy=False
    )
    result, grads, _ = objective(step, row, draw)
    assert (grads["logprobs"] == 0).all()
    assert (grads["entropy"] == 0).all()
    assert (grads["values"] != 0).any()
    assert result.metrics["value_loss_sum"] > 0
    assert "policy_loss_sum" not in result.metrics


def test_no_tokens_make_a_loss_of_0_that_can_be_differentiated():
    logprobs = torch.zeros(0, requires_grad=True)
    empty = torch.zeros(0)
    inputs = LossInputs(
        torch.zeros(0, dtype=torch.int64), 0, logprobs, empty, advantages=empty, behaviour_logprobs=empty
    )
    result = policy_objective(PolicyStep(PolicyLossConfig(ratio="sequence"), 1.0), inputs)
    result.loss.backward()
    assert result.loss.item() == 0
    assert result.metrics["rows_sum"] == result.metrics["gap_max"] == 0


def test_a_nan_log_probability_reaches_the_loss_so_that_the_step_can_be_refused():
    row, draw = a_batch()
    draw["logprobs"][4] = math.nan
    for kind in ("clip", "cispo", "sapo", "reinforce"):
        loss = PolicyLossConfig(kind=kind)
        assert math.isnan(objective(PolicyStep(loss, 1.0), row, draw)[0].loss.item())


@pytest.mark.parametrize("ratio", ["token", "sequence", "sequence_mean"])
@pytest.mark.parametrize("kind", ["clip", "cispo", "sapo", "reinforce"])
def test_every_pair_of_extreme_log_probabilities_gives_a_finite_loss_and_gradient(kind, ratio):
    ends = [-math.inf, -1e4, -100.0, 0.0, 1e4, math.inf]
    logprobs = torch.tensor([a for a in ends for _ in ends], requires_grad=True)
    old, ones = torch.tensor(ends * len(ends)), torch.ones(len(ends) ** 2)
    for advantages in (ones, -ones):
        inputs = LossInputs(
            torch.arange(len(ones)), len(ones), logprobs, ones, proximal_logprobs=old, advantages=advantages
        )
        result = policy_objective(PolicyStep(PolicyLossConfig(kind=kind, ratio=ratio), 1.0), inputs)
        (gradient,) = torch.autograd.grad(result.loss, logprobs)
        assert torch.isfinite(result.loss)
        assert torch.isfinite(gradient).all()


extreme = st.sampled_from([-math.inf, math.inf, -1e4, 1e4, -100.0, -1e-30, 0.0]) | st.floats(-50, 1, width=32)
four_tokens = st.lists(extreme, min_size=4, max_size=4)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(["clip", "cispo", "sapo", "reinforce"]),
    ratio=st.sampled_from(["token", "sequence", "sequence_mean"]),
    estimator=st.sampled_from(["k1", "k2", "k3"]),
    columns=st.lists(four_tokens, min_size=4, max_size=4),
    advantages=st.lists(st.sampled_from([-1e4, -1.0, 0.0, 1.0, 1e4]), min_size=4, max_size=4),
)
def test_loss_gradient_and_metrics_are_finite_whatever_the_log_probabilities(
    kind, ratio, estimator, columns, advantages
):
    logprobs, behaviour, proximal, reference = (torch.tensor(column) for column in columns)
    logprobs.requires_grad_()
    inputs = LossInputs(
        torch.tensor([0, 0, 0, 1]),
        2,
        logprobs,
        torch.tensor([0.3, 0.3, 0.0, 0.1]),
        behaviour_logprobs=behaviour,
        proximal_logprobs=proximal,
        reference_logprobs=reference,
        advantages=torch.tensor(advantages),
    )
    step = PolicyStep(PolicyLossConfig(kind=kind, ratio=ratio), 1.0, 0.1, estimator, importance_cap=2.0)
    result = policy_objective(step, inputs)
    result.loss.backward()
    assert torch.isfinite(result.loss)
    assert torch.isfinite(logprobs.grad).all()
    assert all(math.isfinite(value) for value in result.metrics.values())
