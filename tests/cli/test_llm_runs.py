"""Whole `rl-cluster llm` runs in this process, on a tiny model: what they leave, and what comes of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

Llm = Callable[..., tuple[int, str, str]]
TRAIN = "--train --model tiny --device cpu --progress none --batch-size 3 --max-steps 2 --lr 1e-3 --log none"
ENVIRONMENT = """
class SumEnv:
    def build_dataset(self, tokenizer):
        return [{"prompt": f"{n}+1=", "case_idx": n} for n in range(4)]

    def score_episode(self, model, tokenizer, completion, case_idx):
        return float(completion.startswith(str(case_idx + 1)))
"""


@pytest.fixture(autouse=True)
def _clean(llm_folder: Path):
    yield
    for folder in llm_folder.glob("out*"):
        shutil.rmtree(folder)


def losses(folder: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if row.get(name) is not None]


def test_the_documents_chain_reward_model_then_ppo(llm: Llm, llm_folder: Path) -> None:
    code, _, err = llm(f"{TRAIN} --trainer reward --data-path labels.jsonl --project-name out-reward")
    assert code == 0, err
    config = json.loads((llm_folder / "out-reward" / "model" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    code, _, err = llm(
        f"{TRAIN} --trainer ppo --reward-model out-reward --rl-max-new-tokens 4 --max-prompt-length 16 "
        "--project-name out-ppo"
    )
    assert code == 0, err
    assert (llm_folder / "out-ppo" / "model" / "model.safetensors").is_file()
    assert len(losses(llm_folder / "out-ppo", "rewards/reward_model")) == 2


def test_an_environment_named_by_module_and_class_brings_prompts_and_rewards(
    llm: Llm, llm_folder: Path
) -> None:
    (llm_folder / "sum_envs.py").write_text(ENVIRONMENT)
    code, _, err = llm(
        f"{TRAIN} --trainer grpo --rl-env-module sum_envs --rl-env-class SumEnv --rl-max-new-tokens 3 "
        "--max-prompt-length 16 --project-name out-env"
    )
    assert code == 0, err
    rows = [
        json.loads(line) for line in (llm_folder / "out-env/start/prompts.jsonl").read_text().splitlines()
    ]
    assert [row["case_idx"] for row in rows] == [0, 1, 2, 3]
    scores = losses(llm_folder / "out-env", "rewards/SumEnv")
    assert len(scores) == 2 and all(0 <= score <= 1 for score in scores)


def test_an_environment_of_a_known_type_pays_for_the_prompts_of_the_data(llm: Llm, llm_folder: Path) -> None:
    settings = {
        "reward_components": {"one": {"type": "keyword", "keywords": ["1"]}, "any": {"type": "nonempty"}}
    }
    code, _, err = llm(
        f"{TRAIN} --trainer rloo --rl-env-type multi_objective --rl-max-new-tokens 3 --max-prompt-length 16 "
        "--project-name out-kind --rl-reward-weights",
        '{"one": 2.0, "any": 0.0}',
        "--rl-env-config",
        json.dumps(settings),
    )
    assert code == 0, err
    folder = llm_folder / "out-kind"
    paid, ones = losses(folder, "rewards/environment"), losses(folder, "rewards/environment/one")
    assert len(paid) == 2
    assert paid == pytest.approx([2 * value for value in ones])


def test_dpo_from_renamed_columns_and_resumed_for_more_steps(llm: Llm, llm_folder: Path) -> None:
    code, _, err = llm(
        f"{TRAIN} --trainer dpo --data-path renamed.jsonl --prompt-text-column question --text-column good "
        "--rejected-text-column bad --dpo-beta 0.5 --save-steps 1 --project-name out-dpo"
    )
    assert code == 0, err
    first = losses(llm_folder / "out-dpo", "train/loss")
    assert first[0] == pytest.approx(0.6931, abs=1e-3), "the reference is the model itself: log 2"
    code, _, err = llm("--train --resume out-dpo run.steps=3")
    assert code == 0, err
    assert len(losses(llm_folder / "out-dpo", "train/loss")) == 3


def test_llm_goes_on_from_the_step_and_with_the_changes_that_are_asked_for(
    llm: Llm, llm_folder: Path
) -> None:
    code, _, err = llm(
        f"{TRAIN} --trainer sft --data-path texts.jsonl --save-steps 1 --project-name out-step "
        "checkpoint.keep_last=5"
    )
    assert code == 0, err
    again = "--train --resume out-step --step 1"
    code, _, err = llm(f"{again} optimizer.betas=[0.5,0.9]")
    assert code == 2 and "optimizer.betas" in err
    code, _, err = llm("--train --resume out-step --step 7")
    assert code == 2 and "7" in err
    code, _, err = llm(f"{again} --force-changes optimizer.betas=[0.5,0.9]")
    assert code == 0, err
    starts = (llm_folder / "out-step" / "starts" / "starts.jsonl").read_text()
    assert json.loads(starts)["step"] == 1 and "optimizer.betas" in starts


@pytest.mark.stack
@pytest.mark.usefixtures("ray_session")
def test_the_same_command_trains_on_a_cluster(llm: Llm, llm_folder: Path) -> None:
    code, _, err = llm(
        f"{TRAIN} --trainer grpo --data-path prompts.jsonl --rl-env-type multi_objective "
        "--rl-max-new-tokens 3 --max-prompt-length 16 --project-name out-ray --backend ray "
        "rollout.kv_cache_gib=0.1 --rl-env-config",
        json.dumps({"reward_components": {"one": {"type": "keyword", "keywords": ["1"]}}}),
    )
    assert code == 0, err
    assert len(losses(llm_folder / "out-ray", "rewards/environment/one")) == 2
    assert (llm_folder / "out-ray" / "model" / "model.safetensors").is_file()
