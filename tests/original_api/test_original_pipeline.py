"""The pipeline and the losses as the documents call them, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rl_cluster import (
    AdaptiveLoss,
    AsyncTrainingClient,
    AsyncTrainingFuture,
    CompositeLoss,
    ContrastiveLoss,
    CustomLoss,
    CustomLossConfig,
    FocalLoss,
    ForwardBackwardOutput,
    ForwardBackwardPipeline,
    ImportanceSamplingLoss,
    KLDivergenceLoss,
    OptimStepOutput,
    PPOLoss,
    TokenLevelLoss,
    VarianceLoss,
    compute_kl_penalty,
    compute_ppo_loss,
    variance_regularization,
)
from tests.trainers.tiny import tiny_model

IDS = torch.tensor([[3, 4, 5, 6], [6, 5, 4, 3]])
MASK = torch.ones_like(IDS)
generator = torch.Generator().manual_seed(1)
LOGPROBS, OLD = (-torch.rand(2, 4, generator=generator) for _ in range(2))
ADVANTAGES = torch.randn(2, 4, generator=generator)


@pytest.fixture
def model() -> Any:
    return tiny_model()[0]


@pytest.fixture
def pipeline(model: Any) -> Iterator[ForwardBackwardPipeline]:
    made = ForwardBackwardPipeline(model=model, device="cpu", max_workers=2, gradient_accumulation_steps=1)
    yield made
    made.shutdown()


def test_forward_backward_gives_a_future_with_the_loss_of_the_labels(pipeline: Any, model: Any) -> None:
    expected = model(IDS, attention_mask=MASK, labels=IDS).loss.item()
    future = pipeline.forward_backward(
        input_ids=IDS, attention_mask=MASK, labels=IDS, loss_fn="cross_entropy"
    )
    assert isinstance(future, AsyncTrainingFuture)
    result = future.result(timeout=60)
    assert future.done()
    assert isinstance(result, ForwardBackwardOutput)
    assert float(result.loss) == pytest.approx(expected, rel=1e-5)
    assert {"loss", "logits", "logprobs", "metrics", "gradients"} <= set(dir(result))


def test_an_optimizer_step_moves_the_weights_and_tells_of_it(pipeline: Any, model: Any) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    pipeline.forward_backward(IDS, MASK, IDS)
    result = pipeline.optim_step(optimizer=optimizer, scheduler=None, max_grad_norm=1.0).result(timeout=60)
    assert isinstance(result, OptimStepOutput)
    assert (result.step, result.learning_rate) == (1, 0.5)
    assert result.grad_norm > 0
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("spelling", ["old_logprobs", "old_log_probs"])
@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo"])
def test_policy_losses_take_either_spelling(pipeline: Any, loss_fn: str, spelling: str) -> None:
    kwargs = {spelling: OLD, "advantages": ADVANTAGES}
    future = pipeline.forward_backward(IDS, MASK, IDS, loss_fn=loss_fn, loss_fn_kwargs=kwargs)
    assert torch.isfinite(torch.as_tensor(future.result(timeout=60).loss))


def test_a_custom_loss_gets_its_arguments_and_must_be_a_scalar(pipeline: Any) -> None:
    def scaled(model: Any, inputs: Any, outputs: Any, **kwargs: Any) -> torch.Tensor:
        return outputs.logits.square().mean() * kwargs["my_param"]

    one, two = (
        pipeline.forward_backward_custom(IDS, scaled, attention_mask=MASK, my_param=n).result(timeout=60)
        for n in (1, 2)
    )
    assert float(two.loss) == pytest.approx(2 * float(one.loss), rel=1e-6)
    with pytest.raises(ValueError, match="scalar"):
        pipeline.forward_backward_custom(IDS, lambda m, i, outputs: outputs.logits).result(timeout=60)


def test_accumulated_gradients_are_those_of_the_large_batch(model: Any) -> None:
    model(IDS, labels=IDS).loss.backward()
    wanted = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    pipeline = ForwardBackwardPipeline(model, device="cpu", gradient_accumulation_steps=2)
    for row in (0, 1):
        pipeline.forward_backward(IDS[row : row + 1], MASK[row : row + 1], IDS[row : row + 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    pipeline.optim_step(optimizer, max_grad_norm=1e9).result(timeout=60)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(before[name] - weight.detach(), wanted[name], atol=1e-6, rtol=1e-4)
    pipeline.shutdown()


def test_a_state_is_saved_under_its_name_and_loaded(
    pipeline: Any, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    pipeline.forward_backward(IDS, MASK, IDS)
    pipeline.optim_step(optimizer).result(timeout=60)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    paths = pipeline.save_state("checkpoint_1")
    assert set(paths) == {"path", "model_path", "optimizer_path", "state_path"}
    pipeline.forward_backward(IDS, MASK, IDS)
    pipeline.optim_step(optimizer).result(timeout=60)
    pipeline.load_state(paths["path"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name]), name


def test_sampling_gives_tokens_logprobs_and_the_prompt(pipeline: Any) -> None:
    samples = pipeline.sample(prompt=[3, 4], max_tokens=5, temperature=0.7, top_k=50, top_p=0.9, stop=[1])
    assert set(samples) == {"tokens", "logprobs", "prompt"}
    assert len(samples["tokens"]) == len(samples["logprobs"]) <= 5
    assert list(samples["prompt"]) == [3, 4]


def test_the_client_trains_and_asks_a_frozen_reference(model: Any) -> None:
    reference = tiny_model(seed=1)[0]
    client = AsyncTrainingClient(model=model, reference_model=reference, device="cpu")
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}
    policy = client.forward(batch).result(timeout=60)
    before = client.forward(batch, use_reference=True).result(timeout=60)
    client.forward_backward(batch, loss_fn="cross_entropy")
    client.optim_step(torch.optim.SGD(model.parameters(), lr=0.5), max_grad_norm=1.0).result(timeout=60)
    after = client.forward(batch, use_reference=True).result(timeout=60)
    torch.testing.assert_close(after["logprobs"], before["logprobs"], rtol=0, atol=0)
    assert not torch.equal(client.forward(batch).result(timeout=60)["logprobs"], policy["logprobs"])
    client.shutdown()


def test_a_custom_loss_is_weighed_masked_and_described() -> None:
    class Squared(CustomLoss):
        def compute_loss(self, predictions: Any, targets: Any, **kwargs: Any) -> torch.Tensor:
            return (predictions - targets).square()

    loss = Squared(CustomLossConfig(name="squared", weight=2.0))
    answer = loss(torch.tensor([1.0, 3.0]), torch.zeros(2), mask=torch.tensor([1, 0]), return_dict=True)
    assert (answer["loss"].item(), answer["weight"], answer["name"]) == (2.0, 2.0, "squared")


def test_token_and_focal_losses_are_per_element() -> None:
    logits, labels = torch.randn(2, 4, 6), torch.randint(0, 6, (2, 4))
    each = TokenLevelLoss().compute_loss(logits, labels)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").reshape(2, 4)
    torch.testing.assert_close(each, expected)
    flat = FocalLoss(alpha=0.5, gamma=0.0).compute_loss(logits[..., 0], labels % 2)
    binary = F.binary_cross_entropy_with_logits(logits[..., 0], (labels % 2).float(), reduction="none")
    torch.testing.assert_close(flat, 0.5 * binary)


def test_the_policy_losses_of_an_unmoved_policy_are_minus_the_advantages() -> None:
    ppo = PPOLoss(entropy_coef=0.0).compute_loss(OLD, OLD, ADVANTAGES)
    torch.testing.assert_close(ppo, -ADVANTAGES)
    torch.testing.assert_close(
        ImportanceSamplingLoss(normalize=False).compute_loss(OLD, OLD, ADVANTAGES), -ADVANTAGES
    )


def test_compute_ppo_loss_gives_the_loss_and_its_metrics() -> None:
    loss, metrics = compute_ppo_loss(LOGPROBS, OLD, ADVANTAGES, clip_param=0.2)
    ratio = (LOGPROBS - OLD).exp()
    by_hand = torch.maximum(-ratio * ADVANTAGES, -ratio.clamp(0.8, 1.2) * ADVANTAGES).mean()
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-5)
    assert set(metrics) == {"ppo_loss", "clip_fraction", "mean_ratio"}
    assert metrics["mean_ratio"] == pytest.approx(ratio.mean().item(), rel=1e-5)


def test_the_divergence_is_penalised_above_its_target_only() -> None:
    loss = KLDivergenceLoss(target_kl=0.01, kl_coef=0.1)
    assert loss.compute_loss(LOGPROBS, LOGPROBS).item() == 0.0
    gap = loss.compute_loss(LOGPROBS, LOGPROBS - 1.0)
    assert gap.item() == pytest.approx(0.1 * 0.99, rel=1e-5)


def test_compute_kl_penalty_is_the_divergence_over_the_vocabulary() -> None:
    logits, reference = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    policy, other = (torch.distributions.Categorical(logits=x) for x in (logits, reference))
    expected = torch.distributions.kl_divergence(policy, other).mean()
    torch.testing.assert_close(compute_kl_penalty(logits, reference), expected)
    assert compute_kl_penalty(logits, logits).item() == pytest.approx(0.0, abs=1e-6)


def test_variance_losses_are_the_distance_from_their_targets() -> None:
    outputs = torch.randn(8, 3)
    assert VarianceLoss(beta=0.0).compute_loss(outputs).item() == pytest.approx(
        (outputs.var(dim=0) - 1.0).square().mean().item(), rel=1e-5
    )
    assert variance_regularization(outputs, target_std=0.5).item() == pytest.approx(
        (outputs.std(dim=0) - 0.5).square().mean().item(), rel=1e-5
    )


def test_a_contrastive_loss_is_one_number_per_row() -> None:
    anchor, positive, negative = (torch.randn(5, 4) for _ in range(3))
    loss = ContrastiveLoss(margin=1.0).compute_loss(anchor, positive, negative)
    expected = F.relu(F.cosine_similarity(anchor, negative) - F.cosine_similarity(anchor, positive) + 1.0)
    torch.testing.assert_close(loss, expected)


def test_losses_are_added_up_and_scheduled() -> None:
    kl = KLDivergenceLoss()
    composite = CompositeLoss([kl, KLDivergenceLoss(kl_coef=1.0)], weights=[1.0, 0.5])
    assert composite.weights == [1.0, 0.5]
    alone = kl(LOGPROBS, LOGPROBS - 1.0).item()
    assert composite(LOGPROBS, LOGPROBS - 1.0).item() == pytest.approx(alone + 5.0 * alone, rel=1e-5)
    adaptive = AdaptiveLoss(kl, schedule_fn=lambda step: step / 2)
    adaptive.step()
    assert adaptive(LOGPROBS, LOGPROBS - 1.0).item() == pytest.approx(alone / 2, rel=1e-5)
    adaptive.reset()
    assert adaptive(LOGPROBS, LOGPROBS - 1.0).item() == 0.0
