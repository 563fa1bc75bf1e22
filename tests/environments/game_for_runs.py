"""A game of sums that a run's environment is made of: a wrong answer is told so and may be tried again."""

import torch

from rl_cluster.environments import Observation, RLEnvironment, StepResult


class Sums(RLEnvironment):
    """Pays the share of digits among what was drawn, per turn; "-" is shown between the turns."""

    def __init__(self, tokenizer, turns, wants_tokens):
        self.tokenizer, self.turns, self.wants_tokens = tokenizer, turns, wants_tokens

    def reset(self):
        raise AssertionError("a run starts episodes with `start`")

    def start(self, prompt, metadata, seed):
        self.answer = metadata["answer"]
        self.tokens, self.response, self.turn = self.tokenizer(prompt)["input_ids"], [], 1
        return self.show()

    def step(self, action):
        self.tokens += action.tolist()
        self.response += action.tolist()
        if len(self.response) < 3 and self.response[-1] != self.tokenizer.eos_token_id:
            return StepResult(0.0, False, self.show())
        text = self.tokenizer.decode(self.response, skip_special_tokens=True)
        reward = sum(c.isdigit() for c in text) / 3
        if self.turn == self.turns or text == self.answer:
            return StepResult(reward, True, metrics={"turns": self.turn})
        self.turn, self.response = self.turn + 1, []
        self.tokens += self.tokenizer("-", add_special_tokens=False)["input_ids"]
        return StepResult(reward, False, self.show())

    def show(self):
        ids = torch.tensor([self.tokens])
        return Observation(ids, torch.ones_like(ids), "")


def make(tokenizer, turns=2, wants_tokens=False):
    return Sums(tokenizer, turns, wants_tokens)
