"""A loss by name and its keyword arguments become a loss step of rl_cluster.algorithms and its columns.

The arithmetic itself is algorithms/objectives.py, the same that a learner on the cluster runs. With N trained
tokens, r = exp(log π − old), A the advantage (every term a mean over the N tokens):
cross_entropy: −log π. importance_sampling: −r A. ppo: max(−r A, −A clip(r, 1 ± clip_param))
− entropy_coef · H + value_loss_coef · ½ max((V − R)², (clip(V, V_old ± value_clip) − R)²).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from rl_cluster.algorithms.kl import MAX_EXPONENT
from rl_cluster.algorithms.steps import CrossEntropyStep, PolicyStep
from rl_cluster.config.algorithm import PolicyLossConfig
from rl_cluster.errors import BadInputError
from rl_cluster.pipeline.inputs import TokenInputs, binary_mask, per_token, require_trained

UNBOUNDED = 2.0 * math.exp(MAX_EXPONENT)
"""Above every ratio (those are held below e^20): clipping that never acts."""
OLD_LOGPROBS = ("old_logprobs", "old_log_probs")
"""Both spellings of the same argument."""


@dataclass(frozen=True)
class BuiltInLoss:
    """step: what algorithms/table.py computes. columns: float [B, L], named as in LossInputs.
    mask: bool [B, L] or None, a further choice among the tokens with a label."""

    name: str
    step: CrossEntropyStep | PolicyStep
    columns: dict[str, torch.Tensor]
    mask: torch.Tensor | None = None

    @property
    def needs_entropy(self) -> bool:
        return isinstance(self.step, PolicyStep) and self.step.loss.entropy_coef > 0

    def to(self, device: torch.device) -> BuiltInLoss:
        columns = {name: column.to(device) for name, column in self.columns.items()}
        return replace(self, columns=columns, mask=None if self.mask is None else self.mask.to(device))

    def trained(self, tokens: TokenInputs) -> torch.Tensor:
        """bool [B, L]: the tokens that train."""
        return tokens.trained if self.mask is None else tokens.trained & self.mask


def built_in_loss(name: str, arguments: Mapping[str, Any], tokens: TokenInputs) -> BuiltInLoss:
    """Check everything that can be checked without the model. Raises BadInputError."""
    if name not in BUILT_IN:
        raise BadInputError(
            f"loss_fn: {name!r} is unknown{_nearest(name, BUILT_IN)}; use one of "
            f"{', '.join(sorted(BUILT_IN))} "
            "or a callable"
        )
    build, allowed = BUILT_IN[name]
    for key in arguments:
        if key not in allowed:
            raise BadInputError(
                f"loss_fn_kwargs: {name} takes no {key!r}{_nearest(key, allowed)}; it takes "
                f"{', '.join(sorted(allowed)) or 'none'}"
            )
    loss = build(arguments, tokens)
    require_trained(tokens, loss.mask)
    _require_finite(loss, tokens)
    return loss


def _cross_entropy(arguments: Mapping[str, Any], tokens: TokenInputs) -> BuiltInLoss:
    del arguments, tokens
    return BuiltInLoss("cross_entropy", CrossEntropyStep(), {})


def _importance_sampling(arguments: Mapping[str, Any], tokens: TokenInputs) -> BuiltInLoss:
    loss = PolicyLossConfig(clip_low=1.0, clip_high=UNBOUNDED)
    step = PolicyStep(loss, _number(arguments, "temperature", 1.0, above=0.0))
    return BuiltInLoss(
        "importance_sampling", step, _policy_columns(arguments, tokens), _mask(arguments, tokens)
    )


def _ppo(arguments: Mapping[str, Any], tokens: TokenInputs) -> BuiltInLoss:
    clip = _number(arguments, "clip_param", 0.2, above=0.0)
    columns = _policy_columns(arguments, tokens) | _value_columns(arguments, tokens)
    value_clip = UNBOUNDED
    if arguments.get("value_clip") is not None:
        value_clip = _number(arguments, "value_clip", 0.2, above=0.0)
        if "returns" in columns and arguments.get("old_values") is None:
            raise BadInputError(
                "old_values: missing; value_clip holds the values near them. Give both or neither"
            )
    step = PolicyStep(
        PolicyLossConfig(
            clip_low=min(clip, 1.0),
            clip_high=clip,
            entropy_coef=_number(arguments, "entropy_coef", 0.01, least=0.0),
        ),
        _number(arguments, "temperature", 1.0, above=0.0),
        value_coef=_number(arguments, "value_loss_coef", 0.5, least=0.0) if "returns" in columns else 0.0,
        clip_value=value_clip,
    )
    return BuiltInLoss("ppo", step, columns, _mask(arguments, tokens))


POLICY_KEYS = frozenset({*OLD_LOGPROBS, "advantages", "mask", "temperature"})
PPO_KEYS = POLICY_KEYS | {
    "values",
    "old_values",
    "returns",
    "clip_param",
    "value_clip",
    "entropy_coef",
    "value_loss_coef",
}
BUILT_IN: dict[str, tuple[Callable[[Mapping[str, Any], TokenInputs], BuiltInLoss], frozenset[str]]] = {
    "cross_entropy": (_cross_entropy, frozenset()),
    "importance_sampling": (_importance_sampling, POLICY_KEYS),
    "ppo": (_ppo, PPO_KEYS),
}
"""name -> (how it is built, the arguments that it takes)."""


def _policy_columns(arguments: Mapping[str, Any], tokens: TokenInputs) -> dict[str, torch.Tensor]:
    given = [key for key in OLD_LOGPROBS if arguments.get(key) is not None]
    if len(given) != 1:
        problem = "missing" if not given else "given twice, as old_log_probs too"
        raise BadInputError(
            f"old_logprobs: {problem}; give the log-probabilities of the tokens when they were drawn, once, "
            f"shape {tuple(tokens.input_ids.shape)}"
        )
    if arguments.get("advantages") is None:
        raise BadInputError("advantages: missing; give one per token [batch, length] or per row [batch]")
    return {
        "proximal_logprobs": per_token(given[0], arguments[given[0]], tokens.input_ids),
        "advantages": per_token("advantages", arguments["advantages"], tokens.input_ids, per_row=True),
    }


def _value_columns(arguments: Mapping[str, Any], tokens: TokenInputs) -> dict[str, torch.Tensor]:
    """returns, old_values and, unless the model has a value head, values."""
    given = {
        key: arguments[key] for key in ("values", "old_values", "returns") if arguments.get(key) is not None
    }
    if not given:
        return {}
    if "returns" not in given:
        raise BadInputError(
            f"returns: missing, while {' and '.join(given)} are given; the value loss needs them"
        )
    if getattr(given.get("values"), "requires_grad", False):
        raise BadInputError(
            "values: the tensor requires grad, but its graph belongs to weights that later calls may change; "
            "give the model a value head (an output `.values`) and leave values out, or pass values.detach()"
        )
    columns = {key: per_token(key, value, tokens.input_ids) for key, value in given.items()}
    # Without clipping the old values cancel out: 0 + clip(V − 0, ± unbounded) is V.
    columns.setdefault("old_values", torch.zeros_like(columns["returns"]))
    return columns


def _mask(arguments: Mapping[str, Any], tokens: TokenInputs) -> torch.Tensor | None:
    given = arguments.get("mask")
    return None if given is None else binary_mask("mask", given, tokens.input_ids)


def _number(
    arguments: Mapping[str, Any],
    key: str,
    default: float,
    above: float = -math.inf,
    least: float = -math.inf,
) -> float:
    value = arguments.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadInputError(f"{key}: {value!r} is not a finite number; the default is {default}")
    if value <= above or value < least:
        bound = f"above {above:g}" if value <= above else f"at least {least:g}"
        raise BadInputError(f"{key}: {value} must be {bound}; the default is {default}")
    return float(value)


def _require_finite(loss: BuiltInLoss, tokens: TokenInputs) -> None:
    trained = loss.trained(tokens)
    for name, column in loss.columns.items():
        entries = column[trained]
        wrong = entries.isnan() if name == "proximal_logprobs" else ~entries.isfinite()
        if bool(wrong.any()):
            row, place = ((trained & column.isnan()) | (trained & column.isinf())).nonzero()[0].tolist()
            shown = "old_logprobs" if name == "proximal_logprobs" else name
            raise BadInputError(
                f"{shown}: {column[row, place].item()} at [{row}, {place}], a token that trains; mend it or "
                "set its "
                f"label to -100"
            )


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
