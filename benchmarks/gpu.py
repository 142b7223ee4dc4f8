"""The first minutes on a GPU, part by part, into one file and one table: scripts/gpu.sh, docs/dev/testing.md.

Each part runs in processes of its own under its own limit of time, and what it left is written before the next begins.
A file keeps what an earlier start wrote of the parts that this one leaves out; so each part names its commit.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from omegaconf import OmegaConf
from shared import table

from verl_clipx.analysis.runs.folder import RunFolder
from verl_clipx.common.command_line import installed_version
from verl_clipx.common.files import read_json, write_json
from verl_clipx.run.keys import nested
from verl_clipx.run.support import PASSED, shape_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results/gpu"
PACKAGES = ("torch", "triton", "verl", "verl-clipx", "vllm", "transformers", "ray", "tensordict", "flash-attn")
METHODS = ("grpo", "acpo", "bapo", "dgpo", "cispo", "observe")
LARGER = "acpo, mini_batch, larger extra pass"
VARIANTS = ("observe", "acpo, lagged", "acpo, mini_batch", LARGER)
# Processes of tests on one GPU; in a rehearsal, which runs these tests alone, two.
SIDE_BY_SIDE, REHEARSED = 6, "losses and not compiled_loss or vanilla or FSDP2 or another_bound"
HOST_WAITS = "test_losses.py::test_a_call_waits_at_most_once_and_compiled_it_launches_fewer_kernels"
LINES_OF_A_CRASH = 15
SKIPPED, NOT_RUN = "skipped", "not run"

# The words of a command and further variables of its environment.
Command = tuple[list[str], dict[str, str]]
Figures = Callable[[dict[str, Any]], list[float]]


def parts_of(folder: Path, *, rehearse: bool, rollout: bool, train: bool) -> Iterator[tuple[str, float, list[Command]]]:
    """Yields each part's name, its limit in seconds, and what runs side by side; it writes below folder/NAME."""

    def benchmark(part: str, script: str, words: str, *more: str) -> list[Command]:
        output = str(folder / part / "figures.json")
        return [([sys.executable, f"benchmarks/{script}.py", *words.split(), *more, "--json", output], {})]

    def tests(part: str, ranks: int, processes: int, *words: str) -> list[Command]:
        launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--local-ranks-filter=0"]
        command = [sys.executable, "-m", *launch, "--module", "pytest", "-q", "-p", "no:cacheprovider", *words]
        variables = {"OUTCOMES": str(folder / part / "outcomes"), "OMP_NUM_THREADS": "2"}
        return [(command, {**variables, "SHARE": f"{number + 1}/{processes}"}) for number in range(processes)]

    # First, since nothing else says what a GPU's clip fractions mean. MODEL may be a folder, as for the part "train".
    words = "--count 2 --precision bfloat16" if rehearse else "--count 64"
    model = Path(os.environ.get("MODEL", "smollm2"))
    of_model = ["--model", str(model)] if model.is_dir() else []
    yield "floor", 300, benchmark("floor", "floor", words, *of_model)
    methods = METHODS[1:2] if rehearse else METHODS
    shapes = "--shape 2x64 --repeats 1" if rehearse else "--shape 64x4096 --shape 8x16384"
    yield "losses", 170, benchmark("losses", "loss", shapes, *methods)
    size = "--width 1024 --layers 12 --sequences 64 --response 1016 --updates 4 --micro-batch 4"
    if rehearse:
        size = "--width 64 --layers 1 --sequences 16 --response 8 --updates 2 --micro-batch 2"
    chosen = [word for variant in VARIANTS for word in ("--variant", variant)]
    yield "update", 180, benchmark("update", "update_actor", f"{size} --repeats {1 if rehearse else 3}", *chosen)
    for ranks in (count for count in (1, 2, 4) if count <= (torch.cuda.device_count() or 2)):
        words = ["tests/gpu", "--ignore=tests/gpu/test_rollout.py"]
        words += ["-k", REHEARSED if ranks == 1 else "another_bound"] if rehearse else []
        processes = 1 if ranks > 1 else 2 if rehearse else SIDE_BY_SIDE
        yield f"tests on {ranks}", 200 * ranks, tests(f"tests on {ranks}", ranks, processes, *words)
    if rollout:
        yield "rollout", 480, tests("rollout", 1, 1, "tests/gpu/test_rollout.py")
    if train:
        variables = {"HARDWARE": "gpu", "MODEL": os.environ.get("MODEL", "smollm2"), "RUNS": str(folder / "train")}
        words = ["bash", "scripts/quickstart.sh"]
        if rehearse:
            words = ["clipx", "explain", "--", "bash", "recipes/quickstart/run_sums_pretrained_cpu.sh"]
        yield "train", 1500, [(words, variables)]


def run(folder: Path, seconds: float, commands: list[Command]) -> dict[str, Any]:
    """Runs commands side by side to their end or a limit; returns the outcome and what they left in a folder."""
    folder.mkdir()
    started, logs = time.monotonic(), [folder / f"{number}.log" for number in range(len(commands))]
    processes = []
    for (words, variables), log in zip(commands, logs, strict=True):
        with log.open("wb") as file:
            given = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "start_new_session": True}
            processes.append(subprocess.Popen(words, cwd=ROOT, env=os.environ | variables, **given))
    codes = [end_of(process, started + seconds) for process in processes]
    outcome = f"timed out after {seconds:g} s" if None in codes else "failed" if any(codes) else PASSED
    result = {"outcome": outcome, "seconds": round(time.monotonic() - started, 1), **left_in(folder)}
    if outcome == PASSED and {*result.get("tests", {}).values()} == {SKIPPED}:
        result["outcome"] = SKIPPED
    texts = [log.read_text(errors="replace").splitlines() for log in logs]
    print(*(line for text in texts for line in text if line.startswith("|")), sep="\n")
    if outcome != PASSED:
        ends = [text[-LINES_OF_A_CRASH:] for text, code in zip(texts, codes, strict=True) if code != 0]
        result["end"] = [line for end in ends for line in end]
    return result


def end_of(process: subprocess.Popen, until: float) -> int | None:
    """Returns a process's exit code, or None if it had to be ended; what it started ends with it."""
    try:
        return process.wait(max(until - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def left_in(folder: Path) -> dict[str, Any]:
    """Returns what a part has left: figures, the outcomes of tests and options, and runs."""
    left = {path.stem: read_json(path) for path in folder.glob("figures.json")}
    noted = [json.loads(line) for path in folder.glob("outcomes*") for line in path.read_text().splitlines()]
    if noted:
        # A failure after all else.
        noted.sort(key=lambda line: line["outcome"] == "failed")
        left["tests"] = {line["test"]: line["outcome"] for line in noted}
        options = {line["option"]: line["outcome"] for line in noted if "option" in line}
        left["options"] = {name: {"outcome": of} for name, of in options.items() if of in (PASSED, "failed")}
        left["runs"] = [line["run"] for line in noted if "run" in line and line["outcome"] == PASSED]
    trained = [RunFolder(log.parent) for log in sorted(folder.rglob("metrics.jsonl"))]
    if trained:
        key = "critic/rewards/mean"
        rewards = {run.path.name: [step[key] for step in run.metrics.values() if key in step] for run in trained}
        left["figures"] = {"rewards": rewards}
        left["runs"] = [
            shape_of(OmegaConf.create(nested(run.record_content["configuration"])))
            for run in trained
            if run.record_content
        ]
    return left


def output_of(*words: str) -> str:
    """Returns what a command prints; nothing if it is not here or fails."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    return ""


def failures(part: dict[str, Any]) -> list[str]:
    """Returns the tests of a part that did not end well."""
    return [test for test, outcome in part.get("tests", {}).items() if outcome not in (PASSED, SKIPPED)]


def tests_of(part: dict[str, Any]) -> list[float]:
    """A goal's figure: how many tests failed, at least one if the part did."""
    return [len(failures(part)) or part["outcome"] != PASSED]


def losses(ends: str, *, floor: bool = False) -> Figures:
    """Returns a goal's figures: the kernels' time of each loss whose row ends so, of vanilla's or of a copy's."""
    return lambda part: [
        row["kernels"] / (shape["floor"] if floor else shape["rows"]["vanilla"]["kernels"])
        for shape in part["figures"]["shapes"].values()
        for name, row in shape["rows"].items()
        if name.startswith("clipx_") and name.endswith(ends)
    ]


def update(variant: str) -> Figures:
    """Returns a goal's figures: an update's time under a variant, of vanilla's, by number of updates."""
    return lambda part: [row[variant]["of_vanilla"] for row in part["figures"]["updates"].values()]


# What is to be reached: in which part, at most, and the figures, of which the largest counts.
GOALS: dict[str, tuple[str, float, Figures]] = {
    "compiled loss, kernels, of a copy's time": ("losses", 2, losses(", compiled", floor=True)),
    "compiled loss, kernels, of vanilla's": ("losses", 0.2, losses(", compiled")),
    "the same, own statistics": ("losses", 0.4, losses(", compiled, own statistics")),
    "calls that wait more than once": ("tests on 1", 0, lambda part: [part["tests"][HOST_WAITS] != PASSED]),
    "update, ACPO's extra pass, of vanilla's": ("update", 1.2, update("acpo, mini_batch")),
    "the same, 4 times larger micro-batches": ("update", 1.1, update(LARGER)),
    "tests/gpu on one GPU, failures": ("tests on 1", 0, tests_of),
    "tests/gpu on two GPUs, failures": ("tests on 2", 0, tests_of),
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
    rehearse: Annotated[bool, typer.Option(help="Tiny shapes, on a CPU if there is no GPU; needs --out.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the file; docs/results/gpu by default.")] = None,
    limit: Annotated[float | None, typer.Option(help="Seconds of each part, instead of its own limit.")] = None,
    only: Annotated[str | None, typer.Option(help="Run this part alone, such as `tests on 1`.")] = None,
) -> None:
    """Run every part on this machine's GPU, write docs/results/gpu/CARD.json, and print tables of parts and goals."""
    if not torch.cuda.is_available() and not rehearse:
        sys.exit("There is no CUDA device here. --rehearse runs the same with tiny shapes on a CPU.")
    if rehearse and out is None:
        sys.exit("--rehearse: name a folder other than docs/results/gpu for its file: --out FOLDER")
    asked = ("--query-gpu=name,uuid,driver_version", "--format=csv,noheader")
    listed = output_of("nvidia-smi", *asked) if torch.cuda.is_available() else "CPU, , "
    record = dict(zip(("device", "uuid", "driver"), listed.splitlines()[0].split(", "), strict=True))
    record |= {"kind": "cuda" if record["uuid"] else "cpu", "cuda": torch.version.cuda, "rehearsal": rehearse}
    path = (out or RESULTS) / f"{re.sub('[^A-Za-z0-9]+', '-', record['device'])}{'-rehearsal' * rehearse}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier = read_json(path) if path.exists() else {"uuid": None, "parts": {}}
    record["parts"] = earlier["parts"] if earlier["uuid"] == record["uuid"] else {}
    changes = output_of("git", "status", "--porcelain", "--", ".", ":!docs/results/gpu")
    made = {"commit": output_of("git", "rev-parse", "HEAD"), "changed": bool(changes), "date": f"{date.today()}"}
    made["versions"] = {package: installed_version(package) for package in PACKAGES}
    with tempfile.TemporaryDirectory(prefix="clipx-gpu-") as name:
        for part, seconds, commands in parts_of(Path(name), rehearse=rehearse, rollout=rollout, train=train):
            if only not in (None, part):
                continue
            result = run(Path(name) / part, seconds if limit is None else limit, commands)
            record["parts"][part] = {**result, **made}
            write_json(path, record)
            print(f"{part}: {result['outcome']}", *result.get("end", ()), sep="\n  ", flush=True)
    if only and only not in record["parts"]:
        sys.exit(f"--only {only!r}: no such part ran; a start without --only prints a row for each part")
    rows = []
    for name, part in record["parts"].items():
        failed = f": {len(failures(part))} of {len(part['tests'])} tests" if failures(part) else ""
        rows.append([name, part["outcome"] + failed, f"{part['seconds']:g}", part["commit"][:8]])
    print(f"\n{record['device']}, driver {record['driver']}, CUDA {record['cuda']}: {path}\n")
    print(table(["part", "outcome", "seconds", "commit"], rows), goal_table([record]), sep="\n\n")
    if any(part["outcome"] not in (PASSED, SKIPPED) for part in record["parts"].values()):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
