"""Token, focal, contrastive, variance, composite and adaptive losses against numbers by hand."""

import math

import numpy as np
import pytest
import torch

from rl_cluster.errors import BadInputError
from rl_cluster.losses import (
    AdaptiveLoss,
    CompositeLoss,
    ContrastiveLoss,
    CustomLoss,
    CustomLossConfig,
    FocalLoss,
    ImportanceSamplingLoss,
    KLDivergenceLoss,
    PPOLoss,
    TokenLevelLoss,
    VarianceLoss,
    variance_regularization,
)

LOGITS = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.2, 0.6, 0.2]]]))
LABELS = torch.tensor([[0, 2, 1]])
NLL = -np.log([0.5, 0.8, 0.6])


class Squared(CustomLoss):
    def compute_loss(self, predictions, targets, **kwargs):
        return (predictions - targets).square()


def named(name, **settings):
    return Squared(CustomLossConfig(name=name, **settings))


def test_token_loss_is_the_cross_entropy_of_each_label():
    assert TokenLevelLoss().compute_loss(LOGITS, LABELS)[0].numpy() == pytest.approx(NLL)
    weights = torch.tensor([[2.0, 0.0, 1.0]])
    weighted = TokenLevelLoss()(LOGITS, LABELS, per_token_weights=weights)
    assert weighted.item() == pytest.approx((2 * NLL[0] + NLL[2]) / 3)
    masked = TokenLevelLoss()(LOGITS, LABELS, torch.tensor([[1, 0, 1]]))
    assert masked.item() == pytest.approx((NLL[0] + NLL[2]) / 2)


def test_token_loss_means_over_the_labels_that_count():
    labels = torch.tensor([[0, -100, 1]])
    assert TokenLevelLoss()(LOGITS, labels).item() == pytest.approx((NLL[0] + NLL[2]) / 2)
    labels = torch.tensor([[0, 7, 1]])
    loss = TokenLevelLoss(ignore_index=7)
    assert loss(LOGITS, labels, mask=torch.tensor([[1, 1, 0]])).item() == pytest.approx(NLL[0])
    with pytest.raises(BadInputError, match="all 3 labels are ignore_index=7"):
        loss(LOGITS, torch.full((1, 3), 7))
    with pytest.raises(BadInputError, match="targets"):
        loss(LOGITS, labels[:, :2])


def test_token_loss_temperature_divides_the_logits():
    hot = TokenLevelLoss(CustomLossConfig("t", temperature=2.0))(LOGITS, LABELS)
    roots = np.sqrt(LOGITS.exp().numpy()[0])
    expected = -np.log(roots[[0, 1, 2], [0, 2, 1]] / roots.sum(1)).mean()
    assert hot.item() == pytest.approx(expected, rel=1e-6)


def test_focal_loss_by_its_formula():
    logits = torch.tensor([[2.0, -1.0], [0.5, -3.0]])
    labels = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    p = 1 / (1 + np.exp(-logits.numpy()))
    p_t = np.where(labels.numpy() == 1, p, 1 - p)
    alpha_t = np.where(labels.numpy() == 1, 0.25, 0.75)
    expected = -alpha_t * (1 - p_t) ** 2 * np.log(p_t)
    assert FocalLoss().compute_loss(logits, labels).numpy() == pytest.approx(expected, rel=1e-5)
    plain = FocalLoss(alpha=0.5, gamma=0.0).compute_loss(logits, labels.long()).numpy()
    assert plain == pytest.approx(-0.5 * np.log(p_t), rel=1e-5)
    assert FocalLoss()(logits, labels, torch.tensor([1, 0])).item() == pytest.approx(
        expected[0].mean(), rel=1e-5
    )


def test_focal_loss_keeps_value_and_gradient_at_extreme_logits():
    logits = torch.tensor([100.0, -100.0, 0.0]).requires_grad_()
    FocalLoss()(logits, torch.tensor([0.0, 1.0, 1.0])).backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0].item() == pytest.approx(0.75 / 3, rel=1e-4)


def test_contrastive_triplets_by_hand():
    anchor = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    positive = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    negative = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    assert ContrastiveLoss().compute_loss(anchor, positive, negative).tolist() == pytest.approx([0.0, 0.0])
    near = ContrastiveLoss(margin=1.5).compute_loss(anchor, positive, negative)
    assert near.tolist() == pytest.approx([0.5, 0.5])
    far = ContrastiveLoss(margin=1.0, distance_metric="euclidean").compute_loss(anchor, positive, negative)
    assert far.tolist() == pytest.approx([1 - math.sqrt(2) + 1, math.sqrt(10) - 2 + 1])
    halved = ContrastiveLoss(CustomLossConfig("c", temperature=2.0, reduction="none"), margin=1.5)
    assert halved(anchor, positive, negative).tolist() == pytest.approx([1.0, 1.0])


def test_contrastive_pairs_by_hand():
    first = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    second = torch.tensor([[3.0, 4.0], [0.3, 0.4], [3.0, 4.0]])
    loss = ContrastiveLoss(margin=2.0, distance_metric="euclidean")
    each = loss.compute_loss(first, second, labels=torch.tensor([1.0, 0.0, 0.0]))
    assert each.tolist() == pytest.approx([25.0, 1.5**2, 0.0])
    assert loss(first, second, labels=torch.tensor([1, 0, 0])).item() == pytest.approx((25 + 2.25) / 3)
    same = torch.zeros(1, 2, requires_grad=True)
    loss(same, torch.zeros(1, 2), labels=torch.tensor([1.0])).backward()
    assert torch.isfinite(same.grad).all()


def test_contrastive_loss_wants_either_negatives_or_labels():
    a, labels = torch.ones(2, 3), torch.ones(2)
    for negative, given, word in [(None, None, "neither"), (a, labels, "both")]:
        with pytest.raises(BadInputError, match=word):
            ContrastiveLoss()(a, a, negative, given)
    with pytest.raises(BadInputError, match="distance_metric='manhattan'"):
        ContrastiveLoss(distance_metric="manhattan")
    with pytest.raises(BadInputError, match="labels"):
        ContrastiveLoss()(a, a, labels=torch.ones(3))
    with pytest.raises(BadInputError, match="embeddings"):
        ContrastiveLoss()(a, a[:, :2], labels=labels)


def test_variance_loss_by_hand():
    outputs = torch.tensor([[1.0, 0.0], [3.0, 0.0], [9.0, 0.0]])
    # Unbiased variances: of 1, 3, 9 it is 52 / 3; of zeros 0.
    expected = ((52 / 3 - 2) ** 2 + 2**2) / 2
    assert VarianceLoss(target_variance=2.0, beta=0.0)(outputs).item() == pytest.approx(expected)
    p = np.exp(outputs.numpy()) / np.exp(outputs.numpy()).sum(1, keepdims=True)
    entropy = -(p * np.log(p)).sum(1)
    with_entropy = VarianceLoss(target_variance=2.0, beta=0.3)(outputs).item()
    assert with_entropy == pytest.approx(expected - 0.3 * entropy.mean())
    masked = VarianceLoss(target_variance=2.0, beta=0.3)(outputs, mask=torch.tensor([1, 1, 0])).item()
    assert masked == pytest.approx(((2 - 2) ** 2 + 2**2) / 2 - 0.3 * entropy[:2].mean())
    assert VarianceLoss(target_variance=50.0)(outputs[:, 0]).item() == pytest.approx((52 / 3 - 50) ** 2)


def test_variance_needs_two_rows():
    with pytest.raises(BadInputError, match="at least two rows"):
        VarianceLoss()(torch.ones(1, 3))
    with pytest.raises(BadInputError, match="at least two rows"):
        VarianceLoss()(torch.ones(3, 3), mask=torch.tensor([0, 1, 0]))


def test_variance_regularization_by_hand():
    outputs = torch.tensor([[1.0, 5.0], [3.0, 5.0]]).requires_grad_()
    expected = [(math.sqrt(2) - 0.5) ** 2, 0.25]
    each = variance_regularization(outputs, target_std=0.5, reduction="none")
    assert each.tolist() == pytest.approx(expected)
    assert variance_regularization(outputs, 0.5, "sum").item() == pytest.approx(sum(expected))
    mean = variance_regularization(outputs, 0.5)
    mean.backward()
    assert mean.item() == pytest.approx(sum(expected) / 2)
    assert torch.isfinite(outputs.grad).all()
    with pytest.raises(BadInputError, match="reduction"):
        variance_regularization(outputs, reduction="median")


X, Y = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 1.0])


def test_composite_adds_its_weighted_components_and_applies_its_own_config():
    composite = CompositeLoss([named("a"), named("b", weight=3.0)], [1.0, 0.5])
    assert composite.weights == [1.0, 0.5]
    assert composite(X, Y).item() == pytest.approx(2.5 + 0.5 * 7.5)
    assert composite(X, Y, torch.tensor([1.0, 0.0])).item() == pytest.approx(1 + 0.5 * 3)
    config = CustomLossConfig("all", weight=2.0, clip_value=5.0)
    whole = CompositeLoss([named("a"), named("a", reduction="sum")], config=config)
    assert whole.weights == [1.0, 1.0]
    answer = whole(X, Y, return_components=True)
    assert {name: loss.item() for name, loss in answer["components"].items()} == {"a": 2.5, "a_2": 5.0}
    assert answer["loss"].item() == whole(X, Y).item() == 5.0
    assert whole(X, Y, return_dict=True)["name"] == "all"


def test_composite_of_unreduced_components_reduces_under_the_mask_once():
    config = CustomLossConfig("all", reduction="mean")
    composite = CompositeLoss(
        [named("a", reduction="none"), named("b", reduction="none")], [1.0, 2.0], config
    )
    assert composite(X, Y).item() == pytest.approx(3 * 2.5)
    assert composite(X, Y, torch.tensor([0.5, 0.0])).item() == pytest.approx(3 * 0.5)


def test_composite_hands_each_component_what_it_takes():
    policy = torch.tensor([[-1.0, -2.0]])
    old, reference, advantages = policy - 0.1, policy - 0.5, torch.tensor([[1.0, -1.0]])
    ppo, kl = PPOLoss(entropy_coef=0.0), KLDivergenceLoss(target_kl=0.0)
    composite = CompositeLoss([ppo, kl], [1.0, 0.1])
    both = composite(policy, old, advantages=advantages, ref_log_probs=reference)
    apart = ppo(policy, old, advantages) + 0.1 * kl(policy, reference)
    assert both.item() == pytest.approx(apart.item())
    assert kl(policy, reference).item() == pytest.approx(0.05)
    same = composite(policy, old, advantages=advantages)
    assert same.item() == pytest.approx((ppo(policy, old, advantages) + 0.1 * kl(policy, old)).item())
    with pytest.raises(TypeError, match="takes no 'advantage'"):
        composite(policy, old, advantage=advantages)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CompositeLoss([]), "contains nothing"),
        (lambda: CompositeLoss([named("a"), torch.nn.MSELoss()]), "contains a MSELoss"),
        (lambda: CompositeLoss([named("a")], [1.0, 2.0]), "2 weights for 1 losses"),
        (lambda: CompositeLoss([named("a")], [math.nan]), "weights"),
        (lambda: CompositeLoss([named("a")], config=CustomLossConfig("c", temperature=2.0)), "temperature"),
        (lambda: AdaptiveLoss(torch.nn.MSELoss(), float), "base_loss"),
        (lambda: AdaptiveLoss(named("a"), 3.0), "schedule_fn"),
        (lambda: AdaptiveLoss(named("a"), float, CustomLossConfig("c", temperature=2.0)), "temperature"),
        (lambda: AdaptiveLoss(named("a"), lambda step: math.nan)(X, Y), r"schedule_fn\(0\)=nan"),
        (lambda: FocalLoss(alpha=1.5), "alpha"),
        (lambda: FocalLoss(gamma=-1.0), "gamma"),
        (lambda: FocalLoss()(X, Y[:1]), "one label per logit"),
        (lambda: VarianceLoss(target_variance=-1.0), "target_variance"),
        (lambda: ContrastiveLoss(margin=-1.0), "margin"),
    ],
)
def test_what_cannot_work_is_refused_by_name(make, message):
    with pytest.raises(BadInputError, match=message):
        make()


def test_adaptive_loss_follows_its_schedule_and_keeps_the_base_config():
    base = named("base", weight=2.0)
    adaptive = AdaptiveLoss(base, lambda step: 1.0 + 0.5 * step, CustomLossConfig("adaptive", weight=10.0))
    seen = []
    for _ in range(3):
        seen.append(adaptive(X, Y).item())
        adaptive.step()
    assert seen == pytest.approx([50.0, 75.0, 100.0])
    restored = AdaptiveLoss(base, lambda step: 1.0 + 0.5 * step)
    restored.load_state_dict(adaptive.state_dict())
    assert restored.current_step == 3
    adaptive.reset()
    assert adaptive.current_step == 0
    assert adaptive(X, Y, torch.tensor([0.0, 1.0])).item() == pytest.approx(80.0)


def test_adaptive_loss_takes_the_arguments_of_its_base():
    policy, old, advantages = torch.tensor([[-1.0]]), torch.tensor([[-1.1]]), torch.tensor([[2.0]])
    ppo = PPOLoss(entropy_coef=0.0)
    half = AdaptiveLoss(ppo, lambda step: 0.5)
    assert half(policy, old, advantages).item() == pytest.approx(0.5 * ppo(policy, old, advantages).item())
    unreduced = AdaptiveLoss(named("a", reduction="none"), lambda step: 2.0)
    assert unreduced(X, Y, torch.tensor([0.5, 0.0])).item() == pytest.approx(2 * 0.5)


def test_the_defaults_are_the_documented_ones():
    focal, contrastive, variance = FocalLoss(), ContrastiveLoss(), VarianceLoss()
    assert TokenLevelLoss().ignore_index == -100
    assert (focal.alpha, focal.gamma) == (0.25, 2.0)
    assert (contrastive.margin, contrastive.distance_metric) == (1.0, "cosine")
    assert (variance.target_variance, variance.beta) == (1.0, 0.1)
    outputs = torch.tensor([[0.0], [2.0]])
    assert variance_regularization(outputs).item() == pytest.approx((math.sqrt(2) - 1) ** 2)


def test_token_loss_of_any_batch_length_and_vocabulary():
    logits, labels = torch.randn(2, 4, 7), torch.randint(0, 7, (2, 4))
    numbers = np.exp(logits.numpy().astype(np.float64))
    rows, columns = np.indices((2, 4))
    expected = -np.log(numbers[rows, columns, labels.numpy()] / numbers.sum(-1))
    assert TokenLevelLoss().compute_loss(logits, labels).numpy() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        PPOLoss,
        ImportanceSamplingLoss,
        KLDivergenceLoss,
        TokenLevelLoss,
        FocalLoss,
        ContrastiveLoss,
        VarianceLoss,
        lambda config: CompositeLoss([named("a")], config=config),
        lambda config: AdaptiveLoss(named("a"), float, config),
    ],
)
def test_every_loss_keeps_the_config_that_it_is_given(make):
    config = CustomLossConfig("mine", weight=3.0)
    assert make(config).config is config
    assert make(None).config.weight == 1.0


def test_variance_leaves_out_columns_that_a_mask_thins_to_one_row():
    outputs = torch.tensor([[1.0, 0.0, 4.0], [3.0, 7.0, 9.0], [9.0, 5.0, 0.0]]).requires_grad_()
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 0]])
    loss = VarianceLoss(target_variance=2.0, beta=0.0)(outputs, mask=mask)
    loss.backward()
    assert loss.item() == pytest.approx((52 / 3 - 2) ** 2)
    assert torch.isfinite(outputs.grad).all()
    assert outputs.grad[:, 1:].abs().max() == 0


def test_variance_entropy_is_over_the_last_dimension():
    outputs = torch.randn(3, 2, 4)
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]])
    with_entropy = VarianceLoss(beta=1.0)(outputs, mask=mask) - VarianceLoss(beta=0.0)(outputs, mask=mask)
    p = np.exp(outputs.numpy()) / np.exp(outputs.numpy()).sum(-1, keepdims=True)
    entropy = -(p * np.log(p)).sum(-1)
    assert with_entropy.item() == pytest.approx(-entropy[mask.numpy() == 1].mean(), rel=1e-5)


def test_contrastive_pairs_by_cosine():
    one, other = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 2.0], [1.0, 0.0]])
    each = ContrastiveLoss(margin=1.5).compute_loss(one, other, labels=torch.tensor([1.0, 0.0]))
    assert each.tolist() == pytest.approx([1.0, 1.5**2])


def test_adaptive_loss_refuses_an_argument_that_its_base_does_not_take():
    with pytest.raises(TypeError, match="takes no 'advantage'"):
        AdaptiveLoss(PPOLoss(), lambda step: 1.0)(X, Y, advantage=X)
