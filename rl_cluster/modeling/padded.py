"""The way for decoders that mix tokens outside attention (recurrences, convolutions) or attend in a way of
their own: the sequences are rows of a batch, padded behind their ends, and the model runs as it is.

What follows a token cannot change its state, so padding behind the end needs no mask. Enters and leaves the
same as in packed.packed_hidden_states; legend there.
"""

from __future__ import annotations

import torch

from rl_cluster.modeling.layout import Bucket, PackedLayout


def padded_hidden_states(
    decoder: torch.nn.Module, tokens: torch.Tensor, packed: PackedLayout
) -> torch.Tensor:
    """Last hidden states [U, hidden]; tokens: int64 [T]. Shared prompts are computed with each sequence."""
    if _is_partitioned(decoder):
        # Each call gathers weights from all ranks, so every rank must make equally many: one.
        packed = packed.in_one_bucket()
    parts = [_bucket_states(decoder, tokens, bucket) for bucket in packed.buckets]
    hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
    if packed.restore is not None:
        hidden = hidden.index_select(0, packed.restore)
    return hidden if packed.unique is None else hidden.index_select(0, packed.unique)


def _bucket_states(decoder: torch.nn.Module, tokens: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """The bucket's tokens end to end, [n, hidden]."""
    rows = tokens[bucket.start : bucket.stop] if bucket.gather is None else tokens[bucket.gather]
    batch = rows.unflatten(0, (bucket.num_sequences, bucket.length))
    states = decoder(input_ids=batch, use_cache=False).last_hidden_state.flatten(0, 1)
    # Mamba keeps its residual stream, and so what it returns, in float32.
    states = states.to(next(decoder.parameters()).dtype)
    return states if bucket.places is None else states.index_select(0, bucket.places)


def _is_partitioned(decoder: torch.nn.Module) -> bool:
    """Under ZeRO-3."""
    return hasattr(next(decoder.parameters()), "ds_id")
