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


def read_truth(row):
    return json.loads(row["reward_model"]["ground_truth"])


def list_rows(source, split, **options):
    return list(release_rows(source, split=split, prompt="r1_base", **options))


def test_rows_by_hand():
    rows = list(release_rows(RELEASE, split="train", prompt="boxed_step_by_step"))
    first, second, *_ = rows
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
    assert read_truth(second) == {"answers": ["0.6"], "ratio": True, "rounding": True}
    bar, divided = list_rows(RELEASE, "test")
    # A division that asks for no share is no ratio.
    assert read_truth(divided) == {"answers": ["30.0125"], "ratio": False, "rounding": True}
    # A bar in a cell is the same character in table and answer.
    assert read_truth(bar)["answers"] == ["bicycle", "on foot / by ferry"]
    assert "| 15 to 34 > on foot / by ferry |" in bar["prompt"][0]["content"]


def test_a_seeded_order_draws_from_the_whole_split_and_keeps_the_numbers():
    orders = [[row["extra_info"]["index"] for row in list_rows(RELEASE, "train", order=seed)] for seed in range(8)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert {order[0] for order in orders} > {0}


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
        assert list_rows(tmp_path, split) == list_rows(RELEASE, split) == list_rows(RELEASE / "data", split)
        for row in list_rows(tmp_path, split):
            answer = " | ".join(read_truth(row)["answers"])
            assert compute_score("hitab", f"\\boxed{{{answer}}}", row["reward_model"]["ground_truth"])["score"] == 1.0
    (data / "tables.zip").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=r"tables.zip: .*; is the copy complete \(git lfs\)\?"):
        list_rows(tmp_path, "dev")


@pytest.fixture
def copy(tmp_path):
    """A copy of the release without samples and tables."""
    (tmp_path / "tables" / "raw").mkdir(parents=True)
    return tmp_path


SAMPLE = {"id": "1", "table_id": "900", "question": "how many?", "answer": [1.0], "aggregation": ["none"]}


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"id": "1"}, r"dev_samples.jsonl, sample 0: it has no table_id, question"),
        (SAMPLE | {"answer": []}, r"sample 0: it has no answer"),
    ],
)
def test_a_sample_of_another_form_is_named(copy, sample, message):
    (copy / "dev_samples.jsonl").write_text(json.dumps(sample) + "\n")
    with pytest.raises(ValueError, match=message):
        list_rows(copy, "dev")


@pytest.mark.parametrize("table_id", ["900", "../900"])
def test_a_table_that_is_not_there_is_named(copy, table_id):
    (copy / "dev_samples.jsonl").write_text(json.dumps(SAMPLE | {"table_id": table_id}) + "\n")
    with pytest.raises(FileNotFoundError, match=f"table '{table_id}' does not exist"):
        list_rows(copy, "dev")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"title": "x"}, r"table '900': KeyError: 'texts'; is it one of tables/raw"),
        ({"texts": [], "title": "x"}, r"table '900': ValueError: texts is empty"),
    ],
)
def test_a_table_of_another_form_is_named(copy, table, message):
    (copy / "dev_samples.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    (copy / "tables" / "raw" / "900.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match=message):
        list_rows(copy, "dev")


def test_missing_copy_says_where_the_release_is(tmp_path):
    with pytest.raises(FileNotFoundError, match="Clone the repository microsoft/HiTab"):
        list_rows(None, "dev")
    with pytest.raises(FileNotFoundError, match=r"dev_samples.jsonl does not exist; give the release's repository"):
        list_rows(tmp_path, "dev")
    (tmp_path / "dev_samples.jsonl").write_text("")
    with pytest.raises(FileNotFoundError, match=r"neither tables/raw nor tables.zip"):
        list_rows(tmp_path, "dev")


HEADER = "| harbour | 2019 > ships | 2019 > cargo (tonnes) | 2020 > ships | 2020 > cargo (tonnes) |"


def write_lines(name):
    return table_text(json.loads((RAW / f"{name}.json").read_text())).splitlines()


def test_tables_by_hand():
    assert write_lines("900") == [
        "ships and cargo handled in two invented harbours, by year",
        "",
        HEADER,
        "| --- | --- | --- | --- | --- |",
        "| north coast > grimmel | 40 | 1,200.5 | 50 | 1,500 |",
        "| north coast > ostholm | 60 | 2,400 | 75 | 2,500 |",
        "| total | 100 | 3,600.5 | 125 | 4,000 |",
    ]
    # Two columns of row headers, and a bar in a cell.
    assert write_lines("901_town")[2:] == [
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
    assert lines[2] == HEADER
    assert lines[4:6] == ["| north coast |  |  |  |  |", "| grimmel | 40 | 1,200.5 | 50 | 1,500 |"]
    # A heading row with values stays; rows may be ragged, and cells have line ends.
    table["texts"][2][1], table["texts"][5] = 110.0, ["grand\n total", None]
    lines = table_text(table).splitlines()
    assert (lines[4], lines[-1]) == ("| north coast | 110 |  |  |  |", "| grand total |  |  |  |  |")
