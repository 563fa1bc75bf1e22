"""Built-in losses: values by hand and by numpy, gradients by independent expressions, padding, alignment."""

import math

import numpy as np
import pytest
import torch

IDS = torch.tensor([[1, 2, 3, 0], [4, 0, 2, 2]])
OLD = torch.tensor([[0.0, -1.2, -0.4, -2.0], [0.0, -3.0, -1.0, -0.7]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[9.0, 1.0, -2.0, 0.5], [9.0, 0.3, 1.5, -1.0]], dtype=torch.float64)


def numpy_logprobs(model, ids, temperature=1.0):
    """[B, L], entry t from the table's row of token t − 1; 0 at t = 0."""
    table = model.table.detach().numpy() / temperature
    log_table = table - np.log(np.exp(table).sum(-1, keepdims=True))
    result = np.zeros(ids.shape)
    for row, tokens in enumerate(ids.tolist()):
        for place in range(1, len(tokens)):
            result[row, place] = log_table[tokens[place - 1], tokens[place]]
    return result


def numpy_entropies(model, ids):
    table = model.table.detach().numpy()
    p = np.exp(table) / np.exp(table).sum(-1, keepdims=True)
    per_state = -(p * np.log(p)).sum(-1)
    return np.array([[0.0] + [per_state[token] for token in tokens[:-1]] for tokens in ids.tolist()])


def numerical_gradient(model, objective, step=1e-6):
    """Central differences of a plain function of the table."""
    result = np.zeros(model.table.shape)
    with torch.no_grad():
        for index in np.ndindex(*result.shape):
            saved = float(model.table[index])
            model.table[index] = saved + step
            above = objective()
            model.table[index] = saved - step
            below = objective()
            model.table[index] = saved
            result[index] = (above - below) / (2 * step)
    return result


def test_cross_entropy_of_uniform_logits_is_the_log_of_the_vocabulary_and_its_gradient_is_p_minus_one_hot(
    models, pipelines
):
    model = models.Table(vocab=4)
    with torch.no_grad():
        model.table.zero_()
    output = pipelines(model).forward_backward([[1, 3]]).result()
    assert output.loss == pytest.approx(math.log(4))
    assert output.logprobs.tolist() == [[0.0, pytest.approx(-math.log(4))]]
    expected = torch.zeros(4, 4, dtype=torch.float64)
    expected[1] = torch.tensor([0.25, 0.25, 0.25, -0.75])
    torch.testing.assert_close(model.table.grad, expected)


def test_cross_entropy_is_the_mean_over_label_tokens_predicted_from_the_token_before(models, pipelines):
    model = models.Table()
    labels = torch.tensor([[1, 2, -100, 0], [-100, -100, 2, -100]])
    output = pipelines(model).forward_backward(IDS, labels=labels).result()
    logprobs = numpy_logprobs(model, IDS)
    expected = -(logprobs[0, 1] + logprobs[0, 3] + logprobs[1, 2]) / 3
    assert output.loss == pytest.approx(expected, abs=1e-12)
    assert output.metrics["num_tokens"] == 3
    shown = np.where((labels != -100).numpy() & (np.arange(4) > 0), logprobs, 0.0)
    np.testing.assert_allclose(output.logprobs.numpy(), shown, atol=1e-12)


def test_cross_entropy_equals_the_loss_of_transformers(qwen, pipelines, gradients):
    ids = torch.randint(2, 23, (3, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    output = pipelines(qwen).forward_backward(ids, torch.ones_like(ids), labels).result()
    ours = gradients(qwen)
    qwen.zero_grad()
    theirs = qwen(input_ids=ids, labels=labels)
    theirs.loss.backward()
    assert output.loss == pytest.approx(float(theirs.loss.detach()), abs=1e-6)
    torch.testing.assert_close(ours, gradients(qwen), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(output.logits, theirs.logits.detach())


def test_importance_sampling_is_minus_ratio_times_advantage_in_value_and_gradient(models, pipelines):
    model = models.Table()
    arguments = {"old_logprobs": OLD, "advantages": ADVANTAGES}
    output = pipelines(model).forward_backward(IDS, None, None, "importance_sampling", arguments).result()

    def objective():
        ratio = np.exp(numpy_logprobs(model, IDS) - OLD.numpy())
        return -(ratio * ADVANTAGES.numpy())[:, 1:].mean()

    assert output.loss == pytest.approx(objective(), abs=1e-12)
    np.testing.assert_allclose(model.table.grad.numpy(), numerical_gradient(model, objective), atol=1e-7)
    ratio = np.exp(numpy_logprobs(model, IDS) - OLD.numpy())[:, 1:]
    assert output.metrics["mean_ratio"] == pytest.approx(ratio.mean(), abs=1e-6)


def test_ppo_is_clip_minus_entropy_plus_value_in_value_and_gradient(models, pipelines):
    model = models.Value()
    table = model.logits
    old_values = torch.tensor([[0.0, 0.4, -0.2, 0.1], [0.0, 0.9, -0.8, 0.3]], dtype=torch.float64)
    returns = torch.tensor([[0.0, 1.0, 0.0, 0.6], [0.0, 0.2, 0.7, 0.3]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1]])
    arguments = {
        "old_log_probs": OLD,
        "advantages": ADVANTAGES,
        "old_values": old_values,
        "returns": returns,
        "mask": mask,
        "clip_param": 0.3,
        "value_clip": 0.25,
        "entropy_coef": 0.05,
        "value_loss_coef": 0.7,
    }
    output = pipelines(model).forward_backward(IDS, None, None, "ppo", arguments).result()
    live = (mask.numpy() == 1) & (np.arange(4) > 0)

    def parts():
        ratio = np.exp(numpy_logprobs(table, IDS) - OLD.numpy())
        a = ADVANTAGES.numpy()
        policy = -np.minimum(ratio * a, np.clip(ratio, 0.7, 1.3) * a)
        v = model.values.detach().numpy()[IDS.numpy()]
        v = np.concatenate([np.zeros((2, 1)), v[:, :-1]], axis=1)
        held = old_values.numpy() + np.clip(v - old_values.numpy(), -0.25, 0.25)
        value = 0.5 * np.maximum((v - returns.numpy()) ** 2, (held - returns.numpy()) ** 2)
        return policy[live].mean(), value[live].mean(), numpy_entropies(table, IDS)[live].mean()

    def objective():
        policy, value, entropy = parts()
        return policy - 0.05 * entropy + 0.7 * value

    policy, value, entropy = parts()
    assert output.loss == pytest.approx(objective(), abs=1e-12)
    assert output.metrics["policy_loss"] == pytest.approx(policy, abs=1e-12)
    assert output.metrics["value_loss"] == pytest.approx(value, abs=1e-12)
    assert output.metrics["entropy"] == pytest.approx(entropy, abs=1e-12)
    np.testing.assert_allclose(table.table.grad.numpy(), numerical_gradient(table, objective), atol=1e-7)
    assert torch.count_nonzero(model.values.grad) > 0


def test_ppo_defaults_are_clip_02_entropy_001_and_value_weight_half_without_value_clip(models, pipelines):
    model = models.Table()
    logprobs = numpy_logprobs(model, IDS)
    old = torch.from_numpy(logprobs - np.log(2.0))  # every ratio is 2
    values = torch.full(IDS.shape, 3.0, dtype=torch.float64)
    returns = torch.full(IDS.shape, 1.0, dtype=torch.float64)
    arguments = {"old_log_probs": old, "advantages": [1.0, -1.0], "values": values, "returns": returns}
    output = pipelines(model).forward_backward(IDS, None, None, "ppo", arguments).result()
    # Row 0: −min(2, 1.2) = −1.2. Row 1: −min(−2, −1.2) = 2. Value: ½ (3 − 1)² = 2, at weight ½.
    entropy = numpy_entropies(model, IDS)[:, 1:].mean()
    assert output.loss == pytest.approx((-1.2 + 2.0) / 2 - 0.01 * entropy + 0.5 * 2.0, abs=1e-12)
    assert output.metrics["clip_fraction"] == pytest.approx(0.5)
    assert output.metrics["mean_ratio"] == pytest.approx(2.0)


def test_both_spellings_of_the_old_logprobs_mean_the_same(models, pipelines):
    losses = []
    for name in ("importance_sampling", "ppo"):
        for key in ("old_logprobs", "old_log_probs"):
            arguments = {key: OLD, "advantages": ADVANTAGES}
            pipeline = pipelines(models.Table())
            losses.append(pipeline.forward_backward(IDS, None, None, name, arguments).result().loss)
    assert losses[0] == losses[1]
    assert losses[2] == losses[3]


@pytest.mark.parametrize("name", ["importance_sampling", "ppo"])
def test_the_gradient_changes_when_the_sampled_token_changes(models, pipelines, name):
    seen = []
    for last in (0, 3):
        model, ids = models.Table(), IDS.clone()
        ids[0, 3] = last
        old = torch.from_numpy(numpy_logprobs(model, ids))  # ratio 1, so that nothing is clipped
        arguments = {"old_logprobs": old, "advantages": ADVANTAGES}
        pipelines(model).forward_backward(ids, None, None, name, arguments).result()
        seen.append(model.table.grad.clone())
    assert (seen[0] - seen[1]).abs().max() > 1e-3


def test_losses_at_the_sampling_temperature_see_logits_divided_by_it(models, pipelines):
    model = models.Table()
    old = torch.from_numpy(numpy_logprobs(model, IDS, temperature=0.5))
    arguments = {"old_logprobs": old, "advantages": ADVANTAGES, "temperature": 0.5}
    output = pipelines(model).forward_backward(IDS, None, None, "importance_sampling", arguments).result()
    assert output.metrics["mean_ratio"] == pytest.approx(1.0, abs=1e-12)
    assert output.loss == pytest.approx(-float(ADVANTAGES[:, 1:].mean()), abs=1e-12)


@pytest.mark.parametrize("family", ["make_qwen", "make_gpt2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_neither_loss_nor_gradient(
    request, pipelines, gradients, side, family
):
    make = request.getfixturevalue(family)
    rows = [[5, 6, 7, 8, 9], [3, 4, 10]]
    single = [torch.tensor([row]) for row in rows]
    reference = make()
    plain = pipelines(reference)
    outputs = [plain.forward_backward(ids).result() for ids in single]

    length, pad = 7, 11  # a pad that is an ordinary token, so that training it would show
    ids, mask = torch.full((2, length), pad), torch.zeros(2, length, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(length - len(row), length) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = torch.tensor(row), 1
    padded_model = make()
    output = pipelines(padded_model).forward_backward(ids, mask, ids).result()

    assert output.metrics["num_tokens"] == 4 + 2
    assert output.loss == pytest.approx((4 * outputs[0].loss + 2 * outputs[1].loss) / 6, abs=1e-6)
    torch.testing.assert_close(gradients(padded_model), gradients(reference), atol=1e-6, rtol=1e-4)
    for i in range(2):
        found = output.logprobs[i][mask[i] == 1]
        torch.testing.assert_close(found, outputs[i].logprobs[0], atol=1e-5, rtol=1e-5)
        assert torch.all(output.logprobs[i][mask[i] == 0] == 0)


def test_a_gap_inside_a_row_is_not_read_and_the_token_behind_it_is_not_trained(make_gpt2, pipelines):
    pipeline = pipelines(make_gpt2())
    whole = pipeline.forward([[5, 6, 7, 8]]).result()["logprobs"][0]
    gap = pipeline.forward_backward([[5, 6, 11, 7, 8]], [[1, 1, 0, 1, 1]]).result()
    assert gap.metrics["num_tokens"] == 2
    expected = [0.0, float(whole[1]), 0.0, 0.0, float(whole[3])]
    assert gap.logprobs[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_forward_gives_the_logprobs_that_a_later_loss_takes_as_old(qwen, pipelines):
    ids = torch.randint(2, 23, (2, 6), generator=torch.Generator().manual_seed(2))
    pipeline = pipelines(qwen)
    before = pipeline.forward(ids).result()
    direct = qwen(ids).logits.log_softmax(-1)
    for t in range(1, 6):
        expected = direct[torch.arange(2), t - 1, ids[:, t]].detach()
        torch.testing.assert_close(before["logprobs"][:, t], expected)
    arguments = {"old_logprobs": before["logprobs"], "advantages": torch.ones(2, 6)}
    output = pipeline.forward_backward(ids, None, ids, "importance_sampling", arguments).result()
    assert output.loss == pytest.approx(-1.0, abs=1e-6)


def test_numbers_that_are_not_finite_at_untrained_places_do_no_harm(models, pipelines):
    old = OLD.clone()
    old[0, 1], old[1, 0] = float("nan"), float("-inf")
    labels = IDS.clone()
    labels[0, 1] = -100
    model = models.Table()
    arguments = {"old_logprobs": old, "advantages": ADVANTAGES}
    output = pipelines(model).forward_backward(IDS, None, labels, "ppo", arguments).result()
    assert math.isfinite(output.loss)
    assert bool(model.table.grad.isfinite().all())
