"""How big a model is: a ModelConfig in, a ModelShape out; no weight is read and nothing is downloaded.

A folder's config.json is read by transformers, which is imported then and not before: plans of scratch models
and of names need no torch. Code that comes with a model is not run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_cluster.config.planning.published_shapes import nearest_published, published_shape, size_in_name
from rl_cluster.config.planning.rope import POSITION_NAMES, positions, rope_switch
from rl_cluster.config.run import ModelConfig, ScratchModel

NUM_SPECIAL_TOKENS = 3
"""Of the char-level tokenizer that a scratch model gets."""


@dataclass(frozen=True)
class ModelShape:
    """num_parameters: all weights, tied ones once. kv_heads × head_dim: width of the keys of one layer.
    max_positions: as rope.positions, None: unknown. source: where the numbers come from, for the user.
    is_its_own: False where the widths are those of another model of its size."""

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
    is_its_own: bool = True
    is_of_rope: bool = False
    """Whether max_positions is where the rotary frequencies change (rope.rope_switch)."""

    @property
    def named_positions(self) -> str:
        """For a message."""
        why = ": beyond them its rope (longrope or dynamic) is another one" if self.is_of_rope else ""
        return f"{self.max_positions} positions{why}"

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
    """From config.json. Parameters: as stored in safetensors files, else of the model on torch's meta device,
    else counted as a dense decoder's."""
    try:
        values = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):  # reported by config/checks/run.py, which names the remedy
        return None
    if not isinstance(values, dict):
        return None
    config = _read_config(folder)
    count = _count_stored(folder) or (None if config is None else _count_on_meta(config))
    if config is not None:
        values = _named_alike(config.get_text_config())
    return _shape_from_config(values.get("text_config") or values, source, count)


def _read_config(folder: Path) -> Any | None:
    """None for an architecture that transformers does not have, or does not have so."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception:  # noqa: BLE001 — architectures validate in their own ways; loading the model tells why
        return None


_ALIKE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "tie_word_embeddings",
    *POSITION_NAMES,
)


def _named_alike(config: Any) -> dict[str, Any]:
    """The values under the names that most architectures use: GPT-2's n_embd is its hidden_size."""
    return {name: getattr(config, name) for name in _ALIKE if hasattr(config, name)}


def _count_on_meta(config: Any) -> int | None:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception:  # noqa: BLE001 — no causal model of this architecture; loading the model tells why
        return None
    return sum(int(weight.numel()) for weight in model.parameters())


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
        max_positions=positions(values),
        source=source,
        is_of_rope=rope_switch(values) == positions(values) is not None,
    )


def _count_stored(folder: Path) -> int | None:
    """Elements in the folder's safetensors files, from their headers."""
    from huggingface_hub import errors, get_local_safetensors_metadata, parse_local_safetensors_file_metadata

    try:
        whole = get_local_safetensors_metadata(folder)
        return sum(whole.parameter_count.values()) or None
    except errors.NotASafetensorsRepoError:
        pass  # files of other names
    except (errors.SafetensorsParsingError, OSError, ValueError):  # reported when they are loaded
        return None
    try:
        files = [parse_local_safetensors_file_metadata(path) for path in sorted(folder.glob("*.safetensors"))]
    except (errors.SafetensorsParsingError, OSError, ValueError):
        return None
    return sum(sum(file.parameter_count.values()) for file in files) or None


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
    """As published where the table has it; else the size in the name, and the nearest one's widths."""
    own, size = published_shape(path), size_in_name(path)
    if own is None and size is None:
        return None
    row = own or nearest_published(size or 0)
    return ModelShape(
        num_parameters=row.num_parameters if size is None or own else size,
        num_layers=row.num_layers,
        hidden_size=row.hidden_size,
        intermediate_size=row.intermediate_size,
        num_heads=row.num_heads,
        num_kv_heads=row.num_kv_heads,
        head_dim=row.head_dim,
        vocab_size=row.vocab_size,
        max_positions=None,
        source=f"{row.name} as published ({path} is not on this machine)"
        if own
        else f"the name {path}, with the widths of {row.name} (it is not on this machine)",
        is_its_own=own is not None,
    )
