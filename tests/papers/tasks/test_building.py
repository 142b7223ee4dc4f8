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


def make_row(text, truth="1", **extra):
    return {
        "data_source": "invented",
        "prompt": [{"role": "user", "content": text}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": 0, "split": "train", **extra},
    }


def define(rows, **changes):
    """Return the definition of a data set with these rows, and a list of the calls of its builder."""
    calls = []

    def build(source, *, split, prompt, seed: int = 0):
        calls.append((source, split, prompt, seed))
        yield from rows

    prompts = ("r1_base", "boxed_step_by_step")
    definition = DatasetDefinition("invented", "math", "Invented", "Apache-2.0", prompts, build)
    return replace(definition, **changes), calls


ROWS = [
    make_row("What is 1+1?", "2"),
    make_row("what  is 1+1?", "2"),
    make_row("What is 2+2?", "4"),
    make_row("WHAT IS 2+2?", "5"),
]


def test_duplicates_are_dropped_and_counted(tmp_path):
    definition, _ = define(ROWS)
    record = build_split(definition, tmp_path / "new", split="train")
    assert record.rows == 2
    assert record.duplicates == 2
    assert record.conflicts == 1
    assert pq.read_table(tmp_path / "new" / "train.parquet").to_pylist() == [ROWS[0], ROWS[2]]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["train.parquet"]


def test_duplicates_that_were_drawn_on_purpose_are_kept(tmp_path):
    definition, _ = define(ROWS, repeats=True)
    record = build_split(definition, tmp_path / "new", split="train")
    assert record.rows == 4
    assert record.duplicates == record.conflicts == 0
    assert pq.read_table(tmp_path / "new" / "train.parquet").to_pylist() == ROWS


def test_hash_by_hand_whatever_the_chunks(tmp_path, monkeypatch):
    line = (
        '{"ability":"math","data_source":"invented","extra_info":{"index":0,"split":"train"},'
        '"prompt":[{"content":"What is 1+1?","role":"user"}],"reward_model":{"ground_truth":"2","style":"rule"}}\n'
    )
    assert row_line(ROWS[0]).decode() == line
    rows = [ROWS[0], *(make_row(str(number)) for number in range(10))]
    monkeypatch.setattr(building, "ROWS_PER_CHUNK", 3)
    sha256 = build_split(define(rows)[0], tmp_path, split="train").sha256
    assert sha256 == hashlib.sha256(line.encode() + b"".join(map(row_line, rows[1:]))).hexdigest()


def test_a_file_that_has_changed_since_is_noticed_by_its_hash(tmp_path):
    definition, _ = define(ROWS)
    source = tmp_path / "copy.jsonl"
    source.write_text("first content")
    record = build_split(definition, tmp_path / "out", split="train", source=source)
    assert record.request.source == f"copy.jsonl sha256:{hashlib.sha256(b'first content').hexdigest()}"
    source.write_text("other content")
    with pytest.raises(FileExistsError, match=r"made with source='copy.jsonl sha256:.*', not 'copy.jsonl sha256:"):
        build_split(definition, tmp_path / "out", split="train", source=source)


def test_the_hash_of_a_folder_follows_the_names_of_its_files(tmp_path):
    definition, _ = define(ROWS)
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "a").write_text("content")

    def build_and_name_source(out):
        return build_split(definition, tmp_path / out, split="train", source=folder).request.source

    source = build_and_name_source("first")
    (folder / "b").write_text("")
    assert build_and_name_source("with another file") != source
    (folder / "b").unlink()
    assert build_and_name_source("without it") == source


def test_fields_that_appear_after_the_first_chunk_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "ROWS_PER_CHUNK", 2)
    rows = [
        make_row("a"),
        make_row("b", solution=None),
        make_row("c", solution="x"),
        make_row("d", level=1),
        make_row("e", level=0.5),
    ]
    build_split(define(rows)[0], tmp_path, split="train")
    extra_infos = [row["extra_info"] for row in pq.read_table(tmp_path / "train.parquet").to_pylist()]
    assert [extra_info["solution"] for extra_info in extra_infos] == [None, None, "x", None, None]
    assert [extra_info["level"] for extra_info in extra_infos] == [None, None, None, 1.0, 0.5]


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
        ([make_row("a", "1"), make_row("b", ["1"])], {}, "invented, train: rows of different types"),
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


@pytest.fixture
def built_file(tmp_path):
    build_split(define(ROWS)[0], tmp_path, split="train")
    return tmp_path / "train.parquet"


def test_a_file_has_the_record_of_its_building(tmp_path):
    definition, _ = define(ROWS)
    record = build_split(definition, tmp_path, split="train")
    assert read_record(tmp_path / "train.parquet") == record


def test_a_file_that_is_missing_or_damaged_has_no_record(built_file):
    content = built_file.read_bytes()
    built_file.write_bytes(content[:-10])
    assert read_record(built_file) is None
    built_file.write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    assert read_record(built_file) is None
    built_file.unlink()
    assert read_record(built_file) is None


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param({}, id="no record"),
        pytest.param({METADATA_KEY: b"[1]"}, id="a list"),
        pytest.param({METADATA_KEY: b'{"rows": 1}'}, id="a record with other fields"),
    ],
)
def test_a_file_without_a_record_of_this_form_has_none(built_file, metadata):
    pq.write_table(pq.read_table(built_file).replace_schema_metadata(metadata), built_file)
    assert read_record(built_file) is None


def test_the_record_of_a_file_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    definition, _ = define(ROWS)
    build_split(definition, tmp_path, split="train")
    file = tmp_path / "train.parquet"

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(pq, "read_metadata", refuse)
    with pytest.raises(PermissionError):
        read_record(file)
    with pytest.raises(PermissionError):
        build_split(definition, tmp_path, split="train")


def test_prompts_are_equal_apart_from_case_blanks_and_width():
    def normalise(content, role="user"):
        return normalise_prompt([{"role": role, "content": content}])

    assert normalise("Ｗhat\n is\t1+1 ") == normalise("what is 1+1")
    assert normalise("x", "system") != normalise("x")
    assert normalise("1+1") != normalise("11")


def test_options_are_the_builders_further_arguments():
    assert option_names(define(ROWS)[0]) == ("seed",)
