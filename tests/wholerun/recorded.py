"""A run of the local backend, and what it leaves behind for whoever wants to compute it again."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from safetensors.torch import load_file, save_file

from rl_cluster.assembly.run import OpenRun, open_run
from rl_cluster.assembly.train import load_tokenizer
from rl_cluster.config.planning.machine import find_machine
from rl_cluster.config.planning.plan import make_plan
from rl_cluster.config.reading.load import parse_config
from rl_cluster.config.run import RunConfig, ScratchModel
from rl_cluster.data.load import load_prompts
from rl_cluster.loop.state import LoopState
from rl_cluster.modeling.scratch import save_scratch_model
from rl_cluster.run_folder.folder import RunFolder, create_run_folder
from tests.assembly.local_runs import Quiet

SCRATCH = ScratchModel(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, max_positions=32)

BASE: dict[str, Any] = {
    "run": {"steps": 3, "seed": 5},
    "model": {"path": "set by record_run"},
    "data": {"train": {"source": "addition", "answer_digits": 3}, "held_out": 0},
    "rewards": {"scorers": [{"kind": "function", "function": "tests.wholerun.recorded:small_digits"}]},
    # Micro-batches of a few rows each, so that every update is a sum of several backward passes.
    "batch": {"prompts_per_step": 3, "samples_per_prompt": 4, "tokens_per_micro_batch": 48},
    # Ends at half of the digits: rows of 1 to 7 tokens.
    "rollout": {"max_new_tokens": 7, "temperature": 0.8, "stop_token_ids": [3, 4, 5, 6, 7]},
    "optimizer": {
        "learning_rate": 5e-3,
        "betas": [0.8, 0.95],
        # Far above the rounding of a gradient, which AdamW would otherwise blow up to a whole step.
        "eps": 1e-4,
        "weight_decay": 0.05,
        "max_grad_norm": 0.1,
        "warmup_steps": 2,
        "schedule": "cosine",
    },
    "cluster": {"backend": "local", "device": "cpu", "cpus_per_worker": 1},
    "log": {"progress": "none", "samples_every": 0, "tensorboard": False, "trajectories": True},
}


def small_digits(prompts: Sequence[str], responses: Sequence[str], metadata: Any) -> list[float]:
    """The share of 0 to 4 among the characters, and a little for each character."""
    return [sum(c in "01234" for c in r) / max(1, len(r)) + 0.01 * len(r) for r in responses]


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of `base` in which the leaves of `changes` replace or join its own."""
    result = copy.copy(base)
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = merged(result[name], value) if both else value
    return result


@dataclass(frozen=True)
class Sample:
    """One trained row as the run recorded it. tokens: int64 [T]. first: place of the first drawn token.
    behaviour: float64 [T − first], log-probabilities under which the tokens were drawn."""

    group_id: int
    tokens: np.ndarray
    first: int
    behaviour: np.ndarray
    versions: np.ndarray
    response: str
    finish_reason: str
    score: float


@dataclass
class Recorded:
    """start_folder: the weights before the run. value_heads: name of a learner ("policy", "critic") -> the
    start of its value head. steps: per step its rows. updates: per step and update the rows it trained on,
    as the learner was asked to. final: per learner its parameters at the end. rows: metrics per step."""

    config: RunConfig
    start_folder: Path
    reference_folder: Path
    value_heads: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    steps: list[list[Sample]] = field(default_factory=list)
    updates: list[list[list[int]]] = field(default_factory=list)
    final: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    rows: dict[int, dict[str, float | None]] = field(default_factory=dict)


def record_run(folder: Path, changes: dict[str, Any], stop_after: int | None = None) -> Recorded:
    """Train BASE with `changes`. A policy lag is allowed here, although the local backend's own check
    refuses it: groups are drawn ahead of the update, by weights that have moved when they are trained.

    stop_after: write a checkpoint after so many steps, end all workers, and go on with new ones.
    """
    model, reference = decided_model(folder / "model", 1), decided_model(folder / "reference", 2)
    paths = {"path": str(model), "reference_path": str(reference)}
    values = merged(merged(BASE, changes), {"run": {"dir": str(folder / "run")}, "model": paths})
    config = parse_config(values)
    recorded = Recorded(config, model, reference)
    target = create_run_folder(config)
    checkpoint = None
    if stop_after is not None:
        checkpoint = asyncio.run(_train(recorded, target, stop_after, None))
    asyncio.run(_train(recorded, target, config.run.steps, checkpoint))
    for step in range(1, config.run.steps + 1):
        table = pyarrow.parquet.read_table(target.path / "trajectories" / f"step-{step}.parquet")
        recorded.steps.append([_sample(row) for row in table.to_pylist()])
    return recorded


def decided_model(folder: Path, seed: int) -> Path:
    """A tiny model whose distributions are far from uniform, and far from those of another seed."""
    save_scratch_model(SCRATCH, folder, seed)
    file = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: (5 if tensor.dim() > 1 else 1) * tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    return folder


async def _train(recorded: Recorded, target: RunFolder, last_step: int, checkpoint: Path | None) -> Path:
    """Up to last_step, with new workers; returns a checkpoint of the end."""
    config, model = recorded.config, recorded.start_folder
    plan = make_plan(config, find_machine(config.cluster))
    tokenizer = load_tokenizer(str(model), False)
    prompts = load_prompts(config.data, tokenizer)
    quiet = Quiet()
    run = await open_run(config, plan, target, str(model), tokenizer, prompts.train, quiet)  # type: ignore[arg-type]
    try:
        state = None
        if checkpoint is None:
            for name, learner in _learners(run).items():
                (start,) = await learner.apply(_parameters)
                recorded.value_heads[name] = _value_head(start)
        else:
            state = LoopState.read(checkpoint)
            await run.cluster.load(checkpoint)
        _watch_updates(run, recorded)
        await run.train(prompts, last_step, state)
        for name, learner in _learners(run).items():
            (recorded.final[name],) = await learner.apply(_parameters)
        recorded.rows |= quiet.rows
        return await run.save()
    finally:
        await run.close()


def _learners(run: OpenRun) -> dict[str, Any]:
    found = {"policy": run.cluster.learner, "critic": run.cluster.critic}
    return {name: learner for name, learner in found.items() if learner is not None}


def _parameters(rank: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in rank.model.named_parameters()}


def _value_head(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    prefix = "value_head."
    return {n.removeprefix(prefix): p for n, p in parameters.items() if n.startswith(prefix)}


def _watch_updates(run: OpenRun, recorded: Recorded) -> None:
    """The rows of every update, in the order of the policy's updates; the first of a step opens a list."""
    learner, loop_of = run.cluster.learner, run
    real = learner.forward_backward

    async def watched(
        batch: Any, layout: Any, rows: Sequence[int], loss: Any
    ) -> tuple[dict[str, float], Any]:
        step = loop_of.step
        while len(recorded.updates) <= step:
            recorded.updates.append([])
        recorded.updates[step].append(list(rows))
        return await real(batch, layout, rows, loss)

    learner.forward_backward = watched  # type: ignore[method-assign]


def _sample(row: dict[str, Any]) -> Sample:
    mask = np.array(row["action_mask"])
    first = int(mask.argmax())
    assert mask[first:].all(), "an episode of one response"
    return Sample(
        group_id=row["group_id"],
        tokens=np.array(row["tokens"], dtype=np.int64),
        first=first,
        behaviour=np.array(row["behaviour_logprobs"], dtype=np.float64)[first:],
        versions=np.array(row["policy_versions"])[first:],
        response=row["response"],
        finish_reason=row["finish_reason"],
        score=row["score"],
    )
