"""The pipeline on a learner: the fakes of the loop, a learner with real gradients against a model here."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from learners.spec import LearnerSpec
from learners.start import start_local_learner
from rl_cluster.config.run import OptimizerConfig
from rl_cluster.errors import BadInputError, CheckpointError, DeadlineError, PipelineError
from rl_cluster.pipeline import AsyncTrainingClient, LearnerBackend
from rl_cluster.protocols import OptimParams
from tests.fakes import FakeLearner, FakePublisher, FakeRolloutWorker
from tests.pipeline.torch_learner import TorchLearner

IDS = torch.tensor([[5, 1, 0, 1], [6, 1, 1, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
HALF = torch.full((2, 4), float(np.log(0.5)))


class CountingLearner(FakeLearner):
    """The loop's fake, whose policy is one number: it draws 1 with probability sigmoid(weight)."""


@pytest.fixture
def clients():
    made = []

    def build(model, **options):
        made.append(AsyncTrainingClient(model, **options))
        return made[-1]

    yield build
    for client in made:
        client.shutdown()


def batch_of(seed, rows):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 23, (rows, 8), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.6, ids, -100)
    labels[:, 1] = ids[:, 1]
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
        "old_logprobs": -3.0 + 0.3 * torch.rand(ids.shape, generator=generator),
        "advantages": torch.randn(ids.shape, generator=generator),
        "mask": (torch.arange(8) != 4).expand(rows, 8),
    }


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling", "ppo"])
def test_a_learner_and_a_model_in_process_give_the_same_losses_logprobs_norms_and_weights(
    make_qwen, clients, loss_fn
):
    """Two steps of two calls with unequal numbers of tokens."""
    here, there = make_qwen(), make_qwen()
    learner = TorchLearner(there, learning_rate=0.02)
    optimizer = torch.optim.AdamW(here.parameters(), lr=0.02)
    keys = {"input_ids", "attention_mask", "labels"}
    seen = []
    for client, used in ((clients(here), optimizer), (clients(learner), None)):
        numbers, logprobs = [], []
        for step in range(2):
            for call, rows in enumerate((3, 1)):
                batch = batch_of(10 * step + call, rows)
                if loss_fn == "cross_entropy":
                    batch = {key: batch[key] for key in keys}
                output = client.forward_backward(batch, loss_fn=loss_fn).result()
                numbers += [output.loss, output.metrics["num_tokens"], output.metrics["accumulated_steps"]]
                numbers += [
                    v for key, v in sorted(output.metrics.items()) if key in ("approx_kl", "policy_loss")
                ]
                logprobs.append(output.logprobs)
            result = client.optim_step(used, max_grad_norm=0.5).result()
            numbers += [result.step, result.grad_norm, result.learning_rate]
        seen.append((numbers, logprobs))
    assert seen[1][0] == pytest.approx(seen[0][0], rel=1e-3, abs=1e-5)
    for one, other in zip(seen[0][1], seen[1][1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(there.state_dict(), here.state_dict(), atol=1e-4, rtol=1e-3)
    assert learner.calls == (["forward_backward"] * 2 + ["optim_step"]) * 2, "one pass per call"


@pytest.mark.parametrize("of_ranks", [False, True], ids=["a learner of its own", "a learner group"])
def test_labels_that_are_not_the_tokens_train_and_are_reported_as_in_process(
    make_qwen, clients, tmp_path, of_ranks
):
    here, there = make_qwen(), make_qwen()
    learner = TorchLearner(there, 0.02)
    if of_ranks:
        there.save_pretrained(tmp_path)
        optimizer = OptimizerConfig(learning_rate=0.02, betas=(0.9, 0.999), weight_decay=0.01)
        learner = start_local_learner(LearnerSpec(str(tmp_path), engine="torch", optimizer=optimizer))
    labels = torch.tensor([[9, 7, -100, 3], [-100, 2, 11, 8]])
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": labels}
    seen = []
    for client, used in (
        (clients(here), torch.optim.AdamW(here.parameters(), lr=0.02)),
        (clients(learner), None),
    ):
        outputs = [
            client.forward_backward(batch).result(),
            client.forward_backward({"input_ids": IDS}).result(),
        ]
        step = client.optim_step(used, max_grad_norm=0.5).result()
        after = client.forward(batch).result()["logprobs"]
        seen.append(([o.loss for o in outputs], [*(o.logprobs for o in outputs), after], step.grad_norm))
    assert seen[1][0] == pytest.approx(seen[0][0], rel=1e-4)
    assert seen[1][2] == pytest.approx(seen[0][2], rel=1e-4)
    for one, other in zip(seen[0][1], seen[1][1], strict=True):
        if one is seen[0][1][-1]:
            one = torch.where(other != 0, one, 0.0)
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)


def test_the_loops_fake_learner_is_driven_by_its_verbs_and_learns(clients):
    learner = CountingLearner()
    client = clients(learner)
    batch = {"input_ids": IDS, "attention_mask": MASK}
    output = client.forward_backward(
        batch | {"old_logprobs": HALF, "advantages": torch.ones(2, 4)}, "importance_sampling"
    ).result()
    # Weight 0: every token has probability ½, every ratio is 1; five tokens train, four of them are 1.
    assert output.loss == pytest.approx(-1.0)
    assert output.logprobs[1].tolist() == pytest.approx([0.0, np.log(0.5), np.log(0.5), 0.0])
    assert output.logits is None
    step = client.optim_step().result()
    assert (step.step, step.learning_rate, step.metrics["skipped"]) == (1, 0.5, 0.0)
    assert step.grad_norm == pytest.approx(4 / 5 - 1 / 2)
    assert learner.weight == pytest.approx(0.5 * 0.3)
    moved = client.forward(batch).result()["logprobs"]
    reference = client.forward(batch, use_reference=True).result()["logprobs"]
    assert float(moved[0, 1]) == pytest.approx(-np.log1p(np.exp(-0.15)), abs=1e-6)
    assert float(reference[0, 1]) == pytest.approx(np.log(0.5))
    assert learner.calls == ["forward_backward", "optim_step", "forward", "reference"]


def test_accumulation_and_learning_rate_reach_the_learner(clients):
    class Noting(FakeLearner):
        async def optim_step(self, params=None):
            self.params = params
            return await super().optim_step(params)

    learner = Noting()
    client = clients(learner, gradient_accumulation_steps=2)
    batch = {"input_ids": IDS, "old_logprobs": HALF, "advantages": [1.0, -1.0]}
    client.forward_backward(batch, "ppo")
    assert client.optim_step().result().metrics["skipped"] == 1.0
    client.forward_backward(batch, "ppo")
    client.optim_step(OptimParams(learning_rate=0.1), max_grad_norm=0.25).result()
    # 2 calls of 2 rows, 3 of whose 4 tokens have one before them.
    assert learner.params == OptimParams(learning_rate=0.1, max_grad_norm=0.25, gradient_scale=1 / 12)
    assert learner.calls == ["forward_backward"] * 2 + ["optim_step"]


def test_state_goes_through_the_learners_own_save_and_load(make_qwen, clients, tmp_path):
    model = make_qwen()
    client = clients(TorchLearner(model, 0.02))
    client.forward_backward({"input_ids": IDS})
    with pytest.raises(CheckpointError, match="call optim_step first"):
        client.save_state(tmp_path / "early")
    assert list(tmp_path.iterdir()) == []
    client.optim_step()
    info = client.save_state(tmp_path / "one")
    assert info["model_path"] == info["optimizer_path"] == str(tmp_path / "one" / "learner")
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    client.forward_backward({"input_ids": IDS})
    client.optim_step().result()
    client.load_state(tmp_path / "one")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in saved.items())
    client.forward_backward({"input_ids": IDS})
    assert client.optim_step().result().step == 2
    with pytest.raises(BadInputError, match="no checkpoint"):
        client.load_state(tmp_path / "two")


def test_a_failed_call_keeps_nothing_of_itself_and_everything_before_it(make_qwen, clients):
    """It breaks off after its gradient has been added: only what succeeded may reach the update."""

    class Failing(TorchLearner):
        async def forward_backward(self, batch, layout, rows, loss):
            result = await super().forward_backward(batch, layout, rows, loss)
            if layout.num_rows == 1:
                raise RuntimeError("rank 0 lost its way")
            return result

    learner, plain = Failing(make_qwen(), 0.02), TorchLearner(make_qwen(), 0.02)
    seen = []
    for one in (learner, plain):
        client = clients(one)
        first = client.forward_backward({"input_ids": IDS})
        failing = client.forward_backward({"input_ids": IDS[:1]}) if one is learner else None
        second = client.forward_backward({"input_ids": IDS + 2})
        step = client.optim_step().result()
        if failing is not None:
            with pytest.raises(RuntimeError, match="lost its way"):
                failing.result()
        counts = [f.result().metrics["accumulated_steps"] for f in (first, second)]
        seen.append((counts, step.metrics["accumulated_steps"], step.grad_norm))
    assert seen[0] == seen[1]
    assert seen[0][:2] == ([1, 2], 2)
    torch.testing.assert_close(learner.model.state_dict(), plain.model.state_dict())
    backwards = ["forward_backward"] * 2
    assert learner.calls == [*backwards, "forget_gradient", *backwards, "optim_step"]


def test_a_failed_last_call_does_not_reach_the_step_either(make_qwen, clients):
    learner, plain = TorchLearner(make_qwen(), 0.02), TorchLearner(make_qwen(), 0.02)
    norms = []
    for one in (learner, plain):
        client = clients(one)
        client.forward_backward({"input_ids": IDS}).result()
        if one is learner:
            one.fail = "forward_backward"
            with pytest.raises(RuntimeError, match="out of memory"):
                client.forward_backward({"input_ids": IDS}).result()
            one.fail = None
        norms.append(client.optim_step().result().grad_norm)
    assert norms[0] == norms[1]


def test_after_a_failed_step_the_learner_must_be_loaded_before_it_trains_on(make_qwen, clients, tmp_path):
    learner = TorchLearner(make_qwen(), 0.02)
    client = clients(learner)
    client.save_state(tmp_path / "start")
    client.forward_backward({"input_ids": IDS})
    learner.fail = "optim_step"
    with pytest.raises(RuntimeError, match="out of memory"):
        client.optim_step().result()
    learner.fail = None
    with pytest.raises(PipelineError, match=r"out of memory.*load_state"):
        client.forward_backward({"input_ids": IDS}).result()
    client.load_state(tmp_path / "start")
    client.forward_backward({"input_ids": IDS})
    assert client.optim_step().result().step == 1


def test_a_learner_that_does_not_answer_is_a_deadline_error(clients):
    class Silent(FakeLearner):
        async def forward(self, batch, layout, *, reference=False):
            await asyncio.sleep(3600)

    client = clients(LearnerBackend(Silent(), deadline_seconds=0.05))
    with pytest.raises(DeadlineError, match=r"forward: the learner did not answer within 0.05 s"):
        client.forward({"input_ids": IDS}).result()


def test_sampling_publishes_what_was_trained_and_asks_the_engine(clients):
    learner, worker = FakeLearner(learning_rate=40.0), FakeRolloutWorker()
    client = clients(LearnerBackend(learner, worker, FakePublisher(learner, [worker])))
    first = client.sample([5, 6], max_tokens=3, temperature=0.7, top_k=5, top_p=0.9, stop=[1, "x"], seed=4)
    task = worker.tasks[0]
    assert (task.seeds, task.prompt.tokens.tolist(), task.num_samples) == ((4,), [5, 6], 1)
    assert (task.sampling.temperature, task.sampling.max_new_tokens) == (0.7, 3)
    assert (task.sampling.top_k, task.sampling.top_p) == (5, 0.9)
    assert (task.sampling.stop, task.sampling.stop_token_ids) == (("x",), (1,))
    assert task.sampling.ignore_eos, "stops of the caller's take the place of the model's own"
    assert first["prompt"] == [5, 6]
    assert first["logprobs"] == pytest.approx([np.log(0.5)] * 3)
    client.forward_backward(
        {"input_ids": IDS, "old_logprobs": HALF, "advantages": [1.0, 1.0]}, "importance_sampling"
    )
    client.optim_step()
    later = client.sample([5, 6])
    assert (worker.version, worker.weight) == (1, learner.weight)
    assert not worker.tasks[-1].sampling.ignore_eos
    client.sample([5, 6], stop=[])
    assert worker.tasks[-1].sampling.ignore_eos
    assert learner.weight > 5
    assert later["tokens"] == [1, 1, 1]


def test_what_a_learner_cannot_do_is_refused_at_once(clients):
    client = clients(FakeLearner())
    pipeline = client.pipeline
    values = {"old_logprobs": HALF, "advantages": [1.0, 1.0], "returns": HALF, "values": HALF}
    cases = [
        (lambda: client.custom({"input_ids": IDS}, lambda m, i, o: o), "a callable cannot run"),
        (lambda: client.forward_backward({"input_ids": IDS} | values, "ppo"), "values: on a cluster"),
        (
            lambda: client.forward({"input_ids": IDS, "attention_mask": [[1, 0, 1, 1], [1] * 4]}),
            "row 0 has padding between tokens",
        ),
        (lambda: client.optim_step(torch.optim.SGD([torch.zeros(1)], lr=1.0)), "optimizer: SGD"),
        (lambda: client.optim_step(None, object()), "scheduler: on a cluster"),
        (lambda: client.sample([1]), "no engine to sample from"),
        (
            lambda: AsyncTrainingClient(FakeLearner(), reference_model=torch.nn.Linear(1, 1)),
            "reference_model",
        ),
        (lambda: AsyncTrainingClient(FakeLearner(), device="cpu"), "device: cpu"),
        (lambda: LearnerBackend(FakeLearner(), FakeRolloutWorker()), "sampling needs both"),
    ]
    for call, message in cases:
        with pytest.raises(BadInputError, match=message):
            call()
    with pytest.raises(BadInputError, match="return_gradients"):
        pipeline.forward_backward(
            IDS, None, None, "ppo", {"old_logprobs": HALF, "advantages": [1.0, 1.0]}, return_gradients=True
        ).result()


def test_shutdown_leaves_no_thread(clients):
    before = set(threading.enumerate())
    client = AsyncTrainingClient(FakeLearner())
    client.forward({"input_ids": IDS})
    assert len(set(threading.enumerate()) - before) == 2
    client.shutdown()
    client.shutdown()
    assert set(threading.enumerate()) == before


def test_a_summary_of_the_batch_counts_real_tokens_and_actions(clients):
    layouts = []

    class Noting(FakeLearner):
        async def forward(self, batch, layout, *, reference=False):
            layouts.append((layout, batch))
            return await super().forward(batch, layout, reference=reference)

    left = torch.tensor([[0, 5, 1], [6, 1, 0]])
    clients(Noting()).forward({"input_ids": left, "attention_mask": [[0, 1, 1], [1, 1, 1]]}).result()
    layout, batch = layouts[0]
    assert (layout.lengths, layout.action_counts) == ((2, 3), (1, 2))
    assert batch.tokens.tolist() == [5, 1, 6, 1, 0]
    assert batch.action_mask.tolist() == [False, True, False, True, True]
    assert replace(layout).num_rows == 2
