"""Any causal model of transformers in process: padding on either side, and sampling, against it alone."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rl_cluster.errors import BadInputError
from rl_cluster.pipeline import ForwardBackwardPipeline
from tests.modeling.architectures import CASES, config_of

BY_KIND = {case.kind: case for case in CASES}
LENGTHS = (11, 6, 14)
KINDS = ("gemma2", "gpt2", "qwen3_next", "bloom", "lfm2", "gpt_oss", "bamba", "minimax", "recurrent_gemma")
READ_PADDING = ("recurrent_gemma", "rwkv")


def make(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config_of(BY_KIND[kind])).eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return lm


@torch.no_grad()
def alone(lm: PreTrainedModel, row: torch.Tensor) -> torch.Tensor:
    """Of row[1:], by transformers without padding and cache."""
    table = lm(input_ids=row[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return table.gather(-1, row[1:, None])[:, 0]


def padded(rows: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor, list[slice]]:
    longest = max(LENGTHS)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    places = [slice(0, n) if side == "right" else slice(longest - n, longest) for n in LENGTHS]
    mask = torch.zeros_like(ids)
    for number, (row, place) in enumerate(zip(rows, places, strict=True)):
        ids[number, place], mask[number, place] = row, 1
    return ids, mask, places


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", [*KINDS, "rwkv"])
def test_padded_rows_say_what_each_row_says_alone_or_are_refused(kind: str, side: str) -> None:
    lm = make(kind)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 64, (n,), generator=generator) for n in LENGTHS]
    ids, mask, places = padded(rows, side)
    with ForwardBackwardPipeline(lm) as pipeline:
        if side == "left" and kind in READ_PADDING:
            with pytest.raises(BadInputError, match="reads as text in spite of its mask; pad on the right"):
                pipeline.forward_backward(ids, mask, loss_fn="cross_entropy").result()
            assert all(parameter.grad is None for parameter in lm.parameters())
            return
        found = pipeline.forward(ids, mask).result()["logprobs"]
    for number, (row, place) in enumerate(zip(rows, places, strict=True)):
        expected = alone(lm, row)
        torch.testing.assert_close(found[number, place][1:], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [1, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_samples_have_the_log_probabilities_of_whole_sequences(kind: str, length: int) -> None:
    lm = make(kind)
    prompt = torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(2)).tolist()
    with ForwardBackwardPipeline(lm) as pipeline:
        drawn = pipeline.sample(prompt, max_tokens=6, seed=1, stop=[])
    expected = alone(lm, torch.tensor(prompt + drawn["tokens"]))[length - 1 :]
    torch.testing.assert_close(torch.tensor(drawn["logprobs"]), expected, atol=1e-4, rtol=0)
