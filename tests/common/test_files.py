"""Files that appear whole or not at all, and files that cannot be read. Not covered: a kill
(tests/training/trainer/test_log.py); what commands make of the errors (tests/test_wrong_files.py).
"""

import os
import re

import pyarrow
import pyarrow.parquet
import pytest

from verl_clipx.common.files import (
    read_bytes,
    read_config,
    read_json,
    read_json_object,
    read_lines,
    read_table,
    read_text,
    read_whole_number,
    replacing,
    write_json,
)

READERS = [read_bytes, read_text, read_json, read_config, read_whole_number, read_table]
READERS += [lambda path: [*read_lines(path)]]


def test_the_file_reaches_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: order.append("fsync") or fsync(file))
    monkeypatch.setattr(os, "replace", lambda *paths: order.append("replace") or replace(*paths))
    write_json(tmp_path / "new" / "file.json", {"é": 1})
    assert order == ["fsync", "replace", "fsync"]
    assert read_json(tmp_path / "new" / "file.json") == {"é": 1}


def test_an_interrupted_write_leaves_the_old_file_alone_and_no_folder_is_written_over(tmp_path):
    write_json(tmp_path / "file.json", 1)
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "file.json") as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]
    assert read_json(tmp_path / "file.json") == 1
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_json(tmp_path / "folder", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.json", "folder"]


SHAPE = {"a": int, "all": {str: {"b": str | None}}, "list": [{"c": int}]}
RIGHT = {"a": 1, "all": {"x": {"b": None}, "y": {"b": "s"}}, "list": [{"c": 1}, {"c": 2}], "more": []}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "it is [1], not of the type dict"),
        (RIGHT | {"a": "x"}, "a is x, not of the type int"),
        (RIGHT | {"all": []}, "all is [], not of the type dict"),
        (RIGHT | {"all": {"x": {}}}, "all.x has no b"),
        (RIGHT | {"list": [{"c": 1}, {"c": None}]}, "list.1.c is None, not of the type int"),
    ],
)
def test_an_objects_shape_is_checked_to_the_depth_that_is_given(tmp_path, content, message):
    write_json(tmp_path / "file.json", RIGHT)
    assert read_json_object(tmp_path / "file.json", SHAPE) == RIGHT
    write_json(tmp_path / "file.json", content)
    with pytest.raises(ValueError, match=rf"file\.json: {re.escape(message)}"):
        read_json_object(tmp_path / "file.json", SHAPE)


@pytest.mark.parametrize("read", READERS)
def test_what_is_no_file_is_named_and_never_waited_for(tmp_path, read):
    with pytest.raises(FileNotFoundError, match=r"missing"):
        read(tmp_path / "missing")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"folder: a folder, not a file"):
        read(tmp_path / "folder")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe: a device or pipe, not a file"):
        read(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        *(
            (read_config, one, "not YAML of keys and values")
            for one in (b"a: " + b"[" * 100_000, b"data: {seed: 1", b"a: !!python/object/apply:os.getcwd []", b"a: ${")
        ),
        *((read_config, one, "contains no keys and values") for one in (b"- 1", b"word", b"")),
        *((read_json, one, "not JSON") for one in (b"{", b"[" * 100_000, b"", b"\xff", b'{"a": 1} 2')),
        *(
            (read_whole_number, one, ".* is not a whole number")
            for one in (b"", b"x", b"-1", b"1.5", "\u0663".encode(), b"1 2")
        ),
    ],
)
def test_a_content_of_another_kind_is_named(tmp_path, read, content, message):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=rf"file: {message}"):
        read(tmp_path / "file")


def test_what_can_be_read_is(tmp_path):
    path = tmp_path / "file"
    path.write_text("12\n")
    assert read_json(path) == read_whole_number(path) == 12
    path.write_text("a: {b: [1, 1e-6]}\nc: ${a.b}\n")
    assert read_config(path) == {"a": {"b": [1, 1e-6]}, "c": [1, 1e-6]}


def test_a_table_has_the_columns_that_are_asked_for_and_is_whole(tmp_path):
    path = tmp_path / "table.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": [1], "b": ["x"]}), path)
    assert read_table(path, ["b"]).column_names == ["b"]
    with pytest.raises(ValueError, match=r"table\.parquet: no column c, only a, b"):
        read_table(path, ["c"])
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"table\.parquet: not a Parquet file, or cut off"):
        read_table(path)


def test_a_damaged_page_of_a_sound_parquet_file_is_named(tmp_path):
    """pyarrow raises an OSError without a number or a file name for it."""
    path = tmp_path / "table.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": list(range(5000))}), path, compression="snappy")
    content = bytearray(path.read_bytes())
    content[200:240] = b"\xff" * 40
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"table\.parquet: not a Parquet file, or cut off"):
        read_table(path)


def test_too_little_memory_is_blamed_on_the_file_only_where_it_is_read(tmp_path):
    path = tmp_path / "file.json"
    with pytest.raises(ValueError, match=r"file\.json: this machine has too little memory"), replacing(path):
        raise MemoryError
    path.write_text("{}")

    def without_memory(_):
        raise MemoryError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pathlib.Path.read_bytes", without_memory)
        with pytest.raises(ValueError, match=r"file\.json: larger than this machine's memory"):
            read_bytes(path)
