"""A loss step and the tensors of a micro-batch in, a LossResult out: preference.py weighed and summed.

The weight of a row is the sum of its tokens' weights, that of a pair the sum of its two rows'. Over an
optimizer step these are one over the number of pairs (or rows), so the loss is the mean over the step.
Metrics are plain sums over the pairs (rows) of weight above 0; `examples_sum` is their denominator.
"""

from __future__ import annotations

import torch

from rl_cluster.algorithms.inputs import LossInputs, LossResult
from rl_cluster.algorithms.kl import safe_logprobs
from rl_cluster.algorithms.preference import (
    LENGTH_AVERAGED,
    PAIR_LOSSES,
    bradley_terry_loss,
    kto_loss,
    odds_ratio_loss,
    row_lengths,
    row_totals,
)
from rl_cluster.algorithms.steps import DPOStep, KTOStep, ORPOStep, RewardStep

Columns = dict[str, torch.Tensor]
"""metric name -> [P] or [R]; summed over the examples that train."""


def dpo_objective(step: DPOStep, inputs: LossInputs) -> LossResult:
    """DPO and its kin; needs reference_logprobs (their sum per row counts) unless reference_free."""
    logprobs, ratios = _row_logprobs(inputs), _row_log_ratios(inputs, step.reference_free)
    if step.loss in LENGTH_AVERAGED:
        ratios = ratios / row_lengths(inputs.row, inputs.num_rows)
    chosen, rejected = _pairs(ratios)
    losses = PAIR_LOSSES[step.loss](chosen - rejected, step.beta, step.label_smoothing)
    columns = _pair_columns(step.beta * chosen, step.beta * rejected) | _logp_columns(logprobs)
    return _result(_pair_weights(inputs), losses, columns, inputs)


def orpo_objective(step: ORPOStep, inputs: LossInputs) -> LossResult:
    """Mean NLL of the chosen response + λ · odds-ratio loss; Hong et al. 2024, equation 6. No reference."""
    logprobs = _row_logprobs(inputs)
    chosen, rejected = _pairs(logprobs / row_lengths(inputs.row, inputs.num_rows))
    ratio_losses = odds_ratio_loss(chosen, rejected)
    columns = _pair_columns(step.coef * chosen, step.coef * rejected) | _logp_columns(logprobs)
    columns |= {"nll_sum": -chosen, "odds_ratio_loss_sum": ratio_losses}
    return _result(_pair_weights(inputs), -chosen + step.coef * ratio_losses, columns, inputs)


def kto_objective(step: KTOStep, inputs: LossInputs) -> LossResult:
    """Rows stand alone; a label is above 0 where desirable. Needs reference_logprobs."""
    assert inputs.labels is not None, "KTO needs the rows' labels"
    logprobs, ratios = _row_logprobs(inputs), _row_log_ratios(inputs, reference_free=False)
    desirable = row_totals(inputs.labels, inputs.row, inputs.num_rows) > 0
    losses = kto_loss(ratios, desirable, step.z0, step.beta, step.desirable_weight, step.undesirable_weight)
    rewards, undesirable = step.beta * ratios.detach(), ~desirable
    columns: Columns = {
        "accuracy_sum": (rewards > step.beta * step.z0) == desirable,
        "chosen_rewards_sum": torch.where(desirable, rewards, 0.0),
        "rejected_rewards_sum": torch.where(undesirable, rewards, 0.0),
        "chosen_logps_sum": torch.where(desirable, logprobs, 0.0),
        "rejected_logps_sum": torch.where(undesirable, logprobs, 0.0),
        "chosen_sum": desirable,
        "rejected_sum": undesirable,
    }
    return _result(_row_weights(inputs), losses, columns, inputs)


def reward_objective(step: RewardStep, inputs: LossInputs) -> LossResult:
    """Bradley-Terry on the score of each row, plus centre · (r_chosen + r_rejected)² (Eisenstein 2023).

    A row's score is the value at its only action; the pair's own margin, where given on the chosen row, is
    added to the step's.
    """
    assert inputs.values is not None, "reward training needs scores"
    chosen, rejected = _pairs(row_totals(inputs.values, inputs.row, inputs.num_rows))
    margin: torch.Tensor | float = step.margin
    if inputs.margins is not None:
        margin = margin + _pairs(row_totals(inputs.margins, inputs.row, inputs.num_rows))[0]
    losses = bradley_terry_loss(chosen, rejected, margin)
    if step.centre > 0:
        losses = losses + step.centre * (chosen + rejected).square()
    return _result(_pair_weights(inputs), losses, _pair_columns(chosen, rejected), inputs)


def _row_logprobs(inputs: LossInputs) -> torch.Tensor:
    return row_totals(safe_logprobs(inputs.logprobs), inputs.row, inputs.num_rows)


def _row_log_ratios(inputs: LossInputs, reference_free: bool) -> torch.Tensor:
    """[R]: log π − log reference of the row's response; reference_free: the reference is uniform."""
    if reference_free:
        return _row_logprobs(inputs)
    assert inputs.reference_logprobs is not None, "the loss needs the reference's log-probabilities"
    return _row_logprobs(inputs) - row_totals(inputs.reference_logprobs, inputs.row, inputs.num_rows)


def _pairs(values_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(chosen [P], rejected [P])."""
    assert len(values_R) % 2 == 0, "pairs are rows 2i and 2i + 1"
    return values_R[0::2], values_R[1::2]


def _row_weights(inputs: LossInputs) -> torch.Tensor:
    return row_totals(inputs.weights, inputs.row, inputs.num_rows)


def _pair_weights(inputs: LossInputs) -> torch.Tensor:
    chosen, rejected = _pairs(_row_weights(inputs))
    return chosen + rejected


def _pair_columns(chosen: torch.Tensor, rejected: torch.Tensor) -> Columns:
    return {
        "accuracy_sum": chosen > rejected,
        "chosen_rewards_sum": chosen,
        "rejected_rewards_sum": rejected,
        "chosen_sum": torch.ones_like(chosen),
        "rejected_sum": torch.ones_like(rejected),
    }


def _logp_columns(logprobs_R: torch.Tensor) -> Columns:
    chosen, rejected = _pairs(logprobs_R)
    return {"chosen_logps_sum": chosen, "rejected_logps_sum": rejected}


def _result(weights: torch.Tensor, losses: torch.Tensor, columns: Columns, inputs: LossInputs) -> LossResult:
    live = weights != 0
    loss = torch.where(live, weights * losses, 0.0).sum()
    scalars = {
        "loss_sum": loss.detach().double(),
        "tokens_sum": (inputs.weights != 0).sum().double(),
        "examples_sum": live.sum().double(),
        "example_loss_sum": torch.where(live, losses.detach().double(), 0.0).sum(),
    }
    for name, column in columns.items():
        scalars[name] = torch.where(live, column.detach().double(), 0.0).sum()
    # One transfer for all of them: each .item() would wait for the GPU.
    return LossResult(loss, dict(zip(scalars, torch.stack(list(scalars.values())).tolist(), strict=True)))
