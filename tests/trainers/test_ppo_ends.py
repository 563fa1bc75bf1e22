"""What counts as a proper end: every end token of the model, the run's stop tokens and stop strings."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.episode import play
from rl_cluster.assembly.local import eos_token_ids
from rl_cluster.assembly.local_rollout import LocalGenerator
from rl_cluster.modeling.end_tokens import end_token_ids
from rl_cluster.modeling.load import load_policy
from rl_cluster.modeling.scratch import build_model, build_tokenizer
from rl_cluster.trainers.ppo.trainer import PPOTrainer
from rl_cluster.trajectory import Prompt, SamplingSpec
from tests.trainers.test_ppo_trainer import ALPHABET, SMALL, echo, settings

EOS, ZERO, ONE, TWO, THREE = 1, 3, 4, 5, 6


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(ALPHABET, 32)


def model_of(tokenizer: Any, ends: Any) -> Any:
    model = build_model(SMALL, len(tokenizer), 0)
    model.generation_config.eos_token_id = ends
    return model


ENDS = {
    "generation_config": ([EOS, TWO], {}, [[ONE, EOS], [ONE, TWO], [TWO], [ONE, ONE]]),
    "stop_token": (EOS, {"rollout.stop_token_ids": [TWO]}, [[ONE, EOS], [ONE, TWO], [TWO], [ONE, ONE]]),
    "stop_string": (EOS, {"rollout.stop": ["10"]}, [[ONE, EOS], [ONE, ZERO], [EOS], [ONE, ONE]]),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_step_penalises_only_the_responses_that_did_not_end(
    case: str, tokenizer: Any, tmp_path: Path
) -> None:
    ends, extra, responses = ENDS[case]
    config = settings(
        tmp_path / "run",
        batch_size=4,
        mini_batch_size=4,
        ppo_epochs=1,
        missing_eos_penalty=3.0,
        settings={"cluster.cpus_per_worker": 1, **extra},
    )
    query = torch.tensor(tokenizer("12=")["input_ids"])
    with PPOTrainer(config, model_of(tokenizer, ends), tokenizer, echo) as trainer:
        stats = trainer.step([query] * 4, [torch.tensor(r) for r in responses], [1.0, 1.0, 1.0, 1.0])
    assert stats["val/num_eos_tokens"] == 3
    assert stats["completions/truncated_fraction"] == 0.25
    assert stats["shaping/missing_eos"] == pytest.approx(-0.75)


def test_a_config_and_a_generation_config_may_name_different_end_tokens(
    tokenizer: Any, tmp_path: Path
) -> None:
    model = model_of(tokenizer, [EOS, TWO])
    model.config.eos_token_id = [EOS, THREE]
    model.save_pretrained(tmp_path / "both")
    assert end_token_ids(str(tmp_path / "both"), tokenizer) == {EOS, TWO, THREE}
    (tmp_path / "both" / "generation_config.json").unlink()
    assert end_token_ids(str(tmp_path / "both"), tokenizer) == {EOS, THREE}


@pytest.mark.parametrize(
    ("ends", "sampling", "proper"),
    [
        ([EOS, ZERO, ONE, TWO, THREE, 7, 2, 0], {}, True),
        (EOS, {"stop_token_ids": (0, 2, ZERO, ONE, TWO, THREE, 7)}, True),
        (EOS, {"stop": ("0", "1", "2", "3", "=")}, True),
        (EOS, {"max_new_tokens": 1}, False),
    ],
    ids=["end_tokens", "stop_tokens", "stop_strings", "cut_off"],
)
def test_a_drawn_response_that_stopped_has_ended(
    ends: Any, sampling: dict[str, Any], proper: bool, tokenizer: Any, tmp_path: Path
) -> None:
    model_of(tokenizer, ends).save_pretrained(tmp_path / "model")
    policy = load_policy(str(tmp_path / "model"), dtype="float32")
    own = eos_token_ids(policy, tokenizer)
    generator = LocalGenerator(policy, tokenizer, own, 8)
    spec = SamplingSpec(**{"temperature": 1.0, "max_new_tokens": 12, **sampling})
    prompt = Prompt("p", np.array(tokenizer("12=")["input_ids"], dtype=np.int32), "12=")

    async def draw() -> list[Any]:
        return [await play(generator, tokenizer, own, prompt, seed, spec) for seed in range(6)]

    drawn = [t for t in asyncio.run(draw()) if t.tokens[-1] not in (EOS, 0, 2)]
    generator.close()
    assert drawn
    assert {t.ended_with_eos for t in drawn} == {proper}
