"""What a trainer accepts acts, or is refused before anything starts: arguments beside settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import rl_cluster
from rl_cluster.errors import BadInputError
from rl_cluster.loop.hooks import Wishes
from rl_cluster.trainers.grpo.trainer import lora_section
from tests.trainers.tiny import tiny_model

ROWS = [{"prompt": f"{a}{b}="} for a in range(4) for b in range(4)]
LOCAL: dict[str, Any] = {
    "per_device_train_batch_size": 16,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "backend": "local",
    "progress": "none",
    "settings": {"cluster.cpus_per_worker": 1},
}


def grpo_reward(completions: list[str], **_: Any) -> list[float]:
    return [float(text[:1] == "1") for text in completions]


def grpo(folder: Path, callbacks: list[Any] | None = None, **options: Any) -> Any:
    policy, tokenizer = tiny_model()
    given = {"save_strategy": "no", **LOCAL, "output_dir": str(folder), **options}
    args = rl_cluster.GRPOConfig(num_generations=4, max_completion_length=2, **given)
    eval_rows = ROWS[:2] if args.eval_strategy.value != "no" else None
    return rl_cluster.GRPOTrainer(
        policy, grpo_reward, args, ROWS, eval_rows, tokenizer, callbacks=callbacks or []
    )


def rates(folder: Path) -> list[float]:
    return [json.loads(line)["lr"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("max_steps", "expected"), [(3, 3), (4, 4), (1, 1)])
def test_max_steps_counts_updates_also_where_a_batch_takes_several(
    tmp_path: Path, max_steps: int, expected: int
) -> None:
    seen: list[tuple[int, int]] = []

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append((state.global_step, state.max_steps))

    with grpo(tmp_path / "run", [Steps()], max_steps=max_steps, num_iterations=2) as trainer:
        updates = count_updates(trainer)
        output = trainer.train()
    assert output.global_step == expected
    assert seen[-1] == (expected, expected)
    assert sum(updates) == expected
    # The linear schedule ends with the last update: rate k of n is lr · (1 − k / n), logged after the step.
    last = 1e-2 * (1 - (expected - 1) / expected)
    assert rates(tmp_path / "run")[-1] == pytest.approx(last)


def count_updates(trainer: Any) -> list[int]:
    """One entry per update that the learner makes from now on."""
    learner = trainer._run.open().run.cluster.workers.learner
    made: list[int] = []
    step = learner.optim_step

    async def counted() -> Any:
        made.append(1)
        return await step()

    learner.optim_step = counted
    return made


def test_load_best_model_at_end_without_a_metric_takes_the_least_loss_which_is_minus_the_reward(
    tmp_path: Path,
) -> None:
    policy, tokenizer = tiny_model()
    scores = iter([0.0, 10.0, 5.0, 1.0])

    def reward(texts: list[str]) -> list[float]:
        return [next(scores) if text.startswith("9") else float(text[3:4] == "1") for text in texts]

    config = rl_cluster.RLOOConfig(
        **LOCAL | {"output_dir": str(tmp_path / "run"), "total_episodes": 48},
        rloo_k=4,
        response_length=2,
        num_ppo_epochs=1,
        num_sample_generations=0,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
    )
    trainer = rl_cluster.RLOOTrainer(
        config, tokenizer, policy, None, reward, ROWS, eval_dataset=[{"prompt": "9="}]
    )
    with trainer:
        trainer.train()
    state = trainer.state
    assert (state.best_metric, state.best_global_step) == (-10.0, 1)
    assert state.best_model_checkpoint is not None
    assert state.best_model_checkpoint.endswith("step-1")
    losses = [row["eval_loss"] for row in state.log_history if "eval_loss" in row]
    assert losses == [-0.0, -10.0, -5.0, -1.0]


def test_a_reward_beside_an_environment_is_refused_and_so_is_metadata(tmp_path: Path) -> None:
    policy, tokenizer = tiny_model()
    env = rl_cluster.TextGenerationEnv(tokenizer, ["11="], max_length=2)
    config = rl_cluster.PPOConfig(max_new_tokens=2, output_dir=str(tmp_path / "run"), backend="local")
    both = rl_cluster.PPOTrainer(config, policy, tokenizer, lambda prompts, responses: [0.0])
    with pytest.raises(
        BadInputError, match=r"reward_fn: train\(env\) takes its rewards from the environment"
    ):
        both.train(env)
    with pytest.raises(BadInputError, match="metadata: goes with prompts"):
        rl_cluster.PPOTrainer(config, policy, tokenizer).train(env, metadata=[{"a": 1}])
    assert not (tmp_path / "run").exists()


def test_a_collator_without_a_data_set_is_refused() -> None:
    policy, tokenizer = tiny_model()
    with pytest.raises(BadInputError, match="data_collator: collates the rows of dataset="):
        config = rl_cluster.PPOConfig(max_new_tokens=2)
        rl_cluster.PPOTrainer(config, policy, tokenizer, data_collator=lambda rows: rows)


def test_ppo_takes_hooks_of_the_loop_beside_callbacks_of_transformers(tmp_path: Path) -> None:
    policy, tokenizer = tiny_model()
    seen: list[Any] = []

    class Own:
        def on_begin(self, step: int, last_step: int, folder: Path) -> None: ...

        def on_step(self, step: int, metrics: Any) -> Wishes:
            seen.append(step)
            return Wishes()

        def on_evaluate(self, step: int, metrics: Any) -> Wishes:
            return Wishes()

        def on_save(self, step: int, checkpoint: Path) -> None: ...

        def on_end(self, step: int) -> None: ...

    class Theirs(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append("update")

    config = rl_cluster.PPOConfig(
        batch_size=2,
        mini_batch_size=2,
        ppo_epochs=1,
        max_new_tokens=2,
        save_every=0,
        backend="local",
        progress="none",
        output_dir=str(tmp_path / "run"),
        settings={"cluster.cpus_per_worker": 1},
    )
    reward = lambda prompts, responses: [0.0] * len(prompts)  # noqa: E731
    with rl_cluster.PPOTrainer(config, policy, tokenizer, reward, callbacks=[Own(), Theirs]) as trainer:
        trainer.train(["1=", "2="], 1)
    assert seen == [1, "update"]


def test_a_reward_model_has_the_deadline_that_was_given(tmp_path: Path) -> None:
    from transformers import Qwen2ForSequenceClassification

    policy, tokenizer = tiny_model()
    settings = policy.config.to_dict() | {"num_labels": 1}
    torch.manual_seed(0)
    classifier = Qwen2ForSequenceClassification(type(policy.config)(**settings))
    config = rl_cluster.PPOConfig(
        batch_size=2,
        mini_batch_size=2,
        ppo_epochs=1,
        max_new_tokens=2,
        save_every=0,
        backend="local",
        progress="none",
        reward_timeout_seconds=77.0,
        output_dir=str(tmp_path / "run"),
        settings={"cluster.cpus_per_worker": 1},
    )
    with rl_cluster.PPOTrainer(config, policy, tokenizer, classifier) as trainer:
        trainer.train(["1=", "2="], 1)
        session = trainer._run.session
        assert session is not None
        assert session.config.rewards.scorers[0].timeout_seconds == 77.0


@pytest.mark.parametrize("kind", ["ORPO", "SFT", "Reward"])
def test_a_reference_for_an_objective_without_one_is_refused(kind: str) -> None:
    policy, tokenizer = tiny_model()
    config = getattr(rl_cluster, f"{kind}Config")()
    with pytest.raises(BadInputError, match=f"{kind}Trainer.ref_model: this objective compares with no"):
        getattr(rl_cluster, f"{kind}Trainer")(config, policy, tokenizer, ref_model=policy)


def test_a_reference_must_be_a_model_for_kto_too() -> None:
    policy, tokenizer = tiny_model()
    with pytest.raises(BadInputError, match=r"KTOTrainer\.ref_model is int 3"):
        rl_cluster.KTOTrainer(rl_cluster.KTOConfig(), policy, tokenizer, ref_model=3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers_to_transform", [0]),
        ("rank_pattern", {"q_proj": 2}),
        ("init_lora_weights", "gaussian"),
        ("exclude_modules", ["v_proj"]),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("lora_bias", True),
    ],
)
def test_a_lora_setting_that_the_learner_has_not_is_refused(field: str, value: Any) -> None:
    from peft import LoraConfig

    with pytest.raises(BadInputError, match=rf"peft_config\.{field}="):
        lora_section(LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], **{field: value}))
    plain = lora_section(LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert plain == {"rank": 2, "alpha": 4.0, "dropout": 0.0, "targets": ["q_proj"]}
