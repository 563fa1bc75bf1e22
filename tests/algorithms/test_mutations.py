"""Every committed mutation of a formula makes the test named beside it fail."""

from pathlib import Path

import pytest

from bench.mutation import Mutation, is_killed, load_mutations

MUTATIONS = load_mutations(Path(__file__).with_name("mutations.py"))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_the_tests_notice_a_wrong_formula(mutation):
    assert is_killed(mutation), f"{mutation.test} does not notice"


def test_the_runner_tells_a_survivor_from_a_killed_mutant():
    module, test = "rl_cluster.algorithms.sampling", "tests/algorithms/test_sampling.py::"
    name = "test_pass_at_more_than_there_are_samples_is_refused"
    assert not is_killed(Mutation(module, "1.0 - k / np.arange", "2.0 - k / np.arange", test + name))
    assert is_killed(Mutation(module, "if not 1 <= k <= num_samples:", "if False:", test + name))


def test_the_runner_leaves_no_trace_of_a_mutant():
    import rl_cluster.algorithms.sampling as before

    is_killed(MUTATIONS[0])
    import rl_cluster.algorithms.sampling as after

    assert before is after
    assert after.pass_at_k(4, 2, 1) == pytest.approx(0.5)


def test_a_mutation_of_text_that_is_not_there_is_an_error():
    with pytest.raises(AssertionError, match="stands 0 times"):
        is_killed(Mutation("rl_cluster.algorithms.sampling", "no such text", "", "x::y"))
