"""What the fronts of training on fixed data share: a model and rows in, one `fit` and its history out."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import nn

from rl_cluster.assembly.fit import FitResult, evaluate_fit, fit
from rl_cluster.config.fit import DPO, KTO, FitConfig, Objective
from rl_cluster.config.run import ModelConfig
from rl_cluster.errors import BadInputError
from rl_cluster.loop.fit_report import Metrics
from rl_cluster.run_folder.folder import open_run_folder, preparing_run, run_dir_of
from rl_cluster.trainers.fixed_data.checks import check_settings
from rl_cluster.trainers.fixed_data.settings import FitSettings, fit_config
from rl_cluster.trainers.given import checked_model, checked_tokenizer, num_parameters, put_back, saved
from rl_cluster.trainers.model_folder import copy_model, folder_of_model, model_target
from rl_cluster.trainers.session import check_same_settings

T = TypeVar("T")
Rows = Sequence[Mapping[str, Any]]


class FitHistory(dict[str, list[float | None]]):
    """One list per column, an entry per optimizer step. model: the trained model. eval: the last evaluation.
    folder: the run's, with metrics.jsonl, checkpoints/ and model/."""

    model: Any = None
    eval: Metrics = {}
    folder: Path | None = None


class FitTrainer:
    """Training on fixed data as a library: what SFT, DPO, ORPO, KTO and reward trainers have in common.

    model: a transformers model, or a folder or hub name; default: config.model_name. After training the
    caller's own model object holds the trained weights (under LoRA, `model` is a PeftModel around it).
    callbacks: transformers' TrainerCallbacks. ref_model: what DPO and KTO compare with; default: the model as
    it starts.

    A subclass says what its configuration, rows and objective are. config_class: of `config`. columns: what
    train() returns -> the metric. evaluated: what evaluate() returns, each with eval_ in front.
    has_reference: whether the objective compares with one.
    """

    has_reference: ClassVar[bool] = False
    config_class: ClassVar[type[FitSettings]]
    columns: ClassVar[Mapping[str, str]]
    evaluated: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin")

    def __init__(
        self,
        config: Any,
        model: Any = None,
        tokenizer: Any = None,
        callbacks: Sequence[Any] = (),
        *,
        ref_model: Any = None,
    ) -> None:
        owner, wanted = type(self).__name__, self.config_class.__name__
        if not isinstance(config, self.config_class):
            article = "an" if wanted[0] in "OS" else "a"
            raise BadInputError(f"{owner}.config is {type(config).__name__}: give {article} {wanted}.")
        check_settings(config)
        self.config = config
        self.ref_model = _checked_reference(owner, ref_model, self.has_reference)
        self._check()
        self.model = _checked_model(config, model)
        self.tokenizer = _checked_tokenizer(tokenizer, self.model)
        self.callbacks = tuple(callbacks)
        self._started_from: str | None = None
        self._run_dir: Path | None = None

    def train(
        self, dataset: Any, eval_dataset: Any = None, resume_from_checkpoint: str | Path | None = None
    ) -> FitHistory:
        """Lists with an entry per optimizer step; their names are `columns`'.

        eval_dataset is evaluated before, every eval_every steps and after (history.eval).
        resume_from_checkpoint: a run folder, whose newest checkpoint is gone on from, with the same rows.
        """
        owner = f"{type(self).__name__}.train"
        rows = self._rows(f"{owner}.dataset", dataset)
        eval_rows = None if eval_dataset is None else self._rows(f"{owner}.eval_dataset", eval_dataset)
        if eval_rows is not None:
            self._check_alike(rows, eval_rows)
        if resume_from_checkpoint is not None:
            config = self._resumed(self._fit_config(rows), Path(resume_from_checkpoint))
            return self._fit(config, rows, eval_rows, resume_from_checkpoint)
        with preparing_run(self._fit_config(rows)) as config:
            config = self._with_models(config, self.ref_model)
            return self._fit(config, rows, eval_rows)

    def _fit(
        self, config: FitConfig, rows: Rows, eval_rows: Rows | None, resume: str | Path | None = None
    ) -> FitHistory:
        hooks: list[Any] = []
        if self.callbacks:
            from rl_cluster.trainers.fixed_data.callbacks import callback_hooks

            hooks = [callback_hooks(self.callbacks, config, len(rows), self.model, self.tokenizer)]
        result = in_thread(
            lambda: fit(
                config,
                resume=resume,
                hooks=hooks,
                tokenizer=self.tokenizer,
                rows=rows,
                eval_rows=eval_rows,
            )
        )
        self._started_from, self._run_dir = config.model.path, result.folder
        self.model = self._trained(result.model)
        return self._history(result)

    def evaluate(self, dataset: Any) -> dict[str, float | None]:
        """Of the model as it is now.

        The reference is ref_model, or where the last training began; before any, the model itself.
        """
        rows = self._rows(f"{type(self).__name__}.evaluate.dataset", dataset)
        with tempfile.TemporaryDirectory() as scrap:
            config = self._fit_config(rows)
            section = config.run.model_copy(update={"dir": scrap})
            config = config.model_copy(update={"run": section})
            config = self._with_models(config, self.ref_model or self._started_from)
            metrics = in_thread(lambda: evaluate_fit(config, rows, self.tokenizer))
        return {f"eval_{name}": metrics.get(f"eval/{name}") for name in self.evaluated}

    def save_model(self, folder: str | Path) -> None:
        """The model as it is now and its tokenizer, as Hugging Face folders are."""
        target = model_target(folder, "save_model: folder", self._run_dir)
        if not isinstance(self.model, nn.Module):
            copy_model(Path(self.model), target)
            return
        with folder_of_model(target) as partial:
            self.model.save_pretrained(partial)
            self.tokenizer.save_pretrained(partial)

    def _check(self) -> None:
        """Raise BadInputError that names the first wrong field of this trainer's own."""

    def _rows(self, owner: str, dataset: Any) -> Rows:
        """owner: whose argument the data set is, for the error."""
        raise NotImplementedError

    def _objective(self, rows: Rows) -> Objective:
        raise NotImplementedError

    def _check_alike(self, rows: Rows, eval_rows: Rows) -> None:
        """Raise BadInputError where the two cannot be of one training."""

    def _trained(self, folder: Path) -> Any:
        """The model after training, given the exported one: the caller's own object, or the folder."""
        return put_back(self.model, folder) if isinstance(self.model, nn.Module) else str(folder)

    def _fit_config(self, rows: Rows) -> FitConfig:
        return fit_config(self.config, self._objective(rows), ".", num_parameters(self.model))

    def _with_models(self, config: FitConfig, reference: Any) -> FitConfig:
        """The models as paths; objects are written into the run folder's start/."""
        run_dir = run_dir_of(config)
        path = saved(self.model, run_dir, self.tokenizer, "policy")
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
        objective = config.objective
        if reference is None or not isinstance(objective, DPO | KTO):
            return config
        path = saved(reference, run_dir, self.tokenizer, "reference")
        objective = objective.model_copy(update={"reference_model": path})
        return config.model_copy(update={"objective": objective})

    def _resumed(self, config: FitConfig, folder: Path) -> FitConfig:
        """The settings of now, in the run's folder and with the models that it began with."""
        before = open_run_folder(folder).read_config_as(FitConfig)
        path = before.model.path if isinstance(self.model, nn.Module) else ModelConfig(path=self.model).path
        objective = config.objective
        if isinstance(objective, DPO | KTO) and isinstance(before.objective, DPO | KTO):
            objective = objective.model_copy(update={"reference_model": before.objective.reference_model})
        config = config.model_copy(
            update={
                "run": config.run.model_copy(update={"dir": str(folder)}),
                "model": config.model.model_copy(update={"path": path}),
                "objective": objective,
            }
        )
        check_same_settings(before, config)
        return config

    def _history(self, result: FitResult) -> FitHistory:
        steps = [row for row in result.metrics if row["step"] > 0]
        history = FitHistory(
            {name: [row.get(metric) for row in steps] for name, metric in self.columns.items()}
        )
        history.model, history.eval, history.folder = self.model, result.last, result.folder
        return history


class ReferenceTrainer(FitTrainer):
    """Of an objective that compares with a reference, which is given after the tokenizer."""

    has_reference = True

    def __init__(
        self,
        config: Any,
        model: Any = None,
        tokenizer: Any = None,
        ref_model: Any = None,
        callbacks: Sequence[Any] = (),
    ) -> None:
        super().__init__(config, model, tokenizer, callbacks, ref_model=ref_model)


ANY_MODEL = "a model of transformers"


def _checked_reference(owner: str, reference: Any, wanted: bool) -> Any:
    if reference is None:
        return None
    if not wanted:
        raise BadInputError(f"{owner}.ref_model: this objective compares with no reference. Leave it out.")
    if isinstance(reference, nn.Module):
        return reference
    return checked_model(f"{owner}.ref_model", reference, ANY_MODEL, "lora_rank")


def _checked_model(config: FitSettings, model: Any) -> Any:
    model = config.model_name if model is None else model
    if model is None:
        name = type(config).__name__
        raise BadInputError(f"{name}.model_name: there is no model. Give the trainer one, or its name.")
    return checked_model("model", model, ANY_MODEL, "set lora_rank", ("save_pretrained", "parameters"))


def _checked_tokenizer(tokenizer: Any, model: Any) -> Any:
    """None where it is the model's own, by name: the fit loads it."""
    if tokenizer is not None:
        return checked_tokenizer("tokenizer", tokenizer, model)
    if isinstance(model, nn.Module):
        raise BadInputError("tokenizer: there is none. A model object needs its tokenizer beside it.")
    return None


def in_thread(work: Callable[[], T]) -> T:
    """work() here; where an event loop runs already (a notebook), in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 — raised again below, where the caller is
            errors.append(error)

    thread = threading.Thread(target=call, name="fit")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
