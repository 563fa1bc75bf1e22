"""Predictions and targets go in, a weighted and reduced loss comes out: the base of every custom loss.

A subclass writes `compute_loss`, the bare formula. `forward` does the rest, in this order: temperature,
formula, normalisation, mask and reduction, weight, clipping.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from rl_cluster.checks import check_number
from rl_cluster.errors import BadInputError

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum", "none")


@dataclass(frozen=True)
class CustomLossConfig:
    """What `forward` does around the formula.

    weight: factor on the result. reduction: "mean" over the elements that the mask keeps, "sum", or "none".
    normalize: divide by the root mean square of the elements (a constant: no gradient), so that losses of
    different scales can be added. clip_value: the result is scaled down to at most this in absolute value,
    and its gradient with it. temperature: divides logits (predictions), log-ratios or distances, whatever
    the loss is made of. epsilon: smallest denominator of a mean, added to the one of `normalize`.
    """

    name: str
    weight: float = 1.0
    reduction: Reduction = "mean"
    normalize: bool = False
    clip_value: float | None = None
    temperature: float = 1.0
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise BadInputError(f"CustomLossConfig.name={self.name!r}: give the loss a name, a string.")
        if self.reduction not in REDUCTIONS:
            raise BadInputError(
                f"CustomLossConfig.reduction={self.reduction!r}: must be one of {', '.join(REDUCTIONS)}."
            )
        check_number("CustomLossConfig.weight", self.weight)
        check_number("CustomLossConfig.temperature", self.temperature, above=0.0)
        check_number("CustomLossConfig.epsilon", self.epsilon, above=0.0)
        if self.clip_value is not None:
            check_number("CustomLossConfig.clip_value", self.clip_value, above=0.0)


class CustomLoss(nn.Module, ABC):
    """A loss of one's own: subclass it and write `compute_loss`.

    Calling the module binds positional arguments to compute_loss's own parameters, in their order, followed
    by `mask` (where compute_loss does not name it) and `return_dict`; everything can be passed by name too.
    """

    def __init__(self, config: CustomLossConfig | None = None) -> None:
        super().__init__()
        if config is not None and not isinstance(config, CustomLossConfig):
            raise BadInputError(
                f"{type(self).__name__}: config is {type(config).__name__} {config!r:.40}, "
                "not a CustomLossConfig. Pass the other settings by name."
            )
        self.config = CustomLossConfig(name=type(self).__name__) if config is None else config

    @abstractmethod
    def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The formula: `compute_loss(predictions, targets, **kwargs)` → per element, or a scalar.

        A subclass names the arguments that it needs. If it takes `mask` it may leave out what the mask
        leaves out (a scalar loss must); forward masks the elements of any other loss.
        """

    def forward(self, *args: Any, return_dict: bool = False, **kwargs: Any) -> Any:
        """The reduced and weighted loss, or with return_dict {"loss", "weight", "name"}.

        mask: [...], 0 where an element does not count, of the loss's shape or of its leading dimensions.
        """
        arguments = self.bind(args, kwargs)
        return_dict = arguments.pop("return_dict", return_dict)
        mask = arguments.get("mask")
        if not self.accepts("mask"):
            arguments.pop("mask", None)
        loss = self.finish(*self.elements(arguments, mask))
        return {"loss": loss, "weight": self.config.weight, "name": self.config.name} if return_dict else loss

    def elements(
        self, arguments: Mapping[str, Any], mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What `finish` reduces, and the mask over it: compute_loss's answer, before any temperature.

        A loss whose compute_loss is a scalar says here what that scalar is the mean of.
        """
        raw = self.compute_loss(**self.temper(dict(arguments)))
        if raw.dim() == 0 and mask is not None and not self.accepts("mask"):
            raise BadInputError(
                f"{self.config.name}: a mask was given, but compute_loss returns a scalar and takes no mask. "
                "Add a `mask` argument to it, or return one loss per element."
            )
        return raw, self.kept(arguments, raw, mask)

    def finish(self, raw: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Normalise, reduce, weigh and clip. mask: of raw's shape, or None."""
        if self.config.normalize:
            raw = raw / (root_mean_square(raw, mask, self.config.epsilon) + self.config.epsilon)
        loss = self.config.weight * reduce_loss(raw, mask, self.config.reduction, self.config.epsilon)
        return loss if self.config.clip_value is None else clip_size(loss, self.config.clip_value)

    def kept(
        self, arguments: Mapping[str, Any], raw: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The mask over the elements of raw, or None. A subclass may leave out more (ignored labels)."""
        return None if mask is None or raw.dim() == 0 else expand_mask(mask, raw, self.config.name)

    def temper(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments with the temperature applied: here, the first one (logits, predictions) divided."""
        if self.config.temperature == 1.0:
            return arguments
        first = self.argument_names()[0]
        return arguments | {first: arguments[first] / self.config.temperature}

    def argument_names(self) -> list[str]:
        """The positional parameters of compute_loss, in order."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
        return [p.name for p in inspect.signature(self.compute_loss).parameters.values() if p.kind in kinds]

    def accepts(self, name: str) -> bool:
        """Whether compute_loss takes an argument of that name."""
        parameters = inspect.signature(self.compute_loss).parameters
        return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Argument name → value; `predictions` and `targets` also name the first two of any loss."""
        names = self.argument_names()
        order = [*names, *(name for name in ("mask", "return_dict") if name not in names)]
        if len(args) > len(order):
            raise TypeError(f"{self.config.name} takes {len(order)} arguments ({', '.join(order)})")
        arguments = dict(zip(order, args, strict=False))
        generic = dict(zip(("predictions", "targets"), names[:2], strict=False))
        for key, value in kwargs.items():
            name = generic.get(key, key) if key not in names else key
            if name in arguments:
                raise TypeError(f"{self.config.name} got {name!r} twice")
            arguments[name] = value
        unknown = [k for k in arguments if k not in ("mask", "return_dict") and not self.accepts(k)]
        if unknown:
            raise TypeError(f"{self.config.name} takes no {unknown[0]!r}; it takes {', '.join(order)}")
        return arguments


def expand_mask(mask: torch.Tensor, values: torch.Tensor, name: str) -> torch.Tensor:
    """The mask, of values' leading dimensions, as a tensor of values' shape and dtype."""
    if mask.shape != values.shape[: mask.dim()] or mask.dim() == 0:
        raise BadInputError(
            f"{name}: the mask has shape {tuple(mask.shape)}, the loss {tuple(values.shape)}. "
            "The mask must have the shape of the loss, or of its leading dimensions."
        )
    shape = [*mask.shape, *[1] * (values.dim() - mask.dim())]
    return mask.to(values.dtype).reshape(shape).expand(values.shape)


def masked_sum(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Sum of mask · values; what the mask leaves out may be NaN or infinite."""
    return values.sum() if mask is None else torch.where(mask != 0, mask * values, 0.0).sum()


def masked_mean(values: torch.Tensor, mask: torch.Tensor | None, epsilon: float = 1e-8) -> torch.Tensor:
    """Mean over what the mask keeps (fractions count as such); 0 where it keeps nothing."""
    return values.mean() if mask is None else masked_sum(values, mask) / mask.sum().clamp(min=epsilon)


def root_mean_square(values: torch.Tensor, mask: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    return masked_mean(values.detach().square(), mask, epsilon).sqrt()


def reduce_loss(
    values: torch.Tensor, mask: torch.Tensor | None, reduction: Reduction, epsilon: float = 1e-8
) -> torch.Tensor:
    """mask: of values' shape, or None."""
    if reduction == "mean":
        return masked_mean(values, mask, epsilon)
    if reduction == "sum":
        return masked_sum(values, mask)
    return values if mask is None else torch.where(mask != 0, mask * values, 0.0)


def clip_size(loss: torch.Tensor, limit: float) -> torch.Tensor:
    """loss · min(1, limit / |loss|): value and gradient shrink together, so an outlier still teaches."""
    size = loss.detach().abs()
    return loss * torch.where(size > limit, limit / size, 1.0)
