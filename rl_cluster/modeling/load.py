"""A model folder or hub name becomes a PolicyModel or a CriticModel, or a BadInputError says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from rl_cluster.config.run import LoRAConfig
from rl_cluster.errors import BadInputError
from rl_cluster.modeling.examine import examine_policy, examine_trunk
from rl_cluster.modeling.loading import Keys, check_finite, load_whole, outside_the_trunk
from rl_cluster.modeling.policy import CriticModel, PolicyModel, ValueHead

VALUE_HEAD_FILE = "value_head.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

DtypeName = Literal["float32", "bfloat16"]


def load_policy(
    path: str,
    *,
    dtype: DtypeName = "float32",
    value_head: bool = False,
    lora: LoRAConfig | None = None,
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    seed: int = 0,
) -> PolicyModel:
    """The causal language model at `path`, on the CPU, packed if its architecture allows (examine.py).

    seed: of the value head and the adapters, so that every rank makes the same. A value head saved beside
    the model is loaded. Raises BadInputError when there is no usable model at path.
    """
    lm = pretrained(AutoModelForCausalLM, path, dtype, trust_remote_code)
    examined = examine_policy(lm, described(path, lm))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wrapped = lm if lora is None else _with_adapters(lm, lora)
        policy = PolicyModel(wrapped, value_head=value_head, logit_map=examined.logit_map)
    if policy.value_head is not None:
        _load_value_head(policy.value_head, path)
    if gradient_checkpointing:
        enable_checkpointing(lm)
    return policy


def load_critic(
    path: str,
    *,
    dtype: DtypeName = "float32",
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    seed: int = 0,
) -> CriticModel:
    """A separate critic whose trunk starts from the model at `path` (its other heads are ignored)."""
    trunk = pretrained(AutoModel, path, dtype, trust_remote_code, may_leave=outside_the_trunk)
    examine_trunk(trunk, trunk, described(path, trunk))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        critic = CriticModel(trunk)
    _load_value_head(critic.value_head, path)
    if gradient_checkpointing:
        enable_checkpointing(trunk)
    return critic


def check_model_path(path: str) -> None:
    """Raise BadInputError if `path` looks like a local folder and holds no model. Reads no weights."""
    folder = Path(path).expanduser()
    looks_local = folder.exists() or path.startswith((".", "/", "~")) or path.count("/") != 1
    if not looks_local:
        return
    if not folder.is_dir():
        raise BadInputError(f"model.path: folder {path!r} does not exist; give a Hugging Face model folder")
    if not (folder / "config.json").is_file():
        raise BadInputError(f"model.path: {path!r} holds no config.json; give a Hugging Face model folder")


def pretrained(
    factory: Any, path: str, dtype: DtypeName, trust_remote_code: bool, **keys: Keys | None
) -> PreTrainedModel:
    """With eager attention, which every architecture has. keys: as load_whole's may_lack and may_leave."""
    check_model_path(path)
    return load_whole(
        factory,
        path,
        where=f"model.path: {path!r}",
        **keys,
        dtype=DTYPES[dtype],
        attn_implementation="eager",
        trust_remote_code=trust_remote_code,
    )


def described(path: str, model: PreTrainedModel) -> str:
    """How a message names the model."""
    return f"model.path: {path!r} ({type(model).__name__})"


def _with_adapters(lm: PreTrainedModel, lora: LoRAConfig) -> nn.Module:
    from peft import LoraConfig, get_peft_model  # imports deepspeed where it is installed: only on demand

    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        wrapped = get_peft_model(lm, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise BadInputError(f"model.lora.targets: {lora.targets!r}: {str(error).splitlines()[0]}") from error
    if not isinstance(lm.get_output_embeddings(), nn.Linear) or hasattr(lm.get_output_embeddings(), "lora_A"):
        raise BadInputError(
            f"model.lora.targets: {lora.targets!r} includes the language-model head, which cannot be "
            "adapted; leave it out"
        )
    return wrapped


def _load_value_head(head: ValueHead, path: str) -> None:
    file = Path(path).expanduser() / VALUE_HEAD_FILE
    if not file.is_file():
        return
    try:
        head.load_state_dict(load_file(file))
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise BadInputError(
            f"model.path: {str(file)!r} is no value head of this model: {reason}. Give the one that was "
            "saved beside it, or remove the file."
        ) from error
    check_finite(f"model.path: {str(file)!r}", head)


def enable_checkpointing(model: PreTrainedModel) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
