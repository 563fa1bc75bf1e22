"""Every argument of every loss changes what comes out, in the constructor, in the config and in the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_cluster.algorithms.kl import kl_per_token
from rl_cluster.losses import (
    AdaptiveLoss,
    CompositeLoss,
    ContrastiveLoss,
    CustomLoss,
    CustomLossConfig,
    FocalLoss,
    ImportanceSamplingLoss,
    KLDivergenceLoss,
    PPOLoss,
    TokenLevelLoss,
    VarianceLoss,
    compute_kl_penalty,
    compute_ppo_loss,
    custom_loss,
    variance_regularization,
)
from rl_cluster.trainers.without_effect import LOSSES

generator = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


B, L, V = 3, 4, 5
LOGPROBS, OLD, REF = -drawn(B, L).abs(), -drawn(B, L).abs(), -drawn(B, L).abs() - 2.0
ADVANTAGES, VALUES, OLD_VALUES, RETURNS = (drawn(B, L) for _ in range(4))
MASK = torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]])
ROW_MASK = torch.tensor([1.0, 1, 0])
LOGITS, LABELS = drawn(B, L, V), torch.randint(0, V, (B, L), generator=generator)
BINARY = torch.randint(0, 2, (B, L), generator=generator)
POSITIVE, NEGATIVE = drawn(B, V), drawn(B, V)
RATIOS = {"log_probs": LOGPROBS, "old_log_probs": OLD, "advantages": ADVANTAGES}
CRITIC = {"values": VALUES, "old_values": OLD_VALUES, "returns": RETURNS}
KL = {"log_probs": LOGPROBS, "ref_log_probs": REF}


def unreduced() -> KLDivergenceLoss:
    return KLDivergenceLoss(CustomLossConfig(name="kl", reduction="none"))


Case = tuple[Callable[..., Any], dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]
"""make, its usual arguments, others for each, the usual call, another value for each argument of the call."""
CASES: dict[str, Case] = {
    "PPOLoss": (
        PPOLoss,
        {"value_clip": 0.5},
        {"clip_param": 0.5, "value_clip": 0.01, "entropy_coef": 0.5, "value_loss_coef": 2.0},
        RATIOS | CRITIC,
        {"mask": MASK, "entropy": torch.ones(B, L)},
    ),
    "ImportanceSamplingLoss": (
        ImportanceSamplingLoss,
        {},
        {"clip_ratio": 0.5, "normalize": False},
        RATIOS,
        {"mask": MASK},
    ),
    "KLDivergenceLoss": (KLDivergenceLoss, {}, {"target_kl": 0.5, "kl_coef": 1.0}, KL, {"mask": MASK}),
    "TokenLevelLoss": (
        TokenLevelLoss,
        {},
        {"ignore_index": int(LABELS[0, 0])},
        {"predictions": LOGITS, "targets": LABELS},
        {"mask": MASK, "per_token_weights": VALUES.abs()},
    ),
    "FocalLoss": (
        FocalLoss,
        {},
        {"alpha": 0.6, "gamma": 0.0},
        {"predictions": ADVANTAGES, "targets": BINARY},
        {},
    ),
    "ContrastiveLoss": (
        ContrastiveLoss,
        {},
        {"margin": 3.0, "distance_metric": "euclidean"},
        {"anchor": drawn(B, V), "positive": POSITIVE, "negative": NEGATIVE},
        {},
    ),
    "VarianceLoss": (
        VarianceLoss,
        {},
        {"target_variance": 3.0, "beta": 1.0},
        {"predictions": drawn(B, V)},
        {"mask": ROW_MASK},
    ),
    "CompositeLoss": (
        CompositeLoss,
        {"losses": [KLDivergenceLoss()]},
        {"losses": [PPOLoss(), KLDivergenceLoss()], "weights": [3.0]},
        RATIOS | KL,
        {"mask": MASK},
    ),
    "AdaptiveLoss": (
        AdaptiveLoss,
        {"base_loss": KLDivergenceLoss(), "schedule_fn": lambda step: 1.0},
        {"base_loss": KLDivergenceLoss(kl_coef=2.0), "schedule_fn": lambda step: 2.0},
        KL,
        {"mask": MASK},
    ),
}
OTHER_CONFIG = {
    "weight": 2.0,
    "reduction": "sum",
    "normalize": True,
    "clip_value": 1e-4,
    "temperature": 2.0,
    "epsilon": 1e3,
}
NO_TEMPERATURE = ("CompositeLoss", "AdaptiveLoss")
"""They refuse one: what it divides only the losses inside know."""


def called(loss: CustomLoss, call: dict[str, Any]) -> Any:
    """CompositeLoss takes the first two by its own names."""
    if isinstance(loss, CompositeLoss):
        rest = {name: value for name, value in call.items() if name not in ("log_probs", "old_log_probs")}
        needs_ppo = any(isinstance(member, PPOLoss) for member in loss.losses)
        if not needs_ppo:
            rest.pop("advantages", None)
        return loss(call["log_probs"], call["old_log_probs"], **rest)
    return loss(**call)


def differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape != other.shape or not torch.allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_every_argument_of_the_constructor_acts(name: str) -> None:
    make, usual, others, call, _ = CASES[name]
    assert set(others) == set(inspect.signature(make).parameters) - {"config"}
    for argument, value in others.items():
        changed = called(make(**usual | {argument: value}), call)
        assert differs(changed, called(make(**usual), call)), argument


@pytest.mark.parametrize("name", CASES)
def test_every_setting_of_the_config_acts_on_every_loss(name: str) -> None:
    make, usual, _, call, _ = CASES[name]
    assert set(OTHER_CONFIG) == set(CustomLossConfig.__dataclass_fields__) - {"name"}
    if name == "CompositeLoss":
        usual = {"losses": [unreduced()]}
    if name == "AdaptiveLoss":
        usual = usual | {"base_loss": unreduced()}
    # epsilon is the smallest denominator: with a mask, or where normalize adds it.
    plain = {"normalize": True} if name != "KLDivergenceLoss" else {}
    for setting, value in OTHER_CONFIG.items():
        if setting == "temperature" and name in NO_TEMPERATURE:
            continue
        base = plain if setting == "epsilon" else {}
        mask = {"mask": MASK} if setting == "epsilon" and not plain else {}
        before = called(make(config=CustomLossConfig(name="x", **base), **usual), call | mask)
        config = CustomLossConfig(name="x", **base | {setting: value})
        assert differs(called(make(config=config, **usual), call | mask), before), setting


@pytest.mark.parametrize("name", CASES)
def test_every_argument_of_the_call_acts(name: str) -> None:
    make, usual, _, call, others = CASES[name]
    loss = make(**usual)
    before = called(loss, call)
    if name not in NO_TEMPERATURE:
        listed = {key.rpartition(" ")[2] for key in LOSSES if key.startswith(name)}
        names = set(inspect.signature(loss.compute_loss).parameters) - listed - {"labels"}
        assert set(call) | set(others) == names
    for argument, value in others.items():
        assert differs(called(loss, call | {argument: value}), before), argument
    for argument, value in call.items():
        if name == "CompositeLoss" and argument in ("old_log_probs", "advantages"):
            continue
        moved = value.roll(1, 0) if not value.is_floating_point() else value + 0.3 * value.flip(0)
        assert differs(called(loss, call | {argument: moved}), before), argument


def test_contrastive_pairs_have_labels_that_act() -> None:
    loss = ContrastiveLoss()
    pair = {"anchor": NEGATIVE, "positive": POSITIVE}
    one, other = (loss(**pair, labels=torch.tensor(labels)) for labels in ([1, 1, 1], [0, 1, 1]))
    assert differs(one, other)


def test_what_the_list_names_as_without_effect_has_none() -> None:
    predictions = drawn(B, V)
    assert not differs(VarianceLoss()(predictions, targets=drawn(B, V)), VarianceLoss()(predictions))
    summed = CustomLossConfig(name="x", reduction="sum")
    for outer in (
        lambda config: CompositeLoss([KLDivergenceLoss()], config=config),
        lambda config: AdaptiveLoss(KLDivergenceLoss(), lambda step: 1.0, config),
    ):
        assert not differs(outer(summed)(LOGPROBS, REF), outer(None)(LOGPROBS, REF))


@pytest.mark.parametrize("masked", [False, True])
def test_the_reductions_of_the_divergence_are_one_sum(masked: bool) -> None:
    """By hand: per token 0.1 · (log π − log π_ref − 0.01); mean = sum / count; 0 under the target."""
    mask = MASK if masked else None
    count = MASK.sum().item() if masked else B * L

    def loss(reduction: Any, ref: torch.Tensor) -> torch.Tensor:
        config = CustomLossConfig(name="kl", reduction=reduction)
        return KLDivergenceLoss(config)(LOGPROBS, ref, mask=mask)

    each = 0.1 * (LOGPROBS - REF - 0.01) * (MASK if masked else 1.0)
    torch.testing.assert_close(loss("none", REF), each)
    torch.testing.assert_close(loss("sum", REF), each.sum())
    torch.testing.assert_close(loss("mean", REF), each.sum() / count)
    torch.testing.assert_close(loss("mean", REF), KLDivergenceLoss().compute_loss(LOGPROBS, REF, mask))
    for reduction in ("none", "sum", "mean"):
        assert not loss(reduction, LOGPROBS + 1.0).any(), "below the target there is no penalty"


def test_the_gradient_of_the_summed_divergence_is_that_of_the_mean_times_the_tokens() -> None:
    def gradient(reduction: Any) -> torch.Tensor:
        leaf = LOGPROBS.clone().requires_grad_()
        KLDivergenceLoss(CustomLossConfig(name="kl", reduction=reduction))(leaf, REF, mask=MASK).backward()
        assert leaf.grad is not None
        return leaf.grad

    leaf = LOGPROBS.clone().requires_grad_()
    (0.1 * kl_per_token(leaf, REF, "k2") * MASK).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(gradient("sum"), leaf.grad)
    torch.testing.assert_close(gradient("mean"), leaf.grad / MASK.sum())


@pytest.mark.parametrize("shape", [(6,), (6, 5), (6, 2, 5)])
def test_the_reductions_of_the_variance_are_over_its_outputs(shape: tuple[int, ...]) -> None:
    predictions = drawn(*shape)

    def loss(reduction: Any) -> torch.Tensor:
        return VarianceLoss(CustomLossConfig(name="v", reduction=reduction), beta=0.3)(predictions)

    parts = (predictions.var(dim=0) - 1.0).square()
    if len(shape) > 1:
        parts = parts - 0.3 * torch.distributions.Categorical(logits=predictions).entropy().mean()
    torch.testing.assert_close(loss("none"), parts)
    torch.testing.assert_close(loss("sum"), parts.sum())
    torch.testing.assert_close(loss("mean"), parts.mean())
    torch.testing.assert_close(loss("mean"), VarianceLoss(beta=0.3).compute_loss(predictions))


def test_reductions_act_inside_other_losses_with_a_mask() -> None:
    inner = VarianceLoss(CustomLossConfig(name="v", reduction="none"))
    predictions = drawn(6, 4)
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0])
    alone = inner(predictions, mask=mask)
    assert alone.shape == (4,)
    torch.testing.assert_close(CompositeLoss([inner])(predictions, None, mask), alone.mean())
    adaptive = AdaptiveLoss(inner, lambda step: 2.0)
    torch.testing.assert_close(adaptive(predictions, mask=mask), 2.0 * alone.mean())
    both = CompositeLoss([unreduced()])
    expected = (0.1 * (LOGPROBS - REF - 0.01) * MASK).sum() / MASK.sum()
    torch.testing.assert_close(both(LOGPROBS, REF, MASK), expected)


def test_return_dict_acts_beside_return_components() -> None:
    composite = CompositeLoss([KLDivergenceLoss()], config=CustomLossConfig(name="sum", weight=2.0))
    answer = composite(LOGPROBS, REF, return_components=True, return_dict=True)
    assert (answer["name"], answer["weight"], set(answer["components"])) == ("sum", 2.0, {"kl_divergence"})


FUNCTIONS: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = [
    (compute_ppo_loss, RATIOS, {"clip_param": 0.9, "mask": MASK}),
    (
        compute_kl_penalty,
        {"logits": LOGITS, "ref_logits": LOGITS.flip(0)},
        {"mask": MASK, "temperature": 2.0},
    ),
    (variance_regularization, {"outputs": drawn(B, V)}, {"target_std": 2.0, "reduction": "sum"}),
]


@pytest.mark.parametrize(("function", "usual", "others"), FUNCTIONS)
def test_every_argument_of_the_functions_acts(
    function: Callable[..., Any], usual: dict[str, Any], others: dict[str, Any]
) -> None:
    def value(**given: Any) -> torch.Tensor:
        answer = function(**given)
        return answer[0] if isinstance(answer, tuple) else answer

    assert set(inspect.signature(function).parameters) == set(usual) | set(others)
    for name, other in others.items():
        assert differs(value(**usual | {name: other}), value(**usual)), name
    for name, given in usual.items():
        assert differs(value(**usual | {name: given + 0.3 * given.flip(-1)}), value(**usual)), name


def test_every_loss_of_the_family_is_in_the_tables_above() -> None:
    classes = {
        name
        for name in custom_loss.__all__
        if isinstance(getattr(custom_loss, name), type) and name not in ("CustomLoss", "CustomLossConfig")
    }
    assert classes == set(CASES)
    functions = {name for name in custom_loss.__all__ if name[0].islower()}
    assert functions == {function.__name__ for function, _, _ in FUNCTIONS}
