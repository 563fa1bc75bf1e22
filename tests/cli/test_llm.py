"""`rl-cluster llm`: what the flags become, and what is refused in which words."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rl_cluster.cli.llm_flags import ACTS_FOR, Flags, flag_name
from rl_cluster.cli.llm_labels import pairs_from_labels

Llm = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[2]
TRAIN = "--train --model tiny --device cpu --dry-run"


def planned(out: str) -> dict:
    """The configuration that --dry-run has printed."""
    return yaml.safe_load(out.split("─\n", 1)[1].split("\n\nWhat follows")[0])


def test_help_is_grouped_names_every_flag_and_imports_nothing_heavy() -> None:
    program = (
        "import sys; sys.argv = ['rl-cluster', 'llm', '--help']\n"
        "from rl_cluster.cli import main\n"
        "try: main()\n"
        "except SystemExit as exit: assert exit.code in (0, None), exit.code\n"
        "heavy = {'torch', 'vllm', 'ray', 'transformers', 'datasets', 'numpy'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={"COLUMNS": "300", "PATH": "/usr/bin"},
    )
    assert "heavy: []" in done.stdout, done.stderr
    for panel in (
        "What to do",
        "Model",
        "Data",
        "Training",
        "Preferences",
        "Reinforcement",
        "Output",
        "Machine",
    ):
        assert f"─ {panel}" in done.stdout
    for name in ACTS_FOR:
        assert flag_name(name) in done.stdout


DPO = {
    "objective": {"name": "dpo", "beta": 0.3, "label_smoothing": 0.1},
    "data": {
        "source": "jsonl",
        "path": "renamed.jsonl",
        "prompt_column": "question",
        "chosen_column": "good",
    },
    "batch": {"rows_per_step": 6},
    "optimizer": {"learning_rate": 0.002, "schedule": "cosine"},
    "cluster": {"backend": "local"},
    "run": {"epochs": 3, "seed": 7},
    "model": {"path": "tiny", "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}, "dtype": "bfloat16"},
}
GRPO = {
    "algorithm": {
        "name": "grpo",
        "num_mini_batches": 2,
        "kl": {"coef": 0.1},
        "loss": {"aggregation": "constant"},
    },
    "batch": {"prompts_per_step": 4, "samples_per_prompt": 4},
    "rollout": {"max_new_tokens": 5, "temperature": 0.9},
    "run": {"steps": 5},
    "data": {"train": {"path": "data/train.jsonl", "source": "jsonl"}, "held_out": 0},
    "rewards": {"scorers": [{"kind": "exact_match", "answer_key": "answer"}]},
}
PPO = {
    "algorithm": {
        "name": "ppo",
        "gamma": 0.9,
        "num_epochs": 4,
        "kl": {"coef": 0.05},
        "loss": {"clip_high": 0.3},
    },
    "batch": {"samples_per_prompt": 1},
    "optimizer": {"warmup_steps": 4},
    "rewards": {"scorers": [{"kind": "reward_model", "path": "tiny"}]},
    "cluster": {"backend": "ray"},
}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--trainer dpo --data-path renamed.jsonl --prompt-text-column question --text-column good "
            "--rejected-text-column bad --dpo-beta 0.3 --label-smoothing 0.1 --batch-size 3 "
            "--gradient-accumulation 2 --lr 2e-3 --scheduler cosine --epochs 3 --seed 7 --peft --lora-r 4 "
            "--target-modules q_proj,v_proj --mixed-precision bf16",
            DPO,
        ),
        (
            "--trainer grpo --answer-column answer --rl-loss-type dr_grpo --rl-max-new-tokens 5 "
            "--rl-temperature 0.9 --batch-size 4 --epochs 2 --max-prompt-length 16 "
            "algorithm.num_mini_batches=2",
            GRPO,
        ),
        (
            "--trainer ppo --reward-model tiny --rl-gamma 0.9 --rl-clip-range 0.3 --backend ray "
            "--max-steps 10 --warmup-ratio 0.1 --rl-max-new-tokens 5 --max-prompt-length 16",
            PPO,
        ),
        (
            "--trainer kto --data-path kto.csv --kto-beta 0.2",
            {"data": {"source": "csv"}, "objective": {"beta": 0.2}},
        ),
        ("--data-path chats.jsonl", {"objective": {"name": "sft", "rows": "messages"}}),
        ("--data-path sft.jsonl", {"objective": {"rows": "completion"}}),
        ("--data-path texts.jsonl", {"objective": {"rows": "text"}}),
        (
            "--data-path texts.jsonl --valid-split texts.jsonl --eval-steps 2",
            {"data": {"eval_path": "texts.jsonl"}, "eval": {"every": 2}},
        ),
    ],
)
def test_flags_become_settings(llm: Llm, words: str, expected: dict) -> None:
    code, out, err = llm(f"{TRAIN} {words}")
    assert code == 0, err
    _contains(planned(out), expected, "")
    assert "learner-0" in out


def _contains(found: object, expected: object, place: str) -> None:
    if isinstance(expected, dict):
        assert isinstance(found, dict), place
        for key, value in expected.items():
            _contains(found[key], value, f"{place}.{key}")
    elif isinstance(expected, list) and expected and isinstance(expected[0], dict):
        for number, entry in enumerate(expected):
            _contains(found[number], entry, f"{place}.{number}")  # type: ignore[index]
    elif place.endswith("path"):
        assert found == str(Path(str(expected)).absolute()), place
    else:
        assert found == (pytest.approx(expected) if isinstance(expected, float) else expected), place


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--model tiny", ["--train"]),
        ("--train --trainer dpo --data-path pairs.jsonl", ["--model"]),
        (f"{TRAIN} --trainer dpoo", ["--trainer dpoo", "Did you mean dpo?"]),
        (f"{TRAIN} --trainer ppo --dpo-beta 0.1", ["--dpo-beta 0.1", "it is for dpo"]),
        (
            f"{TRAIN} --trainer dpo --data-path pairs.jsonl --dpo-beta -1",
            ["objective.beta", "-1", "--dpo-beta"],
        ),
        (f"{TRAIN} --trainer dpo --data-path no.jsonl", ["--data-path no.jsonl", "no such file"]),
        (f"{TRAIN} --trainer dpo --data-path prompts.jsonl", ["--text-column chosen", "prompt, answer"]),
        (f"{TRAIN} --trainer kto --data-path pairs.jsonl", ["--text-column completion", "chosen"]),
        (f"{TRAIN} --data-path pairs.jsonl", ["sft reads messages", "prompt, chosen, rejected"]),
        (f"{TRAIN} --data-path data --train-split test", ["'test'", "train.jsonl"]),
        (f"{TRAIN} --trainer rloo", ["nothing scores", "--reward-model"]),
        (
            f"{TRAIN} --trainer rloo --reward-model ./none",
            ["rewards.scorers.0.path", "--reward-model", "no such"],
        ),
        (f"{TRAIN} --trainer grpo --answer-column answer --rl-top-k 50", ["rollout.top_k", "--rl-top-k"]),
        (f"{TRAIN} --trainer grpo --answer-column a", ["--answer-column a", "prompt, answer"]),
        (f"{TRAIN} --trainer grpo --rl-env-module m", ["--rl-env-class"]),
        (f"{TRAIN} --trainer grpo --rl-env-module no_such --rl-env-class C", ["no_such", "No module"]),
        (
            f"{TRAIN} --trainer grpo --answer-column answer --rl-loss-type huber",
            ["--rl-loss-type huber", "dapo"],
        ),
        (
            f"{TRAIN} --trainer grpo --answer-column answer --rl-loss-type cispo --rl-clip-range 0.2",
            ["--rl-clip-range 0.2", "cispo", "leave it out"],
        ),
        (f"{TRAIN} --trainer grpo --rl-env-type maze", ["Invalid rl_env_type", "maze"]),
        (f"{TRAIN} --data-path texts.jsonl --lora-r 8", ["--lora-r 8", "--peft"]),
        (f"{TRAIN} --data-path texts.jsonl optimizer.lr=1", ["optimizer.lr"]),
        (f"{TRAIN} --data-path texts.jsonl --no-such-flag", ["No such option"]),
        ("--train --resume /no/run", ["not a run folder"]),
        ("--train --resume runs/x --lr 1", ["--lr 1", "KEY.PATH=VALUE"]),
        (f"{TRAIN} --data-path texts.jsonl --step 1", ["--step 1", "--resume RUN"]),
        (f"{TRAIN} --data-path texts.jsonl --force-changes", ["--force-changes", "--resume RUN"]),
        ("--train --resume runs/x --step -1", ["--step -1", "counted from 0"]),
    ],
)
def test_bad_input_names_flag_value_and_remedy_and_exits_with_2(
    llm: Llm, words: str, parts: list[str]
) -> None:
    code, _, err = llm(words)
    assert code == 2, err
    for part in parts:
        assert part in err
    assert "Traceback" not in err


def test_labels_become_pairs_within_a_prompt(tmp_path: Path) -> None:
    from rl_cluster.cli.llm_data import find_data

    rows = [
        ("p", "good", 2),
        ("p", "bad", 0),
        ("p", "fair", "1"),
        ("q", "x", True),
        ("q", "y", "false"),
        ("r", "z", 1),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "text": t, "label": n}) + "\n" for p, t, n in rows))
    made = pairs_from_labels(
        Flags(trainer="reward"), find_data(str(path), "train", tmp_path), tmp_path / "new"
    )
    pairs = [json.loads(line) for line in Path(made.path).read_text().splitlines()]
    assert [(pair["prompt"], pair["chosen"], pair["rejected"]) for pair in pairs] == [
        ("p", "good", "fair"),
        ("p", "fair", "bad"),
        ("q", "x", "y"),
    ]


def test_a_dry_run_and_a_refused_command_leave_nothing_behind(llm: Llm, llm_folder: Path) -> None:
    before = sorted(path.name for path in llm_folder.iterdir())
    words = "--train --model tiny --trainer reward --data-path labels.jsonl --project-name never"
    assert llm(f"{words} --dry-run")[0] == 0
    code, _, err = llm(f"{words} --lr -1")
    assert code == 2 and "optimizer.learning_rate is --lr" in err
    assert sorted(path.name for path in llm_folder.iterdir()) == before
