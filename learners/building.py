"""A LearnerSpec becomes what a rank holds: the model, a frozen reference beside it, the engine around it."""

from __future__ import annotations

from typing import Any

from torch import nn

from learners.engine import Engine
from learners.engine_torch import TorchEngine
from learners.spec import LearnerSpec
from rl_cluster.errors import BadInputError
from rl_cluster.modeling.load import load_critic, load_policy
from rl_cluster.modeling.policy import CriticModel, PolicyModel
from rl_cluster.modeling.score_model import ScoreModel, load_score_model


def load_model(spec: LearnerSpec) -> PolicyModel | CriticModel | ScoreModel:
    model = _loaded(spec)
    if spec.disable_dropout:
        without_dropout(model)
    return model


def without_dropout(model: nn.Module) -> None:
    """Of the model's own config: modules, and the numbers that attention hands to functions. An adapter's
    dropout is a setting of its own and stays."""
    for path, module in model.named_modules():
        if "lora_" in path:
            continue
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("dropout" in name or "pdrop" in name) and isinstance(value, float):
                setattr(module, name, 0.0)


def _loaded(spec: LearnerSpec) -> PolicyModel | CriticModel | ScoreModel:
    common: dict[str, Any] = {
        "dtype": spec.dtype,
        "gradient_checkpointing": spec.gradient_checkpointing,
        "trust_remote_code": spec.trust_remote_code,
        "seed": spec.seed,
    }
    if spec.kind == "critic":
        return load_critic(spec.model_path, **common)
    if spec.kind == "reward":
        return load_score_model(spec.model_path, lora=spec.lora, pad_token_id=spec.pad_token_id, **common)
    return load_policy(
        spec.model_path, value_head=spec.kind == "policy_with_values", lora=spec.lora, **common
    )


def load_reference(spec: LearnerSpec, model: nn.Module) -> PolicyModel | None:
    if spec.reference_path is None:
        return None
    assert isinstance(model, PolicyModel), "only a policy is compared with a reference"
    frozen = load_policy(spec.reference_path, dtype=spec.dtype, trust_remote_code=spec.trust_remote_code)
    own, other = (len(policy.logprob_head.weight) for policy in (model, frozen))
    if own != other:
        raise BadInputError(
            f"model.reference_path: {spec.reference_path} has a vocabulary of {other} tokens and the policy "
            f"one of {own}; algorithm.kl.estimator=exact compares them token by token. Give a reference of "
            "the same vocabulary, or take another estimator."
        )
    result: PolicyModel | None = frozen.to(spec.device).eval().requires_grad_(False)
    return result


def build_engine(model: PolicyModel | CriticModel | ScoreModel, spec: LearnerSpec, world_size: int) -> Engine:
    if spec.engine == "torch" or spec.zero_stage == 0:
        return TorchEngine(model, spec.optimizer, world_size)
    from learners.engine_deepspeed import DeepSpeedEngine  # takes seconds to import

    return DeepSpeedEngine(model, spec, world_size)
