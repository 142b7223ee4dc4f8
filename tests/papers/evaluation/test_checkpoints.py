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


def of_actor(actor: Path) -> Checkpoint:
    (found,) = find_checkpoints(str(actor.parent))
    return found


def test_a_runs_finished_checkpoints_in_order_of_training(tmp_path):
    make_steps(tmp_path, 100, 20, 3)
    (tmp_path / "global_step_5").mkdir()  # its actor was rotated away
    (tmp_path / "global_step_7_backup" / "actor").mkdir(parents=True)
    assert [one.step for one in find_checkpoints(str(tmp_path))] == [3, 20, 100]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    assert [one.label for one in find_checkpoints(str(tmp_path))] == ["global_step_3", "global_step_20"]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint is complete.* step 2 is the newest"):
        find_checkpoints(str(tmp_path))


def test_one_checkpoint_a_model_by_folder_or_id_and_nothing(model, actor, tmp_path):
    assert of_actor(actor) == Checkpoint("global_step_20", 20, str(actor))
    (found,) = find_checkpoints(str(model))
    assert found == Checkpoint("model", None, str(model))
    assert find_weights(found, 1, None) == Weights(str(model), str(model), None, fingerprint_of_folder(model))
    assert find_checkpoints("Qwen/Qwen2.5-7B") == [Checkpoint("Qwen2.5-7B", None, "Qwen/Qwen2.5-7B")]
    for nothing in (tmp_path / "global_step_20" / "actor", tmp_path / "runs" / "checkpoints"):
        with pytest.raises(FileNotFoundError, match="neither a model's folder"):
            find_checkpoints(str(nothing))


def test_the_ranks_that_wrote_shards_load_them_on_the_base_model(model, actor, monkeypatch):
    monkeypatch.setattr(checkpoints, "write_merged_model", lambda folder, fingerprint: f"{folder}/merged")
    fingerprint = fingerprint_of_folder(actor)
    loaded = find_weights(of_actor(actor), RANKS, "/base")
    assert loaded == Weights("/base", str(actor / "huggingface"), str(actor.parent), fingerprint)
    # Other ranks or no base model: the same weights, merged.
    for ranks, base in ((RANKS + 1, "/base"), (RANKS, None)):
        assert find_weights(of_actor(actor), ranks, base) == Weights(*[f"{actor}/merged"] * 2, None, fingerprint)
    # Weights that verl saved in Hugging Face's format are used as they are.
    shutil.copytree(model, actor / "huggingface", dirs_exist_ok=True)
    assert find_weights(of_actor(actor), RANKS, None).model == str(actor / "huggingface")


def test_a_base_for_a_whole_model_is_refused(model):
    (found,) = find_checkpoints(str(model))
    with pytest.raises(ValueError, match="is a whole model, so leave out"):
        find_weights(found, 1, "/base")


def test_a_base_for_a_model_on_the_hub_is_refused_before_the_download(monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("it was downloaded"))
    (found,) = find_checkpoints("Qwen/Qwen2.5-7B")
    with pytest.raises(ValueError, match="is a whole model, so leave out"):
        find_weights(found, 1, "/base")


def test_a_name_that_is_neither_a_folder_nor_on_the_hub_says_both(monkeypatch):
    def refuse(*_, **__):
        raise OSError("404 Client Error")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    (found,) = find_checkpoints("runs/checkpoints")
    with pytest.raises(OSError, match=r"runs/checkpoints: there is no such folder, and no model.* 404 Client Error"):
        find_weights(found, 1, None)


def test_shards_are_merged_once_and_again_when_they_change(actor, monkeypatch):
    commands = []

    def merge(command, **_):
        commands.append(command[2:-1])
        target = Path(command[-1])
        if len(commands) == 1:
            (target / "model.safetensors").touch()
        return SimpleNamespace(returncode=len(commands) - 1, stdout="out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.subprocess, "run", merge)
        merged = Path(find_weights(of_actor(actor), 1, None).model)
        assert merged == actor / MERGED_FOLDER and (merged / "model.safetensors").is_file()
        assert find_weights(of_actor(actor), 1, None).model == str(merged)
        # A run that starts over writes its checkpoints over the old ones. A failed merge leaves nothing.
        (actor / f"model_world_size_{RANKS}_rank_1.pt").write_text("another")
        with pytest.raises(RuntimeError, match=r"verl's merger failed on (?s:.+)exit code 1(?s:.+)out of memory"):
            find_weights(of_actor(actor), 1, None)
    assert not merged.exists() and not list(actor.glob(f".{MERGED_FOLDER}*"))
    words = ["verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", str(actor), "--target_dir"]
    assert commands == [words, words]


@pytest.mark.parametrize(
    ("files", "message"),
    [((), "--backend megatron"), (("fsdp_config.json", "lora_train_meta.json"), "merge_and_unload")],
)
def test_checkpoints_that_cannot_be_merged_say_why(tmp_path, files, message):
    actor = make_steps(tmp_path, 1) / "global_step_1" / "actor"
    for name in files:
        (actor / name).write_text("{}")
    with pytest.raises(ValueError, match=message):
        find_weights(of_actor(actor), 1, None)


def test_a_fingerprint_changes_with_any_visible_file(tmp_path):
    found = []
    for name, content in (("model.safetensors", "0"), ("model.safetensors", "1"), ("tokenizer.json", "0")):
        (tmp_path / name).write_text(content)
        found.append(fingerprint_of_folder(tmp_path))
    (tmp_path / ".merged_from").write_text("of what")
    assert len(set(found)) == 3 and fingerprint_of_folder(tmp_path) == found[-1]
