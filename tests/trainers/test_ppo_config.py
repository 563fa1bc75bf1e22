"""PPOConfig: documented defaults, aliases, and every field reaching the run (or being refused)."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest

from rl_cluster.config.environment import EnvironmentConfig
from rl_cluster.config.reward import CallableScorer
from rl_cluster.config.run import RunConfig
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.ppo.checks import kl_config
from rl_cluster.trainers.ppo.config import PPOConfig
from rl_cluster.trainers.ppo.run import changed_setting
from rl_cluster.trainers.ppo.run_config import RunPlace, ppo_run_config

PLACE = RunPlace(
    run_dir="somewhere",
    model_path="owner/model",
    prompts_path="prompts.jsonl",
    scorer=CallableScorer(name="reward"),
    backend="local",
    max_positions=1024,
    eval_path="eval.jsonl",
)


def run_config(place: RunPlace = PLACE, **settings: Any) -> RunConfig:
    return ppo_run_config(PPOConfig(**settings), place)


def test_the_defaults_are_the_documented_ones() -> None:
    documented = {
        "learning_rate": 1e-5,
        "batch_size": 16,
        "mini_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "ppo_epochs": 4,
        "gamma": 0.99,
        "lam": 0.95,
        "clip_ratio": 0.2,
        "clip_param": 0.2,
        "value_clip": 0.2,
        "max_grad_norm": 1.0,
        "kl_penalty_coef": 0.01,
        "kl_target": 0.01,
        "kl_horizon": 10_000,
        "entropy_coef": 0.01,
        "value_coef": 0.5,
        "max_new_tokens": 128,
        "temperature": 0.7,
        "top_p": 0.9,
        "num_iterations": 100,
        "save_every": 10,
        "eval_every": 5,
        "device": None,
        "init_kl_coef": 0.2,
        "target": 6.0,
        "horizon": 10_000,
    }
    config = PPOConfig()
    assert {name: getattr(config, name) for name in documented} == documented


def test_the_defaults_make_the_documented_algorithm() -> None:
    config = run_config()
    algorithm = config.algorithm
    assert (config.run.steps, config.batch.prompts_per_step, config.batch.samples_per_prompt) == (100, 16, 1)
    assert (algorithm.num_epochs, algorithm.num_mini_batches) == (4, 4)
    assert (algorithm.gamma, algorithm.lam, algorithm.loss.entropy_coef) == (0.99, 0.95, 0.01)  # type: ignore[union-attr]
    assert (algorithm.loss.clip_low, algorithm.loss.clip_high) == (0.2, 0.2)
    assert algorithm.critic.value_coef == 0.5  # type: ignore[union-attr]
    assert algorithm.kl.model_dump() == {
        "coef": 0.01,
        "place": "reward_token",
        "estimator": "k1",
        "controller": "adaptive",
        "target": 0.01,
        "horizon": 10_000,
    }
    # Whole distribution in training, because of the ratios; top_p acts in evaluations.
    assert (config.rollout.temperature, config.rollout.top_p, config.eval.top_p) == (0.7, 1.0, 0.9)
    assert config.batch.tokens_per_micro_batch == 4 * (512 + 128)


OTHER_VALUES: dict[str, Any] = {
    "learning_rate": 3e-4,
    "batch_size": 32,
    "mini_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "ppo_epochs": 2,
    "gamma": 1.0,
    "lam": 0.9,
    "clip_ratio": 0.1,
    "clip_param": 0.1,
    "value_clip": 0.3,
    "max_grad_norm": 0.5,
    "kl_penalty_coef": 0.05,
    "kl_target": 0.1,
    "kl_horizon": 500,
    "kl_penalty": "mse",
    "adap_kl_ctrl": False,
    "init_kl_coef": 0.3,
    "target": 3.0,
    "horizon": 77,
    "entropy_coef": 0.0,
    "value_coef": 0.1,
    "max_new_tokens": 16,
    "temperature": 1.0,
    "top_p": 1.0,
    "num_iterations": 7,
    "save_every": 3,
    "eval_every": 2,
    "device": "cpu",
    "samples_per_prompt": 2,
    "max_prompt_length": 100,
    "learning_rate_schedule": "linear",
    "warmup_steps": 5,
    "critic_warmup_steps": 2,
    "separate_critic": True,
    "whiten_rewards": True,
    "whiten_advantages": False,
    "missing_eos_penalty": 1.0,
    "length_penalty": 0.01,
    "normalize_rewards": "batch",
    "reward_clip": 5.0,
    "bf16": True,
    "gradient_checkpointing": True,
    "seed": 3,
    "tensorboard": True,
    "progress": "plain",
    "early_stopping": True,
    "settings": {"model.lora.rank": 4},
}


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_every_field_changes_the_run(name: str) -> None:
    assert run_config(**{name: OTHER_VALUES[name]}) != run_config()


def test_mini_batches_and_accumulation_make_the_updates_of_a_pass() -> None:
    config = run_config(batch_size=32, mini_batch_size=4, gradient_accumulation_steps=4)
    assert config.algorithm.num_mini_batches == 2
    assert run_config(batch_size=1).algorithm.num_mini_batches == 1
    with pytest.raises(BadInputError, match=r"mini_batch_size=5.*does not divide the 16"):
        run_config(mini_batch_size=5)


@pytest.mark.parametrize(
    ("given", "coef", "target", "horizon", "controller"),
    [
        ({"kl_penalty": "kl", "adap_kl_ctrl": True}, 0.2, 6.0, 10_000, "adaptive"),
        ({"init_kl_coef": 0.3}, 0.3, 6.0, 10_000, "adaptive"),
        ({"adap_kl_ctrl": False, "kl_penalty_coef": 0.05}, 0.05, 6.0, 10_000, "fixed"),
        ({"kl_target": 1.0}, 0.01, 1.0, 10_000, "adaptive"),
        ({"kl_penalty_coef": 0.0}, 0.0, 0.01, 10_000, "fixed"),
        ({"init_kl_coef": 0.3, "kl_penalty_coef": 0.3}, 0.3, 6.0, 10_000, "adaptive"),
        # Given with the number of the default: given.
        ({"adap_kl_ctrl": False, "kl_penalty_coef": 0.01}, 0.01, 6.0, 10_000, "fixed"),
        ({"kl_penalty": "abs", "kl_target": 0.01}, 0.2, 0.01, 10_000, "adaptive"),
        ({"adap_kl_ctrl": True, "kl_penalty_coef": 0.01, "kl_target": 0.01}, 0.01, 0.01, 10_000, "adaptive"),
        ({"init_kl_coef": 0.2}, 0.2, 6.0, 10_000, "adaptive"),
        ({"target": 6}, 0.2, 6.0, 10_000, "adaptive"),
        ({"horizon": 10_000, "kl_penalty_coef": 0.01}, 0.01, 6.0, 10_000, "adaptive"),
    ],
)
def test_both_families_of_kl_names_are_understood(
    given: dict[str, Any], coef: float, target: float, horizon: int, controller: str
) -> None:
    kl = kl_config(PPOConfig(**given))
    assert (kl.coef, kl.target, kl.horizon, kl.controller) == (coef, target, horizon, controller)


@pytest.mark.parametrize(
    ("kind", "estimator"), [("kl", "k1"), ("mse", "k2"), ("abs", "abs"), ("full", "exact")]
)
def test_trls_kl_penalties_are_estimators(kind: str, estimator: str) -> None:
    assert run_config(kl_penalty=kind).algorithm.kl.estimator == estimator


def test_early_stopping_stops_at_trls_limit() -> None:
    assert run_config().algorithm.stop_at_approx_kl is None
    assert run_config(early_stopping=True, target_kl=0.2).algorithm.stop_at_approx_kl == pytest.approx(0.3)


def test_clip_param_and_clip_ratio_are_one_setting() -> None:
    config = PPOConfig(clip_param=0.3)
    assert (config.clip_ratio, config.clip_param) == (0.3, 0.3)
    config.clip_param = 0.1
    assert config.clip_ratio == 0.1
    with pytest.raises(BadInputError, match=r"clip_param=0\.3: clip_ratio=0\.1 is given too"):
        PPOConfig(clip_ratio=0.1, clip_param=0.3)
    with pytest.raises(BadInputError, match=r"clip_param=0\.3: clip_ratio=0\.2 is given too"):
        PPOConfig(clip_ratio=0.2, clip_param=0.3)
    assert PPOConfig(clip_ratio=0.3, clip_param=0.3).clip_ratio == 0.3
    assert PPOConfig(clip_param=PPOConfig(clip_param=0.3).clip_param).clip_ratio == 0.3
    assert dataclasses.replace(PPOConfig(clip_param=0.3), clip_ratio=0.1).clip_param == 0.1
    assert dataclasses.replace(PPOConfig(), clip_ratio=0.1).clip_ratio == 0.1


def test_a_configuration_can_be_copied_and_sent_elsewhere() -> None:
    config = PPOConfig(clip_param=0.3, gamma=0.5)
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
        assert other == config
    assert dataclasses.replace(config, gamma=0.6).gamma == 0.6


COPIES = [copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config)), dataclasses.replace, copy.copy]


@pytest.mark.parametrize("make", COPIES)
def test_what_was_given_stays_given_in_a_copy_and_nothing_else_becomes_so(make: Any) -> None:
    given = make(PPOConfig(adap_kl_ctrl=False, kl_penalty_coef=0.01))
    assert kl_config(given).coef == 0.01
    assert kl_config(make(PPOConfig(adap_kl_ctrl=False))).coef == 0.2
    later = make(PPOConfig(adap_kl_ctrl=False))
    later.kl_penalty_coef = 0.01
    assert kl_config(later).coef == 0.01


def test_defaults_read_as_the_numbers_they_are() -> None:
    config = PPOConfig()
    assert (repr(config.kl_penalty_coef), f"{config.init_kl_coef:g}") == ("0.01", "0.2")
    assert json.dumps(dataclasses.asdict(config)["kl_penalty_coef"]) == "0.01"
    assert config == PPOConfig(kl_penalty_coef=0.01, target=6.0, clip_ratio=0.2)


def test_a_default_that_is_given_after_the_start_counts_as_a_change() -> None:
    before = PPOConfig(adap_kl_ctrl=False)
    now = copy.deepcopy(before)
    assert changed_setting(now, before) is None
    now.kl_penalty_coef = 0.01
    assert changed_setting(now, before) == "kl_penalty_coef"


def test_an_environments_temperature_and_stops_become_the_runs() -> None:
    place = dataclasses.replace(PLACE, environment=EnvironmentConfig(), temperature=1.3, stop=("\n",))
    rollout = run_config(place).rollout
    assert (rollout.temperature, rollout.stop, rollout.environment) == (1.3, ("\n",), EnvironmentConfig())


def test_prompts_get_the_room_that_responses_leave() -> None:
    place = dataclasses.replace(PLACE, max_positions=300)
    assert run_config(place).data.max_prompt_tokens == 300 - 128
    assert run_config(dataclasses.replace(PLACE, max_positions=None)).data.max_prompt_tokens == 512


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 1.5}, "PPOConfig.gamma=1.5"),
        ({"gamma": float("nan")}, "PPOConfig.gamma=nan"),
        ({"learning_rate": "1e-5"}, "PPOConfig.learning_rate='1e-5'"),
        ({"batch_size": 0}, "PPOConfig.batch_size=0"),
        ({"batch_size": 16.0}, "PPOConfig.batch_size=16.0"),
        ({"temperature": 0.0}, "PPOConfig.temperature=0.0"),
        ({"clip_ratio": 0.0}, "PPOConfig.clip_ratio=0.0"),
        ({"kl_horizon": 0}, "PPOConfig.kl_horizon=0"),
        ({"kl_penalty": "k9"}, "kl_penalty='k9'"),
        ({"kl_penalty_coef": 0.1, "init_kl_coef": 0.3}, "two names of one setting"),
        ({"kl_penalty_coef": 0.01, "init_kl_coef": 0.2}, "two names of one setting"),
        ({"backend": "local", "cluster": "10.0.0.1:6379"}, "PPOConfig.cluster='10.0.0.1:6379'"),
        ({"settings": {"cluster.backend": "local"}, "cluster": "auto"}, "PPOConfig.cluster='auto'"),
        ({"device": "tpu"}, "PPOConfig.device='tpu'"),
        ({"backend": "slurm"}, "PPOConfig.backend='slurm'"),
        ({"bf16": "yes"}, "PPOConfig.bf16='yes'"),
        ({"max_new_tokens": 2000}, "has 1024 positions"),
        ({"max_prompt_length": 1000}, "Give at most 896"),
        ({"settings": {"run.stepz": 3}}, "stepz"),
        ({"settings": {"run.steps": "x"}}, "run.steps"),
        ({"settings": ["run.steps"]}, "PPOConfig.settings"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        run_config(**settings)


def test_a_misspelt_setting_is_refused() -> None:
    config = PPOConfig()
    with pytest.raises(BadInputError, match="learning_rat"):
        config.learning_rat = 1.0
    with pytest.raises(TypeError):
        PPOConfig(learning_rat=1.0)  # type: ignore[call-arg]
