"""The glossary: every metric's name, unit and meaning. Names without comment are TRL's.

"As weighted by the loss": over tokens where the loss is a mean over tokens, over completions where it is a
mean over completions; and over the updates of the step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """unit: "" for pure numbers. A name with capitals stands for several: rewards/NAME."""

    name: str
    unit: str
    meaning: str


GLOSSARY: tuple[Metric, ...] = (
    Metric("eps", "episodes/s", "sequences trained per second of the step"),
    Metric("episode", "episodes", "sequences trained so far"),
    Metric("lr", "", "learning rate of the last update"),
    Metric(
        "objective/kl",
        "nats",
        "log π/reference at the drawn tokens, summed over a response, mean over the batch",
    ),
    Metric("objective/kl_coef", "", "the KL coefficient β in use"),
    Metric(
        "objective/entropy", "nats", "−log π of the drawn tokens, summed over a response, mean over the batch"
    ),
    Metric(
        "objective/non_score_reward",
        "",
        "KL part of the reward per response: −β × KL where KL is in the reward",
    ),
    Metric(
        "objective/rlhf_reward", "", "scores + shaping + non_score_reward: what the policy is rewarded with"
    ),
    Metric("objective/scores", "", "weighted sum of the scorers before shaping, mean over the batch"),
    Metric("objective/scores_std", "", "the same, standard deviation over the batch"),
    Metric(
        "objective/shaping",
        "",
        "what penalties, normalisation and clipping of the scores added, mean over the batch",
    ),
    Metric("shaping/PART", "", "the share of one part in objective/shaping, mean over the batch"),
    Metric(
        "policy/approxkl_avg",
        "nats",
        "½ (log π − log π_old)², mean as weighted by the loss: how far updates went",
    ),
    Metric("policy/clipfrac_avg", "", "share that the loss clipped, as weighted by the loss"),
    Metric(
        "policy/entropy_avg", "nats", "entropy of the policy's distribution, mean as weighted by the loss"
    ),
    Metric(
        "policy/importance_weight_avg",
        "",
        "π_proximal/π_behaviour after truncation, mean as weighted by the loss (with async.importance_cap)",
    ),
    Metric(
        "policy/importance_truncated_avg",
        "",
        "share of those weights that async.importance_cap truncated, as weighted by the loss",
    ),
    Metric("loss/policy_avg", "", "the policy's term of the loss, mean over the updates"),
    Metric("loss/kl_avg", "nats", "KL(π ‖ reference) in the loss before β, mean over the updates"),
    Metric("loss/value_avg", "", "value loss before its coefficient, mean over the updates (with a critic)"),
    Metric(
        "loss/total_avg",
        "",
        "what the updates minimised: policy + β kl − entropy_coef entropy + value_coef value (shared critic)",
    ),
    Metric("val/clipfrac_avg", "", "share of values that were clipped (with a critic)"),
    Metric("val/ratio", "", "π/π_old, mean as weighted by the loss; near 1"),
    Metric("val/ratio_var", "", "π/π_old, variance as weighted by the loss"),
    Metric("val/num_eos_tokens", "responses", "responses of the batch that came to an end of their own"),
    Metric("completions/mean_length", "tokens", "drawn tokens per response"),
    Metric("completions/max_length", "tokens", "drawn tokens of the longest response"),
    Metric("completions/truncated_fraction", "", "share of responses cut off at rollout.max_new_tokens"),
    Metric(
        "completions/without_reward_fraction",
        "",
        "share of responses that no scorer gave a reward (None): in no mean, advantage 0",
    ),
    Metric("rewards/NAME", "", "the scorer's mean value over the batch's rewards, before its weight"),
    Metric("rewards/NAME/PART", "", "a component that the scorer returned in a dict"),
    Metric("eval/score_mean", "", "score on the held-out prompts, before shaping"),
    Metric(
        "eval/accuracy",
        "",
        "share of held-out samples with a score of at least eval.success_threshold; fit: as train/accuracy",
    ),
    Metric("eval/mean_length", "tokens", "drawn tokens per held-out response"),
    Metric("eval/pass@K", "", "unbiased estimate that at least one of K samples is correct"),
    Metric("epoch", "epochs", "fit: passes over the data so far"),
    Metric(
        "train/loss", "", "fit: loss before the update, mean over the step's examples (sft: tokens, nats)"
    ),
    Metric(
        "train/accuracy",
        "",
        "fit: share of pairs whose chosen side has the higher reward (kto: of rows "
        "whose reward is on their label's side of the baseline)",
    ),
    Metric("train/margin", "", "fit: mean chosen reward minus mean rejected reward"),
    Metric("train/chosen_rewards", "", "fit: β log π/reference (reward models: score) of chosen responses"),
    Metric("train/rejected_rewards", "", "fit: the same of rejected responses"),
    Metric("train/chosen_logps", "nats", "fit: log-probability of a chosen response, mean"),
    Metric("train/rejected_logps", "nats", "fit: the same of rejected responses"),
    Metric("train/nll", "nats", "orpo: −log π per token of chosen responses"),
    Metric("train/odds_ratio_loss", "", "orpo: the odds-ratio term before λ"),
    Metric("train/kl_baseline", "nats", "kto: z0, log π/reference of mismatched completions, at least 0"),
    Metric("eval/loss", "", "fit: as train/loss, on the held-out rows"),
    Metric("eval/margin", "", "fit: as train/margin, on the held-out rows"),
    Metric("eval/chosen_rewards", "", "fit: as train/chosen_rewards, on the held-out rows"),
    Metric("eval/rejected_rewards", "", "fit: as train/rejected_rewards, on the held-out rows"),
    Metric("eval/chosen_logps", "nats", "fit: as train/chosen_logps, on the held-out rows"),
    Metric("eval/rejected_logps", "nats", "fit: as train/rejected_logps, on the held-out rows"),
    Metric("eval/nll", "nats", "orpo: as train/nll, on the held-out rows"),
    Metric("eval/odds_ratio_loss", "", "orpo: as train/odds_ratio_loss, on the held-out rows"),
    Metric("optim/grad_norm", "", "L2 norm of the gradient before clipping, of the last update"),
    Metric(
        "optim/skipped_updates", "updates", "updates of the step left out because a gradient was not finite"
    ),
    Metric("perf/step_seconds", "s", "from one step's metrics to the next"),
    Metric("perf/wait_seconds", "s", "the learner waiting for experience"),
    Metric("perf/generate_seconds", "s", "first group begun to last group generated, of the batch"),
    Metric("perf/score_seconds", "s", "longest time from a generated group to its scores"),
    Metric(
        "perf/reference_seconds",
        "s",
        "longest time from a generated group to its reference log-probabilities",
    ),
    Metric("perf/train_seconds", "s", "forward passes, advantages and updates"),
    Metric("perf/sync_seconds", "s", "publishing the weights to every engine, proof included"),
    Metric("perf/sync_pause_seconds", "s", "longest time that an engine stood still for it"),
    Metric("perf/generated_tokens_per_second", "tokens/s", "drawn tokens of the batch / generate_seconds"),
    Metric(
        "perf/trained_tokens_per_second", "tokens/s", "tokens of the batch, prompts included / train_seconds"
    ),
    Metric("async/lag_mean", "versions", "policy lag at the update, mean over the groups"),
    Metric("async/lag_max", "versions", "greatest policy lag at the update"),
    Metric(
        "health/logprob_gap_mean",
        "nats",
        "mismatch: |engine − learner log-probability| of tokens drawn by the present weights, mean; "
        "null where a batch has no such token",
    ),
    Metric("health/logprob_gap_max", "nats", "the same, greatest"),
    Metric(
        "health/logprob_drift_mean",
        "nats",
        "the same of tokens drawn by older weights, mean: how far the policy has moved since",
    ),
    Metric("health/logprob_drift_max", "nats", "the same, greatest"),
    Metric(
        "health/alarms",
        "alarms",
        "warnings of the section `health` at this step; alarms.jsonl has their words",
    ),
    Metric(
        "groups/without_signal",
        "groups",
        "groups of the batch whose scores are all equal, before shaping: nothing to compare",
    ),
    Metric("health/rss_bytes/WORKER", "bytes", "resident memory of a worker's process"),
    Metric("ledger/STATE", "groups", "prompt groups in this state of the ledger"),
)


def describe(name: str) -> Metric | None:
    """The entry of a metric as it is logged; `rewards/accuracy` is found as rewards/NAME."""
    parts = name.split("/")
    for metric in GLOSSARY:
        pattern = metric.name.split("/")
        if len(pattern) == len(parts) and all(_fits(p, part) for p, part in zip(pattern, parts, strict=True)):
            return metric
    return None


def _fits(pattern: str, part: str) -> bool:
    if pattern.isupper():
        return bool(part)
    stem = pattern.removesuffix("K")
    return part == pattern or (stem != pattern and part.startswith(stem) and part[len(stem) :].isdigit())
