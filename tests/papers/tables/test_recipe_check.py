"""`clipx papers recipe check` on a data file.

Not covered: that its failure stops no launch (tests/recipes/test_launch.py).
"""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.analysis.runs.commands import clipx


def check_recipe(*overrides, code=0) -> str:
    """Run `clipx papers recipe check` on a preset, and return its output."""
    return clipx("papers", "recipe", "check", "dgpo/dapo17k_7b_dgpo", *overrides, code=code)


def write_ground_truths(path, *ground_truths) -> None:
    rows = [{"style": "rule", "ground_truth": ground_truth} for ground_truth in ground_truths]
    pq.write_table(pa.table({"data_source": ["math500"] * len(rows), "reward_model": rows}), path)


def test_a_ground_truth_that_the_reward_cannot_use_is_named_with_its_row(tmp_path):
    path = tmp_path / "train.parquet"
    write_ground_truths(path, "7", "")
    output = check_recipe("+hardware=a100x8", f"data.val_files={path}", code=1)
    assert "train.parquet, row 1: ground_truth=''" in output


def test_ground_truths_that_the_reward_can_use_pass(tmp_path):
    path = tmp_path / "train.parquet"
    write_ground_truths(path, "7")
    assert "The reward can use" in check_recipe("+hardware=a100x8", f"data.val_files={path}")


def test_a_file_in_the_users_home_folder_is_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_ground_truths(tmp_path / "train.parquet", "")
    output = check_recipe("data.val_files='~/train.parquet'", code=1)
    assert f"{tmp_path}/train.parquet, row 0" in output


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("data.val_files=none.parquet", "none of the data files is on this machine"),
        ("reward.custom_reward_function.path=reward.py", "the reward is not in an installed module"),
    ],
)
def test_a_check_of_nothing_says_so(tmp_path, monkeypatch, override, reason):
    monkeypatch.chdir(tmp_path)
    output = check_recipe(override)
    assert f"No ground truth was checked: {reason}" in output
    assert "The reward can use" not in output
