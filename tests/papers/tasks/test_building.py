"""Building a split: deduplication, counts, hash, resume, schema over chunks, what is refused, verl's reading of it.

Not covered: sets of the papers' sizes; the hub.
"""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from verl_clipx.papers.tasks import building
from verl_clipx.papers.tasks.building import build_split, normalise_prompt, option_names, read_record, row_line
from verl_clipx.papers.tasks.definition import DatasetDefinition
from verl_clipx.papers.tasks.templates import PLAIN_TEXT_CHAT_TEMPLATE, template_named
from verl_clipx.papers.tasks.tiny_policy.tokenizer import build_tokenizer


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

    def build(source, *, split, prompt, seed=0):
        calls.append((source, split, prompt, seed))
        yield from rows

    definition = DatasetDefinition(
        name="invented",
        task="math",
        kind="train",
        summary="Invented",
        hub=None,
        license="Apache-2.0",
        prompts=("r1_base", "boxed_step_by_step"),
        rows=build,
        splits=("train", "test"),
    )
    return replace(definition, **changes), calls


ROWS = [row("What is 1+1?", "2"), row("what  is 1+1?", "2"), row("What is 2+2?", "4"), row("WHAT IS 2+2?", "5")]


def test_repeats_that_were_drawn_on_purpose_stay(tmp_path):
    definition, _ = define(ROWS, repeats=True)
    record = build_split(definition, tmp_path / "new", split="train")
    assert (record.rows, record.duplicates, record.conflicts) == (4, 0, 0)
    assert pq.read_table(tmp_path / "new" / "train.parquet").num_rows == 4


def test_duplicates_are_dropped_and_counted(tmp_path):
    definition, _ = define(ROWS)
    record = build_split(definition, tmp_path / "new", split="train")
    assert (record.rows, record.duplicates, record.conflicts) == (2, 2, 1)
    assert pq.read_table(tmp_path / "new" / "train.parquet").to_pylist() == [ROWS[0], ROWS[2]]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["train.parquet"]


def test_hash_by_hand(tmp_path):
    definition, _ = define(ROWS[:1])
    line = (
        '{"ability":"math","data_source":"invented","extra_info":{"index":0,"split":"train"},'
        '"prompt":[{"content":"What is 1+1?","role":"user"}],"reward_model":{"ground_truth":"2","style":"rule"}}\n'
    )
    assert row_line(ROWS[0]).decode() == line
    assert build_split(definition, tmp_path, split="train").sha256 == hashlib.sha256(line.encode()).hexdigest()


def test_record_is_read_back_from_the_file_alone(tmp_path):
    definition, _ = define(ROWS)
    record = build_split(definition, tmp_path, split="test", prompt="boxed_step_by_step", limit=1, options={"seed": 3})
    assert read_record(tmp_path / "test.parquet") == record
    assert record.request.options == {"seed": 3}
    assert (record.request.prompt, record.request.limit, record.rows) == ("boxed_step_by_step", 1, 1)
    assert record.request.source == "generated"


def test_a_finished_split_is_not_made_again(tmp_path):
    definition, calls = define(ROWS)
    first = build_split(definition, tmp_path, split="train", options={"seed": 1})
    before = (tmp_path / "train.parquet").stat().st_mtime_ns
    assert build_split(definition, tmp_path, split="train", options={"seed": 1}) == first
    assert len(calls) == 1
    assert (tmp_path / "train.parquet").stat().st_mtime_ns == before


def test_another_request_does_not_overwrite(tmp_path):
    definition, _ = define(ROWS)
    build_split(definition, tmp_path, split="train")
    with pytest.raises(FileExistsError, match=r"made with limit=None, not 1; remove it or choose another folder"):
        build_split(definition, tmp_path, split="train", limit=1)
    (tmp_path / "test.parquet").write_text("mine")
    with pytest.raises(FileExistsError, match="made by something else"):
        build_split(definition, tmp_path, split="test")
    assert (tmp_path / "test.parquet").read_text() == "mine"


def test_a_changed_local_copy_is_noticed(tmp_path):
    definition, _ = define(ROWS)
    source = tmp_path / "copy.jsonl"
    source.write_text("one")
    build_split(definition, tmp_path / "out", split="train", source=source)
    source.write_text("two")
    with pytest.raises(FileExistsError, match=r"made with source='copy.jsonl sha256:.*', not 'copy.jsonl sha256:"):
        build_split(definition, tmp_path / "out", split="train", source=source)


def test_the_hash_of_a_file_is_its_own_and_a_folders_follows_names_and_sizes(tmp_path):
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "a").write_text("one")
    definition, _ = define(ROWS)
    sources = []
    for number, change in enumerate([lambda: None, lambda: (folder / "b").write_text(""), (folder / "b").unlink]):
        change()
        sources.append(build_split(definition, tmp_path / str(number), split="train", source=folder).request.source)
    assert sources[0] == sources[2] != sources[1]
    record = build_split(definition, tmp_path / "file", split="train", source=folder / "a")
    assert record.request.source == f"a sha256:{hashlib.sha256(b'one').hexdigest()}"


def test_nothing_is_left_of_a_failed_build_and_it_starts_anew(tmp_path):
    def broken(source, *, split, prompt):
        yield ROWS[0]
        raise RuntimeError("connection lost")

    definition, _ = define(ROWS)
    with pytest.raises(RuntimeError, match="connection lost"):
        build_split(replace(definition, rows=broken), tmp_path, split="train")
    assert list(tmp_path.iterdir()) == []
    assert build_split(definition, tmp_path, split="train").rows == 2


def test_a_killed_builds_files_are_removed_and_a_running_ones_are_not(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    dead, alive = (tmp_path / f".train.parquet.{pid}.partial" for pid in (process.pid, os.getppid()))
    dead.write_text("x")
    alive.write_text("x")
    definition, _ = define(ROWS)
    build_split(definition, tmp_path, split="train")
    assert sorted(path.name for path in tmp_path.iterdir()) == [alive.name, "train.parquet"]


def test_fields_that_appear_after_the_first_chunk_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "ROWS_PER_CHUNK", 2)
    rows = [row("a"), row("b", solution=None), row("c", solution="x"), row("d", level=1), row("e", level=0.5)]
    definition, _ = define(rows)
    build_split(definition, tmp_path, split="train")
    table = pq.read_table(tmp_path / "train.parquet").to_pylist()
    extra = [(r["extra_info"]["solution"], r["extra_info"]["level"]) for r in table]
    assert extra == [(None, None), (None, None), ("x", None), (None, 1.0), (None, 0.5)]


def test_hash_does_not_depend_on_the_chunks(tmp_path, monkeypatch):
    definition, _ = define([row(str(number)) for number in range(10)])
    whole = build_split(definition, tmp_path / "whole", split="train").sha256
    monkeypatch.setattr(building, "ROWS_PER_CHUNK", 3)
    assert build_split(definition, tmp_path / "chunks", split="train").sha256 == whole


@pytest.mark.parametrize("size", [1, 100])
def test_rows_of_different_types_are_refused(tmp_path, monkeypatch, size):
    monkeypatch.setattr(building, "ROWS_PER_CHUNK", size)
    definition, _ = define([row("a", "1"), row("b", ["1"])])
    with pytest.raises(ValueError, match="invented: rows of different types"):
        build_split(definition, tmp_path, split="train")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "dev"}, r"split='dev' is not one of invented's: train, test"),
        ({"prompt": "kk_chat"}, r"prompt='kk_chat' does not fit invented: r1_base, boxed_step_by_step"),
        ({"limit": 0}, r"limit=0 is below 1"),
        ({"options": {"size": 1}}, r"option 'size' is unknown to invented: seed"),
    ],
)
def test_bad_arguments_are_named(tmp_path, arguments, message):
    definition, calls = define(ROWS)
    with pytest.raises(ValueError, match=message):
        build_split(definition, tmp_path, **({"split": "train"} | arguments))
    assert calls == []


def test_an_empty_split_a_missing_source_and_missing_columns_are_refused(tmp_path):
    definition, _ = define([])
    with pytest.raises(ValueError, match="invented, train: no rows"):
        build_split(definition, tmp_path, split="train")
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        build_split(definition, tmp_path, split="train", source=Path("nowhere"))
    short = {key: value for key, value in ROWS[0].items() if key != "ability"}
    definition, _ = define([short])
    with pytest.raises(ValueError, match=r"a row has the columns \['data_source', 'extra_info', 'prompt'"):
        build_split(definition, tmp_path, split="train")


def test_progress_counts_the_rows_kept(tmp_path):
    definition, _ = define(ROWS)
    counts = []
    build_split(definition, tmp_path, split="train", on_row=counts.append)
    assert counts == [1, 2]


def test_normalised_prompts():
    def text(content, role="user"):
        return normalise_prompt([{"role": role, "content": content}])

    assert text("Ｗhat\n is\t1+1 ") == text("what is 1+1")
    assert text("x", "system") != text("x")
    assert text("1+1") != text("11")


def test_option_names():
    definition, _ = define(ROWS)
    assert option_names(definition) == ("seed",)


def test_verl_reads_a_built_file_and_the_plain_text_template_adds_nothing(tmp_path):
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    prompts = [template_named("r1_base").render(problem=f"What is {number}+1?") for number in range(3)]
    rows = [row("", str(number + 1), level=None if number else 2) | {"prompt": p} for number, p in enumerate(prompts)]
    definition, _ = define(rows)
    build_split(definition, tmp_path, split="train")
    tokenizer = build_tokenizer()
    tokenizer.chat_template = PLAIN_TEXT_CHAT_TEMPLATE
    config = {
        "cache_dir": str(tmp_path / "cache"),
        "prompt_key": "prompt",
        "max_prompt_length": 1024,
        "filter_overlong_prompts": True,
        "filter_overlong_prompts_workers": None,
    }
    dataset = RLHFDataset(str(tmp_path / "train.parquet"), tokenizer, OmegaConf.create(config))
    assert len(dataset) == 3
    assert dataset[1]["raw_prompt"] == prompts[1]
    assert dataset[1]["reward_model"]["ground_truth"] == "2"
    ids = tokenizer.apply_chat_template(dataset[1]["raw_prompt"], add_generation_prompt=True, tokenize=True)
    assert tokenizer.decode(ids["input_ids"] if hasattr(ids, "keys") else ids) == prompts[1][0]["content"]
