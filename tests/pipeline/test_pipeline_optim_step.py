"""The optimizer's step: norm, clipping, learning rates, against plain PyTorch and numbers by hand."""

import pytest
import torch


def pass_and_step(pipeline, optimizer, **arguments):
    pipeline.forward_backward([[1, 3]])
    return pipeline.optim_step(optimizer, **arguments).result()


@pytest.fixture
def uniform(models):
    """Uniform over 4 tokens: the gradient at row 1 is (¼, ¼, ¼, −¾), its norm √¾."""

    def build():
        model = models.Table(vocab=4)
        with torch.no_grad():
            model.table.zero_()
        return model

    return build


NORM = 0.75**0.5


@pytest.mark.parametrize(
    ("max_grad_norm", "factor"), [(None, 1.0), (0, 1.0), (10.0, 1.0), (NORM / 4, 0.25), (float("inf"), 1.0)]
)
def test_the_gradient_is_clipped_to_max_grad_norm_and_its_norm_before_is_told(
    uniform, pipelines, max_grad_norm, factor
):
    model = uniform()
    output = pass_and_step(
        pipelines(model), torch.optim.SGD(model.parameters(), lr=2.0), max_grad_norm=max_grad_norm
    )
    assert output.grad_norm == pytest.approx(NORM)
    expected = -2.0 * factor * torch.tensor([0.25, 0.25, 0.25, -0.75], dtype=torch.float64)
    torch.testing.assert_close(model.table.detach()[1], expected, atol=1e-5, rtol=1e-5)


def test_the_default_clips_to_one(uniform, pipelines):
    model = uniform()

    def large(module, inputs, outputs):
        return outputs[0, 0, 0] * 30.0

    pipeline = pipelines(model)
    pipeline.forward_backward_custom(torch.tensor([[1, 3]]), large)
    output = pipeline.optim_step(torch.optim.SGD(model.parameters(), lr=1.0)).result()
    assert output.grad_norm == pytest.approx(30.0)
    assert float(model.table.detach()[1, 0]) == pytest.approx(-1.0, abs=1e-6)


def test_learning_rate_is_that_of_the_step_and_the_scheduler_moves_afterwards(uniform, pipelines):
    model = uniform()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    pipeline = pipelines(model)
    outputs = [pass_and_step(pipeline, optimizer, scheduler=scheduler) for _ in range(3)]
    assert [output.learning_rate for output in outputs] == pytest.approx([0.8, 0.4, 0.2])
    assert [output.metrics["next_learning_rate"] for output in outputs] == pytest.approx([0.4, 0.2, 0.1])
    assert [output.step for output in outputs] == [1, 2, 3]


def test_a_skipped_step_does_not_move_the_scheduler(uniform, pipelines):
    model = uniform()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    output = pipelines(model).optim_step(optimizer, scheduler).result()
    assert output.metrics["skipped"] == 1.0
    assert (output.learning_rate, scheduler.last_epoch) == (0.8, 0)


def test_parameters_outside_the_optimizer_stay_and_do_not_count_in_the_norm(make_qwen, pipelines):
    model = make_qwen(tied=False)
    head = model.lm_head.weight
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    pipeline = pipelines(model)
    pipeline.forward_backward(torch.tensor([[3, 4, 5]])).result()
    norm = float(head.grad.norm())
    output = pipeline.optim_step(torch.optim.SGD([head], lr=0.1), max_grad_norm=None).result()
    assert output.grad_norm == pytest.approx(norm)
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert changed == ["lm_head.weight"]
    assert all(p.grad is None for p in model.parameters())
