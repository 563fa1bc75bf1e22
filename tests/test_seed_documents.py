"""Every code block of the source documents runs as written, the import path aside (see substitutions.py)."""

from __future__ import annotations

import gc
import json
import math
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.seed_documents.stage import SETUP, save_data
from tests.seed_documents.substitutions import FLAGS_ONLY, MODELS, NOT_RUN, substitute

ROOT = Path(__file__).parents[1]
DOCUMENTS = Path(__file__).parent / "seed_documents"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NAMES = sorted(SETUP)


def blocks_of(document: str) -> list[tuple[str, str]]:
    """(language, code) of each block; a long document goes on in a second file."""
    parts = sorted(DOCUMENTS.glob(f"{document}*.md"))
    return BLOCK.findall("".join(part.read_text(encoding="utf-8") for part in parts))


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with the data that the command lines read."""
    save_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    torch.manual_seed(0)
    yield tmp_path
    sys.modules.pop("my_envs.hotel_env", None)
    sys.modules.pop("my_envs", None)
    gc.collect()


def check_page(names: dict[str, Any], number: int) -> None:
    """What the page promises about the block that has just run."""
    if number == 3:
        metrics = names["metrics"]
        assert {len(metrics[name]) for name in ("policy_loss", "value_loss", "rewards", "kl_coef")} == {2}
        assert all(math.isfinite(value) for value in [*metrics["policy_loss"], *metrics["kl_divergence"]])
    if number == 5:
        assert names["metrics"]["loss"][0] == pytest.approx(math.log(2), abs=1e-3)
        assert len(names["dataset"]) == 2
    if number == 9:
        score, loss = names["preference_score"], names["loss"]
        expected = torch.nn.functional.binary_cross_entropy_with_logits(score.squeeze(-1), names["labels"])
        assert score.shape == (2, 1)
        assert loss.ndim == 0 and torch.isfinite(loss) and torch.isfinite(expected)
    if number == 10:
        rewards, combined = names["outputs"]["rewards"], names["outputs"]["combined_reward"]
        weighted = rewards @ torch.tensor([0.5, 0.3, 0.2])
        assert torch.allclose(combined.squeeze(-1), weighted, atol=1e-6)
        assert len(names["per_objective_losses"]) == 3
    if number == 13:
        assert names["result"].metrics["reward_correctness"] == 1.0
        assert names["result"].metrics["reward_formatting"] == 0.5
        assert names["result"].metrics["reward_total"] == pytest.approx(1.05)
    if number == 14:
        assert names["result2"].reward > 0, "the preference model likes the longer first response"
    if number == 16:
        assert names["result"].loss == pytest.approx(math.log(len(names["tokenizer"])), rel=0.05)
    if number == 18:
        assert torch.isfinite(names["ref_future"].result()["logprobs"]).all()
    if number == 19:
        assert set(names["checkpoint_info"]) == {"path", "model_path", "optimizer_path", "state_path"}
    if number == 20:
        assert len(names["samples"]["tokens"]) == len(names["samples"]["logprobs"])


def check_readme(names: dict[str, Any], number: int) -> None:
    if number == 4:
        env = names["MyCustomEnv"]()
        assert env.reset() == "the observation"
        assert (env.step(1).reward, env.step(1).done) == (1.5, True)
    if number == 5:
        loss = names["MyCustomLoss"]()(torch.zeros(1, 2), torch.zeros(1, 2))
        assert float(loss) == 0.25
    if number == 6:
        assert len(names["model"]["rewards"]) == 1, "PPO's history, whose .model is the trained model"
        assert isinstance(names["model"].model, torch.nn.Module)
    if number == 9:
        assert (names["config"].clip_ratio, names["config"].batch_size) == (0.3, 4)
    if number == 10:
        assert names["better_reward"]("p", "four", "p four") == 4.5
        assert names["config"].entropy_coef == 0.02


def check_blog(names: dict[str, Any], number: int) -> None:
    if number == 1:
        assert names["rewards"].tolist() == [3.0, 4.0, 5.0, 1.0]
        assert len(names["response_tensors"]) == 4


def check_rloo(names: dict[str, Any], number: int) -> None:
    names["test_rloo_reward"]()


CHECKS: dict[str, Callable[[dict[str, Any], int], None]] = {
    "ai_training_pt": check_page,
    "ai_training_en": check_page,
    "autotrain_readme": check_readme,
    "trl_ppo_blog": check_blog,
    "trl_rloo": check_rloo,
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("google/gemma-2-2b", "gemma2"),
        ("gpt2", "gpt2"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "qwen2"),
        ("EleutherAI/pythia-14m", "gpt_neox"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "llama"),
        ("bert-base-uncased", "bert"),
    ],
)
def test_a_stand_in_has_the_architecture_of_the_model_it_stands_for(
    name: str, kind: str, models: Path
) -> None:
    config = json.loads((models / MODELS[name] / "config.json").read_text())
    assert config["model_type"] == kind
    if kind == "gemma2":
        assert config["attn_logit_softcapping"] and config["final_logit_softcapping"]


@pytest.mark.parametrize("document", NAMES)
def test_python_blocks_run_in_order(document: str, models: Path, desk: Path) -> None:
    # Data classes look their module up by name.
    names: dict[str, Any] = {"__name__": "__main__"}
    ran = 0
    for number, (language, code) in enumerate(blocks_of(document)):
        setup = SETUP[document].get(number)
        if setup is not None:
            names.update(setup())
        if language != "python" or (document, number) in NOT_RUN:
            continue
        exec(compile(substitute(code, models), f"{document}, block {number}", "exec"), names)
        CHECKS[document](names, number)
        ran += 1
    for name in ("trainer", "ppo_trainer", "client", "pipeline"):
        close = getattr(names.get(name), "close", None) or getattr(names.get(name), "shutdown", None)
        if close is not None:
            close()
    assert ran >= 1


def command_lines() -> list[tuple[str, int, str]]:
    """(document, block, command) of every shell block that can run; comments left out, lines joined."""
    found = []
    for document in NAMES:
        for number, (language, code) in enumerate(blocks_of(document)):
            if language != "shell" or (document, number) in NOT_RUN:
                continue
            text = re.sub(r"^\s*#.*\n", "", code, flags=re.MULTILINE).replace("\\\n", " ")
            found += [(document, number, line) for line in text.splitlines() if line.strip()]
    return found


def test_command_lines_plan_what_they_say(models: Path, desk: Path) -> None:
    """`aitraining` is called `rl-cluster` here; --dry-run checks everything and starts nothing."""
    from typer.testing import CliRunner

    from rl_cluster.cli.app import app

    runner, trainers = CliRunner(), []
    for document, number, line in command_lines():
        program, *words = shlex.split(substitute(line, models))
        if program != "aitraining":
            continue
        done = runner.invoke(app, [*words, "--device", "cpu", "--dry-run"], catch_exceptions=True)
        assert done.exit_code == 0, (document, number, line, done.exception, done.output)
        trainers.append(words[words.index("--trainer") + 1])
        assert "learner-0" in done.output
    assert sorted(trainers) == ["dpo", "dpo", "grpo", "ppo", "ppo", "reward", "reward"]


def test_rloo_command_lines_are_read_by_the_argument_parser(models: Path, desk: Path) -> None:
    """TRL's example scripts: their flags are fields of RLOOConfig, but for the script's own four."""
    from transformers import HfArgumentParser

    from rl_cluster import RLOOConfig

    own = {"--dataset_name", "--dataset_train_split", "--dataset_test_split", "--model_name_or_path"}
    lines = [line for document, _, line in command_lines() if document == "trl_rloo"]
    assert len(lines) == 2
    for line in lines:
        words = shlex.split(line)
        start = next(i for i, word in enumerate(words) if word.startswith("--") and word != "--config_file")
        config, rest = HfArgumentParser(RLOOConfig).parse_args_into_dataclasses(
            words[start:], return_remaining_strings=True
        )
        assert {word for word in rest if word.startswith("--")} <= own
        assert config.learning_rate == 3e-6
        assert config.missing_eos_penalty == 1.0


def test_the_rloo_script_of_the_page_trains_and_saves(models: Path, desk: Path) -> None:
    lines = [
        line for _, _, line in command_lines() if line.startswith("python examples/scripts/rloo/rloo.py")
    ]
    assert len(lines) == 1
    script, *words = shlex.split(substitute(lines[0], models))[1:]
    trainer = runpy.run_path(str(ROOT / script))["main"](words)
    assert trainer.state.global_step >= 1
    assert (desk / "models/minimal/rloo/model.safetensors").is_file()


def test_every_exception_names_a_block_that_exists() -> None:
    for document, number in [*NOT_RUN, *FLAGS_ONLY]:
        assert number < len(blocks_of(document))
