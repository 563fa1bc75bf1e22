"""Tiny models of many architectures, each compared with plain transformers; docs/models.md is made of this.

Every weight is random, norms, biases, sinks and decays too, so that a term left out shows. Sliding windows,
chunks and convolutions are shorter than the sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rl_cluster.errors import BadInputError
from rl_cluster.modeling.generate import Drawing, Generation, Request
from rl_cluster.modeling.load import load_policy
from rl_cluster.modeling.packed import PackedLayout, decoder_of, is_packed
from rl_cluster.modeling.policy import PolicyModel
from rl_cluster.modeling.sharing import shared_prefixes

VOCABULARY = 64
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS_OF_8 = {"head_dim": 8}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1} | {
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8} | {
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8} | {
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}


@dataclass(frozen=True)
class Case:
    """kind: transformers' model_type. settings: beside those of COMMON that its config has."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("llama"),
    Case("mistral", {"sliding_window": 5}),
    Case("ministral", HEADS_OF_8 | SLIDING),
    Case("mixtral", EXPERTS | {"sliding_window": 5}),
    Case("qwen2"),
    Case("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 16}),
    Case("qwen3", HEADS_OF_8),
    Case("qwen3_moe", EXPERTS | HEADS_OF_8),
    Case("qwen3_next", LINEAR | EXPERTS | {"shared_expert_intermediate_size": 16}),
    Case("qwen3_5_text", LINEAR),
    Case("qwen3_5_moe_text", LINEAR | EXPERTS | {"shared_expert_intermediate_size": 16}),
    Case("gemma", HEADS_OF_8),
    Case("gemma2", HEADS_OF_8 | SLIDING | {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
    Case("gemma3_text", HEADS_OF_8 | SLIDING),
    Case(
        "gemma3n_text",
        HEADS_OF_8
        | {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
        | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 5}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": None},
    ),
    Case(
        "gemma4_text",
        {"head_dim": 8, "global_head_dim": 8, "vocab_size_per_layer_input": VOCABULARY}
        | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
        | SLIDING,
    ),
    Case("phi", {"qk_layernorm": False}),
    Case("phi3", {"sliding_window": 5}),
    Case("phimoe", EXPERTS | {"sliding_window": 5}),
    Case("gpt2", GPT),
    Case("gpt_neo", {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 5}),
    Case("gpt_neox", {"num_key_value_heads": 4}),
    Case("gptj", GPT | {"rotary_dim": 4}),
    Case("gpt_bigcode", GPT),
    Case("gpt_oss", EXPERTS | HEADS_OF_8 | SLIDING),
    Case("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    Case("bloom", {"n_layer": 2, "n_head": 4}),
    Case("falcon", {"alibi": True}),
    Case("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}),
    Case("stablelm"),
    Case("starcoder2", {"sliding_window": 5}),
    Case("smollm3"),
    Case("olmo"),
    Case("olmo2"),
    Case("olmo3", SLIDING),
    Case("olmoe", EXPERTS),
    Case("granite", {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7}),
    Case("granitemoe", EXPERTS | {"logits_scaling": 4.0}),
    Case(
        "granitemoehybrid",
        EXPERTS
        | MAMBA
        | {"layer_types": ["mamba", "attention"], "logits_scaling": 2.0, "shared_intermediate_size": 16},
    ),
    Case("cohere", {"logit_scale": 0.5}),
    Case("cohere2", {"logit_scale": 0.5, "head_dim": 8} | SLIDING),
    Case("glm", HEADS_OF_8),
    Case("glm4", HEADS_OF_8),
    Case("glm4_moe", ROUTED | HEADS_OF_8),
    Case("exaone4", SLIDING),
    Case("ernie4_5"),
    Case("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
    Case("hunyuan_v1_dense", HEADS_OF_8),
    Case("nemotron"),
    Case("nemotron_h", {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1}),
    Case("deepseek_v2", ROUTED | LATENT),
    Case("deepseek_v3", ROUTED | LATENT),
    Case("llama4_text", HEADS_OF_8 | EXPERTS | {"intermediate_size_mlp": 48, "attention_chunk_size": 5}),
    Case("lfm2", {"layer_types": ["conv", "full_attention"]}),
    Case("falcon_h1", MAMBA | {"head_dim": 8, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5}),
    Case("bamba", MAMBA | {"attn_layer_indices": [1]}),
    Case("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 4}),
    Case("mamba", {"state_size": 8}),
    Case("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}),
    Case("falcon_mamba", {"state_size": 8}),
    Case("recurrent_gemma", {"attention_window_size": 5, "lru_width": 32, "num_hidden_layers": 3}),
    Case("rwkv", {"attention_hidden_size": 32}),
    Case("minimax", EXPERTS | HEADS_OF_8 | {"layer_types": ["linear_attention", "full_attention"]}),
    Case("diffllama"),
    Case("hrm_text"),
    Case("apertus"),
    Case("arcee"),
    Case("dots1", ROUTED | {"n_shared_experts": 1, "num_key_value_heads": 4}),
    Case("exaone_moe", EXPERTS | ROUTED | SLIDING),
    Case("helium", HEADS_OF_8),
    Case("minicpm3", LATENT),
    Case("minimax_m2", EXPERTS | HEADS_OF_8),
    Case("ministral3", HEADS_OF_8),
    Case("nanochat"),
    Case("olmo_hybrid", LINEAR),
    Case("seed_oss", HEADS_OF_8),
    Case("bert", {"is_decoder": True}),
    Case("roberta", {"is_decoder": True}),
    Case("electra", {"is_decoder": True, "embedding_size": 16}),
)
"""As they are listed in docs/models.md."""


def config_of(case: Case) -> Any:
    """The tiny config: of COMMON what the architecture knows, and the case's own settings."""
    known = AutoConfig.for_model(case.kind)
    common = {name: value for name, value in COMMON.items() if hasattr(known, name)}
    return AutoConfig.for_model(case.kind, **(common | case.settings))


def save_tiny(case: Case, folder: Path) -> None:
    """A model with all weights random, from a seed."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config_of(case), attn_implementation="eager")
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    lm.save_pretrained(folder)


@dataclass(frozen=True)
class Rows:
    """Samples of two prompts, three of the first and one of the second, and one with a prompt of its own."""

    tokens: np.ndarray
    lengths: list[int]
    mask: np.ndarray

    @staticmethod
    def make() -> Rows:
        generator = np.random.default_rng(0)
        rows, masks = [], []
        prompts = [generator.integers(3, VOCABULARY, n) for n in (7, 4, 11)]
        for prompt, count in ((0, 9), (1, 12), (0, 2), (0, 5), (2, 1)):
            rows.append(np.concatenate([prompts[prompt], generator.integers(3, VOCABULARY, count)]))
            masks.append(np.arange(len(rows[-1])) >= len(prompts[prompt]))
        return Rows(np.concatenate(rows), [len(row) for row in rows], np.concatenate(masks))

    @property
    def targets(self) -> torch.Tensor:
        return torch.from_numpy(np.flatnonzero(self.mask))

    @property
    def layout(self) -> PackedLayout:
        return PackedLayout.of(self.lengths, shared_prefixes=shared_prefixes(self.tokens, self.lengths))


def plain_logprobs(lm: PreTrainedModel, rows: Rows) -> torch.Tensor:
    """[A] of the drawn tokens, by transformers alone, a row at a time."""
    tables = []
    for row in torch.from_numpy(rows.tokens).split(rows.lengths):
        logits = lm(input_ids=row[None], use_cache=False).logits[0].float()
        before = torch.cat([logits[:1], logits[:-1]]).log_softmax(-1)
        tables.append(before.gather(-1, row[:, None])[:, 0])
    return torch.cat(tables)[rows.targets]


def our_logprobs(policy: PolicyModel, rows: Rows) -> torch.Tensor:
    return policy(torch.from_numpy(rows.tokens), rows.layout, rows.targets, 1.0)[0]


@dataclass(frozen=True)
class Outcome:
    """way: packed, padded or refused; why: of the latter. learner: the largest difference of the learner's
    log-probabilities from plain transformers', sampler: of the local sampler's from the learner's; nats."""

    way: str
    learner: float | None = None
    sampler: float | None = None
    why: str = ""


def measure(case: Case, folder: Path) -> Outcome:
    """Save the tiny model into the folder, load it as a run does, and compare."""
    save_tiny(case, folder)
    try:
        policy = load_policy(str(folder))
    except BadInputError as error:
        return Outcome("refused", why=str(error))
    rows = Rows.make()
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        learner = float((our_logprobs(policy, rows) - plain_logprobs(plain, rows)).abs().max())
    way = "packed" if is_packed(decoder_of(policy.lm)) else "padded"
    return Outcome(way, learner, _sampler_difference(policy))


def _sampler_difference(policy: PolicyModel) -> float:
    prompts = [[5, 9, 13, 4], [5, 9, 13, 4], [7, 8], [11, 12, 13, 14, 15, 16, 17, 18]]
    requests = [Request(prompt, seed, 6 + seed) for seed, prompt in enumerate(prompts)]
    generation = Generation(policy, requests, Drawing(1.0))
    while generation.step():
        pass
    gaps = []
    for response in generation.responses:
        prompt = list(response.request.prompt)
        tokens = torch.tensor(prompt + response.tokens)
        targets = torch.arange(len(prompt), len(tokens))
        with torch.no_grad():
            again = policy(tokens, PackedLayout.of([len(tokens)]), targets, 1.0)[0]
        gaps.append(float((again - torch.tensor(response.logprobs)).abs().max()))
    return max(gaps)
