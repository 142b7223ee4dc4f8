"""Files that appear whole or not at all, and JSON that cannot be read.

Covers: what reaches the disk in which order; an interrupted write; cut off, nested, large files.
Not covered: a kill (tests/evaluation/test_run.py).
"""

import os

import pytest

from verl_clipx import files
from verl_clipx.files import read_json, read_json_object, replacing, write_json


def test_the_file_reaches_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: order.append("fsync") or fsync(file))
    monkeypatch.setattr(os, "replace", lambda *paths: order.append("replace") or replace(*paths))
    write_json(tmp_path / "new" / "file.json", {"é": 1})
    assert order == ["fsync", "replace", "fsync"]
    assert read_json(tmp_path / "new" / "file.json") == {"é": 1}


def test_an_interrupted_write_leaves_the_old_file_alone(tmp_path):
    write_json(tmp_path / "file.json", 1)
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "file.json") as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]
    assert read_json(tmp_path / "file.json") == 1


@pytest.mark.parametrize("content", [b"{", b"[" * 100_000, b"", b"\xff", b'{"a": 1} 2'])
def test_what_is_no_json_is_named(tmp_path, content):
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"file\.json: not JSON"):
        read_json(tmp_path / "file.json")


def test_reading_is_bounded(tmp_path, monkeypatch):
    write_json(tmp_path / "file.json", ["x" * 100])
    monkeypatch.setattr(files, "MAX_BYTES", 50)
    with pytest.raises(ValueError, match=r"file\.json: larger than 50 bytes"):
        read_json(tmp_path / "file.json")


def test_an_object_is_one(tmp_path):
    write_json(tmp_path / "file.json", [1])
    with pytest.raises(ValueError, match=r"file\.json: holds list, not an object"):
        read_json_object(tmp_path / "file.json")
