"""`clipx papers recipe check` on a data file.

Not covered: that its failure stops no launch (tests/recipes/test_launch.py).
"""

import pyarrow as pa
import pyarrow.parquet as pq

from tests.analysis.runs.commands import clipx


def test_a_ground_truth_that_the_reward_cannot_use_is_named_with_its_row(tmp_path):
    path = tmp_path / "train.parquet"
    rows = [{"style": "rule", "ground_truth": truth} for truth in ("7", "")]
    words = ("papers", "recipe", "check", "dgpo/dapo17k_7b_dgpo", "+hardware=a100x8", f"data.val_files={path}")
    pq.write_table(pa.table({"data_source": ["math500"] * 2, "reward_model": rows}), path)
    assert "train.parquet, row 1: ground_truth=''" in clipx(*words, code=1)
    pq.write_table(pa.table({"data_source": ["math500"], "reward_model": rows[:1]}), path)
    assert "The reward can use" in clipx(*words)
