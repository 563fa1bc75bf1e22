"""PPOTrainer's three constructors by type, and what is refused before any worker starts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rl_cluster.config.run import ScratchModel
from rl_cluster.errors import BadInputError
from rl_cluster.modeling.scratch import build_model
from rl_cluster.trainers.ppo.arguments import read_arguments
from rl_cluster.trainers.ppo.config import PPOConfig
from rl_cluster.trainers.ppo.model import PPOModel
from rl_cluster.trainers.ppo.trainer import PPOTrainer

TINY = ScratchModel(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16, max_positions=32)
NOTHING = {"model": None, "ref_model": None, "tokenizer": None, "dataset": None, "reward_fn": None}
ROWS = [{"query": "1+1="}, {"query": "2+2="}]


@pytest.fixture(scope="module")
def model(char_tokenizer: Any) -> Any:
    return build_model(TINY, len(char_tokenizer), seed=0)


@pytest.fixture
def make(model: Any, char_tokenizer: Any, tmp_path: Path) -> Any:
    def make(**settings: Any) -> PPOTrainer:
        base = {
            "batch_size": 2,
            "mini_batch_size": 2,
            "max_new_tokens": 4,
            "output_dir": str(tmp_path / "run"),
        }
        arguments = {
            "model": model,
            "tokenizer": char_tokenizer,
            "reward_fn": lambda prompts, responses: [0.0] * len(prompts),
        }
        arguments |= {
            name: settings.pop(name) for name in list(settings) if name in {*NOTHING, "eval_prompts"}
        }
        return PPOTrainer(PPOConfig(**{**base, **settings}), **arguments)

    return make


def reward(prompts, responses, metadata=None):  # type: ignore[no-untyped-def]
    return [0.0] * len(prompts)


def test_the_three_constructors_bind_what_they_say(model: Any, char_tokenizer: Any) -> None:
    config, reference = PPOConfig(model_name="owner/name"), copy.deepcopy(model)
    documented = read_arguments(config, (), {**NOTHING, "tokenizer": char_tokenizer, "reward_fn": reward})
    assert (documented.model, documented.tokenizer, documented.reward_fn) == (
        "owner/name",
        char_tokenizer,
        reward,
    )
    positional = read_arguments(config, (model, char_tokenizer), NOTHING)
    assert (positional.model, positional.ref_model, positional.tokenizer) == (model, None, char_tokenizer)
    trl = read_arguments(config, (model, reference, char_tokenizer, ROWS), NOTHING)
    assert (trl.model, trl.ref_model, trl.tokenizer, trl.dataset) == (model, reference, char_tokenizer, ROWS)
    by_name = {"model": model, "ref_model": reference, "tokenizer": char_tokenizer, "dataset": ROWS}
    assert read_arguments(config, (), {**NOTHING, **by_name}) == trl
    without_reference = read_arguments(config, (model, None, char_tokenizer), NOTHING)
    assert without_reference.tokenizer is char_tokenizer and without_reference.ref_model is None
    assert read_arguments(config, (model, char_tokenizer, reward), NOTHING).reward_fn is reward


def test_a_wrong_type_is_an_error_and_no_misbinding(model: Any, char_tokenizer: Any) -> None:
    config = PPOConfig()
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        ({"learning_rate": 1e-5}, (), {}, "config="),
        (model, (config, char_tokenizer), {}, "config="),
        (config, (), {}, "PPOTrainer.model: there is none"),
        (config, (char_tokenizer, model), {}, r"argument 2 should be a model"),
        (config, (model, ROWS), {}, r"argument 3 should be a tokenizer"),
        (config, (model, model, model), {}, r"argument 4 should be a tokenizer"),
        (config, (model, char_tokenizer, 3), {}, r"argument 4 should be a reward function"),
        (config, (model, char_tokenizer, reward, ROWS), {}, "4 arguments after"),
        (config, (model,), {"model": model}, "given twice"),
        (config, (), {"model": 3}, "PPOTrainer.model is int"),
        (config, (), {"model": nn.Linear(2, 2)}, "PPOTrainer.model is Linear"),
        (config, (), {"model": model.get_decoder()}, "PPOTrainer.model is Qwen2Model"),
        (config, (), {"model": model, "tokenizer": "gpt2"}, "PPOTrainer.tokenizer is str"),
        (config, (), {"model": model, "tokenizer": model}, "PPOTrainer.tokenizer is Qwen2"),
        (config, (), {"model": model, "ref_model": char_tokenizer}, "PPOTrainer.ref_model"),
        (config, (), {"model": model, "dataset": "data.csv"}, "PPOTrainer.dataset is str"),
        (config, (), {"model": model, "dataset": iter(ROWS)}, "PPOTrainer.dataset"),
    ]
    for given, positional, named, message in cases:
        with pytest.raises(BadInputError, match=message):
            read_arguments(given, positional, {**NOTHING, **named})


def test_a_ppo_model_and_a_path_are_models(model: Any, tmp_path: Path) -> None:
    wrapped = PPOModel(model)
    assert read_arguments(PPOConfig(), (), {**NOTHING, "model": wrapped}).model is wrapped
    assert read_arguments(PPOConfig(), (), {**NOTHING, "model": tmp_path}).model == str(tmp_path)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one prompt"),
        ("1+1=", "at least one prompt"),
        (["1+1=", "  "], r"prompts\[1\].*empty"),
        (["1+1=", 7], r"prompts\[1\]"),
        (["1+1=", None], r"prompts\[1\]"),
        ([{"text": "1+1="}], "one called prompt"),
        (["1" * 29], r"prompts\[0\].*29 tokens, more than the 28"),
        (["1+hello="], r"does not know"),
        ([[{"role": "user", "content": "1"}]], "chat template"),
    ],
)
def test_prompts_that_cannot_be_used_are_named(make: Any, prompts: Any, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        make().train(prompts, num_iterations=1)


def test_bad_calls_are_refused_before_anything_starts(make: Any, tmp_path: Path) -> None:
    trainer = make()
    query = [torch.tensor([3, 4])]
    calls: list[tuple[Any, str]] = [
        (lambda: trainer.train(["1"], num_iterations=0), "num_iterations=0"),
        (lambda: trainer.train(["1"], metadata=[{}, {}]), "2 entries for 1 prompts"),
        (lambda: trainer.train(["1"], metadata=["x"]), r"metadata\[0\]"),
        (lambda: make(reward_fn=None).train(["1"]), "reward_fn: there is none"),
        (lambda: make(reward_fn=lambda a, b, c: 0.0), "how is it to be called"),
        (lambda: make(eval_prompts=[]), "eval_prompts"),
        (lambda: make(dataset=[{"query": "1+1="}]), "1 rows, less than PPOConfig.batch_size=2"),
        (lambda: make(dataset=[{"text ": "1+1="}] * 2), r"dataset\[0\] has the columns"),
        (lambda: make(mini_batch_size=3, batch_size=4), "mini_batch_size=3"),
        (lambda: make(max_new_tokens=32), "32 positions"),
        (lambda: make(cluster="somewhere:6379", backend="local").train(["1"]), "backend=.local. uses none"),
        (lambda: trainer.dataloader, "dataset: there is none"),
        (lambda: trainer.evaluate(), "no prompts were given"),
        (lambda: trainer.load_checkpoint(tmp_path / "nowhere"), "nowhere"),
        (lambda: trainer.save_checkpoint(), "nothing has been trained"),
        (lambda: trainer.generate([]), "at least one tensor"),
        (lambda: trainer.generate([torch.tensor([])]), r"query_tensors\[0\]"),
        (lambda: trainer.generate([torch.tensor([[3, 4]])]), r"query_tensors\[0\]"),
        (lambda: trainer.generate([torch.tensor([99])]), "token id 99"),
        (lambda: trainer.generate([torch.tensor([3] * 29)]), "29 tokens"),
        (lambda: trainer.step(query, [], [1.0]), "at least one tensor"),
        (lambda: trainer.step(query, [[5]] * 2, [1.0]), "2 responses for 1 queries"),
        (lambda: trainer.step(query, [[5]], [1.0, 2.0]), "2 for 1 responses"),
        (lambda: trainer.step(query, [[5]], [float("nan")]), r"scores\[0\]=nan"),
        (lambda: trainer.step(query, [[5]], torch.tensor([float("inf")])), r"scores\[0\]"),
        (lambda: trainer.step(query, [[5]], ["good"]), r"scores\[0\]='good'"),
        (lambda: trainer.train_step({}), "give prompts, or queries"),
        (lambda: trainer.train_step({"queries": query}), "no responses"),
        (lambda: trainer.log_stats({}, {"query": ["1"]}, [1.0]), "no column 'response'"),
        (lambda: trainer.compute_advantages([1.0], [1.0, 2.0]), "shapes"),
    ]
    for call, message in calls:
        with pytest.raises(BadInputError, match=message):
            call()
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_without_an_end_token_is_refused_and_one_without_pad_is_not(
    make: Any, char_tokenizer: Any
) -> None:
    tokenizer = copy.deepcopy(char_tokenizer)
    tokenizer.pad_token = None
    make(tokenizer=tokenizer)
    tokenizer.eos_token = None
    with pytest.raises(BadInputError, match="no eos token"):
        make(tokenizer=tokenizer)


def test_advantages_are_gae_with_dones_inside(make: Any) -> None:
    trainer = make(gamma=0.5, lam=0.5)
    # δ = r + ½ V' − V: [1 + 1 − 1, 2 + 0 − 2 (done), 3 + 0 − 4]; A = [1 + ¼ · 0, 0, −1]
    advantages, returns = trainer.compute_advantages([1.0, 2.0, 3.0], [1.0, 2.0, 4.0], [False, True, False])
    assert advantages.tolist() == [1.0, 0.0, -1.0]
    assert returns.tolist() == [2.0, 2.0, 3.0]
    # Without the end in the middle: δ₁ = 2 + 2 − 2 = 2, A₁ = 2 − ¼, A₀ = 1 + ¼ A₁
    rows, _ = trainer.compute_advantages(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 2.0, 4.0]]))
    assert rows.tolist() == [[1.0 + 1.75 / 4, 1.75, -1.0]]


@pytest.mark.parametrize(
    ("kind", "expected"), [("kl", [0.5, -2.0]), ("abs", [0.5, 2.0]), ("mse", [0.125, 2.0])]
)
def test_the_kl_penalty_is_the_coefficient_times_the_estimate(
    make: Any, kind: str, expected: list[float]
) -> None:
    trainer = make(kl_penalty=kind, init_kl_coef=0.5)
    penalty = trainer.compute_kl_penalty(torch.tensor([-1.0, -3.0]), torch.tensor([-1.5, -1.0]))
    torch.testing.assert_close(penalty, 0.5 * torch.tensor(expected))


def test_the_full_kl_penalty_is_over_the_whole_vocabulary(make: Any) -> None:
    trainer = make(kl_penalty="full", init_kl_coef=0.5)
    logits = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    policy, reference = (torch.distributions.Categorical(logits=one) for one in logits)
    penalty = trainer.compute_kl_penalty(policy.logits, reference.logits)
    torch.testing.assert_close(penalty, 0.5 * torch.distributions.kl_divergence(policy, reference))


def test_the_dataloader_gives_whole_shuffled_batches_of_lists(make: Any, char_tokenizer: Any) -> None:
    rows = [{"query": f"{i}+1=", "answer": i} for i in range(5)]
    batches = list(make(dataset=rows).dataloader)
    assert [len(batch["query"]) for batch in batches] == [2, 2]
    for batch in batches:
        for ids, text, answer in zip(batch["input_ids"], batch["query"], batch["answer"], strict=True):
            assert ids.tolist() == char_tokenizer(text)["input_ids"]
            assert text == f"{answer}+1="
    again = list(make(dataset=rows).dataloader)
    assert [batch["answer"] for batch in batches] == [batch["answer"] for batch in again]
    from_ids = next(iter(make(dataset=[{"input_ids": [3, 4]}] * 2).dataloader))
    assert from_ids["query"] == [char_tokenizer.decode([3, 4])] * 2
