"""What the tests of engine and publication share: a stand-in learner, and transformers as the judge."""

import asyncio
import time

import numpy as np
import torch

from learners.transfer_gloo import GlooSender
from rl_cluster.trajectory import SamplingSpec
from rl_cluster.weights.channel import Channel
from rl_cluster.weights.wire import TensorMeta

PROMPT = [5, 13, 7, 17]


def sampling(max_new_tokens=16, **options):
    return SamplingSpec(**({"temperature": 1.0, "max_new_tokens": max_new_tokens} | options))


def metadata(model):
    return [
        TensorMeta(n, str(p.dtype).removeprefix("torch."), tuple(p.shape))
        for n, p in model.named_parameters()
    ]


def layer_groups(model):
    """The whole model as four groups, a plain stand-in for the learner's gathering."""
    named = [(n, p.data) for n, p in model.named_parameters()]
    size = -(-len(named) // 4)
    yield from (named[i : i + size] for i in range(0, len(named), size))


class Publishing:
    """A sender in this process and the shared engine, connected by a gloo channel."""

    def __init__(self, engine):
        self.engine = engine
        self.sender = GlooSender()

    async def connect(self, timeout_seconds=30.0, packed_bytes=100_000):
        rendezvous = self.sender.rendezvous()
        channel = Channel("gloo", "127.0.0.1", *rendezvous, 2, packed_bytes, timeout_seconds)
        await asyncio.gather(asyncio.to_thread(self.sender.open, channel), self.engine.join(channel, 1))

    async def publish(self, model, version, timeout_seconds=30.0):
        deadline = time.monotonic() + timeout_seconds
        receive = asyncio.ensure_future(self.engine.receive(version, metadata(model), timeout_seconds))
        sent = await asyncio.to_thread(
            self.sender.send, metadata(model), layer_groups(model), version, deadline
        )
        return sent, await receive


@torch.no_grad()
def transformers_logprobs(model, tokens, temperature=1.0):
    """float32 [T - 1]: of tokens[1:], by a plain forward pass."""
    logits = model(torch.tensor([list(map(int, tokens))])).logits[0, :-1] / temperature
    picked = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:]).long()[:, None])
    return picked[:, 0].numpy().astype(np.float32)


def perturb(model, names, seed, scale=0.5):
    """Change the parameters whose name contains one of `names`."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if any(part in name for part in names):
            parameter.data += scale * parameter.data.std() * torch.randn(parameter.shape, generator=generator)
    return model
