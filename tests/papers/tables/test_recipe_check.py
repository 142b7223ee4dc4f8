"""`clipx papers recipe check` on a data file.

Not covered: that its failure stops no launch (tests/recipes/test_launch.py).
"""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.analysis.runs.commands import clipx


def test_a_ground_truth_that_the_reward_cannot_use_is_named_with_its_row(tmp_path):
    path = tmp_path / "train.parquet"
    rows = [{"style": "rule", "ground_truth": truth} for truth in ("7", "")]
    words = ("papers", "recipe", "check", "dgpo/dapo17k_7b_dgpo", "+hardware=a100x8", f"data.val_files={path}")
    pq.write_table(pa.table({"data_source": ["math500"] * 2, "reward_model": rows}), path)
    assert "train.parquet, row 1: ground_truth=''" in clipx(*words, code=1)
    pq.write_table(pa.table({"data_source": ["math500"], "reward_model": rows[:1]}), path)
    assert "The reward can use" in clipx(*words)


def test_a_file_in_the_users_home_folder_is_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    rows = [{"style": "rule", "ground_truth": ""}]
    pq.write_table(pa.table({"data_source": ["math500"], "reward_model": rows}), tmp_path / "train.parquet")
    words = ("papers", "recipe", "check", "dgpo/dapo17k_7b_dgpo", "data.val_files='~/train.parquet'")
    assert f"{tmp_path}/train.parquet, row 0" in clipx(*words, code=1)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("data.val_files=none.parquet", "none of the data files is on this machine"),
        ("reward.custom_reward_function.path=reward.py", "the reward is not in an installed module"),
    ],
)
def test_a_check_of_nothing_says_so(tmp_path, monkeypatch, override, reason):
    monkeypatch.chdir(tmp_path)
    text = clipx("papers", "recipe", "check", "dgpo/dapo17k_7b_dgpo", override)
    assert f"No ground truth was checked: {reason}" in text and "The reward can use" not in text
