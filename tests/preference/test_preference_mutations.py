"""Every committed mutation of a preference loss makes the test named beside it fail."""

from pathlib import Path

import pytest

from bench.mutation import Mutation, is_killed, load_mutations


@pytest.mark.parametrize("mutation", load_mutations(Path(__file__).with_name("mutations.py")), ids=str)
def test_the_tests_notice_a_wrong_preference_loss(mutation: Mutation) -> None:
    assert is_killed(mutation), f"{mutation.test} does not notice"
