"""The commands and their options: words in, an exit code out (0 done, 2 bad input, 1 failure)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_cluster.cli.failures import run_guarded
from rl_cluster.cli.llm import add_llm

app = typer.Typer(
    name="rl-cluster",
    help="Train language models with reinforcement learning on Ray, vLLM and DeepSpeed ZeRO-3.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Settings that replace the recipe's, in YAML."),
]


@app.command()
def train(
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="A YAML recipe.")] = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print configuration, batch sizes, workers, memory; start nothing."),
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with a run from its newest checkpoint.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="With --resume: from the checkpoint of exactly this step.")
    ] = None,
    force_changes: Annotated[
        bool,
        typer.Option("--force-changes", help="With --resume: also settings that change what it means."),
    ] = False,
) -> None:
    """Train a model; the run folder gets metrics, checkpoints and the result."""
    from rl_cluster.cli.commands import train_command

    train_command(config, overrides or [], dry_run, resume, step, force_changes)


@app.command()
def fit(
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="A YAML recipe of a fit.")] = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print configuration, learner ranks, memory; start nothing.")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with a fit from its newest checkpoint.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="With --resume: from the checkpoint of exactly this step.")
    ] = None,
    force_changes: Annotated[
        bool,
        typer.Option("--force-changes", help="With --resume: also settings that change what it means."),
    ] = False,
) -> None:
    """Train on fixed data: SFT, DPO, ORPO, KTO or a reward model."""
    from rl_cluster.cli.fit import fit_command

    fit_command(config, overrides or [], dry_run, resume, step, force_changes)


@app.command("eval")
def evaluate(
    source: Annotated[
        str, typer.Argument(metavar="CONFIG_OR_RUN", help="A recipe, or a run folder: then its model.")
    ],
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run; start nothing.")] = False,
) -> None:
    """Score a model on the held-out prompts."""
    from rl_cluster.cli.commands import eval_command

    eval_command(source, overrides or [], dry_run)


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    out: Annotated[Path, typer.Option("--out", help="The PNG to write.")],
    metric: Annotated[
        list[str] | None, typer.Option("--metric", help="A metric's name; may be given several times.")
    ] = None,
    title: Annotated[str, typer.Option(help="Above the panels.")] = "",
) -> None:
    """Draw the curves of runs from their metrics.jsonl."""
    from rl_cluster.cli.commands import plot_command

    plot_command(runs, out, metric or [], title)


add_llm(app)


def main() -> None:
    """Never returns: exits with 0, 1 or 2."""
    run_guarded(app)
