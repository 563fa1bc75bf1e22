"""What stands in for what when the source documents' code runs here: all that differs from their text."""

from __future__ import annotations

import re
from pathlib import Path

import torch

MODULES = {
    r"\bautotrain\.trainers\.rl\b": "rl_cluster",
    r"\bautotrain\.trainers\.losses\b": "rl_cluster.losses",
    r"\bfrom trl import\b": "from rl_cluster import",
}
"""The import path: nothing else is replaced for its own sake."""

MODELS = {
    "google/gemma-2-2b": "gemma-2",
    "gpt2": "gpt2",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": "lm",
    "EleutherAI/pythia-1b-deduped": "pythia",
    "EleutherAI/pythia-14m": "pythia",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2",
    "bert-base-uncased": "bert",
    "./my-reward-model": "scorer",
}
"""Model -> tiny model of the same architecture, a folder that the test makes."""

SHORTER = {
    r"num_iterations\s*=\s*100\b": "num_iterations=2",
    r"max_new_tokens\s*=\s*128\b": "max_new_tokens=8",
    r"batch_size\s*=\s*256\b": "batch_size=4",
    # The README's configuration names neither; the defaults are 100 iterations and 128 tokens.
    r"PPOConfig\(learning_rate=1e-5\)": "PPOConfig(learning_rate=1e-5, num_iterations=2, max_new_tokens=8)",
}
"""Fewer iterations and tokens, for time."""

SMALLER = {
    "--total_episodes 10000": "--total_episodes 64 --use_cpu --report_to none --num_sample_generations 0",
    "trl-internal-testing/descriptiveness-sentiment-trl-style": "comments",
}
"""Of the command lines: fewer episodes, a folder in place of a data set of the hub."""

PLACEHOLDERS = {
    "model = ...": "model = given_model",
    "model_ref = ...": "model_ref = given_reference",
    "tokenizer = ...": "tokenizer = given_tokenizer",
}
"""The blog leaves loading to the reader."""

NOT_RUN = {
    ("ai_training_pt", 1): "a sketch: a class whose body is a comment is no Python",
    ("ai_training_en", 1): "a sketch: a class whose body is a comment is no Python",
    ("autotrain_readme", 0): "installs packages from the internet",
    ("autotrain_readme", 7): "names the test files of another project",
    ("trl_rloo", 3): "asks a judge that is a service on the internet, about models of several GB",
    ("trl_rloo", 4): "downloads curves of other people's runs",
}
"""(document, block) -> why it cannot run; every other block does."""

FLAGS_ONLY = {("trl_rloo", 2): "names no script behind `accelerate launch`; its flags are read by the parser"}


def substitute(code: str, models: Path) -> str:
    """The code as it runs here. models: the folder that holds the tiny ones."""
    for name, folder in MODELS.items():
        code = code.replace(f'"{name}"', f'"{models / folder}"')
        code = re.sub(rf"(?<=[ =]){re.escape(name)}(?=\s|$)", str(models / folder), code)
    for pattern, replacement in (MODULES | SHORTER).items():
        code = re.sub(pattern, replacement, code)
    for words, replacement in SMALLER.items():
        code = code.replace(words, replacement)
    for line, replacement in PLACEHOLDERS.items():
        code = re.sub(rf"^{re.escape(line)}$", replacement, code, flags=re.MULTILINE)
    if not torch.cuda.is_available():
        code = re.sub(r'device\s*=\s*"cuda"', 'device="cpu"', code)
    return code
