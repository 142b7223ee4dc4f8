"""What docs/dev/reliability.md says of faults that only verl's trainer answers, with `-m matrix`. Covers: a disk that
is full while verl saves, and the start after that; a reward that is NaN for some prompts. Not covered: a reward that
raises or hangs; which field is named (tests/training/worker/test_training_worker.py).
"""

import subprocess
from pathlib import Path

import pytest

from tests.analysis.runs.commands import clipx

from .runs import SECONDS, launch, metrics_of, output_of, read_run_log, train

pytestmark = [pytest.mark.end_to_end, pytest.mark.matrix]

REWARD = """
from zlib import crc32

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    score = sum(map(ord, solution_str)) % 7 / 6
    return float("nan") if crc32(str(ground_truth).encode()) % 16 == 0 else score
"""


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 30 MB in `disk`, for processes with these words before: two checkpoints fit and no third."""
    disk = tmp_path / "disk"
    disk.mkdir()
    # A mount that only the processes of its name space see needs no rights of the machine's.
    script = 'mount -t tmpfs -o size=30m tmpfs "$1" && echo mounted && exec sleep 3600'
    command = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script, "bash", str(disk)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as holder:
        answer = holder.stdout.readline()
        if answer != "mounted\n":
            pytest.skip(f"this machine lets nobody mount: {answer}")
        yield ("nsenter", f"--target={holder.pid}", "--user", "--mount", "--preserve-credentials"), holder.pid, disk
        holder.kill()


def test_a_full_disk_ends_the_run_and_loses_the_step_that_it_saved(task, small_disk, tmp_path):
    inside, pid, disk = small_disk
    folder = tmp_path / "run"
    latest = Path(f"/proc/{pid}/root{disk}/latest_checkpointed_iteration.txt")
    options = ("+clipx=acpo", "trainer.save_freq=1", "trainer.resume_mode=auto", f"trainer.default_local_dir={disk}")
    assert launch(task, folder, *options, steps=4, before=inside).wait(SECONDS) != 0
    assert latest.read_text() == "2" and list(read_run_log(metrics_of(folder)).index) == [1, 2]
    subprocess.run([*inside, "mount", "-o", "remount,size=100m", str(disk)], check=True)
    code = launch(task, folder, *options, steps=4, before=inside).wait(SECONDS)
    assert code == 0, output_of(folder)[-3000:]
    assert latest.read_text() == "4" and list(read_run_log(metrics_of(folder)).index) == [1, 2, 3, 4]


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
    output = clipx("report", run.folder, "--out", tmp_path / "page")
    assert ": skipped updates from step 1 on." in output
    assert f"{sum(skipped):.0f} of 6 updates skipped since" in output
    assert "mini_batch" not in output
