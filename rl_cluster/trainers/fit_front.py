"""What the fronts of training on fixed data share: a model and rows in, one `fit` and its history out."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from rl_cluster.assembly.fit import FitResult, evaluate_fit, fit, load_fit_config
from rl_cluster.config.fit import DPO, KTO, FitConfig, Objective
from rl_cluster.errors import BadInputError
from rl_cluster.loop.fit_report import Metrics
from rl_cluster.run_folder import check_unused, resolve_run_dir, run_dir_of
from rl_cluster.trainers.fit_settings import FitSettings, check_settings, fit_config
from rl_cluster.trainers.online_checks import num_parameters
from rl_cluster.trainers.session import save_start
from rl_cluster.trainers.weights_back import put_back

T = TypeVar("T")
Rows = Sequence[Mapping[str, Any]]


class FitHistory(dict[str, list[float | None]]):
    """One list per column, an entry per optimizer step. model: the trained model. eval: the last evaluation.
    folder: the run's, with metrics.jsonl, checkpoints/ and model/."""

    model: Any = None
    eval: Metrics = {}
    folder: Path | None = None


class FitFront:
    """A model, its tokenizer and the settings; `run` trains, `measure` evaluates.

    model: a transformers model, or a folder or hub name; default: settings.model_name. After a run the
    caller's own model object holds the trained weights (under LoRA, `model` is a PeftModel around it).
    """

    def __init__(self, settings: FitSettings, model: Any, tokenizer: Any, callbacks: Sequence[Any]) -> None:
        check_settings(settings)
        name = type(settings).__name__
        model = settings.model_name if model is None else model
        if model is None:
            raise BadInputError(f"{name}.model_name: there is no model. Give the trainer one, or its name.")
        if not isinstance(model, nn.Module | str | Path):
            raise BadInputError(
                f"model is {type(model).__name__} {model!r:.60}: give a model of transformers, or a folder "
                "or hub name."
            )
        if isinstance(model, nn.Module) and not hasattr(model, "save_pretrained"):
            raise BadInputError(
                f"model is {type(model).__name__}, without save_pretrained: give a model of transformers."
            )
        if hasattr(model, "peft_config"):
            raise BadInputError(
                "model is a PeftModel: give the base model and set lora_rank, or merge the adapter first "
                "(model.merge_and_unload())."
            )
        if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "eos_token_id")):
            raise BadInputError(
                f"tokenizer is {type(tokenizer).__name__} {tokenizer!r:.60}: give a tokenizer, such as "
                "AutoTokenizer.from_pretrained(model_name)."
            )
        if tokenizer is None and isinstance(model, nn.Module):
            raise BadInputError("tokenizer: there is none. A model object needs its tokenizer beside it.")
        self.settings = settings
        self.model = str(model) if isinstance(model, Path) else model
        self.tokenizer = tokenizer
        self.callbacks = tuple(callbacks)
        self._started_from: str | None = None

    def run(
        self,
        objective: Objective,
        rows: Rows,
        eval_rows: Rows | None,
        columns: Mapping[str, str],
        *,
        reference: Any = None,
        resume: str | Path | None = None,
        loader: Callable[[Any, Path], Any] = put_back,
        **data: Any,
    ) -> FitHistory:
        """Train. columns: history's name -> metric. reference: a model, name or folder to compare with.

        resume: a run folder, whose newest checkpoint is gone on from, with the same rows. loader: puts the
        exported weights into the caller's model. data: further fields of the data section.
        """
        config = resolve_run_dir(
            fit_config(self.settings, objective, ".", num_parameters(self.model), **data)
        )
        if resume is None:
            config = self._with_models(config, reference)
        else:
            section = config.run.model_copy(update={"dir": str(resume)})
            config = load_fit_config(Path(resume) / "config.yaml").model_copy(update={"run": section})
        hooks: list[Any] = []
        if self.callbacks:
            from rl_cluster.trainers.fit_callbacks import callback_hooks

            hooks = [callback_hooks(self.callbacks, config, len(rows), self.model, self.tokenizer)]
        result = in_thread(
            lambda: fit(
                config, resume=resume, hooks=hooks, tokenizer=self.tokenizer, rows=rows, eval_rows=eval_rows
            )
        )
        self._started_from = config.model.path
        return self._finish(result, columns, loader)

    def measure(self, objective: Objective, rows: Rows, *, reference: Any = None, **data: Any) -> Metrics:
        """eval/… of the present model on rows. reference: default where the last training began."""
        with tempfile.TemporaryDirectory() as scrap:
            config = fit_config(self.settings, objective, ".", num_parameters(self.model), **data)
            section = config.run.model_copy(update={"dir": scrap})
            config = self._with_models(
                config.model_copy(update={"run": section}), reference or self._started_from
            )
            return in_thread(lambda: evaluate_fit(config, rows, self.tokenizer))

    def save(self, folder: str | Path) -> None:
        """The model as it is now and its tokenizer."""
        if isinstance(self.model, nn.Module):
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        else:
            shutil.copytree(Path(self.model), folder, dirs_exist_ok=True)

    def _with_models(self, config: FitConfig, reference: Any) -> FitConfig:
        """The models as paths; objects are written into the run folder's start/."""
        run_dir = run_dir_of(config)
        check_unused(run_dir)
        path = self._saved(self.model, run_dir, "policy")
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
        objective = config.objective
        if reference is None or not isinstance(objective, DPO | KTO):
            return config
        saved = self._saved(reference, run_dir, "reference")
        objective = objective.model_copy(update={"reference_model": saved})
        return config.model_copy(update={"objective": objective})

    def _saved(self, model: Any, run_dir: Path, name: str) -> str:
        if not isinstance(model, nn.Module):
            return str(model)
        return str(save_start(run_dir, model, self.tokenizer, name))

    def _finish(
        self, result: FitResult, columns: Mapping[str, str], loader: Callable[[Any, Path], Any]
    ) -> FitHistory:
        steps = [row for row in result.metrics if row["step"] > 0]
        history = FitHistory({name: [row.get(metric) for row in steps] for name, metric in columns.items()})
        self.model = str(result.model) if not isinstance(self.model, nn.Module) else self.model
        if isinstance(self.model, nn.Module):
            self.model = loader(self.model, result.model)
        history.model, history.eval, history.folder = self.model, result.last, result.folder
        return history


def in_thread(work: Callable[[], T]) -> T:
    """work() here; where an event loop runs already (a notebook), in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:  # noqa: BLE001 — raised again below, where the caller is
            outcome.append((None, error))

    thread = threading.Thread(target=call, name="fit")
    thread.start()
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
