"""rollout.environment: what cannot work is refused by name, and episodes count in the plan's lengths."""

import pytest

from rl_cluster.config.checks.run import check_config
from rl_cluster.config.planning.derive import derive
from rl_cluster.config.planning.machine import GIB, Machine
from rl_cluster.config.reading.load import parse_config
from rl_cluster.errors import BadInputError

LAPTOP = Machine(cores=2, memory=24 * GIB, gpus=0, gpu_memory=0)


def config(environment, scorer="environment", **rollout):
    return parse_config(
        {
            "model": {"scratch": {}},
            "data": {"train": {"source": "addition", "num_digits": 2}},
            "rewards": {"scorers": [{"kind": scorer}]},
            "rollout": {"max_new_tokens": 8, "environment": environment, **rollout},
            "batch": {"prompts_per_step": 2, "samples_per_prompt": 4},
        }
    )


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (None, 'rewards.scorers.0.kind = "environment": reads what rollout.environment pays'),
        ({"function": "nothing"}, 'rollout.environment.function = "nothing": is not an import path'),
        ({"function": "no/such.py:make"}, "there is no file no/such.py"),
        ({"options": {"a": 1}}, "are for rollout.environment.function, which is not set"),
        ({"max_episode_tokens": 4}, "max_episode_tokens = 4: is less than rollout.max_new_tokens = 8"),
        ({"max_episode_tokens": 252}, "with prompts of 6 tokens exceeds the model's 256 positions"),
    ],
)
def test_what_cannot_work_is_refused(environment, message):
    with pytest.raises(BadInputError) as caught:
        check_config(config(environment), LAPTOP)
    assert message in str(caught.value)


def test_an_environment_goes_with_any_scorer():
    check_config(config({}), LAPTOP)
    check_config(config({"max_episode_tokens": 250}, scorer="exact_match"), LAPTOP)


def test_the_lengths_of_the_plan_are_those_of_whole_episodes():
    one_response = derive(config({}), None)
    assert (one_response.max_sequence_tokens, one_response.max_generated_tokens_per_step) == (6 + 8, 8 * 8)
    episodes = derive(config({"max_episode_tokens": 30}), None)
    assert (episodes.max_sequence_tokens, episodes.max_generated_tokens_per_step) == (6 + 30, 8 * 30)
    assert episodes.max_tokens_per_step == 8 * 36
