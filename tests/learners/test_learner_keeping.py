"""One rank in this process: skipped steps, schedules, precision, saving and loading, dropout."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from learners.rank import LearnerRank
from learners.schedule import learning_rate
from learners.start import start_local_learner
from rl_cluster.algorithms.weights import row_weights
from rl_cluster.config.run import LoRAConfig, OptimizerConfig
from rl_cluster.errors import BadInputError, CheckpointError
from rl_cluster.protocols import OptimParams
from tests.learners.learner_cases import (
    STEP,
    make_batch,
    spec_of,
    weights_of,
)


def test_a_gradient_that_is_not_finite_skips_the_step(model_path: str) -> None:
    batch = make_batch()
    assert batch.advantages is not None
    broken = batch.with_columns(advantages=np.full_like(batch.advantages, np.nan))
    rank = LearnerRank(spec_of(model_path))
    before = weights_of(rank)
    weights = row_weights("token_mean", batch.action_counts, 128)
    rank.forward_backward(broken, [range(13)], weights, STEP)
    result = rank.optim_step(OptimParams())
    assert result.skipped
    assert result.step == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(rank).items())
    rank.forward_backward(batch, [range(13)], weights, STEP)
    assert not rank.optim_step(OptimParams()).skipped


def test_optim_params_override_the_schedule_and_the_clipping(model_path: str) -> None:
    batch = make_batch()
    weights = row_weights("token_mean", batch.action_counts, 128)
    rank = LearnerRank(spec_of(model_path))
    before = weights_of(rank)
    rank.forward_backward(batch, [range(13)], weights, STEP)
    result = rank.optim_step(OptimParams(learning_rate=0.0))
    assert result.learning_rate == 0.0
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(rank).items())


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.5, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, 0.5, 0.0]),
    ],
)
def test_schedules_warm_up_and_decay(schedule: str, expected: list[float]) -> None:
    optimizer = OptimizerConfig(learning_rate=1.0, warmup_steps=2, schedule=schedule)  # type: ignore[arg-type]
    rates = [learning_rate(optimizer, step, 6) for step in (0, 1, 2, 4, 6)]
    assert rates == pytest.approx(expected)
    cosine = OptimizerConfig(learning_rate=2.0, schedule="cosine")
    assert learning_rate(cosine, 1, 3) == pytest.approx(1 + math.cos(math.pi / 3))


def test_bfloat16_keeps_master_weights_that_move_by_less_than_its_precision(model_path: str) -> None:
    batch = make_batch()
    optimizer = OptimizerConfig(learning_rate=1e-6)
    rank = LearnerRank(spec_of(model_path, dtype="bfloat16", optimizer=optimizer))
    start = [master.clone() for master in rank.engine.state()["masters"]]
    weights = row_weights("token_mean", batch.action_counts, 128)
    rank.forward_backward(batch, [range(13)], weights, STEP)
    rank.optim_step(OptimParams())
    masters = rank.engine.state()["masters"]
    assert max(float((a - b).abs().max()) for a, b in zip(masters, start, strict=True)) == pytest.approx(
        1e-6, rel=0.1
    )
    assert {meta.dtype for meta in rank.weight_metadata()} == {torch.bfloat16}


def test_save_and_load_continue_bit_for_bit_with_dropout(model_path: str, tmp_path: Path) -> None:
    spec = spec_of(model_path, lora=LoRAConfig(rank=4, dropout=0.3))
    batch = make_batch()
    weights = row_weights("token_mean", batch.action_counts, 128)

    def train(rank: LearnerRank, steps: int) -> None:
        for _ in range(steps):
            rank.forward_backward(batch, [range(6), range(6, 13)], weights, STEP)
            rank.optim_step(OptimParams())

    straight = LearnerRank(spec)
    train(straight, 2)
    straight.save(tmp_path)
    train(straight, 2)
    resumed = LearnerRank(spec)
    torch.manual_seed(12345)
    resumed.load(tmp_path)
    train(resumed, 2)
    ours, theirs = weights_of(resumed), weights_of(straight)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(CheckpointError, match="lora_rank was 4 and is now None"):
        LearnerRank(spec_of(model_path)).load(tmp_path)
    (tmp_path / "rank-0.pt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"cannot read .*rank-0\.pt"):
        resumed.load(tmp_path)


@pytest.mark.parametrize(
    ("verb", "file"), [("save", "rank-0.pt"), ("save", "learner.json"), ("export", "config.json")]
)
async def test_a_full_disk_is_a_checkpoint_error_that_names_the_place(
    model_path: str, tmp_path: Path, verb: str, file: str
) -> None:
    """/dev/full refuses every byte, as a full disk does."""
    learner = start_local_learner(spec_of(model_path))
    (tmp_path / file).symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=f"cannot write {tmp_path}"):
        await getattr(learner, verb)(tmp_path)
    (tmp_path / file).unlink()
    await getattr(learner, verb)(tmp_path)


def test_a_model_that_does_not_exist_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"model\.path: folder .*nowhere.* does not exist"):
        LearnerRank(spec_of(str(tmp_path / "nowhere")))


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2, dropout=0.4)])
@pytest.mark.parametrize("disable", [False, True])
def test_the_models_own_dropout_can_be_turned_off_and_an_adapters_stays(
    tmp_path: Path, disable: bool, lora: LoRAConfig | None
) -> None:
    sizes = {"vocab_size": 40, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)).save_pretrained(
        tmp_path
    )
    rank = LearnerRank(spec_of(str(tmp_path), disable_dropout=disable, lora=lora))
    shares = {name: m.p for name, m in rank.model.named_modules() if isinstance(m, torch.nn.Dropout)}
    own = {p for name, p in shares.items() if "lora_" not in name}
    assert own == {0.0 if disable else 0.3}
    assert {p for name, p in shares.items() if "lora_" in name} == (set() if lora is None else {0.4})
    if lora is None:
        batch = make_batch()
        _, part = rank.forward_backward(batch, [range(13)], np.ones(13), STEP)
        _, trained = rank.assemble_logprobs(len(batch.tokens), part)
        _, forward = rank.forward_part(batch, [range(13)], reference=False)
        _, whole = rank.assemble(len(batch.tokens), forward)
        difference = np.abs(trained - whole.logprobs)[batch.action_mask].max()
        assert (difference < 1e-6) == disable
