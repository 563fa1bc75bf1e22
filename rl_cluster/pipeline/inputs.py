"""What the user passes becomes checked tensors of the pipeline's own, before anything runs.

Legend: B rows, L positions. Everything is copied, so that a caller may reuse its buffers at once. Per-token
tensors are aligned on the token itself: entry t speaks of token t being drawn given the tokens before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from rl_cluster.errors import BadInputError

IGNORED = -100
"""Label of a token that is not trained."""


@dataclass(frozen=True)
class TokenInputs:
    """input_ids: int64 [B, L]. attention_mask: bool [B, L] or None, True at real tokens. targets: int64
    [B, L], the token whose log-probability is meant. trained: bool [B, L], where there is such a token: it
    has a label, is real, and so is the token before it, from which it is predicted.
    labels: as given, None if none were. left_padded: some row begins with padding.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    targets: torch.Tensor
    trained: torch.Tensor
    labels: torch.Tensor | None
    left_padded: bool

    def to(self, device: torch.device) -> TokenInputs:
        moved: dict[str, Any] = {
            name: None if value is None else value.to(device)
            for name, value in vars(self).items()
            if name != "left_padded"
        }
        return replace(self, **moved)

    @property
    def position_ids(self) -> torch.Tensor | None:
        """int64 [B, L], 0 at the first real token, where padding on the left makes them necessary."""
        if not self.left_padded or self.attention_mask is None:
            return None
        return (self.attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def token_inputs(
    input_ids: Any, attention_mask: Any, labels: Any, vocab_size: int | None, *, any_labels: bool = False
) -> TokenInputs:
    """Check and copy. labels None: every real token is its own label. any_labels: they are for a callable
    to read and may have any shape; the targets are those of input_ids, where labels of their shape are not
    -100. Raises BadInputError."""
    ids = _token_ids("input_ids", input_ids, vocab_size)
    mask = None if attention_mask is None else binary_mask("attention_mask", attention_mask, ids)
    if mask is not None and not bool(mask.any(-1).all()):
        row = int((~mask.any(-1)).nonzero()[0])
        raise BadInputError(f"attention_mask: row {row} has no token at all; leave the row out")
    own = None if labels is None else as_tensor("labels", labels)
    targets, trained = ids, torch.ones_like(ids, dtype=torch.bool)
    if own is not None and not any_labels:
        targets, trained = _targets(own, ids, vocab_size)
    elif own is not None and own.shape == ids.shape and not own.is_floating_point():
        trained = own.to(ids.device) != IGNORED
    trained = trained.clone()
    trained[:, 0] = False
    if mask is not None:
        trained &= mask
        trained[:, 1:] &= mask[:, :-1]
    left_padded = mask is not None and bool((~mask[:, :-1] & mask[:, 1:]).any())
    return TokenInputs(ids, mask, targets, trained, own, left_padded)


def require_trained(tokens: TokenInputs, mask: torch.Tensor | None) -> None:
    """Raise BadInputError if no token is left to train."""
    if bool((tokens.trained if mask is None else tokens.trained & mask).any()):
        return
    if bool(tokens.trained.any()):
        raise BadInputError("mask: it hides every token that has a label; set it to 1 at the tokens to train")
    if tokens.labels is None:
        raise BadInputError(
            f"input_ids: shape {tuple(tokens.input_ids.shape)} leaves no token to predict, the first of each "
            "row "
            "has none before it; give rows of at least two tokens"
        )
    raise BadInputError(
        f"labels: all ignored; no label other than {IGNORED} stands at a real token with a real token before "
        "it. "
        "labels[t] is the token at position t of input_ids (they are not to be shifted)"
    )


def as_tensor(name: str, value: Any) -> torch.Tensor:
    """A copy without gradient. Lists and numpy arrays are taken too."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    try:
        return torch.tensor(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise BadInputError(
            f"{name}: {type(value).__name__} cannot become a tensor ({error}); give a tensor or rows of "
            "equal length"
        ) from error


def binary_mask(name: str, value: Any, like: torch.Tensor) -> torch.Tensor:
    """bool, on the device of `like` and of its shape; the values must be 0 and 1."""
    mask = as_tensor(name, value).to(like.device)
    _same_shape(name, mask, like)
    if not bool(((mask == 0) | (mask == 1)).all()):
        worst = mask[(mask != 0) & (mask != 1)][0].item()
        raise BadInputError(f"{name}: it holds {worst}; use 1 for tokens that count and 0 for others")
    return mask.bool()


def per_token(name: str, value: Any, like: torch.Tensor, *, per_row: bool = False) -> torch.Tensor:
    """float [B, L] on the device of `like`. per_row: [B] and [B, 1] are spread over the row."""
    column = as_tensor(name, value).to(like.device)
    if not column.is_floating_point():
        column = column.float()
    if per_row and column.dim() == 1 and len(column) == len(like):
        column = column[:, None]
    if per_row and column.shape == (len(like), 1):
        column = column.expand(like.shape).clone()
    if column.dim() == 3:
        raise BadInputError(
            f"{name}: shape {tuple(column.shape)} looks like log-probabilities of the whole vocabulary; give "
            "those "
            f"of the tokens themselves, shape {tuple(like.shape)}"
        )
    _same_shape(name, column, like)
    return column


def _same_shape(name: str, value: torch.Tensor, like: torch.Tensor) -> None:
    if value.shape != like.shape:
        raise BadInputError(
            f"{name}: shape {tuple(value.shape)} does not fit input_ids {tuple(like.shape)}; give one entry "
            "per token"
        )


def _token_ids(name: str, value: Any, vocab_size: int | None) -> torch.Tensor:
    ids = as_tensor(name, value)
    if ids.dim() != 2 or ids.numel() == 0:
        raise BadInputError(
            f"{name}: shape {tuple(ids.shape)}; give [batch, length], both at least 1 (one row: "
            "x.unsqueeze(0))"
        )
    _integers(name, ids)
    _in_vocabulary(name, ids, vocab_size, lowest=0)
    return ids.long()


def _targets(
    labels: torch.Tensor, ids: torch.Tensor, vocab_size: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    labels = labels.to(ids.device)
    _same_shape("labels", labels, ids)
    _integers("labels", labels)
    has_label = labels != IGNORED
    _in_vocabulary(
        "labels", labels[has_label], vocab_size, lowest=0, also=f", or {IGNORED} to ignore a token"
    )
    return torch.where(has_label, labels.long(), ids), has_label


def _integers(name: str, value: torch.Tensor) -> None:
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise BadInputError(f"{name}: dtype {value.dtype}; token ids are integers, use .long()")


def _in_vocabulary(name: str, ids: torch.Tensor, vocab_size: int | None, lowest: int, also: str = "") -> None:
    if ids.numel() == 0:
        return
    least, most = int(ids.min()), int(ids.max())
    if least < lowest or (vocab_size is not None and most >= vocab_size):
        limit = "" if vocab_size is None else f" to {vocab_size - 1}"
        raise BadInputError(
            f"{name}: {least if least < lowest else most} is no token id of this model; use 0{limit}{also}"
        )
