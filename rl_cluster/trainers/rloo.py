"""RLOOTrainer, in the form of TRL's: objects and an RLOOConfig in, a trained policy out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.trainer_utils import TrainOutput

from rl_cluster.errors import BadInputError
from rl_cluster.trainers.callbacks import CallbackHooks
from rl_cluster.trainers.card import trainer_card
from rl_cluster.trainers.datasets import read_prompts
from rl_cluster.trainers.online_run import (
    OnlineRun,
    Parts,
    backend_of,
    check_policy,
    check_tokenizer,
    max_positions,
)
from rl_cluster.trainers.rewards_given import reward_source
from rl_cluster.trainers.rloo_config import RLOOConfig
from rl_cluster.trainers.rloo_run_config import Data, batches_of, check_rloo_config, fill_in, rloo_run_config
from rl_cluster.trajectory import Prompt


class RLOOTrainer:
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024), a front of rl_cluster's training loop.

    policy, ref_policy: transformers causal language models, or folders or hub names; policy None:
    config.sft_model_path; ref_policy None: the policy as it starts. reward_model: a model for sequence
    classification, a RewardModel, a path, or f(list of prompt + completion) -> list of numbers; None:
    config.reward_model_path. train_dataset, eval_dataset: rows with `input_ids`, or with `prompt` (text or
    chat messages). Everything is checked here; workers start with the first train or evaluate and stay until
    close(), or until the trainer is gone. Raises BadInputError.
    """

    def __init__(
        self,
        config: RLOOConfig,
        processing_class: Any = None,
        policy: Any = None,
        ref_policy: Any = None,
        reward_model: Any = None,
        train_dataset: Any = None,
        data_collator: Any = None,
        eval_dataset: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        callbacks: Sequence[Any] | None = None,
    ) -> None:
        check_rloo_config(config)
        policy = config.sft_model_path if policy is None else policy
        check_policy(policy, "policy")
        if ref_policy is not None and ref_policy is not policy:
            check_policy(ref_policy, "ref_policy")
        check_no_optimizers(optimizers)
        check_collator(data_collator)
        tokenizer = check_tokenizer(processing_class, policy)
        room = _room(policy, config.response_length)
        train = read_prompts(train_dataset, tokenizer, "train_dataset", room)
        held_out: tuple[Prompt, ...] = ()
        if eval_dataset is not None:
            held_out = read_prompts(eval_dataset, tokenizer, "eval_dataset", room)
        elif config.eval_strategy.value != "no":
            raise BadInputError(f"eval_strategy={config.eval_strategy.value!r}: needs an eval_dataset.")
        plain = plain_texts((*train, *held_out), tokenizer)
        asked = config.reward_model_path if reward_model is None else reward_model
        reward = reward_source(asked, tokenizer, "reward_model", plain)
        batches = batches_of(config, len(train))
        fill_in(config, batches)
        longest = max(len(prompt.tokens) for prompt in (*train, *held_out))
        data = Data(len(train), len(held_out), longest, [reward.section()], tokenizer.eos_token_id)
        run_config = rloo_run_config(config, data, batches)
        if "cluster.backend" not in str(config.settings):
            backend = backend_of(config.backend, config.cluster, policy)
            section = run_config.cluster.model_copy(update={"backend": backend})
            run_config = run_config.model_copy(update={"cluster": section})
        self.args = config
        self.processing_class = tokenizer
        self.eval_prompts = held_out
        self._hooks = CallbackHooks(
            config,
            callbacks or (),
            steps_per_epoch=len(train) * config.rloo_k / batches.batch_size,
            model=policy,
            processing_class=tokenizer,
        )
        self._run = OnlineRun(
            run_config,
            Parts(
                policy, None if ref_policy is policy else ref_policy, tokenizer, train, held_out, (reward,)
            ),
            self._hooks,
            evaluates=config.eval_strategy.value != "no",
            address=config.cluster,
            overwrite=config.overwrite_output_dir,
        )

    @property
    def model(self) -> Any:
        """The policy; after train() with the trained weights."""
        return self._run.model

    policy = model

    @property
    def state(self) -> Any:
        """transformers' TrainerState: global_step, log_history, best_metric …"""
        return self._hooks.state

    @property
    def config(self) -> Any:
        """The RunConfig that all this became."""
        return self._run.config

    def add_callback(self, callback: Any) -> None:
        self._hooks.add(callback)

    def train(self) -> TrainOutput:
        """All updates; then the policy object holds the trained weights. metrics: of the last step."""
        last_eval = self._run.train()
        return train_output(self._run.rows(), self.state.global_step, last_eval)

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Greedy completions of the evaluation prompts, scored; names as in state.log_history."""
        prompts = self.eval_prompts
        if eval_dataset is not None:
            room = _room(self._run.parts.policy, self.args.response_length)
            prompts = read_prompts(eval_dataset, self.processing_class, "eval_dataset", room)
        if not prompts:
            raise BadInputError("evaluate: the trainer has no eval_dataset. Give one.")
        metrics = self._run.evaluate(prompts)
        self._hooks.on_evaluate(self.state.global_step, metrics)
        return {name: value for name, value in self._hooks.evaluations[-1].items() if name != "step"}

    def save_model(self, output_dir: str | None = None) -> None:
        """Weights, tokenizer and card, as from_pretrained reads them; default: args.output_dir."""
        self._run.save_model(Path(output_dir or self.args.output_dir).expanduser())

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: Any = None
    ) -> None:
        """README.md in args.output_dir, after train(): the card tells of a run."""
        if not self._run.trained:
            raise BadInputError("create_model_card: there is no run to tell of yet. Call train() first.")
        trainer_card(self._run.config, self._run.folder, self._run.rows(), model_name, dataset_name, tags)

    def close(self) -> None:
        """End the workers; files and model stay."""
        self._run.close()

    def __enter__(self) -> RLOOTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def train_output(rows: Sequence[dict[str, Any]], step: int, last_eval: Any) -> TrainOutput:
    """training_loss: mean of loss/policy_avg over the steps. metrics: the last step's and evaluation's."""
    losses = [row["loss/policy_avg"] for row in rows if row.get("loss/policy_avg") is not None]
    last = {name: value for name, value in (rows[-1] if rows else {}).items() if value is not None}
    mean = sum(losses) / len(losses) if losses else 0.0
    return TrainOutput(step, mean, {**last, **{k: v for k, v in last_eval.items() if v is not None}})


def plain_texts(prompts: Sequence[Prompt], tokenizer: Any) -> dict[str, str]:
    """Prompt text -> the same without special tokens, as TRL hands it to reward functions."""
    return {
        prompt.text: tokenizer.decode(prompt.tokens.tolist(), skip_special_tokens=True) for prompt in prompts
    }


def check_no_optimizers(optimizers: Any) -> None:
    """BadInputError for an optimizer object: the optimizer lives in the learner."""
    if optimizers is not None and any(entry is not None for entry in optimizers):
        raise BadInputError(
            "optimizers: the optimizer lives with the learner, where an object of yours has no parameters. "
            "Use learning_rate, weight_decay, adam_beta1, adam_beta2, adam_epsilon, lr_scheduler_type and "
            "warmup_steps."
        )


def check_collator(collator: Any) -> None:
    """Padding is harmless and needless; anything else would be left out, so it is refused."""
    if collator is not None and type(collator).__name__ != "DataCollatorWithPadding":
        raise BadInputError(
            f"data_collator={type(collator).__name__}: rows are not collated here. Prepare them in "
            "train_dataset."
        )


def _room(model: Any, response_length: int) -> int | None:
    positions = max_positions(model)
    if positions is not None and positions <= response_length:
        raise BadInputError(
            f"response_length={response_length}: the model has {positions} positions, which leaves none for "
            "a prompt. Lower it."
        )
    return None if positions is None else positions - response_length
