"""The code blocks of docs/ppo.md, and those on PPO of the documents that the API comes from, run as written.

Only the models are small ones, substituted by name, and the run folders are under a temporary one.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rl_cluster.modeling.scratch import build_model
from rl_cluster.trainers.ppo import run as ppo_run
from tests.seed_documents.stage import SCRATCH, save_models
from tests.seed_documents.substitutions import MODELS

PAGE = Path(__file__).parents[2] / "docs" / "ppo.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


@pytest.fixture
def names(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a block may use without saying where from; `model_name`s mean small models alike."""
    monkeypatch.chdir(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / "lm")
    source = ppo_run.UserModel
    monkeypatch.setattr(
        ppo_run,
        "UserModel",
        lambda given, field: source(str(models / MODELS[given]) if isinstance(given, str) else given, field),
    )
    make = ppo_run.ppo_run_config
    quiet = {"cluster.cpus_per_worker": 1, "log.progress": "none"}

    def make_quiet(config: Any, place: Any) -> Any:
        return make(dataclasses.replace(config, settings={**config.settings, **quiet}), place)

    monkeypatch.setattr(ppo_run, "ppo_run_config", make_quiet)
    torch.manual_seed(0)
    return {"tokenizer": tokenizer, "model": build_model(SCRATCH, len(tokenizer), 0)}


def run(block: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(block, "block", "exec"), names)
    return names


def test_every_block_of_the_page_runs(names: dict[str, Any]) -> None:
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == 3
    for block in blocks:
        run(block, names)
    assert (Path("trained") / "model.safetensors").is_file()
    assert "ppo/loss/policy" in names["stats"]


GUIDE = """
from rl_cluster import PPOConfig, PPOTrainer
config = PPOConfig(
    model_name="google/gemma-2-2b",
    learning_rate=1e-5,
    batch_size=16,
    mini_batch_size=4,
    gradient_accumulation_steps=1,

    # PPO hyperparameters
    ppo_epochs=4,
    gamma=0.99,           # Discount factor
    lam=0.95,             # GAE lambda
    clip_ratio=0.2,       # PPO clip ratio
    value_clip=0.2,       # Value function clip
    max_grad_norm=1.0,    # Gradient clipping

    # KL penalty
    kl_penalty_coef=0.01,
    kl_target=0.01,
    kl_horizon=10000,     # Horizon for adaptive KL

    # Coefficients
    entropy_coef=0.01,    # Entropy regularization
    value_coef=0.5,       # Value function coefficient

    # Generation
    max_new_tokens=128,
    temperature=0.7,
    top_p=0.9,

    # Training loop
    num_iterations=100,
    save_every=10,
    eval_every=5,
    device=None,          # Auto-detected
)

# Initialize trainer with custom reward function
def my_reward_fn(prompts, responses, metadata=None):
    rewards = []
    for response in responses:
        score = evaluate_response(response)
        rewards.append(score)
    return rewards

trainer = PPOTrainer(
    config=config,
    tokenizer=tokenizer,  # Optional, loaded from model if not provided
    reward_fn=my_reward_fn,
)

# Train on prompts
prompts = ["Write a poem about...", "Explain quantum..."]
metrics = trainer.train(prompts, num_iterations=100)
"""

README = """
from rl_cluster import PPOTrainer, PPOConfig
from rl_cluster.environments import TextGenerationEnv

# Setup
config = PPOConfig(learning_rate=1e-5)
env = TextGenerationEnv(tokenizer, prompts, reward_fn=custom_reward)

# Train
trainer = PPOTrainer(config, model, tokenizer)
trainer.train(env)
"""

BLOG = """
from rl_cluster import PPOConfig, PPOTrainer
# 1. 配置 PPO 参数
config = PPOConfig(
    model_name="gpt2",
    learning_rate=1.41e-5,
    batch_size=256,
    kl_penalty="kl",
    adap_kl_ctrl=True
)
ppo_trainer = PPOTrainer(
    config=config,
    model=model,
    ref_model=model_ref,
    tokenizer=tokenizer,
    dataset=dataset
)
for epoch in range(config.epochs):
    for batch in ppo_trainer.dataloader:
        # 1. 获取一批 prompt
        query_tensors = batch["input_ids"]
        # 2. 生成 (Rollout)
        response_tensors = ppo_trainer.generate(query_tensors, **generation_kwargs)
        batch["response"] = tokenizer.batch_decode(response_tensors)
        # 3. 评估 (Evaluation)
        texts_for_reward = [q + r for q, r in zip(batch["query"], batch["response"])]
        rewards = torch.tensor([get_reward(text) for text in texts_for_reward])
        # 4. 更新 (Optimization)
        stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
        # 打印统计信息
        ppo_trainer.log_stats(stats, batch, rewards)
"""


def shorter(block: str, **numbers: int) -> str:
    """The same block with smaller numbers, so that it ends within seconds."""
    for name, value in numbers.items():
        block, count = re.subn(rf"{name}=\d+", f"{name}={value}", block)
        assert count
    return block


def test_the_guides_example_runs(names: dict[str, Any]) -> None:
    names["evaluate_response"] = len
    block = shorter(GUIDE, num_iterations=2, max_new_tokens=8, ppo_epochs=1)
    with run(block, names)["trainer"]:
        assert len(names["metrics"]["rewards"]) == 2
        assert set(names["metrics"]) >= {"policy_loss", "value_loss", "kl_divergence", "entropy", "kl_coef"}


def test_the_readmes_example_with_an_environment_runs(names: dict[str, Any]) -> None:
    names["prompts"] = ["Write a poem about", "Explain quantum"]
    names["custom_reward"] = lambda prompt, generated, full_text: float(len(generated))
    block = README.replace("learning_rate=1e-5", "learning_rate=1e-5, num_iterations=1, max_new_tokens=8")
    block = block.replace("reward_fn=custom_reward", "reward_fn=custom_reward, max_length=8")
    run(block, names)["trainer"].close()


def test_the_blogs_loop_runs(names: dict[str, Any]) -> None:
    names["torch"] = torch
    names["model_ref"] = build_model(SCRATCH, len(names["tokenizer"]), 0)
    names["dataset"] = [{"query": f"Tell me about {i}"} for i in range(16)]
    names["generation_kwargs"] = {
        "min_length": -1,
        "top_k": 0.0,
        "top_p": 1.0,
        "do_sample": True,
        "pad_token_id": names["tokenizer"].eos_token_id,
        "max_new_tokens": 4,
    }
    names["get_reward"] = lambda text: float(text.count("e"))
    with run(shorter(BLOG, batch_size=16), names)["ppo_trainer"]:
        assert names["stats"]["objective/kl_coef"] == 0.2
        assert names["ppo_trainer"].kl_coef != 0.2  # adaptive
