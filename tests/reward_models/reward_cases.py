"""Small bases and models that the tests of reward models share; mutated code gets them without fixtures."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    Qwen2Config,
    Qwen2Model,
    RobertaConfig,
    RobertaModel,
)

from rl_cluster.modeling.scratch import build_tokenizer

ALPHABET = "0123456789+=abcdefghijklmnopqrstuvwxyz "
TOKENIZER = build_tokenizer(ALPHABET, 32)
SIZES = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


class TableBase(nn.Module):
    """The hidden state of a token is its row of a table: every reward is known by hand."""

    hidden_size = 3

    def __init__(self, vocab: int = 6) -> None:
        super().__init__()
        rows = torch.arange(vocab * 3, dtype=torch.float32).reshape(vocab, 3)
        self.table = nn.Parameter(rows / 10)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        assert attention_mask.dtype == torch.int64
        return SimpleNamespace(last_hidden_state=self.table[input_ids])


def make_base(architecture: str, seed: int = 0) -> nn.Module:
    """A transformers trunk with random weights, without dropout of its own."""
    torch.manual_seed(seed)
    if architecture == "qwen2":
        return Qwen2Model(Qwen2Config(**SIZES, num_key_value_heads=1))
    if architecture == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": len(TOKENIZER)}
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2Model(GPT2Config(**sizes, **none, bos_token_id=1, eos_token_id=1))
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if architecture == "roberta":
        return RobertaModel(RobertaConfig(**{**SIZES, "max_position_embeddings": 33}, **quiet))
    return BertModel(BertConfig(**SIZES, **quiet))


def set_head(model: Any, *rows: list[float], bias: list[float] | None = None) -> Any:
    """The reward head's weights, one row per label; the model in eval mode."""
    with torch.no_grad():
        model.reward_head[-1].weight.copy_(torch.tensor(rows))
        if bias is not None:
            model.reward_head[-1].bias.copy_(torch.tensor(bias))
    return model.eval()


def sigmoid_loss(differences: Any) -> float:
    """Mean of −log σ(d) in numpy, the long way."""
    return float(np.mean([math.log1p(math.exp(-d)) for d in np.asarray(differences, dtype=float).ravel()]))


IDS = torch.tensor([[1, 2, 3], [4, 5, 0]])
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
OTHER_IDS = torch.tensor([[0, 3, 1], [2, 2, 5]])
OTHER_MASK = torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
"""Rows padded on the right, and on the left. With the table base, the last tokens are 3, 5 and 1, 5."""
