"""KL estimators against closed forms, at their extremes, and the controllers by hand."""

import math

import numpy as np
import pytest
import torch

from rl_cluster.algorithms.kl import AdaptiveKL, FixedKL, exact_kl, kl_controller, kl_per_token
from rl_cluster.config.algorithm import KLConfig
from rl_cluster.errors import CheckpointError

ESTIMATORS = ["k1", "k2", "k3", "abs"]
EXTREMES = [-math.inf, -1e4, -30.0, -1.0, 0.0, 30.0, 1e4, math.inf]


def test_estimators_by_hand():
    policy, reference = torch.log(torch.tensor([0.5])), torch.log(torch.tensor([0.25]))
    d = math.log(2)
    expected = {"k1": d, "k2": d * d / 2, "k3": 0.5 - 1 + d, "abs": d}
    for name, value in expected.items():
        assert kl_per_token(policy, reference, name).item() == pytest.approx(value, rel=1e-6)
    assert kl_per_token(reference, policy, "k1").item() == pytest.approx(-d, rel=1e-6)
    assert kl_per_token(reference, policy, "abs").item() == pytest.approx(d, rel=1e-6)
    assert kl_per_token(reference, policy, "k3").item() == pytest.approx(2 - 1 - d, rel=1e-6)


def test_k1_and_k3_have_the_true_divergence_as_their_mean():
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.5, 0.3])
    truth = float((p * np.log(p / q)).sum())
    for name in ("k1", "k3"):
        each = kl_per_token(torch.from_numpy(np.log(p)), torch.from_numpy(np.log(q)), name).numpy()
        assert float((p * each).sum()) == pytest.approx(truth, rel=1e-12)


def test_the_exact_divergence_is_that_of_the_distributions():
    generator = torch.Generator().manual_seed(2)
    own, other = torch.randn(2, 4, 7, generator=generator, dtype=torch.float64)
    policy, reference = (torch.distributions.Categorical(logits=logits) for logits in (own, other))
    expected = torch.distributions.kl_divergence(policy, reference)
    torch.testing.assert_close(exact_kl(policy.logits, reference.logits), expected)
    never = torch.tensor([[0.0, -math.inf]])
    assert exact_kl(never, torch.log(torch.tensor([[0.5, 0.5]]))).item() == pytest.approx(math.log(2))
    assert exact_kl(never, never).item() == 0.0


def test_the_gradients_are_those_of_the_formulas():
    reference = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    policy = torch.tensor([-0.5, -2.5, -0.5], dtype=torch.float64)
    d = policy - reference
    expected = {"k1": torch.ones(3), "k2": d, "k3": 1 - torch.exp(-d), "abs": torch.sign(d)}
    for name, gradient in expected.items():
        leaf = policy.clone().requires_grad_()
        kl_per_token(leaf, reference, name).sum().backward()
        torch.testing.assert_close(leaf.grad, gradient.double())


def test_far_above_the_reference_k3_still_pulls_back():
    policy = torch.tensor([0.0], requires_grad=True)
    kl_per_token(policy, torch.tensor([-100.0]), "k3").sum().backward()
    assert policy.grad.item() == pytest.approx(1.0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_pair_of_extremes_gives_a_nan_or_an_infinity(estimator):
    policy = torch.tensor([a for a in EXTREMES for _ in EXTREMES], requires_grad=True)
    reference = torch.tensor(EXTREMES * len(EXTREMES))
    kl = kl_per_token(policy, reference, estimator)
    kl.sum().backward()
    assert torch.isfinite(kl).all()
    assert torch.isfinite(policy.grad).all()
    if estimator != "k1":
        assert (kl >= 0).all()


def test_a_nan_is_not_hidden():
    assert kl_per_token(torch.tensor([math.nan]), torch.tensor([0.0]), "k3").isnan().all()


def test_the_fixed_controller_keeps_its_coefficient():
    assert FixedKL(0.1).update(1e9, 100) == 0.1


def test_the_adaptive_controller_moves_in_proportion_to_the_error():
    controller = AdaptiveKL(coef=0.2, target=6.0, horizon=10_000)
    assert controller.update(6.6, 256) == pytest.approx(0.2 * (1 + 0.1 * 256 / 10_000))
    assert controller.update(6.0, 256) == pytest.approx(0.2 * (1 + 0.1 * 256 / 10_000))


def test_the_adaptive_controllers_error_is_clipped_on_both_sides():
    assert AdaptiveKL(0.2, 6.0, 1000).update(600.0, 100) == pytest.approx(0.2 * 1.02)
    assert AdaptiveKL(0.2, 6.0, 1000).update(-600.0, 100) == pytest.approx(0.2 * 0.98)


def test_a_controller_continues_from_its_checkpoint():
    first = AdaptiveKL(0.2, 6.0, 1000)
    first.update(60.0, 500)
    second = AdaptiveKL(0.2, 6.0, 1000)
    second.load(first.state())
    assert second.coef == first.coef == pytest.approx(0.22)
    with pytest.raises(CheckpointError, match="coef"):
        second.load({})


def test_the_configuration_chooses_the_controller():
    fixed = kl_controller(KLConfig(coef=0.3))
    adaptive = kl_controller(KLConfig(coef=0.3, controller="adaptive", target=2.0, horizon=10))
    assert fixed.update(4.0, 1) == 0.3
    assert adaptive.update(4.0, 1) == pytest.approx(0.3 * 1.02)
