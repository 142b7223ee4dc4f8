"""The Parquet files: columns, determinism, and what verl's own dataset, reward loader and reward manager make of them.

Not covered: a training run.
"""

import json

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.countdown_files import write_countdown
from verl_clipx.papers.tasks.commands import app
from verl_clipx.papers.tasks.countdown import reward
from verl_clipx.papers.tasks.countdown.prompt import build_prompt, build_response


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_countdown(tmp_path_factory.mktemp("countdown"), 40, 20, seed=3)


def test_columns_and_sizes(files):
    for split, size in (("train", 40), ("test", 20)):
        rows = pq.read_table(files[split]).to_pylist()
        assert len(rows) == size
        for index, row in enumerate(rows):
            truth = row["reward_model"]["ground_truth"]
            assert row["data_source"] == "countdown"
            problem = json.loads(truth)
            assert row["prompt"] == build_prompt(problem["numbers"], problem["target"])
            assert row["reward_model"]["style"] == "rule"
            assert (row["extra_info"]["index"], row["extra_info"]["split"]) == (index, split)
            answer = build_response(row["extra_info"]["solution"])
            assert reward.compute_score(row["data_source"], answer, truth)["score"] == 1.0


def test_prompt_and_response_by_hand():
    assert build_prompt([13, 2, 5], 21) == [{"role": "user", "content": "13 2 5 = 21"}]
    assert build_response("13+2*5-2") == "<answer>13+2*5-2</answer>"


def test_same_seed_same_content_and_no_partial_file_left(files, tmp_path):
    again = write_countdown(tmp_path, 40, 20, seed=3)
    other = write_countdown(tmp_path / "other", 40, 20, seed=4)
    for split in ("train", "test"):
        assert again[split].read_bytes() == files[split].read_bytes()
        assert pq.read_table(other[split]) != pq.read_table(files[split])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "test.parquet", "train.parquet"]


@pytest.mark.parametrize(
    ("option", "message"),
    [("size=0", "verl cannot load an empty file"), ("size=-1", "count=-1 is negative"), ("max_value=0", "max_value=0")],
)
def test_command_line_names_the_bad_key(tmp_path, option, message):
    result = CliRunner().invoke(app, ["build", "countdown", "--out", str(tmp_path), "--option", option])
    assert result.exit_code == 1
    assert message in result.output
    assert not list(tmp_path.glob("*.parquet"))
