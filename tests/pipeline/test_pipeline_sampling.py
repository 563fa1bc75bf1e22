"""Sampling: log-probabilities of a direct forward pass, transformers' greedy, truncation, stops, seeds."""

import math
from types import SimpleNamespace

import pytest
import torch

from rl_cluster.modeling.drawing import truncated

PROMPT = [3, 7, 11]


def direct_logprobs(model, prompt, tokens, temperature=1.0):
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logprobs = (model(ids).logits / temperature).log_softmax(-1)
    return [float(logprobs[0, len(prompt) + i - 1, token]) for i, token in enumerate(tokens)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_equal_a_direct_forward_at_the_temperature(qwen, pipelines, temperature):
    sample = pipelines(qwen).sample(PROMPT, max_tokens=20, temperature=temperature, stop=[], seed=1)
    assert len(sample["tokens"]) == 20
    assert sample["prompt"] == PROMPT
    expected = direct_logprobs(qwen, PROMPT, sample["tokens"], temperature)
    assert sample["logprobs"] == pytest.approx(expected, abs=1e-5)


def test_truncation_leaves_the_reported_log_probabilities_those_of_all_tokens(qwen, pipelines):
    sample = pipelines(qwen).sample(PROMPT, 12, temperature=1.3, top_k=4, top_p=0.9, stop=[], seed=2)
    expected = direct_logprobs(qwen, PROMPT, sample["tokens"], 1.3)
    assert sample["logprobs"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_greedy_equals_generate_of_transformers(make_qwen, pipelines, seed):
    model = make_qwen(seed=seed, eos=9).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20.0)
    ids = torch.tensor([PROMPT])
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=25, do_sample=False)
    ours = pipelines(model).sample(PROMPT, max_tokens=25, temperature=0.0)
    assert ours["tokens"] == theirs[0, len(PROMPT) :].tolist()
    assert ours["logprobs"] == pytest.approx(direct_logprobs(model, PROMPT, ours["tokens"]), abs=1e-4)


def test_greedy_equals_generate_for_learned_positions_too(make_gpt2, pipelines):
    model = make_gpt2()
    ids = torch.tensor([PROMPT])
    mask = torch.ones_like(ids)
    theirs = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
    ours = pipelines(model).sample(PROMPT, max_tokens=12, temperature=0)["tokens"]
    assert ours == theirs[0, len(PROMPT) :].tolist()


def test_a_module_without_a_cache_samples_the_same_as_its_table_says(models, pipelines):
    model = models.Table()
    sample = pipelines(model).sample(torch.tensor([[1, 2]]), 8, seed=4)
    sequence = [*sample["prompt"], *sample["tokens"]]
    table = model.table.detach().log_softmax(-1)
    expected = [float(table[sequence[i - 1], sequence[i]]) for i in range(2, 10)]
    assert sample["logprobs"] == pytest.approx(expected)


def test_the_cache_reads_each_token_once(qwen, pipelines):
    lengths = []
    handle = qwen.model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    pipelines(qwen).sample(PROMPT, 6, stop=[])
    handle.remove()
    assert lengths == [3, 1, 1, 1, 1, 1]


def test_top_k_and_top_p_keep_the_tokens_that_hand_arithmetic_keeps():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()

    def kept(top_k, top_p):
        return torch.isfinite(truncated(logits, top_k, top_p)).nonzero().flatten().tolist()

    assert kept(-1, 1.0) == kept(0, 1.0) == kept(9, 1.0) == [0, 1, 2, 3]
    assert kept(1, 1.0) == [1]
    assert kept(3, 1.0) == [1, 2, 3]
    assert kept(-1, 0.35) == [1]
    assert kept(-1, 0.45) == [1, 3]
    assert kept(-1, 0.75) == [1, 2, 3]
    # Of the two likeliest, 4/7 and 3/7, the first alone reaches one half:
    assert kept(2, 0.5) == [1]


def test_draws_follow_the_truncated_distribution(models, pipelines):
    """Probabilities ½, ¼, ⅛, ⅛ at temperature ½ are 16, 4, 1, 1; of the best two 0.8 and 0.2."""
    model = models.Table(vocab=4)
    with torch.no_grad():
        model.table.copy_(torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(4, 4))
    pipeline = pipelines(model)
    tokens = pipeline.sample([0], 2000, temperature=0.5, top_k=2, seed=0)["tokens"]
    assert set(tokens) == {0, 1}
    assert tokens.count(0) / 2000 == pytest.approx(0.8, abs=4 * math.sqrt(0.16 / 2000))


def test_stop_ids_end_the_sample_and_stay_in_it(models, pipelines):
    pipeline = pipelines(models.Table())
    whole = pipeline.sample([1], 30, seed=3)["tokens"]
    stop = whole[4]
    cut = pipeline.sample([1], 30, stop=[stop], seed=3)
    assert cut["tokens"] == whole[: whole.index(stop) + 1]
    assert len(cut["logprobs"]) == len(cut["tokens"])
    assert pipeline.sample([1], 30, stop=stop, seed=3) == cut


def test_stop_strings_are_found_across_tokens_with_the_tokenizer(models, pipelines):
    tokenizer = SimpleNamespace(decode=lambda tokens: "".join("abcde"[token] for token in tokens))
    pipeline = pipelines(models.Table(), tokenizer=tokenizer)
    whole = pipeline.sample([1], 40, seed=3, stop=[])["tokens"]
    text = tokenizer.decode(whole)
    stop = text[5:7]
    cut = pipeline.sample([1], 40, stop=[stop, "zz"], seed=3)["tokens"]
    assert tokenizer.decode(cut) == text[: text.index(stop) + 2]


def test_the_models_own_end_of_text_stops_unless_told_otherwise(make_qwen, pipelines):
    model = make_qwen(eos=5)
    pipeline = pipelines(model)
    free = pipeline.sample(PROMPT, 40, stop=[], seed=1)["tokens"]
    assert 5 in free[:-1]
    assert pipeline.sample(PROMPT, 40, seed=1)["tokens"] == free[: free.index(5) + 1]


def test_manual_seed_decides_and_seeds_are_reproducible(qwen, pipelines):
    pipeline = pipelines(qwen)
    samples = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        samples.append([pipeline.sample(PROMPT, 10, stop=[])["tokens"] for _ in range(2)])
    assert samples[0] == samples[1] != samples[2]
    assert samples[0][0] != samples[0][1]
    state = torch.get_rng_state()
    one = pipeline.sample(PROMPT, 10, stop=[], seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert pipeline.sample(PROMPT, 10, stop=[], seed=5) == one


def test_a_sample_ends_where_the_positions_of_the_model_end(qwen, pipelines):
    assert len(pipelines(qwen).sample(PROMPT, max_tokens=100, stop=[])["tokens"]) == 64 - len(PROMPT)


def test_a_sample_sees_the_steps_queued_before_it(models, pipelines):
    model = models.Table()
    optimizer = torch.optim.SGD(model.parameters(), lr=50.0)
    pipeline = pipelines(model)
    for _ in range(3):
        pipeline.forward_backward([[1, 4], [4, 1]])
        pipeline.optim_step(optimizer, max_grad_norm=None)
    assert pipeline.sample([1], 4, temperature=0)["tokens"] == [4, 1, 4, 1]


def test_sampling_and_forward_use_no_dropout_and_restore_every_mode(models, pipelines):
    model = models.Dropout()
    model.norm.eval()
    modes = [part.training for part in model.modules()]
    statistics = model.norm.running_mean.clone()
    pipeline = pipelines(model)
    one = pipeline.forward([[1, 2, 3]]).result()["logprobs"]
    assert torch.equal(pipeline.forward([[1, 2, 3]]).result()["logprobs"], one)
    pipeline.sample([1, 2], 3)
    assert [part.training for part in model.modules()] == modes
    assert torch.equal(model.norm.running_mean, statistics)
    assert all(p.grad is None for p in model.parameters())
