"""Finding checkpoints; when verl loads their shards; merging real FSDP2 shards of two ranks with verl's merger.

Not covered: the hub, FSDP1, checkpoints larger than a megabyte, that verl loads them (tests/end_to_end).
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from tests.papers.evaluation.tiny import save_model
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


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    model = save_model(folder / "model")
    return model, save_sharded(folder / "global_step_20" / "actor", model)


def steps(folder: Path, *numbers: int) -> Path:
    for number in numbers:
        (folder / f"global_step_{number}" / "actor").mkdir(parents=True)
    return folder


def labels(found: list[Checkpoint]) -> list[tuple[str, int | None]]:
    return [(checkpoint.label, checkpoint.step) for checkpoint in found]


def test_a_runs_checkpoints_in_order_of_training(tmp_path):
    steps(tmp_path, 100, 20, 3)
    (tmp_path / "global_step_5").mkdir()  # its actor was rotated away
    (tmp_path / "global_step_7_backup").mkdir()
    assert labels(find_checkpoints(str(tmp_path))) == [
        ("global_step_3", 3),
        ("global_step_20", 20),
        ("global_step_100", 100),
    ]


def test_a_checkpoint_that_verl_had_not_finished_does_not_count(tmp_path):
    steps(tmp_path, 20, 40)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    assert labels(find_checkpoints(str(tmp_path))) == [("global_step_20", 20)]


def test_one_checkpoint_by_either_of_its_folders(sharded):
    _, actor = sharded
    expected = [Checkpoint("global_step_20", 20, str(actor))]
    assert find_checkpoints(str(actor)) == find_checkpoints(str(actor.parent)) == expected


def test_models_by_folder_and_by_id(sharded):
    model, _ = sharded
    (found,) = find_checkpoints(str(model))
    assert labels([found]) == [("model", None)]
    assert find_weights(found, 1, None) == Weights(str(model), str(model), None, fingerprint_of_folder(model))
    with pytest.raises(ValueError, match=r"model\.path=/base: .* is a whole model, so it has no base"):
        find_weights(found, 1, "/base")
    assert find_checkpoints("Qwen/Qwen2.5-7B") == [Checkpoint("Qwen2.5-7B", None, "Qwen/Qwen2.5-7B")]


def test_nothing_to_evaluate_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither a model"):
        find_checkpoints(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no such folder"):
        find_checkpoints(str(tmp_path / "runs" / "checkpoints"))


def test_the_ranks_that_wrote_shards_load_them_on_the_base_model(sharded, monkeypatch, tmp_path):
    _, actor = sharded
    (checkpoint,) = find_checkpoints(str(actor))
    merges = []
    monkeypatch.setattr(checkpoints, "merge", lambda source, target: (merges.append(source), target.mkdir()))
    fingerprint = fingerprint_of_folder(actor)
    loaded = find_weights(checkpoint, RANKS, "/base", tmp_path)
    assert loaded == Weights("/base", str(actor / "huggingface"), str(actor.parent), fingerprint) and not merges
    # Other ranks or no base model: the same weights, merged.
    merged = str(tmp_path / "global_step_20")
    for ranks, base in ((RANKS + 1, "/base"), (RANKS, None)):
        assert find_weights(checkpoint, ranks, base, tmp_path) == Weights(merged, merged, None, fingerprint)
    assert merges == [actor]


@pytest.mark.slow
def test_shards_are_merged_once_and_again_when_they_change(sharded, monkeypatch):
    model, actor = sharded
    (checkpoint,) = find_checkpoints(str(actor))
    merged = Path(find_weights(checkpoint, 1, None).model)
    assert merged == actor / MERGED_FOLDER
    weights, expected = load_file(merged / "model.safetensors"), load_file(model / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor.bfloat16()), name
    AutoModelForCausalLM.from_pretrained(merged)

    merges = []
    monkeypatch.setattr(checkpoints, "merge", lambda source, target: merges.append((source, target)))
    fingerprint = fingerprint_of_folder(merged)
    find_weights(checkpoint, 1, None)
    assert not merges
    # A run that starts over writes its checkpoints over the old ones.
    os.utime(actor / f"model_world_size_{RANKS}_rank_0.pt", ns=(1, 1))
    find_weights(checkpoint, 1, None)
    find_weights(checkpoint, 1, None)
    assert merges == [(actor, merged)]
    # The record of the shards is not part of what the model is.
    assert fingerprint_of_folder(merged) == fingerprint


@pytest.mark.slow
def test_merged_models_can_be_kept_elsewhere_and_a_failed_merge_leaves_nothing(sharded, tmp_path):
    _, actor = sharded
    broken = tmp_path / "global_step_40" / "actor"
    shutil.copytree(actor, broken, ignore=shutil.ignore_patterns(MERGED_FOLDER))
    (broken / f"model_world_size_{RANKS}_rank_1.pt").write_bytes(b"half a file")
    (checkpoint,) = find_checkpoints(str(broken))
    with pytest.raises(RuntimeError, match="verl's merger failed on"):
        find_weights(checkpoint, 1, None, tmp_path / "merged")
    assert not list((tmp_path / "merged").iterdir())
    assert not (broken / MERGED_FOLDER).exists()


def test_weights_that_verl_saved_in_hugging_face_format_are_used_as_they_are(sharded, tmp_path):
    model, actor = sharded
    copy = tmp_path / "global_step_20" / "actor"
    shutil.copytree(actor, copy)
    shutil.copy(model / "model.safetensors", copy / "huggingface")
    (checkpoint,) = find_checkpoints(str(copy))
    assert find_weights(checkpoint, RANKS, None).model == str(copy / "huggingface")


def test_checkpoints_that_cannot_be_merged_say_why(tmp_path):
    (megatron,) = find_checkpoints(str(steps(tmp_path / "megatron", 1)))
    with pytest.raises(ValueError, match="--backend megatron"):
        find_weights(megatron, 1, None)
    (adapters,) = find_checkpoints(str(steps(tmp_path / "lora", 1)))
    (Path(adapters.source) / "fsdp_config.json").write_text("{}")
    (Path(adapters.source) / "lora_train_meta.json").write_text("{}")
    with pytest.raises(ValueError, match="LoRA adapters"):
        find_weights(adapters, 1, None)


def test_a_fingerprint_changes_with_any_weight_file(tmp_path):
    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    before = fingerprint_of_folder(tmp_path)
    assert fingerprint_of_folder(tmp_path) == before
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    changed = fingerprint_of_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert len({before, changed, fingerprint_of_folder(tmp_path)}) == 3
