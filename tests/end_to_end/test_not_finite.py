"""A reward that is NaN for some prompts, through verl's trainer, with `-m matrix`.

Covers: verl skips the updates that hold such a prompt, the log counts them, a warning names the rewards, the report
begins with it. Not covered: which field is named (tests/worker/test_training_worker.py).
"""

import pytest
from typer.testing import CliRunner

from verl_clipx.cli import app

from .runs import train

pytestmark = [pytest.mark.end_to_end, pytest.mark.matrix]

REWARD = """
from zlib import crc32

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    score = sum(map(ord, solution_str)) % 7 / 6
    return float("nan") if crc32(str(ground_truth).encode()) % 16 == 0 else score
"""


def test_updates_that_a_nan_reward_spoils_are_counted_and_named(task, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    run = train(
        task, tmp_path / "run", "+clipx=grpo", f"reward.custom_reward_function.path={reward}", "data.seed=1", steps=3
    )
    skipped = run.values("actor/clipx/skipped_updates")
    # Of two updates a step; which prompts a step has follows from the seed.
    assert skipped[0] > 0 and sum(skipped) < 6 and {*skipped} <= {0, 1, 2}
    assert "clipx: verl skips an update whose gradient's norm is nan. Not finite in rank 0's part" in run.output
    # Said once by the trainer's process, while it trains.
    assert run.output.count("clipx.health: this run: skipped updates from step 1 on.") == 1
    assert run.output.count("clipx.health: this run: values that are not finite from step 1 on.") == 1
    assert "rm_scores (rewards) in " in run.output and "advantages (advantages) in " in run.output
    report = CliRunner().invoke(app, ["report", str(run.folder), "--out", str(tmp_path / "page")])
    said = " ".join(report.output.split())
    assert report.exit_code == 0 and "run: skipped updates from step 1 on." in said
    assert f"{sum(skipped):.0f} of 6 updates skipped since" in said
    assert "mini_batch" not in said
