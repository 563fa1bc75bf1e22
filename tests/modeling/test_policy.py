"""Log-probabilities, entropies and values at the drawn tokens, against log_softmax over whole logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from rl_cluster.config.run import LoRAConfig
from rl_cluster.errors import BadInputError
from rl_cluster.modeling.load import load_critic, load_policy
from rl_cluster.modeling.packed import PackedLayout
from rl_cluster.modeling.scratch import build_tokenizer, save_scratch_model
from rl_cluster.modeling.token_logprobs import token_logprobs
from tests.common.settings import TINY

LENGTHS = [7, 4, 9]
TARGETS = torch.tensor([2, 3, 6, 8, 10, 12, 19])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("scratch")
    save_scratch_model(TINY, path, seed=3)
    return str(path)


def tokens() -> torch.Tensor:
    return torch.arange(20) % 18 + 3


@pytest.mark.parametrize("chunk_elements", [1, 30, 10_000])
def test_chunked_log_probabilities_have_the_gradient_of_log_softmax(chunk_elements: int) -> None:
    torch.manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((7, 5), (11, 5), (11,))
    )
    targets = torch.randint(0, 11, (7,))
    outer = torch.randn(2, 7, dtype=torch.float64)
    all_logprobs = torch.log_softmax((hidden @ weight.T + bias) / 0.7, dim=-1)
    expected = (all_logprobs.gather(1, targets[:, None])[:, 0], -(all_logprobs.exp() * all_logprobs).sum(-1))
    ours = token_logprobs(hidden, weight, bias, targets, 0.7, chunk_elements)
    inputs = (hidden, weight, bias)
    theirs_gradient = torch.autograd.grad((outer[0] * expected[0] + outer[1] * expected[1]).sum(), inputs)
    our_gradient = torch.autograd.grad((outer[0] * ours[0] + outer[1] * ours[1]).sum(), inputs)
    for a, b in zip((*ours, *our_gradient), (*expected, *theirs_gradient), strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("chunk_elements", [1, 30, 10_000])
def test_several_targets_per_state_have_the_gradient_of_log_softmax(chunk_elements: int) -> None:
    """The same id twice at one state, too."""
    torch.manual_seed(1)
    inputs = tuple(torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((7, 5), (11, 5), (11,)))
    targets = torch.randint(0, 11, (7, 4))
    targets[3, 1] = targets[3, 0]
    outer, of_entropy = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    table = torch.log_softmax((inputs[0] @ inputs[1].T + inputs[2]) / 0.7, dim=-1)
    expected = (table.gather(1, targets), -(table.exp() * table).sum(-1))
    ours = token_logprobs(*inputs, targets, 0.7, chunk_elements)
    losses = [
        (outer * logprobs).sum() + (of_entropy * entropy).sum() for logprobs, entropy in (ours, expected)
    ]
    for one, other in zip(ours, expected, strict=True):
        assert torch.allclose(one, other)
    for one, other in zip(*(torch.autograd.grad(loss, inputs) for loss in losses), strict=True):
        assert torch.allclose(one, other)


def test_outputs_are_aligned_on_the_drawn_token(folder: str) -> None:
    policy = load_policy(folder)
    lm = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logprobs, entropy, values = policy(tokens(), PackedLayout.of(LENGTHS), TARGETS, 0.5)
        rows = [torch.log_softmax(lm(row[None]).logits[0] / 0.5, -1) for row in tokens().split(LENGTHS)]
    table = torch.cat(rows)
    assert values is None
    for index, target in enumerate(TARGETS.tolist()):
        assert logprobs[index] == pytest.approx(float(table[target - 1, tokens()[target]]), abs=1e-5)
        row = table[target - 1]
        assert entropy[index] == pytest.approx(float(-(row.exp() * row).sum()), abs=1e-5)


def test_the_value_head_reads_the_state_before_the_drawn_token(folder: str) -> None:
    policy = load_policy(folder, value_head=True)
    head = policy.value_head
    assert head is not None
    torch.nn.init.normal_(head.scalar.weight)
    with torch.no_grad():
        _, _, values = policy(tokens(), PackedLayout.of(LENGTHS), TARGETS, 1.0)
        changed = tokens()
        changed[TARGETS[-1]] += -1  # the last drawn token itself is not part of the state before it
        _, _, same = policy(changed, PackedLayout.of(LENGTHS), TARGETS, 1.0)
        hidden = policy.lm.model(tokens()[11:20][None], packed=PackedLayout.of([9])).last_hidden_state[0]
        by_hand = torch.relu(hidden[7] @ head.hidden.weight.T + head.hidden.bias) @ head.scalar.weight[0]
    assert torch.equal(values, same)
    assert values[-1] == pytest.approx(float(by_hand), abs=1e-5)


def test_bfloat16_log_probabilities_stay_close_to_float32(folder: str) -> None:
    outputs = [
        load_policy(folder, dtype=dtype)(tokens(), PackedLayout.of(LENGTHS), TARGETS, 1.0)[0]
        for dtype in ("float32", "bfloat16")
    ]
    assert outputs[1].dtype == torch.float32
    assert (outputs[0] - outputs[1]).abs().max() < 0.05


def test_a_critic_starts_from_the_trunk_and_loads_a_saved_value_head(folder: str, tmp_path: Path) -> None:
    save_scratch_model(TINY, tmp_path, seed=3)
    first = load_critic(folder, seed=1)
    torch.nn.init.normal_(first.value_head.scalar.weight)
    save_file(first.value_head.state_dict(), tmp_path / "value_head.safetensors")
    second = load_critic(str(tmp_path), seed=2)
    with torch.no_grad():
        results = [critic(tokens(), PackedLayout.of(LENGTHS), TARGETS, 1.0) for critic in (first, second)]
    assert torch.equal(results[0][2], results[1][2])
    assert results[0][2].abs().max() > 0
    assert not results[0][0].any()


def test_adapters_change_nothing_at_first_and_are_the_same_on_every_rank(folder: str) -> None:
    lora = LoRAConfig(rank=4)
    first, second = (load_policy(folder, lora=lora, seed=5) for _ in range(2))
    plain = load_policy(folder)
    with torch.no_grad():
        a, b = (m(tokens(), PackedLayout.of(LENGTHS), TARGETS, 1.0)[0] for m in (first, plain))
    assert torch.equal(a, b)
    for (name, x), (_, y) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(x, y), name
    assert all("lora_" in name for name, p in first.named_parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: load_policy(str(path / "missing")), r"model\.path: folder .*missing.* does not exist"),
        (lambda path: load_policy(str(path)), r"holds no config\.json"),
        (lambda path: load_critic(str(path)), r"holds no config\.json"),
    ],
)
def test_a_path_without_a_model_is_bad_input(make: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=message):
        make(tmp_path)  # type: ignore[operator]


def test_a_damaged_model_and_unknown_targets_are_bad_input(folder: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "hidden_size": 32}')
    with pytest.raises(BadInputError, match=r"model\.path: .* cannot be loaded"):
        load_policy(str(tmp_path))
    with pytest.raises(BadInputError, match=r"model\.lora\.targets"):
        load_policy(folder, lora=LoRAConfig(targets=("no_such_layer",)))
    with pytest.raises(BadInputError, match="language-model head"):
        load_policy(folder, lora=LoRAConfig(targets=("lm_head",)))


def test_a_scratch_folder_reads_back_one_token_per_character(folder: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "12 + (34)= 46"
    ids = tokenizer(text)["input_ids"]
    assert ids == [3 + TINY.alphabet.index(character) for character in text]
    assert tokenizer.decode(ids) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == 1
    assert model.get_input_embeddings().num_embeddings == len(tokenizer) == 21


def test_a_scratch_model_depends_on_its_seed_alone(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.rand(1)
        save_scratch_model(TINY, tmp_path / name, seed)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]


@pytest.mark.parametrize("alphabet", ["", "00", "0é"])
def test_an_alphabet_that_cannot_work_is_bad_input(alphabet: str) -> None:
    with pytest.raises(BadInputError, match=r"model\.scratch\.alphabet"):
        build_tokenizer(alphabet, 10)


def test_a_chat_template_is_saved_with_the_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_scratch_model(TINY, tmp_path, chat_template="{% for m in messages %}{{ m['content'] }}={% endfor %}")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1+2"}], tokenize=False) == "1+2="
