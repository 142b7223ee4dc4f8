"""Building a split: deduplication, counts, hash, schema over chunks, what is refused.

Not covered: sets of the papers' sizes; the hub; verl's reading of it (test_ground_truth.py); going on, and what
fails on the way (test_commands.py).
"""

import errno
import hashlib
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from verl_clipx.papers.tasks import building
from verl_clipx.papers.tasks.building import (
    METADATA_KEY,
    build_split,
    normalise_prompt,
    option_names,
    read_record,
    row_line,
)
from verl_clipx.papers.tasks.definition import DatasetDefinition


def row(text, truth="1", **extra):
    return {
        "data_source": "invented",
        "prompt": [{"role": "user", "content": text}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": 0, "split": "train", **extra},
    }


def define(rows, **changes):
    calls = []

    def build(source, *, split, prompt, seed: int = 0):
        calls.append((source, split, prompt, seed))
        yield from rows

    prompts = ("r1_base", "boxed_step_by_step")
    definition = DatasetDefinition("invented", "math", "Invented", "Apache-2.0", prompts, build)
    return replace(definition, **changes), calls


ROWS = [row("What is 1+1?", "2"), row("what  is 1+1?", "2"), row("What is 2+2?", "4"), row("WHAT IS 2+2?", "5")]


@pytest.mark.parametrize(("repeats", "counts", "kept"), [(False, (2, 2, 1), [0, 2]), (True, (4, 0, 0), [0, 1, 2, 3])])
def test_duplicates_are_dropped_and_counted_unless_they_were_drawn_on_purpose(tmp_path, repeats, counts, kept):
    definition, _ = define(ROWS, repeats=repeats)
    record = build_split(definition, tmp_path / "new", split="train")
    assert (record.rows, record.duplicates, record.conflicts) == counts
    assert pq.read_table(tmp_path / "new" / "train.parquet").to_pylist() == [ROWS[index] for index in kept]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["train.parquet"]


def test_hash_by_hand_whatever_the_chunks(tmp_path, monkeypatch):
    line = (
        '{"ability":"math","data_source":"invented","extra_info":{"index":0,"split":"train"},'
        '"prompt":[{"content":"What is 1+1?","role":"user"}],"reward_model":{"ground_truth":"2","style":"rule"}}\n'
    )
    assert row_line(ROWS[0]).decode() == line
    rows = [ROWS[0], *(row(str(number)) for number in range(10))]
    monkeypatch.setattr(building, "ROWS_PER_CHUNK", 3)
    sha256 = build_split(define(rows)[0], tmp_path, split="train").sha256
    assert sha256 == hashlib.sha256(line.encode() + b"".join(map(row_line, rows[1:]))).hexdigest()


def test_a_changed_local_copy_is_noticed(tmp_path):
    """The hash of a file is its own; a folder's follows names and sizes."""
    definition, _ = define(ROWS)
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "a").write_text("one")
    record = build_split(definition, tmp_path / "file", split="train", source=folder / "a")
    assert record.request.source == f"a sha256:{hashlib.sha256(b'one').hexdigest()}"
    sources = []
    for number, change in enumerate([lambda: None, lambda: (folder / "b").write_text(""), (folder / "b").unlink]):
        change()
        sources.append(build_split(definition, tmp_path / str(number), split="train", source=folder).request.source)
    assert sources[0] == sources[2] != sources[1]
    (folder / "a").write_text("two")
    with pytest.raises(FileExistsError, match=r"made with source='a sha256:.*', not 'a sha256:"):
        build_split(definition, tmp_path / "file", split="train", source=folder / "a")


def test_fields_that_appear_after_the_first_chunk_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "ROWS_PER_CHUNK", 2)
    rows = [row("a"), row("b", solution=None), row("c", solution="x"), row("d", level=1), row("e", level=0.5)]
    build_split(define(rows)[0], tmp_path, split="train")
    table = pq.read_table(tmp_path / "train.parquet").to_pylist()
    extra = [(r["extra_info"]["solution"], r["extra_info"]["level"]) for r in table]
    assert extra == [(None, None), (None, None), ("x", None), (None, 1.0), (None, 0.5)]


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        (ROWS, {"limit": 0}, r"limit=0 is below 1"),
        (ROWS, {"options": {"size": 1}}, r"option 'size' is unknown to invented: seed"),
        ([], {}, "invented, train: no rows"),
        (
            [{"prompt": ROWS[0]["prompt"], "reward_model": {"ground_truth": ""}}],
            {},
            r"has the columns \['prompt', 'rew",
        ),
        ([{"prompt": ROWS[0]["prompt"]}], {}, r"invented: a row has the columns \['prompt'\]; verl's rows have"),
        ([{}], {}, r"invented: a row has the columns \[\]; verl's rows have"),
        ([row("a", "1"), row("b", ["1"])], {}, "invented, train: rows of different types"),
    ],
)
@pytest.mark.parametrize("size", [1, 100])
def test_what_is_wrong_is_named_and_leaves_nothing(tmp_path, monkeypatch, rows, arguments, message, size):
    monkeypatch.setattr(building, "ROWS_PER_CHUNK", size)
    definition, calls = define(rows)
    with pytest.raises(ValueError, match=message):
        build_split(definition, tmp_path, **({"split": "train"} | arguments))
    assert calls == [] or not arguments
    assert list(tmp_path.iterdir()) == []


def test_the_record_of_a_file_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    """A file that is missing or damaged has none, nor has one without a record or with a record of another form."""
    definition, _ = define(ROWS)
    record = build_split(definition, tmp_path, split="train")
    file = tmp_path / "train.parquet"
    assert read_record(file) == record
    content = file.read_bytes()
    table = pq.read_table(file)
    for name, damaged in (("cut", content[:-10]), ("overwritten", b"PAR1" + bytes(100) + b"PAR1")):
        (tmp_path / name).write_bytes(damaged)
        assert read_record(tmp_path / name) is None
    for name, metadata in (("none", {}), ("list", {METADATA_KEY: b"[1]"}), ("fields", {METADATA_KEY: b'{"rows": 1}'})):
        pq.write_table(table.replace_schema_metadata(metadata), tmp_path / name)
        assert read_record(tmp_path / name) is None
    assert read_record(tmp_path / "missing") is None

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(pq, "read_metadata", refuse)
    with pytest.raises(PermissionError):
        read_record(file)
    with pytest.raises(PermissionError):
        build_split(definition, tmp_path, split="train")


def test_normalised_prompts_and_option_names():
    def text(content, role="user"):
        return normalise_prompt([{"role": role, "content": content}])

    assert text("Ｗhat\n is\t1+1 ") == text("what is 1+1")
    assert text("x", "system") != text("x")
    assert text("1+1") != text("11")
    assert option_names(define(ROWS)[0]) == ("seed",)
