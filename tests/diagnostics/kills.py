"""Runs that are killed at every write, each in a process of its own and then started again: kills.py FOLDER EVERY.

A run here is what the plugin and verl's own loggers write in one: the file log and the record, traces, validations and
the state of the bounds. It goes on from step 3 of an older one that came to step 5. Prints a JSON object a kill, of
which it makes one of so many.
"""

import gc
import json
import os
import re
import resource
import shutil
import signal
import sys
from pathlib import Path

import torch
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tracking import Tracking

from verl_clipx.common.traces import SCHEMA, Shard, write_shard
from verl_clipx.worker.state import ControllerState, write_state

KEPT, REACHED, LAST = 3, 5, 6
PARTS = ("log", "traces", "validations", "state")
# Of the audited events, those that change files, and opening one, which may empty it.
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.move", "shutil.copyfile")
TEXT = {"prompt", "prompt_text", "text", "region"}
TOKENS = {field.name: ["x" if field.name in TEXT else 0] * 4 for field in SCHEMA if not field.nullable}
TOKENS = {name: values for name, values in TOKENS.items() if name not in ("step", "update", "rank")}


def run(folder: Path, parts, *, last: int, resume: bool) -> None:
    """A run's files up to a step."""
    os.environ["VERL_FILE_LOGGER_PATH"] = str(folder / "metrics.jsonl")
    trainer = {"default_local_dir": str(folder / "checkpoints"), "resume_mode": "auto" if resume else "disable"}
    trainer["validation_data_dir"] = str(folder / "validation")
    tracking = Tracking("project", "run", ["file"], config={"trainer": trainer})
    for step in range(KEPT + 1 if resume else 1, last + 1):
        if "traces" in parts:
            write_shard(folder / "traces", Shard(step, 0, 0), TOKENS)
        if "state" in parts:
            state = ControllerState(step, {"update_0": torch.arange(8.0) + step})
            write_state(folder / "checkpoints" / f"global_step_{step}" / "actor", state, {"method": "acpo"})
        if "validations" in parts:
            texts = [f"problem {index}" for index in range(8)]
            PPOTrainer._write_generations(texts, texts, texts, [step] * 8, {}, str(folder / "validation"), step)
        tracking.log({f"metric/{index}": step + index / 7 for index in range(16)}, step)
    tracking.logger["file"].finish()


def child(work, *, limit=None, event=None, folder=None) -> int:
    """Runs something in a process that is killed by a file of so many bytes, or at an event; its exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    if limit is not None:
        # Python ignores it, and a write then fails as on a full disk.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if event is not None:
        left = [event]

        def audit(name, arguments):
            if name in EVENTS and any(str(folder) in str(argument) for argument in arguments):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(audit)
    try:
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a run but what a start left out, by its path; without the time at which it started."""
    files = (path for path in folder.rglob("*") if path.is_file() and "left_out" not in path.parts)
    found = {str(path.relative_to(folder)): path.read_bytes().replace(bytes(folder), b"RUN") for path in files}
    return {path: re.sub(rb'"started": "[^"]*"', b"", text) for path, text in found.items()}


def lines(folder: Path) -> list[bytes]:
    return [line for line in (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def main(root: Path, every: int) -> None:
    # A child copies what is touched.
    gc.freeze()
    # What a process has written outlives it; only a machine's end needs the disk.
    os.fsync = lambda _: None
    ended = set()
    points = [("all parts, events", PARTS, {"event": number}) for number in range(200)]
    points += [("log and record, bytes", ("log",), {"limit": limit}) for limit in range(0, 3600, 10)]
    points += [("traces, bytes", ("log", "traces"), {"limit": limit}) for limit in range(3600, 14000, 100)]
    points += [("validations, bytes", ("log", "validations"), {"limit": limit}) for limit in range(0, 1200, 15)]
    points += [("state, bytes", ("log", "state"), {"limit": limit}) for limit in range(0, 400, 8)]
    wholes = {}
    for name, parts, fault in points[::every]:
        if name in ended:
            continue
        if parts not in wholes:
            before, after = root / f"{len(wholes)}-before", root / f"{len(wholes)}-after"
            assert child(lambda to=before, of=parts: run(to, of, last=REACHED, resume=False)) == 0
            (before / "checkpoints" / f"global_step_{KEPT}").mkdir(parents=True, exist_ok=True)
            (before / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(KEPT))
            shutil.copytree(before, after)
            assert child(lambda to=after, of=parts: run(to, of, last=LAST, resume=True)) == 0
            wholes[parts] = before, content(after)
        before, whole = wholes[parts]
        folder = root / "killed"
        shutil.copytree(before, folder)
        code = child(lambda to=folder, of=parts: run(to, of, last=LAST, resume=True), folder=folder, **fault)
        if code == 0:
            # Beyond the last write.
            ended.add(name)
        kept = lines(folder)[:KEPT] == lines(before)[:KEPT]
        again = child(lambda to=folder, of=parts: run(to, of, last=LAST, resume=True))
        found = content(folder)
        wrong = sorted(path for path in {*whole, *found} if whole.get(path) != found.get(path))
        result = {"where": name, "fault": fault, "code": code, "kept": kept, "again": again, "different": wrong}
        print(json.dumps(result), flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
