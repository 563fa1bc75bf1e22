"""What cannot work is refused with its name, its value and a remedy, before anything is trained."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Qwen2ForSequenceClassification, T5Config, T5Model

from rl_cluster.errors import BadInputError
from rl_cluster.modeling.scratch import build_tokenizer
from rl_cluster.reward_models import (
    MultiObjectiveRewardModel,
    PairwiseRewardModel,
    RewardModel,
    RewardModelConfig,
    RewardModelTrainer,
    export_classifier,
)
from rl_cluster.reward_models.multi_objective import multi_objective_loss
from rl_cluster.reward_models.pairwise import labelled_pair_loss
from tests.reward_models.reward_cases import IDS, MASK, SIZES, TOKENIZER, TableBase, make_base

CONFIG = RewardModelConfig()
MODEL = RewardModel(CONFIG, make_base("qwen2"))
WITHOUT_PAD = build_tokenizer("abc", 16)
WITHOUT_PAD.pad_token = None
WITHOUT_EITHER = build_tokenizer("abc", 16)
WITHOUT_EITHER.pad_token = WITHOUT_EITHER.eos_token = None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_name", ""),
        ("num_labels", 0),
        ("num_labels", 1.0),
        ("pooling_strategy", "max"),
        ("dropout_prob", 1.0),
        ("dropout_prob", -0.1),
        ("temperature", 0.0),
        ("temperature", math.nan),
        ("use_lora", "yes"),
        ("lora_rank", 0),
        ("lora_alpha", 0),
        ("lora_dropout", 1.5),
        ("learning_rate", -1e-4),
        ("warmup_steps", -1),
        ("gradient_accumulation_steps", 0),
        ("max_grad_norm", math.inf),
        ("dtype", "float16"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(field, value):
    with pytest.raises(BadInputError, match=rf"RewardModelConfig\.{field}={value!r}: ".replace("'", ".")):
        RewardModelConfig(**{field: value})


def build_headed(num_labels):
    config = make_base("qwen2").config
    config.num_labels = num_labels
    return Qwen2ForSequenceClassification(config)


NO_SIZE = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RewardModel(CONFIG), "base_model=None.*set RewardModelConfig.model_name"),
        (lambda: RewardModel(RewardModelConfig("/no/such")), "model_name='/no/such': cannot be loaded"),
        (lambda: RewardModel("bert"), "config='bert': give a RewardModelConfig"),
        (lambda: RewardModel(CONFIG, 3), "base_model=3: give a torch module, a model folder"),
        (lambda: RewardModel(CONFIG, NO_SIZE), "base_model=Linear: has no config.hidden_size; set"),
        (
            lambda: RewardModel(RewardModelConfig(use_lora=True), TableBase()),
            "use_lora=True: TableBase has no linear layer",
        ),
        (
            lambda: RewardModel(RewardModelConfig(num_labels=2), build_headed(3)),
            "num_labels=2: contradicts the base Qwen2ForSequenceClassification, which has 3",
        ),
        (
            lambda: RewardModel(CONFIG, T5Model(T5Config(vocab_size=9, d_model=8, num_layers=1, d_ff=8))),
            "T5Model: is an encoder-decoder",
        ),
        (
            lambda: PairwiseRewardModel(RewardModelConfig(num_labels=2), TableBase()),
            "num_labels=2: a Pairwise",
        ),
        (
            lambda: MultiObjectiveRewardModel(RewardModelConfig(num_labels=2), 3, base_model=TableBase()),
            "num_labels=2: contradicts num_objectives=3",
        ),
        (
            lambda: MultiObjectiveRewardModel(CONFIG, 3, [0.5, 0.5], TableBase()),
            r"objective_weights=\[0.5, 0.5\]: give 3 numbers",
        ),
        (
            lambda: MultiObjectiveRewardModel(CONFIG, 2, [0.5, math.nan], TableBase()),
            r"objective_weights\[1\]=nan",
        ),
        (lambda: MultiObjectiveRewardModel(CONFIG, 0, base_model=TableBase()), "num_objectives=0"),
        (lambda: RewardModelTrainer(TableBase(), TOKENIZER, CONFIG), "model=TableBase: give a RewardModel"),
        (lambda: RewardModelTrainer(MODEL, None, CONFIG), "tokenizer=None: give a tokenizer"),
        (lambda: RewardModelTrainer(MODEL, TOKENIZER, {}), "config={}: give a RewardModelConfig"),
        (lambda: RewardModelTrainer(MODEL, TOKENIZER, CONFIG, "gpu7"), "device='gpu7': cannot be used"),
        (
            lambda: RewardModelTrainer(MODEL, WITHOUT_EITHER, CONFIG),
            "neither a pad nor an end token.*set tokenizer.pad_token",
        ),
        (
            lambda: RewardModel(RewardModelConfig(num_labels=2), TableBase()).as_reward_fn(TOKENIZER),
            "num_labels=2: one score per text needs 1",
        ),
        (lambda: export_classifier(MODEL, WITHOUT_PAD, "x"), "pad_token_id=None"),
    ],
)
def test_what_cannot_be_built_is_refused(build, message):
    with pytest.raises(BadInputError, match=message):
        build()


@pytest.mark.parametrize(
    ("chosen", "rejected", "message"),
    [
        ([], [], "chosen_texts=.*: give a list of at least one string"),
        (["a", "b"], ["a"], "2 chosen for 1 rejected"),
        (["a"], ["a", "b"], "1 chosen for 2 rejected"),
        ("text", ["a"], "chosen_texts='text': give a list"),
        (["a", 3], ["a", "b"], r"chosen_texts\[1\]=3: must be a string, not int"),
        (["a"], [None], r"rejected_texts\[0\]=None: must be a string"),
        (["a"], [" "], r"rejected_texts\[0\]=' ': is empty"),
    ],
)
def test_texts_that_make_no_pairs_are_refused_for_training_and_evaluation(chosen, rejected, message):
    trainer = RewardModelTrainer(MODEL, TOKENIZER, CONFIG)
    for call in (trainer.train_on_preferences, trainer.evaluate):
        with pytest.raises(BadInputError, match=message):
            call(chosen, rejected)


@pytest.mark.parametrize("arguments", [{"num_epochs": 0}, {"batch_size": 0}, {"max_length": 2.5}])
def test_counts_that_are_no_counts_are_refused(arguments):
    ((name, value),) = arguments.items()
    with pytest.raises(BadInputError, match=f"{name}={value}: must be a whole number"):
        RewardModelTrainer(MODEL, TOKENIZER, CONFIG).train_on_preferences(["a"], ["b"], **arguments)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (IDS, MASK[:1], r"attention_mask: \(1, 3\) for input_ids \(2, 3\)"),
        (IDS, MASK * 0.5, "values other than 0 and 1"),
        (IDS, MASK * torch.tensor([[1.0], [0.0]]), "row 1 has no real token"),
        (IDS.float(), MASK, "dtype torch.float32"),
        (IDS[0], MASK, r"input_ids: \(3,\)"),
        ([[1, 2]], None, "input_ids: list"),
        (torch.zeros(0, 3, dtype=torch.int64), None, r"\(0, 3\)"),
    ],
)
def test_ids_and_masks_that_do_not_fit_are_refused(ids, mask, message):
    with pytest.raises(BadInputError, match=message):
        MODEL(ids, mask)


def test_pairs_of_different_number_and_wrong_margins_are_refused():
    with pytest.raises(BadInputError, match="2 texts against 1; a pair needs one of each"):
        MODEL.compute_preference_loss(IDS, MASK, IDS[:1], MASK[:1])
    with pytest.raises(BadInputError, match=r"margin: \(3,\) for 2 pairs"):
        MODEL.compute_preference_loss(IDS, MASK, IDS, MASK, margin=torch.zeros(3))
    with pytest.raises(BadInputError, match="margin=nan"):
        MODEL.compute_preference_loss(IDS, MASK, IDS, MASK, margin=math.nan)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([1, 2], r"labels\[1\]=2: must be 1 .* or 0"),
        ([0.5, 1.0], r"labels\[0\]=0.5"),
        ([1.0, math.nan], r"labels\[1\]=nan"),
        ([1], "labels: 1 for 2 pairs"),
    ],
)
def test_labels_other_than_0_and_1_are_refused(labels, message):
    with pytest.raises(BadInputError, match=message):
        labelled_pair_loss(torch.zeros(2), torch.tensor(labels))


@pytest.mark.parametrize(
    ("targets", "mask", "message"),
    [
        ([[0.0, math.nan]], None, "target_rewards: holds NaN"),
        ([[0.0, math.nan]], [[0, 1]], "target_rewards: holds NaN"),
        ([[0.0]], None, r"target_rewards: \(1, 1\) for rewards \(1, 2\)"),
        ([[0.0, 0.0]], [[0, 0]], "objective_mask: keeps nothing"),
        ([[0.0, 0.0]], [[1, 1, 1]], r"objective_mask: \(1, 3\)"),
        ([[0.0, 0.0]], [[1, 2]], "objective_mask: holds values other than 0 and 1"),
    ],
)
def test_targets_and_masks_that_do_not_fit_are_refused(targets, mask, message):
    with pytest.raises(BadInputError, match=message):
        multi_objective_loss(torch.zeros(1, 2), torch.tensor(targets), mask)


def test_targets_are_checked_before_training():
    model = MultiObjectiveRewardModel(CONFIG, 2, base_model=make_base("qwen2"))
    trainer = RewardModelTrainer(model, TOKENIZER, CONFIG)
    with pytest.raises(BadInputError, match="target_rewards: holds NaN"):
        trainer.train_on_targets(["a"], [[1.0, math.nan]])
    with pytest.raises(BadInputError, match=r"target_rewards: \(1, 1\); give \(1, 2\)"):
        trainer.train_on_targets(["a"], [[1.0]])
    with pytest.raises(BadInputError, match="target_rewards: is no table of numbers"):
        trainer.train_on_targets(["a"], [["x", "y"]])
    with pytest.raises(BadInputError, match="RewardModel: targets per objective need a MultiObjective"):
        RewardModelTrainer(MODEL, TOKENIZER, CONFIG).train_on_targets(["a"], [[1.0]])


def test_a_tokenizer_without_pad_pads_with_its_end_token_and_stays_as_it_is():
    texts = ["a", "abcabc", "bc"]
    assert MODEL.predict_rewards(texts, WITHOUT_PAD) == MODEL.predict_rewards(
        texts, build_tokenizer("abc", 16)
    )
    assert WITHOUT_PAD.pad_token_id is None


def test_texts_that_the_base_cannot_read_are_refused():
    with pytest.raises(BadInputError, match="texts: 'é' has no tokens"):
        MODEL.predict_rewards(["abc", "é"], TOKENIZER)
    wide = build_tokenizer("".join(map(chr, range(33, 126))), 16)
    with pytest.raises(BadInputError, match=rf"makes token \d+, the base model knows {SIZES['vocab_size']}"):
        MODEL.predict_rewards(["zzz"], wide)
    with pytest.raises(BadInputError, match="2 prompts for 1 responses"):
        MODEL.as_reward_fn(TOKENIZER)(["a", "b"], ["c"])
    with pytest.raises(BadInputError, match=r"responses\[0\]=None: must be a string"):
        MODEL.as_reward_fn(TOKENIZER)(["a"], [None])


def test_a_base_without_hidden_states_is_refused():
    class Headed(TableBase):
        def forward(self, input_ids, attention_mask):
            return SimpleNamespace(logits=None, last_hidden_state=self.table[input_ids][..., :2])

    with pytest.raises(
        BadInputError, match=r"base_model=Headed: gives no hidden states \[batch, length, 3\]"
    ):
        RewardModel(CONFIG, Headed())(IDS, MASK)
