"""HiTab's builder on an invented release in the real schema: folder and zip, every split, tables as text, refusals.

Not covered: the release itself with its 3,597 tables (they are in a large file that is not on this machine).
"""

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from verl_clipx.papers.tasks.hitab.dataset import checked_rows, release_rows
from verl_clipx.papers.tasks.hitab.reward import compute_score
from verl_clipx.papers.tasks.hitab.table import table_text

RELEASE = Path(__file__).parent / "fixtures" / "release"
RAW = RELEASE / "data" / "tables" / "raw"


def truth_of(row):
    return json.loads(row["reward_model"]["ground_truth"])


def released(source, split, **options):
    return list(release_rows(source, split=split, prompt="r1_base", **options))


def test_rows_by_hand():
    first, second, *_ = rows = list(release_rows(RELEASE, split="train", prompt="boxed_step_by_step"))
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2, 3]
    content = first["prompt"][0]["content"]
    assert "\n\nships and cargo handled in two invented harbours, by year\n\n| harbour | 2019 > ships |" in content
    assert "\n\nQuestion: how many ships did grimmel handle in 2019?\n" in content
    assert content.endswith("step by step and output the final answer within \\boxed{}.")
    assert first | {"prompt": None} == {
        "data_source": "hitab",
        "prompt": None,
        "ability": "table",
        "reward_model": {"style": "rule", "ground_truth": '{"answers": ["40"], "ratio": false, "rounding": false}'},
        "extra_info": {"index": 0, "split": "train", "id": f"{1:032x}", "table_id": "900", "aggregation": ["none"]},
    }
    assert truth_of(second) == {"answers": ["0.6"], "ratio": True, "rounding": True}
    bar, divided = released(RELEASE, "test")
    # A division that asks for no share is no ratio.
    assert truth_of(divided) == {"answers": ["30.0125"], "ratio": False, "rounding": True}
    # A bar in a cell is the same character in table and answer.
    assert truth_of(bar)["answers"] == ["bicycle", "on foot / by ferry"]
    assert "| 15 to 34 > on foot / by ferry |" in bar["prompt"][0]["content"]


def test_a_seeded_order_draws_from_the_whole_split_and_keeps_the_numbers():
    orders = [[row["extra_info"]["index"] for row in released(RELEASE, "train", order=order)] for order in range(8)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders) and {order[0] for order in orders} > {0}


def test_checked_samples_without_a_question_are_left_out():
    with pytest.warns(UserWarning, match=r"sample 1: question=\['30.0125'\] is not text, so the sample is left out"):
        rows = list(checked_rows(RELEASE, split="test", prompt="r1_base"))
    assert [row["extra_info"]["index"] for row in rows] == [0]


def test_tables_are_read_from_the_zip_and_every_rows_own_answer_is_right(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for path in (RELEASE / "data").glob("*.jsonl"):
        shutil.copy(path, data)
    with zipfile.ZipFile(data / "tables.zip", "w") as archive:
        for path in RAW.iterdir():
            archive.write(path, f"tables/raw/{path.name}")
        archive.writestr("tables/hmt/900.json", "{}")
    for split in ("train", "dev", "test"):
        assert released(tmp_path, split) == released(RELEASE, split) == released(RELEASE / "data", split)
        for row in released(tmp_path, split):
            answer = " | ".join(truth_of(row)["answers"])
            assert compute_score("hitab", f"\\boxed{{{answer}}}", row["reward_model"]["ground_truth"])["score"] == 1.0
    (data / "tables.zip").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=r"tables.zip: .*; is the copy complete \(git lfs\)\?"):
        released(tmp_path, "dev")


SAMPLE = {"id": "1", "table_id": "900", "question": "how many?", "answer": [1.0], "aggregation": ["none"]}


@pytest.mark.parametrize(
    ("sample", "table", "error", "message"),
    [
        ({"id": "1"}, None, ValueError, r"dev_samples.jsonl, sample 0: it has no table_id, question"),
        (SAMPLE | {"answer": []}, None, ValueError, r"sample 0: it has no answer"),
        (SAMPLE | {"table_id": "../900"}, None, FileNotFoundError, r"table '../900' does not exist"),
        (SAMPLE, None, FileNotFoundError, r"table '900' does not exist"),
        (SAMPLE, {"title": "x"}, ValueError, r"table '900': KeyError: 'texts'; is it one of tables/raw"),
        (SAMPLE, {"texts": [], "title": "x"}, ValueError, r"table '900': ValueError: texts is empty"),
    ],
)
def test_other_samples_and_tables_are_named(tmp_path, sample, table, error, message):
    (tmp_path / "tables" / "raw").mkdir(parents=True)
    (tmp_path / "dev_samples.jsonl").write_text(json.dumps(sample) + "\n")
    if table:
        (tmp_path / "tables" / "raw" / "900.json").write_text(json.dumps(table))
    with pytest.raises(error, match=message):
        released(tmp_path, "dev")


def test_missing_copy_says_where_the_release_is(tmp_path):
    with pytest.raises(FileNotFoundError, match="Clone the repository microsoft/HiTab"):
        released(None, "dev")
    with pytest.raises(FileNotFoundError, match=r"dev_samples.jsonl does not exist; give the release's repository"):
        released(tmp_path, "dev")
    (tmp_path / "dev_samples.jsonl").write_text("")
    with pytest.raises(FileNotFoundError, match=r"neither tables/raw nor tables.zip"):
        released(tmp_path, "dev")


HEADS = "| harbour | 2019 > ships | 2019 > cargo (tonnes) | 2020 > ships | 2020 > cargo (tonnes) |"


def lines_of(name, **changes):
    return table_text(json.loads((RAW / f"{name}.json").read_text()) | changes).splitlines()


def test_tables_by_hand():
    assert lines_of("900") == [
        "ships and cargo handled in two invented harbours, by year",
        "",
        HEADS,
        "| --- | --- | --- | --- | --- |",
        "| north coast > grimmel | 40 | 1,200.5 | 50 | 1,500 |",
        "| north coast > ostholm | 60 | 2,400 | 75 | 2,500 |",
        "| total | 100 | 3,600.5 | 125 | 4,000 |",
    ]
    # Two columns of row headers, and a bar in a cell.
    assert lines_of("901_town")[2:] == [
        "| age > means | men | women |",
        "| --- | --- | --- |",
        "| 15 to 34 > bicycle | 31.5 | 33.0 |",
        "| 15 to 34 > on foot / by ferry | 12.0 | 14.5 |",
        "| 35 and over > bicycle | 22.0 | .. |",
    ]


def test_unusual_tables_by_hand():
    table = json.loads((RAW / "900.json").read_text())
    # Lines outside the trees are headed by their header cells.
    lines = table_text(table | {key: {"children": []} for key in ("top_root", "left_root")}).splitlines()
    assert lines[2] == HEADS
    assert lines[4:6] == ["| north coast |  |  |  |  |", "| grimmel | 40 | 1,200.5 | 50 | 1,500 |"]
    # A heading row with values stays; rows may be ragged, and cells have line ends.
    table["texts"][2][1], table["texts"][5] = 110.0, ["grand\n total", None]
    lines = table_text(table).splitlines()
    assert (lines[4], lines[-1]) == ("| north coast | 110 |  |  |  |", "| grand total |  |  |  |  |")
