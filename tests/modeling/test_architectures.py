"""Every architecture of the table trains on the numbers of plain transformers, or is refused by name."""

from __future__ import annotations

import logging
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from bench.model_table import PAGE, table
from rl_cluster.errors import BadInputError
from rl_cluster.modeling import examine, kv_cache, packed
from rl_cluster.modeling.load import load_critic, load_policy
from rl_cluster.modeling.logit_map import IDENTITY, LogitMap
from rl_cluster.modeling.packed import ATTENTION, NotPackableError, decoder_of, is_packed, packed_attention
from rl_cluster.modeling.score_model import load_score_model
from tests.modeling.architectures import (
    CASES,
    Outcome,
    Rows,
    config_of,
    measure,
    our_logprobs,
    plain_logprobs,
    save_tiny,
)

BY_KIND = {case.kind: case for case in CASES}
REFUSED = {"bert": "BertLMHeadModel", "electra": "ElectraForCausalLM", "roberta": "RobertaForCausalLM"}
NOT_PACKED = (
    *("qwen3_next", "qwen3_5_text", "lfm2", "falcon_h1", "mamba", "mamba2", "bamba", "jamba", "bloom"),
    *("nemotron", "llama4_text", "gpt_neo", "minimax"),
)
PACKED = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "ministral", "mixtral", "phi3", "olmo2", "olmo3"),
    *("olmoe", "smollm3", "gemma", "gemma2", "gemma3_text", "glm4", "granite", "cohere", "cohere2"),
    *("gpt_oss", "deepseek_v3", "gpt_neox", "gpt2", "opt"),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("architectures")


@cache
def outcome(kind: str, base: Path) -> Outcome:
    return measure(BY_KIND[kind], base / kind)


def test_at_least_thirty_architectures_are_compared_and_no_two_alike() -> None:
    assert len(BY_KIND) == len(CASES) >= 30


@pytest.mark.parametrize("kind", BY_KIND)
def test_learner_and_sampler_say_what_plain_transformers_says(kind: str, base: Path) -> None:
    found = outcome(kind, base)
    if kind in REFUSED:
        assert found.way == "refused"
        assert f"model.path: '{base / kind}' ({REFUSED[kind]})" in found.why
        return
    assert found.way == ("padded" if kind in NOT_PACKED else "packed" if kind in PACKED else found.way)
    assert found.learner is not None
    assert found.learner < 1e-4
    assert found.sampler is not None
    assert found.sampler < 1e-4


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "gemma2",
        "gpt_oss",
        "granite",
        "cohere2",
        "deepseek_v3",
        "qwen3_next",
        "lfm2",
        "mamba2",
        "bloom",
    ],
)
def test_gradients_are_those_of_plain_transformers(kind: str, base: Path) -> None:
    outcome(kind, base)
    policy = load_policy(str(base / kind))
    plain = AutoModelForCausalLM.from_pretrained(base / kind, attn_implementation="eager")
    rows = Rows.make()
    weights = torch.linspace(-1.0, 2.0, len(rows.targets))
    for model, logprobs in ((policy.lm, our_logprobs(policy, rows)), (plain, plain_logprobs(plain, rows))):
        model.zero_grad()
        (weights * logprobs).sum().backward()
    theirs = dict(plain.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in theirs.values() if p.grad is not None)
    for name, parameter in policy.lm.named_parameters():
        expected = theirs[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            assert parameter.grad is not None
            assert (parameter.grad - expected).abs().max() < 1e-5 * max(1.0, largest), name


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "qwen3_next", "lfm2"])
def test_gradient_checkpointing_and_temperature_hold_for_every_way(kind: str, base: Path) -> None:
    outcome(kind, base)
    rows = Rows.make()
    plain = AutoModelForCausalLM.from_pretrained(base / kind, attn_implementation="eager")
    results = []
    for checkpointing in (False, True):
        policy = load_policy(str(base / kind), gradient_checkpointing=checkpointing).train()
        logprobs, entropy, _ = policy(torch.from_numpy(rows.tokens), rows.layout, rows.targets, 0.5)
        (logprobs + entropy).sum().backward()
        results.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        tables = [
            (plain(input_ids=row[None]).logits[0] / 0.5).log_softmax(-1)
            for row in torch.from_numpy(rows.tokens).split(rows.lengths)
        ]
    before = torch.cat(tables)[rows.targets - 1]
    drawn = torch.from_numpy(rows.tokens)[rows.targets]
    torch.testing.assert_close(logprobs, before.gather(-1, drawn[:, None])[:, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, -(before.exp() * before).sum(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "qwen3_next", "mamba"])
def test_a_critic_and_a_reward_model_read_the_states_of_plain_transformers(kind: str, base: Path) -> None:
    outcome(kind, base)
    rows = Rows.make()
    tokens = torch.from_numpy(rows.tokens)
    critic = load_critic(str(base / kind))
    torch.nn.init.normal_(critic.value_head.scalar.weight)
    plain = AutoModelForCausalLM.from_pretrained(base / kind, attn_implementation="eager")
    trunk = decoder_of(plain)
    with torch.no_grad():
        _, _, values = critic(tokens, rows.layout, rows.targets, 1.0)
        states = torch.cat([trunk(input_ids=row[None])[0][0] for row in tokens.split(rows.lengths)])
        torch.testing.assert_close(values, critic.value_head(states[rows.targets - 1]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "qwen3_next", "llama"])
def test_a_reward_model_scores_as_the_classifier_of_plain_transformers(kind: str, tmp_path: Path) -> None:
    config = config_of(BY_KIND[kind])
    config.num_labels = 1
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager").eval()
    rows = Rows.make()
    tokens = torch.from_numpy(rows.tokens)
    ends = torch.tensor(rows.lengths).cumsum(0) - 1
    with torch.no_grad():
        _, _, scores = load_score_model(str(tmp_path))(tokens, rows.layout, ends, 1.0)
        expected = [plain(input_ids=row[None, :-1]).logits[0, 0] for row in tokens.split(rows.lengths)]
    torch.testing.assert_close(scores, torch.stack(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "qwen3_next", "cohere", "qwen3_moe"])
def test_bfloat16_takes_the_same_way(kind: str, base: Path) -> None:
    way = outcome(kind, base).way
    policy = load_policy(str(base / kind), dtype="bfloat16")
    assert is_packed(decoder_of(policy.lm)) == (way == "packed")


def test_attention_that_mixes_packed_sequences_is_noticed_at_load(
    base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outcome("qwen3", base)
    whole = packed.PackedLayout.of

    def borderless(lengths: list[int], device: str = "cpu", shared: object = None, **more: float) -> object:
        return whole([sum(lengths)], device)

    monkeypatch.setattr(examine.PackedLayout, "of", borderless)
    with pytest.raises(BadInputError, match=r"model\.path.*\(Qwen3ForCausalLM\) does not give here"):
        load_policy(str(base / "qwen3"))
    monkeypatch.undo()
    monkeypatch.setattr(packed, "window_mask", lambda *_: torch.ones(1, 1, dtype=torch.bool))
    with caplog.at_level(logging.WARNING):
        policy = load_policy(str(base / "qwen3"))
    assert not is_packed(decoder_of(policy.lm))
    assert "Qwen3ForCausalLM" in caplog.text
    assert "padded rows" in caplog.text


def test_logits_that_the_model_changes_in_an_unknown_way_are_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome("gemma2", base)
    monkeypatch.setattr(examine.LogitMap, "of", staticmethod(lambda config: IDENTITY))
    with pytest.raises(BadInputError, match=r"Gemma2ForCausalLM\) does not give here what it gives"):
        load_policy(str(base / "gemma2"))


def test_an_argument_that_packed_attention_does_not_know_is_an_error() -> None:
    states = torch.zeros(1, 2, 3, 4)
    layout = packed.PackedLayout.of([3])
    attention = torch.nn.Module()
    with pytest.raises(NotPackableError, match="'position_bias'"):
        packed_attention(attention, states, states, states, None, layout, position_bias=states)
    with pytest.raises(NotPackableError, match="both directions"):
        packed_attention(attention, states, states, states, None, layout, is_causal=False)
    with pytest.raises(NotPackableError, match="mask of its own"):
        packed_attention(attention, states, states, states, states, layout)
    with pytest.raises(NotPackableError, match="layout"):
        packed_attention(attention, states, states, states, None)


def test_chunked_attention_is_never_packed_though_short_sequences_show_no_difference(tmp_path: Path) -> None:
    case = BY_KIND["llama4_text"]
    save_tiny(type(case)(case.kind, case.settings | {"attention_chunk_size": 1000}), tmp_path)
    assert not is_packed(decoder_of(load_policy(str(tmp_path)).lm))


def test_a_window_that_a_layer_is_not_told_of_is_never_packed(tmp_path: Path) -> None:
    case = BY_KIND["phimoe"]
    save_tiny(type(case)(case.kind, case.settings | {"sliding_window": 1000}), tmp_path)
    assert not is_packed(decoder_of(load_policy(str(tmp_path)).lm))


@pytest.mark.parametrize("logit_map", [LogitMap(0.25), LogitMap(2.0, 3.0), LogitMap(cap=0.5)])
def test_mapped_logits_have_the_gradient_of_autograd(logit_map: LogitMap) -> None:
    from rl_cluster.modeling.token_logprobs import token_logprobs

    torch.manual_seed(0)
    shapes = ((7, 5), (11, 5), (11,))
    hidden, weight, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes)
    targets = torch.randint(0, 11, (7,))
    outer = torch.randn(2, 7, dtype=torch.float64)
    raw = (hidden @ weight.T + bias) * logit_map.factor
    mapped = raw if logit_map.cap is None else logit_map.cap * torch.tanh(raw / logit_map.cap)
    table_ = torch.log_softmax(mapped / 0.7, dim=-1)
    expected = (table_.gather(1, targets[:, None])[:, 0], -(table_.exp() * table_).sum(-1))
    ours = token_logprobs(hidden, weight, bias, targets, 0.7, 30, logit_map)
    theirs_gradient = torch.autograd.grad(
        (outer[0] * expected[0] + outer[1] * expected[1]).sum(), (hidden, weight, bias)
    )
    our_gradient = torch.autograd.grad(
        (outer[0] * ours[0] + outer[1] * ours[1]).sum(), (hidden, weight, bias)
    )
    for a, b in zip((*ours, *our_gradient), (*expected, *theirs_gradient), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_the_page_holds_the_table_that_is_measured(base: Path) -> None:
    measured = table({kind: outcome(kind, base) for kind in BY_KIND})
    page = PAGE.read_text(encoding="utf-8")
    assert _without_numbers(measured) in _without_numbers(page)


def _without_numbers(text: str) -> str:
    """Differences are rounding, and other on other machines."""
    return re.sub(r"\d\.?\d*e-\d+", "…", text)


def test_the_way_is_the_attention_that_the_model_was_left_with(base: Path) -> None:
    outcome("llama", base)
    policy = load_policy(str(base / "llama"))
    assert decoder_of(policy.lm).config._attn_implementation == ATTENTION


def test_a_model_that_cannot_continue_from_kept_keys_is_not_packed(
    base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert outcome("diffllama", base).way == "packed"
    monkeypatch.setattr(kv_cache.Calls, "slot", lambda self, layer: (layer, 0))
    with caplog.at_level(logging.WARNING):
        policy = load_policy(str(base / "diffllama"))
    assert not is_packed(decoder_of(policy.lm))
    assert "kept keys and values do not continue a sequence" in caplog.text
