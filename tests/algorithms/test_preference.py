"""The losses of fixed data against numbers worked out by hand or by an independent numpy implementation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rl_cluster.algorithms.inputs import LossInputs
from rl_cluster.algorithms.preference import (
    bradley_terry_loss,
    hinge_loss,
    ipo_loss,
    kto_loss,
    log_odds,
    odds_ratio_loss,
    sigmoid_loss,
)
from rl_cluster.algorithms.steps import DPOStep, KTOStep, ORPOStep, RewardStep
from rl_cluster.algorithms.table import compute_loss
from rl_cluster.algorithms.weights import row_weights

ROW = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3])
LENGTHS = np.array([3, 2, 4, 1])
"""Two pairs: responses of 3 and 2, of 4 and 1 tokens."""


def sigma(x: np.ndarray | float) -> np.ndarray | float:
    return 1 / (1 + np.exp(-np.asarray(x, dtype=np.float64)))


def make_inputs(seed: int = 0, **columns: object) -> LossInputs:
    random = np.random.default_rng(seed)
    weights = row_weights("sequence_mean", LENGTHS, 128)[ROW.numpy()]
    fields = {
        "logprobs": torch.tensor(-random.uniform(0.1, 3, len(ROW)), dtype=torch.float32),
        "reference_logprobs": torch.tensor(-random.uniform(0.1, 3, len(ROW)), dtype=torch.float32),
        "weights": torch.tensor(weights, dtype=torch.float32),
    } | columns
    return LossInputs(row=ROW, num_rows=4, **fields)  # type: ignore[arg-type]


def sums(column: torch.Tensor) -> np.ndarray:
    return np.array([column.double().numpy()[ROW.numpy() == row].sum() for row in range(4)])


def test_sigmoid_loss_is_dpo_and_its_smoothing_mixes_in_the_wrong_label() -> None:
    delta = torch.tensor([0.0, 2.0, -3.0])
    plain = -np.log(sigma(0.5 * delta.numpy()))
    assert sigmoid_loss(delta, 0.5, 0.0).numpy() == pytest.approx(plain, rel=1e-6)
    assert float(sigmoid_loss(delta, 0.5, 0.0)[1]) == pytest.approx(math.log(1 + math.exp(-1)), rel=1e-6)
    mixed = -0.9 * np.log(sigma(0.5 * delta.numpy())) - 0.1 * np.log(sigma(-0.5 * delta.numpy()))
    assert sigmoid_loss(delta, 0.5, 0.1).numpy() == pytest.approx(mixed, rel=1e-6)


def test_losses_by_hand() -> None:
    assert float(ipo_loss(torch.tensor(1.0), 0.1, 0.0)) == pytest.approx((1 - 5) ** 2)
    assert hinge_loss(torch.tensor([4.0, -5.0, 20.0]), 0.1, 0.0).tolist() == pytest.approx([0.6, 1.5, 0.0])
    assert float(bradley_terry_loss(torch.tensor(2.0), torch.tensor(0.5), 1.0)) == pytest.approx(
        math.log(1 + math.exp(-0.5)), rel=1e-6
    )
    # p = ½ per token: odds 1; p = ¼: odds ⅓; so the odds ratio is 3 and the loss −log(3/4).
    half, quarter = torch.tensor(math.log(0.5)), torch.tensor(math.log(0.25))
    assert float(log_odds(half)) == pytest.approx(0.0, abs=1e-6)
    assert float(log_odds(quarter)) == pytest.approx(math.log(1 / 3), rel=1e-6)
    assert float(odds_ratio_loss(half, quarter)) == pytest.approx(-math.log(0.75), rel=1e-6)


def test_bradley_terry_swapped_adds_up_to_the_negated_difference() -> None:
    a, b = torch.tensor([0.3, -2.0]), torch.tensor([1.5, 0.7])
    difference = bradley_terry_loss(a, b) - bradley_terry_loss(b, a)
    assert difference.numpy() == pytest.approx((b - a).numpy(), rel=1e-5)


def test_kto_weighs_desirable_and_undesirable_rows_against_the_baseline() -> None:
    losses = kto_loss(torch.tensor([3.0, 3.0]), torch.tensor([True, False]), 1.0, 0.5, 2.0, 0.25)
    assert losses.tolist() == pytest.approx([2 * (1 - sigma(1.0)), 0.25 * (1 - sigma(-1.0))], rel=1e-6)


@pytest.mark.parametrize("logprob", [0.0, -1e-9, -0.7, -50.0, -1e4])
def test_log_odds_and_its_gradient_are_finite_everywhere(logprob: float) -> None:
    value = torch.tensor([logprob], requires_grad=True)
    result = log_odds(value)
    result.sum().backward()
    assert value.grad is not None
    assert bool(torch.isfinite(result)) and bool(torch.isfinite(value.grad))


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge"])
def test_dpo_step_equals_numpy_on_summed_log_ratios(loss: str) -> None:
    inputs = make_inputs()
    smoothing = 0.1 if loss == "sigmoid" else 0.0
    result = compute_loss(DPOStep(0.3, loss, smoothing), inputs)  # type: ignore[arg-type]
    assert inputs.reference_logprobs is not None
    ratios = sums(inputs.logprobs) - sums(inputs.reference_logprobs)
    if loss == "ipo":
        ratios = ratios / LENGTHS
    delta = ratios[0::2] - ratios[1::2]
    expected = {
        "sigmoid": -0.9 * np.log(sigma(0.3 * delta)) - 0.1 * np.log(sigma(-0.3 * delta)),
        "ipo": (delta - 1 / 0.6) ** 2,
        "hinge": np.maximum(0, 1 - 0.3 * delta),
    }[loss]
    assert float(result.loss) == pytest.approx(expected.mean(), rel=1e-5)
    assert result.metrics["example_loss_sum"] == pytest.approx(expected.sum(), rel=1e-5)
    assert result.metrics["examples_sum"] == 2
    assert result.metrics["tokens_sum"] == 10
    assert result.metrics["accuracy_sum"] == (delta > 0).sum()
    assert result.metrics["chosen_rewards_sum"] == pytest.approx(0.3 * ratios[0::2].sum(), rel=1e-5)
    assert result.metrics["rejected_rewards_sum"] == pytest.approx(0.3 * ratios[1::2].sum(), rel=1e-5)
    assert result.metrics["chosen_logps_sum"] == pytest.approx(sums(inputs.logprobs)[0::2].sum(), rel=1e-5)
    assert result.metrics["rejected_logps_sum"] == pytest.approx(sums(inputs.logprobs)[1::2].sum(), rel=1e-5)


def test_reference_free_dpo_ignores_the_reference() -> None:
    inputs = make_inputs(reference_logprobs=None)
    result = compute_loss(DPOStep(0.3, reference_free=True), inputs)
    logprobs = sums(inputs.logprobs)
    expected = -np.log(sigma(0.3 * (logprobs[0::2] - logprobs[1::2]))).mean()
    assert float(result.loss) == pytest.approx(expected, rel=1e-5)


def test_only_the_reference_sum_of_a_row_matters() -> None:
    inputs = make_inputs()
    assert inputs.reference_logprobs is not None
    moved = torch.zeros(len(ROW))
    moved[[2, 4, 8, 9]] = torch.tensor(sums(inputs.reference_logprobs), dtype=torch.float32)
    other = make_inputs(reference_logprobs=moved)
    assert float(compute_loss(DPOStep(), inputs).loss) == pytest.approx(
        float(compute_loss(DPOStep(), other).loss), rel=1e-6
    )


def test_orpo_step_equals_numpy_on_length_averaged_likelihoods() -> None:
    inputs = make_inputs()
    result = compute_loss(ORPOStep(0.4), inputs)
    mean = sums(inputs.logprobs) / LENGTHS
    odds = np.exp(mean) / (1 - np.exp(mean))
    ratio = -np.log(sigma(np.log(odds[0::2] / odds[1::2])))
    assert float(result.loss) == pytest.approx((-mean[0::2] + 0.4 * ratio).mean(), rel=1e-5)
    assert result.metrics["nll_sum"] == pytest.approx(-mean[0::2].sum(), rel=1e-5)
    assert result.metrics["odds_ratio_loss_sum"] == pytest.approx(ratio.sum(), rel=1e-5)


def test_kto_step_takes_its_labels_from_the_batch() -> None:
    labels = torch.zeros(len(ROW))
    labels[[2, 4, 8, 9]] = torch.tensor([1.0, -1.0, -1.0, 1.0])
    inputs = make_inputs(labels=labels)
    result = compute_loss(KTOStep(0.5, 1.5, 0.5, z0=0.25), inputs)
    assert inputs.reference_logprobs is not None
    ratios = sums(inputs.logprobs) - sums(inputs.reference_logprobs)
    good = np.array([True, False, False, True])
    value = np.where(good, 0.5 * (ratios - 0.25), 0.5 * (0.25 - ratios))
    expected = np.where(good, 1.5, 0.5) * (1 - sigma(value))
    assert float(result.loss) == pytest.approx(expected.mean(), rel=1e-5)
    assert result.metrics["accuracy_sum"] == (value > 0).sum()
    assert result.metrics["chosen_sum"] == result.metrics["rejected_sum"] == 2
    assert result.metrics["chosen_rewards_sum"] == pytest.approx(0.5 * ratios[good].sum(), rel=1e-5)
    assert result.metrics["rejected_rewards_sum"] == pytest.approx(0.5 * ratios[~good].sum(), rel=1e-5)


def test_a_kto_row_is_right_where_its_reward_is_on_its_side_of_the_baseline() -> None:
    inputs = LossInputs(
        logprobs=torch.tensor([2.0, 0.5, 2.0]) - 3.0,
        reference_logprobs=torch.full((3,), -3.0),
        labels=torch.tensor([1.0, -1.0, 1.0]),
        weights=torch.full((3,), 1 / 3),
        row=torch.arange(3),
        num_rows=3,
    )
    # Log-ratios 2, ½ and 2 against z0 = 1: the desirable ones are above, the other one below.
    assert compute_loss(KTOStep(0.1, z0=1.0), inputs).metrics["accuracy_sum"] == 3


def test_reward_step_takes_margins_and_centres_the_scores() -> None:
    weights = torch.full((4,), 0.25)
    fields = {"logprobs": torch.zeros(4), "weights": weights, "row": torch.arange(4), "num_rows": 4}
    values, margins = torch.tensor([1.0, 0.5, -1.0, 2.0]), torch.tensor([0.3, 9.0, 0.0, 9.0])
    result = compute_loss(RewardStep(0.1, 0.01), LossInputs(values=values, margins=margins, **fields))
    expected = [np.log(1 + np.exp(-0.1)) + 0.01 * 2.25, np.log(1 + np.exp(3.1)) + 0.01 * 1.0]
    assert float(result.loss) == pytest.approx(np.mean(expected), rel=1e-6)
    assert result.metrics["accuracy_sum"] == 1


def test_pairs_of_weight_zero_count_nowhere() -> None:
    whole = make_inputs()
    weights = whole.weights * torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0, 0, 0])
    inputs = make_inputs(weights=weights)
    result = compute_loss(DPOStep(), inputs)
    assert result.metrics["examples_sum"] == 1
    assert result.metrics["tokens_sum"] == 5
    assert result.metrics["chosen_logps_sum"] == pytest.approx(float(sums(inputs.logprobs)[0]), rel=1e-5)


def test_gradient_of_dpo_is_that_of_the_formula() -> None:
    logprobs = torch.tensor(-np.random.default_rng(1).uniform(0.1, 3, len(ROW)), dtype=torch.float32)
    logprobs.requires_grad_(True)
    inputs = make_inputs(logprobs=logprobs)
    compute_loss(DPOStep(0.3), inputs).loss.backward()
    assert inputs.reference_logprobs is not None and logprobs.grad is not None
    ratios = sums(logprobs.detach()) - sums(inputs.reference_logprobs)
    slope = -0.3 * (1 - sigma(0.3 * (ratios[0::2] - ratios[1::2]))) / 2
    expected = np.repeat(slope, 2) * np.array([1, -1, 1, -1])
    assert logprobs.grad.numpy() == pytest.approx(expected[ROW.numpy()], rel=1e-5)
