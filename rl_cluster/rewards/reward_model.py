"""A sequence-classification checkpoint and finished groups in; one score per sample out.

The score is the checkpoint's first logit on prompt and response, as transformers computes it: taken at the
last token that is not padding. (So where a checkpoint pads with its end token, that token is not the one.)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from rl_cluster.config.planning.rope import named_in, rope_switch
from rl_cluster.data.encode import encode_text
from rl_cluster.errors import BadInputError
from rl_cluster.modeling.loading import load_whole, outside_the_trunk
from rl_cluster.trajectory import TrajectoryGroup

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RewardModel:
    """A frozen classifier with its tokenizer, ready to score token sequences in batches.

    policy_tokenizer: tokens made with the same vocabulary are scored as they are; others are decoded text
    first (prompt text, response text, and the checkpoint's end token if the response ended).
    tokens_per_batch: largest batch, padding included; a longer sequence goes alone.
    """

    def __init__(self, model: Any, tokenizer: Any, policy_tokenizer: Any, tokens_per_batch: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._same_vocabulary = tokenizer.get_vocab() == policy_tokenizer.get_vocab()
        self._tokens_per_batch = tokens_per_batch
        self._switch = rope_switch(named_in(model.config))
        self._max_positions = model.config.get_text_config().to_dict().get("max_position_embeddings")

    def encode(self, group: TrajectoryGroup) -> list[np.ndarray]:
        """One int array per sample; ValueError for a sequence longer than the checkpoint's positions."""
        sequences = [self._encode_sample(group, index) for index in range(len(group.trajectories))]
        longest = max(len(sequence) for sequence in sequences)
        if self._max_positions is not None and longest > self._max_positions:
            raise ValueError(
                f"prompt and response have {longest} tokens, the reward model takes {self._max_positions}"
            )
        return sequences

    def _encode_sample(self, group: TrajectoryGroup, index: int) -> np.ndarray:
        trajectory = group.trajectories[index]
        if self._same_vocabulary:
            return trajectory.tokens
        ids = encode_text(self._tokenizer, group.prompt.text + trajectory.response_text)
        if trajectory.ended_with_eos and self._tokenizer.eos_token_id is not None:
            ids = [*ids, self._tokenizer.eos_token_id]
        return np.array(ids, dtype=np.int32)

    def score(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
        """float64 [n]: the first logit of each sequence, in order. Independent of what shares a batch."""
        scores = np.zeros(len(sequences), dtype=np.float64)
        lengths = [len(sequence) for sequence in sequences]
        for rows in plan_batches(lengths, self._tokens_per_batch, self._switch):
            scores[rows] = self._score_batch([sequences[row] for row in rows])
        return scores

    @torch.inference_mode()
    def _score_batch(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
        longest = max(len(sequence) for sequence in sequences)
        tokens = torch.full((len(sequences), longest), self._model.config.get_text_config().pad_token_id)
        mask = torch.zeros_like(tokens)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence)] = torch.from_numpy(sequence.astype(np.int64))
            mask[row, : len(sequence)] = 1
        device = self._model.device
        logits = self._model(input_ids=tokens.to(device), attention_mask=mask.to(device)).logits
        values: np.ndarray = logits[:, 0].double().cpu().numpy()
        return values


def plan_batches(lengths: Sequence[int], tokens_per_batch: int, switch: int | None = None) -> list[list[int]]:
    """Rows, shortest first, in batches whose padded size stays within tokens_per_batch (or of one row).
    switch: rows up to this length and longer ones share no batch (rope.rope_switch)."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        is_alike = not batches or switch is None or lengths[batches[-1][0]] > switch or lengths[row] <= switch
        if batches and is_alike and (len(batches[-1]) + 1) * lengths[row] <= tokens_per_batch:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def load_reward_model(
    path: str,
    policy_tokenizer: Any,
    *,
    tokens_per_batch: int = 16384,
    dtype: Literal["float32", "bfloat16"] = "float32",
    device: str = "cpu",
) -> RewardModel:
    """A Hugging Face folder (or a name that transformers finds) with a trained classification head.

    Without a pad id the checkpoint gets its end token's. BadInputError for a path without a checkpoint,
    a checkpoint without a classification head, and one with neither pad nor end token.
    """
    check_reward_model(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise BadInputError(f"rewards.scorers.path={path!r}: cannot be loaded: {error}") from error
    model = load_classifier(path, f"rewards.scorers.path={path!r}:", dtype=DTYPES[dtype])
    _set_pad(model.config.get_text_config(), tokenizer, path)
    return RewardModel(model.to(device).eval(), tokenizer, policy_tokenizer, tokens_per_batch)


def load_classifier(path: str, where: str, **settings: Any) -> Any:
    """A sequence-classification checkpoint with all its weights; else BadInputError, begun by `where`."""
    lacking: list[str] = []

    def note(model: torch.nn.Module, key: str) -> bool:
        del model
        lacking.append(key)
        return True

    model = load_whole(
        AutoModelForSequenceClassification,
        path,
        where=where,
        may_lack=note,
        may_leave=outside_the_trunk,
        **settings,
    )
    if lacking:
        raise BadInputError(
            f"{where} not a sequence-classification checkpoint, it has no weights for "
            f"{', '.join(sorted(lacking)[:3])}. "
            "Give a checkpoint saved by AutoModelForSequenceClassification."
        )
    return model


def check_reward_model(path: str) -> None:
    """What can be told without loading the weights; BadInputError as load_reward_model."""
    folder = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if (looks_local and not folder.is_dir()) or (folder.is_dir() and not (folder / "config.json").is_file()):
        raise BadInputError(
            f"rewards.scorers.path={path!r}: no checkpoint there (a folder with config.json is needed). "
            "Correct the path, or make the reward model first."
        )
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise BadInputError(f"rewards.scorers.path={path!r}: cannot be loaded: {error}") from error
    architectures = config.architectures or []
    if architectures and not any(name.endswith("ForSequenceClassification") for name in architectures):
        raise BadInputError(
            f"rewards.scorers.path={path!r}: not a sequence-classification checkpoint but "
            f"{architectures[0]}. Give a checkpoint saved by AutoModelForSequenceClassification."
        )


def _set_pad(config: Any, tokenizer: Any, path: str) -> None:
    if config.pad_token_id is None:
        known = (tokenizer.pad_token_id, tokenizer.eos_token_id, config.eos_token_id)
        # A tokenizer may have more tokens than the model: Qwen2's adds a pad token when it has none.
        inside = (token for token in known if isinstance(token, int) and token < config.vocab_size)
        config.pad_token_id = next(inside, None)
    if config.pad_token_id is None:
        raise BadInputError(
            f"rewards.scorers.path={path!r}: the checkpoint has neither a pad nor an end token. "
            'Set "pad_token_id" in its config.json.'
        )
