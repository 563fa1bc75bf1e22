"""forward at a temperature, and what an engine serves after load_state."""

import numpy as np
import pytest
import torch

from rl_cluster.errors import BadInputError
from rl_cluster.pipeline import LearnerBackend
from tests.fakes import FakeLearner, FakePublisher, FakeRolloutWorker

IDS = torch.tensor([[1, 2, 3, 0], [4, 0, 2, 2]])
HALF = torch.full((2, 4), float(np.log(0.5)))


def expected_logprobs(model, ids, temperature):
    """[B, L] by numpy; 0 at the first token of a row."""
    with torch.no_grad():
        logits = model(ids).logits.double().numpy() / temperature
    result = np.zeros(ids.shape)
    for row, tokens in enumerate(ids.tolist()):
        for place in range(1, len(tokens)):
            own = logits[row, place - 1]
            result[row, place] = own[tokens[place]] - np.log(np.exp(own).sum())
    return result


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2])
def test_forward_divides_the_logits_by_the_temperature(make_qwen, pipelines, temperature):
    model = make_qwen()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # far from uniform, where a temperature hardly shows
    output = pipelines(model).forward(IDS, temperature=temperature).result()
    expected = expected_logprobs(model, IDS, temperature)
    assert np.abs(output["logprobs"].numpy() - expected).max() < 1e-5
    if temperature != 1.0:
        assert np.abs(expected - expected_logprobs(model, IDS, 1.0)).max() > 0.1
    with torch.no_grad():
        torch.testing.assert_close(output["logits"], model(IDS).logits)


def test_both_models_of_a_client_are_asked_at_the_temperature(make_qwen, clients):
    own, other = make_qwen(seed=0), make_qwen(seed=4)
    client = clients(own, reference_model=other)
    for use_reference, model in ((False, own), (True, other)):
        asked = client.forward({"input_ids": IDS}, use_reference, temperature=0.25).result()["logprobs"]
        assert np.abs(asked.numpy() - expected_logprobs(model, IDS, 0.25)).max() < 1e-5


def test_a_learner_has_one_temperature_and_refuses_any_other(clients):
    client = clients(FakeLearner())
    for use_reference in (False, True):
        client.forward({"input_ids": IDS}, use_reference).result()
        with pytest.raises(BadInputError, match=r"temperature: 0\.5"):
            client.forward({"input_ids": IDS}, use_reference, temperature=0.5).result()


def test_after_load_state_the_engine_draws_with_the_loaded_weights(clients, tmp_path):
    """Also where the loaded step is the one that was published last, with other weights."""
    learner, worker = FakeLearner(learning_rate=40.0), FakeRolloutWorker()
    client = clients(LearnerBackend(learner, worker, FakePublisher(learner, [worker])))
    batch = {"input_ids": IDS, "old_logprobs": HALF, "advantages": [1.0, 1.0]}
    client.save_state(tmp_path / "start")
    client.forward_backward(batch, "importance_sampling")
    client.optim_step().result()
    client.save_state(tmp_path / "one")
    saved = learner.weight
    client.sample([5, 6])
    assert worker.weight == saved != 0.0

    client.load_state(tmp_path / "start")
    client.sample([5, 6])
    assert (worker.version, worker.weight) == (0, 0.0)

    client.forward_backward({**batch, "advantages": [-1.0, -1.0]}, "importance_sampling")
    client.optim_step().result()
    client.sample([5, 6])
    assert (worker.version, worker.weight) == (1, learner.weight)
    assert learner.weight != saved

    client.load_state(tmp_path / "one")
    client.sample([5, 6])
    assert (worker.version, worker.weight) == (1, saved)
