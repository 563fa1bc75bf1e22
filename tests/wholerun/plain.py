"""The algorithms once more, from their papers: plain transformers, one sequence at a time, float64.

A Recorded run's samples and start weights go in, the weights that training on them must give come out.
Nothing here comes from the package except the settings: each formula is written as its paper has it
(whole-sequence ratios as products, means as means), not as weights per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from tests.wholerun.plain_advantages import ADVANTAGES
from tests.wholerun.recorded import Recorded, Sample, small_digits


@dataclass(frozen=True)
class Seen:
    """One row under some weights; [T] each, with gradient: log-probability of each drawn token, entropy of
    the distribution it was drawn from, value of the state before it."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    values: torch.Tensor | None


@dataclass(frozen=True)
class Target:
    """What a row is trained on; float64 [T] each, constants."""

    advantages: torch.Tensor
    returns: torch.Tensor | None
    old_logprobs: torch.Tensor
    old_values: torch.Tensor | None
    reference: torch.Tensor | None
    behaviour: torch.Tensor
    truncated: bool


class Policy(nn.Module):
    def __init__(self, folder: Path, head: dict[str, torch.Tensor] | None) -> None:
        super().__init__()
        self.lm = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
        self.head = value_head(head)

    def look(self, sample: Sample, temperature: float) -> Seen:
        tokens = torch.from_numpy(sample.tokens)
        output = self.lm(tokens[None], output_hidden_states=True)
        before = slice(sample.first - 1, len(tokens) - 1)
        logprobs = (output.logits[0, before] / temperature).log_softmax(-1)
        drawn = logprobs[torch.arange(len(logprobs)), tokens[sample.first :]]
        values = None if self.head is None else self.head(output.hidden_states[-1][0, before])[:, 0]
        return Seen(drawn, -(logprobs.exp() * logprobs).sum(-1), values)


class Critic(nn.Module):
    def __init__(self, folder: Path, head: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.trunk = AutoModel.from_pretrained(folder, attn_implementation="eager").double()
        self.head = value_head(head)

    def look(self, sample: Sample, temperature: float) -> Seen:
        hidden = self.trunk(torch.from_numpy(sample.tokens)[None]).last_hidden_state[0]
        assert self.head is not None
        values = self.head(hidden[sample.first - 1 : -1])[:, 0]
        return Seen(torch.zeros_like(values), torch.zeros_like(values), values)


def value_head(start: dict[str, torch.Tensor] | None) -> nn.Module | None:
    if not start:
        return None
    size = start["hidden.weight"].shape[0]
    head = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 1)).double()
    names = {"0.weight": "hidden.weight", "0.bias": "hidden.bias", "2.weight": "scalar.weight"}
    names["2.bias"] = "scalar.bias"
    head.load_state_dict({own: start[other].double() for own, other in names.items()})
    return head


class Trainer:
    """AdamW, clipping, warm-up and schedule as the configuration says."""

    def __init__(self, model: nn.Module, config: Any, learning_rate: float) -> None:
        self.model, self.settings, self.peak = model, config.optimizer, learning_rate
        parameters = list(model.parameters())
        matrices = [p for p in parameters if p.dim() > 1]
        vectors = [p for p in parameters if p.dim() <= 1]
        self.adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": self.settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=self.settings.betas,
            eps=self.settings.eps,
        )
        per_step = config.algorithm.num_epochs * config.algorithm.num_mini_batches
        self.done, self.total = 0, config.run.steps * per_step

    def rate(self) -> float:
        warmup = self.settings.warmup_steps
        if self.done < warmup:
            return self.peak * (self.done + 1) / warmup
        part = (self.done - warmup) / (self.total - warmup)
        if self.settings.schedule == "cosine":
            return self.peak * 0.5 * (1 + math.cos(math.pi * part))
        return self.peak * (1 - part if self.settings.schedule == "linear" else 1.0)

    def update(self, loss: torch.Tensor) -> None:
        self.adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        for group in self.adamw.param_groups:
            group["lr"] = self.rate()
        self.adamw.step()
        self.done += 1


@dataclass(frozen=True)
class Recomputed:
    """policy, critic: the modules after the last update. kl_coef: β of every step, and of the one after."""

    policy: Policy
    critic: Critic | None
    kl_coef: list[float]


def recompute(run: Recorded) -> Recomputed:
    config, algorithm = run.config, run.config.algorithm
    policy = Policy(run.start_folder, run.value_heads.get("policy"))
    reference = Policy(run.reference_folder, None)
    trainer = Trainer(policy, config, config.optimizer.learning_rate)
    critic = critic_trainer = None
    if "critic" in run.value_heads:
        critic = Critic(run.start_folder, run.value_heads["critic"])
        critic_trainer = Trainer(critic, config, algorithm.critic.learning_rate)
    kl_coef = [algorithm.kl.coef]
    for samples, updates in zip(run.steps, run.updates, strict=True):
        targets, divergence = look_back(config, samples, policy, critic, reference, kl_coef[-1])
        for rows in updates:
            chosen = [samples[row] for row in rows]
            aims = [targets[row] for row in rows]
            if critic is not None and critic_trainer is not None:
                seen = [critic.look(sample, 1.0) for sample in chosen]
                critic_trainer.update(value_loss(config, seen, aims))
            seen = [policy.look(sample, config.rollout.temperature) for sample in chosen]
            loss = policy_loss(config, seen, aims, kl_coef[-1])
            if policy.head is not None:
                loss = loss + algorithm.critic.value_coef * value_loss(config, seen, aims)
            trainer.update(loss)
        kl_coef.append(next_coef(algorithm.kl, kl_coef[-1], divergence, len(samples)))
    return Recomputed(policy, critic, kl_coef)


def next_coef(kl: Any, coef: float, divergence: float, num_samples: int) -> float:
    """Ziegler et al. 2019, section 2.2."""
    if kl.controller == "fixed":
        return coef
    error = float(np.clip(divergence / kl.target - 1, -0.2, 0.2))
    return coef * (1 + error * num_samples / kl.horizon)


@torch.no_grad()
def look_back(
    config: Any,
    samples: Sequence[Sample],
    policy: Policy,
    critic: Critic | None,
    reference: Policy,
    kl_coef: float,
) -> tuple[list[Target], float]:
    """Everything that is fixed before a step's first update; and the mean divergence per sequence."""
    temperature, kl = config.rollout.temperature, config.algorithm.kl
    old = [policy.look(sample, temperature) for sample in samples]
    values = [seen.values for seen in old]
    if critic is not None:
        values = [critic.look(sample, 1.0).values for sample in samples]
    frozen = [reference.look(sample, temperature).logprobs for sample in samples]
    divergences = [
        ESTIMATES[kl.estimator](seen.logprobs - ref) for seen, ref in zip(old, frozen, strict=True)
    ]
    scores = np.array([small_digits([""], [sample.response], None)[0] for sample in samples])
    groups = np.array([sample.group_id for sample in samples])
    lengths = [len(seen.logprobs) for seen in old]
    penalties = [-kl_coef * d.numpy() for d in divergences]
    rule = ADVANTAGES[config.algorithm.name]
    advantages, returns = rule(config.algorithm, scores, groups, lengths, penalties, values)
    targets = [
        Target(
            advantages=torch.tensor(advantages[i]),
            returns=None if returns is None else torch.tensor(returns[i]),
            old_logprobs=old[i].logprobs,
            old_values=values[i],
            reference=frozen[i],
            behaviour=torch.tensor(samples[i].behaviour),
            truncated=samples[i].finish_reason == "length",
        )
        for i in range(len(samples))
    ]
    return targets, float(np.mean([float(d.sum()) for d in divergences]))


ESTIMATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: torch.exp(-d) - 1 + d,
    "abs": lambda d: d.abs(),
}


def policy_loss(config: Any, seen: Sequence[Seen], aims: Sequence[Target], kl_coef: float) -> torch.Tensor:
    rows = [row_terms(config, now, aim, kl_coef) for now, aim in zip(seen, aims, strict=True)]
    if config.algorithm.loss.mask_truncated:
        rows = [row for row, aim in zip(rows, aims, strict=True) if not aim.truncated]
    return aggregated(config, rows)


def aggregated(config: Any, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    kind = config.algorithm.loss.aggregation
    if kind == "token_mean":
        return torch.cat(list(rows)).mean()
    if kind == "sequence_mean":
        return torch.stack([row.mean() for row in rows]).mean()
    return torch.stack([row.sum() / config.rollout.max_new_tokens for row in rows]).mean()


def row_terms(config: Any, now: Seen, aim: Target, kl_coef: float) -> torch.Tensor:
    """[T]: what each token contributes; a whole sequence's term stands at each of its tokens."""
    algorithm, loss = config.algorithm, config.algorithm.loss
    moved = now.logprobs - aim.old_logprobs
    ratio = {"token": moved, "sequence": moved.sum(), "sequence_mean": moved.mean()}[loss.ratio].exp()
    clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    advantages = aim.advantages
    if loss.kind == "cispo":
        terms = -ratio.clamp(max=1 + loss.clip_high).detach() * advantages * now.logprobs
    elif loss.kind == "sapo":
        positive, negative = loss.temperature_positive, loss.temperature_negative
        heat = torch.where(advantages > 0, positive, negative)
        terms = -advantages * 4 / heat / (1 + torch.exp(-heat * (ratio - 1)))
    elif loss.kind == "reinforce":
        terms = -advantages * now.logprobs
    else:
        terms = -torch.minimum(ratio * advantages, clipped * advantages)
    cap = config.asynchrony.importance_cap
    if isinstance(cap, float):
        terms = terms * (aim.old_logprobs - aim.behaviour).exp().clamp(max=cap)
    terms = terms - loss.entropy_coef * now.entropy
    if algorithm.kl.place == "loss" and kl_coef > 0:
        assert aim.reference is not None
        terms = terms + kl_coef * ESTIMATES[algorithm.kl.estimator](now.logprobs - aim.reference)
    return terms


def value_loss(config: Any, seen: Sequence[Seen], aims: Sequence[Target]) -> torch.Tensor:
    """½ max((V − R)², (V_old + clip(V − V_old) − R)²), the mean over all tokens of the update."""
    clip, terms = config.algorithm.critic.clip_value, []
    for now, aim in zip(seen, aims, strict=True):
        assert now.values is not None and aim.old_values is not None and aim.returns is not None
        held = aim.old_values + (now.values - aim.old_values).clamp(-clip, clip)
        terms.append(torch.maximum((now.values - aim.returns) ** 2, (held - aim.returns) ** 2) / 2)
    return torch.cat(terms).mean()
