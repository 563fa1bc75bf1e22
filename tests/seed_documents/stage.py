"""Names and files that the documents' blocks take for granted, set up before the block that needs them."""

from __future__ import annotations

import dataclasses
import json
import string
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2ForSequenceClassification,
)

from rl_cluster.config.run import ScratchModel
from rl_cluster.modeling.scratch import build_model, build_tokenizer, save_scratch_model

Names = dict[str, Any]

ALPHABET = "".join(sorted(set(string.printable) - set("\x0b\x0c\r")))
SCRATCH = ScratchModel(
    alphabet=ALPHABET, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=32, max_positions=1024
)
HOTEL = """
class HotelEnv:
    def build_dataset(self, tokenizer):
        return [{"prompt": f"Book room {room}.", "case_idx": room} for room in range(4)]

    def score_episode(self, model, tokenizer, completion, case_idx):
        return float(str(case_idx) in completion)
"""


STAND_INS: dict[str, Callable[[int], Any]] = {
    "gemma-2": lambda size: Gemma2ForCausalLM(
        Gemma2Config(
            **_sizes(size),
            head_dim=16,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=3.0,
            sliding_window=16,
        )
    ),
    "gpt2": lambda size: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=size,
            n_positions=SCRATCH.max_positions,
            n_embd=32,
            n_layer=2,
            n_head=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
        )
    ),
    "pythia": lambda size: GPTNeoXForCausalLM(GPTNeoXConfig(**_sizes(size))),
    "smollm2": lambda size: LlamaForCausalLM(LlamaConfig(**_sizes(size), tie_word_embeddings=True)),
}
"""folder -> a tiny model, of so many tokens, with the architecture of the models whose place it takes."""


def _sizes(vocab_size: int) -> Names:
    return {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": SCRATCH.max_positions,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }


def save_models(folder: Path) -> None:
    """The models of STAND_INS, bert (encoder) and scorer (sequence classifier), all with the same character
    tokenizer. lm is of Qwen2's architecture."""
    save_scratch_model(SCRATCH, folder / "lm")
    tokenizer = build_tokenizer(ALPHABET, SCRATCH.max_positions)
    for name, make in STAND_INS.items():
        torch.manual_seed(0)
        make(len(tokenizer)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    model = build_model(SCRATCH, len(tokenizer), 0)
    model.config.num_labels = 1
    Qwen2ForSequenceClassification(model.config).save_pretrained(folder / "scorer")
    tokenizer.save_pretrained(folder / "scorer")
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        pad_token_id=tokenizer.pad_token_id,
    )
    BertModel(config).save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")


def save_data(folder: Path) -> None:
    """What the command lines read: the default data/train.jsonl, a file per format, and my_envs."""
    rows = [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": "no"} for n in range(8)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text(text)
    (folder / "preference_data.jsonl").write_text(text)
    sums = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    turns = [[("user", row["prompt"]), ("assistant", row["answer"])] for row in sums]
    chats = [{"messages": [{"role": role, "content": text} for role, text in turn]} for turn in turns]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    lines = [f"{row['prompt']},{row['answer']},true" for row in sums]
    (folder / "labels.csv").write_text("\n".join(["prompt,completion,label", *lines]) + "\n")
    (folder / "comments").mkdir()
    (folder / "comments" / "descriptiveness.jsonl").write_text(text)
    (folder / "my_envs").mkdir()
    (folder / "my_envs" / "__init__.py").write_text("")
    (folder / "my_envs" / "hotel_env.py").write_text(HOTEL)


def language_model() -> Any:
    return build_model(SCRATCH, len(build_tokenizer(ALPHABET, SCRATCH.max_positions)), 0)


def _ids(*texts: str) -> Names:
    tokenizer = build_tokenizer(ALPHABET, SCRATCH.max_positions)
    return dict(tokenizer(list(texts), return_tensors="pt", padding=True))


def basics() -> Names:
    return {
        "torch": torch,
        "nn": nn,
        "dataclass": dataclasses.dataclass,
        **{name: getattr(typing, name) for name in ("Any", "Dict", "List", "Optional")},
        "tokenizer": build_tokenizer(ALPHABET, SCRATCH.max_positions),
        "prompts": ["Say yes.", "Say no."],
    }


def pairs() -> Names:
    from rl_cluster import PreferenceDataset

    tokenizer = build_tokenizer(ALPHABET, SCRATCH.max_positions)
    return {"eval_dataset": PreferenceDataset(["Really?"], ["Yes."], ["What?"], tokenizer)}


def two_inputs() -> Names:
    first, second = _ids("good answer", "fine"), _ids("bad", "worse answer")
    return {
        "input_ids_a": first["input_ids"],
        "attention_mask_a": first["attention_mask"],
        "input_ids_b": second["input_ids"],
        "attention_mask_b": second["attention_mask"],
        "labels": torch.tensor([1.0, 0.0]),
    }


def three_targets() -> Names:
    return {**_ids("good answer", "bad"), "target_rewards": torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.5, 1.0]])}


def judged_actions() -> Names:
    yes = _ids("yes")["input_ids"][0]
    return {
        "is_correct": lambda text: "yes" in text,
        "properly_formatted": lambda text: text.endswith("."),
        "action": torch.cat([_ids("yes.")["input_ids"][0], torch.tensor([1])]),
        "prompts": ["Say yes.", "Say no."],
        "yes": yes,
    }


def responses() -> Names:
    return {
        "preference_model": lambda texts: [float(len(text)) for text in texts],
        "feedback_fn": lambda prompt, first, second: None,
        "response1_tokens": _ids("a long response")["input_ids"][0],
        "response2_tokens": _ids("short")["input_ids"][0],
    }


def training() -> Names:
    model, batch = language_model(), _ids("to be or not", "to be")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {
        "model": model,
        "reference_model": language_model(),
        **batch,
        "labels": batch["input_ids"],
        "batch": {**batch, "labels": batch["input_ids"]},
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "loss_tensor": model.lm_head.weight.square().mean(),
        "prompt_tokens": batch["input_ids"][1][:5].tolist(),
    }


def readme() -> Names:
    from rl_cluster import PPOConfig, PreferenceDataset, StepResult, TextGenerationEnv
    from rl_cluster.trainers.fixed_data.dpo import DPOConfig

    words = {"prompts": ["Say yes.", "Say no."], "chosen": ["yes", "no"], "rejected": ["x", "y"]}
    names = basics()

    def share_of_vowels(prompt: str, generated: str, full_text: str) -> float:
        return sum(letter in "aeiou" for letter in generated) / max(1, len(generated))

    return {
        **names,
        **words,
        "model": language_model(),
        "data": PreferenceDataset(**words, tokenizer=names["tokenizer"]),
        "custom_reward": share_of_vowels,
        "accuracy_reward": share_of_vowels,
        "fluency_reward": share_of_vowels,
        "safety_reward": share_of_vowels,
        "environment": TextGenerationEnv(names["tokenizer"], words["prompts"], reward_fn=share_of_vowels),
        "dpo_config": DPOConfig(num_epochs=1),
        "ppo_config": PPOConfig(num_iterations=1, max_new_tokens=8),
        "StepResult": StepResult,
        "initial_observation": "the observation",
        "reward": 1.5,
        "done": True,
        "next_obs": None,
        "loss_tensor": torch.tensor(0.25),
    }


def solutions() -> Names:
    from rl_cluster import PPOConfig, create_math_problem_env

    return {
        "config": PPOConfig(),
        "model": language_model(),
        "base_reward": lambda text: float(len(text)),
        "shaping_reward": lambda text: 0.5,
        "env": create_math_problem_env(basics()["tokenizer"]),
    }


def blog() -> Names:
    rows = [
        {"query": text, **{k: v[0].tolist() for k, v in _ids(text).items()}}
        for text in ("ab", "c?", "de", "f")
    ]
    return {
        "torch": torch,
        "given_model": language_model(),
        "given_reference": language_model(),
        "given_tokenizer": basics()["tokenizer"],
        "dataset": rows,
        "generation_kwargs": {
            "min_length": -1,
            "top_k": 0.0,
            "top_p": 1.0,
            "do_sample": True,
            "max_new_tokens": 8,
        },
        "get_reward": lambda text: float(len(text)),
        "texts_for_reward": ["one", "four", "seven", "t"],
    }


PAGE = {
    0: basics,
    3: lambda: {"evaluate_response": lambda text: float(len(text))},
    5: pairs,
    9: two_inputs,
    10: three_targets,
    12: lambda: {"my_reward_function": lambda prompt, generated, full_text: 1.0, "action_token": 7},
    13: judged_actions,
    14: responses,
    16: training,
}
SETUP = {
    "ai_training_pt": PAGE,
    "ai_training_en": PAGE,
    "autotrain_readme": {1: readme, 8: solutions},
    "trl_ppo_blog": {0: blog},
    "trl_rloo": {1: basics},
}
"""document -> block -> the names that are set before it."""
