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


def read_all_lines(path):
    return list(read_lines(path))


def test_a_file_that_is_written_can_be_read(tmp_path):
    write_json(tmp_path / "new" / "file.json", {"é": 1})
    assert read_json(tmp_path / "new" / "file.json") == {"é": 1}


def test_the_file_reaches_the_disk_before_it_gets_its_name_and_its_folder_after(tmp_path, monkeypatch):
    calls = []
    fsync = os.fsync
    replace = os.replace

    def fsync_and_note(file):
        calls.append("fsync")
        return fsync(file)

    def replace_and_note(*paths):
        calls.append("replace")
        return replace(*paths)

    monkeypatch.setattr(os, "fsync", fsync_and_note)
    monkeypatch.setattr(os, "replace", replace_and_note)
    write_json(tmp_path / "file.json", 1)
    assert calls == ["fsync", "replace", "fsync"]


def test_an_interrupted_write_leaves_the_old_file_alone(tmp_path):
    write_json(tmp_path / "file.json", 1)
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "file.json") as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]
    assert read_json(tmp_path / "file.json") == 1


def test_no_folder_is_written_over(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_json(tmp_path / "folder", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


SHAPE = {"a": int, "all": {str: {"b": str | None}}, "list": [{"c": int}]}
OF_THE_SHAPE = {"a": 1, "all": {"x": {"b": None}, "y": {"b": "s"}}, "list": [{"c": 1}, {"c": 2}], "more": []}


def test_an_object_of_the_given_shape_is_read(tmp_path):
    write_json(tmp_path / "file.json", OF_THE_SHAPE)
    assert read_json_object(tmp_path / "file.json", SHAPE) == OF_THE_SHAPE


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "it is [1], not of the type dict"),
        (OF_THE_SHAPE | {"a": "x"}, "a is x, not of the type int"),
        (OF_THE_SHAPE | {"all": []}, "all is [], not of the type dict"),
        (OF_THE_SHAPE | {"all": {"x": {}}}, "all.x has no b"),
        (OF_THE_SHAPE | {"list": [{"c": 1}, {"c": None}]}, "list.1.c is None, not of the type int"),
    ],
)
def test_an_object_of_another_shape_is_refused_with_the_place(tmp_path, content, message):
    write_json(tmp_path / "file.json", content)
    with pytest.raises(ValueError, match=rf"file\.json: {re.escape(message)}"):
        read_json_object(tmp_path / "file.json", SHAPE)


@pytest.mark.parametrize(
    "read", [read_bytes, read_text, read_json, read_config, read_whole_number, read_table, read_all_lines]
)
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
        pytest.param(read_config, b"a: " + b"[" * 100_000, "not YAML of keys and values", id="YAML, nested too deeply"),
        pytest.param(read_config, b"data: {seed: 1", "not YAML of keys and values", id="YAML, cut off"),
        pytest.param(
            read_config,
            b"a: !!python/object/apply:os.getcwd []",
            "not YAML of keys and values",
            id="YAML that calls a function",
        ),
        pytest.param(read_config, b"a: ${", "not YAML of keys and values", id="YAML with half a reference"),
        pytest.param(read_config, b"- 1", "contains no keys and values", id="YAML of a list"),
        pytest.param(read_config, b"word", "contains no keys and values", id="YAML of a word"),
        pytest.param(read_config, b"", "contains no keys and values", id="no YAML"),
        pytest.param(read_json, b"{", "not JSON", id="JSON, cut off"),
        pytest.param(read_json, b"[" * 100_000, "not JSON", id="JSON, nested too deeply"),
        pytest.param(read_json, b"", "not JSON", id="no JSON"),
        pytest.param(read_json, b"\xff", "not JSON", id="JSON that is no text"),
        pytest.param(read_json, b'{"a": 1} 2', "not JSON", id="two values of JSON"),
        pytest.param(read_whole_number, b"", ".* is not a whole number", id="no number"),
        pytest.param(read_whole_number, b"x", ".* is not a whole number", id="a letter"),
        pytest.param(read_whole_number, b"-1", ".* is not a whole number", id="a negative number"),
        pytest.param(read_whole_number, b"1.5", ".* is not a whole number", id="a fraction"),
        pytest.param(read_whole_number, "\u0663".encode(), ".* is not a whole number", id="an Arabic digit"),
        pytest.param(read_whole_number, b"1 2", ".* is not a whole number", id="two numbers"),
    ],
)
def test_a_content_of_another_kind_is_named(tmp_path, read, content, message):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=rf"file: {message}"):
        read(tmp_path / "file")


def test_a_number_is_read(tmp_path):
    (tmp_path / "file").write_text("12\n")
    assert read_json(tmp_path / "file") == 12
    assert read_whole_number(tmp_path / "file") == 12


def test_a_configuration_is_read_with_its_references_resolved(tmp_path):
    (tmp_path / "file").write_text("a: {b: [1, 1e-6]}\nc: ${a.b}\n")
    assert read_config(tmp_path / "file") == {"a": {"b": [1, 1e-6]}, "c": [1, 1e-6]}


@pytest.fixture
def table(tmp_path):
    """A Parquet file with the columns a and b."""
    path = tmp_path / "table.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": [1], "b": ["x"]}), path)
    return path


def test_of_a_table_the_columns_that_are_asked_for_are_read(table):
    assert read_table(table, ["b"]).column_names == ["b"]


def test_a_missing_column_is_named_with_those_that_there_are(table):
    with pytest.raises(ValueError, match=r"table\.parquet: no column c, only a, b"):
        read_table(table, ["c"])


def test_a_table_that_is_cut_off_is_named(table):
    table.write_bytes(table.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"table\.parquet: not a Parquet file, or cut off"):
        read_table(table)


def test_a_damaged_page_of_a_sound_parquet_file_is_named(tmp_path):
    """pyarrow raises an OSError without a number or a file name for it."""
    path = tmp_path / "table.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": list(range(5000))}), path, compression="snappy")
    content = bytearray(path.read_bytes())
    content[200:240] = b"\xff" * 40
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"table\.parquet: not a Parquet file, or cut off"):
        read_table(path)


def test_too_little_memory_to_write_is_blamed_on_the_machine(tmp_path):
    path = tmp_path / "file.json"
    with pytest.raises(ValueError, match=r"file\.json: this machine has too little memory"), replacing(path):
        raise MemoryError


def test_too_little_memory_to_read_is_blamed_on_the_file(tmp_path):
    path = tmp_path / "file.json"
    path.write_text("{}")

    def raise_memory_error(_):
        raise MemoryError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pathlib.Path.read_bytes", raise_memory_error)
        with pytest.raises(ValueError, match=r"file\.json: larger than this machine's memory"):
            read_bytes(path)
