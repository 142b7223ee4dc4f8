"""Finding checkpoints; when verl loads their shards; merging real FSDP2 shards of two ranks with verl's merger.

Not covered: the hub, FSDP1, checkpoints larger than a megabyte, that verl loads them (tests/end_to_end).
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

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


def save_sharded(actor: Path, model: Path) -> Path:
    """Write what verl's FSDP checkpoint manager writes: every rank's rows of every parameter, as DTensors."""
    weights = load_file(model / "model.safetensors")
    actor.mkdir(parents=True)
    for rank in range(RANKS):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        mesh = torch.distributed.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
        shards = {
            name: DTensor.from_local(tensor.chunk(RANKS)[rank].clone(), mesh, [Shard(0)], run_check=False)
            for name, tensor in weights.items()
        }
        torch.save(shards, actor / f"model_world_size_{RANKS}_rank_{rank}.pt")
        torch.distributed.destroy_process_group()
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": RANKS}))
    shutil.copytree(model, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    return actor


@pytest.fixture
def actor(inputs, tmp_path):
    return save_sharded(tmp_path / "global_step_20" / "actor", inputs[0])


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


def test_one_checkpoint_a_model_by_folder_or_id_and_nothing(inputs, actor, tmp_path):
    assert of_actor(actor) == Checkpoint("global_step_20", 20, str(actor))
    model = str(inputs[0])
    (found,) = find_checkpoints(model)
    assert found == Checkpoint("model", None, model)
    assert find_weights(found, 1, None) == Weights(model, model, None, fingerprint_of_folder(inputs[0]))
    assert find_checkpoints("Qwen/Qwen2.5-7B") == [Checkpoint("Qwen2.5-7B", None, "Qwen/Qwen2.5-7B")]
    for nothing in (tmp_path / "global_step_20" / "actor", tmp_path / "runs" / "checkpoints"):
        with pytest.raises(FileNotFoundError, match="no model's folder"):
            find_checkpoints(str(nothing))


def test_the_ranks_that_wrote_shards_load_them_on_the_base_model(inputs, actor, monkeypatch):
    monkeypatch.setattr(checkpoints, "merge", lambda folder, fingerprint: f"{folder}/merged")
    fingerprint = fingerprint_of_folder(actor)
    loaded = find_weights(of_actor(actor), RANKS, "/base")
    assert loaded == Weights("/base", str(actor / "huggingface"), str(actor.parent), fingerprint)
    # Other ranks or no base model: the same weights, merged.
    for ranks, base in ((RANKS + 1, "/base"), (RANKS, None)):
        assert find_weights(of_actor(actor), ranks, base) == Weights(*[f"{actor}/merged"] * 2, None, fingerprint)
    # Weights that verl saved in Hugging Face's format are used as they are.
    shutil.copy(inputs[0] / "model.safetensors", actor / "huggingface")
    assert find_weights(of_actor(actor), RANKS, None).model == str(actor / "huggingface")


@pytest.mark.slow
def test_shards_are_merged_once_and_again_when_they_change(inputs, actor, monkeypatch):
    merged = Path(find_weights(of_actor(actor), 1, None).model)
    assert merged == actor / MERGED_FOLDER
    weights, expected = load_file(merged / "model.safetensors"), load_file(inputs[0] / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor.bfloat16()), name
    AutoModelForCausalLM.from_pretrained(merged)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.subprocess, "run", None)
        assert find_weights(of_actor(actor), 1, None).model == str(merged)
    # A run that starts over writes its checkpoints over the old ones. A failed merge leaves nothing.
    (actor / f"model_world_size_{RANKS}_rank_1.pt").write_bytes(b"half a file")
    with pytest.raises(RuntimeError, match="verl's merger failed on"):
        find_weights(of_actor(actor), 1, None)
    assert not merged.exists() and not list(actor.glob(f".{MERGED_FOLDER}*"))


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
    for name, value in (("model", 0.0), ("model", 1.0), ("tokenizer", 0.0)):
        save_file({"w": torch.full((4,), value)}, tmp_path / f"{name}.safetensors")
        found.append(fingerprint_of_folder(tmp_path))
    (tmp_path / ".merged_from").write_text("of what")
    assert len(set(found)) == 3 and fingerprint_of_folder(tmp_path) == found[-1]
