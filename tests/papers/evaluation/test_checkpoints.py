"""Finding checkpoints; when verl loads their shards, and when its merger makes a model of them.

Not covered: the hub, that verl's merger takes these words and what it writes (tests/end_to_end/evaluation_round.py).
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_clipx.papers.evaluation import checkpoints
from verl_clipx.papers.evaluation.checkpoints import (
    MERGED_FOLDER,
    Checkpoint,
    Weights,
    find_checkpoints,
    find_weights,
    fingerprint_of_folder,
)

RANKS = 2


@pytest.fixture
def model(tmp_path):
    """A model in Hugging Face format, as far as it is looked at."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    return folder


@pytest.fixture
def actor(tmp_path):
    """What two ranks of verl's FSDP engine save."""
    folder = make_steps(tmp_path, 20) / "global_step_20" / "actor"
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": RANKS}))
    for rank in range(RANKS):
        (folder / f"model_world_size_{RANKS}_rank_{rank}.pt").write_text("a shard")
    (folder / "huggingface").mkdir()
    return folder


def make_steps(folder: Path, *numbers: int) -> Path:
    for number in numbers:
        (folder / f"global_step_{number}" / "actor").mkdir(parents=True)
    return folder


def find_checkpoint(source: Path | str) -> Checkpoint:
    """Return the only checkpoint of a run, a model's folder or a model on the hub."""
    (checkpoint,) = find_checkpoints(str(source))
    return checkpoint


def test_a_runs_checkpoints_come_in_order_of_training(tmp_path):
    make_steps(tmp_path, 100, 20, 3)
    # A step whose actor was rotated away, and one that the user copied.
    (tmp_path / "global_step_5").mkdir()
    (tmp_path / "global_step_7_backup" / "actor").mkdir(parents=True)
    assert [checkpoint.step for checkpoint in find_checkpoints(str(tmp_path))] == [3, 20, 100]


def test_checkpoints_after_the_last_complete_one_are_left_out(tmp_path):
    make_steps(tmp_path, 100, 20, 3)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    labels = [checkpoint.label for checkpoint in find_checkpoints(str(tmp_path))]
    assert labels == ["global_step_3", "global_step_20"]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint is complete.* step 2 is the newest"):
        find_checkpoints(str(tmp_path))


def test_a_checkpoint_of_a_run_is_found_by_its_steps_folder(actor):
    assert find_checkpoint(actor.parent) == Checkpoint("global_step_20", 20, str(actor))


def test_a_model_is_found_by_its_folder(model):
    checkpoint = find_checkpoint(model)
    assert checkpoint == Checkpoint("model", None, str(model))
    assert find_weights(checkpoint, 1, None) == Weights(str(model), str(model), None, fingerprint_of_folder(model))


def test_a_model_is_found_by_its_name_on_the_hub():
    assert find_checkpoint("Qwen/Qwen2.5-7B") == Checkpoint("Qwen2.5-7B", None, "Qwen/Qwen2.5-7B")


@pytest.mark.parametrize("folder", ["global_step_20/actor", "runs/checkpoints"])
def test_a_folder_of_checkpoints_that_is_not_there_is_refused(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match="neither a model's folder"):
        find_checkpoints(str(tmp_path / folder))


def test_the_ranks_that_wrote_shards_load_them_on_the_base_model(actor, monkeypatch):
    monkeypatch.setattr(checkpoints, "write_merged_model", lambda folder, fingerprint: f"{folder}/merged")
    checkpoint = find_checkpoint(actor.parent)
    fingerprint = fingerprint_of_folder(actor)
    as_shards = Weights("/base", str(actor / "huggingface"), str(actor.parent), fingerprint)
    merged = Weights(f"{actor}/merged", f"{actor}/merged", None, fingerprint)
    assert find_weights(checkpoint, RANKS, "/base") == as_shards
    # Other ranks or no base model: the same weights, merged.
    assert find_weights(checkpoint, RANKS + 1, "/base") == merged
    assert find_weights(checkpoint, RANKS, None) == merged


def test_weights_that_verl_saved_in_hugging_faces_format_are_used_as_they_are(model, actor):
    shutil.copytree(model, actor / "huggingface", dirs_exist_ok=True)
    assert find_weights(find_checkpoint(actor.parent), RANKS, None).model == str(actor / "huggingface")


def test_a_base_for_a_whole_model_is_refused(model):
    with pytest.raises(ValueError, match="is a whole model, so leave out"):
        find_weights(find_checkpoint(model), 1, "/base")


def test_a_base_for_a_model_on_the_hub_is_refused_before_the_download(monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("it was downloaded"))
    with pytest.raises(ValueError, match="is a whole model, so leave out"):
        find_weights(find_checkpoint("Qwen/Qwen2.5-7B"), 1, "/base")


def test_a_name_that_is_neither_a_folder_nor_on_the_hub_says_both(monkeypatch):
    def refuse(*_, **__):
        raise OSError("404 Client Error")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    checkpoint = find_checkpoint("runs/checkpoints")
    with pytest.raises(OSError, match=r"runs/checkpoints: there is no such folder, and no model.* 404 Client Error"):
        find_weights(checkpoint, 1, None)


def test_shards_are_merged_once_and_again_when_they_change(actor, monkeypatch):
    checkpoint = find_checkpoint(actor.parent)
    commands = []

    def merge_once_and_fail_then(command, **_):
        *words, target = command
        commands.append(words[2:])
        if len(commands) > 1:
            return SimpleNamespace(returncode=1, stdout="out of memory")
        (Path(target) / "model.safetensors").touch()
        return SimpleNamespace(returncode=0, stdout="")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.subprocess, "run", merge_once_and_fail_then)
        merged = Path(find_weights(checkpoint, 1, None).model)
        assert merged == actor / MERGED_FOLDER
        assert (merged / "model.safetensors").is_file()
        assert find_weights(checkpoint, 1, None).model == str(merged)
        # A run that starts over writes its checkpoints over the old ones. A failed merge leaves nothing.
        (actor / f"model_world_size_{RANKS}_rank_1.pt").write_text("another")
        with pytest.raises(RuntimeError, match=r"verl's merger failed on (?s:.+)exit code 1(?s:.+)out of memory"):
            find_weights(checkpoint, 1, None)
    assert not merged.exists()
    assert not list(actor.glob(f".{MERGED_FOLDER}*"))
    expected_command = ["verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", str(actor), "--target_dir"]
    assert commands == [expected_command, expected_command]


@pytest.mark.parametrize(
    ("files", "message"),
    [((), "--backend megatron"), (("fsdp_config.json", "lora_train_meta.json"), "merge_and_unload")],
)
def test_checkpoints_that_cannot_be_merged_say_why(tmp_path, files, message):
    actor = make_steps(tmp_path, 1) / "global_step_1" / "actor"
    for name in files:
        (actor / name).write_text("{}")
    with pytest.raises(ValueError, match=message):
        find_weights(find_checkpoint(actor.parent), 1, None)


def test_a_fingerprint_changes_with_visible_files_alone(tmp_path):
    (tmp_path / "model.safetensors").write_text("0")
    first = fingerprint_of_folder(tmp_path)
    (tmp_path / "model.safetensors").write_text("1")
    after_a_change = fingerprint_of_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("0")
    after_another_file = fingerprint_of_folder(tmp_path)
    assert len({first, after_a_change, after_another_file}) == 3
    (tmp_path / ".merged_from").write_text("of what")
    assert fingerprint_of_folder(tmp_path) == after_another_file
