"""Two ranks as Ray actors over gloo compute what one plain rank computes. One group serves all tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from learners.actor import LearnerActor
from learners.group import LearnerGroup
from learners.rank import LearnerRank
from learners.spec import LearnerSpec
from learners.start import start_local_learner, start_ray_learner
from rl_cluster.algorithms.steps import CrossEntropyStep, ValueStep
from rl_cluster.config.run import LoRAConfig
from rl_cluster.errors import BadInputError, CheckpointError, DeadlineError, WorkerDiedError
from rl_cluster.protocols import OptimParams
from rl_cluster.ray_answers import answer
from tests.learners import rank_programs
from tests.learners.learner_cases import (
    BF16_OPTIMIZER,
    OPTIMIZER,
    STEP,
    layout_of,
    make_batch,
    make_model,
    movement_agrees,
    relative_difference,
)
from tests.learners.plain_bf16 import imitate

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

BATCHES = [make_batch(seed=seed) for seed in range(5)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> LearnerSpec:
    return LearnerSpec(
        make_model(tmp_path_factory.mktemp("tiny")),
        optimizer=OPTIMIZER,
        total_steps=10,
        temperature=0.9,
        tokens_per_micro_batch=60,
        num_threads=1,
        persist_below=0,
        deadline_seconds=120,
    )


@pytest.fixture(scope="module")
async def group(ray_session: Iterator[None], spec: LearnerSpec) -> AsyncIterator[LearnerGroup]:
    group = await start_ray_learner(spec, 2)
    yield group
    group.close()


def plain(spec: LearnerSpec, **settings: Any) -> LearnerSpec:
    return replace(spec, engine="torch", **settings)


async def alone(spec: LearnerSpec, function: Any, *args: Any) -> Any:
    """The program on one rank in this process."""
    return (await start_local_learner(plain(spec)).apply(function, plain(spec), *args))[0]


async def test_group_answers_as_one_plain_rank_in_input_order(group: LearnerGroup, spec: LearnerSpec) -> None:
    import ray

    local = start_local_learner(plain(spec))
    batch = BATCHES[0]
    ref = ray.put(batch)
    ours = await (await group.forward(ref, layout_of(batch)))
    theirs = await local.forward(batch, layout_of(batch))
    assert np.abs(ours.logprobs - theirs.logprobs).max() < 1e-5
    assert np.abs(ours.entropy - theirs.entropy).max() < 1e-5
    assert np.count_nonzero(ours.logprobs) == batch.action_mask.sum()
    rows = [12, 3, 4, 0, 7]
    metrics, there = await group.forward_backward(ref, layout_of(batch), rows, STEP)
    expected, here = await local.forward_backward(batch, layout_of(batch), rows, STEP)
    assert metrics.keys() == expected.keys()
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert np.abs(await there - here).max() < 1e-5
    assert np.count_nonzero(here) == batch.select(rows).action_mask.sum()
    result, expected_result = await group.optim_step(), await local.optim_step()
    assert result.grad_norm == pytest.approx(expected_result.grad_norm, rel=1e-4)
    assert (result.step, result.learning_rate) == (1, 5e-4)


async def test_calls_take_effect_in_the_order_of_submission(group: LearnerGroup) -> None:
    import ray

    batch = BATCHES[1]
    ref, layout = ray.put(batch), layout_of(batch)
    calls = [
        group.forward(ref, layout),
        group.forward_backward(ref, layout, range(13), STEP),
        group.optim_step(),
        group.forward(ref, layout),
    ]
    before, _, _, after = await asyncio.gather(*(asyncio.create_task(call) for call in calls))
    small, big = await group.compute(_difference, before, after)
    assert small > 1e-4
    assert small == pytest.approx(np.abs(await big).max())
    assert await group.ask(_difference, before, before) == (0.0, pytest.approx(0.0))
    assert await group.ask(_difference, group.put(await before), after) == (small, pytest.approx(await big))


def _difference(before: Any, after: Any) -> tuple[float, np.ndarray]:
    difference = after.logprobs - before.logprobs
    return float(np.abs(difference).max()), difference


@pytest.mark.parametrize("stage", [1, 2, 3])
async def test_zero_with_two_ranks_equals_adamw_after_five_steps(
    group: LearnerGroup, spec: LearnerSpec, stage: int
) -> None:
    expected, expected_weights, names = await alone(spec, rank_programs.train, BATCHES, STEP, 60)
    ranks = await group.apply(rank_programs.train, replace(spec, zero_stage=stage), BATCHES, STEP, 60)
    for results, weights, metadata in ranks:
        assert metadata == names
        assert [(n, w.shape) for n, w in weights.items()] == metadata
        assert [r.learning_rate for r in results] == [r.learning_rate for r in expected]
        assert [r.grad_norm for r in results] == pytest.approx([r.grad_norm for r in expected], rel=1e-4)
        # An update moves a weight by 1e-3 at most, five by 4e-3: Adam's sign near zero gradients is noise.
        assert max(np.abs(weights[n] - expected_weights[n]).max() for n in weights) < 2e-5


@pytest.mark.parametrize("stage", [1, 2, 3])
async def test_under_zero_every_step_brings_its_own_settings_and_a_forgotten_gradient_is_gone(
    group: LearnerGroup, spec: LearnerSpec, stage: int
) -> None:
    decaying = replace(spec, optimizer=spec.optimizer.model_copy(update={"weight_decay": 0.1}))
    params = [
        OptimParams(1e-3, 0.3, (0.7, 0.9), 1e-4, 0.2, 0.01),
        OptimParams(2e-3, 0.0, (0.5, 0.8), 1e-3, 0.0, 3.0),
        OptimParams(gradient_scale=0.5),
    ]
    expected, weights = await alone(decaying, rank_programs.train_with, BATCHES[:3], STEP, params)
    for results, ours in await group.apply(
        rank_programs.train_with, replace(decaying, zero_stage=stage), BATCHES[:3], STEP, params
    ):
        assert [r.learning_rate for r in results] == [r.learning_rate for r in expected]
        assert [r.grad_norm for r in results] == pytest.approx([r.grad_norm for r in expected], rel=1e-4)
        assert max(np.abs(ours[name] - weights[name]).max() for name in weights) < 2e-5
    with pytest.raises(BadInputError, match=r"optimizer\.weight_decay above 0"):
        await group.apply(
            rank_programs.train_with, replace(spec, zero_stage=stage), BATCHES[:1], STEP, params[:1]
        )


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("budget", [10_000, 30])
async def test_zero_in_bfloat16_moves_float32_masters_and_the_model_with_them(
    group: LearnerGroup, spec: LearnerSpec, stage: int, budget: int
) -> None:
    """Against plain PyTorch, a row at a time, gradients added up in float32. budget 30: up to 8 micro-batches
    a step and rank."""
    batches = [make_batch(seed=seed) for seed in range(4)]
    variant = replace(spec, zero_stage=stage, dtype="bfloat16", optimizer=BF16_OPTIMIZER, total_steps=4)
    start = rank_programs.weights_of(LearnerRank(plain(variant)))
    expected, norms = imitate(spec.model_path, batches, BF16_OPTIMIZER, 4)
    trained = await group.apply(rank_programs.train, variant, batches, CrossEntropyStep(), budget)
    for results, weights, _ in trained:
        assert [result.grad_norm for result in results] == pytest.approx(norms, rel=0.02)
        assert movement_agrees(start, weights, expected)


@pytest.mark.parametrize("budgets", [[10_000], [10_000] * 3, [60], [1], [1] * 3])
async def test_gradients_do_not_depend_on_ranks_micro_batches_and_packing(
    group: LearnerGroup, spec: LearnerSpec, budgets: list[int]
) -> None:
    expected = await alone(spec, rank_programs.gradient, BATCHES[0], [10_000], STEP)
    one_rank = await alone(spec, rank_programs.gradient, BATCHES[0], budgets, STEP)
    two_ranks = await group.apply(rank_programs.gradient, spec, BATCHES[0], budgets, STEP)
    assert np.abs(expected).max() > 1e-3
    for gradient in (one_rank, *two_ranks):
        assert relative_difference(gradient, expected) < 1e-5


async def test_critics_adapters_checkpointing_and_offload_under_zero_equal_one_plain_rank(
    group: LearnerGroup, spec: LearnerSpec
) -> None:
    cases = [(replace(spec, kind="critic"), ValueStep()), (replace(spec, lora=LoRAConfig(rank=4)), STEP)]
    cases.append((replace(spec, kind="policy_with_values"), replace(STEP, value_coef=0.3)))
    cases.append((replace(spec, gradient_checkpointing=True, offload_optimizer=True), STEP))
    for variant, step in cases:
        _, expected, _ = await alone(variant, rank_programs.train, BATCHES[:3], step, 60)
        for _, weights, _ in await group.apply(rank_programs.train, variant, BATCHES[:3], step, 60):
            assert weights.keys() == expected.keys()
            assert max(np.abs(weights[n] - expected[n]).max() for n in expected) < 2e-5


@pytest.mark.parametrize(("stage", "offload"), [(3, False), (3, True), (2, False), (1, False)])
async def test_under_zero_too_a_warm_up_of_the_values_leaves_the_policy_as_it_is(
    group: LearnerGroup, spec: LearnerSpec, stage: int, offload: bool, tmp_path: Path
) -> None:
    optimizer = OPTIMIZER.model_copy(update={"weight_decay": 0.1})
    shared = replace(
        spec, kind="policy_with_values", optimizer=optimizer, zero_stage=stage, offload_optimizer=offload
    )
    both = replace(STEP, value_coef=0.3)
    steps = [replace(both, train_policy=False)] * 3 + [both] * 2
    expected = await alone(
        replace(shared, engine="torch", offload_optimizer=False),
        rank_programs.warm_up,
        BATCHES,
        steps,
        tmp_path / "plain",
    )
    for weights in await group.apply(rank_programs.warm_up, shared, BATCHES, steps, tmp_path / "zero"):
        for number in (1, 2, 3):
            assert all(np.array_equal(weights[number][n], weights[0][n]) for n in weights[0])
        assert max(np.abs(weights[4][n] - weights[0][n]).max() for n in weights[0]) > 1e-4
        assert max(np.abs(weights[5][n] - expected[5][n]).max() for n in expected[5]) < 2e-5


@pytest.mark.parametrize(
    ("stage", "dtype"), [(3, "float32"), (3, "bfloat16"), (2, "bfloat16"), (1, "float32")]
)
async def test_save_and_load_continue_bit_for_bit(
    group: LearnerGroup, spec: LearnerSpec, stage: int, dtype: Any, tmp_path: Path
) -> None:
    lora = LoRAConfig(rank=4, dropout=0.2) if stage == 2 else None
    variant = replace(spec, zero_stage=stage, dtype=dtype, lora=lora)
    for straight, resumed in await group.apply(rank_programs.resume, variant, BATCHES[:4], STEP, tmp_path):
        assert all(np.array_equal(straight[name], resumed[name]) for name in straight)
    with pytest.raises(CheckpointError, match="world_size was 2 and is now 1"):
        await start_local_learner(plain(variant)).load(tmp_path)


@pytest.mark.parametrize(("stage", "dtype"), [(3, "float32"), (2, "bfloat16"), (1, "float32")])
async def test_a_gradient_that_is_not_finite_skips_the_step_on_every_rank(
    group: LearnerGroup, spec: LearnerSpec, stage: int, dtype: Any
) -> None:
    batch = BATCHES[0]
    assert batch.advantages is not None
    advantages = batch.advantages.copy()
    advantages[np.flatnonzero(batch.action_mask)[0]] = np.inf
    variant = replace(spec, zero_stage=stage, dtype=dtype)
    broken = batch.with_columns(advantages=advantages)
    for results, first, second, third in await group.apply(rank_programs.skip, variant, batch, broken, STEP):
        assert [result.skipped for result in results] == [True, False]
        assert [result.step for result in results] == [0, 1]
        assert all(np.array_equal(first[name], second[name]) for name in first)
        assert any(not np.array_equal(second[name], third[name]) for name in first)


async def test_export_is_an_ordinary_folder_with_the_same_weights(
    group: LearnerGroup, spec: LearnerSpec, tmp_path: Path
) -> None:
    await group.apply(rank_programs.export, replace(spec, kind="policy_with_values"), tmp_path)
    ours, theirs = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path, spec.model_path))
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert (tmp_path / "value_head.safetensors").is_file()


async def test_an_adapter_exports_as_a_peft_folder(
    group: LearnerGroup, spec: LearnerSpec, tmp_path: Path
) -> None:
    lora = replace(spec, lora=LoRAConfig(rank=4, alpha=8.0))
    await group.apply(rank_programs.export, lora, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(spec.model_path)
    loaded = PeftModel.from_pretrained(base, tmp_path).state_dict()
    expected = {n: w for group in LearnerRank(plain(lora)).weight_groups() for n, w in group}
    assert len(expected) == 28
    for name, weight in expected.items():
        assert torch.equal(loaded[name.removesuffix(".weight") + ".default.weight"], weight), name


async def test_nobody_can_take_the_port_at_which_the_ranks_will_meet(group: LearnerGroup, spec: Any) -> None:
    import socket

    rank = LearnerActor(plain(spec), 0, 2)
    address, port = rank.ready()
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind((address, port))


async def test_a_rank_that_waits_in_vain_says_for_whom_and_how_long(ray_session: None, spec: Any) -> None:
    import ray

    lonely = ray.remote(LearnerActor).options(num_cpus=0).remote(plain(spec, deadline_seconds=1.0), 0, 2)
    address, port = await lonely.ready.remote()
    expected = rf"rank 0 of 2 did not meet the others at {address}:{port} within learner\.deadline_seconds=1"
    with pytest.raises(DeadlineError, match=expected):
        await answer("learner-0", lonely.start.remote(address, port), "its start", 60.0)
    ray.kill(lonely)


async def test_a_late_rank_is_named(group: LearnerGroup, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with pytest.raises(DeadlineError, match=r"_wait_on_last: no answer from learner-1 within 4 s"):
        await group.apply(_wait_on_last, gate, deadline_seconds=4.0)
    with gate.open("w"):
        pass  # learner-1 goes on
    assert await group.apply(_wait_on_none) == [0, 1]


def _wait_on_last(rank: Any, gate: Path) -> None:
    """The last rank answers when somebody opens the pipe for writing, and not before."""
    if rank.rank == 1:
        gate.read_bytes()


def _wait_on_none(rank: Any) -> int:
    return rank.rank


async def test_a_dead_rank_is_named(group: LearnerGroup) -> None:
    with pytest.raises(WorkerDiedError, match="learner-1"):
        await group.apply(rank_programs.die_on, 1)
