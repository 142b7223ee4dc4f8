"""Files that appear whole or not at all.

Covers: what reaches the disk in which order; an interrupted write. Not covered: a kill (tests/evaluation/test_run.py).
"""

import os

import pytest

from verl_clipx.files import read_json, replacing, write_json


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
