"""Kills seeded runs of the real verl at random moments, resumes each, and compares the end with an uninterrupted run.

    python -m tests.end_to_end.kill_runs FOLDER --kills 40 --minutes 60 --seed 0

A run is `clipx watch` over verl's v1 trainer in its mode sync, on the CPU, saving, validating and tracing every step.
It is killed some times in a chain: SIGKILL to the driver, to the worker that trains, to the rollout server, or to the
launcher, in a save, while traces are written, or at any moment of a step; the same command then goes on. What still
runs after a minute is ended and counted. At the end of each chain every logged value but times, all traces,
validations and the last checkpoint are compared.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pandas
import psutil
import torch

from verl_clipx.common.traces import read_shards, shards_in
from verl_clipx.diagnostics.run_log import read_growing_log, read_run_log
from verl_clipx.tasks.countdown.config import CountdownConfig
from verl_clipx.tasks.countdown.dataset import write_dataset
from verl_clipx.tasks.countdown.generator import generate_problems
from verl_clipx.tasks.countdown.policy import fit_policy
from verl_clipx.tasks.tiny_policy.warm_start import WarmStartConfig

from .conftest import WARM_START_STEPS, Task
from .process_tree import kill_tree
from .runs import launch, metrics_of

# In a chain, and steps of its run: each start makes one at least.
KILLS, STEPS = 4, 9
VICTIMS = {
    "launcher": "verl_clipx.cli",
    "driver": "-m verl.trainer.main_ppo",
    "worker": "ray::WorkerDict",
    "rollout server": "ray::CPUServer",
}
MOMENTS = ("save", "trace", "any")
SECONDS = 600
# As in test_resume.py: sums of floats of another order.
TOLERANCE = 1e-5
# Of a step's metrics, those that are times, or of a start and not of a step.
OF_TIME = ("timing", "perf/", "global_seqlen", "actor/clipx/receipt", "actor/perf/")
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


def task_in(folder: Path) -> Task:
    """The data and the policy of tests/end_to_end."""
    config = CountdownConfig()
    if not (folder / "train.parquet").exists():
        write_dataset(folder, config, train_size=256, test_size=32, seed=0)
    problems = generate_problems(config, 2000, 0, "train")
    fit = WarmStartConfig(steps=WARM_START_STEPS)
    cache = folder / "policies"
    policy = fit_policy(problems, config.operators, mistakes=0.5, config=fit, cache=cache, num_threads=1)
    return Task(folder / "train.parquet", folder / "test.parquet", policy)


def start(task: Task, folder: Path) -> subprocess.Popen:
    watch = (
        sys.executable,
        "-m",
        "verl_clipx.cli",
        "watch",
        str(folder),
        "--steps",
        str(STEPS),
        "--label",
        "run",
        "--",
    )
    overrides = (*OVERRIDES, f"trainer.validation_data_dir={folder / 'validation'}")
    return launch(task, folder, *overrides, steps=STEPS, before=watch)


def victims(root: int, kind: str) -> list[psutil.Process]:
    found = []
    for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
        with suppress(psutil.Error):
            if VICTIMS[kind] in " ".join(process.cmdline()):
                found.append(process)
    return found


def moment(folder: Path, kind: str, before: int, chance: random.Random) -> bool:
    """Whether the moment to kill has come: of a step that this start makes."""
    if kind == "any":
        return before + 1 in read_growing_log(metrics_of(folder)).index and chance.random() < 0.02
    at = before + chance.choice((1, 2))
    if kind == "save":
        return (folder / "checkpoints" / f"global_step_{at}" / "actor").exists()
    return any(shard.step == at for shard in shards_in(folder / "traces"))


def kill_once(task: Task, folder: Path, kind: str, when: str, chance: random.Random) -> dict:
    latest = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    before = int(latest.read_text() or 0) if latest.exists() else 0
    process = start(task, folder)
    began = time.monotonic()
    while not moment(folder, when, before, chance):
        assert process.poll() is None, f"the run ended by itself: {(folder / 'run.log').read_text()[-3000:]}"
        assert time.monotonic() - began < SECONDS
        time.sleep(0.02)
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    targets = victims(process.pid, kind)
    for target in targets:
        with suppress(psutil.NoSuchProcess):
            target.kill()
    left = psutil.wait_procs(tree, timeout=60)[1]
    for one in left:
        kill_tree(one.pid)
    process.wait()
    return {"victim": kind, "moment": when, "after": before, "killed": len(targets), "left": len(left)}


def values_of(folder: Path) -> pandas.DataFrame:
    log = read_run_log(metrics_of(folder))
    return log[[name for name in log if not name.startswith(OF_TIME) and "/time" not in name]]


def different(one: Path, two: Path) -> list[str]:
    """What of two finished runs differs, a name each."""
    first, second = values_of(one), values_of(two)
    wrong = [] if list(first.index) == list(second.index) else [f"steps {list(second.index)}"]
    for name in sorted({*first, *second}):
        if name not in first or name not in second:
            wrong.append(f"{name} in one only")
        elif not ((first[name] - second[name]).abs().fillna(0) <= TOLERANCE).all() or (
            first[name].isna().tolist() != second[name].isna().tolist()
        ):
            wrong.append(name)
    shards = [shards_in(folder / "traces") for folder in (one, two)]
    if shards[0] != shards[1]:
        wrong.append("traces: other files")
    for shard in shards[0] if shards[0] == shards[1] else ():
        tables = [read_shards(folder / "traces", [shard]).to_pandas() for folder in (one, two)]
        try:
            pandas.testing.assert_frame_equal(*tables, atol=TOLERANCE, rtol=TOLERANCE)
        except AssertionError:
            wrong.append(f"traces: {shard}")
    for path in sorted((one / "validation").iterdir()):
        if path.read_text() != (two / "validation" / path.name).read_text():
            wrong.append(f"validation: {path.name}")
    saved = f"checkpoints/global_step_{STEPS}/actor"
    states = [json.loads((folder / saved / "clipx_state.json").read_text()) for folder in (one, two)]
    if states[0]["step"] != states[1]["step"]:
        wrong.append("state of the bounds: step")
    weights = [torch.load(folder / saved / "model_world_size_1_rank_0.pt", weights_only=False) for folder in (one, two)]
    for name in weights[0]:
        tensors = [getattr(of[name], "_local_tensor", of[name]) for of in weights]
        if not torch.allclose(*tensors, atol=TOLERANCE):
            wrong.append(f"checkpoint: {name}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=60, help="no chain begins a further kill after so many")
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    folder, chance, end = words.folder.resolve(), random.Random(words.seed), time.monotonic() + 60 * words.minutes
    task, whole = task_in(folder), folder / "uninterrupted"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    code = start(task, whole).wait(SECONDS)
    assert code == 0, (whole / "run.log").read_text()[-3000:]
    made = wrong = 0
    plan = [(victim, when) for victim in VICTIMS for when in MOMENTS] * (words.kills // 12 + 1)
    chance.shuffle(plan)
    while made < words.kills and time.monotonic() < end:
        chain = folder / f"killed_{made}"
        for _ in range(min(KILLS, words.kills - made)):
            if time.monotonic() < end:
                print(json.dumps(kill_once(task, chain, *plan[made], chance)), flush=True)
                made += 1
        code = start(task, chain).wait(SECONDS)
        found = different(whole, chain) if code == 0 else [f"exit code {code}"]
        wrong += len(found)
        print(json.dumps({"kills so far": made, "different": found}), flush=True)
    print(f"{made} of {words.kills} kills were made; {wrong} values, files or tensors differ", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
