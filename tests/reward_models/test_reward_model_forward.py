"""What a reward is: pooling, temperature, padding, dtype, and the losses on pairs."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from rl_cluster.reward_models import (
    MultiObjectiveRewardModel,
    PairwiseRewardModel,
    RewardModel,
    RewardModelConfig,
)
from tests.reward_models.reward_cases import (
    IDS,
    MASK,
    OTHER_IDS,
    OTHER_MASK,
    TOKENIZER,
    TableBase,
    make_base,
    set_head,
    sigmoid_loss,
)

TEXTS = ["abc", "1+2=3", "a much longer text"]


def table_model(**fields):
    return set_head(RewardModel(RewardModelConfig(**fields), TableBase()), [1.0, 10.0, 100.0])


def rewards_by_hand(tokens):
    """Head (1, 10, 100) on the state (3t, 3t + 1, 3t + 2) / 10 of token t."""
    return [(3 * t + 10 * (3 * t + 1) + 100 * (3 * t + 2)) / 10 for t in tokens]


@pytest.mark.parametrize(
    ("strategy", "right", "left"),
    [("last", [3, 5], [1, 5]), ("cls", [1, 4], [3, 2]), ("mean", [2, 4.5], [2, 3])],
)
def test_pooling_reads_the_real_tokens_on_either_padding_side(strategy, right, left):
    model = table_model(pooling_strategy=strategy)
    rewards = model(IDS, MASK)["rewards"]
    assert rewards.shape == (2, 1)
    np.testing.assert_allclose(rewards[:, 0].tolist(), rewards_by_hand(right), rtol=1e-6)
    rewards = model(OTHER_IDS, OTHER_MASK).rewards[:, 0].tolist()
    np.testing.assert_allclose(rewards, rewards_by_hand(left), rtol=1e-6)


def test_the_temperature_divides_every_reward_and_the_logits_of_pairs():
    plain, cooled = table_model(), table_model(temperature=4.0)
    np.testing.assert_allclose(plain(IDS, MASK).rewards.detach(), 4 * cooled(IDS, MASK).rewards.detach())
    logits = [m.preference_logits(IDS, MASK, OTHER_IDS, OTHER_MASK) for m in (plain, cooled)]
    np.testing.assert_allclose(logits[0].detach(), 4 * logits[1].detach())


def test_the_states_stand_where_the_tokens_were_given():
    model = table_model()
    output = model(OTHER_IDS, OTHER_MASK)
    real = OTHER_MASK.bool()
    torch.testing.assert_close(output["last_hidden_state"][real], model.base_model.table[OTHER_IDS][real])
    torch.testing.assert_close(output["pooled_output"], model.base_model.table[torch.tensor([1, 5])])
    assert torch.equal(model(OTHER_IDS, OTHER_MASK, return_dict=False), output.rewards)


@pytest.mark.parametrize("architecture", ["bert", "roberta", "gpt2", "qwen2"])
@pytest.mark.parametrize("strategy", ["last", "mean", "cls"])
def test_neither_side_nor_amount_of_padding_changes_a_reward(architecture, strategy):
    model = RewardModel(RewardModelConfig(pooling_strategy=strategy), make_base(architecture)).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    alone = model(ids).rewards.item()
    padding = torch.zeros(1, 3, dtype=torch.int64)
    for parts in ([ids, padding], [padding, ids], [padding, ids, padding]):
        row = torch.cat(parts, dim=1)
        both = torch.cat([row, torch.full_like(row, 9)])
        mask = torch.cat([(row != 0), torch.ones_like(row, dtype=torch.bool)])
        for dtype in (torch.bool, torch.int64, torch.float32):
            assert model(both, mask.to(dtype)).rewards[0].item() == pytest.approx(alone, abs=1e-5)


def test_a_decoder_and_its_language_model_give_the_same_trunk():
    from transformers import GPT2LMHeadModel

    trunk = make_base("gpt2")
    whole = GPT2LMHeadModel(trunk.config)
    whole.transformer = trunk
    models = [RewardModel(RewardModelConfig(), base) for base in (trunk, whole)]
    rewards = [model.predict_rewards(TEXTS, TOKENIZER) for model in models]
    assert rewards[0] == rewards[1]


def test_the_preference_loss_is_minus_log_sigmoid_of_the_difference_less_the_margin():
    model = set_head(RewardModel(RewardModelConfig(), TableBase()), [1.0, 0.0, 0.0])
    gap = np.array([0.9 - 0.3, 1.5 - 1.5])  # last tokens 3 against 1, 5 against 5
    pairs = (IDS, MASK, OTHER_IDS, OTHER_MASK)
    assert model.compute_preference_loss(*pairs).item() == pytest.approx(sigmoid_loss(gap), rel=1e-6)
    loss = model.compute_preference_loss(*pairs, margin=0.25).item()
    assert loss == pytest.approx(sigmoid_loss(gap - 0.25), rel=1e-6)
    loss = model.compute_preference_loss(*pairs, margin=torch.tensor([0.5, 1.0])).item()
    assert loss == pytest.approx(sigmoid_loss(gap - [0.5, 1.0]), rel=1e-6)


def test_the_preference_loss_stays_finite_where_the_sigmoid_is_zero():
    model = set_head(RewardModel(RewardModelConfig(), TableBase()), [-1e4, 0.0, 0.0])
    loss = model.compute_preference_loss(IDS, MASK, OTHER_IDS, OTHER_MASK)
    assert loss.item() == pytest.approx((1e4 * 0.6 + math.log(2)) / 2, rel=1e-5)
    loss.backward()
    assert bool(torch.isfinite(model.reward_head[-1].weight.grad).all())


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_a_pair_in_the_other_order_has_the_opposite_score(architecture):
    model = PairwiseRewardModel(RewardModelConfig(temperature=0.5), make_base(architecture)).eval()
    a, b = model.encode(TEXTS, TOKENIZER, 32), model.encode(TEXTS[::-1], TOKENIZER, 32)
    forth, back = model.forward_pair(*a, *b), model.forward_pair(*b, *a)
    assert forth.shape == (3, 1)
    assert forth.abs()[[0, 2]].min() > 1e-3
    torch.testing.assert_close(forth, -back, rtol=0, atol=1e-6)
    assert forth[1].item() == pytest.approx(0.0, abs=1e-6)  # a text against itself
    assert isinstance(model.reward_head, nn.Sequential) and isinstance(model.comparison_head, nn.Sequential)


def test_a_pair_is_scored_by_both_heads_at_the_temperature():
    model = set_head(PairwiseRewardModel(RewardModelConfig(temperature=2.0), TableBase()), [1.0, 0.0, 0.0])
    a, b = model.base_model.table[torch.tensor([3, 5])], model.base_model.table[torch.tensor([1, 5])]
    first, second = model.comparison_head[0], model.comparison_head[-1]

    def compare(x, y):
        hidden = np.tanh(
            torch.cat([x, y], 1).detach().numpy() @ first.weight.detach().numpy().T
            + first.bias.detach().numpy()
        )
        return hidden @ second.weight.detach().numpy().T + second.bias.detach().numpy()

    wanted = (np.array([[0.6], [0.0]]) + compare(a, b) - compare(b, a)) / 2.0
    got = model.forward_pair(IDS, MASK, OTHER_IDS, OTHER_MASK).detach().numpy()
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    assert abs(wanted[0, 0] - 0.3) > 1e-3


def test_the_bradley_terry_loss_turns_with_the_label():
    model = PairwiseRewardModel(RewardModelConfig(), make_base("bert")).eval()
    pairs = (*model.encode(TEXTS[:2], TOKENIZER, 32), *model.encode(TEXTS[1:], TOKENIZER, 32))
    logits = model.forward_pair(*pairs).detach().numpy().ravel()
    for labels in (torch.tensor([1, 0]), torch.tensor([[1.0], [0.0]]), torch.tensor([True, False])):
        loss = model.compute_bradley_terry_loss(*pairs, labels).item()
        assert loss == pytest.approx(sigmoid_loss([logits[0], -logits[1]]), rel=1e-5)
    same = model.compute_preference_loss(*pairs).item()
    assert same == pytest.approx(sigmoid_loss(logits), rel=1e-5)


def objectives(**arguments):
    model = MultiObjectiveRewardModel(RewardModelConfig(), 2, base_model=TableBase(), **arguments)
    return set_head(model, [1.0, 0.0, 0.0], [0.0, 2.0, 0.0], bias=[0.0, 1.0])


def test_objectives_are_combined_by_the_weights_as_given():
    wanted = np.array([[0.9, 3.0], [1.5, 4.2]])  # last tokens 3 and 5: states .9, 1.0 and 1.5, 1.6
    for weights, used in (([0.5, -3.0], [0.5, -3.0]), (None, [0.5, 0.5])):
        model = objectives(objective_weights=weights)
        output = model(IDS, MASK, return_all_objectives=True)
        np.testing.assert_allclose(output["rewards"].detach(), wanted, rtol=1e-6)
        np.testing.assert_allclose(
            output["combined_reward"].detach(), wanted @ np.array(used)[:, None], rtol=1e-6
        )
        short = model(IDS, MASK, return_all_objectives=False)
        assert torch.equal(short["rewards"], output["combined_reward"])


def test_pairs_of_several_objectives_are_compared_by_the_combined_reward():
    model = objectives(objective_weights=[1.0, -1.0])
    gap = [(0.9 - 3.0) - (0.3 - 1.8), 0.0]
    loss = model.compute_preference_loss(IDS, MASK, OTHER_IDS, OTHER_MASK).item()
    assert loss == pytest.approx(sigmoid_loss(gap), rel=1e-5)


def test_the_multi_objective_loss_is_the_mean_square_over_what_the_mask_keeps():
    model = objectives()
    targets = torch.tensor([[1.0, 2.0], [1.0, math.nan]])
    kept = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    loss, each = model.compute_multi_objective_loss(IDS, MASK, targets, kept)
    squares = [0.1**2, 1.0**2, 0.5**2]
    assert loss.item() == pytest.approx(np.mean(squares), rel=1e-5)
    np.testing.assert_allclose(each.detach(), [(squares[0] + squares[2]) / 2, squares[1]], rtol=1e-5)
    loss.backward()
    assert bool(torch.isfinite(model.reward_head[-1].weight.grad).all())
    first, each = model.compute_multi_objective_loss(IDS, MASK, targets, torch.tensor([1, 0]))
    assert first.item() == pytest.approx((squares[0] + squares[2]) / 2, rel=1e-5)
    assert math.isnan(each[1].item())


def test_predicting_gives_a_list_per_text_in_order_and_restores_the_training_mode():
    model = RewardModel(RewardModelConfig(dropout_prob=0.5, num_labels=2), make_base("qwen2")).train()
    model.base_model.eval()
    rewards = model.predict_rewards(TEXTS, TOKENIZER, batch_size=2)
    assert [len(row) for row in rewards] == [2, 2, 2] and isinstance(rewards[0], list)
    assert model.training and model.reward_head.training and not model.base_model.training
    for text, row in zip(TEXTS, rewards, strict=True):
        np.testing.assert_allclose(model.predict_rewards([text], TOKENIZER)[0], row, atol=1e-5)
    shorter = model.predict_rewards(TEXTS, TOKENIZER, max_length=3)
    np.testing.assert_allclose(shorter[2], model.predict_rewards(["a m"], TOKENIZER)[0], atol=1e-5)


def test_the_reward_function_scores_prompt_and_response_together():
    plain = RewardModel(RewardModelConfig(), make_base("qwen2"))
    score = plain.as_reward_fn(TOKENIZER)
    wanted = plain.predict_rewards(["1+2=3", "1+2=4"], TOKENIZER)
    assert score(["1+2=", "1+2="], ["3", "4"], [{}, {}]) == [row[0] for row in wanted]
    several = MultiObjectiveRewardModel(RewardModelConfig(), 2, [2.0, -1.0], make_base("qwen2"))
    rows = several.predict_rewards(["abc"], TOKENIZER)
    assert several.as_reward_fn(TOKENIZER)(["ab"], ["c"]) == pytest.approx([2 * rows[0][0] - rows[0][1]])


def test_a_base_in_half_precision_has_a_head_and_rewards_in_float32():
    model = RewardModel(RewardModelConfig(pooling_strategy="mean"), make_base("qwen2").to(torch.bfloat16))
    assert model.reward_head[-1].weight.dtype == torch.float32
    assert model(torch.tensor([[3, 4]])).rewards.dtype == torch.float32
    double = RewardModel(RewardModelConfig(), make_base("qwen2").double())
    assert double(torch.tensor([[3, 4]])).rewards.dtype == torch.float64


def test_a_base_is_found_by_folder_and_loaded_in_the_dtype_asked_for(tmp_path):
    base = make_base("qwen2")
    base.save_pretrained(tmp_path / "base")
    wanted = RewardModel(RewardModelConfig(), base).predict_rewards(TEXTS, TOKENIZER)
    named = RewardModel(RewardModelConfig(model_name=str(tmp_path / "base")))
    assert named.predict_rewards(TEXTS, TOKENIZER) == wanted
    given = RewardModel(RewardModelConfig(model_name="not used"), tmp_path / "base")
    assert given.predict_rewards(TEXTS, TOKENIZER) == wanted
    half = RewardModel(RewardModelConfig(str(tmp_path / "base"), dtype="bfloat16"))
    assert half.base_model.dtype == torch.bfloat16
    np.testing.assert_allclose(half.predict_rewards(TEXTS, TOKENIZER), wanted, atol=0.05)


@pytest.mark.parametrize("architecture", ["bert", "roberta", "gpt2"])
def test_a_text_longer_than_the_base_has_positions_is_cut(architecture):
    model = RewardModel(RewardModelConfig(), make_base(architecture))
    long = "0123456789" * 6
    assert model.predict_rewards([long], TOKENIZER) == model.predict_rewards([long[:32]], TOKENIZER)


def test_a_tokenizer_that_pads_on_the_left_gives_the_same_rewards():
    model = RewardModel(RewardModelConfig(), make_base("gpt2"))
    wanted = model.predict_rewards(TEXTS, TOKENIZER)
    left = copy.deepcopy(TOKENIZER)
    left.padding_side = "left"
    np.testing.assert_allclose(model.predict_rewards(TEXTS, left), wanted, atol=1e-6)
