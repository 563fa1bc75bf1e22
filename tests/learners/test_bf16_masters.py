"""bfloat16: gradients add up over micro-batches in float32, masters move, and the model follows them."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

from learners.engine import StepSettings
from learners.engine_torch import TorchEngine
from learners.rank import LearnerRank
from learners.spec import LearnerSpec
from rl_cluster.algorithms.steps import CrossEntropyStep
from rl_cluster.config.run import OptimizerConfig
from rl_cluster.protocols import OptimParams
from tests.learners import rank_programs
from tests.learners.learner_cases import BF16_OPTIMIZER as OPTIMIZER
from tests.learners.learner_cases import make_batch, make_model, movement_agrees
from tests.learners.plain_bf16 import PlainMasters, imitate


def small_module(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16()


def micro_batches(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, 6, generator=generator).bfloat16(), torch.randn(n, 3, generator=generator))
        for n in (4, 2, 3)
    ]


def by_shape(tensors: Iterable[torch.Tensor]) -> dict[torch.Size, torch.Tensor]:
    """The module's parameters have four different shapes; their order is the engine's business."""
    found = {tensor.shape: tensor for tensor in tensors}
    assert len(found) == 4
    return found


def settings(
    learning_rate: float, max_grad_norm: float, optimizer: OptimizerConfig = OPTIMIZER
) -> StepSettings:
    return StepSettings.of(optimizer, OptimParams(max_grad_norm=max_grad_norm), learning_rate, False)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5, 100.0])
def test_three_backward_passes_and_a_step_move_masters_and_module(max_grad_norm: float) -> None:
    ours, theirs = small_module(), small_module()
    start = copy.deepcopy(ours).state_dict()
    engine, plain = TorchEngine(ours, OPTIMIZER), PlainMasters(theirs, OPTIMIZER)
    for step in range(4):
        for x, y in micro_batches(step):
            engine.backward((engine.forward(x).float() - y).square().sum())
            plain.backward((theirs(x).float() - y).square().sum())
        outcome = engine.step(settings(0.01 * (step + 1), max_grad_norm))
        assert outcome.grad_norm == pytest.approx(plain.step(0.01 * (step + 1), max_grad_norm), rel=1e-6)
        masters = by_shape(engine.state()["masters"])
        for expected in plain.masters:
            assert masters[expected.shape].dtype == torch.float32
            assert torch.allclose(masters[expected.shape], expected, atol=1e-6)
        for parameter in ours.parameters():
            master = masters[parameter.shape]
            assert parameter.dtype == torch.bfloat16
            assert torch.equal(parameter.detach(), master.bfloat16())
            assert parameter.grad is None
    for name, tensor in ours.state_dict().items():
        assert (tensor.float() - start[name].float()).abs().max() > 0.02, "far above bfloat16's rounding"


def test_masters_keep_what_bfloat16_would_round_away() -> None:
    module = small_module()
    before = [p.detach().clone() for p in module.parameters()]
    optimizer = OPTIMIZER.model_copy(update={"weight_decay": 0.0, "eps": 1e-8})
    engine = TorchEngine(module, optimizer)
    first = [master.clone() for master in engine.state()["masters"]]
    for _ in range(3):
        for x, y in micro_batches(0):
            engine.backward((engine.forward(x).float() - y).square().sum())
        engine.step(settings(1e-6, 0.0, optimizer))
    for old, new, p, q in zip(first, engine.state()["masters"], before, module.parameters(), strict=True):
        moved = (new - old).abs()
        assert float(moved.min()) > 1e-6 and float(moved.max()) < 3.1e-6
        assert (q != p).float().mean() < 0.1


def test_loaded_masters_are_in_the_module_and_go_on_exactly() -> None:
    one, other = (TorchEngine(small_module(seed), OPTIMIZER) for seed in (0, 1))
    for x, y in micro_batches(0):
        one.backward((one.forward(x).float() - y).square().sum())
    one.step(settings(0.05, 0.5))
    x, y = micro_batches(5)[0]
    other.backward((other.forward(x).float() - y).square().sum())  # a gradient of before, to be forgotten
    other.load_state(copy.deepcopy(one.state()))
    for step in range(2):
        for ours, theirs in zip(one.module.parameters(), other.module.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        for engine in (one, other):
            for x, y in micro_batches(step):
                engine.backward((engine.forward(x).float() - y).square().sum())
            engine.step(settings(0.05, 0.5))
    for ours, theirs in zip(one.state()["masters"], other.state()["masters"], strict=True):
        assert torch.equal(ours, theirs)


def test_a_gradient_that_is_not_finite_leaves_masters_module_and_moments() -> None:
    engine = TorchEngine(small_module(), OPTIMIZER)
    x, y = micro_batches(0)[0]
    engine.backward((engine.forward(x).float() - y).square().sum())
    engine.step(settings(0.05, 0.5))
    before = copy.deepcopy(engine.state())
    weights = [p.detach().clone() for p in engine.module.parameters()]
    engine.backward((engine.forward(x).float() - y).square().sum())
    engine.backward(engine.forward(x).float().sum() * float("inf"))
    assert engine.step(settings(0.05, 0.5)).skipped
    after = engine.state()
    for old, new in zip(before["masters"], after["masters"], strict=True):
        assert torch.equal(old, new)
    for index, moments in before["optimizer"]["state"].items():
        for name, tensor in moments.items():
            assert torch.equal(tensor, after["optimizer"]["state"][index][name])
    assert all(torch.equal(a, b) for a, b in zip(weights, engine.module.parameters(), strict=True))
    engine.backward((engine.forward(x).float() - y).square().sum())
    assert not engine.step(settings(0.05, 0.5)).skipped, "the bad gradient is forgotten"


@pytest.mark.parametrize("budget", [10_000, 60])
def test_a_rank_in_bfloat16_follows_the_plain_computation(budget: int, tmp_path: Path) -> None:
    path = make_model(tmp_path)
    spec = LearnerSpec(
        path, engine="torch", dtype="bfloat16", optimizer=OPTIMIZER, total_steps=4, num_threads=1
    )
    batches = [make_batch(seed=seed) for seed in range(4)]
    here = LearnerRank(spec)
    start = rank_programs.weights_of(here)
    results, weights, _ = rank_programs.train(here, spec, batches, CrossEntropyStep(), budget)
    expected, norms = imitate(path, batches, OPTIMIZER, 4)
    assert [result.grad_norm for result in results] == pytest.approx(norms, rel=0.02)
    assert movement_agrees(start, weights, expected)


def test_the_agreement_of_movements_is_strict_enough_to_see_a_lost_micro_batch(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    batches = [make_batch(seed=seed) for seed in range(4)]
    spec = LearnerSpec(path, engine="torch", dtype="bfloat16", optimizer=OPTIMIZER)
    start = rank_programs.weights_of(LearnerRank(spec))
    whole, _ = imitate(path, batches, OPTIMIZER, 4)
    halves = [batch.select(range(6, 13)) for batch in batches]
    half, _ = imitate(path, halves, OPTIMIZER, 4)
    unclipped, _ = imitate(path, batches, OPTIMIZER.model_copy(update={"max_grad_norm": 100.0}), 4)
    slower, _ = imitate(path, batches, OPTIMIZER.model_copy(update={"learning_rate": 0.045}), 4)
    assert movement_agrees(start, whole, whole)
    for other in (start, half, unclipped, slower):
        assert not movement_agrees(start, other, whole)
