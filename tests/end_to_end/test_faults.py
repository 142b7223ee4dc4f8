"""What docs/dev/reliability.md says of faults that only verl's trainer answers, with `-m matrix`.

Covers: a disk that is full while verl saves, and the start after that. Not covered: a reward that raises or hangs.
"""

import re
import subprocess
from pathlib import Path

import pytest

from .runs import SECONDS, launch, metrics_of, output_of, read_run_log

pytestmark = [pytest.mark.end_to_end, pytest.mark.matrix]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 30 MB in `disk`, for processes with these words before: two checkpoints fit and no third."""
    disk = tmp_path / "disk"
    disk.mkdir()
    # A mount that only the processes of its name space see needs no rights of the machine's.
    script = 'mount -t tmpfs -o size=30m tmpfs "$1" && echo mounted && exec sleep 3600'
    command = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script, "bash", str(disk)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as holder:
        said = holder.stdout.readline()
        if said != "mounted\n":
            pytest.skip(f"this machine lets nobody mount: {said}")
        yield ("nsenter", f"--target={holder.pid}", "--user", "--mount", "--preserve-credentials"), holder.pid, disk
        holder.kill()


def test_a_full_disk_ends_the_run_and_loses_the_step_that_it_saved(task, small_disk, tmp_path):
    inside, pid, disk = small_disk
    folder, latest = tmp_path / "run", Path(f"/proc/{pid}/root{disk}/latest_checkpointed_iteration.txt")
    options = ("+clipx=acpo", "trainer.save_freq=1", "trainer.resume_mode=auto", f"trainer.default_local_dir={disk}")
    assert launch(task, folder, *options, steps=4, before=inside).wait(SECONDS) != 0
    output = output_of(folder)
    assert re.search(r"could not save .*global_step_3/actor; its disk has \d MB left", output), output[-3000:]
    assert latest.read_text() == "2" and list(read_run_log(metrics_of(folder)).index) == [1, 2]
    subprocess.run([*inside, "mount", "-o", "remount,size=100m", str(disk)], check=True)
    code = launch(task, folder, *options, steps=4, before=inside).wait(SECONDS)
    assert code == 0, output_of(folder)[-3000:]
    assert latest.read_text() == "4" and list(read_run_log(metrics_of(folder)).index) == [1, 2, 3, 4]
