"""What a user of PPOTrainer may set: the names of AutoTrain's PPOConfig, those of TRL's, and our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

from rl_cluster.errors import BadInputError
from rl_cluster.trainers.defaults import Default, is_given


@dataclass
class PPOConfig:
    """Settings of a PPOTrainer; `rl_cluster.trainers.ppo.run_config` says what becomes of each.

    A KL setting, or clip_ratio, that is given counts as given also where it equals its default
    (rl_cluster.trainers.defaults). Settings may be changed until the trainer starts its workers (the first
    train, generate or step); a change after that is refused. Lengths are in tokens, divergences in nats.
    """

    model_name: str | None = None
    """Folder or hub name; unused where the trainer is given a model."""
    learning_rate: float = 1e-5
    batch_size: int = 16
    """Prompts per iteration."""
    mini_batch_size: int = 4
    """Sequences that the learner computes at a time (a micro-batch of so many of the greatest length)."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per update: an update is made of mini_batch_size × this many sequences."""
    ppo_epochs: int = 4
    """Passes over each batch."""
    gamma: float = 0.99
    lam: float = 0.95
    clip_ratio: float = Default(0.2)
    """The ratio is clipped to 1 ± this. Also called clip_param."""
    value_clip: float = 0.2
    max_grad_norm: float = 1.0
    kl_penalty_coef: float = Default(0.01)
    """β, at the start where it is adaptive; 0: no reference. TRL's name: init_kl_coef."""
    kl_target: float = Default(0.01)
    """The KL per response that the adaptive controller steers to. TRL's name: target."""
    kl_horizon: float = Default(10_000)
    """The controller's time constant, in responses. TRL's name: horizon."""
    entropy_coef: float = 0.01
    value_coef: float = 0.5
    max_new_tokens: int = 128
    temperature: float = 0.7
    top_p: float = 0.9
    """Of generate_responses and of evaluations. Samples for training come from the whole distribution."""
    num_iterations: int = 100
    save_every: int = 10
    """Iterations between checkpoints; 0: none."""
    eval_every: int = 5
    """Iterations between evaluations on eval_prompts; 0: only before the first and after the last."""
    device: str | None = None
    """cpu, cuda, or None: a GPU if there is one."""

    kl_penalty: str | None = None
    """Estimator: "kl" (k1), "abs" (|d|), "mse" (½ d²); d = log π − log reference. None: "kl"."""
    adap_kl_ctrl: bool | None = None
    """False: β stays. None: adaptive."""
    init_kl_coef: float = Default(0.2)
    target: float = Default(6.0)
    horizon: float = Default(10_000)
    epochs: int = 1
    """For your own loop, `for epoch in range(config.epochs)`; train() counts iterations."""

    samples_per_prompt: int = 1
    max_prompt_length: int | None = None
    """Longer prompts are refused. None: what the model has room for, at most 512."""
    learning_rate_schedule: str = "constant"
    """constant, linear or cosine, over num_iterations."""
    warmup_steps: int = 0
    """Updates in which the learning rate rises."""
    critic_warmup_steps: int = 0
    """First iterations in which only the values learn."""
    separate_critic: bool = False
    """A critic of its own in place of a value head on the policy's trunk."""
    early_stopping: bool = False
    """Leave out an iteration's remaining updates once the policy has moved by more than 1.5 × target_kl."""
    target_kl: float = 1.0
    whiten_rewards: bool = False
    whiten_advantages: bool = True
    missing_eos_penalty: float | None = None
    """Subtracted from the reward of a response that did not end with an end token."""
    length_penalty: float = 0.0
    """Subtracted per token of the response."""
    normalize_rewards: str = "none"
    """none, batch or running: (reward − mean) / std."""
    reward_clip: float | None = None
    """Rewards are clipped to ± this, after normalize_rewards."""
    reward_timeout_seconds: float = 300.0
    """For one call of the reward function."""
    bf16: bool = False
    """Forward passes and sampling in bfloat16; the optimizer's weights stay float32."""
    gradient_checkpointing: bool = False
    seed: int = 0
    backend: str = "auto"
    """local: in this process; ray: on workers; auto: local for small models, unless a cluster is named."""
    cluster: str | None = None
    """Address of a Ray cluster, as RAY_ADDRESS."""
    output_dir: str | None = None
    """Run folder, unused so far; None: runs/ppo-DATE-TIME."""
    tensorboard: bool = False
    """Write TensorBoard events into the run folder."""
    progress: str = "auto"
    """auto, rich, plain or none: what is shown in the terminal."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Any other setting of a run by its dotted name, such as {"learner.num_ranks": 2}; has the last word."""

    clip_param: InitVar[float | None] = None
    """Another name of clip_ratio."""

    def __post_init__(self, clip_param: float | None) -> None:
        if clip_param is None or not is_given(clip_param):
            return
        if is_given(self.clip_ratio):
            # dataclasses.replace reads the alias from the old configuration and hands it over with the new.
            if isinstance(clip_param, _Echo) or clip_param == self.clip_ratio:
                return
            raise BadInputError(
                f"PPOConfig.clip_param={clip_param!r}: clip_ratio={self.clip_ratio!r} is given too. They are "
                "one setting: give one of them."
            )
        self.clip_ratio = float(clip_param) if isinstance(clip_param, _Echo) else clip_param

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses names that are not settings: a typing error would otherwise have no effect."""
        if name != "clip_param" and name not in self.__dataclass_fields__:
            raise BadInputError(f"PPOConfig.{name}={value!r:.60}: there is no such setting.")
        object.__setattr__(self, name, value)


class _Echo(float):
    """What clip_param reads as: clip_ratio, under its other name."""


def _clip_param(config: PPOConfig) -> float:
    value = config.clip_ratio
    return _Echo(value) if is_given(value) and isinstance(value, float) else value


def _set_clip_ratio(config: PPOConfig, value: float) -> None:
    config.clip_ratio = value


# After the class is made, so that the constructor's default is None and not this.
PPOConfig.clip_param = property(_clip_param, _set_clip_ratio)  # type: ignore[attr-defined]
