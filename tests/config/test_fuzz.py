"""Whatever the text or the data: a RunConfig, or BadInputError; never another exception."""

import copy

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_cluster.config.checks.run import find_problems
from rl_cluster.config.planning.machine import GIB, Machine
from rl_cluster.config.planning.plan import make_plan
from rl_cluster.config.reading.load import apply_override, parse_config
from rl_cluster.config.reading.schema import paths
from rl_cluster.config.reading.yaml_text import parse_yaml
from rl_cluster.config.run import RunConfig
from rl_cluster.errors import BadInputError
from tests.common.settings import BASE

MACHINES = (
    Machine(cores=2, memory=24 * GIB, gpus=0, gpu_memory=0),
    Machine(cores=16, memory=64 * GIB, gpus=8, gpu_memory=80 * GIB, num_nodes=2),
)
PATHS = sorted(set(paths(RunConfig)))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["ppo", "rloo", "reinforce", "math", "jsonl", "cuda", "ipc", "nccl", "", "all-linear"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


def put(data, path, value):
    node = data
    *parents, last = path.split(".")
    for key in parents:
        if not isinstance(node.get(key), dict):
            node[key] = {}
        node = node[key]
    node[last] = value


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(PATHS), VALUES), min_size=1, max_size=4), st.sampled_from(MACHINES))
def test_any_settings_give_a_plan_or_bad_input(changes, machine):
    data = copy.deepcopy(BASE)
    for path, value in changes:
        put(data, path, value)
    try:
        config = parse_config(data)
    except BadInputError:
        return
    if not list(find_problems(config, machine)):
        plan = make_plan(config, machine)
        for node in range(machine.num_nodes):
            assert sum(w.num_cpus for w in plan.workers if w.node == node) <= machine.cores + 1e-9


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(alphabet=st.sampled_from(list("abc:{}[]-,'\"#&*!|>%@ \n\t.=01e?\\~\x00é")), max_size=40))
def test_any_text_is_yaml_or_bad_input(text):
    try:
        parse_yaml(text, "text")
        apply_override({"a": [1]}, text)
    except BadInputError:
        pass
