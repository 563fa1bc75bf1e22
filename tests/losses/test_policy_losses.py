"""PPO, importance sampling and KL losses against numpy, closed forms and exact expectations."""

import math

import numpy as np
import pytest
import torch

from rl_cluster.errors import BadInputError
from rl_cluster.losses import (
    CustomLossConfig,
    ImportanceSamplingLoss,
    KLDivergenceLoss,
    PPOLoss,
    compute_kl_penalty,
    compute_ppo_loss,
)

RATIO = np.array([[1.0, 1.5, 0.5], [1.1, 3.0, 0.2]])
OLD = np.array([[-1.0, -2.0, -0.7], [-0.1, -1.5, -3.0]])
ADVANTAGES = np.array([[1.0, 2.0, -1.0], [-2.0, -0.5, 1.0]])
VALUES, OLD_VALUES = np.array([[0.0, 1.0, 2.0], [3.0, 0.5, 0.2]]), np.zeros((2, 3))
RETURNS = np.array([[1.0, 1.0, 0.0], [2.5, 1.0, -1.0]])
MASK = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
# By hand, clip 0.2: -1, -1.2·2, +0.8 (clipped from below, A < 0), 2.2, 1.5, -0.2.
SURROGATE = np.array([[-1.0, -2.4, 0.8], [2.2, 1.5, -0.2]])


def tensor(values):
    return torch.tensor(np.asarray(values), dtype=torch.float64)


NEW, OLD_T, ADV = tensor(OLD + np.log(RATIO)), tensor(OLD), tensor(ADVANTAGES)


def test_ppo_surrogate_by_hand():
    loss = PPOLoss(entropy_coef=0.0)
    assert loss.compute_loss(NEW, OLD_T, ADV).numpy() == pytest.approx(SURROGATE)
    assert loss(NEW, OLD_T, ADV).item() == pytest.approx(SURROGATE.mean())
    wide = PPOLoss(entropy_coef=0.0, clip_param=0.6)
    assert wide.compute_loss(NEW, OLD_T, ADV).numpy() == pytest.approx(
        np.maximum(-RATIO * ADVANTAGES, -np.clip(RATIO, 0.4, 1.6) * ADVANTAGES)
    )


def test_ppo_gradient_stops_where_the_clipped_branch_decides():
    new = NEW.clone().requires_grad_()
    PPOLoss(CustomLossConfig("ppo", reduction="sum"), entropy_coef=0.0)(new, OLD_T, ADV).backward()
    free = np.array([[1, 0, 0], [1, 1, 1]])
    assert new.grad.numpy() == pytest.approx(-RATIO * ADVANTAGES * free)


def test_ppo_mask_and_advantages_per_sequence():
    loss = PPOLoss(entropy_coef=0.0)
    assert loss(NEW, OLD_T, ADV, mask=tensor(MASK)).item() == pytest.approx((SURROGATE * MASK).sum() / 4)
    assert loss.compute_loss(NEW, OLD_T, ADV, mask=tensor(MASK)).numpy() == pytest.approx(SURROGATE * MASK)
    per_row = loss.compute_loss(NEW, OLD_T, tensor([2.0, -1.0]))
    assert torch.equal(per_row, loss.compute_loss(NEW, OLD_T, tensor([[2.0], [-1.0]])))
    spread = np.repeat([[2.0], [-1.0]], 3, axis=1)
    assert per_row.numpy() == pytest.approx(np.maximum(-RATIO * spread, -np.clip(RATIO, 0.8, 1.2) * spread))


def test_ppo_value_loss_with_and_without_clipping():
    def value_part(old_values=None, **settings):
        loss = PPOLoss(entropy_coef=0.0, **settings)
        whole = loss.compute_loss(
            NEW, OLD_T, ADV, values=tensor(VALUES), old_values=old_values, returns=tensor(RETURNS)
        )
        return whole.numpy() - SURROGATE

    free = 0.5 * (VALUES - RETURNS) ** 2
    assert value_part(value_loss_coef=0.7) == pytest.approx(0.7 * free)
    held = 0.5 * (np.clip(VALUES, -0.4, 0.4) - RETURNS) ** 2
    clipped = value_part(value_clip=0.4, old_values=tensor(OLD_VALUES))
    assert clipped == pytest.approx(0.5 * np.maximum(free, held))
    assert not np.allclose(clipped, 0.5 * free)


def test_ppo_entropy_that_is_given_is_subtracted():
    entropy = tensor(np.arange(6).reshape(2, 3))
    loss = PPOLoss(entropy_coef=0.3).compute_loss(NEW, OLD_T, ADV, entropy=entropy)
    assert loss.numpy() == pytest.approx(SURROGATE - 0.3 * np.arange(6).reshape(2, 3))


def test_ppo_without_an_entropy_estimates_it_without_bias_in_value_and_gradient():
    """All tokens of a three-way policy, weighted by their probability: the exact expectation."""
    logits = tensor([0.3, -1.0, 0.9]).requires_grad_()
    log_probs = torch.log_softmax(logits, 0)
    weights = log_probs.exp().detach()
    each = PPOLoss(entropy_coef=1.0).compute_loss(log_probs, log_probs.detach(), torch.zeros_like(log_probs))
    estimate = torch.autograd.grad((weights * each).sum(), logits, retain_graph=True)[0]
    negative_entropy = (log_probs.exp() * log_probs).sum()
    truth = torch.autograd.grad(negative_entropy, logits)[0]
    assert (weights * each).sum().item() == pytest.approx(negative_entropy.item())
    assert estimate.numpy() == pytest.approx(truth.numpy())


def test_ppo_temperature_divides_the_log_ratio():
    hot = PPOLoss(CustomLossConfig("ppo", temperature=2.0), entropy_coef=0.0)(NEW, OLD_T, ADV)
    ratio = np.sqrt(RATIO)
    expected = np.maximum(-ratio * ADVANTAGES, -np.clip(ratio, 0.8, 1.2) * ADVANTAGES).mean()
    assert hot.item() == pytest.approx(expected)


def test_ppo_is_finite_at_infinite_log_probabilities():
    new = tensor([[-math.inf, -1.0]]).requires_grad_()
    PPOLoss()(new, tensor([[-math.inf, -1e6]]), tensor([[1.0, -1.0]])).backward()
    assert torch.isfinite(new.grad).all()


def test_compute_ppo_loss_and_its_metrics_count_only_the_masked_tokens():
    loss, metrics = compute_ppo_loss(NEW, OLD_T, ADV)
    assert loss.item() == pytest.approx(SURROGATE.mean())
    assert metrics == pytest.approx(
        {"ppo_loss": SURROGATE.mean(), "clip_fraction": 4 / 6, "mean_ratio": RATIO.mean()}
    )
    loss, metrics = compute_ppo_loss(NEW, OLD_T, ADV, clip_param=0.6, mask=tensor(MASK))
    kept = np.maximum(-RATIO * ADVANTAGES, -np.clip(RATIO, 0.4, 1.6) * ADVANTAGES)[MASK == 1]
    assert loss.item() == pytest.approx(kept.mean())
    assert metrics == pytest.approx(
        {"ppo_loss": kept.mean(), "clip_fraction": 1 / 4, "mean_ratio": RATIO[MASK == 1].mean()}
    )


def test_importance_sampling_truncates_and_normalises():
    plain = ImportanceSamplingLoss(normalize=False, clip_ratio=2.0).compute_loss(NEW, OLD_T, ADV)
    assert plain.numpy() == pytest.approx(-np.minimum(RATIO, 2.0) * ADVANTAGES)
    normalised = ImportanceSamplingLoss(clip_ratio=2.0).compute_loss(NEW, OLD_T, ADV)
    held = np.minimum(RATIO, 2.0)
    assert normalised.numpy() == pytest.approx(-held / held.mean() * ADVANTAGES)
    masked = ImportanceSamplingLoss()(NEW, OLD_T, ADV, mask=tensor(MASK))
    kept = RATIO[MASK == 1]
    assert masked.item() == pytest.approx((-kept / kept.mean() * ADVANTAGES[MASK == 1]).mean())


def test_importance_sampling_gradient_with_a_truncated_token_and_with_a_constant_advantage():
    new = NEW.clone().requires_grad_()
    config = CustomLossConfig("is", reduction="sum")
    ImportanceSamplingLoss(config, clip_ratio=2.0, normalize=False)(new, OLD_T, ADV).backward()
    assert new.grad.numpy() == pytest.approx(-np.minimum(RATIO, 2.0) * ADVANTAGES)
    new = NEW.clone().requires_grad_()
    ImportanceSamplingLoss(config)(new, OLD_T, torch.full_like(ADV, 7.0)).backward()
    assert new.grad.numpy() == pytest.approx(np.zeros((2, 3)), abs=1e-12)


def test_importance_sampling_temperature_divides_the_log_ratio():
    hot = ImportanceSamplingLoss(CustomLossConfig("is", temperature=2.0), normalize=False)(NEW, OLD_T, ADV)
    assert hot.item() == pytest.approx((-np.sqrt(RATIO) * ADVANTAGES).mean())


def test_kl_loss_is_a_hinge_above_the_target():
    policy, reference = tensor([[-1.0, -2.0]]), tensor([[-1.5, -2.3]])
    loss = KLDivergenceLoss(target_kl=0.1, kl_coef=2.0)
    assert loss(policy, reference).item() == pytest.approx(2.0 * (0.4 - 0.1))
    assert loss(policy, reference, tensor([[1.0, 0.0]])).item() == pytest.approx(2.0 * (0.5 - 0.1))
    assert KLDivergenceLoss(target_kl=0.5)(policy, reference).item() == 0
    assert loss(reference, policy).item() == 0, "KL(policy ‖ reference), not the other way round"
    hot = KLDivergenceLoss(CustomLossConfig("kl", temperature=2.0), target_kl=0.0, kl_coef=1.0)
    assert hot(policy, reference).item() == pytest.approx(0.2)


def test_kl_loss_has_the_divergence_and_its_gradient_as_expectation():
    """200 copies of the policy's tokens in the proportion of their probabilities: an exact expectation."""
    probabilities, reference = np.array([0.5, 0.3, 0.2]), tensor(np.log([0.2, 0.3, 0.5]))
    logits = tensor(np.log(probabilities)).requires_grad_()
    log_probs = torch.log_softmax(logits, 0)
    drawn = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    loss = KLDivergenceLoss(target_kl=0.01, kl_coef=0.1)(log_probs[drawn][None], reference[drawn][None])
    truth = (log_probs.exp() * (log_probs - reference)).sum()
    assert loss.item() == pytest.approx(0.1 * (truth.item() - 0.01))
    estimate = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert estimate.numpy() == pytest.approx(0.1 * torch.autograd.grad(truth, logits)[0].numpy())
    assert torch.count_nonzero(estimate) == 3


def test_compute_kl_penalty_is_the_exact_divergence_of_the_policy_from_the_reference():
    p, q = np.array([[0.7, 0.2, 0.1], [0.3, 0.3, 0.4]]), np.array([[0.2, 0.3, 0.5], [0.3, 0.3, 0.4]])
    first = (p[0] * np.log(p[0] / q[0])).sum()
    logits, reference = tensor(np.log(p))[None] + 3.0, tensor(np.log(q))[None]
    assert compute_kl_penalty(logits, reference).item() == pytest.approx(first / 2)
    assert compute_kl_penalty(logits, reference, mask=tensor([[1.0, 0.0]])).item() == pytest.approx(first)
    hot_p, hot_q = np.sqrt(p[0]) / np.sqrt(p[0]).sum(), np.sqrt(q[0]) / np.sqrt(q[0]).sum()
    hot = compute_kl_penalty(logits, reference, mask=tensor([[1.0, 0.0]]), temperature=2.0)
    assert hot.item() == pytest.approx((hot_p * np.log(hot_p / hot_q)).sum())
    excluded = compute_kl_penalty(tensor([[0.0, -math.inf]]), tensor([[0.0, -math.inf]]))
    assert excluded.item() == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PPOLoss(clip_param=0.0), "PPOLoss.clip_param=0.0"),
        (lambda: PPOLoss(value_clip=-1.0), "PPOLoss.value_clip"),
        (lambda: PPOLoss(value_loss_coef=-1.0), "PPOLoss.value_loss_coef"),
        (lambda: PPOLoss(entropy_coef=math.inf), "PPOLoss.entropy_coef"),
        (lambda: PPOLoss(0.2), "config is float"),
        (lambda: ImportanceSamplingLoss(clip_ratio=0.0), "clip_ratio"),
        (lambda: KLDivergenceLoss(target_kl=-0.1), "target_kl"),
        (lambda: KLDivergenceLoss(kl_coef=-0.1), "kl_coef"),
        (lambda: PPOLoss()(NEW, OLD_T[:, :2], ADV), r"old_log_probs has shape \(2, 2\)"),
        (lambda: PPOLoss()(NEW, OLD_T, ADV[:, :2]), r"advantages has shape \(2, 2\)"),
        (lambda: PPOLoss()(NEW, OLD_T, ADV, values=NEW), "returns missing"),
        (lambda: PPOLoss()(NEW, OLD_T, ADV, returns=NEW), "values missing"),
        (lambda: PPOLoss(value_clip=0.2)(NEW, OLD_T, ADV, values=NEW, returns=NEW), "needs old_values"),
        (lambda: compute_ppo_loss(NEW, OLD_T, ADV, clip_param=-1), "compute_ppo_loss.clip_param"),
        (lambda: compute_kl_penalty(NEW, NEW[:1]), "both must be"),
        (lambda: compute_kl_penalty(NEW, NEW, temperature=0), "temperature"),
    ],
)
def test_arguments_that_cannot_work_are_named(make, message):
    with pytest.raises(BadInputError, match=message):
        make()


def test_gradients_reach_the_current_policy_and_the_critic_only():
    new, old, advantages, old_values, returns, values = (
        tensor(array).requires_grad_()
        for array in (OLD + np.log(RATIO), OLD, ADVANTAGES, OLD_VALUES, RETURNS, VALUES)
    )
    total = PPOLoss(value_clip=0.4)(new, old, advantages, values, old_values, returns)
    total = total + ImportanceSamplingLoss()(new, old, advantages) + KLDivergenceLoss()(new, old)
    total = total + compute_ppo_loss(new, old, advantages)[0] + compute_kl_penalty(new, old)
    total.backward()
    assert [old.grad, advantages.grad, old_values.grad, returns.grad] == [None] * 4
    assert new.grad.abs().min() > 0
    assert values.grad.abs().max() > 0


def test_each_kl_token_has_the_gradient_of_half_the_squared_log_ratio():
    policy, reference = tensor([[-1.0, -2.0, -1.0]]).requires_grad_(), tensor([[-1.5, -1.8, -9.0]])
    KLDivergenceLoss(target_kl=0.0, kl_coef=3.0)(policy, reference, tensor([[1.0, 1.0, 0.0]])).backward()
    assert policy.grad.numpy() == pytest.approx(3.0 * np.array([[0.5, -0.2, 0.0]]) / 2)


def test_masked_tokens_are_zero_even_before_the_reduction():
    mask = tensor([[1.0, 0.5, 0.0], [0.0, 0.0, 0.0]])
    for loss in (PPOLoss(), ImportanceSamplingLoss(normalize=False)):
        whole, masked = loss.compute_loss(NEW, OLD_T, ADV), loss.compute_loss(NEW, OLD_T, ADV, mask=mask)
        assert masked.tolist() == [[whole[0, 0], whole[0, 1], 0.0], [0.0, 0.0, 0.0]]
    nothing = ImportanceSamplingLoss()(NEW, OLD_T, ADV, mask=torch.zeros(2, 3))
    assert nothing.item() == 0


def test_the_defaults_are_the_documented_ones():
    ppo, sampling, kl = PPOLoss(), ImportanceSamplingLoss(), KLDivergenceLoss()
    assert (ppo.clip_param, ppo.value_clip, ppo.entropy_coef, ppo.value_loss_coef) == (0.2, None, 0.01, 0.5)
    assert (sampling.clip_ratio, sampling.normalize) == (10.0, True)
    assert (kl.target_kl, kl.kl_coef) == (0.01, 0.1)
    assert [loss.config.name for loss in (ppo, sampling, kl)] == [
        "ppo",
        "importance_sampling",
        "kl_divergence",
    ]
