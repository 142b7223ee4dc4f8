"""verl's console output: the steps in it, among other lines and behind progress bars."""

import ast
import contextlib
import itertools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_clipx.analysis.runs.run_log import VERL_ONLY, Entry, Log, last_run
from verl_clipx.common.files import as_utf8, read_bytes
from verl_clipx.common.terminal import harmless
from verl_clipx.run.keys import MODEL_ROOT

# A step as verl's console logger prints it, at the beginning of a line or glued to a progress bar; not in a metric's
# name, such as training/global_step.
STEP = re.compile(r"(?<![A-Za-z_/.-])step:(\d{1,15}) - ")
# How the configuration begins that verl prints as a Python dictionary.
CONFIGURATION = f"{{'{MODEL_ROOT}': "
# What Ray puts before a process's line.
PROCESS = re.compile(r"\([^()]*\bpid=\d+[^()]*\) ?")
METRIC = re.compile(
    r"(?P<key>(?:(?! - |:[-+.\d]).)+?):(?P<of_numpy>np\.\w+\()?"
    r"(?P<value>[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf)|True|False)(?(of_numpy)\))"
)
# Metrics in a line without a step.
LOST = re.compile(r"\w/\S{1,200}:[-+.\d]\S{0,30} - \w+/\S{1,200}:[-+.\d]")
# Where a metric ends although something else is glued to it.
ENDS = re.compile(METRIC.pattern + r"(?![-+.\d]|[eE](?![A-Za-z]))")
WORDS = {"True": 1.0, "False": 0.0}


def read_console(path: Path) -> Log:
    """Returns the steps of the last run in verl's console output: lines `step:1 - actor/entropy:0.5 - …`.

    Returns:
        Its header has, under `configuration`, what verl printed of it before the steps.

    Raises:
        ValueError: there is no such line, none can be read to its end, or the steps of two processes alternate.
    """
    # A byte that is no UTF-8 is in a progress bar that was cut.
    rows = [harmless(row) for row in as_utf8(read_bytes(path)).decode(errors="replace").splitlines()]
    logged = []
    damaged = []
    cut = 0
    for line in _lines_of(rows):
        if not STEP.search(line) and LOST.search(line):
            damaged.append(f"{path}: metrics without their step, and ignored: {line!r:.80}.")
            cut += 1
        for step, after in itertools.pairwise([*STEP.finditer(line), None]):
            metrics, unread = _metrics_in(line[step.end() : after and after.start()])
            process = [one[0].strip() for one in PROCESS.finditer(line, 0, step.start())][-1:]
            logged.append(Entry(int(step[1]), metrics, *process))
            damaged += [
                f"{path}, step {step[1]}: damaged, and ignored: {' - '.join(filter(None, unread))!r:.80}."
            ] * any(unread)
            cut += bool(unread[-1])
    if not logged:
        raise ValueError(
            f"{path}: no line `step:1 - …`, which verl prints if trainer.logger contains `console`. {VERL_ONLY}"
        )
    if cut >= len(logged):
        raise ValueError(
            f"{damaged[0]} The same is true of every step, as if a terminal or an editor had broken the lines. Save "
            "the output itself with `2>&1 | tee train.log`, or log with trainer.logger=[console,file]."
        )
    if damaged:
        more = f" So are {len(damaged) - 1} more parts." * (len(damaged) > 1)
        warnings.warn(damaged[0] + more, stacklevel=2)
    last = max((number for number, row in enumerate(rows) if STEP.search(row)), default=None)
    printed = _printed_in(path, rows[:last])
    return last_run(path, logged)._replace(header={"configuration": printed} if printed else {})


def _printed_in(path: Path, rows: list[str]) -> dict[str, Any]:
    """Returns the last configuration in these rows; its process's other rows do not begin with a blank."""
    config: dict[str, Any] = {}
    block = []
    process = ""
    for row in rows:
        begins = PROCESS.match(row)
        text, by = (row[begins.end() :], begins[0]) if begins else (row, "")
        if text.startswith(CONFIGURATION):
            config = {}
            block = [text]
            process = by
        elif block and by == process and text.startswith(" "):
            block.append(text)
        if block and text.rstrip().endswith("}"):
            with contextlib.suppress(ValueError, SyntaxError):
                config = ast.literal_eval("\n".join(block))
                block = []
    if block:
        warnings.warn(f"{path}: the configuration in it is damaged and is ignored.", stacklevel=3)
    return config


def _metrics_in(text: str) -> tuple[dict[str, float], list[str]]:
    """Returns the metrics of a step, and of each part of its text what can't be read."""
    *parts, last = PROCESS.split(text)[0].split(" - ")
    found = [*((part, METRIC.fullmatch(part.strip())) for part in parts), (last, ENDS.match(last.strip()))]
    metrics = {one["key"]: float(WORDS.get(one["value"], one["value"])) for _, one in found if one}
    return metrics, ["" if one else part for part, one in found]


def _lines_of(rows: list[str]) -> Iterator[str]:
    """Yields the lines that were printed. Of a step's line Ray may have read a part: it prints the rest as a row."""
    line = ""
    for row in rows:
        process = PROCESS.match(row)
        *_, step = (None, *STEP.finditer(line))
        if step and process and process[0] in line[: step.start()]:
            joined = line + row[process.end() :]
            *parts, last = (part.strip() for part in joined[step.end() :].split(" - "))
            if all(map(METRIC.fullmatch, parts)) and (METRIC.fullmatch(last) or not ENDS.match(last)):
                line = joined
                continue
        yield line
        line = row
    yield line
