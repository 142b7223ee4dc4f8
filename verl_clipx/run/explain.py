"""`clipx explain -- COMMAND`: runs a command until verl has its configuration, and says what would be trained.

The command itself runs, with CLIPX_EXPLAIN set: the plugin's hook in verl's driver (`explaining.py`) answers and ends
the process before verl starts Ray. Some programs are replaced by stand-ins on PATH (`stand_in.py`), a Python without
the plugin ends (`without_plugin.py`), and bash ends before what follows the first run (`explained.sh`). This is no
sandbox: whatever else a script does, it does.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from verl_clipx.common.secrets import redact
from verl_clipx.run import session_guard, slurm, stand_in

# The last line of an answer that nothing stops (`description.py`, whose import takes seconds).
NOTHING_STOPS = "Nothing in the configuration stops it."

# 1: the driver prints its answer and ends; a path: it appends the answer to this file, one JSON object a line.
EXPLAIN = "CLIPX_EXPLAIN"

# Programs that would act elsewhere, or prepare a run.
STAND_INS = ("ray", "sbatch", "srun", "salloc", "ssh", "kubectl", "pkill", "killall")
STAND_INS += ("docker", "podman", "apptainer", "singularity")
STAND_INS += ("rm", "mv", "pip", "pip3", "wget", "curl", "huggingface-cli", "hf")
# Scripts ask these about their job and its nodes; getent is the machine's own, but for nodes that are made up.
STAND_INS += ("scontrol", "squeue", "sinfo", "sacct", "scancel", "getent")
# Scripts ask these for the accelerators that explaining does not need, and for environments that this one replaces.
NOT_NEEDED = ("nvidia-smi", "npu-smi", "module", "ml", "conda", "mamba", "micromamba")
# A pause of a script, in place of its own length. `WaitingLoop` must still see it.
SECONDS_OF_A_PAUSE = 0.5
SHELLS = ("bash", "sh")
SECONDS_BETWEEN_LOOKS = 0.1
# As often as this, all processes are looked at; verl takes longer to its start of Ray.
SECONDS_BETWEEN_LONG_LOOKS = 0.7
# How long what a command leaves in the background may take to its configuration.
SECONDS_IN_THE_BACKGROUND = 120
# A script waits in a loop if it sleeps this often at one place, for this long in all, while nothing else of it works;
# or if it calls one stand-in this often with the same words, without an answer in between.
SLEEPS_OF_A_LOOP = 3
SECONDS_OF_A_LOOP = 15.0
CALLS_OF_A_LOOP = 30
# What such a loop itself consists of: shells, and programs that look at the state of a cluster.
OF_LOOPS = ("bash", "sh", "dash", "sleep", "timeout", "tee", "tail", "cat", "grep", "wc", "awk", "cut", "date")
OF_LOOPS += ("nc", "ping", "sinfo", "squeue", "scontrol")
# How long bash may take after the first answer.
SECONDS_AFTER_AN_ANSWER = 10
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# An override of Hydra's that is no variable of the environment.
OVERRIDE = re.compile(r"([+~]+[\w./@-]+|\w[\w/@-]*\.[\w./@-]+)=")
# A line of bash's `set -x`, and what shells say of a program that is missing.
TRACED = re.compile(r"\++ ")
NOT_FOUND = re.compile(r": (?:command )?not found$")
# What a script counts nodes or accelerators with, and what comes of calculating with a count of 0.
COUNTS = re.compile(r"\b(grep -\w*c|wc -\w*l|expr )|division by 0|integer (?:division or )?modulo by zero")
NOTHING_COUNTED = (
    " 0 was counted here, where there are no nodes or accelerators, and the script does not go on with it. Set the "
    "number that it counts, for example by a variable that it reads, to explain the rest."
)
OF_PYTHON = re.compile(r"python[\d.]*")
OF_UV = re.compile(r"\buv: (?:command )?not found$|^error: .*\buv\.lock\b")
UV = (
    "The script starts Python by uv. VERL_USE_UV=0 before the command makes verl's examples use this Python; "
    "otherwise explain it where uv.lock is, with verl-clipx in uv's environment: `uv pip install` puts it there and "
    "`uv run` keeps it, while `uv sync` and `uv run --exact` remove it."
)
WITHOUT_THE_VARIABLE = (
    f"it got no {EXPLAIN}, by which it would answer, and was ended before it could train. env -i, or a program that "
    "gives another an environment of its own, leaves the variable out: explain what they start"
)
OF_A_JOB = (
    "nothing that `ray job submit` gives the job names verl-clipx: neither py_modules, pip, working_dir nor PYTHONPATH "
    "in its runtime_env. Unless the cluster's own environment has it, the job's driver does not see the plugin. Add "
    '--runtime-env-json \'{"py_modules": ["/shared/wheels/verl_clipx-0.1.0-py3-none-any.whl"]}\''
)
IN_A_CONTAINER = (
    "What a container starts is not run here, since its paths and packages are others. Explain the command that it "
    "starts, where its files are, or put `clipx explain --` in front of it inside the container, with the plugin there"
)
WAITS = (
    "the script waits here in a loop, and nothing that it started is at work. What it waits for does not come: "
    "stand-ins and missing programs report no node. Explain the command that starts verl, or let the script leave the "
    f"loop out where {EXPLAIN} is set"
)
PASS_ON = (
    'A script passes its arguments on by "$@" at the end of the command that starts verl; what it reads by a number, '
    "such as $1, comes before them."
)
CUT = "The command that starts verl ended before: a comment, an empty line or a blank after a backslash ends it."
OF_WINDOWS = "The script's lines end as on Windows, so verl gets words that end with \\r: sed -i 's/\\r$//' SCRIPT."
ONLY_THE_FIRST = "Only the first run is explained. If the command starts several, `clipx explain --all -- …` goes on."
LINES_OF_A_CRASH = 15
BYTES_OF_OUTPUT = 100_000
LONGEST = 100
LONGEST_OF_A_CRASH = 300


@dataclass(frozen=True)
class Explanation:
    """The outcome of a command that was explained.

    Args:
        answers: of every run that it would start, the fields of `description.Description` and `text`, its lines.
        stood_in: the command lines that stand-ins replaced.
        stops: why the command itself would not get to verl's configuration, or not as it is written, in sentences.
        ran_here: those of `stood_in` that started their payload here.
        remarks: what else is to be known of how the command starts the run, in sentences.
        may_go_on: whether it is a shell's, was ended at its first answer, and may have started more runs.
    """

    answers: list[dict[str, Any]]
    stood_in: list[str]
    stops: list[str]
    may_go_on: bool = False
    ran_here: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def starts(self) -> bool:
        """Returns whether there is a run and nothing stops it."""
        return bool(self.answers) and not self.stops and not any(answer["stops"] for answer in self.answers)

    @property
    def content(self) -> dict[str, Any]:
        """The answer, for a program, without credentials."""
        runs = [{key: value for key, value in answer.items() if key != "text"} for answer in self.answers]
        return redact({"runs": runs, "stood_in": self.stood_in, "stops": self.stops, "remarks": [*self.remarks]})

    @property
    def lines(self) -> list[str]:
        """The answer, for a reader, without credentials."""
        nothing = NOTHING_STOPS if self.stops else None
        answers = [line for answer in self.answers for line in answer["text"] if line != nothing]
        replaced = []
        for command in self.stood_in:
            what = "run here" if command in self.ran_here else "not run"
            replaced.append(f"{what}: {shortened(command)}")
        return redact([*replaced, *self.stops, *self.remarks, *answers, *[ONLY_THE_FIRST] * self.may_go_on])


def shortened(text: str, longest: int = LONGEST) -> str:
    """A line without credentials, cut behind a word; one that is cut before would not be recognised."""
    return textwrap.shorten(redact(text), longest, placeholder=" …")


def explain(words: Sequence[str], *, every: bool = False) -> Explanation:
    """Runs a command until its first answer.

    Args:
        words: the command, as for a shell.
        every: whether the command goes on after the first answer, to explain every run that it would start.

    Raises:
        ValueError: the words are no command that can be started.
        SystemExit: one of `SIGNALS` came. What the command started has ended.
    """
    if "=" in words[0] or words[0].startswith("+"):
        first = redact(words[0])
        raise ValueError(f"{first}: write the whole command: clipx explain -- python -m verl.trainer.main_ppo …")
    with ending_on_signals(), tempfile.TemporaryDirectory(prefix="clipx-explain-") as name:
        folder = Path(name)
        answers, record, output, notes, last_command = (
            folder / part for part in ("answers", "stand_ins", "output", "notes", "last")
        )
        started = folder / "started"
        jobs = folder / "jobs"
        for file in (answers, record, notes, last_command, started, jobs, *([folder / "all"] if every else ())):
            file.touch()
        environment = {**os.environ, **put_stand_ins(folder / "programs", record), EXPLAIN: str(answers)}
        environment |= variables_of_job(words)
        loop = WaitingLoop(answers, record, last_command)
        code = run_session(words, environment, output, lambda: not every and is_answered(answers), notes, loop)
        given = [json.loads(line) for line in answers.read_text().splitlines()]
        stood_in, noted = (list(dict.fromkeys(end_of(file).splitlines())) for file in (record, notes))
        printed = end_of(output)
        last = end_of(last_command).strip()
        ran_here = end_of(started).splitlines()
        by_jobs = end_of(jobs)
    given = given if every else given[:1]
    cut = [line for line in noted if NOT_FOUND.search(line)]
    stops = []
    if not given:
        stops.append(without_an_answer(code, printed, noted, last))
    elif cut:
        stops.append(f"{'; '.join(cut)}. {CUT}")
    if given:
        stops += [f"{line}." for line in noted if WAITS in line]
    stops += misled_words(words, given, bool(cut))
    remarks = []
    if by_jobs and any(answer.get("of_the_plugin") for answer in given):
        remarks.append(f"{OF_A_JOB}.")
    if not given and any(map(starts_container, stood_in)):
        stops.append(f"{IN_A_CONTAINER}.")
    by_shell = any(Path(word).name in SHELLS or word.endswith(".sh") for word in words)
    return Explanation(
        answers=given,
        stood_in=stood_in,
        stops=stops,
        may_go_on=bool(given) and by_shell and not every,
        ran_here=tuple(ran_here),
        remarks=tuple(remarks),
    )


def variables_of_job(words: Sequence[str]) -> dict[str, str]:
    """Returns the variables of a Slurm job that is made up, where a script has #SBATCH lines and there is no job."""
    if "SLURM_JOB_ID" in os.environ or Path(words[0]).name == "sbatch":
        return {}
    for word in words:
        if slurm.is_script(Path(word)):
            script = Path(word).read_text(errors="replace")
            return slurm.variables_of(script) if slurm.directives_of(script) else {}
    return {}


def starts_container(command: str) -> bool:
    """Returns whether a command line starts something in a container whose paths are not these."""
    words = tuple(shlex.split(command))
    return any(words[: len(container)] == container for container in stand_in.CONTAINERS)


def end_of(file: Path) -> str:
    """The whole lines in the last `BYTES_OF_OUTPUT` of a file, whatever bytes it has."""
    content = file.read_bytes()
    text = content[-BYTES_OF_OUTPUT:].decode(errors="replace")
    return text if len(content) <= BYTES_OF_OUTPUT else text.partition("\n")[2]


def is_answered(answers: Path) -> bool:
    """Returns whether there is an answer, and bash has gone on to its next command, or had the time to."""
    if not answers.read_text().endswith("\n"):
        return False

    def is_waited_for(process: psutil.Process) -> bool:
        return is_of(answers, process) and Path(process.exe()).name.startswith("bash")

    return not living(is_waited_for) or time.time() - answers.stat().st_mtime > SECONDS_AFTER_AN_ANSWER


def misled_words(words: Sequence[str], answers: list[dict[str, Any]], is_cut: bool) -> list[str]:
    """Messages on overrides that became a part of others, or that reached no run, if nothing else says why."""
    reached = [answer.get("arguments") for answer in answers]
    passed = [argument for of in reached for argument in of or ()]
    if any(argument.endswith("\r") for argument in passed):
        return [OF_WINDOWS]
    lost = []
    messages = []
    for word in filter(OVERRIDE.match, words):
        within = [argument for argument in passed if word in argument.partition("=")[2]]
        if within:
            reads = "the script reads it as its own parameter"
            messages.append(f"{word}: {reads}, and verl gets {within[0]}. Put the script's own parameters first.")
        elif answers and None not in reached and word not in passed:
            lost.append(word)
    if lost:
        # Words of blanks are what a blank after a backslash leaves.
        why = "" if is_cut or not all(word.strip() for word in passed) else f" {PASS_ON}"
        messages.append(f"{' '.join(lost)}: did not reach verl, so the answer is about a run without it.{why}")
    return messages


def put_stand_ins(folder: Path, record: Path) -> dict[str, str]:
    """Creates a folder of `STAND_INS`, which append to `record`; returns the environment variables that use them."""
    folder.mkdir()
    python = shlex.join([sys.executable, "-IS", stand_in.__file__, str(record)])
    for program in STAND_INS:
        (folder / program).write_text(f'#!/bin/sh\nexec {python} {program} "$@"\n')
        (folder / program).chmod(0o755)
    # A script may put an environment's programs before PATH; bash calls functions before any program.
    functions = "".join(f'{program}() {{ {shlex.quote(str(folder / program))} "$@"; }}\n' for program in STAND_INS)
    functions += "".join(f"{program}() {{ :; }}\n" for program in NOT_NEEDED if shutil.which(program) is None)
    functions += f"sleep() {{ command sleep {SECONDS_OF_A_PAUSE}; }}\n"
    own = os.environ.get("BASH_ENV")
    first = folder.with_name("first.sh")
    of_bash = Path(__file__).with_name("explained.sh").read_text()
    first.write_text((f". {shlex.quote(own)}\n" if own else "") + functions + of_bash)
    (modules := folder.with_name("modules")).mkdir()
    shutil.copy(Path(__file__).with_name("without_plugin.py"), modules / "sitecustomize.py")
    # An empty part would be the current folder.
    modules_of_all = filter(None, [str(modules), os.environ.get("PYTHONPATH")])
    return {
        "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": os.pathsep.join(modules_of_all),
        "BASH_ENV": str(first),
    }


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """In the block, a signal that would end this process raises SystemExit, so that what it started is ended first."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    # nohup lets SIGHUP be ignored.
    ending = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in ending}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class WaitingLoop:
    """Notices that a script waits in a loop for what never comes while it is explained.

    Args:
        answers: the file of the answers, each of which begins the count of calls anew.
        record: the file to which stand-ins append.
        last_command: the file with the place and the text of the command that bash began last.
    """

    def __init__(self, answers: Path, record: Path, last_command: Path):
        self.answers = answers
        self.record = record
        self.last_command = last_command
        self.quiet_since = time.monotonic()
        self.sleeps: dict[str, set[int]] = {}
        self.known: set[int] = set()
        self.answered = 0
        self.calls_before = 0

    def find(self, members: Sequence[psutil.Process]) -> str:
        """Return where a script waits, as a place with a command; empty if it doesn't.

        Args:
            members: the living processes of the command's session.
        """
        sleeping = []
        working = set()
        for member in members:
            with contextlib.suppress(psutil.Error):
                words = member.cmdline()
                if member.name() == "sleep":
                    sleeping.append((member.pid, shlex.join(words)))
                elif member.name() not in OF_LOOPS and stand_in.__file__ not in words:
                    working.add(member.pid)
        # A program that is seen twice is at work, and not one that the loop itself calls.
        if working & self.known:
            self.quiet_since = time.monotonic()
            self.sleeps.clear()
        self.known = working
        place = end_of(self.last_command).strip()
        for pid, command in sleeping:
            self.sleeps.setdefault(place or command, set()).add(pid)
        if time.monotonic() - self.quiet_since >= SECONDS_OF_A_LOOP:
            for where, pids in self.sleeps.items():
                if len(pids) >= SLEEPS_OF_A_LOOP:
                    return where
        return self.repeated_call()

    def repeated_call(self) -> str:
        """Return a command line with which a stand-in was called again and again since the last answer, or ''."""
        calls = end_of(self.record).splitlines()
        answered = self.answers.stat().st_size
        if answered != self.answered:
            self.answered = answered
            self.calls_before = len(calls)
        for line, number in Counter(calls[self.calls_before :]).items():
            if number >= CALLS_OF_A_LOOP:
                return line
        return ""


class Session:
    """A command that is explained, with all that it starts.

    Args:
        process: the command, which leads a session of its own.
        answers: the file whose path `EXPLAIN` has in what the command starts, in whatever session.
        notes: the file to which what is wrong with the command is appended.
        loop: notices that the command waits in a loop.
    """

    def __init__(self, process: subprocess.Popen, answers: Path, notes: Path, loop: WaitingLoop):
        self.process = process
        self.answers = answers
        self.notes = notes
        self.loop = loop
        self.looked = time.monotonic()
        # Those that would train, at the last look.
        self.untold: list[psutil.Process] = []

    def has(self, other: psutil.Process) -> bool:
        """Return whether a process is in the command's session."""
        return os.getsid(other.pid) == self.process.pid

    def has_started(self, other: psutil.Process) -> bool:
        """Return whether the command started a process, in whatever session."""
        return self.has(other) or is_of(self.answers, other)

    def would_train(self, other: psutil.Process) -> bool:
        """Return whether a process is a Python without `EXPLAIN`."""
        return self.has(other) and bool(OF_PYTHON.match(other.name())) and EXPLAIN not in other.environ()

    def run(self, until: Callable[[], bool]) -> None:
        """Waits for the command, then for what it left in the background; until `until` says so, or it waits in a loop.

        What is left in the background has `SECONDS_IN_THE_BACKGROUND`.
        """
        waits = False
        while not waits and self.process.poll() is None and not until():
            waits = self.wait()
        last = time.monotonic() + SECONDS_IN_THE_BACKGROUND
        while not waits and not until() and time.monotonic() < last and living(self.has_started):
            waits = self.wait()

    def wait(self) -> bool:
        """Wait a moment, and now and then look at what runs; return whether the command waits in a loop."""
        time.sleep(SECONDS_BETWEEN_LOOKS)
        if time.monotonic() - self.looked <= SECONDS_BETWEEN_LONG_LOOKS:
            return False
        self.looked = time.monotonic()
        place = self.loop.find(living(self.has))
        if place:
            self.note(f"{place}: {WAITS}")
            return True
        self.kill_what_would_train()
        return False

    def kill_what_would_train(self) -> None:
        """Kills each Python without `EXPLAIN` that is seen a second time, and notes its command line."""
        # One that becomes another program has no environment for a moment.
        before = self.untold
        self.untold = living(self.would_train)
        for other in {*before} & {*self.untold}:
            with contextlib.suppress(psutil.Error):
                self.note(f"{shlex.join(other.cmdline())}: {WITHOUT_THE_VARIABLE}")
                other.kill()

    def note(self, line: str) -> None:
        with self.notes.open("a", errors="replace") as file:
            file.write(f"{line}\n")

    def kill(self) -> None:
        """Kills all that the command started, and what is started meanwhile."""
        while members := living(self.has_started):
            for member in members:
                with contextlib.suppress(psutil.Error):
                    member.kill()
        self.process.wait()


def run_session(
    words: Sequence[str],
    environment: dict[str, str],
    output: Path,
    until: Callable[[], bool],
    notes: Path,
    loop: WaitingLoop,
) -> int:
    """Runs a command in a session of its own until `until` says so, and kills all of it; returns its exit code.

    A command that waits in a loop is killed too, and `notes` says where. What the command leaves in the background, in
    a session of its own too, has `SECONDS_IN_THE_BACKGROUND`. A Python without `EXPLAIN`, which would train, is killed
    as soon as it is seen: `notes` says so.

    Raises:
        ValueError: there is no such program.
    """
    with output.open("wb") as file:
        try:
            process = subprocess.Popen(
                list(words),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ValueError(f"{redact(words[0])}: {error.strerror}.") from None
    answers = Path(environment[EXPLAIN])
    guard = guard_session(process.pid, answers)
    session = Session(process, answers, notes, loop)
    try:
        session.run(until)
    finally:
        session.kill()
        # Nothing is left to end.
        with contextlib.suppress(OSError):
            guard.communicate(b".")
    return process.returncode


def guard_session(session: int, answers: Path) -> subprocess.Popen:
    """Starts the process that cleans up should this one be killed.

    It ends the session and what has the file `answers` for its answers, and removes the folder that this file is in.
    """
    # In a session of its own, and without the variable, so that it is not ended with the others.
    environment = {name: value for name, value in os.environ.items() if name != EXPLAIN}
    return subprocess.Popen(
        [sys.executable, session_guard.__file__, str(session), EXPLAIN, str(answers), str(answers.parent)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def living(is_meant: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """The processes of which something holds, and that have not ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if is_meant(process) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def is_of(answers: Path, process: psutil.Process) -> bool:
    """Returns whether a process, in whatever session, has this file for its answers."""
    return process.environ().get(EXPLAIN) == str(answers)


def without_an_answer(code: int, output: str, noted: Sequence[str], last: str) -> str:
    """Says why a command gave no answer, with what Python and the shell lack, or the end of what it printed.

    Args:
        last: the place and the text of the last command that bash began; empty if there was none.
    """
    lines = [line for line in redact(output).strip().splitlines() if not TRACED.match(line)][-LINES_OF_A_CRASH:]
    missing = [*noted, *filter(NOT_FOUND.search, lines)]
    how = f"ended with exit code {code} before" if code else "ended before"
    reason = "; ".join(dict.fromkeys(missing)) or f"it {how} verl's trainer had its configuration"
    by_uv = next(filter(OF_UV.search, missing or lines), None)
    if by_uv:
        return f"no configuration seen: {shortened(by_uv, LONGEST_OF_A_CRASH)}. {UV}"
    if missing:
        return f"no configuration seen: {reason}."
    end = "\n".join(shortened(line, LONGEST_OF_A_CRASH) for line in lines)
    where = f" The last command was {shortened(last)}." if last else ""
    if COUNTS.search(f"{last}\n{end}"):
        where += NOTHING_COUNTED
    return f"no configuration seen: {reason}.{where} The end of its output:\n{end or '(none)'}"
