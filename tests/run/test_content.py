"""The hashes by which a record tells models, data, rewards and other files apart; of a model on the hub, in a made-up
cache. Not covered: which keys of a configuration are hashed (test_record.py); the hub itself.
"""

import hashlib
import json
import sys

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from verl_clipx.run.content import (
    COMMIT_PREFIX,
    PART,
    count_parameters,
    hash_of_checkpoint,
    hash_of_data,
    hash_of_model,
    hash_of_named,
    hash_of_reward,
)


def make_model(folder, **files):
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    return str(folder)


def test_models_of_one_name_are_told_apart_and_copies_are_not(tmp_path):
    first = make_model(tmp_path / "a/base", config="{}", tokenizer="[1]")
    copy = make_model(tmp_path / "b/base", config="{}", tokenizer="[1]", notes="mine")
    others = [
        make_model(tmp_path / "c/base", config='{"layers": 2}', tokenizer="[1]"),
        make_model(tmp_path / "d/base", config="{}", tokenizer="[2]"),
        make_model(tmp_path / "e/base", config="{}"),
    ]
    assert hash_of_model([first]) == hash_of_model([copy])
    assert len({hash_of_model([path]) for path in (first, *others)}) == 4


def test_models_that_differ_in_weights_alone_are_told_apart(tmp_path):
    paths = [make_model(tmp_path / name / "base", config="{}", tokenizer="[1]") for name in "abc"]
    for path, value in zip(paths, (1.0, 1.0, 2.0), strict=True):
        save_file({"weight": torch.full((8,), value)}, f"{path}/model.safetensors")
    first, copy, tuned = [hash_of_model([path]) for path in paths]
    assert first == copy != tuned


def test_a_model_that_is_not_here_has_no_hash(tmp_path):
    for path in (str(tmp_path / "nowhere"), "nobody/has-this-model", str(make_model(tmp_path / "empty"))):
        assert hash_of_model([path]) is None
    assert hash_of_model([]) is None


def test_a_model_on_the_hub_has_the_hash_of_its_commit(tmp_path, monkeypatch):
    look_up = huggingface_hub.try_to_load_from_cache
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda name, file: look_up(name, file, cache_dir=tmp_path)
    )

    def hash_after_caching(commit):
        folder = tmp_path / "models--org--base"
        (folder / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
        # The weights of the two commits differ, and only they do.
        (folder / "snapshots" / commit / "config.json").write_text("{}")
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs/main").write_text(commit)
        return hash_of_model(["org/base"])

    first = hash_after_caching("a" * 40)
    second = hash_after_caching("b" * 40)
    assert first != second and hash_after_caching("a" * 40) == first and first.startswith(COMMIT_PREFIX)
    tokenizer = make_model(tmp_path / "tokenizer", tokenizer="[1]")
    assert hash_of_model(["org/base", tokenizer]).startswith(COMMIT_PREFIX)
    assert hash_of_model(["org/other"]) is None


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of the user's own, which would fail if it were imported."""
    (tmp_path / "own/parts").mkdir(parents=True)
    for name in ("own/__init__.py", "own/parts/__init__.py", "own/parts/tools.py"):
        (tmp_path / name).write_text("raise RuntimeError\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_of_tools_counts_with_the_sources_of_its_classes(package):
    tools = package / "tools.yaml"
    tools.write_text("tools:\n  - class_name: own.parts.tools.Search\n    config: {type: native}\n")
    before = hash_of_named(str(tools))
    (package / "own/parts/tools.py").write_text("another = 1\n")
    after = hash_of_named(str(tools))
    tools.write_text(tools.read_text() + "  - class_name: verl.tools.gsm8k_tool.Gsm8kTool\n")
    assert len({before, after, hash_of_named(str(tools)), None}) == 4
    assert "own" not in sys.modules
    tools.write_text("- {name: mine, _target_: own.parts.nowhere.Loop}\n")
    assert hash_of_named(str(tools)) is None


def test_what_another_key_names_has_the_hash_of_what_is_there(tmp_path):
    code = tmp_path / "dataset.py"
    code.write_text("class Data: ...")
    assert hash_of_named(str(code)) == hash_of_reward(str(code))
    model = make_model(tmp_path / "teacher", config="{}")
    assert hash_of_named(model) == hash_of_model([model])
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded/part.pt").write_bytes(b"1")
    assert hash_of_named(str(tmp_path / "sharded")) == hash_of_checkpoint(tmp_path / "sharded")
    damaged = tmp_path / "tools.yaml"
    damaged.write_text("tools: [")
    for path in (
        str(damaged),
        "nobody/has-this",
        str(tmp_path / "none.py"),
        "hdfs://host/tools.yaml",
        "pkg://no.such.module",
    ):
        assert hash_of_named(path) is None


def test_a_tokenizer_that_is_elsewhere_counts(tmp_path):
    model = make_model(tmp_path / "base", config="{}", tokenizer="[1]")
    tokenizers = [make_model(tmp_path / name, tokenizer=f"[{name}]") for name in ("2", "3")]
    hashes = {hash_of_model(paths) for paths in ([model], *([model, path] for path in tokenizers))}
    assert len(hashes) == 3 and None not in hashes
    assert hash_of_model([model, str(tmp_path / "nowhere")]) is None


def test_checkpoints_are_told_apart_by_their_weights(tmp_path):
    def save_checkpoint(name, value):
        folder = tmp_path / name / "actor"
        folder.mkdir(parents=True)
        # The value lies in the middle of the file, which is not read.
        weights = torch.zeros(4 * PART)
        weights[2 * PART] = value
        torch.save({"weight": weights}, folder / "model.pt")
        return folder.parent

    first = save_checkpoint("a", 1.0)
    copy = save_checkpoint("b", 1.0)
    other = save_checkpoint("c", 2.0)
    assert hash_of_checkpoint(first) == hash_of_checkpoint(copy) != hash_of_checkpoint(other)
    (copy / "data.pt").write_bytes(b"rows")
    assert hash_of_checkpoint(first) != hash_of_checkpoint(copy)
    (tmp_path / "empty").mkdir()
    assert hash_of_checkpoint(tmp_path / "empty") is None and hash_of_checkpoint(tmp_path / "nowhere") is None


def test_data_is_told_apart_by_content_and_order(tmp_path):
    files = {name: tmp_path / f"{name}/train.parquet" for name in "abc"}
    for name, file in files.items():
        file.parent.mkdir()
        file.write_text("rows" if name == "c" else name)
    a, b, c = map(str, files.values())
    assert len({hash_of_data(paths) for paths in ([a], [b], [c], [a, b], [b, a])}) == 5
    (tmp_path / "copy").write_text("a")
    assert hash_of_data([str(tmp_path / "copy")]) == hash_of_data([a])
    assert hash_of_data([]) is None and hash_of_data([a, "hdfs://x/train.parquet"]) is None


def test_a_reward_has_the_hash_of_its_file(tmp_path):
    file = tmp_path / "score.py"
    file.write_text("def score(): ...")
    expected = hashlib.sha256(file.read_bytes()).hexdigest()
    assert hash_of_reward(str(file)) == hash_of_reward(f"file://{file}") == expected
    assert hash_of_reward(None) is None and hash_of_reward(str(tmp_path / "none.py")) is None


def test_the_parameters_of_a_model_are_those_of_its_tensors_in_all_files(tmp_path):
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(())}, tmp_path / "model-1.safetensors", {"format": "pt"})
    save_file({"c": torch.zeros(5, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    assert count_parameters([str(tmp_path), "a/tokenizer"]) == 6 + 1 + 5


def test_weights_that_a_folder_has_twice_are_counted_once(tmp_path):
    indexed = tmp_path / "indexed"
    single = tmp_path / "single"
    for folder, name in ((indexed, "model-00001-of-00001.safetensors"), (single, "model.safetensors")):
        folder.mkdir()
        save_file({"a": torch.zeros(2, 3)}, folder / name)
        save_file({"a": torch.zeros(2, 3)}, folder / "consolidated.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (indexed / "model.safetensors.index.json").write_text(json.dumps(index))
    assert count_parameters([str(indexed)]) == 6
    assert count_parameters([str(single)]) == 6


@pytest.mark.parametrize("content", [None, b"", b"no safetensors", b"\x02" + bytes(7) + b"[]", b"\xff" * 8 + b"{}"])
def test_of_a_model_without_readable_weights_the_parameters_are_unknown(tmp_path, content):
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    assert count_parameters([str(tmp_path)]) is None
    assert count_parameters([]) is None
