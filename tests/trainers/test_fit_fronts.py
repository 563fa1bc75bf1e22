"""DPO, ORPO, KTO, SFT and reward training as a library: what each returns, learns, and refuses."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

import rl_cluster
from rl_cluster.config.run import ScratchModel
from rl_cluster.errors import BadInputError
from rl_cluster.modeling.scratch import build_model, build_tokenizer

SCRATCH = ScratchModel(
    hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64, max_positions=16, alphabet="0123456789>"
)
TOKENIZER = build_tokenizer(SCRATCH.alphabet, SCRATCH.max_positions)
NUMBERS = np.random.default_rng(0).permutation(100)
PROMPTS = [f"{number:02d}>" for number in np.repeat(NUMBERS, 3)]
GOOD = [prompt[1] for prompt in PROMPTS]
BAD = [str((int(digit) + 1 + 4 * i % 9) % 10) for i, digit in enumerate(GOOD)]
"""The task: echo the last digit of the prompt; BAD is any other digit."""
TRAIN, HELD_OUT = slice(0, 240), slice(240, 300)
SMALL: dict[str, Any] = {
    "max_length": 8,
    "max_prompt_length": 4,
    "gradient_accumulation_steps": 1,
    "eval_every": 0,
    "save_every": 0,
    "progress": "none",
    "report_to": "none",
    "backend": "local",
    "cpus_per_worker": 1,
}


def model() -> Any:
    return build_model(SCRATCH, len(TOKENIZER), seed=0)


def pairs(part: slice) -> list[dict[str, str]]:
    rows = zip(PROMPTS[part], GOOD[part], BAD[part], strict=True)
    return [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in rows]


def dataset(part: slice) -> rl_cluster.PreferenceDataset:
    return rl_cluster.PreferenceDataset(
        PROMPTS[part], GOOD[part], BAD[part], TOKENIZER, max_length=8, max_prompt_length=4
    )


def preference(trained: Any, part: slice) -> float:
    """Share of pairs whose chosen answer is the likelier, by a plain forward pass of transformers."""
    wins = 0
    with torch.no_grad():
        for row in pairs(part):
            ids = torch.tensor([TOKENIZER(row["prompt"])["input_ids"]])
            logits = trained(ids).logits[0, -1]
            good, bad = (TOKENIZER(row[side])["input_ids"][0] for side in ("chosen", "rejected"))
            wins += bool(logits[good] > logits[bad])
    return wins / len(pairs(part))


def test_dpo_learns_pairs_and_the_callers_model_holds_the_result(tmp_path: Path) -> None:
    own = model()
    config = rl_cluster.DPOConfig(
        learning_rate=1e-2, batch_size=16, num_epochs=16, output_dir=str(tmp_path / "run"), **SMALL
    )
    trainer = rl_cluster.DPOTrainer(config, own, TOKENIZER)
    history = trainer.train(dataset(TRAIN), eval_dataset=dataset(HELD_OUT))
    assert len(history["loss"]) == 16 * 15
    assert history["loss"][0] == pytest.approx(np.log(2), abs=1e-5)
    assert np.mean(history["accuracy"][-15:]) >= 0.9
    assert history.eval["eval/accuracy"] >= 0.9
    assert preference(own, HELD_OUT) >= 0.9
    assert trainer.model is history.model is own
    margin = np.array(history["chosen_rewards"]) - np.array(history["rejected_rewards"])
    assert np.allclose(history["reward_margin"], margin)

    evaluated = trainer.evaluate(dataset(HELD_OUT))
    assert evaluated["eval_loss"] == pytest.approx(history.eval["eval/loss"], abs=1e-5)
    assert set(evaluated) == {"eval_loss", "eval_accuracy", "eval_margin"}


def test_rows_lists_and_data_sets_of_the_same_pairs_train_the_same_model(tmp_path: Path) -> None:
    def config(name: str) -> rl_cluster.DPOConfig:
        return rl_cluster.DPOConfig(
            learning_rate=1e-3, batch_size=80, output_dir=str(tmp_path / name), **SMALL
        )

    by_lists = rl_cluster.DPOTrainer(config("lists"), model(), TOKENIZER)
    trained = by_lists.train_on_preferences(PROMPTS[TRAIN], GOOD[TRAIN], BAD[TRAIN])
    by_rows = rl_cluster.DPOTrainer(config("rows"), model(), TOKENIZER).train_on_preferences(pairs(TRAIN))
    by_set = rl_cluster.DPOTrainer(config("set"), model(), TOKENIZER).train(dataset(TRAIN)).model
    for name, weight in trained.state_dict().items():
        assert torch.equal(weight, by_rows.state_dict()[name])
        assert torch.equal(weight, by_set.state_dict()[name])


def test_the_reference_that_is_given_is_the_one_compared_with(tmp_path: Path) -> None:
    """With the policy as reference the first loss is log 2; with another model it is not."""
    other = copy.deepcopy(model())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter, generator=None))
    config = rl_cluster.DPOConfig(batch_size=240, output_dir=str(tmp_path / "run"), **SMALL)
    trainer = rl_cluster.DPOTrainer(config, model(), TOKENIZER, ref_model=other)
    assert abs(trainer.train(dataset(TRAIN))["loss"][0] - np.log(2)) > 1e-3


def test_a_reference_free_run_has_no_reference_pass(tmp_path: Path) -> None:
    """loss = −log σ(β (log π(chosen) − log π(rejected))) of a plain forward pass."""
    own = model()
    rows = pairs(slice(0, 4))
    with torch.no_grad():
        deltas = []
        for row in rows:
            sums = []
            for side in ("chosen", "rejected"):
                prompt = TOKENIZER(row["prompt"])["input_ids"]
                ids = [*prompt, *TOKENIZER(row[side])["input_ids"], TOKENIZER.eos_token_id]
                logprobs = own(torch.tensor([ids])).logits[0].log_softmax(-1)
                sums.append(sum(logprobs[t - 1, ids[t]] for t in range(len(prompt), len(ids))))
            deltas.append(sums[0] - sums[1])
        expected = -torch.nn.functional.logsigmoid(0.3 * torch.stack(deltas)).mean().item()
    config = rl_cluster.DPOConfig(
        reference_free=True, beta=0.3, batch_size=4, output_dir=str(tmp_path / "run"), **SMALL
    )
    history = rl_cluster.DPOTrainer(config, own, TOKENIZER).train(rows)
    assert history["loss"][0] == pytest.approx(expected, abs=1e-5)
    assert not (tmp_path / "run" / "reference.npz").exists()


def test_orpo_and_kto_learn_the_same_task(tmp_path: Path) -> None:
    own = model()
    config = rl_cluster.ORPOConfig(
        learning_rate=1e-2, batch_size=16, num_epochs=10, output_dir=str(tmp_path / "orpo"), **SMALL
    )
    history = rl_cluster.ORPOTrainer(config, own, TOKENIZER).train(pairs(TRAIN))
    assert history["nll"][-1] < history["nll"][0]
    assert preference(own, HELD_OUT) >= 0.8

    own = model()
    rows = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in pairs(TRAIN)
        for side in ("chosen", "rejected")
    ]
    kto = rl_cluster.KTOConfig(
        learning_rate=1e-2, batch_size=32, num_epochs=10, output_dir=str(tmp_path / "kto"), **SMALL
    )
    history = rl_cluster.KTOTrainer(kto, own, TOKENIZER).train(rows)
    assert history["reward_margin"][-1] > 0.5
    assert preference(own, HELD_OUT) >= 0.8


def test_sft_imitates_and_then_greedy_answers_are_right(tmp_path: Path) -> None:
    own = model()
    rows = [{"prompt": p, "completion": g} for p, g in zip(PROMPTS[TRAIN], GOOD[TRAIN], strict=True)]
    config = rl_cluster.SFTConfig(
        learning_rate=1e-2, batch_size=16, num_epochs=10, output_dir=str(tmp_path / "sft"), **SMALL
    )
    trainer = rl_cluster.SFTTrainer(config, own, TOKENIZER)
    before = trainer.evaluate(rows)["eval_loss"]
    history = trainer.train(rows)
    assert before > 1.5
    assert trainer.evaluate(rows)["eval_loss"] < 0.1 < history["loss"][0]
    trainer.save_model(tmp_path / "saved")
    saved = type(own).from_pretrained(tmp_path / "saved")
    for prompt, good in zip(PROMPTS[HELD_OUT], GOOD[HELD_OUT], strict=True):
        with torch.no_grad():
            answer = saved(torch.tensor([TOKENIZER(prompt)["input_ids"]])).logits[0, -1].argmax()
        assert TOKENIZER.decode([answer]) == good


def test_the_reward_trainer_gives_a_classifier_that_ranks_held_out_pairs(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [
        {"prompt": f"{n:03d}>", "chosen": str(n % 10), "rejected": str((n + step) % 10)}
        for n in rng.permutation(1000)[:360].tolist()
        for step in rng.permutation(np.arange(1, 10))[:3].tolist()
    ]
    train, held_out = rows[:900], rows[900:]
    scratch = SCRATCH.model_copy(update={"hidden_size": 64, "intermediate_size": 128})
    settings = SMALL | {"max_prompt_length": 5, "learning_rate": 3e-3, "batch_size": 32, "num_epochs": 12}
    config = rl_cluster.RewardConfig(output_dir=str(tmp_path / "rm"), **settings)
    trainer = rl_cluster.RewardTrainer(config, build_model(scratch, len(TOKENIZER), seed=0), TOKENIZER)
    history = trainer.train(train, eval_dataset=held_out)
    assert history.eval["eval/accuracy"] >= 0.95
    assert trainer.evaluate(held_out)["eval_accuracy"] == history.eval["eval/accuracy"]
    assert type(trainer.model).__name__.endswith("ForSequenceClassification")

    def score(text: str) -> float:
        ids = [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]
        with torch.no_grad():
            return trainer.model(torch.tensor([ids])).logits.item()

    wins = [score(row["prompt"] + row["chosen"]) > score(row["prompt"] + row["rejected"]) for row in held_out]
    assert np.mean(wins) == pytest.approx(history.eval["eval/accuracy"])


class Recorder(TrainerCallback):
    def __init__(self, stop_at: int) -> None:
        self.stop_at = stop_at
        self.logged: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.stop_at

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "train/loss" in logs:
            self.logged.append(logs["train/loss"])


def test_callbacks_are_told_of_every_step_and_may_end_the_training(tmp_path: Path) -> None:
    recorder = Recorder(stop_at=3)
    config = rl_cluster.DPOConfig(batch_size=48, output_dir=str(tmp_path / "run"), **SMALL)
    trainer = rl_cluster.DPOTrainer(config, model(), TOKENIZER, callbacks=[recorder])
    assert trainer.train(dataset(TRAIN))["loss"] == recorder.logged
    assert len(recorder.logged) == 3


def test_a_resumed_training_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    def config(name: str) -> rl_cluster.DPOConfig:
        settings = SMALL | {"save_every": 2, "learning_rate": 1e-3, "batch_size": 48, "num_epochs": 1}
        return rl_cluster.DPOConfig(output_dir=str(tmp_path / name), **settings)

    whole = rl_cluster.DPOTrainer(config("whole"), model(), TOKENIZER).train(dataset(TRAIN)).model
    stopped = rl_cluster.DPOTrainer(config("part"), model(), TOKENIZER, callbacks=[Recorder(2)])
    stopped.train(dataset(TRAIN))
    resumed = rl_cluster.DPOTrainer(config("part"), model(), TOKENIZER)
    after = resumed.train(dataset(TRAIN), resume_from_checkpoint=tmp_path / "part").model
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, after.state_dict()[name])
    changed = config("part")
    changed.beta = 0.7
    with pytest.raises(BadInputError, match=r"objective\.beta is 0\.7 and was 0\.1"):
        rl_cluster.DPOTrainer(changed, model(), TOKENIZER).train(
            dataset(TRAIN), resume_from_checkpoint=tmp_path / "part"
        )


def test_training_works_where_an_event_loop_runs_already(tmp_path: Path) -> None:
    async def notebook() -> Any:
        config = rl_cluster.DPOConfig(batch_size=240, output_dir=str(tmp_path / "run"), **SMALL)
        return rl_cluster.DPOTrainer(config, model(), TOKENIZER).train(dataset(TRAIN))

    assert len(asyncio.run(notebook())["loss"]) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda c: rl_cluster.DPOTrainer(c, tokenizer=TOKENIZER), "there is no model"),
        (lambda c: rl_cluster.DPOTrainer(c, 7, TOKENIZER), "model is int 7"),
        (lambda c: rl_cluster.DPOTrainer(c, model()), "tokenizer: there is none"),
        (lambda c: rl_cluster.DPOTrainer(c, model(), "gpt2"), "tokenizer is str"),
        (
            lambda c: rl_cluster.DPOTrainer(c, TOKENIZER, model()),
            "model is Qwen2Tokenizer",
        ),
        (lambda c: rl_cluster.DPOTrainer(model(), c, TOKENIZER), "give a DPOConfig"),
        (lambda c: rl_cluster.DPOTrainer(c, model(), TOKENIZER, ref_model=3), "ref_model is int 3"),
        (lambda c: rl_cluster.ORPOTrainer(c, model(), TOKENIZER), "give an ORPOConfig"),
    ],
)
def test_wrong_arguments_are_named(make: Any, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        make(rl_cluster.DPOConfig(**SMALL))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "is empty"),
        ([{"prompt": "1>", "chosen": "1"}], "no 'rejected'"),
        ([{"prompt": "", "chosen": "1", "rejected": "2"}], "row 1"),
        ([{"prompt": "1>", "chosen": "1", "rejected": "1"}], "are the same"),
        ([{"prompt": "1>", "chosen": "x", "rejected": "1"}], "does not know 'x'"),
        (
            {"prompts": ["1>", "2>"], "chosen": ["1"], "rejected": ["2", "3"]},
            "2 prompts, 1 chosen, 2 rejected",
        ),
        ("some text", "is str 'some text'"),
    ],
)
def test_bad_pairs_are_refused_before_a_run_folder_is_made(tmp_path: Path, data: Any, message: str) -> None:
    config = rl_cluster.DPOConfig(output_dir=str(tmp_path / "run"), **SMALL)
    trainer = rl_cluster.DPOTrainer(config, model(), TOKENIZER)
    with pytest.raises(BadInputError, match=message):
        trainer.train(data)
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("beta", 0.0, "DPOConfig.beta=0.0"),
        ("label_smoothing", 0.5, "must be below 0.5"),
        ("batch_size", 0, "DPOConfig.batch_size=0"),
        ("learning_rate", float("nan"), "DPOConfig.learning_rate=nan"),
        ("warmup_ratio", 1.0, "must be below 1"),
        ("max_prompt_length", 8, "must be below max_length"),
        ("loss_type", "kto", "loss_type='kto'"),
        ("device", "tpu", "device='tpu'"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, field: str, value: Any, message: str) -> None:
    settings = SMALL | {"output_dir": str(tmp_path / "run"), field: value}
    with pytest.raises(BadInputError, match=message):
        rl_cluster.DPOTrainer(rl_cluster.DPOConfig(**settings), model(), TOKENIZER).train(dataset(TRAIN))
