"""Combinations that cannot work are refused before anything starts, with field, value and remedy."""

import importlib.util

import pytest

from rl_cluster.config.checks.run import check_config, find_problems
from rl_cluster.config.planning.machine import GIB, Machine
from rl_cluster.config.reading.load import apply_override, parse_config
from rl_cluster.errors import BadInputError
from tests.common.settings import BASE

LAPTOP = Machine(cores=2, memory=24 * GIB, gpus=0, gpu_memory=0)
ONE_GPU = Machine(cores=16, memory=128 * GIB, gpus=1, gpu_memory=80 * GIB)
EIGHT_GPUS = Machine(cores=96, memory=1024 * GIB, gpus=8, gpu_memory=80 * GIB)


def build(*overrides):
    data = BASE
    for override in overrides:
        data = apply_override(data, override)
    return parse_config(data)


# (machine, overrides, field and value as shown, a part of the remedy)
BAD = [
    (LAPTOP, ["model={}"], "model.path = null", "model.scratch={}"),
    (LAPTOP, ["model.path=Qwen/Qwen3-0.6B"], 'model.path = "Qwen/Qwen3-0.6B"', "Remove one"),
    (LAPTOP, ["model={path: /no/such/model}"], "no such folder", "existing folder"),
    (LAPTOP, ["model={path: ./nowhere}"], "no such folder", "owner/name"),
    (LAPTOP, ["model={path: models/nothing}"], "no such folder", "owner/name"),
    (LAPTOP, ["model={path: a/b/c}"], "no such folder", "owner/name"),
    (LAPTOP, ["model={path: ''}"], 'model.path = ""', "existing folder"),
    (LAPTOP, ["model={path: /}"], "has no config.json", "config.json"),
    (LAPTOP, ["model={path: /etc/hostname}"], "is a file", "folder"),
    (LAPTOP, ["model.scratch={num_heads: 3}"], "model.scratch.num_heads = 3", "divisor"),
    (LAPTOP, ["model.scratch={hidden_size: 12, num_heads: 4}"], "odd size 3", "num_heads"),
    (
        LAPTOP,
        ["model.scratch={hidden_size: 64, num_heads: 4}"],
        "heads of size 16",
        "hidden_size / num_heads",
    ),
    (LAPTOP, ["model.scratch={alphabet: 0123456789+=+}"], "repeats a character", "once"),
    (LAPTOP, ["data.train.template='{a} und {b}'"], "lacks 'dnu'", "Add these"),
    (LAPTOP, ["data.train.chat=true"], "data.train.chat = true", "model.path"),
    (LAPTOP, ["model.scratch={max_positions: 16}"], "rollout.max_new_tokens = 128", "Lower it"),
    (LAPTOP, ["eval.max_new_tokens=1000"], "eval.max_new_tokens = 1000", "Lower it"),
    (LAPTOP, ["data.train={source: jsonl, path: /no/file.jsonl}"], "no such file", "path of the prompts"),
    (LAPTOP, ["data.train={source: jsonl, path: /etc}"], "is a folder", "dataset"),
    (LAPTOP, ["data.train={source: dataset, path: /etc/hostname}"], "wants a folder", "save_to_disk"),
    (LAPTOP, ["model.lora={}", "sync.backend=ipc"], 'sync.backend = "ipc": hands over whole weights', "lora"),
    (LAPTOP, ["model.lora={targets: []}"], "names no layer", "all-linear"),
    (LAPTOP, ["rewards.scorers=[{kind: function, function: len}]"], "is not an import path", "function"),
    (LAPTOP, ["rewards.scorers=[{kind: function, function: 'no.py:f'}]"], "there is no file no.py", "Write"),
    (LAPTOP, ["rewards.scorers=[{kind: reward_model, path: /no/rm}]"], "rewards.scorers.0.path", "folder"),
    (LAPTOP, ["rewards.scorers=[{kind: reasoning_gym}]"], "scores reasoning-gym tasks", "exact_match"),
    (LAPTOP, ["rewards.scorers=[{kind: math}, {kind: math}]"], "rewards.scorers.1.name", "of its own"),
    (LAPTOP, ["rewards.scorers.0.weight=0"], "every scorer has weight 0", "weight"),
    (LAPTOP, ["rewards.shaping={overlong_buffer: 500}"], "overlong_buffer = 500", "at most 128"),
    (LAPTOP, ["eval.every=5", "data.held_out=0"], "eval.every = 5", "Hold some out"),
    (LAPTOP, ["eval.num_prompts=300"], "eval.num_prompts = 300", "at most 200"),
    (LAPTOP, ["eval.pass_at=[1, 4]"], "eval.pass_at.1 = 4", "samples_per_prompt"),
    (LAPTOP, ["eval.pass_at=[0]"], "eval.pass_at.0 = 0", "lower k"),
    (LAPTOP, ["eval.samples_per_prompt=4"], "greedy samples", "eval.temperature"),
    (LAPTOP, ["batch.samples_per_prompt=1"], "grpo compares", "at least 2"),
    (LAPTOP, ["batch.samples_per_prompt=1", "algorithm={name: rloo}"], "rloo compares", "at least 2"),
    (
        LAPTOP,
        ["batch.samples_per_prompt=1", "algorithm={name: reinforce, baseline: group_mean}"],
        "reinforce compares",
        "at least 2",
    ),
    (
        LAPTOP,
        ["batch.samples_per_prompt=1", "batch.dynamic_sampling=true", "algorithm={name: ppo}"],
        "batch.dynamic_sampling = true",
        "at least 2",
    ),
    (LAPTOP, ["algorithm={name: grpo, num_mini_batches: 3}"], "does not divide the 128", "such as 2"),
    (LAPTOP, ["algorithm={name: grpo, num_mini_batches: 500}"], "num_mini_batches = 500", "such as 128"),
    (LAPTOP, ["rollout.top_p=0.9"], "rollout.top_p = 0.9", "Set it to 1"),
    (LAPTOP, ["rollout.top_k=50"], "rollout.top_k = 50", "Set it to -1"),
    (
        LAPTOP,
        [
            "rollout.top_p=0.9",
            "async.importance_cap=2",
            "algorithm={name: reinforce, loss: {kind: reinforce}}",
        ],
        "rollout.top_p = 0.9",
        "Set it to 1",
    ),
    (
        LAPTOP,
        ["algorithm={name: grpo, loss: {kind: cispo, clip_low: 0.2}}"],
        "algorithm.loss.clip_low = 0.2",
        "Leave it out",
    ),
    (
        LAPTOP,
        [
            "rollout.top_k=50",
            "algorithm={name: reinforce, loss: {kind: reinforce}}",
            "async.max_policy_lag=1",
        ],
        "rollout.top_k = 50",
        "Set it to -1",
    ),
    (LAPTOP, ["rollout.stop=['']"], "rollout.stop.0", "Remove it"),
    (LAPTOP, ["rollout.stop_token_ids=[-3]"], "rollout.stop_token_ids.0 = -3", "at least 0"),
    (LAPTOP, ["algorithm={name: grpo, kl: {controller: adaptive}}"], "kl.controller", "above 0"),
    (LAPTOP, ["algorithm={name: grpo, kl: {coef: 0.1, estimator: exact}}"], "kl.estimator", "reward_token"),
    (LAPTOP, ["algorithm={name: ppo, critic: {model: x}}"], "algorithm.critic.model", "separate=true"),
    (LAPTOP, ["algorithm={name: ppo, critic: {learning_rate: 1}}"], "critic.learning_rate", "separate=true"),
    (LAPTOP, ["algorithm={name: ppo, critic: {warmup_steps: 100}}"], "critic.warmup_steps", "at most 99"),
    (LAPTOP, ["optimizer.warmup_steps=100"], "only 100 updates", "fewer than 100"),
    (LAPTOP, ["optimizer.betas=[0.9, 1]"], "optimizer.betas.1 = 1", "less than 1"),
    (LAPTOP, ["model.supervised={steps: 10}"], "model.supervised.warmup_steps = 20", "Lower"),
    (LAPTOP, ["rollout.num_workers=3"], "rollout.num_workers = 3", "at most 2"),
    (LAPTOP, ["learner.num_ranks=5"], "learner.num_ranks = 5", "at most 2"),
    (LAPTOP, ["cluster.cpus_per_worker=4"], "4 cores each", "at most 1"),
    (LAPTOP, ["rollout.kv_cache_gib=100"], "rollout.kv_cache_gib = 100", "Lower it"),
    (LAPTOP, ["rollout.tensor_parallel_size=2"], "not split", "Set it to 1"),
    (LAPTOP, ["cluster.colocate=true"], "cluster.colocate = true", "false"),
    (LAPTOP, ["sync.backend=nccl"], "needs GPUs", "auto or gloo"),
    (LAPTOP, ["sync.backend=ipc"], "needs GPUs", "auto or gloo"),
    (LAPTOP, ["learner.offload_optimizer=true"], "there is no GPU", "false"),
    (LAPTOP, ["cluster.device=cuda"], "no NVIDIA GPU answers", "auto or cpu"),
    (ONE_GPU, [], "need 2 GPUs, and there are 1", "cluster.colocate=true"),
    (ONE_GPU, ["sync.backend=ipc"], "same GPU only", "colocate=true"),
    (ONE_GPU, ["cluster.colocate=true", "async.max_policy_lag=1"], "async.max_policy_lag = 1", "Set it to 0"),
    (ONE_GPU, ["cluster.colocate=true", "sync.backend=nccl"], "refuses two processes on one GPU", "auto"),
    (EIGHT_GPUS, ["cluster.colocate=true", "learner.num_ranks=2"], "learner.num_ranks = 2", "Set it to 1"),
    (EIGHT_GPUS, ["rollout.num_workers=4", "learner.num_ranks=8"], "need 12 GPUs", "Lower"),
    (EIGHT_GPUS, ["rollout.tensor_parallel_size=16"], "more than the 8 GPUs", "at most 8"),
    (EIGHT_GPUS, ["learner.offload_optimizer=true", "learner.zero_stage=0"], "needs ZeRO", "zero_stage"),
    (
        EIGHT_GPUS,
        ["rollout.num_workers=7", "algorithm={name: grpo, kl: {coef: 0.1}}"],
        "need 9 GPUs, and there are 8",
        "Lower",
    ),
]


@pytest.mark.parametrize(
    ("machine", "overrides", "shown", "remedy"), BAD, ids=[" ".join(b[1]) or "default" for b in BAD]
)
def test_a_combination_that_cannot_work_is_refused(machine, overrides, shown, remedy):
    with pytest.raises(BadInputError) as caught:
        check_config(build(*overrides), machine)
    assert shown in str(caught.value)
    assert remedy in str(caught.value)


GOOD = [
    (LAPTOP, []),
    (LAPTOP, ["model={path: Qwen/Qwen3-0.6B}"]),
    (LAPTOP, ["rollout.num_workers=2", "learner.num_ranks=2", "algorithm={name: ppo}"]),
    (LAPTOP, ["rollout.top_p=0.9", "algorithm={name: reinforce, loss: {kind: reinforce}}"]),
    (LAPTOP, ["rollout.top_k=0"]),
    (LAPTOP, ["algorithm={name: grpo, loss: {kind: cispo, clip_high: 3}}"]),
    (
        LAPTOP,
        ["rollout.top_p=0.9", "model.dtype=bfloat16", "algorithm={name: reinforce, loss: {kind: reinforce}}"],
    ),
    (LAPTOP, ["eval.top_p=0.9", "eval.temperature=1", "eval.samples_per_prompt=4", "eval.pass_at=[1, 4]"]),
    (LAPTOP, ["batch.samples_per_prompt=1", "algorithm={name: ppo}"]),
    (LAPTOP, ["data.held_out=0"]),
    (LAPTOP, ["model.lora={}", "rollout.stop=['=']", "async.max_policy_lag=2"]),
    (LAPTOP, ["algorithm={name: rloo, kl: {place: reward_token}}"]),
    (ONE_GPU, ["cluster.colocate=true", "sync.backend=ipc", "learner.offload_optimizer=true"]),
    (EIGHT_GPUS, ["rollout.num_workers=3", "rollout.tensor_parallel_size=2", "learner.num_ranks=2"]),
]


@pytest.mark.parametrize(("machine", "overrides"), GOOD, ids=[" ".join(o) or "default" for _, o in GOOD])
def test_what_can_work_is_not_refused(machine, overrides):
    assert [str(problem) for problem in find_problems(build(*overrides), machine)] == []


def test_wandb_that_is_not_installed_is_named(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name))
    with pytest.raises(BadInputError, match="pip install wandb"):
        check_config(build("log.wandb_project=mine"), LAPTOP)


def test_several_problems_are_listed_together():
    with pytest.raises(BadInputError, match="2 problems"):
        check_config(build("rollout.top_p=0.5", "sync.backend=nccl"), LAPTOP)
