"""HiTab's builder on an invented release in the real schema: folder and zip, every split, what it refuses.

Not covered: the release itself (its tables are in a large file that is not on this machine).
"""

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from verl_clipx.papers.tasks.hitab import dataset
from verl_clipx.papers.tasks.hitab.dataset import DATASETS, checked_rows, release_rows
from verl_clipx.papers.tasks.hitab.reward import compute_score

RELEASE = Path(__file__).parent / "fixtures" / "release"


def truth_of(row):
    return json.loads(row["reward_model"]["ground_truth"])


def test_train_rows():
    rows = list(release_rows(RELEASE, split="train", prompt="boxed_step_by_step"))
    assert len(rows) == 4
    first = rows[0]
    content = first["prompt"][0]["content"]
    assert "\n\nships and cargo handled in two invented harbours, by year\n\n| harbour | 2019 > ships |" in content
    assert "\n\nQuestion: how many ships did grimmel handle in 2019?\n" in content
    assert content.endswith("step by step and output the final answer within \\boxed{}.")
    assert first["data_source"] == "hitab"
    assert first["reward_model"] == {
        "style": "rule",
        "ground_truth": '{"answers": ["40"], "ratio": false, "rounding": false}',
    }
    assert first["extra_info"] == {
        "index": 0,
        "split": "train",
        "id": f"{1:032x}",
        "table_id": "900",
        "aggregation": ["none"],
    }
    assert truth_of(rows[1]) == {"answers": ["0.6"], "ratio": True, "rounding": True}


def test_division_that_asks_for_no_share_is_no_ratio():
    rows = list(release_rows(RELEASE, split="test", prompt="r1_base"))
    assert truth_of(rows[1]) == {"answers": ["30.0125"], "ratio": False, "rounding": True}
    assert rows[0]["prompt"][0]["content"].endswith("\nAssistant: <think>")


def test_a_seeded_order_draws_from_the_whole_split_and_keeps_the_numbers():
    plain, *shuffled = (
        [row["extra_info"]["index"] for row in release_rows(RELEASE, split="train", prompt="r1_base", order=order)]
        for order in (None, *range(8), 0)
    )
    assert plain == [0, 1, 2, 3] and shuffled[0] == shuffled[-1]
    assert all(sorted(order) == plain for order in shuffled) and {order[0] for order in shuffled} > {0}


def test_the_reward_accepts_every_rows_own_answer():
    for split in ("train", "dev", "test"):
        for row in release_rows(RELEASE / "data", split=split, prompt="r1_base"):
            truth = row["reward_model"]["ground_truth"]
            answer = " | ".join(truth_of(row)["answers"])
            assert compute_score("hitab", f"\\boxed{{{answer}}}", truth)["score"] == 1.0


def test_a_bar_in_a_cell_is_the_same_character_in_table_and_answer():
    row = next(release_rows(RELEASE, split="test", prompt="r1_base"))
    assert truth_of(row)["answers"] == ["bicycle", "on foot / by ferry"]
    assert "| 15 to 34 > on foot / by ferry |" in row["prompt"][0]["content"]


def test_checked_samples_without_a_question_are_left_out():
    with pytest.warns(UserWarning, match=r"sample 1: question=\['30.0125'\] is not text, so the sample is left out"):
        rows = list(checked_rows(RELEASE, split="test", prompt="r1_base"))
    assert [row["extra_info"]["index"] for row in rows] == [0]


def test_tables_are_read_from_the_zip(tmp_path, monkeypatch):
    data = tmp_path / "data"
    data.mkdir()
    for path in (RELEASE / "data").glob("*.jsonl"):
        shutil.copy(path, data)
    with zipfile.ZipFile(data / "tables.zip", "w") as archive:
        for path in (RELEASE / "data" / "tables" / "raw").iterdir():
            archive.write(path, f"tables/raw/{path.name}")
        archive.writestr("tables/hmt/900.json", "{}")
    for split in ("train", "dev", "test"):
        arguments = {"split": split, "prompt": "r1_base"}
        assert list(release_rows(tmp_path, **arguments)) == list(release_rows(RELEASE, **arguments))
    monkeypatch.setattr(dataset, "MAX_BYTES", 10)
    with pytest.raises(ValueError, match=r"table '\w+': .*\.json of .*tables\.zip: larger than 10 bytes"):
        list(release_rows(tmp_path, split="dev", prompt="r1_base"))
    (data / "tables.zip").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=r"tables.zip: .*; is the copy complete \(git lfs\)\?"):
        list(release_rows(tmp_path, split="dev", prompt="r1_base"))


def write(folder, sample):
    (folder / "tables" / "raw").mkdir(parents=True)
    (folder / "dev_samples.jsonl").write_text(json.dumps(sample) + "\n")


SAMPLE = {"id": "1", "table_id": "900", "question": "how many?", "answer": [1.0], "aggregation": ["none"]}


@pytest.mark.parametrize(
    ("sample", "error", "message"),
    [
        ({"id": "1"}, ValueError, r"dev_samples.jsonl, sample 0: it has no field 'table_id'"),
        (SAMPLE | {"answer": []}, ValueError, r"sample 0: no answer"),
        (SAMPLE | {"table_id": "../900"}, ValueError, r"table_id='../900' is not a file name"),
        (SAMPLE, FileNotFoundError, r"table '900' does not exist"),
    ],
)
def test_refuses(tmp_path, sample, error, message):
    write(tmp_path, sample)
    with pytest.raises(error, match=message):
        list(release_rows(tmp_path, split="dev", prompt="r1_base"))


def test_table_of_another_kind_is_named(tmp_path):
    write(tmp_path, SAMPLE)
    (tmp_path / "tables" / "raw" / "900.json").write_text('{"title": "x"}')
    with pytest.raises(
        ValueError, match=r"table '900': table: texts=None is not of type list; read the files in tables/raw"
    ):
        list(release_rows(tmp_path, split="dev", prompt="r1_base"))


def test_missing_copy_says_where_the_release_is(tmp_path):
    with pytest.raises(FileNotFoundError, match="Clone the repository microsoft/HiTab"):
        list(release_rows(None, split="dev", prompt="r1_base"))
    with pytest.raises(FileNotFoundError, match=r"dev_samples.jsonl does not exist; give the release's repository"):
        list(release_rows(tmp_path, split="dev", prompt="r1_base"))
    (tmp_path / "dev_samples.jsonl").write_text("")
    with pytest.raises(FileNotFoundError, match=r"neither tables/raw nor tables.zip"):
        list(release_rows(tmp_path, split="dev", prompt="r1_base"))


def test_definitions():
    assert [(d.name, d.kind, d.splits, d.hub) for d in DATASETS] == [
        ("hitab", "train", ("train", "dev", "test"), None),
        ("hitab_test_checked", "evaluation", ("test",), None),
    ]
