"""AsyncTrainingClient: batches as dictionaries, the frozen reference, the documents' own example."""

import copy
import threading

import pytest
import torch

from rl_cluster.errors import BadInputError
from rl_cluster.forward_backward import AsyncTrainingClient, ForwardBackwardPipeline

IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])


def test_the_reference_stays_bit_identical_frozen_and_apart_while_the_policy_trains(make_qwen, clients):
    model = make_qwen()
    client = clients(model, reference_model=model)
    batch = {"input_ids": IDS, "attention_mask": MASK}
    reference = client.reference_model
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = client.forward(batch, use_reference=True).result()
    assert torch.equal(first["logprobs"], client.forward(batch).result()["logprobs"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(3):
        client.forward_backward(batch)
        client.optim_step(optimizer).result()
    again = client.forward(batch, use_reference=True).result()
    assert torch.equal(first["logits"], again["logits"])
    assert not torch.equal(first["logprobs"], client.forward(batch).result()["logprobs"])
    assert all(torch.equal(reference.state_dict()[name], tensor) for name, tensor in start.items())
    assert not any(p.requires_grad or p.grad is not None for p in reference.parameters())
    assert not again["logits"].requires_grad
    assert all(p.requires_grad for p in model.parameters())


def test_the_callers_reference_object_is_not_touched_and_later_changes_of_it_do_not_matter(
    make_qwen, clients
):
    own = make_qwen(seed=4).train()
    modes = [part.training for part in own.modules()]
    client = clients(make_qwen(), reference_model=own)
    before = client.forward({"input_ids": IDS}, use_reference=True).result()["logprobs"]
    assert [part.training for part in own.modules()] == modes
    assert all(p.requires_grad for p in own.parameters())
    with torch.no_grad():
        own.lm_head.weight.zero_()
    after = client.forward({"input_ids": IDS}, use_reference=True).result()["logprobs"]
    assert torch.equal(before, after)


def test_without_a_reference_use_reference_is_an_error(make_qwen, clients):
    with pytest.raises(BadInputError, match="use_reference: there is no reference model"):
        clients(make_qwen()).forward({"input_ids": IDS}, use_reference=True)


def test_loss_arguments_may_lie_in_the_batch_or_in_the_kwargs_but_not_in_both(make_qwen, clients):
    client = clients(make_qwen())
    old = client.forward({"input_ids": IDS, "attention_mask": MASK}).result()["logprobs"]
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}
    columns = {"old_logprobs": old, "advantages": torch.tensor([1.0, -2.0])}
    one = client.forward_backward(
        batch | columns, loss_fn="ppo", loss_fn_kwargs={"entropy_coef": 0.0}
    ).result()
    two = client.forward_backward(batch, "ppo", columns | {"entropy_coef": 0.0}).result()
    # Three tokens at advantage 1 and two at −2, every ratio 1.
    assert one.loss == two.loss == pytest.approx(-(3 * 1.0 - 2 * 2.0) / 5, abs=1e-6)
    with pytest.raises(BadInputError, match="advantages is in the batch too"):
        client.forward_backward(batch | columns, "ppo", columns)
    assert torch.equal(client.forward(batch | columns).result()["logprobs"], old)


def test_custom_save_load_and_sample_have_short_names_too(make_qwen, clients, tmp_path):
    model = make_qwen()
    client = clients(model)
    output = client.custom(
        {"input_ids": IDS}, lambda m, i, o, scale: scale * o.logits.mean(), scale=2.0
    ).result()
    assert output.loss == pytest.approx(2.0 * float(output.logits.mean()), abs=1e-6)
    info = client.save(tmp_path / "one")
    saved = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    client.load(info["path"])
    assert torch.equal(model.lm_head.weight, saved)
    greedy = client.sample([3, 4], 5, temperature=0, stop=[])
    assert greedy == client.pipeline.sample([3, 4], 5, temperature=0, stop=[])


def test_the_documents_example_runs_as_written_apart_from_its_device(make_qwen, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, reference_model = make_qwen(), make_qwen(seed=1)
    before = set(threading.enumerate())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    input_ids, attention_mask, labels = IDS, MASK, IDS

    pipeline = ForwardBackwardPipeline(
        model=model, device="cpu", max_workers=2, gradient_accumulation_steps=4
    )
    future = pipeline.forward_backward(
        input_ids=input_ids, attention_mask=attention_mask, labels=labels, loss_fn="cross_entropy"
    )
    assert future.result().loss > 0
    optim_future = pipeline.optim_step(optimizer=optimizer, scheduler=scheduler, max_grad_norm=1.0)
    assert optim_future.result().metrics["skipped"] == 1.0  # the first of four

    def custom_loss_fn(model, inputs, outputs, **kwargs):
        return outputs.logits.square().mean() * kwargs["my_param"]

    future = pipeline.forward_backward_custom(
        input_ids=input_ids, custom_loss_fn=custom_loss_fn, attention_mask=attention_mask, my_param=42
    )
    assert future.result().loss == pytest.approx(42 * float(future.result().logits.square().mean()), rel=1e-5)
    checkpoint_info = pipeline.save_state("checkpoint_1000")
    assert list(checkpoint_info) == ["path", "model_path", "optimizer_path", "state_path"]
    pipeline.load_state("checkpoints/checkpoint_1000")
    samples = pipeline.sample(
        prompt=[3, 4], max_tokens=100 // 4, temperature=0.7, top_k=50, top_p=0.9, stop=[1]
    )
    assert list(samples) == ["tokens", "logprobs", "prompt"]
    pipeline.shutdown()

    client = AsyncTrainingClient(
        model=model, reference_model=reference_model, device="cpu", gradient_accumulation_steps=4
    )
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    fwd_future = client.forward_backward(batch, loss_fn="cross_entropy")
    optim_future = client.optim_step(optimizer, max_grad_norm=1.0)
    ref_future = client.forward(batch, use_reference=True)
    assert [future.result() is not None for future in (fwd_future, optim_future, ref_future)] == [True] * 3
    client.shutdown()
    assert set(threading.enumerate()) == before


def test_the_loss_goes_down_over_queued_steps_and_the_policy_learns_the_text(make_qwen, clients):
    model = make_qwen()
    text = torch.tensor([[3, 14, 15, 9, 2, 6, 5]])
    with clients(model) as client:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        futures = []
        for _ in range(60):
            futures.append(client.forward_backward({"input_ids": text}))
            client.optim_step(optimizer)
        assert client.sample([3], 6, temperature=0)["tokens"] == text[0, 1:].tolist()
        assert futures[-1].result().loss < 0.2 < 2.0 < futures[0].result().loss


def test_a_pipeline_on_a_copy_does_not_share_state(make_qwen, pipelines):
    model = make_qwen()
    other = copy.deepcopy(model)
    pipelines(model).forward_backward(IDS).result()
    assert all(p.grad is None for p in other.parameters())
