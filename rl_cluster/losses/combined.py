"""Losses in, one loss out: a weighted sum of several, or one whose weight follows a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rl_cluster.checks import check_number
from rl_cluster.errors import BadInputError
from rl_cluster.losses.base import CustomLoss, CustomLossConfig


class CompositeLoss(CustomLoss):
    """Σ weights[i] · losses[i](…), each with its own config; then the composite's own config.

    Called as `loss(predictions, targets, mask, name=value, …)`. A component gets predictions and targets as
    its first two arguments, and of the named ones those that it has; a name that none has is a TypeError.
    So one call serves PPOLoss (advantages=…) and KLDivergenceLoss (ref_log_probs=…, in place of targets).
    """

    def __init__(
        self,
        losses: Sequence[CustomLoss],
        weights: Sequence[float] | None = None,
        config: CustomLossConfig | None = None,
    ) -> None:
        super().__init__(CustomLossConfig(name="composite") if config is None else config)
        wrong = [loss for loss in losses if not isinstance(loss, CustomLoss)]
        if wrong or not losses:
            found = f"a {type(wrong[0]).__name__}" if wrong else "nothing"
            raise BadInputError(f"CompositeLoss.losses: contains {found}; give a list of CustomLoss objects.")
        if weights is not None and len(weights) != len(losses):
            raise BadInputError(
                f"CompositeLoss.weights: {len(weights)} weights for {len(losses)} losses; one for each."
            )
        refuse_temperature("CompositeLoss", self.config)
        self.losses = nn.ModuleList(losses)
        self.weights = [1.0] * len(losses) if weights is None else list(weights)
        for weight in self.weights:
            check_number("CompositeLoss.weights", weight)
        self._names = unique_names([loss.config.name for loss in losses])

    def compute_loss(
        self,
        predictions: torch.Tensor,
        targets: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        **extra: Any,
    ) -> torch.Tensor:
        """The weighted sum; components with reduction "none" must agree in shape."""
        return self._total(self._components(predictions, targets, mask, extra))

    def forward(self, *args: Any, return_components: bool = False, **kwargs: Any) -> Any:
        """As CustomLoss; with return_components {"loss", "components": {name: loss}, "weights"}.

        A component's loss is what it returns by itself, before the composite's weight for it.
        """
        if not return_components:
            return super().forward(*args, **kwargs)
        arguments = self.bind(args, kwargs)
        return_dict = arguments.pop("return_dict", False)
        given = {name: arguments.pop(name, None) for name in ("predictions", "targets", "mask")}
        parts = self._components(given["predictions"], given["targets"], given["mask"], arguments)
        total = self._total(parts)
        loss = self.finish(total, self.kept(arguments, total, given["mask"]))
        described = {"weight": self.config.weight, "name": self.config.name} if return_dict else {}
        return described | {
            "loss": loss,
            "components": dict(zip(self._names, parts, strict=True)),
            "weights": self.weights,
        }

    def accepts(self, name: str) -> bool:
        own = name in ("predictions", "targets", "mask")
        return own or any(loss.accepts(name) for loss in self._members())

    def kept(
        self, arguments: Mapping[str, Any], raw: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Every component has masked its elements already: 0 or 1, so that a fraction does not act twice.

        None where the elements are not the mask's, as those of a VarianceLoss.
        """
        if mask is None or mask.shape != raw.shape[: mask.dim()]:
            return None
        kept = super().kept(arguments, raw, mask)
        return None if kept is None else (kept != 0).to(raw.dtype)

    def _members(self) -> list[CustomLoss]:
        return [loss for loss in self.losses if isinstance(loss, CustomLoss)]

    def _components(
        self,
        predictions: torch.Tensor,
        targets: torch.Tensor | None,
        mask: torch.Tensor | None,
        extra: Mapping[str, Any],
    ) -> list[torch.Tensor]:
        return [call_component(loss, predictions, targets, mask, extra) for loss in self._members()]

    def _total(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        weighted = [weight * part for weight, part in zip(self.weights, parts, strict=True)]
        return torch.stack(weighted).sum(0)


def call_component(
    loss: CustomLoss,
    predictions: torch.Tensor,
    targets: torch.Tensor | None,
    mask: torch.Tensor | None,
    extra: Mapping[str, Any],
) -> torch.Tensor:
    """loss(predictions, targets, mask=mask, …) with those of the extra arguments that it takes."""
    names = [name for name in loss.argument_names() if name != "mask"]
    generic = zip(names[:2], (predictions, targets), strict=False)
    arguments = {name: value for name, value in generic if value is not None}
    arguments |= {name: value for name, value in extra.items() if loss.accepts(name)}
    return loss(**arguments) if mask is None else loss(**arguments, mask=mask)


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, the second of a kind as name_2 and so on, so that none hides another."""
    return [
        name if names[:index].count(name) == 0 else f"{name}_{names[:index].count(name) + 1}"
        for index, name in enumerate(names)
    ]


def refuse_temperature(name: str, config: CustomLossConfig) -> None:
    """What a temperature divides (logits, log-ratios, distances) only the inner losses know."""
    if config.temperature != 1.0:
        raise BadInputError(
            f"{name}: config.temperature={config.temperature}: set the temperature of the losses inside."
        )


class AdaptiveLoss(CustomLoss):
    """schedule_fn(current_step) · base_loss(…), called with the arguments of base_loss; then its own config.

    `step()` after each optimizer step, `reset()` to start again; the step is part of the state_dict.
    """

    def __init__(
        self,
        base_loss: CustomLoss,
        schedule_fn: Callable[[int], float],
        config: CustomLossConfig | None = None,
    ) -> None:
        super().__init__(CustomLossConfig(name="adaptive") if config is None else config)
        if not isinstance(base_loss, CustomLoss):
            raise BadInputError(f"AdaptiveLoss.base_loss: is {type(base_loss).__name__}, not a CustomLoss.")
        if not callable(schedule_fn):
            raise BadInputError(f"AdaptiveLoss.schedule_fn={schedule_fn!r:.40}: not a function of the step.")
        refuse_temperature("AdaptiveLoss", self.config)
        self.base_loss = base_loss
        self.schedule_fn = schedule_fn
        self.current_step = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """schedule_fn(current_step) · base_loss(*args, **kwargs), with base_loss's own config applied."""
        weight = self.schedule_fn(self.current_step)
        check_number(f"AdaptiveLoss.schedule_fn({self.current_step})", weight)
        return weight * self.base_loss(*args, **kwargs)

    def step(self) -> None:
        self.current_step += 1

    def reset(self) -> None:
        self.current_step = 0

    def argument_names(self) -> list[str]:
        return self.base_loss.argument_names()

    def accepts(self, name: str) -> bool:
        return name == "mask" or self.base_loss.accepts(name)

    def kept(
        self, arguments: Mapping[str, Any], raw: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        kept = self.base_loss.kept(arguments, raw, mask) if raw.dim() else None
        return None if kept is None else (kept != 0).to(raw.dtype)

    def get_extra_state(self) -> dict[str, int]:
        return {"current_step": self.current_step}

    def set_extra_state(self, state: Mapping[str, int]) -> None:
        self.current_step = state["current_step"]
