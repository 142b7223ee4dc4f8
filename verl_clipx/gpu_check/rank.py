"""A rank's process: `python -m verl_clipx.gpu_check.rank FOLDER`, with the environment of `engine.rank_environment`.

It runs the checks that FOLDER/task.json names, in order, and leaves a file for each. The first exception ends it: the
other ranks may wait for this one for ever, so that the parent ends them.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from verl_clipx.common.files import read_json, write_json
from verl_clipx.gpu_check.machine import Machine

TASK = "task.json"


def write_task(folder: Path, machine: Machine, models: Path, names: Sequence[str]) -> None:
    """Writes what the ranks are to do."""
    task = {"machine": asdict(machine), "models": str(models), "names": list(names)}
    write_json(folder / TASK, task)


def file_of(folder: Path, name: str, rank: int | str) -> Path:
    """Where a rank leaves what a check has found."""
    return folder / f"{name}.{rank}.json"


def main(folder: Path) -> int:
    """Runs the checks of a task; returns the exit code."""
    task = read_json(folder / TASK)
    machine, names, rank = Machine(**task["machine"]), task["names"], int(os.environ["RANK"])
    name = names[0]
    try:
        import torch

        if machine.device == "cpu":
            torch.set_num_threads(1)
        from verl_clipx.gpu_check.checks import CHECKS
        from verl_clipx.gpu_check.engine import Bench

        checks = {check.name: check for check in CHECKS}
        bench = Bench(machine, Path(task["models"]))
        for name in names:
            print(f"== {name}", flush=True)
            measured = checks[name].run(bench)
            # No rank is behind when the first one's result is read.
            torch.distributed.barrier()
            if rank == 0:
                write_json(file_of(folder, name, rank), asdict(measured))
            # No rank can end in the next check before this one's result is there.
            torch.distributed.barrier()
    except Exception as error:
        traceback.print_exc()
        write_json(file_of(folder, name, rank), {"error": f"rank {rank}: {type(error).__name__}: {error}"})
        return 1
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    if code:
        # An orderly end would wait for the threads of a broken process group.
        os._exit(code)
