"""Does RLOO against a learned reward model make SmolLM2-135M-Instruct write better summaries?

In small, what the RLOO page of TRL shows for TL;DR: judged win rates before and after.

    python bench/smollm2.py                 # the model, once
    python bench/win_rate.py [--updates 20] [--pairs 300] [--out runs/win_rate]

Posts are made up from a grammar. A pair is a faithful one-sentence summary against one that names a wrong
person, thing or finder, says nothing, or copies the post. Two reward models (the first six layers of SmolLM2
with a head) are trained by RewardModelTrainer on different pairs with different seeds: one is what RLOO
maximises, the other, which RLOO never sees, is the judge. The judged pairs are a greedy completion and the
reference summary of held-out posts, in both orders; the interval of the rise is over prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from rl_cluster import RewardModel, RewardModelConfig, RewardModelTrainer, RLOOConfig, RLOOTrainer
from rl_cluster.judge import count_verdicts, judge_pairs, paired_rise, score_judge

MODEL = "models/SmolLM2-135M-Instruct"
NUM_LAYERS = 6
NAMES = ("Anna", "Ben", "Clara", "David", "Ella", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Karla", "Leo")
COLOURS = ("red", "blue", "green", "black", "white", "yellow", "brown", "silver")
THINGS = ("bicycle", "umbrella", "wallet", "suitcase", "camera", "violin", "jacket", "notebook")
PLACES = ("station", "library", "market", "school", "museum", "harbour", "park", "theatre")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
FINDERS = ("nurse", "baker", "teacher", "driver", "student", "gardener", "waiter", "postman")


@dataclass(frozen=True)
class Post:
    name: str
    colour: str
    thing: str
    place: str
    day: str
    finder: str
    hours: int

    @property
    def text(self) -> str:
        return (
            f"On {self.day}, {self.name} lost a {self.colour} {self.thing} near the {self.place}. "
            f"{self.name} searched for {self.hours} hours and asked everybody for help. In the end a "
            f"{self.finder} found it."
        )

    def summary(self, **wrong: str) -> str:
        facts = {**self.__dict__, **wrong}
        return "{name} lost a {colour} {thing} near the {place}, and a {finder} found it.".format(**facts)


def make_post(rng: random.Random) -> Post:
    choose = rng.choice
    return Post(
        choose(NAMES), choose(COLOURS), choose(THINGS), choose(PLACES), choose(DAYS), choose(FINDERS),
        rng.randint(2, 9),
    )  # fmt: skip


def worse_summary(post: Post, rng: random.Random) -> str:
    others = {"name": NAMES, "thing": THINGS, "finder": FINDERS, "place": PLACES}
    kind = rng.choice([*others, "vague", "copy", "chatty"])
    if kind == "vague":
        return rng.choice(("Someone lost something.", "This is a post about a person.", "It was found."))
    if kind == "copy":
        return post.text
    if kind == "chatty":
        return f"Sure! Here is a summary of the post for you: {post.summary()} I hope that this helps you!"
    wrong = rng.choice([value for value in others[kind] if value != getattr(post, kind)])
    return post.summary(**{kind: wrong})


def prompt_of(tokenizer: Any, post: Post) -> str:
    content = f"Summarize the post in one short sentence.\n\nPost: {post.text}"
    messages = [{"role": "user", "content": content}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def train_judge(tokenizer: Any, num_pairs: int, seed: int) -> tuple[Any, float]:
    """(reward model, accuracy on 100 held-out pairs)."""
    rng = random.Random(f"pairs {seed}")
    posts = [make_post(rng) for _ in range(num_pairs + 100)]
    chosen = [prompt_of(tokenizer, post) + post.summary() for post in posts]
    rejected = [prompt_of(tokenizer, post) + worse_summary(post, rng) for post in posts]
    base = AutoModel.from_pretrained(MODEL, num_hidden_layers=NUM_LAYERS, dtype=torch.float32)
    config = RewardModelConfig(learning_rate=1e-4, warmup_steps=5, dropout_prob=0.0, seed=seed)
    model = RewardModel(config, base)
    trainer = RewardModelTrainer(model, tokenizer, config)
    trainer.train_on_preferences(chosen[:num_pairs], rejected[:num_pairs], num_epochs=1, batch_size=8)
    result = trainer.evaluate(chosen[num_pairs:], rejected[num_pairs:])
    return model.eval(), float(result["eval_accuracy"])


@torch.no_grad()
def greedy(model: Any, tokenizer: Any, prompts: Sequence[str], batch_size: int = 25) -> list[str]:
    model.eval()
    answers = []
    for start in range(0, len(prompts), batch_size):
        batch = tokenizer(
            list(prompts[start : start + batch_size]),
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
        )
        tokens = model.generate(**batch, do_sample=False, max_new_tokens=48)
        answers += tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("runs/win_rate"))
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    begun = time.time()
    reward_model, accuracy = train_judge(tokenizer, arguments.pairs, seed=1)
    judge_model, judge_accuracy = train_judge(tokenizer, arguments.pairs, seed=2)
    print(f"held-out accuracy: reward model {accuracy:.3f}, judge {judge_accuracy:.3f}", flush=True)

    rng = random.Random("held-out posts")
    held_out = [make_post(rng) for _ in range(arguments.prompts)]
    prompts = [prompt_of(tokenizer, post) for post in held_out]
    references = [post.summary() for post in held_out]
    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    before = greedy(policy, tokenizer, prompts)

    rng = random.Random("training posts")
    batch = 64
    config = RLOOConfig(
        output_dir=str(arguments.out),
        total_episodes=arguments.updates * batch,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        num_ppo_epochs=1,
        rloo_k=4,
        response_length=48,
        stop_token="eos",
        missing_eos_penalty=1.0,
        kl_coef=0.02,
        temperature=0.7,
        learning_rate=2e-5,
        lr_scheduler_type="constant",
        bf16=True,
        report_to="none",
    )
    dataset = [{"prompt": prompt_of(tokenizer, make_post(rng))} for _ in range(1000)]
    trainer = RLOOTrainer(config, tokenizer, policy, None, reward_model, dataset)
    trainer.train()
    after = greedy(trainer.model.float(), tokenizer, prompts)
    trainer.close()

    judge = score_judge(judge_model, tokenizer)
    verdicts = {
        name: judge_pairs(judge, prompts, answers, references, swap=True)
        for name, answers in (("before", before), ("after", after))
    }
    for name, found in verdicts.items():
        print(f"{name}: {count_verdicts(found)} against the reference summaries")
    rise = paired_rise(verdicts["before"], verdicts["after"])
    direct = count_verdicts(judge_pairs(judge, prompts, after, before, swap=True))
    print(f"rise: {100 * rise.mean:+.1f} points [{100 * rise.low:+.1f}, {100 * rise.high:+.1f}]")
    print(f"after against before: {direct}")
    named = [
        sum(word in text for word in (post.name, post.thing, post.finder)) / 3
        for answers in (before, after)
        for post, text in zip(held_out, answers, strict=True)
    ]
    half = len(held_out)
    shares = sum(named[:half]) / half, sum(named[half:]) / half
    print(f"facts named (name, thing, finder): {shares[0]:.2f} before, {shares[1]:.2f} after")
    print(f"{time.time() - begun:.0f} s in all")
    rows = [
        {"prompt": post.text, "reference": post.summary(), "before": b, "after": a}
        for post, b, a in zip(held_out, before, after, strict=True)
    ]
    (arguments.out / "judged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
