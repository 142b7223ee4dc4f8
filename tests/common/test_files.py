"""Files that appear whole or not at all, and files that cannot be read.

Covers: what reaches the disk in which order; an interrupted write; cut off, nested, large files, aliases, files of the
wrong kind. Not covered: a kill (tests/papers/evaluation/test_run.py); what commands make of the errors
(tests/test_wrong_files.py).
"""

import os
import re

import pyarrow
import pyarrow.parquet
import pytest

from verl_clipx.common import files
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

READERS = [
    read_bytes,
    read_text,
    read_json,
    read_config,
    read_whole_number,
    read_table,
    lambda path: [*read_lines(path)],
]


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
    with pytest.raises(ValueError, match=r"file\.json: it is \[1\], not of the type dict"):
        read_json_object(tmp_path / "file.json")


def test_an_objects_shape_is_checked_to_the_depth_that_is_given(tmp_path):
    shape = {"a": int, "all": {str: {"b": str | None}}, "list": [{"c": int}]}
    right = {"a": 1, "all": {"x": {"b": None}, "y": {"b": "s"}}, "list": [{"c": 1}, {"c": 2}], "more": []}
    write_json(tmp_path / "file.json", right)
    assert read_json_object(tmp_path / "file.json", shape) == right
    for change, message in (
        ({"a": "x"}, "a is x, not of the type int"),
        ({"all": []}, "all is [], not of the type dict"),
        ({"all": {"x": {}}}, "all.x has no b"),
        ({"list": [{"c": 1}, {"c": None}]}, "list.1.c is None, not of the type int"),
    ):
        write_json(tmp_path / "file.json", right | change)
        with pytest.raises(ValueError, match=rf"file\.json: {re.escape(message)}"):
            read_json_object(tmp_path / "file.json", shape)


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


@pytest.mark.parametrize("read", [one for one in READERS[:-1] if one is not read_table])
def test_no_reader_holds_more_than_the_limit(tmp_path, read):
    (tmp_path / "file").write_bytes(b"")
    # Takes no room on the disk.
    os.truncate(tmp_path / "file", files.MAX_BYTES + 1)
    with pytest.raises(ValueError, match=rf"{tmp_path}/file.*: (larger|longer) than \d+ bytes"):
        read(tmp_path / "file")


def test_lines_are_bounded_and_not_their_number(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 5)
    (tmp_path / "log").write_bytes(b"1234\n" * 100)
    assert [*read_lines(tmp_path / "log")] == [b"1234\n"] * 100
    (tmp_path / "log").write_bytes(b"1234\n123456\n")
    with pytest.raises(ValueError, match=r"log, line 2: longer than 5 bytes"):
        [*read_lines(tmp_path / "log")]


BILLION_LAUGHS = "a: &a [x, x, x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}]\n" for a, b in zip("abcdefghijk", "bcdefghijkl", strict=True)
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BILLION_LAUGHS, "has an alias"),
        ("a: &a [*a]", "has an alias"),
        ("a: " + "[" * 60, "has more than 50 levels"),
        ("{a: " * 60, "has more than 50 levels"),
        # Some versions of PyYAML have a limit of their own.
        ("a: " + "[" * 100_000, "(has more than 50 levels|not YAML)"),
        ("{a: " * 100_000, "(has more than 50 levels|not YAML)"),
        ("data: {seed: 1", "not YAML of keys and values"),
        ("a: !!python/object/apply:os.getcwd []", "not YAML of keys and values"),
        ("a: ${", "not YAML of keys and values"),
        ("- 1", "contains no keys and values"),
        ("word", "contains no keys and values"),
        ("", "contains no keys and values"),
        ("a: 1\n" * 300_000, "larger than"),
    ],
)
def test_a_configuration_is_keys_and_values_of_bounded_size(tmp_path, content, message):
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ValueError, match=rf"config\.yaml: {message}"):
        read_config(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text("a: {b: [1, 1e-6]}\nc: ${a.b}\n")
    assert read_config(tmp_path / "config.yaml") == {"a": {"b": [1, 1e-6]}, "c": [1, 1e-6]}


@pytest.mark.parametrize("content", [b"", b"x", b"-1", b"1.5", "\u0663".encode(), b"1 2"])
def test_a_number_is_one(tmp_path, content):
    (tmp_path / "step").write_bytes(content)
    with pytest.raises(ValueError, match=r"step: .* is not a whole number"):
        read_whole_number(tmp_path / "step")
    (tmp_path / "step").write_bytes(b"12\n")
    assert read_whole_number(tmp_path / "step") == 12


def test_a_table_that_would_fill_the_memory_is_refused_by_its_footer(tmp_path, monkeypatch):
    # A million equal texts: a gigabyte in a small file.
    path = tmp_path / "table.parquet"
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1_000_000, pyarrow.int8()), ["x" * 1000])
    pyarrow.parquet.write_table(pyarrow.table({"a": column, "b": column}), path)
    assert path.stat().st_size < 1_000_000
    assert read_table(path, ["b"]).column_names == ["b"]
    with pytest.raises(ValueError, match=r"table\.parquet: no column c, only a, b"):
        read_table(path, ["c"])
    monkeypatch.setattr(files, "MAX_TABLE_ROWS", 999_999)
    with pytest.raises(ValueError, match=r"table\.parquet: 1000000 rows, more than 999999"):
        read_table(path)
    monkeypatch.setattr(files, "MAX_TABLE_ROWS", 1_000_000)
    monkeypatch.setattr(files, "MAX_TABLE_BYTES", 1000)
    with pytest.raises(ValueError, match=r"table\.parquet: \d+ bytes unpacked, more than 1000"):
        read_table(path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"table\.parquet: not a Parquet file, or cut off"):
        read_table(path)


def test_a_folder_is_not_written_over(tmp_path):
    (tmp_path / "file.json").mkdir()
    with pytest.raises(OSError, match=r"file\.json"):
        write_json(tmp_path / "file.json", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]
