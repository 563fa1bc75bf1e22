"""Futures: order, waiting, cancelling, threads. No future may depend on how fast another was."""

import asyncio
import gc
import threading
from concurrent.futures import CancelledError

import pytest
import torch

from rl_cluster.errors import PipelineError
from rl_cluster.pipeline import AsyncTrainingClient, AsyncTrainingFuture, ForwardBackwardPipeline
from rl_cluster.pipeline.future import Turn


def our_threads():
    return [thread for thread in threading.enumerate() if "rl_cluster" in thread.name]


@pytest.fixture
def gate():
    """gate.hold is a loss that begins, says so, and ends only when the test lets it."""

    class Gate:
        def __init__(self):
            self.begun, self.open = threading.Event(), threading.Event()

        def hold(self, model, inputs, outputs):
            self.begun.set()
            assert self.open.wait(60)
            return outputs.mean()

    made = Gate()
    yield made
    made.open.set()


def plain_steps(model, optimizer, steps):
    """The same training without any pipeline."""
    losses, norms = [], []
    for ids in steps:
        output = model(ids)
        loss = -output.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms


def pipeline_steps(pipeline, optimizer, steps, wait):
    futures = []
    for ids in steps:
        for future in (pipeline.forward_backward(ids, labels=ids), pipeline.optim_step(optimizer)):
            futures.append(future)
            if wait:
                future.result(60)
    results = [future.result(60) for future in futures]
    assert [result.step for result in results[1::2]] == list(range(1, len(steps) + 1))
    return [result.loss for result in results[::2]], [result.grad_norm for result in results[1::2]]


def test_a_hundred_queued_steps_give_the_sequential_result_bit_for_bit(models, pipelines):
    """With dropout, so that the order of random numbers counts too."""
    generator = torch.Generator().manual_seed(5)
    steps = [torch.randint(0, 7, (2, 7), generator=generator) for _ in range(100)]
    trained = []
    for mode in ("plain", "waiting", "queued"):
        torch.manual_seed(11)
        model = models.Dropout()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if mode == "plain":
            numbers = plain_steps(model, optimizer, steps)
        else:
            numbers = pipeline_steps(pipelines(model), optimizer, steps, wait=mode == "waiting")
        trained.append((numbers, model.state_dict()))
    (plain, plain_state), (waiting, waiting_state), (queued, queued_state) = trained
    assert queued == waiting
    assert all(torch.equal(queued_state[name], waiting_state[name]) for name in queued_state)
    # The plain loop sums in another order; it differs in the last bits only.
    assert queued[0] == pytest.approx(plain[0], abs=1e-5)
    assert queued[1] == pytest.approx(plain[1], rel=1e-4)
    for name in queued_state:
        torch.testing.assert_close(queued_state[name], plain_state[name], atol=1e-4, rtol=1e-3)


def test_queued_steps_of_a_transformers_model_equal_a_plain_loop(make_qwen, pipelines):
    generator = torch.Generator().manual_seed(5)
    steps = [torch.randint(2, 23, (2, 7), generator=generator) for _ in range(12)]
    plain, queued = make_qwen(), make_qwen()
    expected = plain_steps(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), steps)
    pipeline, optimizer = pipelines(queued), torch.optim.AdamW(queued.parameters(), lr=1e-2)
    found = pipeline_steps(pipeline, optimizer, steps, wait=False)
    assert found[0] == pytest.approx(expected[0], abs=1e-4)
    assert found[1] == pytest.approx(expected[1], rel=1e-3)


def test_effects_come_in_the_order_of_submission_from_many_threads(models, pipelines):
    """Each thread's own calls stay in order, and every call is whole: none overlaps another."""
    pipeline = pipelines(models.Table(), max_workers=4)
    seen, inside, all_queued = [], [], threading.Event()

    def note(model, inputs, outputs, name, number):
        assert not inside, "two calls ran at once"
        inside.append(name)
        assert all_queued.wait(60), "the first call goes on while 59 others are there to overtake it"
        seen.append((name, number))
        inside.clear()
        return outputs.mean()

    def submit(name):
        for number in range(20):
            futures[name].append(
                pipeline.forward_backward_custom(torch.tensor([[1, 2]]), note, name=name, number=number)
            )

    futures = {name: [] for name in "abc"}
    threads = [threading.Thread(target=submit, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    all_queued.set()
    for submitted in futures.values():
        for future in submitted:
            future.result()
    for name in "abc":
        assert [number for who, number in seen if who == name] == list(range(20))


def test_a_buffer_may_be_reused_as_soon_as_the_call_is_queued(models, pipelines, gate):
    pipeline, model = pipelines(models.Table()), models.Table()
    expected = pipelines(model).forward_backward([[1, 2, 3]]).result().loss
    held = pipeline.forward_backward_custom(torch.tensor([[1, 2]]), gate.hold)
    buffer = torch.tensor([[1, 2, 3]])
    future = pipeline.forward(buffer, labels=buffer)
    buffer.zero_()
    gate.open.set()
    held.result()
    assert -future.result()["logprobs"][:, 1:].mean() == pytest.approx(expected)


def test_cancel_works_for_calls_not_yet_begun_only(models, pipelines, gate):
    model = models.Table()
    pipeline = pipelines(model)
    running = pipeline.forward_backward_custom(torch.tensor([[1, 2]]), gate.hold)
    waiting = pipeline.forward_backward([[1, 2]])
    assert gate.begun.wait(60)
    assert not running.cancel()
    assert waiting.cancel()
    assert waiting.cancelled()
    gate.open.set()
    assert running.result().metrics["accumulated_steps"] == 1
    with pytest.raises(CancelledError):
        waiting.result()
    assert not running.cancel()
    assert (
        pipeline.forward_backward_custom(torch.tensor([[1, 2]]), gate.hold)
        .result()
        .metrics["accumulated_steps"]
        == 2
    )


def test_result_gives_up_after_its_timeout_and_names_the_call_that_goes_on(models, pipelines, gate):
    pipeline = pipelines(models.Table())
    running = pipeline.forward_backward_custom(torch.tensor([[1, 2]]), gate.hold)
    waiting = pipeline.forward([[1, 2]])
    assert gate.begun.wait(60)
    assert not running.done()
    with pytest.raises(TimeoutError, match=r"forward_backward_custom \(call 1.*still running.*0.01"):
        running.result(timeout=0.01)
    with pytest.raises(TimeoutError, match=r"forward \(call 2.*waits for the calls before it"):
        waiting.result(0.01)
    gate.open.set()
    assert running.result(timeout=60).loss == pytest.approx(float(running.result().loss))
    assert waiting.exception() is None
    assert running.done()


def test_a_timeout_error_of_the_call_itself_is_handed_on(models, pipelines):
    def late(model, inputs, outputs):
        raise TimeoutError("the reward service is slow")

    future = pipelines(models.Table()).forward_backward_custom(torch.tensor([[1, 2]]), late)
    with pytest.raises(TimeoutError, match="reward service"):
        future.result(60)


def test_waiting_for_a_later_call_inside_an_earlier_one_is_refused_and_not_a_deadlock(models, pipelines):
    pipeline = pipelines(models.Table())

    def waits_inside(model, inputs, outputs):
        return pipeline.forward([[1, 2]]).result()["logprobs"].sum()

    def samples_inside(model, inputs, outputs):
        pipeline.sample([1])

    for loss in (waits_inside, samples_inside):
        with pytest.raises(PipelineError, match="wait for itself"):
            pipeline.forward_backward_custom(torch.tensor([[1, 2]]), loss).result(60)


def test_futures_can_be_awaited(models, pipelines):
    async def both():
        return await asyncio.gather(pipeline.forward_backward([[1, 2]]), pipeline.forward([[1, 2]]))

    pipeline = pipelines(models.Table())
    output, forward = asyncio.run(both())
    assert output.loss == pytest.approx(-float(forward["logprobs"].sum()))


def test_shutdown_finishes_the_queue_leaves_no_thread_and_refuses_further_calls(models):
    before = set(threading.enumerate())
    model = models.Table(dtype=torch.float32)
    client = AsyncTrainingClient(model, reference_model=model)
    futures = [client.forward_backward({"input_ids": [[1, 2]]}) for _ in range(5)]
    reference = client.forward({"input_ids": [[1, 2]]}, use_reference=True)
    assert len(our_threads()) == 2
    client.shutdown()
    client.shutdown()
    assert all(future.done() for future in [*futures, reference])
    assert futures[-1].result().metrics["accumulated_steps"] == 5
    assert set(threading.enumerate()) == before
    with pytest.raises(PipelineError, match="shut down"):
        client.forward({"input_ids": [[1, 2]]})


def test_shutdown_can_cancel_what_is_pending(models, gate):
    pipeline = ForwardBackwardPipeline(models.Table())
    pipeline.forward_backward_custom(torch.tensor([[1, 2]]), gate.hold)
    assert gate.begun.wait(60)
    pending = [pipeline.forward([[1, 2]]) for _ in range(3)]
    threading.Timer(0.05, gate.open.set).start()
    pipeline.shutdown(cancel_pending=True)
    assert all(future.cancelled() for future in pending)
    assert our_threads() == []


def test_a_forgotten_pipeline_ends_its_thread(models):
    pipeline = ForwardBackwardPipeline(models.Table())
    pipeline.forward([[1, 2]]).result()
    thread = our_threads()[0]
    del pipeline
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_a_bare_concurrent_future_can_be_wrapped():
    from concurrent.futures import Future

    inner = Future()
    outer = AsyncTrainingFuture(inner)
    assert not outer.done()
    inner.set_result(3)
    assert outer.result() == 3


def test_two_pipelines_over_one_model_take_turns(models, pipelines, gate, monkeypatch):
    model, ids = models.Table(), torch.tensor([[1, 2, 3]])
    order, arrivals, enter = [], threading.Semaphore(0), Turn.__enter__

    def arrive(turn):
        arrivals.release()
        enter(turn)
        order.append(threading.current_thread().name)

    monkeypatch.setattr(Turn, "__enter__", arrive)
    first, second = pipelines(model), pipelines(model)
    held = first.forward_backward_custom(ids, gate.hold)
    assert gate.begun.wait(60)
    before = len(order)
    while arrivals.acquire(blocking=False):
        pass
    waiting = second.forward(ids)
    third: list[ForwardBackwardPipeline] = []
    builder = threading.Thread(target=lambda: third.append(pipelines(model)), name="builder")
    builder.start()
    assert arrivals.acquire(timeout=60) and arrivals.acquire(timeout=60), "both stand at the door"
    assert len(order) == before, "neither a call nor a move to a device may come between"
    assert not waiting.done() and not third
    gate.open.set()
    held.result(60)
    waiting.result(60)
    builder.join(60)
    assert len(third) == 1
    assert "builder" in order[before:] and len(order) == before + 2


def test_waiting_for_another_pipeline_of_the_same_model_inside_a_loss_is_refused(models, pipelines):
    model, ids = models.Table(), torch.tensor([[1, 2, 3]])
    first, second = pipelines(model), pipelines(model)

    def loss(model, inputs, outputs):
        second.forward(ids).result(60)

    with pytest.raises(PipelineError, match="inside another call of the same model"):
        first.forward_backward_custom(ids, loss).result(60)
