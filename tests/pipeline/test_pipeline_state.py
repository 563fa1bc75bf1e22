"""Checkpoints: training goes on bit for bit, tied weights, pending gradients, damage, other models."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl_cluster.errors import BadInputError, CheckpointError
from rl_cluster.files import atomic as atomic_files

IDS = torch.tensor([[1, 2, 3, 4], [2, 2, 5, 0]])


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def training(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)


def steps(pipeline, optimizer, scheduler, count):
    losses = []
    for _ in range(count):
        losses.append(pipeline.forward_backward(IDS).result().loss)
        pipeline.optim_step(optimizer, scheduler).result()
    return losses


@pytest.mark.parametrize("known_before", [True, False], ids=["optimizer-seen", "optimizer-comes-later"])
def test_training_goes_on_bit_for_bit_in_a_new_pipeline(models, pipelines, known_before):
    """With dropout, Adam moments, schedule, running statistics, and half of an accumulation pending."""
    torch.manual_seed(0)
    model = models.Dropout()
    first, parts = pipelines(model), training(model)
    steps(first, *parts, 3)
    first.forward_backward(IDS).result()
    info = first.save_state("checkpoint_1000")
    expected = steps(first, *parts, 3)

    torch.manual_seed(99)
    other = models.Dropout()
    second, other_parts = pipelines(other), training(other)
    if known_before:
        steps(second, *other_parts, 1)
    second.load_state(info["path"])
    assert steps(second, *other_parts, 3) == expected
    assert second.optim_step(*other_parts).result().step == 6
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert other_parts[1].get_last_lr() == parts[1].get_last_lr()


def test_save_state_returns_its_four_paths_and_load_takes_path_or_name(models, pipelines):
    model = models.Table()
    pipeline = pipelines(model)
    info = pipeline.save_state("checkpoint_1")
    folder = Path.cwd() / "checkpoints" / "checkpoint_1"
    assert info == {
        "path": str(folder),
        "model_path": str(folder / "model.safetensors"),
        "optimizer_path": None,
        "state_path": str(folder / "state.pt"),
    }
    saved = model.table.detach().clone()
    for path in (info["path"], "checkpoints/checkpoint_1", "checkpoint_1", Path("checkpoints/checkpoint_1")):
        with torch.no_grad():
            model.table.zero_()
        pipeline.load_state(path)
        assert torch.equal(model.table, saved)

    pipeline.forward_backward([[1, 2]])
    pipeline.optim_step(torch.optim.AdamW(model.parameters())).result()
    info = pipeline.save_state("nested/checkpoint_2")
    assert Path(info["optimizer_path"]).is_file()
    assert os.listdir(folder.parent / "nested") == ["checkpoint_2"]


def test_a_save_sees_the_calls_queued_before_it_and_none_after(models, pipelines):
    model = models.Table()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = pipelines(model)
    for _ in range(20):
        pipeline.forward_backward(IDS[:, :2] % 5)
        pipeline.optim_step(optimizer)
    info = pipeline.save_state("twenty")
    assert torch.load(info["state_path"], weights_only=True)["step"] == 20
    assert torch.equal(load_file(info["model_path"])["table"], model.table.detach())


def test_tied_weights_are_saved_once_and_stay_tied(make_qwen, pipelines):
    model, other = make_qwen(seed=1), make_qwen(seed=2)
    info = pipelines(model).save_state("tied")
    names = load_file(info["model_path"]).keys()
    assert len({"lm_head.weight", "model.embed_tokens.weight"} & names) == 1
    pipelines(other).load_state(info["path"])
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)


def test_all_files_are_read_without_unpickling_objects(models, pipelines):
    model = models.Dropout()
    pipeline = pipelines(model)
    steps(pipeline, *training(model), 1)
    info = pipeline.save_state("safe")
    for key in ("optimizer_path", "state_path"):
        torch.load(info[key], weights_only=True)


@pytest.mark.parametrize("missing", ["model.safetensors", "state.pt"])
def test_an_incomplete_checkpoint_names_the_missing_file(models, pipelines, missing):
    pipeline = pipelines(models.Table())
    info = pipeline.save_state("incomplete")
    (Path(info["path"]) / missing).unlink()
    with pytest.raises(BadInputError, match=f"incomplete/{missing} is missing"):
        pipeline.load_state("incomplete")


def test_a_missing_checkpoint_is_an_error_that_names_the_path(models, pipelines):
    with pytest.raises(ValueError, match="path: there is no checkpoint checkpoints/nothing"):
        pipelines(models.Table()).load_state("checkpoints/nothing")


@pytest.mark.parametrize("damaged", ["model.safetensors", "optimizer.pt", "state.pt"])
def test_a_damaged_file_is_named_and_nothing_changes(models, pipelines, damaged):
    model = models.Dropout()
    pipeline, parts = pipelines(model), training(model)
    steps(pipeline, *parts, 1)
    info = pipeline.save_state("damaged")
    steps(pipeline, *parts, 1)
    file = Path(info["path"]) / damaged
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rate, random = parts[1].get_last_lr(), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=f"{damaged}: damaged"):
        pipeline.load_state("damaged")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert parts[1].get_last_lr() == rate
    assert torch.equal(torch.get_rng_state(), random)


def test_a_checkpoint_of_another_model_is_refused_whole(models, pipelines):
    small, large = models.Table(vocab=5), models.Table(vocab=6)
    pipelines(small).save_state("small")
    pipeline = pipelines(large)
    before = large.table.detach().clone()
    with pytest.raises(BadInputError, match=r"table has shape \(5, 5\), not \(6, 6\)"):
        pipeline.load_state("small")
    with pytest.raises(BadInputError, match="another model"):
        pipelines(models.Dropout()).load_state("small")
    assert torch.equal(large.table, before)


def test_an_optimizer_that_does_not_fit_leaves_the_weights_as_they_were(models, pipelines):
    model = models.Dropout()
    pipeline = pipelines(model)
    steps(pipeline, *training(model), 1)
    pipeline.save_state("adam")
    other = models.Dropout()
    second = pipelines(other)
    partial = torch.optim.AdamW([other.head.weight], lr=0.1)
    second.forward_backward(IDS)
    second.optim_step(partial).result()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(BadInputError, match="optimizer"):
        second.load_state("adam")
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in before.items())


def test_a_save_that_fails_half_way_leaves_the_older_checkpoint_and_no_rubbish(
    models, pipelines, monkeypatch
):
    model = models.Table()
    pipeline = pipelines(model)
    info = pipeline.save_state("same")
    saved = load_file(info["model_path"])["table"]
    with torch.no_grad():
        model.table.zero_()

    def full_disk(folder):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "sync_tree", full_disk)
        with pytest.raises(CheckpointError, match=r"same: not saved, No space left.*untouched"):
            pipeline.save_state("same")
    assert os.listdir("checkpoints") == ["same"]
    assert torch.equal(load_file(info["model_path"])["table"], saved)

    pipeline.save_state("same")
    assert os.listdir("checkpoints") == ["same"]
    assert not load_file(info["model_path"])["table"].any()


def test_a_rename_that_fails_puts_the_older_checkpoint_back(models, pipelines, monkeypatch):
    model = models.Table()
    pipeline = pipelines(model)
    pipeline.save_state("same")
    genuine = Path.rename

    def fails_for_the_new(path, target):
        if ".new-" in path.name:
            raise OSError("Input/output error")
        return genuine(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fails_for_the_new)
        with pytest.raises(CheckpointError, match="Input/output error"):
            pipeline.save_state("same")
    assert os.listdir("checkpoints") == ["same"]
    pipeline.load_state("same")


def test_a_scheduler_that_cannot_be_read_back_safely_is_refused_when_saving(models, pipelines):
    class Odd(torch.optim.lr_scheduler.StepLR):
        def state_dict(self):
            return {"path": Path("here")}

        def load_state_dict(self, state):
            pass

    model = models.Table()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = pipelines(model)
    pipeline.forward_backward([[1, 2]])
    pipeline.optim_step(optimizer, Odd(optimizer, 1)).result()
    with pytest.raises(CheckpointError, match="cannot be read back safely"):
        pipeline.save_state("odd")
    assert not Path("checkpoints/odd").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "state.pt"])
@pytest.mark.parametrize("place", [0.3, 0.6, 0.9])
def test_one_flipped_bit_in_any_file_is_named_and_nothing_changes(models, pipelines, file, place):
    model = models.Dropout()
    pipeline, parts = pipelines(model), training(model)
    steps(pipeline, *parts, 1)
    path = Path(pipeline.save_state("flipped")["path"]) / file
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=f"{file}: damaged"):
        pipeline.load_state("flipped")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("file", ["optimizer.pt", "manifest.json"])
def test_a_file_that_is_gone_is_missed_also_where_states_without_it_exist(models, pipelines, file):
    model = models.Dropout()
    pipeline = pipelines(model)
    steps(pipeline, *training(model), 1)
    (Path(pipeline.save_state("gone")["path"]) / file).unlink()
    with pytest.raises(BadInputError, match=f"gone/{file} is missing"):
        pipeline.load_state("gone")


def test_a_state_of_an_earlier_version_without_manifest_still_loads(models, pipelines):
    model = models.Dropout()
    pipeline = pipelines(model)
    folder = Path(pipeline.save_state("earlier")["path"])
    (folder / "manifest.json").unlink()
    (folder / ".rl_cluster.json").unlink()
    pipeline.load_state("earlier")
