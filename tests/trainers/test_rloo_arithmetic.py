"""A trained RLOO step, recomputed from its trajectories by the documented formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from rl_cluster.trainers.rloo.config import RLOOConfig
from rl_cluster.trainers.rloo.trainer import RLOOTrainer
from tests.trainers.tiny import tiny_model

ROWS = [{"prompt": f"{a}{b}="} for a in range(2) for b in range(2)]
K, BETA, EOS = 4, 0.2, 1


def reward(texts: list[str]) -> list[float]:
    return [float(sum(map(ord, text))) % 7.0 for text in texts]


def trained_rows(tmp_path: Path, **options: Any) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The trajectories of one step against another reference, and its metrics."""
    policy, tokenizer = tiny_model(0)
    reference, _ = tiny_model(1)
    config = RLOOConfig(
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=16,
        rloo_k=K,
        max_steps=1,
        response_length=6,
        num_ppo_epochs=1,
        kl_coef=BETA,
        temperature=1.0,
        report_to="none",
        use_cpu=True,
        backend="local",
        progress="none",
        save_strategy="no",
        settings={"cluster.cpus_per_worker": 1, "log.trajectories": True},
        **options,
    )
    with RLOOTrainer(config, tokenizer, policy, reference, reward, ROWS) as trainer:
        trainer.train()
        metrics = trainer.state.log_history[-1]
    (path,) = (tmp_path / "run" / "trajectories").iterdir()
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert len(rows) == 16
    return rows, metrics


def of_actions(row: dict[str, Any], column: str) -> np.ndarray:
    return np.array(row[column], dtype=np.float64)[np.array(row["action_mask"])]


def kl_of(row: dict[str, Any]) -> np.ndarray:
    return of_actions(row, "behaviour_logprobs") - of_actions(row, "reference_logprobs")


def minus_the_others(values: np.ndarray) -> np.ndarray:
    """[groups × K] -> each minus the mean of the other K − 1 of its group."""
    table = values.reshape(-1, K)
    return (table - (table.sum(axis=1, keepdims=True) - table) / (K - 1)).ravel()


def test_penalty_normalisation_clip_sequence_kl_and_normalised_advantages(tmp_path: Path) -> None:
    rows, metrics = trained_rows(
        tmp_path,
        missing_eos_penalty=2.0,
        normalize_reward=True,
        reward_clip_range=1.0,
        normalize_advantage=True,
    )
    raw = np.array(reward([row["prompt"] + row["response"] for row in rows]))
    ended = np.array([row["tokens"][-1] == EOS for row in rows])
    penalised = raw - 2.0 * ~ended
    scores = np.clip((penalised - penalised.mean()) / (penalised.std(ddof=1) + 1e-8), -1.0, 1.0)
    assert 0 < (np.abs(scores) == 1.0).sum() < 16, "the clip acts on some"
    np.testing.assert_allclose([row["score"] for row in rows], scores, atol=1e-6)
    kl = np.array([kl_of(row).sum() for row in rows])
    rlhf = scores - BETA * kl
    advantages = minus_the_others(rlhf)
    advantages = (advantages - advantages.mean()) / np.sqrt(advantages.var(ddof=1) + 1e-8)
    for row, advantage in zip(rows, advantages, strict=True):
        np.testing.assert_allclose(of_actions(row, "advantages"), advantage, atol=1e-4)
    expected = {
        "objective/scores": raw.mean(),
        "objective/kl": kl.mean(),
        "objective/non_score_reward": (-BETA * kl).mean(),
        "objective/rlhf_reward": rlhf.mean(),
        "objective/entropy": np.mean([-of_actions(row, "behaviour_logprobs").sum() for row in rows]),
        "val/num_eos_tokens": ended.sum(),
        "val/ratio": 1.0,
        "val/ratio_var": 0.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-4)


def test_token_level_kl_charges_every_token_for_what_follows_it(tmp_path: Path) -> None:
    rows, _ = trained_rows(tmp_path, token_level_kl=True)
    scores = np.array(reward([row["prompt"] + row["response"] for row in rows]))
    longest = max(len(kl_of(row)) for row in rows)
    to_go = np.repeat(scores[:, None], longest, axis=1)
    for number, row in enumerate(rows):
        kl = kl_of(row)
        to_go[number, : len(kl)] -= BETA * kl[::-1].cumsum()[::-1]
    advantages = np.stack([minus_the_others(to_go[:, t]) for t in range(longest)], axis=1)
    lengths = [len(kl_of(row)) for row in rows]
    assert any(np.ptp(advantages[n, :length]) > 1e-3 for n, length in enumerate(lengths) if length > 1), (
        "advantages differ within a completion"
    )
    for number, row in enumerate(rows):
        np.testing.assert_allclose(
            of_actions(row, "advantages"), advantages[number, : lengths[number]], atol=1e-4
        )
