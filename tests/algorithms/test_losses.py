"""Losses: values and gradients against closed forms and against explicit formulas per row."""

import math

import pytest
import torch

from rl_cluster.algorithms.inputs import LossInputs
from rl_cluster.algorithms.losses import clipped_value_loss, importance_weight
from rl_cluster.algorithms.objectives import cross_entropy_objective, policy_objective, value_objective
from rl_cluster.algorithms.steps import CrossEntropyStep, PolicyStep, ValueStep
from rl_cluster.algorithms.weights import row_weights
from rl_cluster.config.algorithm import PolicyLossConfig

ROW = torch.tensor([0, 0, 0, 1, 2, 2])
COUNTS = torch.tensor([3, 1, 2])
OLD = torch.tensor([-1.0, -0.7, -2.0, -0.3, -1.5, -0.9], dtype=torch.float64)
MOVED = torch.tensor([0.05, 0.30, -0.10, -0.50, 0.02, -0.03], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -2.0, 0.5, 0.5], dtype=torch.float64)


def weights_of(aggregation):
    return torch.from_numpy(row_weights(aggregation, COUNTS.numpy(), 4))[ROW]


def loss_and_gradient(loss, advantages=ADVANTAGES, aggregation="sequence_mean", moved=MOVED, **columns):
    logprobs = (OLD + moved).requires_grad_()
    inputs = LossInputs(
        ROW, 3, logprobs, weights_of(aggregation), proximal_logprobs=OLD, advantages=advantages, **columns
    )
    result = policy_objective(PolicyStep(loss, 1.0), inputs)
    result.loss.backward()
    return result, logprobs.grad


def explicit_row_loss(kind, mean, low=0.2, high=0.2):
    """Mean over rows of PPO's clipped objective on one ratio per row, gradient by plain autograd."""
    logprobs = (OLD + MOVED).requires_grad_()
    losses = []
    for i in range(3):
        d = (logprobs - OLD)[i == ROW]
        ratio = torch.exp(d.mean() if mean else d.sum())
        advantage = ADVANTAGES[i == ROW][0]
        losses.append(torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high)))
    total = torch.stack(losses).mean()
    total.backward()
    return total, logprobs.grad


def test_the_token_ratio_clips_only_the_side_that_would_gain():
    # ratios e^0.05 and e^-0.1 inside; e^0.3 > 1.2 with A > 0: held; e^-0.5 < 0.8 with A < 0: held
    result, gradient = loss_and_gradient(PolicyLossConfig(), aggregation="token_mean")
    r = torch.exp(MOVED)
    per_token = torch.tensor([-r[0], -1.2, -r[2], 2 * 0.8, -0.5 * r[4], -0.5 * r[5]], dtype=torch.float64)
    assert result.loss.item() == pytest.approx(per_token.mean().item(), rel=1e-12)
    expected = torch.tensor([-r[0], 0.0, -r[2], 0.0, -0.5 * r[4], -0.5 * r[5]], dtype=torch.float64) / 6
    torch.testing.assert_close(gradient, expected)
    assert result.metrics["clipfrac_sum"] == 2


def test_the_token_ratio_does_not_clip_the_side_that_would_lose():
    _, gradient = loss_and_gradient(PolicyLossConfig(), advantages=-ADVANTAGES, aggregation="token_mean")
    torch.testing.assert_close(gradient, ADVANTAGES * torch.exp(MOVED) / 6)


def test_clip_higher_widens_only_the_upper_bound():
    moved = torch.tensor([0.22, -0.25, 0.0, -0.25, 0.0, 0.0], dtype=torch.float64)
    _, gradient = loss_and_gradient(PolicyLossConfig(clip_high=0.28), aggregation="token_mean", moved=moved)
    # e^0.22 = 1.246 < 1.28 trains; A < 0 at e^-0.25 = 0.779 < 0.8 is held
    assert gradient[0].item() == pytest.approx(-math.exp(0.22) / 6)
    assert gradient[3].item() == 0.0


@pytest.mark.parametrize("mean", [False, True], ids=["sequence", "sequence_mean"])
def test_a_row_ratio_gives_exactly_the_loss_and_gradient_of_the_row_formula(mean):
    level = "sequence_mean" if mean else "sequence"
    for width in (0.2, 0.35, 0.5):  # at 0.5 nothing is clipped, at 0.35 one row, at 0.2 two (sequence)
        loss = PolicyLossConfig(ratio=level, clip_low=width, clip_high=width)
        result, gradient = loss_and_gradient(loss)
        expected_loss, expected_gradient = explicit_row_loss("clip", mean, width, width)
        assert result.loss.item() == pytest.approx(expected_loss.item(), rel=1e-12)
        torch.testing.assert_close(gradient, expected_gradient)


def test_gspo_gradient_is_its_closed_form():
    # ∇ = −(1/R) A_i s_i (1/T_i) Σ ∇ log π with s_i = exp(mean log-ratio); Zheng et al. 2025
    _, gradient = loss_and_gradient(PolicyLossConfig(ratio="sequence_mean", clip_low=0.9, clip_high=0.9))
    means = torch.tensor([0.25 / 3, -0.5, -0.01 / 2], dtype=torch.float64)[ROW]
    torch.testing.assert_close(gradient, -ADVANTAGES * torch.exp(means) / (3 * COUNTS[ROW]))


def test_a_row_ratio_credits_tokens_by_their_own_advantages():
    advantages = torch.tensor([1.0, -1.0, 3.0, -2.0, 0.5, 1.5], dtype=torch.float64)
    loss = PolicyLossConfig(ratio="sequence", clip_low=0.9, clip_high=0.9)
    _, gradient = loss_and_gradient(loss, advantages=advantages)
    sums = torch.tensor([0.25, -0.5, -0.01], dtype=torch.float64)[ROW]
    torch.testing.assert_close(gradient, -advantages * torch.exp(sums) / 3)


def test_cispo_keeps_a_gradient_at_every_token_with_the_ratio_up_to_a_greatest_one_as_weight():
    loss = PolicyLossConfig(kind="cispo", clip_high=0.2)
    result, gradient = loss_and_gradient(loss, aggregation="token_mean")
    held = torch.tensor(
        [math.exp(0.05), 1.2, math.exp(-0.1), math.exp(-0.5), math.exp(0.02), math.exp(-0.03)]
    ).double()
    torch.testing.assert_close(gradient, (-held * ADVANTAGES / 6), rtol=1e-6, atol=0)
    expected = -(held * ADVANTAGES * (OLD + MOVED)).mean().item()
    assert result.loss.item() == pytest.approx(expected, rel=1e-6)
    assert result.metrics["clipfrac_sum"] == 1


def test_sapo_is_a_sigmoid_of_the_ratio_with_a_temperature_by_the_sign_of_the_advantage():
    loss = PolicyLossConfig(kind="sapo", temperature_positive=1.5, temperature_negative=2.5)
    result, gradient = loss_and_gradient(loss, aggregation="token_mean")
    expected, slopes = [], []
    for moved, advantage in zip(MOVED.tolist(), ADVANTAGES.tolist(), strict=True):
        tau, ratio = (1.5 if advantage > 0 else 2.5), math.exp(moved)
        gate = 1.0 / (1.0 + math.exp(-tau * (ratio - 1.0)))
        expected.append(-advantage * 4.0 / tau * gate)
        slopes.append(-advantage * 4.0 * gate * (1.0 - gate) * ratio)
    assert result.loss.item() == pytest.approx(sum(expected) / 6, rel=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(slopes).double() / 6, rtol=1e-6, atol=0)
    assert result.metrics["clipfrac_sum"] == 0


def test_reinforce_is_minus_advantage_times_log_probability():
    result, gradient = loss_and_gradient(PolicyLossConfig(kind="reinforce"), aggregation="token_mean")
    torch.testing.assert_close(gradient, -ADVANTAGES / 6)
    assert result.loss.item() == pytest.approx(-(ADVANTAGES * (OLD + MOVED)).mean().item(), rel=1e-12)


@pytest.mark.parametrize("ratio", ["token", "sequence", "sequence_mean"])
def test_on_policy_all_kinds_have_the_same_gradient(ratio):
    gradients = []
    for kind in ("clip", "cispo", "sapo", "reinforce"):
        loss = PolicyLossConfig(kind=kind, ratio=ratio)
        gradients.append(loss_and_gradient(loss, moved=torch.zeros(6, dtype=torch.float64))[1])
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], gradients[2])
    torch.testing.assert_close(gradients[0], gradients[3])
    whole = 1.0 if ratio == "sequence" else 1.0 / COUNTS[ROW]
    torch.testing.assert_close(gradients[0], -ADVANTAGES * whole / 3)


def test_a_positive_advantage_raises_the_log_probability_and_a_negative_one_lowers_it():
    for kind in ("clip", "cispo", "sapo", "reinforce"):
        for ratio in ("token", "sequence", "sequence_mean"):
            loss = PolicyLossConfig(kind=kind, ratio=ratio)
            _, gradient = loss_and_gradient(loss, moved=torch.zeros(6, dtype=torch.float64))
            assert (torch.sign(-gradient) == torch.sign(ADVANTAGES)).all()


def test_importance_weights_are_truncated_and_carry_no_gradient():
    proximal = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    behaviour = torch.tensor([-1.0, -3.0, -0.5])
    weight = importance_weight(proximal, behaviour, 2.0)
    torch.testing.assert_close(weight, torch.tensor([1.0, 2.0, math.exp(-0.5)]))
    assert not weight.requires_grad


def test_the_decoupled_objective_weighs_the_clipped_loss_by_proximal_over_behaviour():
    behaviour = OLD - torch.tensor([0.1, -0.4, 2.0, 0.0, 0.3, -0.2], dtype=torch.float64)
    logprobs = (OLD + MOVED).requires_grad_()
    inputs = LossInputs(
        ROW,
        3,
        logprobs,
        weights_of("token_mean"),
        proximal_logprobs=OLD,
        behaviour_logprobs=behaviour,
        advantages=ADVANTAGES,
    )
    result = policy_objective(PolicyStep(PolicyLossConfig(), 1.0, importance_cap=1.5), inputs)
    result.loss.backward()
    weight = torch.exp(OLD - behaviour).clamp(max=1.5)
    r = torch.exp(MOVED)
    held = torch.tensor([-r[0], -1.2, -r[2], 1.6, -0.5 * r[4], -0.5 * r[5]], dtype=torch.float64)
    assert result.loss.item() == pytest.approx((weight * held).mean().item(), rel=1e-12)
    expected = (
        torch.tensor([-r[0], 0.0, -r[2], 0.0, -0.5 * r[4], -0.5 * r[5]], dtype=torch.float64) * weight / 6
    )
    torch.testing.assert_close(logprobs.grad, expected)
    assert result.metrics["importance_weight_sum"] == pytest.approx(weight.sum().item())
    assert result.metrics["gap_sum"] == pytest.approx(3.0)
    assert result.metrics["gap_max"] == pytest.approx(2.0)


def test_the_clipped_value_loss_takes_the_worse_of_two_squared_errors_per_token():
    values = torch.tensor([1.0, 2.0, 0.1, -1.0], dtype=torch.float64, requires_grad=True)
    old, returns = torch.tensor([0.5, 1.0, 0.0, 0.0]).double(), torch.tensor([2.0, 3.0, 1.0, -2.0]).double()
    surrogate = clipped_value_loss(values, old, returns, 0.2)
    # held values 0.7, 1.2, 0.1, -0.2: errors 1.3, 1.8, 0.9, 1.8 against 1, 1, 0.9, 1
    expected = torch.tensor([0.845, 1.62, 0.405, 1.62], dtype=torch.float64)
    torch.testing.assert_close(surrogate.loss.detach(), expected)
    assert surrogate.clipped.tolist() == [True, True, False, True]
    surrogate.loss.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([0.0, 0.0, -0.9, 0.0], dtype=torch.float64))


def test_an_overshooting_value_still_has_a_gradient_back():
    values = torch.tensor([3.0], requires_grad=True)
    clipped_value_loss(values, torch.tensor([0.0]), torch.tensor([1.0]), 0.2).loss.sum().backward()
    assert values.grad.item() == pytest.approx(2.0)


def test_a_separate_critics_step_is_the_weighted_value_loss_alone():
    values = torch.tensor([1.0, 0.1], requires_grad=True)
    inputs = LossInputs(
        torch.tensor([0, 1]),
        2,
        torch.zeros(2),
        torch.tensor([0.25, 0.5]),
        values=values,
        old_values=torch.tensor([0.5, 0.0]),
        returns=torch.tensor([2.0, 1.0]),
    )
    result = value_objective(ValueStep(clip_value=0.2), inputs)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(0.25 * 0.845 + 0.5 * 0.405)
    assert values.grad[0].item() == 0.0
    assert values.grad[1].item() == pytest.approx(-0.45)
    assert result.metrics["value_loss_sum"] == pytest.approx(1.25)
    assert result.metrics["value_clipfrac_sum"] == 1


def test_cross_entropy_is_the_weighted_sum_of_surprise():
    logprobs = torch.tensor([-1.0, -2.0, -4.0], requires_grad=True)
    inputs = LossInputs(torch.tensor([0, 0, 1]), 2, logprobs, torch.tensor([0.5, 0.0, 0.25]))
    result = cross_entropy_objective(CrossEntropyStep(), inputs)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(1.5)
    assert logprobs.grad.tolist() == [-0.5, 0.0, -0.25]
    assert result.metrics == {"loss_sum": 1.5, "tokens_sum": 2, "rows_sum": 2, "nll_sum": 5.0}
