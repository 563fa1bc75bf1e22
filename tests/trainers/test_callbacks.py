"""TrainerCallbacks on the loop's hooks: what they see, what they ask for, on workers without any engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from rl_cluster.config import RunConfig
from rl_cluster.data.stream import PromptStream
from rl_cluster.errors import BadInputError
from rl_cluster.loop.dispatch import RolloutPool
from rl_cluster.loop.evaluation import Evaluator
from rl_cluster.loop.hooks import Wishes
from rl_cluster.loop.loop import TrainingLoop, Workers
from rl_cluster.loop.producer import Scoring
from rl_cluster.rewards.failures import FailurePolicy
from rl_cluster.trainers.callbacks import CallbackHooks, best_metric_name, evaluation_metrics
from rl_cluster.trajectory import SamplingSpec
from tests.fakes import (
    CountingScorer,
    FakeLearner,
    FakePublisher,
    FakeRolloutWorker,
    RecordingObserver,
    make_prompts,
)


class Diary(TrainerCallback):
    """Writes down every event with the global step."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.logs: list[dict[str, float]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.events.append((name, state.global_step))
            if "logs" in kwargs:
                self.logs.append(kwargs["logs"])

        return note


class At(TrainerCallback):
    """Sets a switch of the control at a step."""

    def __init__(self, event: str, step: int, switch: str) -> None:
        def act(args: Any, state: Any, control: Any, **_: Any) -> Any:
            if state.global_step == step:
                setattr(control, switch, True)
            return control

        setattr(self, event, act)


def arguments(tmp_path: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True, **options)


def run_loop(
    hooks: CallbackHooks, folder: Path, steps: int = 4, eval_every: int = 0, scorer: Any = None
) -> Any:
    config = RunConfig.model_validate(
        {
            "run": {"steps": steps},
            "model": {"path": "unused"},
            "data": {"train": {"source": "addition"}},
            "rewards": {"scorers": ({"kind": "exact_match"},)},
            "batch": {"prompts_per_step": 4, "samples_per_prompt": 4},
            "eval": {"every": eval_every},
            "log": {"trajectories": False},
            "checkpoint": {"minutes": 0},
        }
    )
    workers, learner, observer = [FakeRolloutWorker()], FakeLearner(), RecordingObserver()
    pool = RolloutPool(workers, 60.0)
    scoring = Scoring([scorer or CountingScorer()], FailurePolicy.from_config(config.rewards))
    prompts = make_prompts(8)
    loop = TrainingLoop(
        config,
        Workers(pool, scoring, learner, FakePublisher(learner, workers)),
        PromptStream(prompts, seed=0),
        Evaluator(prompts[:2], SamplingSpec(1.0, 3), config.eval, 0, pool, scoring) if eval_every else None,
        observer,
        folder,
        hooks=(hooks,),
    )
    asyncio.run(loop.run())
    return observer


def test_callbacks_hear_every_event_of_a_run_in_the_order_of_transformers(tmp_path: Path) -> None:
    diary = Diary()
    hooks = CallbackHooks(arguments(tmp_path, logging_steps=3), [diary], steps_per_epoch=2)
    run_loop(hooks, tmp_path)
    assert diary.events == [
        ("on_init_end", 0),
        ("on_train_begin", 0),
        ("on_epoch_begin", 0),
        ("on_step_begin", 0),
        ("on_step_end", 1),
        ("on_step_begin", 1),
        ("on_step_end", 2),
        ("on_epoch_end", 2),
        ("on_epoch_begin", 2),
        ("on_step_begin", 2),
        ("on_step_end", 3),
        ("on_log", 3),
        ("on_step_begin", 3),
        ("on_step_end", 4),
        ("on_log", 4),
        ("on_epoch_end", 4),
        ("on_train_end", 4),
    ]


def test_the_log_history_holds_the_steps_metrics_with_step_and_epoch(tmp_path: Path) -> None:
    hooks = CallbackHooks(arguments(tmp_path, logging_steps=2), steps_per_epoch=2)
    observer = run_loop(hooks, tmp_path)
    first, last = hooks.state.log_history
    assert (first["step"], first["epoch"], last["step"], last["epoch"]) == (2, 1.0, 4, 2.0)
    assert first["objective/scores"] == observer.rows[2]["objective/scores"]
    assert "val/clipfrac_avg" not in first, "a metric that does not apply is left out, not 0"
    assert (hooks.state.max_steps, hooks.state.num_train_epochs) == (4, 2)


@pytest.mark.parametrize(
    ("options", "logged"),
    [
        ({"logging_steps": 10}, [4]),
        ({"logging_steps": 10, "logging_first_step": True}, [1, 4]),
        ({"logging_strategy": "epoch"}, [2, 4]),
        ({"logging_strategy": "no"}, []),
        ({"logging_steps": 0.5}, [2, 4]),
    ],
)
def test_logging_follows_the_arguments(tmp_path: Path, options: dict[str, Any], logged: list[int]) -> None:
    hooks = CallbackHooks(arguments(tmp_path, **options), steps_per_epoch=2)
    hooks.on_begin(0, 4, tmp_path)
    for step in range(1, 5):
        hooks.on_step(step, {"loss": 1.0})
    assert [row["step"] for row in hooks.state.log_history] == logged


def test_a_global_step_is_an_optimizer_update(tmp_path: Path) -> None:
    hooks = CallbackHooks(arguments(tmp_path, logging_steps=5), updates_per_step=3)
    hooks.on_begin(0, 4, tmp_path)
    assert hooks.state.max_steps == 12
    for step in range(1, 5):
        hooks.on_step(step, {"loss": 1.0})
    assert [row["step"] for row in hooks.state.log_history] == [6, 12]


def test_a_callback_may_stop_the_run(tmp_path: Path) -> None:
    hooks = CallbackHooks(arguments(tmp_path), [At("on_step_end", 2, "should_training_stop")])
    observer = run_loop(hooks, tmp_path)
    assert sorted(observer.rows) == [1, 2]


def test_a_callback_may_ask_for_a_log_a_checkpoint_and_an_evaluation(tmp_path: Path) -> None:
    diary = Diary()
    switches = [At("on_step_end", step, name) for step, name in ((1, "should_log"), (2, "should_save"))]
    hooks = CallbackHooks(
        arguments(tmp_path), [*switches, At("on_step_end", 3, "should_evaluate"), diary], steps_per_epoch=100
    )
    run_loop(hooks, tmp_path, eval_every=100)
    events = [event for event in diary.events if event[0] in ("on_log", "on_save", "on_evaluate")]
    assert events == [
        ("on_log", 0),
        ("on_evaluate", 0),
        ("on_log", 1),
        ("on_save", 2),
        ("on_log", 3),
        ("on_evaluate", 3),
        ("on_log", 4),
        ("on_log", 4),
        ("on_evaluate", 4),
    ]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-2"]


def test_early_stopping_ends_a_run_whose_score_no_longer_rises(tmp_path: Path) -> None:
    args = arguments(
        tmp_path, eval_strategy="steps", eval_steps=1, metric_for_best_model="reward", greater_is_better=True
    )
    hooks = CallbackHooks(args, [EarlyStoppingCallback(early_stopping_patience=2)])
    hooks.on_begin(0, 10, tmp_path)
    scores = [0.1, 0.5, 0.4, 0.5, 0.3]
    wishes = [hooks.on_evaluate(step, {"eval/score_mean": value}) for step, value in enumerate(scores)]
    assert [wish.stop for wish in wishes] == [False, False, False, True, True]
    assert (hooks.state.best_metric, hooks.state.best_global_step) == (0.5, 1)


def test_the_best_checkpoint_is_that_of_the_best_evaluation(tmp_path: Path) -> None:
    args = arguments(tmp_path, metric_for_best_model="eval_kl", greater_is_better=False, save_strategy="best")
    hooks = CallbackHooks(args)
    for step, value in ((1, 3.0), (2, 1.0), (3, 2.0)):
        assert hooks.on_evaluate(step, {"eval/kl": value}) == Wishes(save=step < 3)
        (tmp_path / f"step-{step}").mkdir()
        kept = hooks.on_save(step, tmp_path / f"step-{step}")
        assert kept == tmp_path / f"step-{min(step, 2)}"
    assert hooks.state.best_model_checkpoint == str(tmp_path / "step-2")
    again = CallbackHooks(args)
    again.load(tmp_path / "step-3")
    assert again.state == hooks.state


def test_evaluations_have_the_names_of_both_worlds() -> None:
    named = evaluation_metrics({"eval/score_mean": 0.5, "eval/accuracy": None})
    assert named == {"eval/score_mean": 0.5, "eval_score_mean": 0.5, "eval_reward": 0.5}
    assert [best_metric_name(name) for name in ("reward", "eval_reward", "eval/reward")] == [
        "eval_reward"
    ] * 3


def test_a_best_metric_that_no_evaluation_has_is_refused_by_name(tmp_path: Path) -> None:
    hooks = CallbackHooks(arguments(tmp_path, metric_for_best_model="bleu"))
    with pytest.raises(BadInputError, match=r"metric_for_best_model='bleu'.*but: score_mean, reward"):
        hooks.on_evaluate(1, {"eval/score_mean": 0.5})


def test_what_is_no_callback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"callbacks: .*not a transformers TrainerCallback"):
        CallbackHooks(arguments(tmp_path), [print])
    assert isinstance(CallbackHooks(arguments(tmp_path), [TrainerCallback]).callbacks[0], TrainerCallback)
