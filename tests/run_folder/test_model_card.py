"""The model card: what a reader and the Hub need, taken from the run itself."""

import json

import yaml

from rl_cluster.config.reading.load import parse_config
from rl_cluster.run_folder.card import model_card, write_model_card
from rl_cluster.run_folder.folder import create_run_folder

ROWS = [
    {"step": 0, "eval/score_mean": 0.25},
    {"step": 1, "eval/score_mean": 0.5, "objective/kl": None},
    {"step": 2, "eval/score_mean": 0.75, "objective/scores": 0.6},
]


def config_of(folder, **model):
    return parse_config(
        {
            "run": {"name": "adder", "dir": str(folder)},
            "model": model or {"scratch": {}},
            "data": {"train": {"source": "addition", "num_digits": 3}},
            "rewards": {"scorers": [{"kind": "exact_match", "weight": 2.0}]},
            "algorithm": {"name": "rloo"},
        }
    )


def test_the_card_shows_results_settings_and_the_hubs_header(tmp_path):
    card = model_card(config_of(tmp_path, path="owner/base"), ROWS, curves=True)
    header = yaml.safe_load(card.split("---")[1])
    assert header["base_model"] == "owner/base"
    assert header["library_name"] == "transformers"
    assert "rloo" in header["tags"]
    assert "2 steps of 128 responses" in card
    assert "| `eval/score_mean` | 0.25 (step 0) | 0.75 (step 2) |" in card
    assert "`objective/kl`" not in card
    assert "`exact_match` (weight 2); KL k1 × 0.05 in the reward_sequence" in card
    assert "num_digits: 3" in card
    assert "AutoModelForCausalLM" in card


def test_an_adapters_card_says_how_to_load_an_adapter(tmp_path):
    card = model_card(config_of(tmp_path, path="owner/base", lora={}), [], curves=False)
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "peft"
    assert "AutoPeftModelForCausalLM" in card
    assert "No step was completed." in card
    assert "![" not in card


def test_a_card_shows_paths_as_they_were_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "base").mkdir(parents=True)
    config = config_of("runs/one", path="models/base")
    assert config.model.path == str(tmp_path / "models" / "base")
    folder = create_run_folder(config)
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    folder.model.mkdir()
    card = write_model_card(config, folder).read_text()
    assert "base_model: models/base\n" in card
    assert str(tmp_path) not in card


def test_the_card_and_its_curves_are_written_into_the_model_folder(tmp_path):
    folder = create_run_folder(config_of(tmp_path / "run"))
    folder.model.mkdir()
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    write_model_card(folder.read_config(), folder)
    assert (folder.model / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "![curves of the run](curves.png)" in (folder.model / "README.md").read_text()
