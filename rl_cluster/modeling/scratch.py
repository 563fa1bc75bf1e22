"""A ScratchModel config becomes an ordinary Hugging Face folder: a char-level Qwen2 with random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from rl_cluster.config.run import ScratchModel
from rl_cluster.errors import BadInputError

SPECIAL = PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def build_tokenizer(alphabet: str, max_positions: int, chat_template: str | None = None) -> Qwen2Tokenizer:
    """One token per character: <pad> is 0, <eos> 1, <unk> 2, then the alphabet in order.

    AutoTokenizer turns the tokenizer of every Qwen2 folder into a Qwen2Tokenizer, whatever its file says,
    so this is one: byte-level BPE without merges. It drops characters that are not in the alphabet.
    """
    if not alphabet or len(set(alphabet)) != len(alphabet) or not alphabet.isascii():
        raise BadInputError(
            f"model.scratch.alphabet: {alphabet!r} is empty, or holds a character twice or one that is not "
            "ASCII; list each ASCII character once"
        )
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *map(_byte_level, alphabet)])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        unk_token=UNKNOWN,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def _byte_level(character: str) -> str:
    """How byte-level BPE writes an ASCII character: printable ones as they are, others from U+0100 up."""
    code = ord(character)
    if 33 <= code <= 126:
        return character
    return chr(256 + code) if code <= 32 else chr(256 + 33)


def build_model(scratch: ScratchModel, vocab_size: int, seed: int) -> Qwen2ForCausalLM:
    """Random weights in float32, the same for the same seed; the global random state stays as it was."""
    if scratch.hidden_size % (2 * scratch.num_heads) != 0:
        raise BadInputError(
            f"model.scratch.hidden_size: {scratch.hidden_size} must be an even multiple of "
            f"num_heads ({scratch.num_heads})"
        )
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=scratch.hidden_size,
        intermediate_size=scratch.intermediate_size,
        num_hidden_layers=scratch.num_layers,
        num_attention_heads=scratch.num_heads,
        num_key_value_heads=scratch.num_heads,
        max_position_embeddings=scratch.max_positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        pad_token_id=SPECIAL.index(PAD),
        eos_token_id=SPECIAL.index(EOS),
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def save_scratch_model(
    scratch: ScratchModel, folder: Path, seed: int = 0, chat_template: str | None = None
) -> None:
    """Write config.json, model.safetensors, the tokenizer and generation_config.json into `folder`."""
    tokenizer = build_tokenizer(scratch.alphabet, scratch.max_positions, chat_template)
    model = build_model(scratch, len(tokenizer), seed)
    model.generation_config = GenerationConfig(
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    # Not model.save_pretrained, which imports DeepSpeed where it is installed: seconds, for a model of 2 MB.
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
