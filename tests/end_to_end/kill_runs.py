"""Kills seeded runs of the real verl at random moments, resumes each, and compares the end with an uninterrupted run.

    python -m tests.end_to_end.kill_runs FOLDER --kills 40 --minutes 60 --seed 0

A run is `clipx watch` over verl's v1 trainer in its mode sync, on the CPU, saving, validating and tracing every step.
It is killed some times in a chain: SIGKILL to the launcher, to verl's driver, to its trainer, to the worker that
trains or to the rollout server, while the run starts, in a save, while traces are written or at any moment of a step.
The same command then goes on. What still runs after a minute is ended and counted. At the end of a chain every logged
value but times, all traces, validations and the last checkpoint are compared.

FOLDER/kills.jsonl gets a line for each kill and for the end of each chain. A further call adds to it: it makes so many
kills more, and first ends a chain that the call before left open.
"""

import argparse
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas
import psutil
import torch

from verl_clipx.common.traces import read_shards, shards_in
from verl_clipx.diagnostics.run_log import read_growing_rows, read_run_log

from .conftest import Task, task_in
from .process_tree import kill_tree
from .runs import MAIN, launch, metrics_of

# In a chain, and steps of its run: a start makes two at most before it is killed, and most make fewer.
KILLS, STEPS = 10, 12
# What the command line of a process holds; that of the launcher holds the driver's too.
VICTIMS = {
    "launcher": "verl_clipx.cli",
    "driver": MAIN,
    "trainer": "ray::TaskRunner",
    "worker": "ray::WorkerDict",
    "rollout server": "ray::CPUServer",
}
# Seconds after a moment has come within which the kill falls: a save takes 0.06 s, a step 2 s and more.
MOMENTS = {"start": 20.0, "save": 0.06, "trace": 0.1, "any": 2.0}
SECONDS = 600
# As in test_resume.py: sums of floats of another order.
TOLERANCE = 1e-5
# Of a step's metrics, those that are times, or of a start and not of a step.
OF_TIME = ("timing", "perf/mfu", "perf/time", "perf/throughput", "actor/perf/", "actor/clipx/receipt")
OVERRIDES = (
    "+clipx=acpo",
    "clipx.scope=lagged",
    "clipx.lagged_average=0.5",
    "+clipx/rollout=seeded",
    "+clipx/trace=prompts",
    "clipx.trace.fraction=0.5",
    "clipx.trace.every=1",
    "actor_rollout_ref.actor.calculate_entropy=True",
    "actor_rollout_ref.rollout.val_kwargs.temperature=0",
    "trainer.save_freq=1",
    "trainer.test_freq=1",
    "trainer.resume_mode=auto",
)


@dataclass(frozen=True)
class Kill:
    """One kill of a chain, a line of the record.

    Args:
        seed: of the run.
        chain: its number among those of the seed.
        victim: of VICTIMS.
        moment: of MOMENTS.
        after: step of the checkpoint that verl named the latest when the killed run started.
        processes: how many were killed.
        seconds: until every process of the run had ended.
        left: processes that had not after a minute.
    """

    seed: int
    chain: int
    victim: str
    moment: str
    after: int
    processes: int
    seconds: float
    left: int


@dataclass(frozen=True)
class End:
    """The end of a chain, a line of the record.

    Args:
        seed: of the run.
        chain: its number among those of the seed.
        compared: values, files and tensors that were compared.
        different: those that differ from the uninterrupted run's.
    """

    seed: int
    chain: int
    compared: int
    different: list[str]


def start(task: Task, folder: Path, seed: int) -> subprocess.Popen:
    watch = ("-m", "verl_clipx.cli", "watch", str(folder), "--steps", str(STEPS), "--label", "run", "--")
    seeds = (f"data.seed={seed}", f"actor_rollout_ref.rollout.seed={seed}")
    overrides = (*OVERRIDES, *seeds, f"trainer.validation_data_dir={folder / 'validation'}")
    return launch(task, folder, *overrides, steps=STEPS, before=(sys.executable, *watch))


def victims(root: int, kind: str) -> list[psutil.Process]:
    """The processes of a kind in the tree of a launcher."""
    launcher = psutil.Process(root)
    if kind == "launcher":
        return [launcher]
    found = []
    for process in launcher.children(recursive=True):
        with suppress(psutil.Error):
            if VICTIMS[kind] in " ".join(process.cmdline()):
                found.append(process)
    return found


def has_come(folder: Path, moment: str, at: int, since: float) -> bool:
    """Whether this start of a run, since a time, has come to a moment of step `at`."""
    if moment == "start":
        return True
    if moment == "any":
        return at - 1 in read_growing_rows(metrics_of(folder))
    if moment == "save":
        written = (folder / "checkpoints" / f"global_step_{at}" / "actor").glob("*.pt")
    else:
        written = (folder / "traces").glob(f"*step_{at:08d}_*")
    # Files of an earlier start are moved or written over.
    return any(modified(path) > since for path in written)


def modified(path: Path) -> float:
    # A file that is being written may be renamed meanwhile.
    with suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


def latest_step(folder: Path) -> int:
    latest = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(latest.read_text() or 0) if latest.exists() else 0


def kill_once(task: Task, folder: Path, seed: int, chain: int, victim: str, moment: str, chance: random.Random) -> Kill:
    """Starts a run or goes on with it, and kills a process of it."""
    before, since = latest_step(folder), time.time()
    at = before + (2 if moment == "any" else chance.choice((1, 2)))
    process = start(task, folder, seed)
    # Found beforehand, as looking takes longer than a save.
    while not (targets := victims(process.pid, victim)):
        goes_on(process, folder, since)
        time.sleep(0.2)
    while not has_come(folder, moment, at, since):
        goes_on(process, folder, since)
        time.sleep(0.002 if moment == "save" else 0.05)
    time.sleep(chance.uniform(0, MOMENTS[moment]))
    goes_on(process, folder, since)
    for target in targets:
        target.suspend()
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for target in targets:
        target.kill()
    killed = time.monotonic()
    left = psutil.wait_procs(tree, timeout=60)[1]
    seconds = time.monotonic() - killed
    for one in left:
        kill_tree(one.pid)
    process.wait()
    return Kill(seed, chain, victim, moment, before, len(targets), round(seconds, 1), len(left))


def goes_on(process: subprocess.Popen, folder: Path, since: float) -> None:
    if process.poll() is not None or time.time() - since > SECONDS:
        kill_tree(process.pid)
        sys.exit(
            f"the run ended by itself, or was not killed in {SECONDS} s: {(folder / 'run.log').read_text()[-3000:]}"
        )


def finish(task: Task, folder: Path, seed: int) -> None:
    code = start(task, folder, seed).wait(SECONDS)
    assert code == 0, f"exit code {code}: {(folder / 'run.log').read_text()[-3000:]}"


def values_of(folder: Path) -> pandas.DataFrame:
    log = read_run_log(metrics_of(folder))
    return log[[name for name in log if not name.startswith(OF_TIME)]]


def parts_of(folder: Path) -> dict[str, Any]:
    """What is compared of a finished run, by name: a logged value of every step, a file, a tensor or number saved."""
    log = values_of(folder)
    found = {"steps": torch.tensor(log.index)} | {name: torch.tensor(log[name].to_numpy(float)) for name in log}
    for shard in shards_in(folder / "traces"):
        table = read_shards(folder / "traces", [shard]).to_pandas()
        # verl names groups and prompts at random in each start: which tokens share a group is what has to be equal.
        if "group" in table:
            table["group"] = pandas.factorize(table["group"])[0]
        found[f"traces: {shard}"] = table
    for path in (folder / "validation").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        # Rows are in the order of their random names.
        found[f"validation: {path.name}"] = sorted(json.dumps({**row, "uid": None}) for row in rows)
    saved = folder / "checkpoints" / f"global_step_{STEPS}"
    for path in saved.rglob("*.pt"):
        found |= dict(leaves(torch.load(path, weights_only=False), f"checkpoint: {path.name}"))
    state = json.loads((saved / "actor" / "clipx_state.json").read_text())
    found |= dict(leaves(state, "checkpoint: state of the bounds"))
    # The worker's own generators start from the system's entropy and so differ between any two runs. None is used.
    return {name: part for name, part in found.items() if "/rng/" not in name}


def leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every tensor, number and text of nested dicts, lists and tuples, with its path."""
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{name}/{key}")
    else:
        yield name, getattr(tree, "_local_tensor", tree)


def same(one: Any, two: Any) -> bool:
    if type(one) is not type(two):
        return False
    if isinstance(one, pandas.DataFrame):
        try:
            pandas.testing.assert_frame_equal(one, two, atol=TOLERANCE, rtol=TOLERANCE)
        except AssertionError:
            return False
        return True
    if isinstance(one, torch.Tensor):
        equal_shape = one.shape == two.shape
        return equal_shape and torch.allclose(one, two, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    if isinstance(one, float):
        return math.isclose(one, two, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(one == two)


def different(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """The names of the parts that differ, or that one lacks."""
    return sorted(name for name in {*one, *two} if name not in one or name not in two or not same(one[name], two[name]))


def plan(seed: int, chain: int) -> list[tuple[str, str]]:
    """Victim and moment of each kill of a chain: shuffled, each pair as often as the others."""
    pairs: list[tuple[str, str]] = []
    while len(pairs) < (chain + 1) * KILLS:
        block = list(itertools.product(VICTIMS, MOMENTS))
        random.Random(f"{seed} {len(pairs)}").shuffle(block)
        pairs += block
    return pairs[chain * KILLS : (chain + 1) * KILLS]


def read_record(path: Path) -> tuple[list[Kill], list[End]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [Kill(**line) for line in lines if "victim" in line], [End(**line) for line in lines if "compared" in line]


def append(path: Path, entry: Kill | End) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(entry)) + "\n")
    print(json.dumps(asdict(entry)), flush=True)


def summary(kills: list[Kill], ends: list[End]) -> str:
    """The counts, those of kills whose chain was compared."""
    ended = {(end.seed, end.chain) for end in ends}
    counted = [kill for kill in kills if (kill.seed, kill.chain) in ended]
    told = [f"{len(counted)} kills in {len(ends)} chains; {sum(end.compared for end in ends)} parts compared, "]
    told.append(f"{sum(len(end.different) for end in ends)} differ; {sum(kill.left > 0 for kill in counted)} runs hung")
    for names in (Counter(kill.victim for kill in counted), Counter(kill.moment for kill in counted)):
        told.append("\n" + ", ".join(f"{name} {number}" for name, number in sorted(names.items())))
    return "".join(told)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=40, help="so many more, also after an earlier call")
    parser.add_argument("--minutes", type=float, default=60, help="no further kill begins after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chain", type=int, help="this one only, so that several calls can run side by side")
    words = parser.parse_args(arguments)
    folder, seed, end = words.folder.resolve(), words.seed, time.monotonic() + 60 * words.minutes
    record, task = folder / "kills.jsonl", task_in(folder / "task")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    whole = folder / f"seed_{seed}" / "uninterrupted"
    if latest_step(whole) < STEPS:
        finish(task, whole, seed)
    left, (kills, ends) = words.kills, read_record(record)
    ended = {entry.chain for entry in ends if entry.seed == seed}
    open_chains = (chain for chain in itertools.count() if chain not in ended)
    for chain in open_chains if words.chain is None else [words.chain]:
        if not left or time.monotonic() > end:
            break
        made = sum((entry.seed, entry.chain) == (seed, chain) for entry in kills)
        killed = folder / f"seed_{seed}" / f"chain_{chain}"
        for number, pair in list(enumerate(plan(seed, chain)))[made:]:
            if not left or time.monotonic() > end or latest_step(killed) + 2 >= STEPS:
                break
            append(record, kill_once(task, killed, seed, chain, *pair, random.Random(f"{seed} {chain} {number}")))
            left -= 1
        finish(task, killed, seed)
        parts = parts_of(killed)
        append(record, End(seed, chain, len(parts), different(parts_of(whole), parts)))
    kills, ends = read_record(record)
    print(summary(kills, ends), flush=True)
    return int(any(end.different for end in ends))


if __name__ == "__main__":
    sys.exit(main())
