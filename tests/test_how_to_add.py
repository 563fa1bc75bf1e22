"""ARCHITECTURE.md's «how to add»: in a copy of the tree, by the files that it names and no other."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()


class Copy:
    """rl_cluster, to be changed; `touched`: what was."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.touched: set[str] = set()
        shutil.copytree(
            ROOT / "rl_cluster", folder / "rl_cluster", ignore=shutil.ignore_patterns("__pycache__")
        )

    def write(self, path: str, text: str) -> None:
        self.touched.add(path)
        (self.root / path).write_text(text)

    def insert(self, path: str, before: str, text: str) -> None:
        """text in front of the first `before`."""
        old = (self.root / path).read_text()
        assert before in old, f"{path} has no {before!r}: change this test with it"
        self.write(path, old.replace(before, text + before, 1))

    def run(self, program: str) -> str:
        """What it prints, with the copy first on Python's path."""
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(self.root)!r})\n{program}"],
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def test_a_kind_of_scorer_is_one_file_and_its_class_in_the_table(tree: Copy) -> None:
    tree.write(
        "rl_cluster/rewards/brevity.py",
        '"""Responses in, a point for each that is short, out."""\n\n\n'
        "def brevity(prompts, responses, metadata, *, limit):\n"
        "    return [float(len(text) <= limit) for text in responses]\n",
    )
    tree.insert(
        "rl_cluster/config/reward.py",
        "ScorerConfig = Annotated[",
        'class BrevityScorer(_Scorer):\n    """1 for at most `limit` characters."""\n\n'
        '    kind: Literal["brevity"] = "brevity"\n    limit: PositiveInt = 3\n'
        '    built_in: ClassVar[str | None] = "rl_cluster.rewards.brevity:brevity"\n\n\n',
    )
    tree.insert("rl_cluster/config/reward.py", "    | EnvironmentScorer,", "    | BrevityScorer\n")
    scores = tree.run(
        "from rl_cluster.config.reward import RewardConfig\n"
        "from rl_cluster.rewards.loading import check_metadata, make_function, scorer_names\n"
        "from rl_cluster.rewards.local_scorers import make_local_scorers\n"
        "scorers = [{'kind': 'brevity', 'limit': 2}]\n"
        "rewards = RewardConfig.model_validate({'scorers': scorers}, strict=False)\n"
        "check_metadata(rewards.scorers, [])\n"
        "assert [s.name for s in make_local_scorers(rewards, None)] == ['brevity']\n"
        "print(make_function(rewards.scorers[0])(['?'] * 2, ['ab', 'abc'], [{}] * 2))"
    )
    assert scores == "[1.0, 0.0]"
    assert tree.touched == {"rl_cluster/rewards/brevity.py", "rl_cluster/config/reward.py"}


def test_a_setting_of_the_policys_loss_is_a_field_and_its_use(tree: Copy) -> None:
    tree.insert(
        "rl_cluster/config/algorithm.py",
        "    entropy_coef: NonNegativeFloat = 0.0\n",
        '    scale: PositiveFloat = 1.0\n    """The whole loss times this."""\n',
    )
    tree.insert(
        "rl_cluster/algorithms/objectives.py",
        '    columns["policy_loss_sum"] = loss',
        "    loss = loss * step.loss.scale\n",
    )
    (tree.root / "recipe.yaml").write_text(
        "model: {path: unused}\ndata: {train: {source: addition}}\n"
        "rewards: {scorers: [{kind: exact_match}]}\nalgorithm: {name: grpo, loss: {clip_low: 0.1}}\n"
    )
    losses = tree.run(
        "import torch\n"
        "from rl_cluster.algorithms.inputs import LossInputs\n"
        "from rl_cluster.algorithms.table import compute_loss, policy_step\n"
        "from rl_cluster.config.reading.load import load_config\n"
        "for scale in (1.0, 2.5):\n"
        "    config = load_config('recipe.yaml', [f'algorithm.loss.scale={scale}'])\n"
        "    step = policy_step(config.algorithm, temperature=1.0, kl_coef=0.0)\n"
        "    inputs = LossInputs(logprobs=torch.tensor([-1.0, -2.0]), entropy=torch.zeros(2),\n"
        "        weights=torch.tensor([0.5, 0.5]), row=torch.tensor([0, 1]), num_rows=2,\n"
        "        advantages=torch.tensor([1.0, 3.0]))\n"
        "    print(float(compute_loss(step, inputs).loss))"
    )
    first, second = map(float, losses.split())
    assert (first, second) == pytest.approx((-2.0, -5.0)), "−A at a ratio of 1, half of each row"
    assert len(tree.touched) == 2


def test_an_environment_is_a_file_of_ones_own(tree: Copy) -> None:
    tree.write(
        "my_game.py",
        "class Game:\n"
        "    def __init__(self, tokenizer, prompts=('?',)):\n        self.tokenizer = tokenizer\n"
        "    def reset(self):\n        raise NotImplementedError\n"
        "    def step(self, action):\n        raise NotImplementedError\n",
    )
    made = tree.run(
        "from rl_cluster.config.environment import EnvironmentConfig\n"
        "from rl_cluster.rewards.loading import load_function\n"
        "config = EnvironmentConfig(function='my_game.py:Game')\n"
        "from rl_cluster.environments.playing.for_runs import environment_factory\n"
        "print(type(environment_factory(load_function(config.function))('tokenizer')).__name__)"
    )
    assert made == "Game"
    assert tree.touched == {"my_game.py"}


def test_the_tree_names_every_room_and_every_module_at_the_root() -> None:
    tree = PAGE[PAGE.index("## The tree") : PAGE.index("Imports go down only:")]
    for path in sorted((ROOT / "rl_cluster").rglob("__init__.py")):
        room = path.parent.name
        assert re.search(rf"(?<![\w]){room}/", tree), f"ARCHITECTURE.md's tree lacks {path.parent}"
    for path in sorted((ROOT / "rl_cluster").glob("[!_]*.py")):
        assert path.name in tree, f"ARCHITECTURE.md does not say why {path.name} is at the root"


def test_the_tree_names_nothing_that_is_not_there() -> None:
    tree = PAGE[PAGE.index("## The tree") : PAGE.index("Imports go down only:")]
    rooms = {path.parent.name for path in ROOT.glob("rl_cluster/**/__init__.py")} | {
        path.name for path in ROOT.iterdir() if path.is_dir()
    }
    rooms |= {"gpu", "stack"}
    assert set(re.findall(r"(\w+)/(?![\w{])", tree)) <= rooms
