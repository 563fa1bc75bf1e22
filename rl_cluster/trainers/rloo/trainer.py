"""RLOOTrainer, in the form of TRL's: objects and an RLOOConfig in, a trained policy out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_cluster.data.handed_over import read_prompts
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.callbacks import CallbackHooks
from rl_cluster.trainers.given import (
    check_collator,
    check_no_optimizers,
    checked_policy,
    checked_tokenizer,
    prompt_room,
)
from rl_cluster.trainers.online_run import OnlineRun, Parts, with_backend
from rl_cluster.trainers.online_trainer import OnlineTrainer
from rl_cluster.trainers.rewards_given import reward_source
from rl_cluster.trainers.rloo.config import RLOOConfig
from rl_cluster.trainers.rloo.run_config import Data, batches_of, check_rloo_config, fill_in, rloo_run_config
from rl_cluster.trajectory import Prompt


class RLOOTrainer(OnlineTrainer):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024), a front of rl_cluster's training loop.

    policy, ref_policy: transformers causal language models, or folders or hub names; policy None:
    config.sft_model_path; ref_policy None: the policy as it starts. reward_model: a model for sequence
    classification, a RewardModel, a path, or f(list of prompt + completion) -> list of numbers; None:
    config.reward_model_path. train_dataset, eval_dataset: rows with `input_ids`, or with `prompt` (text or
    chat messages). Everything is checked here; workers start with the first train or evaluate and stay until
    close(), or until the trainer is gone. Evaluations are greedy. Raises BadInputError.
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
        policy = checked_policy("policy", policy)
        if ref_policy is not None and ref_policy is not policy:
            ref_policy = checked_policy("ref_policy", ref_policy)
        check_no_optimizers(optimizers)
        check_collator(data_collator)
        tokenizer = checked_tokenizer("processing_class", processing_class, policy)
        room = prompt_room(policy, "response_length", config.response_length)
        train = read_prompts(train_dataset, tokenizer, "train_dataset", room)
        held_out: tuple[Prompt, ...] = ()
        if eval_dataset is not None:
            held_out = read_prompts(eval_dataset, tokenizer, "eval_dataset", room)
        elif config.eval_strategy.value != "no":
            raise BadInputError(f"eval_strategy={config.eval_strategy.value!r}: needs an eval_dataset.")
        asked = config.reward_model_path if reward_model is None else reward_model
        reward = reward_source(asked, tokenizer, "reward_model", plain_texts((*train, *held_out), tokenizer))
        batches = batches_of(config, len(train))
        fill_in(config, batches)
        longest = max(len(prompt.tokens) for prompt in (*train, *held_out))
        data = Data(len(train), len(held_out), longest, [reward.section()], tokenizer.eos_token_id)
        run_config = rloo_run_config(config, data, batches)
        hooks = CallbackHooks(
            config,
            callbacks or (),
            steps_per_epoch=len(train) * config.rloo_k / batches.batch_size,
            model=policy,
            processing_class=tokenizer,
        )
        reference = None if ref_policy is policy else ref_policy
        run = OnlineRun(
            with_backend(run_config, config.backend, config.cluster, config.settings, policy),
            Parts(policy, reference, tokenizer, train, held_out, (reward,)),
            hooks,
            evaluates=config.eval_strategy.value != "no",
            address=config.cluster,
            overwrite=config.overwrite_output_dir,
        )
        super().__init__(config, run, hooks, room)

    @property
    def policy(self) -> Any:
        """TRL's name of `model`."""
        return self.model


def plain_texts(prompts: Sequence[Prompt], tokenizer: Any) -> dict[str, str]:
    """Prompt text -> the same without special tokens, as TRL hands it to reward functions."""
    return {
        prompt.text: tokenizer.decode(prompt.tokens.tolist(), skip_special_tokens=True) for prompt in prompts
    }
