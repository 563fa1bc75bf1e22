"""A failure's words: the cause comes first, ours without a traceback, and the log is named."""

import pytest

from rl_cluster.cli.commands import load_eval_config, train_command
from rl_cluster.cli.failures import bad_input_within, describe_failure, log_failure, run_guarded
from rl_cluster.errors import BadInputError, DeadlineError, ScorerError


def raised(outer, cause):
    try:
        raise outer from cause
    except Exception as error:  # noqa: BLE001 — the test wants the chained object
        return error


def test_the_cause_comes_first():
    error = raised(RuntimeError("the run stopped"), ScorerError("accuracy", "ZeroDivisionError in line 3"))
    lines = describe_failure(error).splitlines()
    assert lines[0] == "ScorerError: accuracy: ZeroDivisionError in line 3"
    assert lines[1] == "which led to RuntimeError: the run stopped"
    assert len(lines) == 2


def test_strange_errors_keep_their_traceback():
    text = describe_failure(raised(KeyError("lost"), None))
    assert text.startswith("KeyError: 'lost'")
    assert "Traceback" in text


def test_a_logged_failure_names_its_log(tmp_path):
    log = tmp_path / "run.log"
    cause = raised(DeadlineError("rank 1 did not answer in 300 s"), None)
    text = describe_failure(raised(log_failure(log, cause), cause))
    assert text == f"DeadlineError: rank 1 did not answer in 300 s\nThe whole log: {log}"
    assert "DeadlineError" in log.read_text()


def test_bad_input_found_by_a_worker_is_still_bad_input():
    error = raised(RuntimeError("task failed"), BadInputError("prompts.jsonl:3: empty"))
    assert str(bad_input_within(error)) == "prompts.jsonl:3: empty"


@pytest.mark.parametrize(
    ("error", "code"), [(BadInputError("x"), 2), (DeadlineError("y"), 1), (OSError("z"), 1)]
)
def test_exit_codes(error, code, capsys):
    def fail():
        raise error

    with pytest.raises(SystemExit) as caught:
        run_guarded(fail)
    assert caught.value.code == code
    assert str(error) in capsys.readouterr().err


def test_a_resumed_run_keeps_its_folder_and_takes_no_recipe(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {}")
    with pytest.raises(BadInputError, match="goes on in its own folder"):
        train_command(None, ["run.dir=/elsewhere"], dry_run=True, resume=tmp_path)
    with pytest.raises(BadInputError, match="leave the recipe out"):
        train_command("recipe.yaml", [], dry_run=True, resume=tmp_path)


def test_evaluating_a_run_takes_the_model_that_it_exported(tmp_path):
    text = (
        "model: {scratch: {}}\ndata: {train: {source: addition}}\nrewards: {scorers: [{kind: exact_match}]}\n"
    )
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(BadInputError, match="has no model folder"):
        load_eval_config(str(tmp_path), [])
    (tmp_path / "model").mkdir()
    config = load_eval_config(str(tmp_path), ["eval.num_prompts=7"])
    assert config.model.path == str(tmp_path / "model")
    assert config.model.scratch is None
    assert config.eval.num_prompts == 7
