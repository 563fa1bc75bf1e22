"""A call that fails tells its own future and nobody else, and everything is as it was before it."""

import pytest
import torch

from rl_cluster.errors import PipelineError

IDS = torch.tensor([[1, 2, 3, 4], [2, 2, 5, 0]])


def state_of(model, optimizer=None, scheduler=None):
    """Everything that a failure must not change, as independent copies."""
    result = {f"model.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    result |= {f"grad.{n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    result |= {f"mode.{name}": torch.tensor(part.training) for name, part in model.named_modules()}
    result["random"] = torch.get_rng_state()
    if optimizer is not None:
        names = {p: name for name, p in model.named_parameters()}
        for parameter, entry in optimizer.state.items():
            result |= {f"adam.{names[parameter]}.{k}": torch.as_tensor(v).clone() for k, v in entry.items()}
        result["rate"] = torch.tensor(optimizer.param_groups[0]["lr"])
    if scheduler is not None:
        result["epoch"] = torch.tensor(scheduler.last_epoch)
    return result


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


class BombError(RuntimeError):
    pass


def spoil_and_raise(model, inputs, outputs):
    """After the forward pass (random numbers, running statistics) it writes into weights and modes too."""
    outputs.logits.sum().backward()
    with torch.no_grad():
        model.head.weight.add_(1.0)
    model.eval()
    raise BombError("in the loss")


def test_a_loss_that_raises_after_partial_accumulation_restores_gradients_weights_statistics_and_random_state(
    models, pipelines
):
    torch.manual_seed(0)
    model = models.Dropout()
    pipeline = pipelines(model, gradient_accumulation_steps=3)
    pipeline.forward_backward(IDS).result()
    before = state_of(model)
    failing = pipeline.forward_backward_custom(IDS, spoil_and_raise)
    with pytest.raises(BombError, match="in the loss"):
        failing.result()
    assert_same(state_of(model), before)
    assert pipeline.forward_backward(IDS).result().metrics["accumulated_steps"] == 2


def test_calls_queued_around_a_failing_one_give_what_they_give_without_it(models, pipelines):
    results = []
    for with_failure in (False, True):
        torch.manual_seed(0)
        model = models.Dropout()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        pipeline = pipelines(model)
        futures = [pipeline.forward_backward(IDS)]
        failing = pipeline.forward_backward_custom(IDS, spoil_and_raise) if with_failure else None
        futures += [
            pipeline.optim_step(optimizer),
            pipeline.forward_backward(IDS),
            pipeline.optim_step(optimizer),
        ]
        outputs = [future.result() for future in futures]
        results.append((state_of(model, optimizer), outputs[2].loss, outputs[3].grad_norm))
        assert failing is None or isinstance(failing.exception(), BombError)
    assert results[0][1:] == results[1][1:]
    assert_same(results[0][0], results[1][0])


def test_a_step_queued_behind_a_failed_pass_is_skipped_and_trains_on_nothing_stale(models, pipelines):
    model = models.Dropout()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    pipeline = pipelines(model)
    before = state_of(model, optimizer)
    failing = pipeline.forward_backward_custom(IDS, spoil_and_raise)
    step = pipeline.optim_step(optimizer).result()
    assert isinstance(failing.exception(), BombError)
    assert (step.step, step.metrics["skipped"]) == (0, 1.0)
    assert_same(state_of(model, optimizer), before)


def test_a_model_that_raises_in_its_forward_leaves_everything_as_it_was(models, pipelines):
    model = models.Dropout()
    pipeline = pipelines(model)
    pipeline.forward_backward(IDS).result()

    def bomb(*_):
        raise BombError("in the model")

    before = state_of(model)
    handle = model.head.register_forward_hook(bomb)
    for future in (pipeline.forward_backward(IDS), pipeline.forward(IDS)):
        with pytest.raises(BombError):
            future.result()
    with pytest.raises(BombError):
        pipeline.sample([1, 2])
    handle.remove()
    assert_same(state_of(model), before)


def test_a_backward_that_raises_leaves_the_accumulated_gradients(models, pipelines):
    model = models.Dropout()
    pipeline = pipelines(model)
    pipeline.forward_backward(IDS).result()

    def bomb(_):
        raise BombError("in backward")

    before = state_of(model)
    handle = model.embedding.weight.register_hook(bomb)  # the last of the backward pass
    with pytest.raises(BombError):
        pipeline.forward_backward(IDS).result()
    handle.remove()
    assert_same(state_of(model), before)


def test_a_loss_that_is_not_finite_is_an_error_and_is_not_accumulated(models, pipelines):
    model = models.Table()
    pipeline = pipelines(model)
    pipeline.forward_backward([[1, 2]]).result()
    before = state_of(model)
    future = pipeline.forward_backward_custom(torch.tensor([[1, 2]]), lambda m, i, o: o.sum() * float("nan"))
    with pytest.raises(PipelineError, match="loss is nan"):
        future.result()
    assert_same(state_of(model), before)


@pytest.mark.parametrize("broken", ["optimizer", "scheduler"])
def test_a_step_that_raises_half_way_restores_weights_moments_schedule_and_gradients(
    models, pipelines, broken
):
    model = models.Dropout()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    pipeline = pipelines(model)
    pipeline.forward_backward(IDS)
    pipeline.optim_step(optimizer, scheduler).result()
    pipeline.forward_backward(IDS).result()
    before = state_of(model, optimizer, scheduler)

    owner = optimizer if broken == "optimizer" else scheduler
    genuine = owner.step

    def raises_afterwards(*arguments):
        genuine(*arguments)
        raise BombError(broken)

    owner.step = raises_afterwards
    with pytest.raises(BombError, match=broken):
        pipeline.optim_step(optimizer, scheduler).result()
    owner.step = genuine
    assert_same(state_of(model, optimizer, scheduler), before)
    assert pipeline.optim_step(optimizer, scheduler).result().step == 2


def test_a_first_step_that_raises_leaves_no_optimizer_state_behind(models, pipelines):
    model = models.Table()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    genuine = optimizer.step

    def raises_afterwards():
        genuine()
        raise BombError

    optimizer.step = raises_afterwards
    pipeline = pipelines(model)
    pipeline.forward_backward([[1, 2]]).result()
    before = state_of(model)
    with pytest.raises(BombError):
        pipeline.optim_step(optimizer).result()
    assert_same(state_of(model), before)
    assert len(optimizer.state) == 0


def test_a_gradient_that_is_not_finite_is_dropped_and_nothing_else_changes(models, pipelines):
    model = models.Table()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    pipeline = pipelines(model)
    before = model.table.detach().clone()
    # √ at 0: the loss is finite, its gradient is not.
    future = pipeline.forward_backward_custom(torch.tensor([[1, 2]]), lambda m, i, o: (o * 0.0).sum().sqrt())
    step = pipeline.optim_step(optimizer).result()
    assert future.result().loss == 0.0
    assert (step.step, step.metrics["skipped"]) == (0, 1.0)
    assert not torch.isfinite(torch.tensor(step.grad_norm))
    assert torch.equal(model.table, before)
    assert len(optimizer.state) == 0
    assert model.table.grad is None


def test_a_failed_sample_leaves_the_random_state_as_it_was(models, pipelines):
    model = models.Table()
    pipeline = pipelines(model)
    with torch.no_grad():
        model.table.fill_(float("nan"))
    before = torch.get_rng_state()
    with pytest.raises(PipelineError, match="NaN"):
        pipeline.sample([1])
    assert torch.equal(torch.get_rng_state(), before)
