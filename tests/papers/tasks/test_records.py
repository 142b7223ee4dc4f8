"""Reading a local copy in each format, and what is asked of the hub.

Not covered: the hub itself.
"""

import json
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_clipx.papers.tasks.catalog import definition_named
from verl_clipx.papers.tasks.records import local_records, read_records

ROWS = [{"a": 1, "b": ["x"]}, {"a": 2, "b": []}]


@pytest.fixture
def folder(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "0.parquet")
    (tmp_path / "1.jsonl").write_text("\n\n".join(map(json.dumps, ROWS)) + "\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "2.json").write_text(json.dumps(ROWS))
    (tmp_path / "README.md").write_text("not data")
    return tmp_path


@pytest.mark.parametrize("name", ["0.parquet", "1.jsonl", "data/2.json"])
def test_each_format_is_read(folder, name):
    assert list(local_records(folder / name)) == ROWS


def test_a_folder_is_read_in_the_order_of_its_files_names(folder):
    assert list(local_records(folder)) == [*ROWS, *ROWS, *ROWS]


def test_a_line_separator_of_unicode_ends_no_line(tmp_path):
    # U+2028 ends a line for str.splitlines, not in a file.
    (tmp_path / "0.jsonl").write_text(json.dumps({"a": "x\u2028y"}, ensure_ascii=False) + "\n")
    assert list(local_records(tmp_path)) == [{"a": "x\u2028y"}]


@dataclass
class Hub:
    """A stand-in for `datasets.load_dataset`: its records, and what was asked of it."""

    records: list[dict] = field(default_factory=list)
    calls: list[tuple] = field(default_factory=list)

    def load_dataset(self, path, name=None, *, split):
        self.calls.append((path, name, split))
        return self.records


@pytest.fixture
def hub(monkeypatch):
    import datasets

    hub = Hub()
    monkeypatch.setattr(datasets, "load_dataset", hub.load_dataset)
    return hub


def test_the_hub_is_not_asked_where_there_is_a_local_copy(folder, hub):
    assert list(read_records(folder / "1.jsonl", hub="o/n", hub_split="train")) == ROWS
    assert hub.calls == []


@pytest.mark.parametrize(
    ("name", "record", "truth", "call"),
    [
        pytest.param(
            "countdown_3to4",
            {"target": 3, "nums": [3]},
            '{"numbers": [3], "target": 3}',
            ("Jiayi-Pan/Countdown-Tasks-3to4", None, "train"),
            id="countdown_3to4",
        ),
        pytest.param(
            "math500", {"problem": "?", "answer": 1}, "1", ("HuggingFaceH4/MATH-500", None, "test"), id="math500"
        ),
        pytest.param(
            "olympiadbench",
            {"problem": "?", "answer": 1},
            "1",
            ("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train"),
            id="olympiadbench",
        ),
    ],
)
def test_without_a_local_copy_the_hub_is_asked_once(hub, name, record, truth, call):
    hub.records.append(record)
    definition = definition_named(name)
    options = {"train_size": 1} if name == "countdown_3to4" else {}
    (row,) = definition.rows(None, split=definition.splits[0], prompt=definition.prompts[-1], **options)
    assert hub.calls == [call]
    assert row["reward_model"]["ground_truth"] == truth
