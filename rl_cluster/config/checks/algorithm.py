"""Checks of algorithm, batch, sampling and optimizer: settings that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

from rl_cluster.config.algorithm import GRPO, RLOO, Reinforce, critic_of
from rl_cluster.config.planning.machine import Machine
from rl_cluster.config.reading.problems import Problem
from rl_cluster.config.run import RunConfig, importance_cap


def groups_have_a_baseline(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    algorithm, samples = config.algorithm, config.batch.samples_per_prompt
    over_group = isinstance(algorithm, RLOO | GRPO) or (
        isinstance(algorithm, Reinforce) and algorithm.baseline == "group_mean"
    )
    if over_group and samples < 2:
        reason = f"{algorithm.name} compares the samples of a prompt with each other, and one has no other"
        yield Problem(
            "batch.samples_per_prompt", samples, reason, "Give at least 2, or take ppo or reinforce."
        )
    if config.batch.dynamic_sampling and samples < 2:
        reason = "drops groups whose scores are all equal, and groups of one always are"
        yield Problem("batch.dynamic_sampling", True, reason, "Set batch.samples_per_prompt to at least 2.")


def mini_batches_divide(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    sequences = config.batch.prompts_per_step * config.batch.samples_per_prompt
    parts = config.algorithm.num_mini_batches
    if sequences % parts:
        reason = (
            f"does not divide the {sequences} sequences of a step "
            f"(prompts_per_step {config.batch.prompts_per_step} × samples_per_prompt "
            f"{config.batch.samples_per_prompt})"
        )
        divisors = [d for d in range(1, sequences + 1) if sequences % d == 0]
        close = min(divisors, key=lambda d: abs(d - parts))
        yield Problem("algorithm.num_mini_batches", parts, reason, f"Give a divisor, such as {close}.")


def whitening_has_more_than_one(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    sequences = config.batch.prompts_per_step * config.batch.samples_per_prompt
    if sequences < 2 and config.rewards.shaping.normalize == "batch":
        reason = "normalises over the batch, which has a single sequence"
        yield Problem("rewards.shaping.normalize", "batch", reason, "Use none or running, or larger batches.")


def sampling_is_not_truncated(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    """Log-probabilities are those of the whole distribution; what was drawn is not from it."""
    has_ratio = (
        config.algorithm.loss.kind != "reinforce"
        or config.asynchrony.max_policy_lag > 0
        or importance_cap(config) is not None
    )
    if not has_ratio:
        return
    reason = "samples from a truncated distribution, whose probabilities no importance ratio here is about"
    if config.rollout.top_p < 1:
        remedy = "Set it to 1; evaluation may have its own eval.top_p."
        yield Problem("rollout.top_p", config.rollout.top_p, reason, remedy)
    if config.rollout.top_k > 0:
        yield Problem("rollout.top_k", config.rollout.top_k, reason, "Set it to -1.")


def stops_are_sound(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    for i, text in enumerate(config.rollout.stop):
        if not text:
            yield Problem(f"rollout.stop.{i}", text, "is empty and would stop everything", "Remove it.")
    for i, token in enumerate(config.rollout.stop_token_ids):
        if token < 0:
            yield Problem(
                f"rollout.stop_token_ids.{i}", token, "is not a token id", "Give an id of at least 0."
            )


def cispo_has_no_lower_bound(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    loss = config.algorithm.loss
    if loss.kind == "cispo" and loss.clip_low != 1:
        reason = "bounds the weight from below, and cispo only from above, at 1 + clip_high"
        yield Problem("algorithm.loss.clip_low", loss.clip_low, reason, "Leave it out, or take kind=clip.")


def kl_is_sound(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    kl = config.algorithm.kl
    if kl.controller == "adaptive" and kl.coef == 0:
        reason = "multiplies algorithm.kl.coef, and 0 stays 0"
        remedy = "Start from a coefficient above 0, or use the fixed controller."
        yield Problem("algorithm.kl.controller", "adaptive", reason, remedy)
    if kl.estimator == "exact" and kl.place == "loss":
        reason = "is worked out before the update and has no gradient, so it cannot be in the loss"
        remedy = "Set algorithm.kl.place to reward_token or reward_sequence, or take k3."
        yield Problem("algorithm.kl.estimator", "exact", reason, remedy)


def critic_is_sound(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    critic = critic_of(config.algorithm)
    if critic is None:
        return
    if not critic.separate:
        separate_only = {"model": critic.model, "learning_rate": critic.learning_rate}
        for field, value in separate_only.items():
            if value is not None:
                reason = "is for a separate critic, and this one shares the policy's trunk"
                yield Problem(
                    f"algorithm.critic.{field}", value, reason, "Set algorithm.critic.separate=true."
                )
    if critic.warmup_steps >= config.run.steps:
        reason = f"leaves no step of run.steps = {config.run.steps} for the policy"
        field = "algorithm.critic.warmup_steps"
        yield Problem(field, critic.warmup_steps, reason, f"Give at most {config.run.steps - 1}.")


def schedule_fits(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    algorithm, warmup = config.algorithm, config.optimizer.warmup_steps
    each, limit = algorithm.num_epochs * algorithm.num_mini_batches, config.run.max_updates
    if limit is not None and not (config.run.steps - 1) * each < limit <= config.run.steps * each:
        reason = f"does not end in the last of the {config.run.steps} steps, of {each} updates each"
        yield Problem("run.max_updates", limit, reason, f"Set run.steps to {-(-limit // each)}.")
    critic = critic_of(algorithm)
    alone = critic.warmup_steps if critic is not None and critic.separate else 0
    updates = (limit or config.run.steps * each) - alone * each
    if 0 < updates <= warmup:
        whose = "the policy has only" if alone else "the run has only"
        reason = f"{whose} {updates} updates (steps × epochs × mini-batches)"
        yield Problem("optimizer.warmup_steps", warmup, reason, f"Give fewer than {updates}.")
    for i, beta in enumerate(config.optimizer.betas):
        if not 0 <= beta < 1:
            yield Problem(
                f"optimizer.betas.{i}", beta, "must be at least 0 and less than 1", "0.9 and 0.999 do."
            )
    supervised = config.model.supervised
    if supervised is not None and supervised.warmup_steps >= supervised.steps:
        reason = f"is not less than model.supervised.steps = {supervised.steps}"
        yield Problem("model.supervised.warmup_steps", supervised.warmup_steps, reason, "Lower it.")


ALGORITHM_CHECKS = (
    groups_have_a_baseline,
    mini_batches_divide,
    whitening_has_more_than_one,
    sampling_is_not_truncated,
    stops_are_sound,
    cispo_has_no_lower_bound,
    kl_is_sound,
    critic_is_sound,
    schedule_fits,
)
