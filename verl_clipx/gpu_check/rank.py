"""A rank's process: `python -m verl_clipx.gpu_check.rank FOLDER`, with the environment of `engine.rank_environment`.

It runs the checks that FOLDER/task.json names, in order, and writes a file for each. It ends at the first exception.
The other ranks might then wait for it forever, so the parent process ends them.
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
    """Write the file that tells the ranks what to do."""
    task = {"machine": asdict(machine), "models": str(models), "names": list(names)}
    write_json(folder / TASK, task)


def file_of(folder: Path, name: str, rank: int | str) -> Path:
    """Return the file to which a rank writes what a check has found."""
    return folder / f"{name}.{rank}.json"


def main(folder: Path) -> int:
    """Run the checks of a task, and return the exit code."""
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
            # The first rank's result may be read only when every rank has finished the check.
            torch.distributed.barrier()
            if rank == 0:
                write_json(file_of(folder, name, rank), asdict(measured))
            # A rank may fail in the next check, which must not happen before this check's result is written.
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
        # A normal exit would wait for the threads of a broken process group.
        os._exit(code)
