"""How big a model is: a ModelConfig in, a ModelShape out; reads config.json and file headers only."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_cluster.config.run import ModelConfig, ScratchModel

NUM_SPECIAL_TOKENS = 3
"""Of the char-level tokenizer that a scratch model gets."""


# (billions of parameters up to, hidden size, layers)
_USUAL = (
    (1, 1024, 28),
    (2, 2048, 28),
    (5, 2560, 36),
    (10, 4096, 36),
    (20, 5120, 40),
    (50, 5120, 64),
    (100, 8192, 80),
    (float("inf"), 16384, 126),
)


@dataclass(frozen=True)
class ModelShape:
    """num_parameters: all weights, tied ones once. kv_heads × head_dim: width of the keys of one layer.
    max_positions None: unknown. source: where the numbers come from, for the user."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None
    source: str

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values of all layers, in elements."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def lora_parameters(self, rank: int) -> int:
        """Adapters on every linear layer: rank × (in + out) each."""
        heads, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        ends = 2 * (hidden + heads) + 2 * (hidden + keys) + 3 * (hidden + inner)
        return self.num_layers * rank * ends


def find_shape(model: ModelConfig) -> ModelShape | None:
    """None where nothing can be known without the network (a hub name that is not on this machine)."""
    if model.scratch is not None:
        return _scratch_shape(model.scratch)
    assert model.path is not None
    folder = local_folder(model.path)
    return shape_of_folder(folder, str(folder)) if folder is not None else _shape_from_name(model.path)


def shape_of_folder(folder: Path, source: str) -> ModelShape | None:
    """From config.json; the parameters are counted in the headers of safetensors files if any."""
    try:
        values = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):  # reported by config/checks/run.py, which names the remedy
        return None
    values = values.get("text_config") or values
    return _shape_from_config(values, source, _count_stored(folder))


def local_folder(path: str) -> Path | None:
    """The folder of a local path, or of a hub model's snapshot in the cache of this machine."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        cached = huggingface_hub.try_to_load_from_cache(path, "config.json")
    except HFValidationError:  # not a hub name; config/checks/run.py says so
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _shape_from_config(values: dict[str, Any], source: str, stored: int | None) -> ModelShape | None:
    try:
        hidden, layers = int(values["hidden_size"]), int(values["num_hidden_layers"])
        heads, vocab = int(values["num_attention_heads"]), int(values["vocab_size"])
    except (KeyError, TypeError, ValueError):  # an architecture with other names: no estimate
        return None
    kv_heads = int(values.get("num_key_value_heads") or heads)
    head_dim = int(values.get("head_dim") or hidden // heads)
    inner = int(values.get("intermediate_size") or 4 * hidden)
    tied = bool(values.get("tie_word_embeddings", False))
    experts = int(values.get("num_local_experts") or values.get("num_experts") or 1)
    inner_expert = int(values.get("moe_intermediate_size") or inner)
    bias = values.get("attention_bias", values.get("model_type") == "qwen2")
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    attention += (heads + 2 * kv_heads) * head_dim if bias else 0
    router = hidden * experts if experts > 1 else 0
    layer = attention + 3 * hidden * inner_expert * experts + router + 2 * hidden
    counted = layers * layer + hidden + vocab * hidden * (1 if tied else 2)
    return ModelShape(
        num_parameters=stored or counted,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_positions=values.get("max_position_embeddings"),
        source=source,
    )


def _count_stored(folder: Path) -> int | None:
    """Elements in the folder's safetensors files, from their headers (8 bytes of length, then JSON)."""
    files = sorted(folder.glob("*.safetensors"))
    total = 0
    for path in files:
        try:
            with open(path, "rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(size))
        except (OSError, ValueError, struct.error):  # a damaged file is reported when it is loaded
            return None
        for name, tensor in header.items():
            if name != "__metadata__":
                product = 1
                for length in tensor["shape"]:
                    product *= length
                total += product
    return total or None


def _scratch_shape(scratch: ScratchModel) -> ModelShape | None:
    values = {
        "model_type": "qwen2",
        "hidden_size": scratch.hidden_size,
        "num_hidden_layers": scratch.num_layers,
        "num_attention_heads": scratch.num_heads,
        "intermediate_size": scratch.intermediate_size,
        "vocab_size": len(scratch.alphabet) + NUM_SPECIAL_TOKENS,
        "max_position_embeddings": scratch.max_positions,
        "tie_word_embeddings": True,
    }
    return _shape_from_config(values, "model.scratch", None)


def _shape_from_name(path: str) -> ModelShape | None:
    """`Qwen/Qwen2.5-7B` says 7e9; layers and widths as dense decoders of that size usually have them."""
    found = re.search(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)[bB](?![A-Za-z0-9])", path)
    if found is None:
        return None
    billions = float(found[1])
    hidden, layers = next((h, n) for limit, h, n in _USUAL if billions <= limit)
    return ModelShape(
        num_parameters=int(billions * 1e9),
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_heads=hidden // 128,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=152_000,
        max_positions=None,
        source=f"the name {path} alone (not on this machine)",
    )
