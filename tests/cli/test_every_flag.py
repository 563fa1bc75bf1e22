"""Every flag of `rl-cluster llm` changes what is planned, is refused, or stands in the list of those without
effect; a flag that is given counts as given also with the value of its default."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from rl_cluster.cli.llm import run_dir
from rl_cluster.cli.llm_flags import ACTS_FOR, Flags, flag_name
from rl_cluster.trainers.without_effect import LLM

Llm = Callable[..., tuple[int, str, str]]
SFT = "--trainer sft --data-path texts.jsonl"
PAIRS = "--trainer dpo --data-path pairs.jsonl"
REWARD = "--trainer reward --data-path pairs.jsonl"
KTO = "--trainer kto --data-path kto.csv"
PPO = "--trainer ppo --data-path prompts.jsonl --answer-column answer"
GRPO = "--trainer grpo --data-path prompts.jsonl --answer-column answer"
ENV = "--rl-env-type multi_objective --rl-env-config " + shlex.quote(
    '{"reward_components": {"polite": {"type": "keyword", "keywords": ["1"]}}}'
)

CASES: dict[str, tuple[str, str]] = {
    "trainer": ("--data-path pairs.jsonl --trainer orpo", "--data-path pairs.jsonl --trainer dpo"),
    "model": (SFT, f"{SFT} --model other"),
    "model_ref": (PAIRS, f"{PAIRS} --model-ref other"),
    "mixed_precision": (SFT, f"{SFT} --mixed-precision bf16"),
    "peft": (SFT, f"{SFT} --peft"),
    "lora_r": (f"{SFT} --peft", f"{SFT} --peft --lora-r 4"),
    "lora_alpha": (f"{SFT} --peft", f"{SFT} --peft --lora-alpha 4"),
    "lora_dropout": (f"{SFT} --peft", f"{SFT} --peft --lora-dropout 0.1"),
    "target_modules": (f"{SFT} --peft", f"{SFT} --peft --target-modules q_proj"),
    "gradient_checkpointing": (SFT, f"{SFT} --gradient-checkpointing"),
    "trust_remote_code": (SFT, f"{SFT} --trust-remote-code"),
    "data_path": (SFT, "--trainer sft --data-path sft.jsonl"),
    "train_split": (
        "--trainer grpo --data-path data --answer-column answer",
        "--trainer grpo --data-path data --answer-column answer --train-split second",
    ),
    "valid_split": (SFT, f"{SFT} --valid-split texts.jsonl"),
    "held_out": (SFT, f"{SFT} --held-out 2"),
    "prompt_text_column": (PPO, f"{PPO} --prompt-text-column answer"),
    "text_column": (PAIRS, f"{PAIRS} --text-column prompt"),
    "rejected_text_column": (PAIRS, f"{PAIRS} --rejected-text-column prompt"),
    "label_column": (KTO, f"{KTO} --label-column prompt"),
    "messages_column": (
        "--trainer sft --data-path chats.jsonl",
        "--trainer sft --data-path chats.jsonl --messages-column m",
    ),
    "answer_column": (PPO, f"{PPO} --answer-column prompt"),
    "model_max_length": (SFT, f"{SFT} --model-max-length 32"),
    "max_prompt_length": (PAIRS, f"{PAIRS} --max-prompt-length 16"),
    "on_bad_row": (SFT, f"{SFT} --on-bad-row skip"),
    "lr": (SFT, f"{SFT} --lr 1e-3"),
    "epochs": (SFT, f"{SFT} --epochs 2"),
    "max_steps": (SFT, f"{SFT} --max-steps 2"),
    "batch_size": (SFT, f"{SFT} --batch-size 2"),
    "gradient_accumulation": (SFT, f"{SFT} --gradient-accumulation 2"),
    "warmup_ratio": (SFT, f"{SFT} --warmup-ratio 0.5"),
    "scheduler": (SFT, f"{SFT} --scheduler cosine"),
    "weight_decay": (SFT, f"{SFT} --weight-decay 0.1"),
    "max_grad_norm": (SFT, f"{SFT} --max-grad-norm 0.1"),
    "seed": (SFT, f"{SFT} --seed 3"),
    "dpo_beta": (PAIRS, f"{PAIRS} --dpo-beta 0.3"),
    "dpo_loss": (PAIRS, f"{PAIRS} --dpo-loss ipo"),
    "label_smoothing": (PAIRS, f"{PAIRS} --label-smoothing 0.1"),
    "reference_free": (PAIRS, f"{PAIRS} --reference-free"),
    "orpo_coef": (
        "--data-path pairs.jsonl --trainer orpo",
        "--data-path pairs.jsonl --trainer orpo --orpo-coef 0.3",
    ),
    "kto_beta": (KTO, f"{KTO} --kto-beta 0.3"),
    "desirable_weight": (KTO, f"{KTO} --desirable-weight 2"),
    "undesirable_weight": (KTO, f"{KTO} --undesirable-weight 2"),
    "margin_column": (REWARD, f"{REWARD} --margin-column prompt"),
    "reward_model": (PPO, f"{PPO} --reward-model tiny"),
    "reward_function": (PPO, f"{PPO} --reward-function scorers.py:short"),
    "rl_env_module": (GRPO, f"{GRPO} --rl-env-module m"),
    "rl_env_class": (GRPO, f"{GRPO} --rl-env-class C"),
    "rl_env_type": (GRPO, f"{GRPO} --rl-env-type text_generation"),
    "rl_env_config": (
        f"{GRPO} --rl-env-type text_generation",
        f"{GRPO} --rl-env-type text_generation --rl-env-config " + shlex.quote('{"stop_sequences": ["1"]}'),
    ),
    "rl_reward_weights": (
        f"{GRPO} {ENV}",
        f"{GRPO} {ENV} --rl-reward-weights " + shlex.quote('{"polite": 2}'),
    ),
    "rl_num_generations": (GRPO, f"{GRPO} --rl-num-generations 2"),
    "rl_kl_coef": (GRPO, f"{GRPO} --rl-kl-coef 0.3"),
    "rl_clip_range": (GRPO, f"{GRPO} --rl-clip-range 0.3"),
    "rl_loss_type": (GRPO, f"{GRPO} --rl-loss-type dr_grpo"),
    "rl_temperature": (GRPO, f"{GRPO} --rl-temperature 0.7"),
    "rl_top_k": (GRPO, f"{GRPO} --rl-top-k 5"),
    "rl_top_p": (GRPO, f"{GRPO} --rl-top-p 0.5"),
    "rl_max_new_tokens": (GRPO, f"{GRPO} --rl-max-new-tokens 6"),
    "rl_gamma": (PPO, f"{PPO} --rl-gamma 0.9"),
    "rl_gae_lambda": (PPO, f"{PPO} --rl-gae-lambda 0.9"),
    "rl_value_loss_coef": (PPO, f"{PPO} --rl-value-loss-coef 0.9"),
    "rl_num_ppo_epochs": (GRPO, f"{GRPO} --rl-num-ppo-epochs 2"),
    "rl_num_mini_batches": (GRPO, f"{GRPO} --rl-num-mini-batches 2"),
    "missing_eos_penalty": (GRPO, f"{GRPO} --missing-eos-penalty 1"),
    "save_steps": (SFT, f"{SFT} --save-steps 3"),
    "eval_steps": (f"{SFT} --held-out 2", f"{SFT} --held-out 2 --eval-steps 3"),
    "log": (SFT, f"{SFT} --log none"),
    "progress": (SFT, f"{SFT} --progress plain"),
    "backend": (f"{SFT} --backend local", f"{SFT} --backend ray"),
    "device": (SFT, f"{SFT} --device cuda"),
    "num_ranks": (SFT, f"{SFT} --num-ranks 2 --backend ray"),
    "num_workers": (GRPO, f"{GRPO} --num-workers 2"),
}
OWN_TESTS = {"train", "dry_run", "resume", "step", "force_changes", "project_name"}
"""Needed; always given here, with a folder of its own; below."""


def plan(llm: Llm, words: str) -> tuple[int, str]:
    given = words if " --model " in f" {words} " else f"--model tiny {words}"
    # The tiny model has 64 positions.
    reinforcement = any(f"--trainer {name}" in words for name in ("ppo", "grpo"))
    for limit, value in (("--rl-max-new-tokens", "5"), ("--max-prompt-length", "16")):
        if reinforcement and limit not in words:
            given += f" {limit} {value}"
    code, out, err = llm("--train --dry-run", *shlex.split(given))
    return code, out if code == 0 else err


def test_every_flag_has_a_case() -> None:
    assert set(CASES) | OWN_TESTS == set(ACTS_FOR)


@pytest.mark.parametrize("name", CASES)
def test_a_flag_changes_the_plan_or_is_refused_by_its_name(llm: Llm, llm_folder, name: str) -> None:  # type: ignore[no-untyped-def]
    if not (llm_folder / "other").exists():
        (llm_folder / "other").symlink_to(llm_folder / "tiny")
        (llm_folder / "data" / "second.jsonl").write_text((llm_folder / "prompts.jsonl").read_text())
        (llm_folder / "scorers.py").write_text("def short(prompts, responses, metadata): return [0.0]\n")
    usual, changed = CASES[name]
    code, before = plan(llm, usual)
    assert code == 0, before
    code, after = plan(llm, changed)
    if code == 0:
        assert _settings(after) != _settings(before), name
    else:
        assert code == 2 and flag_name(name) in after, after


def _settings(out: str) -> list[str]:
    """The plan without its run folder."""
    return [line for line in out.splitlines() if "rl-cluster-dry-run" not in line]


@pytest.mark.parametrize(
    ("usual", "changed"),
    [
        (SFT, f"{SFT} --train-split test"),
        (f"{SFT} --max-steps 2", f"{SFT} --max-steps 2 --epochs 3"),
        (SFT, f"{SFT} --max-prompt-length 7"),
    ],
)
def test_what_the_list_names_has_no_effect_where_it_says_so(llm: Llm, usual: str, changed: str) -> None:
    (one, before), (two, after) = plan(llm, usual), plan(llm, changed)
    assert (one, two) == (0, 0), after
    differing = [
        line for line, other in zip(_settings(before), _settings(after), strict=True) if line != other
    ]
    assert all("epochs:" in line or "max_prompt_length:" in line for line in differing), differing
    assert any(name in changed for name in LLM)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            f"{GRPO} --rl-env-module m --rl-env-class C",
            ["--data-path prompts.jsonl", "brings its own prompts"],
        ),
        ("--trainer grpo --data-path data --rl-env-module m --rl-env-class C", ["--data-path data"]),
        (f"{SFT} --held-out 2 --valid-split texts.jsonl", ["--held-out 2", "--valid-split"]),
        (f"{SFT} --eval-steps 2", ["--eval-steps 2", "nothing to evaluate on"]),
        (f"{REWARD} --label-column label", ["--label-column label", "read as pairs"]),
        (
            "--trainer reward --data-path labels.jsonl --margin-column label",
            ["--margin-column label", "not pairs"],
        ),
        (
            "--trainer reward --data-path labels.jsonl --rejected-text-column worse",
            ["--text-column chosen"],
        ),
        (
            "--trainer sft --data-path chats.jsonl --messages-column messages --text-column messages",
            ["--text-column messages", "Leave one of the two out"],
        ),
        (
            "--trainer sft --data-path chats.jsonl --prompt-text-column messages",
            ["--text-column completion", "no such column"],
        ),
    ],
)
def test_flags_that_would_be_left_out_are_refused(llm: Llm, words: str, parts: list[str]) -> None:
    code, said = plan(llm, words)
    assert code == 2, said
    for part in parts:
        assert part in said


@pytest.mark.parametrize(
    "words", ["--epochs 1", "--batch-size 8", "--backend auto", "--trainer sft", "--data-path data"]
)
def test_a_flag_with_the_value_of_its_default_is_given(llm: Llm, words: str) -> None:
    code, _, err = llm(f"--train --resume runs/x {words}")
    assert code == 2
    assert f"{words}: --resume takes the settings of the run" in err


def test_the_run_folder_is_the_one_that_was_named() -> None:
    assert str(run_dir(Flags(project_name="elsewhere"))) == "elsewhere"
    assert str(run_dir(Flags())).startswith("runs/sft-")


def test_defaults_hold_where_a_flag_is_not_given() -> None:
    flags = Flags()
    assert (flags.trainer, flags.data_path, flags.train_split) == ("sft", "data", "train")
    assert (flags.epochs, flags.batch_size, flags.gradient_accumulation, flags.backend) == (1, 8, 1, "auto")
    assert not any(flags.is_given(name) for name in ACTS_FOR)
    assert Flags(epochs=1, peft=False).is_given("epochs") and Flags(peft=False).is_given("peft")
