"""Several calls before one step: the gradient of one large batch, in every unit that calls are weighed in."""

import pytest
import torch

from rl_cluster.pipeline import ForwardBackwardPipeline, WeightedLoss


def batch(seed, rows, length=9):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 23, (rows, length), generator=generator)
    labels = torch.where(torch.rand(rows, length, generator=generator) < 0.5, ids, -100)
    labels[:, -1] = ids[:, -1]
    arguments = {
        "old_logprobs": -3.0 + torch.rand(rows, length, generator=generator),
        "advantages": torch.randn(rows, length, generator=generator),
    }
    return ids, labels, arguments


def joined(parts):
    ids, labels = (torch.cat([part[i] for part in parts]) for i in range(2))
    return ids, labels, {key: torch.cat([part[2][key] for part in parts]) for key in parts[0][2]}


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling", "ppo"])
def test_accumulated_gradient_is_that_of_the_large_batch_with_unequal_token_counts(
    make_qwen, pipelines, gradients, loss_fn
):
    parts = [batch(1, 3), batch(2, 1), batch(3, 4)]
    counts = [int((labels[:, 1:] != -100).sum()) for _, labels, _ in parts]
    assert len(set(counts)) == 3

    def arguments(part):
        return None if loss_fn == "cross_entropy" else part[2]

    large, small = make_qwen(), make_qwen()
    whole = joined(parts)
    together = pipelines(large).forward_backward(whole[0], None, whole[1], loss_fn, arguments(whole)).result()
    pipeline = pipelines(small, gradient_accumulation_steps=3)
    outputs = [
        pipeline.forward_backward(part[0], None, part[1], loss_fn, arguments(part)).result() for part in parts
    ]
    torch.testing.assert_close(gradients(small), gradients(large), atol=2e-7, rtol=2e-5)
    mean = sum(n * output.loss for n, output in zip(counts, outputs, strict=True)) / sum(counts)
    assert mean == pytest.approx(together.loss, abs=1e-6)
    assert [output.metrics["accumulated_steps"] for output in outputs] == [1, 2, 3]


def test_two_calls_by_hand_weigh_by_their_tokens(models, pipelines):
    """Uniform logits over 4 tokens: call 1 trains one token of state 1, call 2 three of state 2."""
    model = models.Table(vocab=4)
    with torch.no_grad():
        model.table.zero_()
    pipeline = pipelines(model)
    pipeline.forward_backward([[1, 0]]).result()
    pipeline.forward_backward([[2, 3], [2, 3], [2, 1]]).result()
    expected = torch.zeros(4, 4, dtype=torch.float64)
    expected[1] = torch.tensor([-0.75, 0.25, 0.25, 0.25]) / 4
    expected[2] = torch.tensor([0.75, -0.25, 0.75, -1.25]) / 4
    torch.testing.assert_close(model.table.grad, expected)


def test_the_step_waits_for_gradient_accumulation_steps_and_flush_does_not(make_qwen, pipelines):
    model = make_qwen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = pipelines(model, gradient_accumulation_steps=2)
    before = model.lm_head.weight.detach().clone()
    ids, labels, _ = batch(1, 2)

    pipeline.forward_backward(ids, None, labels)
    skipped = pipeline.optim_step(optimizer).result()
    assert (skipped.step, skipped.metrics["skipped"], skipped.metrics["accumulated_steps"]) == (0, 1.0, 1.0)
    assert torch.equal(model.lm_head.weight, before)

    pipeline.forward_backward(ids, None, labels)
    stepped = pipeline.optim_step(optimizer).result()
    assert (stepped.step, stepped.metrics["skipped"], stepped.metrics["accumulated_steps"]) == (1, 0.0, 2.0)
    assert not torch.equal(model.lm_head.weight, before)
    assert all(p.grad is None for p in model.parameters())

    pipeline.forward_backward(ids, None, labels)
    assert pipeline.optim_step(optimizer, flush=True).result().step == 2
    assert pipeline.optim_step(optimizer, flush=True).result().metrics["skipped"] == 1.0


def test_gradients_do_not_leak_into_the_next_step(make_qwen, pipelines, gradients):
    model = make_qwen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pipeline = pipelines(model)
    ids, labels, _ = batch(1, 2)
    pipeline.forward_backward(ids, None, labels).result()
    first = gradients(model)
    pipeline.optim_step(optimizer).result()
    pipeline.forward_backward(ids, None, labels).result()
    torch.testing.assert_close(gradients(model), first, atol=0, rtol=0)


def test_zero_grad_between_calls_throws_the_accumulated_gradient_away(make_qwen, pipelines, gradients):
    model = make_qwen()
    pipeline = pipelines(model)
    ids, labels, _ = batch(1, 2)
    pipeline.forward_backward(ids, None, labels).result()
    first = gradients(model)
    model.zero_grad()
    assert pipeline.forward_backward(ids, None, labels).result().metrics["accumulated_steps"] == 1
    torch.testing.assert_close(gradients(model), first, atol=0, rtol=0)


def test_return_gradients_are_those_of_the_call_alone(models, pipelines):
    model = models.Table()
    pipeline = pipelines(model)
    pipeline.forward_backward([[1, 2, 3]]).result()
    output = pipeline.forward_backward([[3, 0]], return_gradients=True).result()
    other = models.Table()
    pipelines(other).forward_backward([[3, 0]]).result()
    torch.testing.assert_close(output.gradients["table"], other.table.grad)
    assert pipeline.forward_backward([[3, 0]]).result().gradients is None


def mean_loss(model, inputs, outputs, scale=1.0):
    logprobs = outputs[:, :-1].log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None])
    return -scale * logprobs.mean()


def test_custom_losses_weigh_by_their_tokens_and_receive_their_arguments(models, pipelines):
    model = models.Table()
    pipeline = pipelines(model)
    one, two = torch.tensor([[1, 2, 3]]), torch.tensor([[3, 0]])
    first = pipeline.forward_backward_custom(one, mean_loss, scale=3.0).result()
    pipeline.forward_backward_custom(two, mean_loss, attention_mask=torch.ones_like(two)).result()
    expected = models.Table()
    losses = [mean_loss(expected, {"input_ids": ids}, expected(ids)) for ids in (one, two)]
    ((2 * 3.0 * losses[0] + 1 * losses[1]) / 3).backward()
    assert first.loss == pytest.approx(3.0 * float(losses[0].detach()))
    torch.testing.assert_close(model.table.grad, expected.table.grad)


def test_a_callable_may_say_what_its_loss_weighs(models, pipelines):
    def weighted(outputs, labels):
        kept = labels[:, 1:] != -100
        logprobs = outputs[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
        return WeightedLoss(-logprobs[kept].mean(), float(kept.sum()) * 4, {"kept": float(kept.sum())})

    one, two = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[3, 0]])
    built_in, own = models.Table(), models.Table()
    for model, loss_fn in ((built_in, "cross_entropy"), (own, weighted)):
        pipeline = pipelines(model)
        pipeline.forward_backward(one, labels=one, loss_fn="cross_entropy").result()
        output = pipeline.forward_backward(two, labels=two, loss_fn=loss_fn).result()
    assert output.metrics["kept"] == 1.0
    gradients = []
    for ids in (one, two):
        model = models.Table()
        pipelines(model).forward_backward(ids).result()
        gradients.append(model.table.grad)
    torch.testing.assert_close(built_in.table.grad, (3 * gradients[0] + 1 * gradients[1]) / 4)
    torch.testing.assert_close(own.table.grad, (3 * gradients[0] + 4 * gradients[1]) / 7)


def test_a_bare_scalar_weighs_as_many_tokens_as_have_labels(models, pipelines):
    def own_mean(outputs, labels):
        return outputs.square().mean()

    one, two = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[3, 0]])
    model = models.Table()
    pipeline = pipelines(model)
    pipeline.forward_backward(one, labels=torch.tensor([[1, -100, 3, 4]]), loss_fn=own_mean)
    output = pipeline.forward_backward(two, labels=two, loss_fn=own_mean).result()
    assert output.metrics["num_tokens"] == 1
    expected = models.Table()
    ((2 * own_mean(expected(one), None) + own_mean(expected(two), None)) / 3).backward()
    torch.testing.assert_close(model.table.grad, expected.table.grad)


def test_a_callable_may_return_metrics_and_reads_labels_of_any_kind(models, pipelines):
    def regression(outputs, labels, power):
        return ((outputs.mean((1, 2)) - labels) ** power).mean(), {"power": power}

    pipeline = pipelines(models.Table())
    wanted = torch.tensor([0.5], dtype=torch.float64)
    ids = torch.tensor([[1, 2]])
    output = pipeline.forward_backward(
        ids, labels=wanted, loss_fn=regression, loss_fn_kwargs={"power": 2}
    ).result()
    expected = (models.Table()(ids).mean((1, 2)) - 0.5) ** 2
    assert output.loss == pytest.approx(float(expected.detach()))
    assert output.metrics["power"] == 2


def test_custom_and_built_in_losses_mix_in_one_step(models, pipelines):
    mixed, plain = models.Table(), models.Table()
    one, two = torch.tensor([[1, 2, 3]]), torch.tensor([[3, 0]])
    pipeline = pipelines(mixed)
    pipeline.forward_backward(one)
    pipeline.forward_backward_custom(two, mean_loss).result()
    pipeline = pipelines(plain)
    pipeline.forward_backward(one)
    pipeline.forward_backward(two).result()
    torch.testing.assert_close(mixed.table.grad, plain.table.grad)


def test_parameters_that_a_call_does_not_use_keep_their_share(pipelines):
    class TwoTables(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = torch.nn.ParameterList([torch.zeros(3, 3), torch.zeros(3, 3)])

        def forward(self, input_ids):
            return self.tables[int(input_ids[0, 0])][input_ids]

    model = TwoTables()
    with ForwardBackwardPipeline(model) as pipeline:
        pipeline.forward_backward([[0, 2]]).result()
        pipeline.forward_backward([[1, 2]]).result()
    for table, row in zip(model.tables, (0, 1), strict=True):
        torch.testing.assert_close(table.grad[row], torch.tensor([1 / 3, 1 / 3, -2 / 3]) / 2)
