"""What a loss function receives and returns: torch tensors over the drawn tokens of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class LossInputs:
    """A drawn tokens in R rows (sequences); prompt tokens and padding are already gone.

    row: int64 [A], in 0..R-1, ascending; the tokens of a row are consecutive and in order, and a row is
    never split over micro-batches. Pairs (DPO and its kin) are the rows 2i and 2i + 1.
    logprobs: float32 [A], of the current policy at the sampling temperature, with gradient.
    entropy, values: float32 [A], of the current policy and critic, with gradient where the loss uses them.
    weights: float32 [A]; the loss is the *sum* of weights times per-token loss, so that micro-batching,
    packing and the number of ranks cannot change it. A token of weight 0 counts in no metric.
    Everything else is constant data [A], or None. policy_versions: of the weights that drew the token.
    labels, margins: of a row, of a pair, at one of its tokens; 0 at the others.
    """

    row: torch.Tensor
    num_rows: int
    logprobs: torch.Tensor
    weights: torch.Tensor
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None
    behaviour_logprobs: torch.Tensor | None = None
    proximal_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    old_values: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    margins: torch.Tensor | None = None
    policy_versions: torch.Tensor | None = None


@dataclass(frozen=True)
class LossResult:
    """loss: scalar with gradient. metrics: plain sums (`…_sum`, with `tokens_sum` and `rows_sum` as
    denominators) and extremes (`…_max`) over the micro-batch, to be added up over micro-batches and ranks.
    `loss_sum` is the loss itself: added up over an optimizer step it is the step's objective.
    weighted: sums of weight · x over the same tokens (`…_weighted`), and `weight_total`, the sum of the
    weights. What the objective says of x is their quotient; of a loss, the weighted sum itself."""

    loss: torch.Tensor
    metrics: dict[str, float] = field(default_factory=dict)
    weighted: dict[str, float] = field(default_factory=dict)
