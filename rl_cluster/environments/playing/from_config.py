"""The environment settings of a command line or trainer config in, the environment out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_cluster.environments.playing.episode import RLEnvironment
from rl_cluster.environments.playing.reward_calls import RewardFunction
from rl_cluster.environments.ready.multi_objective import MultiObjectiveRewardEnv
from rl_cluster.environments.ready.preference import PreferenceComparisonEnv
from rl_cluster.environments.ready.text_generation import TextGenerationEnv, words_per_hundred
from rl_cluster.errors import BadInputError
from rl_cluster.rewards.loading import load_function

Settings = dict[str, Any]


def create_rl_environment(config: Any, tokenizer: Any, prompts: Sequence[str]) -> RLEnvironment | None:
    """The environment that `config` asks for; None where its rl_env_type is empty.

    config: any object with these attributes, of which only the first must be there:
    rl_env_type: "text_generation", "multi_objective" or "preference_comparison".
    rl_env_config: a dict or JSON text. text_generation: stop_sequences, reward_fn; multi_objective: also
    reward_components (required) and reward_weights; preference_comparison: preference_model,
    human_feedback_fn, pairs_path. Functions may be given as `package.module:function`, a preference model as
    the path of a sequence-classification checkpoint. A component may be {"type": "length"}, {"type":
    "keyword", "keywords": [...]} or {"type": "nonempty"}, the default.
    rl_reward_weights: a dict or JSON text, in place of reward_weights. rl_max_new_tokens, rl_temperature.
    """
    # The config belongs to somebody else (a command line, another library): what it lacks has a default.
    kind = getattr(config, "rl_env_type", None)
    if not kind:
        return None
    if str(kind).lower() not in MAKERS:
        raise BadInputError(f"Invalid rl_env_type: {kind!r}. Must be one of: {', '.join(MAKERS)}.")
    make, allowed = MAKERS[str(kind).lower()]
    given = parse_json("rl_env_config", getattr(config, "rl_env_config", None))
    unknown = [key for key in given if key not in allowed]
    if unknown:
        raise BadInputError(
            f"rl_env_config[{unknown[0]!r}]: {kind} takes no such setting, but: {', '.join(allowed)}."
        )
    max_length = getattr(config, "rl_max_new_tokens", None)
    temperature = getattr(config, "rl_temperature", None)
    given["max_length"] = 128 if max_length is None else max_length
    given["temperature"] = 1.0 if temperature is None else temperature
    weights = parse_json("rl_reward_weights", getattr(config, "rl_reward_weights", None))
    return make(tokenizer, prompts, given, weights)


def parse_json(field: str, value: Any) -> Settings:
    """A dict, a JSON object as text, or nothing."""
    if value is None or value == "":
        return {}
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise BadInputError(f"Failed to parse {field}: {error}. The value was {value!r:.80}.") from error
    if not isinstance(parsed, Mapping):
        raise BadInputError(f"Failed to parse {field}: {value!r:.80} is no JSON object (a dict is needed).")
    return dict(parsed)


def _text_generation(
    tokenizer: Any, prompts: Sequence[str], given: Settings, weights: Settings
) -> RLEnvironment:
    _refuse_weights(weights)
    reward_fn = given.pop("reward_fn", None)
    return TextGenerationEnv(
        tokenizer, prompts, reward_fn=None if reward_fn is None else _function(reward_fn), **given
    )


def _multi_objective(
    tokenizer: Any, prompts: Sequence[str], given: Settings, weights: Settings
) -> RLEnvironment:
    components = given.pop("reward_components", None)
    if not isinstance(components, Mapping) or not components:
        raise BadInputError(
            "rl_env_config: multi_objective needs 'reward_components', for example "
            '{"reward_components": {"correctness": {"type": "keyword", "keywords": ["yes"]}}}.'
        )
    inside = given.pop("reward_weights", None)
    if inside and weights and inside != weights:
        raise BadInputError(
            f"rl_env_config has reward_weights={inside}, rl_reward_weights={weights}: give one."
        )
    made = {name: _component(name, specification) for name, specification in components.items()}
    return MultiObjectiveRewardEnv(tokenizer, prompts, made, inside or weights or None, **given)


def _preference_comparison(
    tokenizer: Any, prompts: Sequence[str], given: Settings, weights: Settings
) -> RLEnvironment:
    _refuse_weights(weights)
    # The environment is handed whole responses: whoever samples them has the temperature.
    del given["temperature"]
    model, feedback = given.pop("preference_model", None), given.pop("human_feedback_fn", None)
    return PreferenceComparisonEnv(
        tokenizer,
        prompts,
        preference_model=_load_classifier(model) if isinstance(model, str) else model,
        human_feedback_fn=None if feedback is None else _function(feedback),
        **given,
    )


Maker = Callable[[Any, Sequence[str], Settings, Settings], RLEnvironment]
MAKERS: dict[str, tuple[Maker, tuple[str, ...]]] = {
    "text_generation": (_text_generation, ("stop_sequences", "reward_fn")),
    "multi_objective": (_multi_objective, ("stop_sequences", "reward_components", "reward_weights")),
    "preference_comparison": (
        _preference_comparison,
        ("preference_model", "human_feedback_fn", "pairs_path"),
    ),
}
"""rl_env_type -> (how to make it, the settings that rl_env_config may have)."""


def _refuse_weights(weights: Settings) -> None:
    if weights:
        raise BadInputError(f"rl_reward_weights={weights}: only rl_env_type=multi_objective has components.")


def _function(value: Any) -> Any:
    return load_function(value) if isinstance(value, str) else value


def _component(name: str, specification: Any) -> RewardFunction:
    if not isinstance(specification, Mapping):
        result: RewardFunction = _function(specification)
        return result
    kind = specification.get("type", "nonempty")
    keywords = specification.get("keywords", ())
    unknown = set(specification) - {"type", "keywords"}
    if kind not in COMPONENTS or unknown:
        problem = f"has {sorted(unknown)[0]!r}" if unknown else f"has the type {kind!r}"
        raise BadInputError(
            f"reward_components[{name!r}] {problem}: give a type of {', '.join(COMPONENTS)}, and keywords."
        )
    if (kind == "keyword") != bool(keywords) or isinstance(keywords, str):
        raise BadInputError(f"reward_components[{name!r}]: a list of keywords goes with type keyword only.")
    return COMPONENTS[kind](keywords)


def _count_keywords(keywords: Sequence[str]) -> RewardFunction:
    return lambda prompt, generated, full_text: float(sum(word in generated for word in keywords))


def _nonempty(_: Sequence[str]) -> RewardFunction:
    return lambda prompt, generated, full_text: 0.5 if generated else 0.0


COMPONENTS: dict[str, Callable[[Sequence[str]], RewardFunction]] = {
    "length": lambda _: words_per_hundred,
    "keyword": _count_keywords,
    "nonempty": _nonempty,
}
"""type -> keywords -> reward: words / 100, number of keywords that appear, 0.5 unless empty."""


def _load_classifier(path: str) -> Any:
    if path.startswith(("/", ".")) and not Path(path).is_dir():
        raise BadInputError(f"rl_env_config: preference_model={path!r}: there is no such folder.")
    from rl_cluster.rewards.reward_model import load_classifier  # takes seconds to import

    return load_classifier(path, f"rl_env_config: preference_model={path!r}").eval()
