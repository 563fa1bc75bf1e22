"""The yardstick of bench/local_backend.py: the same PPO iteration as a plain loop over transformers.

No cluster, no checks, no metrics, no files: what anybody would write in an afternoon. Padded batches,
`model.generate`, a value head on the last hidden state, GAE, clipped losses, `torch.optim.AdamW`.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

TEMPERATURE, KL_COEF, CLIP, LAM = 0.7, 0.05, 0.2, 0.95
ROWS, NEW_TOKENS, EPOCHS = 16, 32, 4


class PlainPPO:
    """`iteration` draws 16 responses and takes 16 updates."""

    def __init__(self, model: Path, tokenizer: object, threads: int, mini_batches: int) -> None:
        self.mini_batch = ROWS // mini_batches
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(model)
        self.reference = AutoModelForCausalLM.from_pretrained(model).eval()
        hidden = self.model.config.hidden_size
        self.value_head = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.tokenizer = tokenizer
        self.trained = [*self.model.parameters(), *self.value_head.parameters()]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-5)

    def iteration(self) -> tuple[float, float]:
        """Wall and CPU seconds."""
        begun = time.perf_counter(), time.process_time()
        texts = [f"{random.randrange(100)}+{random.randrange(100)}=" for _ in range(ROWS)]
        self.tokenizer.padding_side = "left"
        prompts = self.tokenizer(texts, return_tensors="pt", padding=True)
        self.model.eval()
        tokens = self.model.generate(
            **prompts,
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            pad_token_id=0,
        )
        real = torch.cat([prompts["attention_mask"], torch.ones(ROWS, NEW_TOKENS, dtype=torch.long)], dim=1)
        with torch.no_grad():
            old, values = self._forward(self.model, tokens, real)
            reference, _ = self._forward(self.reference, tokens, real)
        rewards = -KL_COEF * (old - reference)
        rewards[:, -1] += torch.tensor([float(len(text) % 2) for text in texts])
        advantages, returns = self._gae(rewards, values)
        self.model.train()
        for _ in range(EPOCHS):
            for rows in torch.randperm(ROWS).split(self.mini_batch):
                self._update(
                    tokens[rows], real[rows], old[rows], values[rows], advantages[rows], returns[rows]
                )
        return time.perf_counter() - begun[0], time.process_time() - begun[1]

    def _forward(
        self, model: nn.Module, tokens: torch.Tensor, real: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        positions = (real.cumsum(1) - 1).clamp(min=0)
        output = model(tokens, attention_mask=real, position_ids=positions, output_hidden_states=True)
        before = slice(-NEW_TOKENS - 1, -1)
        logprobs = (output.logits[:, before] / TEMPERATURE).log_softmax(-1)
        chosen = logprobs.gather(-1, tokens[:, -NEW_TOKENS:, None])[..., 0]
        return chosen, self.value_head(output.hidden_states[-1][:, before])[..., 0]

    def _gae(self, rewards: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        advantages, last = torch.zeros_like(rewards), torch.zeros(ROWS)
        for t in reversed(range(NEW_TOKENS)):
            following = values[:, t + 1] if t + 1 < NEW_TOKENS else torch.zeros(ROWS)
            last = rewards[:, t] + following - values[:, t] + LAM * last
            advantages[:, t] = last
        returns = advantages + values
        return (advantages - advantages.mean()) / (advantages.std() + 1e-8), returns

    def _update(
        self,
        tokens: torch.Tensor,
        real: torch.Tensor,
        old: torch.Tensor,
        old_values: torch.Tensor,
        advantages: torch.Tensor,
        returns: torch.Tensor,
    ) -> None:
        logprobs, values = self._forward(self.model, tokens, real)
        ratio = (logprobs - old).exp()
        policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
        clipped = old_values + (values - old_values).clamp(-CLIP, CLIP)
        value = 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).mean()
        (policy + 0.1 * value).backward()
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
