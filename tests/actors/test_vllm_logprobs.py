"""The two samplers of vLLM, as far as they matter here, and one that nobody knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from actors.vllm_logprobs import report_whole_logprobs

LOGITS = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.1, 0.1]]).log()
CUT = torch.tensor([2, 2])


def cut(logits: torch.Tensor) -> torch.Tensor:
    """In place, as vLLM may: only the likeliest stays."""
    return logits.masked_fill_(logits < logits.max(-1, keepdim=True).values, -torch.inf)


class First:
    def forward(self, logits: Any, generators: Any, k: Any, p: Any) -> Any:
        logits = logits if k is None else cut(logits)
        return logits.argmax(-1), logits.log_softmax(-1)


class Second:
    def _sample_random(
        self,
        processed_logits: Any,
        expanded_idx_mapping: Any,
        idx_mapping_np: Any,
        pos: Any,
        top_k: Any,
        top_p: Any,
        use_fused_sampler: Any,
    ) -> Any:
        logits = processed_logits if top_k is None else cut(processed_logits)
        return logits.argmax(-1), logits


def test_the_first_runners_sampler_reports_the_whole_distribution() -> None:
    inner = First()
    assert report_whole_logprobs(SimpleNamespace(topk_topp_sampler=inner))
    for k in (None, CUT):
        tokens, logprobs = inner.forward(LOGITS.clone(), {}, k, None)
        assert tokens.tolist() == [1, 0]
        torch.testing.assert_close(logprobs, LOGITS)


def test_the_second_runners_sampler_reports_the_whole_distribution() -> None:
    sampler = Second()
    assert report_whole_logprobs(sampler)
    for k in (None, CUT):
        tokens, logits = sampler._sample_random(LOGITS.clone(), None, None, None, k, None, False)
        assert tokens.tolist() == [1, 0]
        torch.testing.assert_close(logits, LOGITS)


def test_a_sampler_that_is_neither_is_left_alone_and_named_so() -> None:
    class Other(Second):
        def _sample_random(self, logits: Any, top_k: Any) -> Any:  # type: ignore[override]
            return logits

    other = Other()
    assert not report_whole_logprobs(other)
    assert not report_whole_logprobs(SimpleNamespace())
    assert other._sample_random(1, 2) == 1
