"""PPOTrainer on the real stack, once: what the in-process tests show holds with Ray, vLLM and DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_cluster.config.run import ScratchModel
from rl_cluster.modeling.scratch import build_model, build_tokenizer
from rl_cluster.trainers.ppo.config import PPOConfig
from rl_cluster.trainers.ppo.trainer import PPOTrainer

SMALL = ScratchModel(
    alphabet="0123=", hidden_size=64, num_layers=1, num_heads=2, intermediate_size=64, max_positions=64
)


@pytest.mark.usefixtures("ray_session")
def test_train_generate_and_step_on_a_cluster_end_in_the_model_object(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(SMALL.alphabet, 64)
    model: Any = build_model(SMALL, len(tokenizer), 0)
    config = PPOConfig(
        learning_rate=1e-2,
        batch_size=4,
        ppo_epochs=1,
        max_new_tokens=3,
        max_prompt_length=16,
        temperature=1.0,
        save_every=0,
        device="cpu",
        backend="ray",
        progress="none",
        output_dir=str(tmp_path / "run"),
        kl_penalty="full",
        settings={"rollout.kv_cache_gib": 0.1, "cluster.cpus_per_worker": 1},
    )
    queries = [torch.tensor(tokenizer(text)["input_ids"]) for text in ("12=", "3=")]
    with PPOTrainer(config, model, tokenizer, lambda texts: [float(len(t)) for t in texts]) as trainer:
        history = trainer.train(["1=", "2=", "10="], num_iterations=1)
        assert history["rewards"][0] is not None and history["rewards"][0] >= 2.0
        responses = trainer.generate(queries)
        before = model.lm_head.weight.clone()
        stats = trainer.step(queries, responses, [1.0, -1.0])
        assert stats["objective/kl"] > 0.0  # type: ignore[operator]
        assert stats["ppo/mean_scores"] == 0.0 and stats["health/logprob_gap_max"] < 1e-2  # type: ignore[operator]
        assert not torch.equal(model.lm_head.weight, before)
        # The engine answers greedily as the model object that has got the trained weights.
        greedy = trainer.generate(queries[0], do_sample=False, max_new_tokens=1)
        with torch.no_grad():
            assert greedy.tolist() == [model(queries[0][None]).logits[0, -1].argmax().item()]  # type: ignore[union-attr]
