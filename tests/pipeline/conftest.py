"""Small models and batches that the pipeline's tests share."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from rl_cluster.pipeline import AsyncTrainingClient, ForwardBackwardPipeline


class TableModel(nn.Module):
    """Logits of the next token are a row of a table: every log-probability and gradient is known by hand."""

    def __init__(self, vocab=5, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.table = nn.Parameter(torch.randn(vocab, vocab, generator=generator, dtype=dtype))

    def forward(self, input_ids):
        return self.table[input_ids]


class DropoutModel(nn.Module):
    """Draws random numbers and keeps running statistics: both must be put back after a failure."""

    def __init__(self, vocab=7, hidden=8):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, input_ids, attention_mask=None):
        hidden = self.norm(self.embedding(input_ids).flatten(0, 1)).unflatten(0, input_ids.shape)
        return SimpleNamespace(logits=self.head(self.dropout(hidden)))


class ValueModel(nn.Module):
    """Logits and a value per token, as PPOModel; the value of the state after token i is values[i]."""

    def __init__(self, vocab=5):
        super().__init__()
        self.logits = TableModel(vocab)
        self.values = nn.Parameter(torch.linspace(-1, 1, vocab, dtype=torch.float64))

    def forward(self, input_ids, attention_mask=None, return_value=False):
        logits = self.logits(input_ids)
        return (logits, self.values[input_ids]) if return_value else logits


def build_qwen(seed=0, vocab=23, tied=True, eos=1):
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=eos,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def build_gpt2(seed=0, vocab=23):
    """Learned absolute positions, where a shift by one shows."""
    config = GPT2Config(
        vocab_size=vocab, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config).eval()


@pytest.fixture
def make_gpt2():
    return build_gpt2


@pytest.fixture
def qwen():
    return build_qwen()


@pytest.fixture
def make_qwen():
    return build_qwen


@pytest.fixture
def models():
    return SimpleNamespace(Table=TableModel, Dropout=DropoutModel, Value=ValueModel)


@pytest.fixture
def pipelines():
    """pipelines(model, …) builds one that is shut down after the test."""
    made = []

    def build(model, **arguments):
        made.append(ForwardBackwardPipeline(model, **arguments))
        return made[-1]

    yield build
    for pipeline in made:
        pipeline.shutdown()


@pytest.fixture
def gradients():
    """name -> copy of what is accumulated."""
    return lambda model: {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def clients():
    """Makes AsyncTrainingClients, and ends them after the test."""
    made = []

    def build(*arguments, **options):
        made.append(AsyncTrainingClient(*arguments, **options))
        return made[-1]

    yield build
    for client in made:
        client.shutdown()
