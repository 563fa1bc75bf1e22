"""A reward model as a trained module: a decoder trunk and one linear head without bias, packed.

Enters: packed tokens whose rows end in one token more than the text; that one is the only action. Leaves:
(0, 0, score of the state before the action), so the score is read at the text's last token, as transformers'
…ForSequenceClassification does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from rl_cluster.config.run import LoRAConfig
from rl_cluster.errors import BadInputError
from rl_cluster.modeling.examine import examine_trunk
from rl_cluster.modeling.layout import PackedLayout
from rl_cluster.modeling.load import DtypeName, described, enable_checkpointing, pretrained
from rl_cluster.modeling.loading import outside_the_trunk
from rl_cluster.modeling.packed import packed_hidden_states
from rl_cluster.modeling.policy import Output, base_model, is_lora


class ScoreModel(nn.Module):
    """lm: a …ForSequenceClassification with one label (or peft's wrapper of one), packed attention."""

    value_head = None
    """Nothing goes beside the exported model: the score is part of it."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(
        self, tokens: torch.Tensor, packed: PackedLayout, targets: torch.Tensor, temperature: float
    ) -> Output:
        """As PolicyModel.forward; values float32 [A] are the scores, temperature has no effect."""
        del temperature
        base = base_model(self.lm)
        hidden = packed_hidden_states(getattr(base, base.base_model_prefix), tokens, packed)
        scores = base.score(packed.states_at(hidden, targets - 1))[:, 0].float()
        zeros = torch.zeros_like(scores)
        return zeros, zeros, scores

    def reference(self) -> AbstractContextManager[None]:
        """A reward model has no reference form."""
        return nullcontext()


def load_score_model(
    path: str,
    *,
    dtype: DtypeName = "float32",
    lora: LoRAConfig | None = None,
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    seed: int = 0,
    pad_token_id: int | None = None,
) -> ScoreModel:
    """From a causal language model (its head is dropped, a fresh score drawn from the seed) or from a
    sequence-classification checkpoint with one label, whose score goes on.

    pad_token_id: written to the exported config, because transformers finds the last token by it.
    Raises BadInputError when there is no usable model at path.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        may_lack = None if _stored_labels(path) == 1 else _is_score
        lm = pretrained(
            _OneLabel, path, dtype, trust_remote_code, may_lack=may_lack, may_leave=outside_the_trunk
        )
        _check(lm, path)
        examine_trunk(lm, getattr(lm, lm.base_model_prefix), described(path, lm))
        if pad_token_id is not None:
            lm.config.pad_token_id = pad_token_id
        wrapped = lm if lora is None else _with_adapters(lm, lora)
    if gradient_checkpointing:
        enable_checkpointing(lm)
    return ScoreModel(wrapped)


class _OneLabel:
    """What `pretrained` calls: AutoModelForSequenceClassification with num_labels=1."""

    @staticmethod
    def from_pretrained(path: str, **settings: Any) -> Any:
        labels = _stored_labels(path)
        if labels not in (None, 1):
            raise BadInputError(
                f"model.path: {path!r} is a classifier with {labels} labels; a reward model has one score. "
                "Give a language model, or a checkpoint with num_labels=1."
            )
        return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, **settings)


def _is_score(lm: nn.Module, key: str) -> bool:
    """What a causal language model lacks by nature."""
    del lm
    return key == "score.weight"


def _stored_labels(path: str) -> int | None:
    """Labels of a sequence-classification checkpoint; None for any other model."""
    from transformers import AutoConfig

    if Path(path).is_dir():
        config = AutoConfig.from_pretrained(path)
        names = config.architectures or []
        return (
            config.num_labels if any(name.endswith("ForSequenceClassification") for name in names) else None
        )
    return None


def _check(lm: Any, path: str) -> None:
    if not isinstance(getattr(lm, "score", None), nn.Linear) or lm.score.bias is not None:
        raise BadInputError(
            f"model.path: {path!r} ({type(lm).__name__}) is not a decoder with a linear score; "
            "choose a decoder-only model"
        )


def _with_adapters(lm: Any, lora: LoRAConfig) -> nn.Module:
    from peft import LoraConfig, get_peft_model  # imports deepspeed where it is installed: only on demand

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        modules_to_save=["score"],
        task_type="SEQ_CLS",
    )
    try:
        wrapped = get_peft_model(lm, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise BadInputError(f"model.lora.targets: {lora.targets!r}: {str(error).splitlines()[0]}") from error
    assert is_lora(wrapped)
    return wrapped


def merge_adapter(
    base: str, adapter: Path, target: Path, pad_token_id: int, trust_remote_code: bool = False
) -> None:
    """Write the base with adapter and score folded in: an ordinary classifier folder. On the CPU."""
    from peft import PeftModel

    lm = _OneLabel.from_pretrained(base, dtype="auto", trust_remote_code=trust_remote_code)
    merged = PeftModel.from_pretrained(lm, str(adapter)).merge_and_unload()
    merged.config.pad_token_id = pad_token_id
    merged.save_pretrained(target)
