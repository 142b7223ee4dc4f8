"""Reading a local copy in each format, and what is asked of the hub.

Not covered: the hub itself.
"""

import json

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


def test_each_format_a_folder_in_the_order_of_names_and_any_unicode_line(folder):
    assert [list(local_records(folder / name)) for name in ("0.parquet", "1.jsonl", "data/2.json")] == [ROWS] * 3
    # U+2028 ends a line for str.splitlines, not in a file.
    (folder / "data" / "2.jsonl").write_text(json.dumps({"a": "x\u2028y"}, ensure_ascii=False) + "\n")
    assert list(local_records(folder)) == [*ROWS, *ROWS, *ROWS, {"a": "x\u2028y"}]


NUMBERS, PROBLEM = {"target": 3, "nums": [3]}, {"problem": "?", "answer": 1}
ASKED = {
    "countdown_3to4": (NUMBERS, '{"numbers": [3], "target": 3}', "Jiayi-Pan/Countdown-Tasks-3to4", None, "train"),
    "math500": (PROBLEM, "1", "HuggingFaceH4/MATH-500", None, "test"),
    "olympiadbench": (PROBLEM, "1", "Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train"),
}


@pytest.mark.parametrize("name", ASKED)
def test_the_hub_is_asked_only_without_a_local_copy(folder, monkeypatch, name):
    import datasets

    calls, (record, truth, hub, config, hub_split) = [], ASKED[name]
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: calls.append((a, k)) or [record])
    assert list(read_records(folder / "1.jsonl", hub="o/n", hub_split="train")) == ROWS and calls == []
    definition = definition_named(name)
    options = {"train_size": 1} if name == "countdown_3to4" else {}
    (row,) = definition.rows(None, split=definition.splits[0], prompt=definition.prompts[-1], **options)
    assert calls == [((hub, config), {"split": hub_split})] and row["reward_model"]["ground_truth"] == truth
