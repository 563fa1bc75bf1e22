"""PPOTrainer in one process: it learns, its calls go on from each other, and its tensors are right.

One small model, one thread; the trainers that only look are shared.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2ForSequenceClassification, TrainerCallback

from rl_cluster.config.run import ScratchModel
from rl_cluster.environments import TextGenerationEnv
from rl_cluster.errors import BadInputError, ScorerError
from rl_cluster.modeling.scratch import build_model, build_tokenizer
from rl_cluster.trainers.ppo.buffer import PPOBuffer
from rl_cluster.trainers.ppo.config import PPOConfig
from rl_cluster.trainers.ppo.model import PPOModel
from rl_cluster.trainers.ppo.trainer import PPOTrainer

ALPHABET = "0123="
SMALL = ScratchModel(
    alphabet=ALPHABET, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64, max_positions=32
)
PROMPTS = [f"{first}{last}=" for first in "0123" for last in "0123"]
BASE: dict[str, Any] = {
    "learning_rate": 3e-3,
    "batch_size": 16,
    "mini_batch_size": 8,
    "ppo_epochs": 2,
    "max_new_tokens": 2,
    "temperature": 1.0,
    "kl_penalty_coef": 0.001,
    "value_clip": 1.0,
    "save_every": 0,
    "device": "cpu",
    "backend": "local",
    "progress": "none",
    "settings": {"cluster.cpus_per_worker": 1},
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(ALPHABET, 32)


def new_model(tokenizer: Any, seed: int = 0) -> Any:
    return build_model(SMALL, len(tokenizer), seed)


def echo(prompts, responses, metadata=None):  # type: ignore[no-untyped-def]
    """1 where the response begins with the prompt's last digit."""
    return [float(r[:1] == p[1]) for p, r in zip(prompts, responses, strict=True)]


def settings(folder: Path, **changed: Any) -> PPOConfig:
    return PPOConfig(**{**BASE, "output_dir": str(folder), **changed})


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def trainer(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PPOTrainer]:
    folder = tmp_path_factory.mktemp("ppo") / "run"
    with PPOTrainer(settings(folder), new_model(tokenizer), tokenizer, echo) as made:
        yield made


def test_it_learns_a_reward_that_depends_on_the_prompt(tokenizer: Any, tmp_path: Path) -> None:
    model = new_model(tokenizer)
    start = weights(model)
    config = settings(tmp_path / "run", batch_size=64, mini_batch_size=32, num_iterations=30)
    with PPOTrainer(config, model, tokenizer, echo, eval_prompts=PROMPTS) as trainer:
        history = trainer.train(PROMPTS)
        assert {len(column) for column in history.values()} == {30}
        first, last = np.mean(history["rewards"][:3]), np.mean(history["rewards"][-3:])
        assert first < 0.4 and last > 0.7
        assert trainer.evaluate()["eval/score_mean"] > 0.7
        assert history.model is model
    assert not same(weights(model), start)
    # The model object itself answers now: greedily, by transformers' own forward pass.
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        answers.append(tokenizer.decode(model(ids).logits[0, -1].argmax()) == prompt[1])
    assert np.mean(answers) > 0.8


def test_a_second_call_goes_on_where_the_first_ended(tokenizer: Any, tmp_path: Path) -> None:
    once, twice = new_model(tokenizer), new_model(tokenizer)
    with PPOTrainer(settings(tmp_path / "once"), once, tokenizer, echo) as trainer:
        whole = trainer.train(PROMPTS, num_iterations=4)
    with PPOTrainer(settings(tmp_path / "twice"), twice, tokenizer, echo) as trainer:
        parts = [trainer.train(PROMPTS, num_iterations=2) for _ in range(2)]
    assert same(weights(once), weights(twice))
    for name, column in whole.items():
        assert column == parts[0][name] + parts[1][name]


def test_a_checkpoint_is_gone_on_from_bit_for_bit(tokenizer: Any, tmp_path: Path) -> None:
    first = new_model(tokenizer)
    with PPOTrainer(settings(tmp_path / "first", save_every=2), first, tokenizer, echo) as trainer:
        trainer.train(PROMPTS, num_iterations=2)
        saved, coef = weights(first), trainer.kl_coef
        trainer.save_checkpoint(tmp_path / "mine")
        history = trainer.train(PROMPTS, num_iterations=2)
        trainer.load_checkpoint(tmp_path / "mine")
        assert same(weights(trainer.model), saved) and trainer.kl_coef == coef
    second = new_model(tokenizer, seed=5)
    with PPOTrainer(settings(tmp_path / "second"), second, tokenizer, echo) as trainer:
        trainer.load_checkpoint(tmp_path / "first" / "checkpoints" / "step-2")
        again = trainer.train(PROMPTS, num_iterations=2)
    # The second trainer's reference is another model, so its penalty differs; what was drawn does not.
    assert again["rewards"] == history["rewards"][:1] + again["rewards"][1:]
    with PPOTrainer(settings(tmp_path / "third"), new_model(tokenizer), tokenizer, echo) as trainer:
        trainer.load_checkpoint(tmp_path / "first")
        trainer.train(PROMPTS, num_iterations=1)
        assert json.loads((tmp_path / "third" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 5


def test_metadata_reaches_the_reward(tokenizer: Any, tmp_path: Path) -> None:
    seen: list[tuple[str, Any]] = []

    def reward(prompts, responses, metadata=None):  # type: ignore[no-untyped-def]
        seen.extend((p, m["answer"]) for p, m in zip(prompts, metadata, strict=True))
        return [0.0] * len(prompts)

    rows = [{"prompt": prompt, "answer": int(prompt[1])} for prompt in PROMPTS]
    with PPOTrainer(settings(tmp_path / "run"), new_model(tokenizer), tokenizer, reward) as trainer:
        trainer.train(rows, num_iterations=1)
        seen.clear()
        trainer.train_step({"prompts": ["13=", "22="], "metadata": [{"answer": "x"}, {"answer": "y"}]})
    assert seen == [("13=", "x"), ("22=", "y")]


def test_a_reward_that_fails_stops_the_run_by_name(tokenizer: Any, tmp_path: Path) -> None:
    def reward(prompts, responses):  # type: ignore[no-untyped-def]
        return [float("nan")] * len(prompts)

    with (
        PPOTrainer(settings(tmp_path / "nan"), new_model(tokenizer), tokenizer, reward) as trainer,
        pytest.raises(ScorerError, match="nan"),
    ):
        trainer.train(PROMPTS, num_iterations=1)


def test_it_trains_in_an_environment_that_may_change_between_calls(tokenizer: Any, tmp_path: Path) -> None:
    def reward(prompt, generated, full_text):  # type: ignore[no-untyped-def]
        return float(generated[:1] == prompt[1])

    env = TextGenerationEnv(
        tokenizer, ["00=", "11="], max_length=2, reward_fn=reward, prompt_levels={"hard": ["23=", "32="]}
    )
    model = new_model(tokenizer)
    with PPOTrainer(settings(tmp_path / "run"), model, tokenizer) as trainer:
        assert trainer.train(env, num_iterations=1).model is model
        env.set_difficulty("hard")
        history = trainer.train(env, num_iterations=1)
        assert 0.0 <= history["rewards"][0] <= 1.0
        with pytest.raises(BadInputError, match="has begun with an environment"):
            trainer.train(["00="], num_iterations=1)


def test_trls_loop_trains_on_what_the_caller_scores(tokenizer: Any, tmp_path: Path) -> None:
    model = new_model(tokenizer)
    config = settings(tmp_path / "run", kl_penalty="kl", adap_kl_ctrl=True, batch_size=8)
    rows = [{"query": prompt} for prompt in PROMPTS]
    rewards = []
    with PPOTrainer(config=config, model=model, ref_model=None, tokenizer=tokenizer, dataset=rows) as trainer:
        for _ in range(2):
            for batch in trainer.dataloader:
                queries = batch["input_ids"]
                responses = trainer.generate(queries, do_sample=True, top_k=0.0, top_p=1.0, max_new_tokens=2)
                batch["response"] = tokenizer.batch_decode(responses)
                scores = torch.tensor(echo(batch["query"], batch["response"]))
                before = weights(model)
                stats = trainer.step(queries, responses, scores)
                assert not same(weights(model), before)
                trainer.log_stats(stats, batch, scores)
                rewards.append(stats["ppo/mean_scores"])
                assert stats["ppo/mean_scores"] == pytest.approx(scores.mean().item())
                assert stats["objective/kl"] is not None
                assert stats["health/logprob_gap_mean"] < 1e-4  # type: ignore[operator]
    assert len(rewards) == 4
    samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert len(samples) == 4 * 8 and json.loads(samples[0])["query"] in PROMPTS


def test_a_response_of_the_callers_own_is_trained_towards_its_score(
    trainer: PPOTrainer, tokenizer: Any
) -> None:
    query, good, bad = (torch.tensor(tokenizer(text)["input_ids"]) for text in ("12=", "3", "0"))

    def logprobs() -> torch.Tensor:
        with torch.no_grad():
            logits = trainer.model(query[None]).logits[0, -1].log_softmax(-1)
        return logits[torch.tensor([good.item(), bad.item()])]

    before = logprobs()
    stats = trainer.step([query, query], [good, bad], [1.0, -1.0])
    after = logprobs()
    assert after[0] > before[0] and after[1] < before[1]
    # With what probability the caller drew them is not known, so there is no gap to speak of.
    assert stats["health/logprob_gap_mean"] is None
    buffer = PPOBuffer()
    buffer.add([query], [good], [1.0])
    assert trainer.train_step(buffer.get())["rewards"] == 1.0


def test_truncated_samples_are_not_trained_on(trainer: PPOTrainer, tokenizer: Any) -> None:
    queries = [torch.tensor(tokenizer("12=")["input_ids"])]
    for kwargs in ({"top_p": 0.5}, {"top_k": 2}, {"temperature": 0.5}, {"do_sample": False}):
        responses = trainer.generate(queries, max_new_tokens=2, **kwargs)
        with pytest.raises(BadInputError, match="ratios need the whole distribution"):
            trainer.step(queries, responses, [1.0])


def test_generate_is_greedy_without_sampling_and_understands_its_arguments(
    trainer: PPOTrainer, tokenizer: Any
) -> None:
    query = torch.tensor(tokenizer("12=")["input_ids"])
    greedy = trainer.generate(query, do_sample=False, max_new_tokens=1)
    with torch.no_grad():
        expected = trainer.model(query[None]).logits[0, -1].argmax()
    assert isinstance(greedy, torch.Tensor) and greedy.tolist() == [expected.item()]
    whole = trainer.generate([query, query[:1]], do_sample=False, max_new_tokens=1, return_prompt=True)
    assert whole[0].tolist() == [*query.tolist(), expected.item()] and len(whole[1]) == 2
    stopped = trainer.generate([query] * 8, max_new_tokens=2, eos_token_id=list(range(len(tokenizer))))
    assert [len(row) for row in stopped] == [1] * 8
    refused = (
        {"num_beams": 2},
        {"min_length": 5},
        {"max_new_tokens": 0},
        {"top_p": 0.0},
        {"eos_token_id": -1},
    )
    for kwargs in (*refused, {"max_new_tokens": 100}):
        with pytest.raises(BadInputError, match=next(iter(kwargs))):
            trainer.generate(query, **kwargs)


def test_generate_responses_gives_texts_and_tensors(trainer: PPOTrainer, tokenizer: Any) -> None:
    texts, outputs = trainer.generate_responses(["1=", "123="], max_new_tokens=2)
    for i, text in enumerate(texts):
        ids, response = outputs["prompt_ids"][i], outputs["response_ids"][i]
        assert tokenizer.decode(response, skip_special_tokens=True) == text
        whole = outputs["sequences"][i]
        assert whole[: len(ids) + len(response)].tolist() == [*ids.tolist(), *response.tolist()]
        assert set(whole[len(ids) + len(response) :].tolist()) <= {tokenizer.pad_token_id}


def test_a_change_after_the_start_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    config = settings(tmp_path / "run")
    config.clip_param = 0.3
    with PPOTrainer(config, new_model(tokenizer), tokenizer, echo) as trainer:
        trainer.train(PROMPTS, num_iterations=1)
        assert "clip_low: 0.3" in (tmp_path / "run" / "config.yaml").read_text()
        config.entropy_coef = 0.02
        with pytest.raises(BadInputError, match=r"PPOConfig\.entropy_coef: was changed"):
            trainer.train(PROMPTS, num_iterations=1)


@pytest.mark.parametrize("penalty", ["kl", "full"])
def test_a_reference_of_ones_own_is_what_the_kl_is_measured_against(
    penalty: str, tokenizer: Any, tmp_path: Path
) -> None:
    first_kl = []
    for name, reference in (("own", None), ("other", new_model(tokenizer, seed=9))):
        model = new_model(tokenizer)
        given = copy.deepcopy(reference)
        with PPOTrainer(
            settings(tmp_path / name, kl_penalty=penalty), model, reference, tokenizer, reward_fn=echo
        ) as trainer:
            first_kl.append(trainer.train(PROMPTS, num_iterations=1)["kl_divergence"][0])
            assert trainer.ref_model is reference
        if given is not None:
            assert same(weights(given), weights(reference))  # untouched
    assert first_kl[0] == pytest.approx(0.0, abs=1e-5) and abs(first_kl[1]) > 1e-3


def test_a_value_head_travels_to_the_learner_and_back(tokenizer: Any, tmp_path: Path) -> None:
    ppo = PPOModel(new_model(tokenizer))
    with torch.no_grad():
        ppo.value_head.scalar.bias.fill_(5.0)
    config = settings(tmp_path / "run", critic_warmup_steps=1, num_iterations=2, learning_rate=1e-3)
    start = weights(ppo.base_model)
    with PPOTrainer(config, ppo, tokenizer, lambda prompts, responses: [0.0] * len(prompts)) as trainer:
        history = trainer.train(PROMPTS, num_iterations=1)
        # Values 5, rewards 0: k tokens before the end the target is 5 − 5 · 0.95^k, the loss ½ (5 · 0.95^k)².
        # The head that was given is the one that learns, and four updates of 1e-3 hardly move it.
        assert 12.5 * 0.95**2 - 0.2 < history["value_loss"][0] < 12.5
        assert history["policy_loss"] == [None]
        after = trainer.train(PROMPTS, num_iterations=1)
        assert np.isfinite(after["policy_loss"][0])
        trainer.save_model(tmp_path / "saved")
    assert 4.98 < ppo.value_head.scalar.bias.item() < 5.0
    trained, saved = weights(ppo.base_model), load_file(tmp_path / "saved" / "model.safetensors")
    head = load_file(tmp_path / "saved" / "value_head.safetensors")
    assert all(torch.equal(trained[name], saved[name]) for name in saved)
    assert all(torch.equal(ppo.value_head.state_dict()[name], head[name]) for name in head)
    moved = [float((trained[name] - start[name]).abs().max()) for name in start]
    assert min(moved) > 1e-4 and max(moved) < 1e-2


def test_gradient_checkpointing_of_the_model_is_honoured(tokenizer: Any, tmp_path: Path) -> None:
    model = new_model(tokenizer)
    model.gradient_checkpointing_enable()
    with PPOTrainer(settings(tmp_path / "run"), model, tokenizer, echo) as trainer:
        trainer.train(PROMPTS, num_iterations=1)
    assert "gradient_checkpointing: true" in (tmp_path / "run" / "config.yaml").read_text()


class StopAtTwo(TrainerCallback):
    """Counts, and wishes for the end after the second iteration."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.logged: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(state.global_step)
        control.should_training_stop = len(self.steps) == 2

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.logged.append(logs["objective/scores"])


def test_callbacks_of_transformers_are_heard(tokenizer: Any, tmp_path: Path) -> None:
    callback = StopAtTwo()
    with PPOTrainer(
        settings(tmp_path / "run"), new_model(tokenizer), tokenizer, echo, callbacks=[callback]
    ) as trainer:
        history = trainer.train(PROMPTS, num_iterations=5)
    # An iteration is 2 epochs × 2 mini-batches of updates, and a global step is an update.
    assert callback.steps == [4, 8]
    assert history["rewards"] == callback.logged and len(callback.logged) == 2


def test_a_classifier_of_transformers_scores_by_its_logit(tokenizer: Any, tmp_path: Path) -> None:
    config = new_model(tokenizer).config
    config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
    torch.manual_seed(0)
    classifier = Qwen2ForSequenceClassification(config)
    with torch.no_grad():
        # The hidden state of every text is the same, so every score is: 2 × the sum of 32 normed entries.
        for parameter in classifier.model.parameters():
            parameter.zero_()
        classifier.model.norm.weight.fill_(1.0)
        classifier.model.embed_tokens.weight.fill_(1.0)
        classifier.score.weight.fill_(2.0)
    with PPOTrainer(settings(tmp_path / "run"), new_model(tokenizer), tokenizer, classifier) as trainer:
        assert trainer.train(PROMPTS, num_iterations=1)["rewards"] == [pytest.approx(64.0, rel=1e-4)]
