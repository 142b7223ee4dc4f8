"""verl's console output: the steps in it, among other lines and behind progress bars."""

import ast
import contextlib
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from verl_clipx.analysis.runs.run_log import VERL_ONLY, Log, LogEntry, last_run
from verl_clipx.common.files import as_utf8, read_bytes
from verl_clipx.common.terminal import harmless
from verl_clipx.run.keys import MODEL_ROOT

# A step as verl's console logger prints it, at the beginning of a line or glued to a progress bar; not in a metric's
# name, such as training/global_step.
STEP = re.compile(r"(?<![A-Za-z_/.-])step:(\d{1,15}) - ")
# The beginning of the configuration, which verl prints as a Python dictionary.
CONFIGURATION = f"{{'{MODEL_ROOT}': "
# What Ray puts before a process's line.
PROCESS = re.compile(r"\([^()]*\bpid=\d+[^()]*\) ?")
# A key, a colon, and a number, True or False. The number may be printed as np.float64(…).
METRIC = re.compile(
    r"(?P<key>(?:(?! - |:[-+.\d]).)+?):(?P<of_numpy>np\.\w+\()?"
    r"(?P<value>[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf)|True|False)(?(of_numpy)\))"
)
METRICS_WITHOUT_STEP = re.compile(r"\w/\S{1,200}:[-+.\d]\S{0,30} - \w+/\S{1,200}:[-+.\d]")
# A metric at the beginning of a text, followed by something that can't be a part of its number.
METRIC_WITH_REST = re.compile(METRIC.pattern + r"(?![-+.\d]|[eE](?![A-Za-z]))")
NUMBERS_OF_WORDS = {"True": 1.0, "False": 0.0}


def read_console(path: Path) -> Log:
    """Read the last run from verl's console output, in which a step is printed as `step:1 - actor/entropy:0.5 - …`.

    Damaged parts are left out, with a warning.

    Returns:
        The run's log. The `configuration` in its header is the last one that verl printed before the last step. Without
        one, the header is empty.

    Raises:
        ValueError: the file has no step, every step is cut, or the steps of two processes alternate.
    """
    # A byte that is not UTF-8 belongs to a progress bar that was cut.
    rows = [harmless(row) for row in as_utf8(read_bytes(path)).decode(errors="replace").splitlines()]
    entries, damages, cut_entries = _read_entries(path, _lines_of(rows))
    if not entries:
        raise ValueError(
            f"{path}: no line `step:1 - …`, which verl prints if trainer.logger contains `console`. {VERL_ONLY}"
        )
    if cut_entries.issuperset(range(len(entries))):
        raise ValueError(
            f"{damages[0]} Every step of this log is cut, as if a terminal or an editor had broken the lines. Save "
            "the output itself with `2>&1 | tee train.log`, or log with trainer.logger=[console,file]."
        )
    if damages:
        warning = damages[0]
        if len(damages) > 1:
            warning += f" Damaged parts in all: {len(damages)}."
        warnings.warn(warning, stacklevel=2)
    row_of_last_step = max(number for number, row in enumerate(rows) if STEP.search(row))
    configuration = _read_configuration(path, rows[:row_of_last_step])
    log = last_run(path, entries)
    if configuration:
        return log._replace(header={"configuration": configuration})
    return log._replace(header={})


def _read_entries(path: Path, lines: Iterable[str]) -> tuple[list[LogEntry], list[str], set[int]]:
    """Read the steps in lines of a console.

    Returns:
        The entries; a sentence for each damaged part; the places, in the entries, of those that are cut.
    """
    entries: list[LogEntry] = []
    damages: list[str] = []
    cut_entries: set[int] = set()
    for line in lines:
        steps = list(STEP.finditer(line))
        if not steps and METRICS_WITHOUT_STEP.search(line):
            damages.append(f"{path}: metrics without their step, and ignored: {line!r:.80}.")
            # They are the rest of the step before them.
            cut_entries.add(len(entries) - 1)
        # A step's text ends where the next step of the line begins.
        ends = [*(step.start() for step in steps[1:]), len(line)]
        for step, end in zip(steps, ends, strict=False):
            metrics, unread = _metrics_in(line[step.end() : end])
            if any(unread):
                text = " - ".join(part for part in unread if part)
                damages.append(f"{path}, step {step[1]}: damaged, and ignored: {text!r:.80}.")
            if unread[-1]:
                cut_entries.add(len(entries))
            processes = [match[0].strip() for match in PROCESS.finditer(line, 0, step.start())]
            entries.append(LogEntry(step=int(step[1]), data=metrics, process=processes[-1] if processes else ""))
    return entries, damages, cut_entries


def _read_configuration(path: Path, rows: list[str]) -> dict[str, Any]:
    """Return the last configuration in these rows, empty if there is none.

    Of the rows of the process that prints it, only those of the configuration begin with a blank.
    """
    configuration: dict[str, Any] = {}
    block = []
    process = ""
    for row in rows:
        prefix = PROCESS.match(row)
        if prefix is None:
            text = row
            process_of_row = ""
        else:
            text = row[prefix.end() :]
            process_of_row = prefix[0]
        if text.startswith(CONFIGURATION):
            configuration = {}
            block = [text]
            process = process_of_row
        elif block and process_of_row == process and text.startswith(" "):
            block.append(text)
        if block and text.rstrip().endswith("}"):
            # A nested dictionary ends so too: the configuration goes on.
            with contextlib.suppress(ValueError, SyntaxError):
                configuration = ast.literal_eval("\n".join(block))
                block = []
    if block:
        warnings.warn(f"{path}: the configuration in it is damaged and is ignored.", stacklevel=3)
    return configuration


def _metrics_in(text: str) -> tuple[dict[str, float], list[str]]:
    """Return the metrics in the text of a step, and its parts: each empty if it could be read.

    Only the last part may have something glued to it, such as a progress bar.
    """
    *parts, last = PROCESS.split(text)[0].split(" - ")
    matches = [METRIC.fullmatch(part.strip()) for part in parts]
    matches.append(METRIC_WITH_REST.match(last.strip()))
    metrics = {}
    unread = []
    for part, match in zip([*parts, last], matches, strict=True):
        if match is None:
            unread.append(part)
            continue
        unread.append("")
        metrics[match["key"]] = float(NUMBERS_OF_WORDS.get(match["value"], match["value"]))
    return metrics, unread


def _lines_of(rows: list[str]) -> Iterator[str]:
    """Yield the lines that were printed. Ray may cut a step's line in two and print the rest as a row of its own."""
    line = ""
    for row in rows:
        process = PROCESS.match(row)
        steps = list(STEP.finditer(line))
        if steps and process and process[0] in line[: steps[-1].start()]:
            joined = line + row[process.end() :]
            *parts, last = (part.strip() for part in joined[steps[-1].end() :].split(" - "))
            last_is_complete = METRIC.fullmatch(last) or not METRIC_WITH_REST.match(last)
            if all(map(METRIC.fullmatch, parts)) and last_is_complete:
                line = joined
                continue
        yield line
        line = row
    yield line
