"""The first minutes on a GPU, part by part, into one file and one table: scripts/gpu.sh, docs/dev/testing.md.

Each part runs in processes of its own under its own limit of time, and what it left is written before the next begins.
A file keeps what an earlier start wrote of the parts that this one leaves out; so each part names its commit.
"""

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from omegaconf import OmegaConf
from shared import table

from verl_clipx.common.command_line import installed_version
from verl_clipx.common.files import read_json, write_json
from verl_clipx.run.support import PASSED, shape_of
from verl_clipx.runs.folder import RunFolder

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "triton", "verl", "verl-clipx", "vllm", "transformers", "ray", "tensordict", "flash-attn")
METHODS = ("grpo", "acpo", "bapo", "dgpo", "cispo", "observe")
VARIANTS = ("observe", "acpo, lagged", "acpo, mini_batch", "acpo, mini_batch, larger extra pass")
SIDE_BY_SIDE = 6
LINES_OF_A_CRASH = 15
# What a rehearsal on a CPU runs of tests/gpu.
REHEARSED = "another_bound or float64_and_keeps and (grpo or acpo)"
HOST_WAITS = "test_losses.py::test_a_call_waits_at_most_once_and_compiled_it_launches_fewer_kernels"

WELL, NOT_RUN = (PASSED, "skipped"), "not run"

Command = tuple[list[str], dict[str, str]]
Figures = Callable[[dict], list[float]]


@dataclass(frozen=True)
class Part:
    """A part of the whole.

    Args:
        seconds: its limit of time.
        commands: what runs side by side, each with further variables of the environment.
        folder: where its commands leave figures.json, outcomes*.jsonl and runs.
    """

    name: str
    seconds: float
    folder: Path
    commands: list[Command] = field(default_factory=list)

    def run(self, limit: float | None) -> dict[str, Any]:
        """Runs its commands to their end or a limit, its own if None; returns outcome, seconds, and what they left."""
        self.folder.mkdir()
        started, limit = time.monotonic(), self.seconds if limit is None else limit
        with contextlib.ExitStack() as stack:
            processes = []
            for number, (words, variables) in enumerate(self.commands):
                log = stack.enter_context((self.folder / f"{number}.log").open("wb"))
                given = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT, "cwd": ROOT}
                processes.append(
                    subprocess.Popen(words, env=os.environ | variables, start_new_session=True, **given),
                )
            codes = [wait(process, started + limit) for process in processes]
        outcome = PASSED if not any(codes) else f"timed out after {limit:g} s" if None in codes else "failed"
        result = {"outcome": outcome, "seconds": round(time.monotonic() - started, 1), **self.left()}
        if outcome == PASSED and {*result.get("tests", {}).values()} == {"skipped"}:
            result["outcome"] = "skipped"
        if outcome != PASSED:
            ends = (
                (self.folder / f"{number}.log").read_text(errors="replace") for number, of in enumerate(codes) if of
            )
            result["end"] = [line for end in ends for line in end.splitlines()[-LINES_OF_A_CRASH:]]
        return result

    def left(self) -> dict[str, Any]:
        """Returns what its commands left: figures, and the outcomes of tests, options and runs."""
        found: dict[str, Any] = {}
        if (figures := self.folder / "figures.json").exists():
            found["figures"] = read_json(figures)
        noted = [json.loads(line) for path in sorted(self.folder.glob("*.jsonl")) for line in path.open()]
        runs = [line["run"] for line in noted if "run" in line and line["outcome"] == PASSED]
        if noted:
            found["tests"] = {line["test"]: line["outcome"] for line in noted}
            options = {line["option"]: {"outcome": line["outcome"]} for line in noted if "option" in line}
            found["options"] = {name: of for name, of in options.items() if of["outcome"] in (PASSED, "failed")}
        trained = [RunFolder(path.parent) for path in sorted(self.folder.rglob("metrics.jsonl"))]
        if trained:
            found["figures"] = {run.path.name: figures_of(run) for run in trained}
            runs += [shape_of(OmegaConf.create(run.record["configuration"])) for run in trained if run.record]
        return found | ({"runs": runs} if runs else {})


def wait(process: subprocess.Popen, until: float) -> int | None:
    """Returns a process's exit code, or None if it had to be ended, with all that it started."""
    try:
        return process.wait(max(until - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def figures_of(run: RunFolder) -> dict[str, Any]:
    """Returns a training's rewards, step by step, and the median seconds of a step."""
    steps = list(run.metrics.values())
    seconds = [step["timing_s/step"] for step in steps if "timing_s/step" in step]
    rewards = [step["critic/rewards/mean"] for step in steps if "critic/rewards/mean" in step]
    return {"rewards": rewards, "step": statistics.median(seconds) if seconds else None}


def pytest_on(ranks: int, folder: Path, *words: str, share: str = "1/1") -> Command:
    """Returns the command of tests/gpu on some ranks, of which `share` is the process's own."""
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--local-ranks-filter=0"]
    command = [sys.executable, "-m", *launch, "--module", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *words]
    outcomes = folder / f"outcomes{share.partition('/')[0]}.jsonl"
    return command, {"SHARE": share, "OUTCOMES": str(outcomes), "OMP_NUM_THREADS": "2"}


def parts_of(folder: Path, *, rehearse: bool, rollout: bool, train: bool) -> Iterator[Part]:
    """Yields the parts in their order, each with its own folder below one."""

    def figures(script: str, part: str, words: str, *more: str) -> Command:
        given = [*words.split(), *more, "--json", str(folder / part / "figures.json")]
        return [sys.executable, f"benchmarks/{script}.py", *given], {}

    shapes = "--shape 2x64 --repeats 1" if rehearse else "--shape 64x4096 --shape 8x16384"
    methods = METHODS[1:2] if rehearse else METHODS
    yield Part("losses", 170, folder / "losses", [figures("loss", "losses", shapes, *methods)])
    size = (
        "--width 1024 --layers 12 --sequences 64 --response 1016 --updates 4 --updates 16 --micro-batch 4 --repeats 3"
    )
    if rehearse:
        size = "--width 64 --layers 1 --sequences 16 --response 8 --updates 2 --micro-batch 2 --repeats 1"
    chosen = [word for variant in VARIANTS for word in ("--variant", variant)]
    yield Part("update", 120, folder / "update", [figures("update_actor", "update", size, *chosen)])
    # What a rehearsal needs of two ranks is that they start.
    most = 2 if rehearse else torch.cuda.device_count()
    for ranks in (count for count in (1, 2, 4) if count <= most):
        name, shares = f"tests on {ranks}", 2 if rehearse else SIDE_BY_SIDE
        own = ["tests/gpu", "--ignore=tests/gpu/test_rollout.py"]
        if rehearse:
            own += ["-k", REHEARSED if ranks == 1 else "another_bound"]
        shares = shares if ranks == 1 else 1
        commands = [pytest_on(ranks, folder / name, *own, share=f"{part}/{shares}") for part in range(1, shares + 1)]
        yield Part(name, 200 * ranks, folder / name, commands)
    if rollout:
        yield Part("rollout", 480, folder / "rollout", [pytest_on(1, folder / "rollout", "tests/gpu/test_rollout.py")])
    if train:
        variables = {"HARDWARE": "gpu", "MODEL": os.environ.get("MODEL", "smollm2"), "RUNS": str(folder / "train")}
        script = ["bash", "scripts/quickstart.sh"]
        if rehearse:
            script = ["clipx", "explain", "--", "bash", "recipes/quickstart/run_sums_pretrained_cpu.sh"]
            variables |= {"MODEL_PATH": "none", "RUN_FOLDER": str(folder / "run")}
        yield Part("train", 1500, folder / "train", [(script, variables)])


def output_of(*words: str) -> str | None:
    """Returns what a command prints; None if it is not here or fails."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    return None


def card_of(rehearse: bool) -> dict[str, Any]:
    """Returns the device that is measured: name, kind, UUID and driver; and the versions that it is measured with."""
    asked = "--query-gpu=name,uuid,driver_version"
    listed = output_of("nvidia-smi", asked, "--format=csv,noheader") if torch.cuda.is_available() else None
    name, uuid, driver = listed.splitlines()[0].split(", ") if listed else ("CPU, rehearsal", None, None)
    versions = {package: installed_version(package) for package in PACKAGES}
    kind = "cuda" if listed else "cpu"
    device = {"device": name, "kind": kind, "uuid": uuid, "driver": driver, "cuda": torch.version.cuda}
    return {**device, "rehearsal": rehearse, "gpus": torch.cuda.device_count(), "versions": versions}


def of_vanilla(shape: dict, row: dict) -> float:
    """Returns a loss's time in kernels, of vanilla's."""
    return row["kernels"] / shape["rows"]["vanilla"]["kernels"]


def of_floor(shape: dict, row: dict) -> float:
    """Returns a loss's time in kernels, of the time in which the device copies as many bytes."""
    return row["kernels"] / shape["floor"]


def losses(share: Callable[[dict, dict], float], ends: str) -> Figures:
    """Returns a goal's figures: a share for each shape and each of the plugin's losses whose row ends so."""
    return lambda part: [
        share(shape, row)
        for shape in part["figures"]["shapes"].values()
        for name, row in shape["rows"].items()
        if name.startswith("clipx_") and name.endswith(ends)
    ]


def update(variant: str) -> Figures:
    """Returns a goal's figures: an update's time under a variant, of vanilla's, by number of updates."""
    return lambda part: [row[variant]["of_vanilla"] for row in part["figures"]["updates"].values()]


def failures(part: dict) -> list[str]:
    """Returns the tests of a part that did not end well."""
    return [test for test, outcome in part.get("tests", {}).items() if outcome not in WELL]


# What is to be reached: the part, the most, and the figures out of it, of which the largest counts.
GOALS: dict[str, tuple[str, float, Figures]] = {
    "compiled loss, kernels, of a copy's time": ("losses", 2, losses(of_floor, ", compiled")),
    "compiled loss, kernels, of vanilla's": ("losses", 0.2, losses(of_vanilla, ", compiled")),
    "the same, own statistics": ("losses", 0.4, losses(of_vanilla, ", compiled, own statistics")),
    "calls that wait more than once": ("tests on 1", 0, lambda part: [part["tests"][HOST_WAITS] != PASSED]),
    "update, ACPO's extra pass, of vanilla's": ("update", 1.2, update("acpo, mini_batch")),
    "the same, 4 times larger micro-batches": ("update", 1.1, update("acpo, mini_batch, larger extra pass")),
    "tests/gpu on one GPU, failures": ("tests on 1", 0, lambda part: [len(failures(part))]),
    "tests/gpu on two GPUs, failures": ("tests on 2", 0, lambda part: [len(failures(part))]),
}


def goal_table(records: list[dict[str, Any]]) -> str:
    """Returns the table of goals with each card's figures, in Markdown; `not run` where there is none."""

    def cell(record: dict[str, Any], name: str, limit: float, figures: Figures) -> str:
        if (part := record["parts"].get(name)) is None:
            return NOT_RUN
        try:
            worst = max(figures(part))
        except (KeyError, ValueError):
            return "failed"
        return f"{worst:.3g}{'' if worst <= limit else ', **missed**'}"

    cells = [[goal, f"{of[1]:g}", *([cell(one, *of) for one in records] or [NOT_RUN])] for goal, of in GOALS.items()]
    return table(["goal", "at most", *([one["device"] for one in records] or ["measured"])], cells)


def main(
    rollout: Annotated[bool, typer.Option(help="Also verl with Ray, FSDP2 and vLLM.")] = False,
    train: Annotated[bool, typer.Option(help="Also the quick start's two runs, ten minutes.")] = False,
    rehearse: Annotated[bool, typer.Option(help="Tiny shapes, also on a CPU.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the file; docs/results/gpu by default.")] = None,
    limit: Annotated[float | None, typer.Option(help="Seconds of each part, instead of its own limit.")] = None,
) -> None:
    """Run every part on this machine's GPU, write docs/results/gpu/CARD.json, and print tables of parts and goals."""
    if not (rehearse or torch.cuda.is_available()):
        sys.exit("There is no CUDA device here. --rehearse runs the same with tiny shapes on a CPU.")
    if rehearse and out is None:
        sys.exit("--rehearse: name a folder for its file, so that it is not taken for a measurement: --out FOLDER")
    record, unchanged = card_of(rehearse), ("--", ".", ":!docs/results/gpu")
    path = (out or ROOT / "docs/results/gpu") / f"{re.sub('[^A-Za-z0-9]+', '-', record['device'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier = read_json(path) if path.exists() else {}
    record["parts"] = earlier["parts"] if earlier.get("uuid") == record["uuid"] and earlier else {}
    commit = {"commit": output_of("git", "rev-parse", "HEAD") or os.environ.get("COMMIT")}
    commit |= {"changed": bool(output_of("git", "status", "--porcelain", *unchanged)), "date": f"{date.today()}"}
    rows = []
    with tempfile.TemporaryDirectory(prefix="clipx-gpu-") as folder:
        for part in parts_of(Path(folder), rehearse=rehearse, rollout=rollout, train=train):
            record["parts"][part.name] = result = {**part.run(limit), **commit}
            write_json(path, record)
            print(f"{part.name}: {result['outcome']}", *result.get("end", ()), sep="\n  ", flush=True)
    for name, part in record["parts"].items():
        failed = f": {len(failures(part))} of {len(part['tests'])} tests" if failures(part) else ""
        rows.append([name, part["outcome"] + failed, f"{part['seconds']:g}", str(part["commit"])[:8]])
    print(f"\n{record['device']}, driver {record['driver']}, CUDA {record['cuda']}: {path}\n")
    print(table(["part", "outcome", "seconds", "commit"], rows), goal_table([record]), sep="\n\n")
    if any(part["outcome"] not in WELL for part in record["parts"].values()):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
