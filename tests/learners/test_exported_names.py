"""A learner's export holds the names, the shapes and the numbers of the checkpoint that it came from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from learners.rank import LearnerRank
from learners.spec import LearnerSpec
from learners.whole_weights import whole_weights
from tests.modeling.architectures import CASES, save_tiny

BY_KIND = {case.kind: case for case in CASES}
KINDS = (
    *("llama", "mixtral", "qwen3_moe", "qwen3_next", "gpt_oss", "granitemoe", "gpt_neox", "lfm2", "bloom"),
    *("glm4_moe", "deepseek_v3", "gemma4_text", "nemotron_h", "minimax"),
)
"""Stacked experts, renamed layers, buffers that belong to the checkpoint, and what is plain."""


@pytest.mark.parametrize("kind", KINDS)
def test_an_untrained_export_is_the_checkpoint_that_was_loaded(kind: str, tmp_path: Path) -> None:
    save_tiny(BY_KIND[kind], tmp_path / "start")
    rank = LearnerRank(LearnerSpec(str(tmp_path / "start"), engine="torch", zero_stage=0))
    rank.export(tmp_path / "export")
    start, export = (load_file(tmp_path / name / "model.safetensors") for name in ("start", "export"))
    assert export.keys() == start.keys()
    for name, tensor in start.items():
        assert torch.equal(export[name], tensor), name
    sent = [(name, tuple(tensor.shape)) for group in rank.weight_groups() for name, tensor in group]
    assert [(meta.name, meta.shape) for meta in rank.weight_metadata()] == sent
    assert {name for name, _ in sent} == start.keys()
    copies = whole_weights(rank)
    assert copies is not None
    assert dict(rank.model.lm.named_parameters()).keys() <= copies.keys()


def test_a_critics_export_leaves_its_experts_apart_too(tmp_path: Path) -> None:
    save_tiny(BY_KIND["qwen3_moe"], tmp_path / "start")
    spec = LearnerSpec(str(tmp_path / "start"), engine="torch", zero_stage=0, kind="critic")
    LearnerRank(spec).export(tmp_path / "export")
    again = LearnerRank(LearnerSpec(str(tmp_path / "export"), engine="torch", zero_stage=0, kind="critic"))
    start = load_file(tmp_path / "start" / "model.safetensors")
    for name, tensor in (item for group in again.weight_groups() for item in group):
        assert torch.equal(start[f"model.{name}"], tensor), name
