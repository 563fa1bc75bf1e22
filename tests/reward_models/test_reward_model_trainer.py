"""Training: updates against plain AdamW, and each field of the config acts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.reward_models import (
    TOKENIZER as DIGIT_TOKENIZER,
)
from bench.reward_models import (
    make_decoder,
    make_pairs,
    pair_accuracy,
)
from rl_cluster.errors import RLClusterError
from rl_cluster.reward_models import (
    MultiObjectiveRewardModel,
    PairwiseRewardModel,
    RewardModel,
    RewardModelConfig,
    RewardModelTrainer,
)
from tests.reward_models.reward_cases import TOKENIZER, make_base

CHOSEN = ["abc", "1+2=3", "a longer text", "ef", "xyz xyz"]
REJECTED = ["abd", "1+2=4", "a shorter text", "fe", "x"]
QUIET = {"dropout_prob": 0.0, "warmup_steps": 0, "learning_rate": 1e-2}


def make_trainer(kind=RewardModel, architecture="qwen2", **fields):
    config = RewardModelConfig(**{**QUIET, **fields})
    return RewardModelTrainer(kind(config, base_model=make_base(architecture)), TOKENIZER, config)


def head_after(trainer, **arguments):
    trainer.train_on_preferences(CHOSEN, REJECTED, **{"num_epochs": 1, "batch_size": 5, **arguments})
    return trainer.model.reward_head[-1].weight.detach().clone()


def test_updates_are_those_of_adamw_on_the_mean_loss_with_clipping():
    trainer, twin = make_trainer(max_grad_norm=0.1), make_trainer().model
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.01)
    pairs = (*twin.encode(CHOSEN, TOKENIZER, 32), *twin.encode(REJECTED, TOKENIZER, 32))
    losses, norms = [], []
    for _ in range(2):
        optimizer.zero_grad()
        loss = twin.compute_preference_loss(*pairs)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1).item())
        optimizer.step()
        losses.append(loss.item())
    history = trainer.train_on_preferences(CHOSEN, REJECTED, num_epochs=2, batch_size=5)
    assert history["loss"] == pytest.approx(losses, rel=1e-3)
    assert history["grad_norm"] == pytest.approx(norms, rel=1e-2)
    assert min(norms) > 0.1
    for got, wanted in zip(
        trainer.model.reward_head.parameters(), twin.reward_head.parameters(), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("batch_size", "accumulation"), [(1, 5), (2, 3), (1, 9)])
def test_accumulated_batches_give_the_update_of_one_large_batch(batch_size, accumulation):
    whole, cut = (
        make_trainer(max_grad_norm=0.05),
        make_trainer(max_grad_norm=0.05, gradient_accumulation_steps=accumulation),
    )
    first = whole.train_on_preferences(CHOSEN, REJECTED, num_epochs=1, batch_size=5)
    second = cut.train_on_preferences(CHOSEN, REJECTED, num_epochs=1, batch_size=batch_size)
    for name in ("loss", "accuracy", "margin", "grad_norm"):
        assert second[name] == pytest.approx(first[name], rel=1e-3), name
    for got, wanted in zip(cut.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


def test_accumulation_counts_updates_and_an_epoch_ends_with_one():
    counts = {}
    for accumulation in (1, 2, 7):
        trainer = make_trainer(gradient_accumulation_steps=accumulation)
        trainer.train_on_preferences(CHOSEN, REJECTED, num_epochs=2, batch_size=1)
        counts[accumulation] = trainer.scheduler.last_epoch
    assert counts == {1: 10, 2: 6, 7: 2}


def test_accumulated_targets_are_weighed_by_the_entries_that_their_masks_keep():
    targets = [[1.0, 2.0], [0.0, float("nan")], [3.0, 1.0], [0.5, 0.5], [2.0, 2.0]]
    mask = [[1, 1], [1, 0], [0, 0], [1, 1], [0, 1]]
    histories = []
    for batch_size, accumulation in ((5, 1), (1, 5)):
        config = RewardModelConfig(**QUIET, gradient_accumulation_steps=accumulation)
        model = MultiObjectiveRewardModel(config, 2, base_model=make_base("qwen2"))
        trainer = RewardModelTrainer(model, TOKENIZER, config)
        histories.append(trainer.train_on_targets(CHOSEN, targets, mask, num_epochs=1, batch_size=batch_size))
    whole, cut = histories
    assert set(whole) == {"loss", "learning_rate", "grad_norm"}
    assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    assert cut["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-3)


def test_the_learning_rate_rises_over_the_warm_up_and_then_stays():
    trainer = make_trainer(warmup_steps=4)
    history = trainer.train_on_preferences(CHOSEN, REJECTED, num_epochs=6, batch_size=5)
    np.testing.assert_allclose(history["learning_rate"], [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])
    moved = (head_after(make_trainer(warmup_steps=100)) - make_trainer().model.reward_head[-1].weight).abs()
    assert 0.5e-4 < moved.mean().item() < 1.5e-4  # AdamW moves a weight by about the learning rate, 1e-4


def test_fields_of_the_trainer_change_what_is_learnt():
    base = head_after(make_trainer())
    assert torch.equal(base, head_after(make_trainer()))
    start = make_trainer().model.reward_head[-1].weight.detach()
    small = head_after(make_trainer(learning_rate=1e-4))
    assert (base - start).norm().item() == pytest.approx(100 * (small - start).norm().item(), rel=0.05)
    # One step of AdamW does not depend on the gradient's scale; the second one does.
    for fields in ({"max_grad_norm": 1e-6}, {"gradient_accumulation_steps": 2}):
        other = head_after(make_trainer(**fields), num_epochs=2, batch_size=2)
        assert not torch.allclose(other, head_after(make_trainer(), num_epochs=2, batch_size=2), atol=1e-5)


def test_the_seed_decides_heads_order_and_dropout_and_leaves_the_global_generator():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    runs = {}
    for seed in (0, 1, 0):
        trainer = make_trainer(seed=seed, dropout_prob=0.3)
        torch.set_rng_state(state)
        history = trainer.train_on_preferences(CHOSEN, REJECTED, num_epochs=2, batch_size=2)
        assert torch.equal(torch.get_rng_state(), state)
        if seed in runs:
            assert runs[seed] == history
        runs[seed] = history
    assert runs[0]["loss"] != runs[1]["loss"]


def test_each_epoch_and_seed_has_its_own_dropout():
    losses = []
    for seed in (0, 1):
        config = RewardModelConfig(**{**QUIET, "learning_rate": 1e-12, "seed": seed})
        model = RewardModel(RewardModelConfig(dropout_prob=0.5), make_base("qwen2"))
        trainer = RewardModelTrainer(model, TOKENIZER, config)
        losses += trainer.train_on_preferences(["abc"], ["abd"], num_epochs=2)["loss"]
    assert losses[0] != losses[1]  # epochs of one seed
    assert losses[0] != losses[2]  # first epochs of two seeds


def test_dropout_acts_in_training_and_not_in_evaluation():
    model = make_trainer(dropout_prob=0.5).model
    ids, mask = model.encode(CHOSEN, TOKENIZER, 32)
    rewards = [model.train()(ids, mask, return_dict=False) for _ in range(2)]
    assert not torch.equal(*rewards)
    rewards = [model.eval()(ids, mask, return_dict=False) for _ in range(2)]
    assert torch.equal(*rewards)


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "qwen2"])
def test_with_lora_only_adapters_and_heads_train_on_every_linear_layer(architecture):
    fields = {"use_lora": True, "lora_rank": 2, "lora_alpha": 6, "lora_dropout": 0.25}
    trainer = make_trainer(architecture=architecture, **fields)
    model = trainer.model
    layers = {name: m for name, m in model.base_model.named_modules() if hasattr(m, "lora_A")}
    assert len(layers) == {"bert": 12, "gpt2": 8, "qwen2": 14}[architecture]
    for layer in layers.values():
        assert layer.lora_A["default"].weight.shape[0] == 2
        assert layer.scaling["default"] == 3.0
        assert layer.lora_dropout["default"].p == 0.25
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    trainer.train_on_preferences(CHOSEN, REJECTED, num_epochs=2, batch_size=5)
    moved = {n for n, value in model.named_parameters() if not torch.equal(value, before[n])}
    assert moved == {n for n in before if "lora_" in n or n.startswith("reward_head")}


def test_training_leaves_the_training_mode_and_evaluating_restores_it():
    trainer = make_trainer(dropout_prob=0.9)
    assert trainer.optimizer.param_groups[0]["lr"] == 1e-2
    trainer.train_on_preferences(CHOSEN, REJECTED, num_epochs=1)
    assert trainer.model.training
    scores = trainer.evaluate(CHOSEN, REJECTED, batch_size=2)
    assert trainer.model.training
    gaps = np.array(trainer.model.predict_rewards(CHOSEN, TOKENIZER))[:, 0]
    gaps -= np.array(trainer.model.predict_rewards(REJECTED, TOKENIZER))[:, 0]
    assert scores["eval_margin"] == pytest.approx(gaps.mean(), abs=1e-5)
    assert scores["eval_accuracy"] == pytest.approx((gaps > 0).mean())
    assert scores["eval_loss"] == pytest.approx(np.log1p(np.exp(-gaps)).mean(), rel=1e-4)
    assert trainer.evaluate(["abc"], ["abc"])["eval_accuracy"] == 0.5


def test_a_loss_that_is_not_finite_stops_the_training_and_leaves_the_weights():
    trainer = make_trainer()
    with torch.no_grad():
        trainer.model.reward_head[-1].weight[0, 0] = torch.nan
    before = [value.detach().clone() for value in trainer.model.base_model.parameters()]
    with pytest.raises(RLClusterError, match=r"loss is nan in epoch 1.*learning_rate"):
        trainer.train_on_preferences(CHOSEN, REJECTED)
    for value, old in zip(trainer.model.base_model.parameters(), before, strict=True):
        assert torch.equal(value, old)


def test_a_second_call_goes_on_with_the_warm_up_and_another_order():
    trainer = make_trainer(warmup_steps=4)
    first = trainer.train_on_preferences(CHOSEN, REJECTED, num_epochs=2, batch_size=5)
    second = trainer.train_on_preferences(CHOSEN, REJECTED, num_epochs=2, batch_size=5)
    whole = make_trainer(warmup_steps=4).train_on_preferences(CHOSEN, REJECTED, num_epochs=4, batch_size=5)
    assert first["learning_rate"] + second["learning_rate"] == whole["learning_rate"]
    assert first["loss"] + second["loss"] == whole["loss"]


def test_a_preference_that_depends_on_the_prompt_is_learnt():
    fields = {"learning_rate": 3e-3, "dropout_prob": 0.0, "warmup_steps": 10}
    assert pair_accuracy(RewardModel, make_decoder, 0, num_pairs=1200, **fields) >= 0.95


def test_a_pairwise_model_trains_both_heads():
    trainer = make_trainer(PairwiseRewardModel)
    before = [head[-1].weight.detach().clone() for head in heads(trainer.model)]
    first = trainer.train_on_preferences(CHOSEN, REJECTED, num_epochs=8)
    assert first["loss"][-1] < first["loss"][0] / 2
    assert not any(
        torch.equal(old, head[-1].weight) for old, head in zip(before, heads(trainer.model), strict=True)
    )


def heads(model):
    return model.reward_head, model.comparison_head


def test_no_held_out_prompt_is_trained_on_and_half_of_the_mistakes_are_plausible():
    train, held_out = make_pairs(400, 200, 0)
    prompts = [{text[:-1] for text in part.chosen} for part in (train, held_out)]
    assert not prompts[0] & prompts[1]
    assert all(text[-1] == text[-3] for text in train.chosen)
    assert not any(text[-1] == text[-3] for text in train.rejected)
    assert len(DIGIT_TOKENIZER("12=2")["input_ids"]) == 4
