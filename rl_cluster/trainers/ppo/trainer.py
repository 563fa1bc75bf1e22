"""PPOTrainer: a model, prompts and a reward in; the trained model and its metrics out, on the run below.

A front: it builds a RunConfig (ppo_run_config.py) and calls an open run (ppo_run.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from rl_cluster.checks import check_whole_number
from rl_cluster.data.encode import special_tokens
from rl_cluster.data.load import PromptSets
from rl_cluster.environments.playing.for_runs import prompts_of
from rl_cluster.errors import BadInputError
from rl_cluster.files.own_folders import folder_to_write
from rl_cluster.loop.report import Metrics
from rl_cluster.trainers.model_folder import copy_model, model_target
from rl_cluster.trainers.ppo.arguments import read_arguments
from rl_cluster.trainers.ppo.checks import estimator_of, kl_config
from rl_cluster.trainers.ppo.data import make_dataloader, read_ppo_prompts
from rl_cluster.trainers.ppo.environment import EnvironmentSource, check_environment_alone, is_environment
from rl_cluster.trainers.ppo.history import PPOHistory
from rl_cluster.trainers.ppo.loop import TensorLoop
from rl_cluster.trainers.ppo.run import Opening, PPORun
from rl_cluster.trainers.ppo.tensors import advantages_of, kl_estimates, query_prompt, sample_rows
from rl_cluster.trainers.reward_signatures import RewardCall, checked_rewards, reward_call
from rl_cluster.trainers.session import TrainerSession, find_checkpoint
from rl_cluster.trajectory import Prompt

NO_REWARD = "PPOTrainer.reward_fn: there is none to score with. Give reward_fn=, or train on an environment."


class PPOTrainer:
    """PPO with a critic, GAE and a KL penalty, per token.

    PPOTrainer(config, tokenizer=, reward_fn=), PPOTrainer(config, model, tokenizer), or TRL's
    PPOTrainer(config, model, ref_model, tokenizer, dataset); everything may be given by name.

    config: a PPOConfig. model: a causal language model of transformers, a PPOModel, or a name; default:
    config.model_name. ref_model: what the KL penalty is measured against; default: the model as it starts.
    tokenizer: default: the model's. reward_fn: see rl_cluster.trainers.reward_signatures. dataset: rows with
    input_ids or query, for `dataloader`. eval_prompts: held-out prompts. callbacks: TrainerCallbacks of
    transformers, or loop.Hooks.

    Workers start at the first call that needs them; `close` (or leaving a `with`) ends them. After train()
    and step() the model object that was given holds the trained weights. Raises BadInputError.
    """

    def __init__(
        self,
        config: Any,
        *positional: Any,
        model: Any = None,
        ref_model: Any = None,
        tokenizer: Any = None,
        dataset: Any = None,
        reward_fn: Any = None,
        eval_prompts: Any = None,
        data_collator: Callable[..., Any] | None = None,
        callbacks: Sequence[Any] = (),
    ) -> None:
        named = {
            "model": model,
            "ref_model": ref_model,
            "tokenizer": tokenizer,
            "dataset": dataset,
            "reward_fn": reward_fn,
        }
        arguments = read_arguments(config, positional, named)
        self.config = arguments.config
        self.reward_fn = arguments.reward_fn
        self.dataset = arguments.dataset
        self._run = PPORun(arguments, callbacks)
        self.tokenizer = self._run.tokenizer
        self._reward: RewardCall | None = None
        if self.reward_fn is not None and self._run.reward_model is None:
            self._reward = reward_call(self.reward_fn, self.tokenizer)
        self._eval_prompts: tuple[Prompt, ...] = ()
        if eval_prompts is not None:
            self._eval_prompts = self._encode("eval_prompts", eval_prompts)
        self._dataloader: DataLoader[dict[str, Any]] | None = None
        if self.dataset is not None:
            self._dataloader = make_dataloader(
                self.dataset, self.tokenizer, self.config.batch_size, self.config.seed, data_collator
            )
        elif data_collator is not None:
            raise BadInputError(
                "PPOTrainer.data_collator: collates the rows of dataset=, which is not given."
            )
        self._environment: EnvironmentSource | None = None
        self._loop = TensorLoop(self._run, self._open_for_sampling)

    @property
    def model(self) -> Any:
        """The policy with the weights of now, as it was given (a name: as a transformers model)."""
        if self._run.is_waiting_for_checkpoint:
            self._open_for_sampling([])
            self._run.take_weights()
        elif not self._run.model.is_loaded:
            _ = self._run.model.module
            self._run.take_weights()
        return self._run.model.module

    @property
    def ref_model(self) -> Any:
        """The reference that was given; None: the model as it started, which only the workers hold."""
        return None if self._run.reference is None else self._run.reference.module

    @property
    def dataloader(self) -> DataLoader[dict[str, Any]]:
        """Batches of config.batch_size rows as dicts of lists: input_ids, query, the data set's columns."""
        if self._dataloader is None:
            raise BadInputError("PPOTrainer.dataset: there is none to make a dataloader of. Give dataset=.")
        return self._dataloader

    @property
    def kl_coef(self) -> float:
        """β as it is now."""
        session = self._run.session
        now = None if session is None else session.run.kl_coef
        return kl_config(self.config).coef if now is None else now

    def train(self, prompts: Any, num_iterations: int | None = None, *, metadata: Any = None) -> PPOHistory:
        """So many iterations more (default: config.num_iterations); one entry per iteration in each list.

        prompts: texts, chats, token ids, or dicts with a column prompt, whose other columns reach the reward
        function as metadata; or an environment. metadata: a dict per prompt besides. A second call goes on
        where the first ended. Raises ScorerError when the reward function keeps failing.
        """
        num_iterations = self.config.num_iterations if num_iterations is None else num_iterations
        check_whole_number("num_iterations", num_iterations)
        opening = self._opening(prompts, metadata)
        session = self._run.open(opening, self._eval_prompts)
        seen = len(self._run.log.rows)
        session.train(PromptSets(tuple(opening.prompts), self._eval_prompts), num_iterations)
        self._run.take_weights()
        return PPOHistory(self._run.log.rows[seen:], lambda: self.model)

    def _opening(self, prompts: Any, metadata: Any) -> Opening:
        if not is_environment(prompts):
            if self.reward_fn is None and (self._environment is None or self._run.session is None):
                raise BadInputError(NO_REWARD)
            self._run.scorer.call = self._reward
            return Opening(self._encode("prompts", prompts, metadata))
        check_environment_alone(self.reward_fn, metadata)
        encoded = self._encode("environment.prompts", prompts_of(prompts))
        if self._environment is None:
            self._environment = EnvironmentSource(prompts)
        else:
            self._environment.renew(prompts)
        return Opening(encoded, self._environment)

    def evaluate(self, prompts: Any = None, *, metadata: Any = None) -> Metrics:
        """eval/… metrics of the policy of now on prompts (default: eval_prompts)."""
        if prompts is None and not self._eval_prompts:
            raise BadInputError("evaluate: no prompts were given, here or as PPOTrainer(eval_prompts=...).")
        chosen = self._eval_prompts if prompts is None else self._encode("prompts", prompts, metadata)
        if self.reward_fn is None and self._environment is None:
            raise BadInputError(NO_REWARD)
        self._run.scorer.call = self._reward
        session = self._open_for_sampling(chosen)
        return session.background.call(session.run.evaluate(PromptSets((), chosen)))

    def generate_responses(
        self, prompts: Any, max_new_tokens: int | None = None
    ) -> tuple[list[str], dict[str, Any]]:
        """(texts, {"sequences": int64 [N, L] padded on the right, "response_ids", "prompt_ids": lists of
        int64 tensors}), at config.temperature and config.top_p."""
        encoded = self._encode("prompts", prompts)
        most = self.config.max_new_tokens if max_new_tokens is None else max_new_tokens
        return self._loop.texts(encoded, {"max_new_tokens": most, "top_p": self.config.top_p})

    def generate(
        self, query_tensor: Any, *, return_prompt: bool = False, **generation_kwargs: Any
    ) -> torch.Tensor | list[torch.Tensor]:
        """Responses, int64 [R] each, to a list of queries [P]; a single query gives a single response.

        generation_kwargs: max_new_tokens, temperature, top_p, top_k, do_sample, eos_token_id, stop_strings;
        default: as train() samples. step() takes what was drawn at config.temperature, untruncated.
        """
        single = isinstance(query_tensor, torch.Tensor) and query_tensor.ndim == 1
        queries = [query_tensor] if single else query_tensor
        responses = self._loop.generate(queries, generation_kwargs, return_prompt)
        return responses[0] if single else responses

    def step(self, queries: Any, responses: Any, scores: Any) -> dict[str, float | None]:
        """One iteration on responses that you have scored: KL penalty, GAE, ppo_epochs of updates.

        queries, responses: token ids, one row each. scores: one finite number each. Returns the metrics,
        under their own names and TRL's.
        """
        return self._loop.step(queries, responses, scores)

    def log_stats(
        self,
        stats: Mapping[str, Any],
        batch: Mapping[str, Any],
        rewards: Any,
        columns_to_log: Sequence[str] = ("query", "response"),
    ) -> None:
        """Write texts and rewards to samples.jsonl of the run folder, and a line to the console."""
        rows = sample_rows(batch, rewards, columns_to_log)
        session = self._run.session
        if session is None:
            raise BadInputError("log_stats: there has been no step() yet.")
        session.run.observer.samples(session.run.step, rows)
        kl = stats.get("objective/kl")
        shown = "" if kl is None else f", KL {kl:.3f}"
        mean = np.mean([row.score for row in rows])
        session.run.observer.note(f"step {session.run.step}: reward {mean:.3f}{shown}")

    def train_step(self, batch: Mapping[str, Any]) -> dict[str, float | None]:
        """One iteration. batch: queries, responses (token ids) and rewards, as PPOBuffer.get() gives them; or
        prompts (and metadata), which are answered and scored first. Returns train()'s columns, a number each.
        """
        queries = batch.get("queries", batch.get("input_ids"))
        if queries is None:
            if "prompts" not in batch:
                raise BadInputError(
                    f"train_step: batch has {sorted(batch)}: give prompts, or queries, responses and rewards."
                )
            prompts = self._encode("prompts", batch["prompts"], batch.get("metadata"))
            queries = [prompt.tokens.tolist() for prompt in prompts]
            responses = self.generate(queries)
            texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
            if self._reward is None:
                raise BadInputError(NO_REWARD)
            answer = self._reward([p.text for p in prompts], texts, [dict(p.metadata) for p in prompts])
            rewards: Any = checked_rewards(answer, len(prompts))
        else:
            missing = [name for name in ("responses", "rewards") if name not in batch]
            if missing:
                raise BadInputError(f"train_step: batch has queries and no {missing[0]}.")
            responses, rewards = batch["responses"], batch["rewards"]
        stats = self.step(queries, responses, rewards)
        return {name: values[0] for name, values in PPOHistory([stats]).items()}

    def compute_advantages(
        self, rewards: Any, values: Any, dones: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """GAE with config.gamma and config.lam: (advantages, returns), float32, not whitened.

        rewards, values, dones: [T] or [N, T], 0 in padding; after a True of dones nothing is carried back.
        """
        return advantages_of(rewards, values, dones, self.config.gamma, self.config.lam)

    def compute_kl_penalty(self, logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
        """What each token's reward loses: kl_coef × the estimator of config.kl_penalty; any shape.

        kl_penalty="full": log-probabilities of the whole vocabulary, [..., V], become [...].
        """
        return self.kl_coef * kl_estimates(logprobs, ref_logprobs, estimator_of(self.config))

    def save_checkpoint(self, path: str | Path | None = None) -> Path:
        """Weights, optimizer, critic, β, position; path: default checkpoints/step-N of the run."""
        session = self._run.session
        if session is None:
            raise BadInputError("save_checkpoint: nothing has been trained yet; train first.")
        folder = None if path is None else folder_to_write(path, "save_checkpoint: path", "checkpoint")
        return session.background.call(session.run.save(folder))

    def load_checkpoint(self, path: str | Path) -> None:
        """Go on from what save_checkpoint (or save_every) wrote. path: its folder, or a run's (the newest).

        Takes effect at the next call. BadInputError where there is none.
        """
        self._run.go_on_from(find_checkpoint(path, "load_checkpoint"))

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """A Hugging Face folder (adapters under LoRA), with tokenizer; default: model/ of the run."""
        target = None if output_dir is None else model_target(output_dir, "save_model: output_dir")
        session = self._open_for_sampling([])
        session.background.call(session.run.export())
        return session.folder.model if target is None else copy_model(session.folder.model, target)

    def close(self) -> None:
        """End the workers; files and the model object stay. The second call does nothing."""
        self._run.close()

    def __enter__(self) -> PPOTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, field: str, prompts: Any, metadata: Any = None) -> tuple[Prompt, ...]:
        return read_ppo_prompts(field, prompts, metadata, self.tokenizer, self._run.prompt_limit)

    def _open_for_sampling(self, prompts: Sequence[Prompt]) -> TrainerSession:
        """prompts: of the call; an end token alone where there are none."""
        if not prompts:
            eos = special_tokens(self.tokenizer).eos
            prompts = (query_prompt("nothing", [eos], self.tokenizer, self._run.prompt_limit),)
        return self._run.open(Opening(prompts, self._environment), self._eval_prompts)
