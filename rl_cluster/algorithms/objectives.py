"""A loss step and the tensors of a micro-batch go in, a LossResult comes out: losses.py put together."""

from __future__ import annotations

import torch

from rl_cluster.algorithms.inputs import LossInputs, LossResult
from rl_cluster.algorithms.kl import kl_per_token, log_ratio, safe_logprobs
from rl_cluster.algorithms.losses import (
    RATIO_LEVELS,
    Surrogate,
    cispo_loss,
    clip_loss,
    clipped_value_loss,
    cross_entropy_loss,
    importance_weight,
    policy_ratio,
    reinforce_loss,
    row_mean,
    sapo_loss,
    weight_truncated,
)
from rl_cluster.algorithms.steps import CrossEntropyStep, PolicyStep, ValueStep
from rl_cluster.config.algorithm import PolicyLossConfig

Columns = dict[str, torch.Tensor]
"""metric name -> [A]; _result sums them over the tokens that train, plainly and weighted."""


def _clip(
    ratio: torch.Tensor, _: torch.Tensor, advantages: torch.Tensor, loss: PolicyLossConfig
) -> Surrogate:
    return clip_loss(ratio, advantages, loss.clip_low, loss.clip_high)


def _cispo(
    ratio: torch.Tensor, log_prob: torch.Tensor, advantages: torch.Tensor, loss: PolicyLossConfig
) -> Surrogate:
    return cispo_loss(ratio, log_prob, advantages, 1.0 + loss.clip_high)


def _sapo(
    ratio: torch.Tensor, _: torch.Tensor, advantages: torch.Tensor, loss: PolicyLossConfig
) -> Surrogate:
    return sapo_loss(ratio, advantages, loss.temperature_positive, loss.temperature_negative)


def _reinforce(
    _: torch.Tensor, log_prob: torch.Tensor, advantages: torch.Tensor, __: PolicyLossConfig
) -> Surrogate:
    return reinforce_loss(log_prob, advantages)


SURROGATES = {"clip": _clip, "cispo": _cispo, "sapo": _sapo, "reinforce": _reinforce}

MOVE_WITH_RATIO = frozenset({"clip", "sapo"})
"""The kinds whose gradient goes through the ratio; the others are sums over the tokens' log π."""


def policy_objective(step: PolicyStep, inputs: LossInputs) -> LossResult:
    """Surrogate − entropy_coef · entropy + kl_coef · KL (+ value_coef · value loss), weighted and summed.

    Needs advantages; and proximal_logprobs when the weights have moved since the batch was drawn (None: the
    present policy is the old one, every ratio is 1), behaviour_logprobs for importance_cap,
    reference_logprobs for kl_coef above 0, values, old_values and returns for value_coef above 0.
    """
    # The zero keeps the policy's parameters in the graph when only the values learn.
    per_token = 0.0 * safe_logprobs(inputs.logprobs)
    columns: Columns = {}
    maxima = _logprob_gap(step, inputs, columns)
    if step.train_policy:
        per_token = per_token + _policy_terms(step, inputs, columns)
    if step.value_coef > 0:
        per_token = per_token + step.value_coef * _value_terms(step.clip_value, inputs, columns)
    return _result(inputs, per_token, columns, maxima)


def value_objective(step: ValueStep, inputs: LossInputs) -> LossResult:
    """The clipped value loss of a critic of its own; needs values, old_values and returns."""
    columns: Columns = {}
    return _result(inputs, _value_terms(step.clip_value, inputs, columns), columns, {})


def cross_entropy_objective(_step: CrossEntropyStep, inputs: LossInputs) -> LossResult:
    """−Σ weights · log π."""
    nll = cross_entropy_loss(inputs.logprobs)
    return _result(inputs, nll, {"nll_sum": nll}, {})


def _policy_terms(step: PolicyStep, inputs: LossInputs, columns: Columns) -> torch.Tensor:
    assert inputs.advantages is not None, "the policy loss needs advantages"
    log_prob = safe_logprobs(inputs.logprobs)
    moved = log_ratio(inputs.logprobs.detach(), _old_logprobs(inputs))
    level, share = RATIO_LEVELS[step.loss.ratio](moved, inputs.row, inputs.num_rows)
    ratio = policy_ratio(level, log_prob, share)
    surrogate = SURROGATES[step.loss.kind](ratio, share * log_prob, inputs.advantages, step.loss)
    loss = surrogate.loss
    if step.importance_cap is not None:
        loss = loss * _correction(step.loss, step.importance_cap, inputs, columns)
    columns["policy_loss_sum"] = loss
    columns["approxkl_sum"] = 0.5 * level.square()
    columns["clipfrac_sum"] = surrogate.clipped
    columns["ratio_sum"] = ratio
    columns["ratio_sq_sum"] = ratio.detach().double().square()
    return loss + _entropy_term(step, inputs, columns) + _kl_term(step, inputs, columns)


def _correction(loss: PolicyLossConfig, cap: float, inputs: LossInputs, columns: Columns) -> torch.Tensor:
    """[A]: what each token's loss is multiplied with, without gradient.

    Where a row's ratio is one number, all its tokens move it, so they share one weight, the mean of theirs:
    with the weights of single tokens the gradient would not be that of the loss.
    """
    assert inputs.behaviour_logprobs is not None, "importance_cap needs the behaviour's log-probabilities"
    pair = _old_logprobs(inputs), inputs.behaviour_logprobs
    weight = importance_weight(*pair, cap)
    columns["importance_weight_sum"] = weight
    columns["importance_truncated_sum"] = weight_truncated(*pair, cap)
    if loss.ratio == "token" or loss.kind not in MOVE_WITH_RATIO:
        return weight
    return row_mean(weight, inputs.row, inputs.num_rows)


def _entropy_term(step: PolicyStep, inputs: LossInputs, columns: Columns) -> torch.Tensor | float:
    if inputs.entropy is not None:
        columns["entropy_sum"] = inputs.entropy
    if step.loss.entropy_coef == 0:
        return 0.0
    assert inputs.entropy is not None, "entropy_coef needs the entropy"
    return -step.loss.entropy_coef * inputs.entropy


def _kl_term(step: PolicyStep, inputs: LossInputs, columns: Columns) -> torch.Tensor | float:
    if step.kl_coef == 0:
        return 0.0
    assert inputs.reference_logprobs is not None, "kl_coef needs the reference's log-probabilities"
    kl = kl_per_token(inputs.logprobs, inputs.reference_logprobs, step.kl_estimator)
    columns["kl_sum"] = kl
    return step.kl_coef * kl


def _value_terms(clip_value: float, inputs: LossInputs, columns: Columns) -> torch.Tensor:
    assert inputs.values is not None, "the value loss needs the critic's values"
    assert inputs.old_values is not None, "the value loss needs the values from before the update"
    assert inputs.returns is not None, "the value loss needs returns"
    surrogate = clipped_value_loss(inputs.values, inputs.old_values, inputs.returns, clip_value)
    columns["value_loss_sum"] = surrogate.loss
    columns["value_clipfrac_sum"] = surrogate.clipped
    return surrogate.loss


def _old_logprobs(inputs: LossInputs) -> torch.Tensor:
    return inputs.logprobs.detach() if inputs.proximal_logprobs is None else inputs.proximal_logprobs


def _logprob_gap(step: PolicyStep, inputs: LossInputs, columns: Columns) -> dict[str, torch.Tensor]:
    """|learner's − engine's log-probability|: of tokens drawn by the step's version a mismatch of the two
    (gap), of older ones mostly how far the policy has moved (drift)."""
    if inputs.behaviour_logprobs is None:
        return {}
    gap = log_ratio(_old_logprobs(inputs), inputs.behaviour_logprobs).abs()
    if step.version is None or inputs.policy_versions is None:
        columns["gap_sum"] = gap
        return {"gap_max": gap}
    fresh = inputs.policy_versions >= step.version
    columns["fresh_sum"], columns["nll_sum"] = fresh, -_old_logprobs(inputs)
    columns["gap_sum"], columns["drift_sum"] = torch.where(fresh, gap, 0.0), torch.where(fresh, 0.0, gap)
    return {"gap_max": columns["gap_sum"], "drift_max": columns["drift_sum"]}


def _result(
    inputs: LossInputs, per_token: torch.Tensor, columns: Columns, maxima: dict[str, torch.Tensor]
) -> LossResult:
    """The loss, and the columns over the tokens whose weight is not 0: summed plainly, and weighted."""
    live = inputs.weights != 0
    weights = inputs.weights.double()
    loss = torch.where(live, inputs.weights * per_token, 0.0).sum()
    rows = torch.zeros(inputs.num_rows, dtype=torch.bool, device=live.device)
    rows[inputs.row[live]] = True
    scalars = {"loss_sum": loss.detach().double()}
    scalars |= {"tokens_sum": live.sum().double(), "rows_sum": rows.sum().double()}
    weighted = {"weight_total": weights.sum()}
    for name, column in columns.items():
        numbers = torch.where(live, column.detach().double(), 0.0)
        scalars[name] = numbers.sum()
        weighted[f"{name.removesuffix('_sum')}_weighted"] = (weights * numbers).sum()
    for name, column in maxima.items():
        zero = column.new_zeros(1, dtype=torch.float64)
        scalars[name] = torch.cat([torch.where(live, column.detach().double(), 0.0), zero]).max()
    # One transfer for all of them: each .item() would wait for the GPU.
    values = torch.stack([*scalars.values(), *weighted.values()]).tolist()
    return LossResult(
        loss,
        dict(zip(scalars, values[: len(scalars)], strict=True)),
        dict(zip(weighted, values[len(scalars) :], strict=True)),
    )
