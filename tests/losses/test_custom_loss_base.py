"""What `forward` does around a formula: binding, mask, reduction, normalisation, weight, clipping."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rl_cluster.errors import BadInputError
from rl_cluster.losses import CustomLoss, CustomLossConfig

PREDICTIONS = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
TARGETS = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
# Squared errors: [[1, 4], [4, 16]].
MASK = torch.tensor([[1.0, 0.0], [1.0, 1.0]])


class Squared(CustomLoss):
    def compute_loss(self, predictions, targets, mask=None, **kwargs):
        return F.mse_loss(predictions, targets, reduction="none")


class SquaredWithoutMask(CustomLoss):
    def compute_loss(self, predictions, targets):
        return (predictions - targets).square()


class Scalar(CustomLoss):
    def compute_loss(self, predictions, targets):
        return (predictions - targets).square().mean()


def squared(**settings):
    return Squared(CustomLossConfig(name="squared", **settings))


@pytest.mark.parametrize("kind", [Squared, SquaredWithoutMask])
def test_the_reductions_count_only_what_the_mask_keeps(kind):
    def make(reduction):
        return kind(CustomLossConfig(name="x", reduction=reduction))

    assert make("mean")(PREDICTIONS, TARGETS).item() == 25 / 4
    assert make("sum")(PREDICTIONS, TARGETS).item() == 25
    assert make("none")(PREDICTIONS, TARGETS).tolist() == [[1, 4], [4, 16]]
    assert make("mean")(PREDICTIONS, TARGETS, MASK).item() == 7
    assert make("mean")(PREDICTIONS, TARGETS, mask=MASK.bool()).item() == 7
    assert make("sum")(PREDICTIONS, TARGETS, MASK).item() == 21
    assert make("none")(PREDICTIONS, TARGETS, MASK).tolist() == [[1, 0], [4, 16]]


def test_fractions_in_the_mask_are_weights_of_a_mean():
    mask = torch.tensor([[0.5, 0.0], [0.25, 0.0]])
    assert squared()(PREDICTIONS, TARGETS, mask).item() == pytest.approx((0.5 * 1 + 0.25 * 4) / 0.75)


def test_a_mask_of_the_leading_dimensions_covers_whole_rows():
    assert squared()(PREDICTIONS, TARGETS, torch.tensor([0.0, 1.0])).item() == 10


def test_what_the_mask_leaves_out_may_be_nan():
    predictions = PREDICTIONS.clone()
    predictions[0, 1] = math.nan
    assert squared()(predictions, TARGETS, MASK).item() == 7
    assert squared(normalize=True, reduction="sum")(predictions, TARGETS, MASK).isfinite()


def test_a_mask_that_keeps_nothing_gives_a_loss_of_zero_with_a_gradient():
    predictions = PREDICTIONS.clone().requires_grad_()
    loss = squared()(predictions, TARGETS, torch.zeros(2, 2))
    loss.backward()
    assert loss.item() == 0
    assert predictions.grad.tolist() == [[0, 0], [0, 0]]


def test_the_weight_multiplies_and_is_reported():
    answer = squared(weight=2.0)(PREDICTIONS, TARGETS, return_dict=True)
    assert answer["loss"].item() == 12.5
    assert (answer["weight"], answer["name"]) == (2.0, "squared")
    assert squared(weight=2.0)(PREDICTIONS, TARGETS, MASK, True)["loss"].item() == 14


def test_the_temperature_divides_the_predictions():
    expected = np.mean((PREDICTIONS.numpy() / 2 - TARGETS.numpy()) ** 2)
    assert squared(temperature=2.0)(PREDICTIONS, TARGETS).item() == pytest.approx(expected)
    assert squared(temperature=2.0).compute_loss(PREDICTIONS, TARGETS).tolist() == [[1, 4], [4, 16]]


def test_normalisation_divides_by_the_root_mean_square_as_a_constant():
    predictions = PREDICTIONS.clone().requires_grad_()
    loss = squared(normalize=True, epsilon=0.5)(predictions, TARGETS, MASK)
    scale = math.sqrt((1 + 16 + 256) / 3) + 0.5
    assert loss.item() == pytest.approx(7 / scale)
    loss.backward()
    expected = 2 * (PREDICTIONS - TARGETS) * MASK / 3 / scale
    assert predictions.grad.numpy() == pytest.approx(expected.numpy())


def test_clipping_shrinks_the_value_and_the_gradient_alike():
    predictions = PREDICTIONS.clone().requires_grad_()
    loss = squared(clip_value=2.5)(predictions, TARGETS)
    loss.backward()
    assert loss.item() == pytest.approx(2.5)
    whole = 2 * (PREDICTIONS - TARGETS) / 4
    assert predictions.grad.numpy() == pytest.approx((whole * 2.5 / 6.25).numpy())
    assert squared(clip_value=100.0)(PREDICTIONS, TARGETS).item() == 6.25
    assert squared(clip_value=2.5, weight=-1.0)(PREDICTIONS, TARGETS).item() == pytest.approx(-2.5)
    each = squared(clip_value=3.0, reduction="none")(PREDICTIONS, TARGETS)
    assert each.tolist() == [[1, 3], [3, 3]]


def test_epsilon_is_the_smallest_denominator_of_a_mean():
    mask = torch.tensor([[0.001, 0.0], [0.0, 0.0]])
    assert squared(epsilon=0.1)(PREDICTIONS, TARGETS, mask).item() == pytest.approx(0.001 / 0.1)
    assert squared()(PREDICTIONS, TARGETS, mask).item() == pytest.approx(1.0)


def test_arguments_bind_by_position_by_name_and_by_their_generic_names():
    class Named(CustomLoss):
        def compute_loss(self, scores, goal, third, mask=None):
            return scores - goal + 10 * third

    loss, one, two = Named(), torch.tensor([5.0]), torch.tensor([2.0])
    for answer in (
        loss(one, two, 1),
        loss(scores=one, goal=two, third=1),
        loss(predictions=one, targets=two, third=1),
        loss(one, two, 1, torch.ones(1)),
        loss(one, two, 1, torch.ones(1), True)["loss"],
    ):
        assert answer.item() == 13
    assert loss.config.name == "Named"
    with pytest.raises(TypeError, match="takes no 'fourth'"):
        loss(one, two, 1, fourth=4)
    with pytest.raises(TypeError, match="got 'scores' twice"):
        loss(one, two, 1, predictions=two)
    with pytest.raises(TypeError, match="takes 5 arguments"):
        loss(one, two, 1, None, False, 6)


def test_a_mask_that_could_not_act_is_refused():
    with pytest.raises(BadInputError, match="returns a scalar and takes no mask"):
        Scalar()(PREDICTIONS, TARGETS, mask=MASK)
    assert Scalar()(PREDICTIONS, TARGETS).item() == 6.25
    for shape in [(2,), ()]:
        mask = torch.ones(shape) if shape else torch.tensor(1.0)
        if shape:
            assert squared()(PREDICTIONS, TARGETS, mask).item() == 6.25
            continue
        with pytest.raises(BadInputError, match="mask has shape"):
            squared()(PREDICTIONS, TARGETS, mask)
    with pytest.raises(BadInputError, match=r"mask has shape \(2, 3\), the loss \(2, 2\)"):
        squared()(PREDICTIONS, TARGETS, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": ""}, "name"),
        ({"name": 3}, "name"),
        ({"reduction": "average"}, "reduction='average'.*mean, sum, none"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"clip_value": 0.0}, "clip_value"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"weight": math.nan}, "weight"),
        ({"weight": "1"}, "weight"),
        ({"weight": True}, "weight"),
    ],
)
def test_a_config_that_cannot_work_names_the_field(settings, message):
    with pytest.raises(ValueError, match=message):
        CustomLossConfig(**({"name": "x"} | settings))


def test_a_config_of_a_wrong_type_is_refused():
    with pytest.raises(BadInputError, match=r"config is float 0\.2, not a CustomLossConfig"):
        Squared(0.2)
