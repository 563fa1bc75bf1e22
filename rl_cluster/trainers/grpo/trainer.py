"""GRPOTrainer, in the form of TRL's: a model, reward functions and a GRPOConfig in, a trained policy out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rl_cluster.data.handed_over import Rows, read_prompts, read_rows
from rl_cluster.environments.playing.case_environment import (
    case_reward_function,
    check_case_environment,
    environment_tools,
    read_cases,
)
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.callbacks import CallbackHooks
from rl_cluster.trainers.given import (
    check_no_optimizers,
    checked_policy,
    checked_tokenizer,
    prompt_room,
)
from rl_cluster.trainers.grpo.config import GRPOConfig
from rl_cluster.trainers.grpo.lora import lora_section as lora_section
from rl_cluster.trainers.grpo.rewards import grpo_rewards
from rl_cluster.trainers.grpo.run_config import (
    Data,
    check_grpo_config,
    counts_of,
    generation_of,
    grpo_run_config,
)
from rl_cluster.trainers.online_run import OnlineRun, Parts, with_backend
from rl_cluster.trainers.online_trainer import OnlineTrainer
from rl_cluster.trajectory import Prompt


class GRPOTrainer(OnlineTrainer):
    """Group relative policy optimisation (Shao et al. 2024) and its kin, a front of rl_cluster's loop.

    model: a transformers causal language model, or the folder or hub name of one. reward_funcs: one or a
    list of functions f(prompts=, completions=, **columns) -> list of numbers or None, models for sequence
    classification, RewardModels, and paths of models. train_dataset, eval_dataset: rows with `prompt` (text
    or chat messages); the other columns reach the functions. env: an object with build_dataset(tokenizer) and
    score_episode(model, tokenizer, completion, case_idx), in place of train_dataset and, if need be,
    reward_funcs. peft_config: a LoraConfig. Everything is checked here; workers start with the first train or
    evaluate and stay until close(), or until the trainer is gone. Raises BadInputError.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        env: Any = None,
    ) -> None:
        args = GRPOConfig() if args is None else args
        check_grpo_config(args)
        model = checked_policy("model", model)
        check_no_optimizers(optimizers)
        tokenizer = checked_tokenizer("processing_class", processing_class, model)
        lora = None if peft_config is None else lora_section(peft_config)
        train_dataset, rewards = _with_environment(env, train_dataset, reward_funcs, tokenizer, model)
        room = _room(model, args)
        tools = [] if env is None else environment_tools(env)
        train_dataset = read_rows(train_dataset, "train_dataset")
        train = read_prompts(train_dataset, tokenizer, "train_dataset", room, tools)
        held_out: tuple[Prompt, ...] = ()
        if eval_dataset is not None:
            eval_dataset = read_rows(eval_dataset, "eval_dataset")
            held_out = read_prompts(eval_dataset, tokenizer, "eval_dataset", room, tools)
        elif args.eval_strategy.value != "no":
            raise BadInputError(f"eval_strategy={args.eval_strategy.value!r}: needs an eval_dataset.")
        chats = _chats(train, train_dataset) | _chats(held_out, eval_dataset)
        columns = sorted({name for prompt in (*train, *held_out) for name in prompt.metadata})
        sources, calls = grpo_rewards(
            rewards, args.reward_weights, tokenizer, reward_processing_classes, chats, columns
        )
        if env is not None:
            sources = (replace(sources[0], is_environment=True), *sources[1:])
        generation = generation_of(args)
        counts = counts_of(args, len(train), generation)
        longest = max(len(prompt.tokens) for prompt in (*train, *held_out))
        data = Data(len(train), len(held_out), longest, [source.section() for source in sources], lora)
        run_config = grpo_run_config(args, data, generation, counts)
        hooks = CallbackHooks(
            args,
            callbacks or (),
            steps_per_epoch=counts.steps_per_epoch,
            updates_per_step=counts.updates_per_step,
            max_updates=counts.max_updates,
            model=model,
            processing_class=tokenizer,
        )
        for call in calls:
            call.state = hooks.state
        backend = "ray" if args.use_vllm and args.backend == "auto" else args.backend
        run = OnlineRun(
            with_backend(run_config, backend, args.cluster, args.settings, model),
            Parts(model, None, tokenizer, train, held_out, sources),
            hooks,
            evaluates=args.eval_strategy.value != "no",
            address=args.cluster,
            overwrite=args.overwrite_output_dir,
        )
        super().__init__(args, run, hooks, room)
        self._chats, self._tools = chats, tools

    def _read_eval(self, dataset: Any) -> tuple[Prompt, ...]:
        dataset = read_rows(dataset, "eval_dataset")
        prompts = read_prompts(dataset, self.processing_class, "eval_dataset", self._room, self._tools)
        self._chats.update(_chats(prompts, dataset))
        return prompts


def _with_environment(
    env: Any, train_dataset: Any, reward_funcs: Any, tokenizer: Any, model: Any
) -> tuple[Any, Any]:
    """The environment's cases and score where there is one; else what was given."""
    if env is None:
        return train_dataset, reward_funcs
    check_case_environment(env)
    if train_dataset is not None:
        raise BadInputError("env and train_dataset are both given: the environment builds the data set.")
    rows = [{"prompt": case.prompt, "case_idx": case.case_idx} for case in read_cases(env, tokenizer)]
    score = case_reward_function(env, tokenizer, model)
    given = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    return rows, [score, *(reward for reward in given if reward is not None)]


def _chats(prompts: Sequence[Prompt], rows: Rows | None) -> dict[str, Any]:
    """Rendered text -> messages, of the prompts that are chats."""
    return {
        prompt.text: row["prompt"]
        for prompt, row in zip(prompts, rows or (), strict=True)
        if row.get("input_ids") is None
        and isinstance(row["prompt"], list)
        and isinstance(row["prompt"][0], dict)
    }


def _room(model: Any, args: GRPOConfig) -> int | None:
    room = prompt_room(model, "max_completion_length", args.max_completion_length)
    limits = [limit for limit in (room, args.max_prompt_length) if limit is not None]
    return min(limits) if limits else None
