"""The flags of `rl-cluster llm`, each once: type, help, panel, and the trainers for which it acts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

import typer

SUPERVISED, PAIRS, RL = ("sft",), ("reward", "dpo", "orpo"), ("ppo", "rloo", "grpo")
FIT = (*SUPERVISED, *PAIRS, "kto")
TRAINERS = (*FIT, *RL)

TASK, MODEL, DATA, TRAINING = "What to do", "Model", "Data", "Training"
PREFERENCES, REINFORCEMENT = (
    "Preferences (reward, dpo, orpo, kto)",
    "Reinforcement learning (ppo, rloo, grpo)",
)
OUTPUT, MACHINE = "Output", "Machine"


def _flag(
    panel: str, help: str, *names: str, only: tuple[str, ...] = TRAINERS, default: Any = None, **more: Any
) -> Any:
    """only: the trainers for which the flag acts; elsewhere it is refused. default: what holds where it is
    not given; the option itself has none, so that a value that equals it still counts as given."""
    if only != TRAINERS:
        help = f"{', '.join(only)}: {help}"
    option = typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **more)
    switch = isinstance(default, bool)
    metadata = {"option": option, "only": only, "name": names[0], "unset": default}
    return field(default=default if switch else None, metadata=metadata)


@dataclass(frozen=True)
class Flags:
    """What was written on the command line, and the defaults of a few; None: not given, the default in the
    help text holds."""

    train: bool = _flag(TASK, "Train. Needed: training is all that llm does.", "--train", default=False)
    trainer: str = _flag(
        TASK, "sft, reward, dpo, orpo, kto, ppo, rloo or grpo. Default sft.", "--trainer", default="sft"
    )
    dry_run: bool = _flag(
        TASK, "Print configuration, workers and memory; start nothing.", "--dry-run", default=False
    )
    resume: str | None = _flag(TASK, "Go on with a run folder from its newest checkpoint.", "--resume")
    step: int | None = _flag(
        TASK, "With --resume: from the checkpoint of exactly this step.", "--step", metavar="N"
    )
    force_changes: bool = _flag(
        TASK,
        "With --resume: also settings that change what the run means.",
        "--force-changes",
        default=False,
    )

    model: str | None = _flag(
        MODEL, "Hugging Face folder, hub name, or the folder of an earlier run.", "--model", "-m"
    )
    model_ref: str | None = _flag(
        MODEL, "Reference model. Default: the model itself.", "--model-ref", only=("dpo", "kto")
    )
    mixed_precision: Literal["no", "bf16"] | None = _flag(
        MODEL, "no (float32) or bf16. Default no.", "--mixed-precision"
    )
    peft: bool | None = _flag(MODEL, "Train LoRA adapters instead of all weights.", "--peft/--no-peft")
    lora_r: int | None = _flag(MODEL, "Rank of the adapters, with --peft. Default 16.", "--lora-r")
    lora_alpha: float | None = _flag(MODEL, "Scale of the adapters, with --peft. Default 32.", "--lora-alpha")
    lora_dropout: float | None = _flag(MODEL, "With --peft. Default 0.", "--lora-dropout")
    target_modules: str | None = _flag(
        MODEL, "Layers with adapters, comma-separated, or all-linear (default).", "--target-modules"
    )
    gradient_checkpointing: bool | None = _flag(
        MODEL,
        "Compute activations twice to save memory.",
        "--gradient-checkpointing/--no-gradient-checkpointing",
    )
    trust_remote_code: bool | None = _flag(
        MODEL, "Run code that comes with the model.", "--trust-remote-code/--no-trust-remote-code"
    )

    data_path: str = _flag(
        DATA,
        "A .jsonl, .csv or .parquet file, a folder with SPLIT.jsonl, or a data set of the hub. Default data.",
        "--data-path",
        default="data",
    )
    train_split: str = _flag(DATA, "Default train.", "--train-split", default="train")
    valid_split: str | None = _flag(DATA, "Split, or file, to evaluate on. Default: none.", "--valid-split")
    held_out: int | None = _flag(DATA, "Last rows kept for evaluation. Default 0.", "--held-out")
    prompt_text_column: str | None = _flag(DATA, "Column of prompts. Default prompt.", "--prompt-text-column")
    text_column: str | None = _flag(
        DATA,
        "of sft whole texts (text), or with prompts the answers (completion); of pairs the chosen "
        "responses (chosen); of kto the responses (completion, or text).",
        "--text-column",
        only=FIT,
    )
    rejected_text_column: str | None = _flag(
        DATA, "Column of rejected responses. Default rejected.", "--rejected-text-column", only=PAIRS
    )
    label_column: str | None = _flag(
        DATA, "Good or bad. Default label.", "--label-column", only=("kto", "reward")
    )
    messages_column: str | None = _flag(
        DATA, "Column of chats. Default messages.", "--messages-column", only=SUPERVISED
    )
    answer_column: str | None = _flag(
        DATA, "Right answers: a response that equals one scores 1, any other 0.", "--answer-column", only=RL
    )
    model_max_length: int | None = _flag(
        DATA,
        "Tokens of prompt and response. Default 1024.",
        "--model-max-length",
        "--block-size",
        "--max-seq-length",
        only=FIT,
    )
    max_prompt_length: int | None = _flag(DATA, "Tokens of a prompt. Default 512.", "--max-prompt-length")
    on_bad_row: Literal["refuse", "skip"] | None = _flag(
        DATA, "refuse (default) or skip malformed rows.", "--on-bad-row"
    )

    lr: float | None = _flag(TRAINING, "Learning rate. Default 1e-6.", "--lr", "--learning-rate")
    epochs: int = _flag(
        TRAINING, "Passes over the data. Default 1.", "--epochs", "--num-train-epochs", default=1, min=1
    )
    max_steps: int | None = _flag(TRAINING, "Steps, instead of epochs.", "--max-steps", "--steps")
    batch_size: int = _flag(
        TRAINING, "Rows (RL: prompts) per batch. Default 8.", "--batch-size", default=8, min=1
    )
    gradient_accumulation: int = _flag(
        TRAINING, "Batches per update. Default 1.", "--gradient-accumulation", default=1, min=1
    )
    warmup_ratio: float | None = _flag(
        TRAINING, "Share of the updates in which the learning rate rises.", "--warmup-ratio"
    )
    scheduler: Literal["constant", "linear", "cosine"] | None = _flag(
        TRAINING, "constant (default), linear or cosine.", "--scheduler"
    )
    weight_decay: float | None = _flag(TRAINING, "Default 0.", "--weight-decay")
    max_grad_norm: float | None = _flag(TRAINING, "Default 1.", "--max-grad-norm")
    seed: int | None = _flag(TRAINING, "Default 0.", "--seed")

    dpo_beta: float | None = _flag(
        PREFERENCES, "Strength of the reference. Default 0.1.", "--dpo-beta", only=("dpo",)
    )
    dpo_loss: Literal["sigmoid", "ipo", "hinge"] | None = _flag(
        PREFERENCES, "sigmoid (default), ipo or hinge.", "--dpo-loss", only=("dpo",)
    )
    label_smoothing: float | None = _flag(
        PREFERENCES, "Share of labels that may be wrong. Default 0.", "--label-smoothing", only=("dpo",)
    )
    reference_free: bool | None = _flag(
        PREFERENCES, "Without a reference.", "--reference-free/--no-reference-free", only=("dpo",)
    )
    orpo_coef: float | None = _flag(
        PREFERENCES, "Weight of the odds ratio. Default 0.1.", "--orpo-coef", "--orpo-beta", only=("orpo",)
    )
    kto_beta: float | None = _flag(
        PREFERENCES, "Strength of the reference. Default 0.1.", "--kto-beta", only=("kto",)
    )
    desirable_weight: float | None = _flag(PREFERENCES, "Default 1.", "--desirable-weight", only=("kto",))
    undesirable_weight: float | None = _flag(PREFERENCES, "Default 1.", "--undesirable-weight", only=("kto",))
    margin_column: str | None = _flag(
        PREFERENCES, "By how much each chosen response must win.", "--margin-column", only=("reward",)
    )

    reward_model: str | None = _flag(
        REINFORCEMENT, "Folder or hub name of a reward model, or a run folder.", "--reward-model", only=RL
    )
    reward_function: str | None = _flag(
        REINFORCEMENT,
        "f(prompts, responses, metadata): package.module:f or file.py:f.",
        "--reward-function",
        only=RL,
    )
    rl_env_module: str | None = _flag(
        REINFORCEMENT, "Module of a class with build_dataset and score_episode.", "--rl-env-module", only=RL
    )
    rl_env_class: str | None = _flag(
        REINFORCEMENT, "The class; it brings prompts and rewards.", "--rl-env-class", only=RL
    )
    rl_env_type: str | None = _flag(
        REINFORCEMENT, "text_generation or multi_objective.", "--rl-env-type", only=RL
    )
    rl_env_config: str | None = _flag(
        REINFORCEMENT, "JSON settings of --rl-env-type.", "--rl-env-config", only=RL
    )
    rl_reward_weights: str | None = _flag(
        REINFORCEMENT, "JSON weights of multi_objective.", "--rl-reward-weights", only=RL
    )
    rl_num_generations: int | None = _flag(
        REINFORCEMENT,
        "Samples per prompt. Default: ppo 1, rloo 2, grpo 4.",
        "--rl-num-generations",
        "--rloo-k",
        only=RL,
    )
    rl_kl_coef: float | None = _flag(
        REINFORCEMENT, "Weight of the divergence. Default: ppo, rloo 0.05, grpo 0.1.", "--rl-kl-coef", only=RL
    )
    rl_clip_range: float | None = _flag(
        REINFORCEMENT, "Clip of the ratio. Default 0.2.", "--rl-clip-range", only=RL
    )
    rl_loss_type: str | None = _flag(
        REINFORCEMENT, "grpo (default), bnpo, dr_grpo, dapo, cispo, sapo.", "--rl-loss-type", only=("grpo",)
    )
    rl_temperature: float | None = _flag(
        REINFORCEMENT, "Of the sampling. Default 1.", "--rl-temperature", only=RL
    )
    rl_top_k: int | None = _flag(
        REINFORCEMENT, "Refused above 0 (ratios of truncated samples are wrong).", "--rl-top-k", only=RL
    )
    rl_top_p: float | None = _flag(REINFORCEMENT, "Refused below 1, likewise.", "--rl-top-p", only=RL)
    rl_max_new_tokens: int | None = _flag(
        REINFORCEMENT,
        "Tokens of a response. Default 128.",
        "--rl-max-new-tokens",
        "--max-completion-length",
        only=RL,
    )
    rl_gamma: float | None = _flag(
        REINFORCEMENT, "Discount per token. Default 1.", "--rl-gamma", only=("ppo",)
    )
    rl_gae_lambda: float | None = _flag(REINFORCEMENT, "Default 0.95.", "--rl-gae-lambda", only=("ppo",))
    rl_value_loss_coef: float | None = _flag(
        REINFORCEMENT, "Weight of the value loss. Default 0.1.", "--rl-value-loss-coef", only=("ppo",)
    )
    rl_num_ppo_epochs: int | None = _flag(
        REINFORCEMENT,
        "Passes over each batch. Default: ppo 4, else 1.",
        "--rl-num-ppo-epochs",
        "--num-ppo-epochs",
        only=RL,
    )
    rl_num_mini_batches: int | None = _flag(
        REINFORCEMENT,
        "Updates per pass. Default 1.",
        "--rl-num-mini-batches",
        "--num-mini-batches",
        only=RL,
    )
    missing_eos_penalty: float | None = _flag(
        REINFORCEMENT, "Subtracted from unfinished responses.", "--missing-eos-penalty", only=RL
    )

    project_name: str | None = _flag(
        OUTPUT, "Run folder. Default runs/TRAINER-DATE-TIME.", "--project-name", "--output-dir"
    )
    save_steps: int | None = _flag(OUTPUT, "Steps between checkpoints. Default: none.", "--save-steps")
    eval_steps: int | None = _flag(OUTPUT, "Steps between evaluations.", "--eval-steps")
    log: Literal["none", "tensorboard", "wandb"] | None = _flag(
        OUTPUT, "tensorboard (default), wandb or none, beside metrics.jsonl.", "--log"
    )
    progress: Literal["auto", "rich", "plain", "none"] | None = _flag(OUTPUT, "On the screen.", "--progress")

    backend: Literal["auto", "local", "ray"] = _flag(
        MACHINE, "auto (default): small models in this process, others on Ray.", "--backend", default="auto"
    )
    device: Literal["auto", "cpu", "cuda"] | None = _flag(MACHINE, "Default auto.", "--device")
    num_ranks: int | None = _flag(MACHINE, "Learner ranks (ZeRO-3). Default 1.", "--num-ranks")
    num_workers: int | None = _flag(MACHINE, "Sampling workers. Default 1.", "--num-workers", only=RL)

    def __post_init__(self) -> None:
        given = {flag.name for flag in fields(self) if getattr(self, flag.name) != flag.default}
        object.__setattr__(self, "_given", frozenset(given))
        for flag in fields(self):
            if getattr(self, flag.name) is None:
                object.__setattr__(self, flag.name, flag.metadata["unset"])

    def is_given(self, name: str) -> bool:
        """Whether the flag was written, with whatever value."""
        given: frozenset[str] = vars(self)["_given"]
        return name in given


ACTS_FOR: dict[str, tuple[str, ...]] = {f.name: f.metadata["only"] for f in fields(Flags)}


def flag_name(name: str) -> str:
    """`dpo_beta` -> `--dpo-beta`."""
    first: str = Flags.__dataclass_fields__[name].metadata["name"]
    return first.partition("/")[0]
