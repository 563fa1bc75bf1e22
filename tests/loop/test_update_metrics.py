"""What a step reports of its updates is what its objective weighed, recomputed here in plain numpy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from learners.micro_batch import MicroBatch
from rl_cluster.algorithms.table import LossStep, ValueStep, compute_loss
from rl_cluster.algorithms.totals import add_metrics
from rl_cluster.algorithms.weights import row_weights
from rl_cluster.batch import TokenBatch
from rl_cluster.config import RunConfig
from rl_cluster.config.reward import ShapingConfig
from rl_cluster.loop.buffer import ReadyGroup, StageTimes
from rl_cluster.loop.report import StepClock, step_metrics
from rl_cluster.loop.step import TrainStep
from rl_cluster.protocols import BatchLayout, ForwardOutput, OptimResult, PublishReport
from rl_cluster.rewards.shaping import ShapedScores, shape_scores
from rl_cluster.trajectory import Prompt, Trajectory, TrajectoryGroup

LENGTHS = (1, 6, 3, 2, 5, 4, 6, 1)
"""Drawn tokens of eight completions of two prompts."""
MAX_NEW_TOKENS = 7


class MovingLearner:
    """Each update finds the policy, and the values, elsewhere; what it was asked is counted with the real
    objectives, its rows spread over two ranks with a micro-batch per two rows."""

    def __init__(self, seed: int, sigma: float = 0.25) -> None:
        self._random = np.random.default_rng(seed)
        self._sigma = sigma
        self.updates: list[dict[str, Any]] = []

    async def compute(self, function: Any, *args: Any) -> Any:
        return function(*args)

    async def forward(self, batch: TokenBatch, layout: Any, *, reference: bool = False) -> ForwardOutput:
        shape, mask = len(batch.tokens), batch.action_mask
        logprobs = -self._random.uniform(0.2, 2.0, shape) * mask
        values = self._random.normal(size=shape) * mask
        return ForwardOutput(
            logprobs.astype(np.float32), np.zeros(shape, np.float32), values.astype(np.float32)
        )

    async def forward_backward(
        self, batch: TokenBatch, layout: BatchLayout, rows: Sequence[int], loss: LossStep
    ) -> tuple[dict[str, float], None]:
        old = batch.behaviour_logprobs if batch.proximal_logprobs is None else batch.proximal_logprobs
        assert old is not None
        size = len(old)
        now = (old + self._random.normal(0, self._sigma, size)).astype(np.float32)
        entropy, values = self._random.uniform(0.5, 2, size), self._random.normal(size=size)
        self.updates.append(
            {
                "rows": list(rows),
                "now": now,
                "entropy": entropy,
                "values": values,
                "batch": batch,
                "loss": loss,
            }
        )
        weights = np.zeros(layout.num_rows)
        counts = np.asarray(layout.action_counts)[list(rows)]
        weights[list(rows)] = row_weights(loss.aggregation, counts, MAX_NEW_TOKENS)
        totals: dict[str, float] = {}
        for rank in (rows[: len(rows) // 3], rows[len(rows) // 3 :]):
            of_rank: dict[str, float] = {}
            for start in range(0, len(rank), 2):
                micro = MicroBatch.of(batch, rank[start : start + 2], torch.device("cpu"))
                output = [
                    torch.from_numpy(x.astype(np.float32)[micro.places]) for x in (now, entropy, values)
                ]
                result = compute_loss(loss, micro.loss_inputs(batch, weights, tuple(output)))  # type: ignore[arg-type]
                add_metrics(of_rank, result.metrics | result.weighted)
            add_metrics(totals, of_rank)
        return totals, None

    async def optim_step(self, params: Any = None) -> OptimResult:
        return OptimResult(len(self.updates), 0.1, 1.0)


def group(number: int, lengths: Sequence[int], truncated: Sequence[int] = ()) -> TrajectoryGroup:
    random = np.random.default_rng(number)
    trajectories = []
    for sample, length in enumerate(lengths):
        mask = np.arange(2 + length) >= 2
        trajectories.append(
            Trajectory(
                tokens=random.integers(3, 9, 2 + length).astype(np.int32),
                action_mask=mask,
                behaviour_logprobs=np.where(mask, -random.uniform(0.2, 2, 2 + length), 0).astype(np.float32),
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
                finish_reason="length" if sample in truncated else "stop",
                response_text="",
                ended_with_eos=sample not in truncated,
            )
        )
    prompt = Prompt(f"p{number}", np.array([1, 2], dtype=np.int32), "")
    return TrajectoryGroup(number, prompt, tuple(trajectories))


def run_step(
    algorithm: dict[str, Any],
    critic: MovingLearner | None = None,
    shaped: ShapedScores | None = None,
    truncated: Sequence[int] = (),
    step: int = 1,
    **sections: Any,
) -> tuple[dict[str, float | None], MovingLearner]:
    config = RunConfig.model_validate(
        {
            "run": {"steps": 5},
            "model": {"path": "unused"},
            "data": {"train": {"source": "addition"}},
            "rewards": {"scorers": [{"kind": "exact_match"}]},
            "batch": {"prompts_per_step": 2, "samples_per_prompt": 4},
            "rollout": {"max_new_tokens": MAX_NEW_TOKENS},
            "algorithm": algorithm,
            **sections,
        },
        strict=False,
    )
    groups = [group(0, LENGTHS[:4], truncated), group(1, LENGTHS[4:])]
    times = StageTimes(0.0, 1.0, 2.0, 2.0)
    ready = []
    for one in groups:
        tokens = sum(len(t.tokens) for t in one.trajectories)
        reference = np.random.default_rng(one.group_id + 50).uniform(-2, -0.2, tokens).astype(np.float32)
        reference = reference if config.algorithm.kl.coef > 0 else None
        ready.append(ReadyGroup(one.summary("w", 0.0), one, reference, (), times))
    scores = np.random.default_rng(9).normal(size=8)
    shaped = shaped or shape_scores(
        {"s": scores}, {"s": 1.0}, LENGTHS, [True] * 8, MAX_NEW_TOKENS, config.rewards.shaping
    )
    learner = MovingLearner(seed=3)
    result = asyncio.run(
        TrainStep(config, learner, critic, False).run(ready, shaped.scores, config.algorithm.kl.coef, step)  # type: ignore[arg-type]
    )
    clock, published = StepClock(1.0, 0.0, 0.5, 0.1), PublishReport(1, 0.0, 0.0, 8)
    return step_metrics(ready, shaped, result, clock, published, 8, 0, config.algorithm.kl.coef), learner


def by_row(update: dict[str, Any], column: np.ndarray | None) -> list[np.ndarray]:
    """The drawn tokens of each of the update's rows."""
    batch: TokenBatch = update["batch"]
    assert column is not None
    pieces = np.split(np.asarray(column, dtype=np.float64), batch.offsets[1:-1])
    masks = np.split(batch.action_mask, batch.offsets[1:-1])
    return [pieces[row][masks[row]] for row in update["rows"]]


def mean_by(aggregation: str, per_token: list[np.ndarray]) -> float:
    """As the objective is written down: per completion and then over them, or over all tokens."""
    if aggregation == "token_mean":
        return float(np.concatenate(per_token).mean())
    if aggregation == "sequence_mean":
        return float(np.mean([row.mean() for row in per_token]))
    return float(np.mean([row.sum() / MAX_NEW_TOKENS for row in per_token]))


def surrogate(loss: dict[str, Any], ratio: np.ndarray, now: np.ndarray, advantage: np.ndarray) -> np.ndarray:
    kind, high = loss.get("kind", "clip"), loss.get("clip_high", 0.2)
    if kind == "clip":
        return np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 0.8, 1 + high))
    if kind == "cispo":
        return -np.minimum(ratio, 1 + high) * advantage * now
    if kind == "sapo":
        tau = np.where(advantage > 0, 1.0, 1.05)
        return -advantage * 4 / tau / (1 + np.exp(-tau * (ratio - 1)))
    return -advantage * now


ALGORITHMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rloo": ({"name": "rloo"}, {"ratio": "sequence", "aggregation": "sequence_mean"}),
    "grpo": ({"name": "grpo", "kl": {"coef": 0.1}}, {"aggregation": "sequence_mean"}),
    "dr_grpo": ({"name": "grpo", "scale": "none"}, {"aggregation": "constant"}),
    "dapo": ({"name": "grpo"}, {"aggregation": "token_mean", "clip_high": 0.28}),
    "gspo": ({"name": "grpo"}, {"ratio": "sequence_mean", "aggregation": "sequence_mean"}),
    "cispo": ({"name": "grpo"}, {"kind": "cispo", "clip_high": 0.3, "aggregation": "token_mean"}),
    "sapo": ({"name": "grpo"}, {"kind": "sapo", "aggregation": "sequence_mean"}),
    "reinforce": ({"name": "reinforce"}, {"kind": "reinforce", "aggregation": "token_mean"}),
    "ppo": ({"name": "ppo"}, {"aggregation": "token_mean", "entropy_coef": 0.01}),
}


@pytest.mark.parametrize("updates", [(1, 1), (2, 1), (3, 2)], ids=["one", "epochs", "mini_batches"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_update_metric_is_averaged_as_the_objective_averages(
    name: str, updates: tuple[int, int]
) -> None:
    settings, loss = ALGORITHMS[name]
    epochs, parts = updates
    algorithm = {**settings, "loss": loss, "num_epochs": epochs, "num_mini_batches": parts}
    metrics, learner = run_step(algorithm)
    assert len(learner.updates) == epochs * parts
    rows: dict[str, list[float]] = {}
    for update in learner.updates:
        batch: TokenBatch = update["batch"]
        one_pass = batch.proximal_logprobs is None
        now, advantages = by_row(update, update["now"]), by_row(update, batch.advantages)
        old = now if one_pass else by_row(update, batch.proximal_logprobs)
        moved = [a - b for a, b in zip(now, old, strict=True)]
        level = {
            "token": lambda d: d,
            "sequence": lambda d: np.full(len(d), d.sum()),
            "sequence_mean": lambda d: np.full(len(d), d.mean()),
        }[loss.get("ratio", "token")]
        drift = [level(d) for d in moved]
        ratio = [np.exp(d) for d in drift]
        per_token = [surrogate(loss, *row) for row in zip(ratio, now, advantages, strict=True)]
        clipped = [mean_by(loss["aggregation"], per_token)]
        weigh = "token_mean" if loss["aggregation"] == "constant" else loss["aggregation"]
        add = {
            "loss/policy_avg": clipped[0],
            "val/ratio": mean_by(weigh, ratio),
            "square": mean_by(weigh, [r**2 for r in ratio]),
            "policy/approxkl_avg": mean_by(weigh, [0.5 * d**2 for d in drift]),
            "policy/entropy_avg": mean_by(weigh, by_row(update, update["entropy"])),
            "tokens": float(sum(len(r) for r in ratio)),
        }
        if update["loss"].kl_coef > 0:
            d = [a - b for a, b in zip(now, by_row(update, batch.reference_logprobs), strict=True)]
            add["loss/kl_avg"] = mean_by(loss["aggregation"], [np.exp(-x) - 1 + x for x in d])
        if name == "ppo":
            v, v_old, target = (by_row(update, c) for c in (update["values"], batch.values, batch.returns))
            losses, held_rows = [], []
            for a, b, c in zip(v, v_old, target, strict=True):
                held = b + np.clip(a - b, -0.2, 0.2)
                losses.append(0.5 * np.maximum((a - c) ** 2, (held - c) ** 2))
                held_rows.append((held - c) ** 2 > (a - c) ** 2)
            add["loss/value_avg"] = mean_by("token_mean", losses)
            add["val/clipfrac_avg"] = mean_by("token_mean", held_rows)
        for key, value in add.items():
            rows.setdefault(key, []).append(value)
    share = np.array(rows.pop("tokens")) if loss["aggregation"] == "constant" else np.ones(epochs * parts)
    plain = ("loss/policy_avg", "loss/kl_avg", "loss/value_avg")
    expected = {
        k: float(np.average(v, weights=None if k in plain else share))
        for k, v in rows.items()
        if k != "tokens"
    }
    expected["val/ratio_var"] = expected.pop("square") - expected["val/ratio"] ** 2
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=2e-5, abs=1e-6)
    total = expected["loss/policy_avg"] + 0.1 * expected.get("loss/kl_avg", 0.0) * (name == "grpo")
    if name == "ppo":
        total += 0.1 * expected["loss/value_avg"] - 0.01 * expected["policy/entropy_avg"]
    assert metrics["loss/total_avg"] == pytest.approx(total, rel=2e-5, abs=1e-6)


def test_a_separate_critic_does_not_dilute_the_policys_metrics() -> None:
    algorithm = {"name": "ppo", "critic": {"separate": True}, "num_epochs": 2, "num_mini_batches": 2}
    critic = MovingLearner(seed=8)
    metrics, learner = run_step(algorithm, critic)
    losses, values = [], []
    for update in learner.updates:
        batch = update["batch"]
        moved = np.concatenate(by_row(update, update["now"])) - np.concatenate(
            by_row(update, batch.proximal_logprobs)
        )
        advantage = np.concatenate(by_row(update, batch.advantages))
        losses.append(surrogate({}, np.exp(moved), moved, advantage).mean())
    for update in critic.updates:
        assert isinstance(update["loss"], ValueStep)
        v, old, target = (
            np.concatenate(by_row(update, c))
            for c in (update["values"], update["batch"].values, update["batch"].returns)
        )
        held = old + np.clip(v - old, -0.2, 0.2)
        values.append(0.5 * np.maximum((v - target) ** 2, (held - target) ** 2).mean())
    assert metrics["loss/policy_avg"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert metrics["loss/value_avg"] == pytest.approx(np.mean(values), rel=1e-5)


@pytest.mark.parametrize("unknown", [(), (2, 5)], ids=["all", "two_without_reward"])
def test_the_reward_is_the_score_plus_what_shaping_and_the_divergence_added(unknown: Sequence[int]) -> None:
    shaping = ShapingConfig(missing_eos_penalty=1.5, length_penalty=0.1, normalize="batch", clip=1.0)
    raw = np.random.default_rng(4).normal(size=8)
    raw[list(unknown)] = np.nan
    shaped = shape_scores({"s": raw}, {"s": 1.0}, LENGTHS, [True, False] * 4, MAX_NEW_TOKENS, shaping)
    metrics, _ = run_step({"name": "rloo", "kl": {"coef": 0.3, "place": "reward_sequence"}}, shaped=shaped)
    assert metrics["objective/scores"] == pytest.approx(np.nanmean(raw))
    assert abs(metrics["objective/shaping"] or 0.0) > 0.05
    parts = [value for name, value in metrics.items() if name.startswith("shaping/")]
    assert metrics["objective/shaping"] == pytest.approx(sum(p or 0.0 for p in parts))
    names = ("objective/scores", "objective/shaping", "objective/non_score_reward")
    assert metrics["objective/rlhf_reward"] == pytest.approx(sum(metrics[n] or 0.0 for n in names))


def test_completions_that_were_cut_off_count_neither_in_the_loss_nor_in_its_metrics() -> None:
    loss = {"aggregation": "sequence_mean", "mask_truncated": True}
    metrics, learner = run_step({"name": "grpo", "loss": loss}, truncated=(1, 2))
    (update,) = learner.updates
    kept = [row for row in range(8) if row not in (1, 2)]
    now, advantage = by_row(update, update["now"]), by_row(update, update["batch"].advantages)
    assert metrics["loss/policy_avg"] == pytest.approx(
        np.mean([-advantage[r].mean() for r in kept]), rel=1e-5
    )
    entropy = by_row(update, update["entropy"])
    assert metrics["policy/entropy_avg"] == pytest.approx(
        np.mean([entropy[r].mean() for r in kept]), rel=1e-5
    )
    assert len(now) == 8


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("name", ["rloo", "gspo", "grpo", "dapo"])
def test_at_lag_0_the_engines_experience_is_weighted_where_it_is_asked_for(name: str, epochs: int) -> None:
    settings, loss = ALGORITHMS[name]
    algorithm = {**settings, "loss": loss, "num_epochs": epochs}
    metrics, learner = run_step(algorithm, **{"async": {"importance_cap": 1.25}})
    averages, losses, cut = [], [], []
    for update in learner.updates:
        batch: TokenBatch = update["batch"]
        behaviour, now = by_row(update, batch.behaviour_logprobs), by_row(update, update["now"])
        before = now if batch.proximal_logprobs is None else by_row(update, batch.proximal_logprobs)
        free = [np.exp(a - b) for a, b in zip(before, behaviour, strict=True)]
        weights = [np.minimum(w, 1.25) for w in free]
        level = {"sequence": np.sum, "sequence_mean": np.mean}.get(loss.get("ratio", "token"))
        ratios = []
        for a, b in zip(now, before, strict=True):
            ratios.append(np.exp(a - b) if level is None else np.full(len(a), np.exp(level(a - b))))
        parts = zip(ratios, now, by_row(update, batch.advantages), weights, strict=True)
        losses.append(mean_by(loss["aggregation"], [surrogate(loss, r, n, a) * w for r, n, a, w in parts]))
        averages.append(mean_by(loss["aggregation"], weights))
        cut.append(mean_by(loss["aggregation"], [w > 1.25 for w in free]))
    assert metrics["loss/policy_avg"] == pytest.approx(np.mean(losses), rel=2e-5, abs=1e-6)
    assert metrics["policy/importance_weight_avg"] == pytest.approx(np.mean(averages), rel=1e-5)
    assert metrics["policy/importance_truncated_avg"] == pytest.approx(np.mean(cut), rel=1e-5)
    assert run_step(algorithm)[0]["policy/importance_weight_avg"] is None
