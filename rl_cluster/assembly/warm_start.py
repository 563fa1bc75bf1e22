"""Where the policy comes from: a checkpoint, or a scratch model that has imitated demonstrations first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rl_cluster.assembly.learner import learner_spec, start_learner
from rl_cluster.batch import TokenBatch
from rl_cluster.config.fit import FitConfig
from rl_cluster.config.planning.plan import Plan
from rl_cluster.config.run import OptimizerConfig, RunConfig, SupervisedConfig
from rl_cluster.data.demonstrations import demonstrations
from rl_cluster.data.randomness import hash_bits, permutation
from rl_cluster.files.atomic import folder_atomically
from rl_cluster.loop.supervised import run_supervised
from rl_cluster.metrics.observer import RunObserver
from rl_cluster.modeling.scratch import save_scratch_model
from rl_cluster.protocols import OptimResult
from rl_cluster.run_folder.folder import RunFolder
from rl_cluster.trajectory import Prompt

REPORT_EVERY = 50
"""Steps between lines on the console."""


def scratch_folder(config: RunConfig | FitConfig, folder: RunFolder) -> Path:
    """The made model, before any training; made on the first call."""
    assert config.model.scratch is not None
    target = folder.path / "start" / "scratch"
    if not target.exists():
        with folder_atomically(target, "model") as partial:
            save_scratch_model(config.model.scratch, partial, config.run.seed)
    return target


async def imitate(
    config: RunConfig,
    plan: Plan,
    folder: RunFolder,
    model_path: str,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    observer: RunObserver,
) -> Path:
    """Train on demonstrations with a learner of its own; returns the folder of the trained model."""
    supervised = config.model.supervised
    assert supervised is not None
    target = folder.path / "start" / "supervised"
    if target.exists():
        return target
    observer.phase("starting the supervised learner")
    optimizer = OptimizerConfig(
        learning_rate=supervised.learning_rate, warmup_steps=supervised.warmup_steps, schedule="linear"
    )
    spec = learner_spec(config, plan, model_path, optimizer=optimizer, total_updates=supervised.steps)
    learner = await start_learner(config, plan, spec, "supervised")
    try:
        batches = _batches(prompts, tokenizer, supervised, config.run.seed)
        progress = _Progress(observer, supervised.steps)
        await run_supervised(learner, batches, progress, config.health.max_skipped_updates)
        with folder_atomically(target, "model") as partial:
            await learner.export(partial)
            tokenizer.save_pretrained(partial)
    finally:
        learner.close()
    return target


class _Progress:
    """Called after each supervised step; shows the mean loss since the last line."""

    def __init__(self, observer: RunObserver, num_steps: int) -> None:
        self._observer = observer
        self._num_steps = num_steps
        self._losses: list[float] = []

    def __call__(self, step: int, loss: float, result: OptimResult) -> None:
        self._losses.append(loss)
        self._observer.phase(f"imitating {step}/{self._num_steps}")
        if step % REPORT_EVERY == 0:
            mean = sum(self._losses) / len(self._losses)
            self._observer.note(f"supervised step {step}: loss {mean:.3f} nats per token")
            self._losses.clear()


def _batches(
    prompts: Sequence[Prompt], tokenizer: Any, config: SupervisedConfig, seed: int
) -> Iterator[TokenBatch]:
    """config.steps batches; each epoch has its own order and its own choice of wrong answers."""
    made = 0
    for epoch in range(config.steps):
        rows = demonstrations(
            prompts,
            tokenizer,
            correct_fraction=config.correct_fraction,
            seed=hash_bits("demonstrations", seed, epoch),
        )
        order = permutation(len(prompts), "imitation", seed, epoch)
        size = min(config.rows_per_step, len(prompts))
        for start in range(0, len(order) - size + 1, size):
            if made == config.steps:
                return
            made += 1
            yield rows.select(order[start : start + size].tolist())
