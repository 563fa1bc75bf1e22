"""A GRPO environment whose methods cannot be called as they will be is refused when it is handed over."""

import pytest

from rl_cluster.environments.playing.case_environment import check_case_environment
from rl_cluster.errors import BadInputError


class Right:
    def build_dataset(self, tokenizer): ...

    def score_episode(self, model, tokenizer, completion, case_idx, bonus=0.0): ...


class TooFew(Right):
    def score_episode(self, completion): ...


class TooMany(Right):
    def score_episode(self, model, tokenizer, completion, case_idx, extra): ...


class NoTokenizer(Right):
    def build_dataset(self): ...


@pytest.mark.parametrize(
    ("wrong", "name"),
    [(TooFew, "score_episode"), (TooMany, "score_episode"), (NoTokenizer, "build_dataset")],
)
def test_methods_are_bound_before_the_start(wrong, name) -> None:
    check_case_environment(Right())
    with pytest.raises(BadInputError, match=rf"{wrong.__name__}\.{name}\(.*is called as {name}\("):
        check_case_environment(wrong())
