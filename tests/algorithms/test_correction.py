"""The truncated weight π_proximal / π_behaviour: loss, gradient and metrics against plain autograd."""

from __future__ import annotations

import math

import pytest
import torch

from rl_cluster.algorithms.inputs import LossInputs, LossResult
from rl_cluster.algorithms.objectives import policy_objective
from rl_cluster.algorithms.steps import PolicyStep
from rl_cluster.algorithms.weights import row_weights
from rl_cluster.config.algorithm import PolicyLossConfig

COUNTS = (1, 6, 2, 5, 3, 4)
ROW = torch.repeat_interleave(torch.arange(6), torch.tensor(COUNTS))
KINDS = ("clip", "cispo", "sapo", "reinforce")
LEVELS = ("token", "sequence", "sequence_mean")


def a_batch(seed: int) -> dict[str, torch.Tensor]:
    """float64 [A]; an advantage per row."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(COUNTS)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    old = -torch.rand(size, generator=generator, dtype=torch.float64) - 0.3
    return {
        "now": old + noise(0.1),
        "proximal": old,
        "behaviour": old + noise(0.4),
        "reference": old + noise(0.2),
        "advantages": torch.randn(6, generator=generator, dtype=torch.float64)[ROW],
    }


def objective(
    draw: dict[str, torch.Tensor], loss: PolicyLossConfig, cap: float | None, **step: float
) -> tuple[LossResult, torch.Tensor]:
    weights = torch.from_numpy(row_weights(loss.aggregation, torch.tensor(COUNTS).numpy(), 8))[ROW]
    logprobs = draw["now"].clone().requires_grad_()
    inputs = LossInputs(
        ROW,
        6,
        logprobs,
        weights,
        proximal_logprobs=draw["proximal"],
        behaviour_logprobs=draw["behaviour"],
        reference_logprobs=draw["reference"],
        advantages=draw["advantages"],
    )
    result = policy_objective(PolicyStep(loss, 1.0, importance_cap=cap, **step), inputs)  # type: ignore[arg-type]
    result.loss.backward()
    assert logprobs.grad is not None
    return result, logprobs.grad


def plain(
    draw: dict[str, torch.Tensor], loss: PolicyLossConfig, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Written row by row, differentiated by autograd through whole ratios."""
    logprobs = draw["now"].clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for i, count in enumerate(COUNTS):
        new, old, behaviour = (x[i == ROW] for x in (logprobs, draw["proximal"], draw["behaviour"]))
        advantage = draw["advantages"][i == ROW][0]
        d = new - old
        length = 1.0
        if loss.ratio == "sequence":
            d, length = d.sum().expand(count), float(count)
        elif loss.ratio == "sequence_mean":
            d = d.mean().expand(count)
        ratio = d.exp()
        if loss.kind == "clip":
            held = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
            per_token = torch.maximum(-advantage * ratio, -advantage * held)
        elif loss.kind == "cispo":
            per_token = -ratio.clamp(max=1 + loss.clip_high).detach() * advantage * new * length
        elif loss.kind == "sapo":
            tau = loss.temperature_positive if advantage > 0 else loss.temperature_negative
            per_token = -advantage * 4 / tau * torch.sigmoid(tau * (ratio - 1))
        else:
            per_token = -advantage * new * length
        if cap is not None:
            per_token = per_token * (old - behaviour).exp().clamp(max=cap)
        share = {"token_mean": 1 / sum(COUNTS), "sequence_mean": 1 / (6 * count), "constant": 1 / (6 * 8)}
        total = total + per_token.sum() * share[loss.aggregation]
    total.backward()
    assert logprobs.grad is not None
    return total.detach(), logprobs.grad


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant"])
@pytest.mark.parametrize("cap", [None, 1.1, 100.0], ids=["uncorrected", "truncated", "free"])
@pytest.mark.parametrize("ratio", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_the_loss_that_is_reported(
    kind: str, ratio: str, cap: float | None, aggregation: str
) -> None:
    loss = PolicyLossConfig.model_validate(
        {"kind": kind, "ratio": ratio, "clip_high": 0.15, "aggregation": aggregation}
    )
    for seed in range(4):
        draw = a_batch(seed)
        result, gradient = objective(draw, loss, cap)
        value, expected = plain(draw, loss, cap)
        assert result.metrics["loss_sum"] == pytest.approx(value.item(), rel=1e-6)
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("ratio", LEVELS)
def test_the_weight_its_truncated_share_and_the_divergence_are_counted_as_the_objective_weighs(
    ratio: str,
) -> None:
    draw = a_batch(7)
    loss = PolicyLossConfig.model_validate({"ratio": ratio, "aggregation": "sequence_mean"})
    result, _ = objective(draw, loss, 1.2, kl_coef=0.1)
    free = (draw["proximal"] - draw["behaviour"]).exp()
    d = draw["now"] - draw["reference"]
    expected = {
        "importance_weight": free.clamp(max=1.2),
        "importance_truncated": (free > 1.2).double(),
        "kl": (-d).exp() - 1 + d,
    }
    for name, column in expected.items():
        rows = torch.stack([column[i == ROW].mean() for i in range(6)])
        assert result.weighted[f"{name}_weighted"] == pytest.approx(rows.mean().item(), rel=1e-10), name
    assert 0 < result.weighted["importance_truncated_weighted"] < 1
    assert result.weighted["weight_total"] == pytest.approx(1.0)


@pytest.mark.parametrize("ratio", LEVELS)
def test_tokens_of_unknown_behaviour_count_as_they_are(ratio: str) -> None:
    draw = a_batch(2)
    loss = PolicyLossConfig.model_validate({"ratio": ratio})
    draw["behaviour"] = torch.full_like(draw["behaviour"], math.nan)
    result, gradient = objective(draw, loss, 2.0)
    uncorrected, expected = objective(draw, loss, None)
    assert result.loss.item() == uncorrected.loss.item()
    assert torch.equal(gradient, expected)
    assert result.weighted["importance_weight_weighted"] == pytest.approx(1.0)
    assert result.weighted["importance_truncated_weighted"] == 0.0
