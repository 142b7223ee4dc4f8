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

# The programs that stand-ins replace.
STAND_INS = (
    # They act on other machines or on other processes.
    "ray",
    "sbatch",
    "srun",
    "salloc",
    "ssh",
    "kubectl",
    "pkill",
    "killall",
    # They start containers.
    "docker",
    "podman",
    "apptainer",
    "singularity",
    # They change files or environments, or download something.
    "rm",
    "mv",
    "pip",
    "pip3",
    "wget",
    "curl",
    "huggingface-cli",
    "hf",
    # Scripts ask them about the job and its nodes. The stand-in of getent calls the real one for nodes that exist.
    "scontrol",
    "squeue",
    "sinfo",
    "sacct",
    "scancel",
    "getent",
)
# Programs that do nothing if this machine lacks them. Scripts ask them for accelerators, which explaining does not
# need, or switch to another environment with them.
NOT_NEEDED = ("nvidia-smi", "npu-smi", "module", "ml", "conda", "mamba", "micromamba")
# How long `sleep` takes in a script, whatever it asks for: long enough for `WaitingLoop` to see it.
SECONDS_OF_A_PAUSE = 0.5
SHELLS = ("bash", "sh")
SECONDS_BETWEEN_LOOKS = 0.1
# The seconds between two looks at all processes; verl takes longer than that until it starts Ray.
SECONDS_BETWEEN_LONG_LOOKS = 0.7
# How many seconds a process that a command leaves in the background has to get to verl's configuration.
SECONDS_IN_THE_BACKGROUND = 120
# A script waits in a loop if it sleeps this often at one place, for this long in all, while nothing else of it works;
# or if it calls one stand-in this often with the same words, without an answer in between.
SLEEPS_OF_A_LOOP = 3
SECONDS_OF_A_LOOP = 15.0
CALLS_OF_A_LOOP = 30
# The programs of such a loop, which are no work: shells, and programs that look at the state of a cluster.
PROGRAMS_OF_A_LOOP = (
    "bash",
    "sh",
    "dash",
    "sleep",
    "timeout",
    "tee",
    "tail",
    "cat",
    "grep",
    "wc",
    "awk",
    "cut",
    "date",
    "nc",
    "ping",
    "sinfo",
    "squeue",
    "scontrol",
)
# How many seconds bash has to go on to its next command after the first answer.
SECONDS_AFTER_AN_ANSWER = 10
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# The beginning of an override of Hydra's. It begins with + or ~, or has a dot, unlike an assignment to a variable.
OVERRIDE = re.compile(r"([+~]+[\w./@-]+|\w[\w/@-]*\.[\w./@-]+)=")
# The beginning of a line of bash's `set -x`, and the end of what shells say of a program that is missing.
TRACED = re.compile(r"\++ ")
NOT_FOUND = re.compile(r": (?:command )?not found$")
# The commands with which scripts count nodes or accelerators, and the errors of calculating with a count of 0.
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
# This follows a command line and a colon, and a full stop follows it.
ENDED_WITHOUT_THE_VARIABLE = (
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
# This follows the place where the script waits and a colon, and a full stop follows it.
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
        answers: the answer of each run that the command would start: the fields of `description.Description`, and its
            lines as `text`.
        stood_in: the command lines that stand-ins replaced.
        stops: why the command itself would not get to verl's configuration, or not as it is written, in sentences.
        may_go_on: whether the command may start more runs: a shell runs it, and it was ended at its first answer.
        ran_here: those of `stood_in` whose payload, such as a job's script, was run on this machine.
        remarks: what else a reader should know of how the command starts the run, in sentences.
    """

    answers: list[dict[str, Any]]
    stood_in: list[str]
    stops: list[str]
    may_go_on: bool = False
    ran_here: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def starts(self) -> bool:
        """Return whether there is a run and nothing stops it."""
        return bool(self.answers) and not self.stops and not any(answer["stops"] for answer in self.answers)

    @property
    def content(self) -> dict[str, Any]:
        """Return the answer for a program, without credentials."""
        runs = [{key: value for key, value in answer.items() if key != "text"} for answer in self.answers]
        return redact({"runs": runs, "stood_in": self.stood_in, "stops": self.stops, "remarks": [*self.remarks]})

    @property
    def lines(self) -> list[str]:
        """Return the answer in lines for a reader, without credentials."""
        lines = []
        for command in self.stood_in:
            outcome = "run here" if command in self.ran_here else "not run"
            lines.append(f"{outcome}: {shortened(command)}")
        lines += [*self.stops, *self.remarks]
        for answer in self.answers:
            for line in answer["text"]:
                # The configuration may stop nothing where the command itself does.
                if line != NOTHING_STOPS or not self.stops:
                    lines.append(line)
        if self.may_go_on:
            lines.append(ONLY_THE_FIRST)
        return redact(lines)


def shortened(text: str, longest: int = LONGEST) -> str:
    """Return a line without credentials, cut behind a word.

    Args:
        text: the line.
        longest: the most characters of the result.
    """
    # Credentials first: half of one would not be recognised.
    return textwrap.shorten(redact(text), longest, placeholder=" …")


def explain(words: Sequence[str], *, every: bool = False) -> Explanation:
    """Run a command until its first answer, and return what its runs would be.

    Args:
        words: the command, one word of its command line an item.
        every: whether the command goes on after the first answer, so that every run that it would start is explained.

    Raises:
        ValueError: the words are no command that can be started.
        SystemExit: one of `SIGNALS` came. What the command started has ended.
    """
    if "=" in words[0] or words[0].startswith("+"):
        first = redact(words[0])
        raise ValueError(f"{first}: write the whole command: clipx explain -- python -m verl.trainer.main_ppo …")
    with ending_on_signals(), tempfile.TemporaryDirectory(prefix="clipx-explain-") as name:
        folder = Path(name)
        answers_file = folder / "answers"
        record = folder / "stand_ins"
        notes_file = folder / "notes"
        last_command = folder / "last"
        started = folder / "started"
        jobs = folder / "jobs"
        for file in (answers_file, record, notes_file, last_command, started, jobs):
            file.touch()
        if every:
            # Where this file is, bash goes on after an answer (`explained.sh`).
            (folder / "all").touch()
        environment = {
            **os.environ,
            **put_stand_ins(folder / "programs", record),
            EXPLAIN: str(answers_file),
            **variables_of_job(words),
        }
        output = folder / "output"
        code = run_session(
            words,
            environment=environment,
            output=output,
            is_done=lambda: not every and is_answered(answers_file),
            notes=notes_file,
            loop=WaitingLoop(answers=answers_file, record=record, last_command=last_command),
        )
        answers = [json.loads(line) for line in answers_file.read_text().splitlines()]
        stood_in = distinct_lines(record)
        notes = distinct_lines(notes_file)
        printed = read_end(output)
        last = read_end(last_command).strip()
        ran_here = read_end(started).splitlines()
        has_job_without_plugin = bool(read_end(jobs))
    if not every:
        answers = answers[:1]
    not_found = [note for note in notes if NOT_FOUND.search(note)]
    stops = []
    if not answers:
        stops.append(explain_missing_answer(code, printed, notes, last))
    elif not_found:
        stops.append(f"{'; '.join(not_found)}. {CUT}")
    if answers:
        stops += [f"{note}." for note in notes if WAITS in note]
    stops += find_misled_overrides(words, answers, is_cut=bool(not_found))
    remarks = []
    if has_job_without_plugin and any(answer.get("of_the_plugin") for answer in answers):
        remarks.append(f"{OF_A_JOB}.")
    if not answers and any(map(starts_container, stood_in)):
        stops.append(f"{IN_A_CONTAINER}.")
    by_shell = any(Path(word).name in SHELLS or word.endswith(".sh") for word in words)
    return Explanation(
        answers=answers,
        stood_in=stood_in,
        stops=stops,
        may_go_on=bool(answers) and by_shell and not every,
        ran_here=tuple(ran_here),
        remarks=tuple(remarks),
    )


def variables_of_job(words: Sequence[str]) -> dict[str, str]:
    """Return the variables of a made-up Slurm job, for a script with #SBATCH lines that no job runs.

    Args:
        words: the command, one word of its command line an item.

    Returns:
        The variables; empty inside a job, for a command that sbatch starts, and for a script without such lines.
    """
    if "SLURM_JOB_ID" in os.environ or Path(words[0]).name == "sbatch":
        return {}
    for word in words:
        if slurm.is_script(Path(word)):
            script = Path(word).read_text(errors="replace")
            return slurm.variables_of(script) if slurm.directives_of(script) else {}
    return {}


def starts_container(command: str) -> bool:
    """Return whether a command line starts something in a container, which has other paths and packages."""
    words = tuple(shlex.split(command))
    return any(words[: len(container)] == container for container in stand_in.CONTAINERS)


def read_end(file: Path) -> str:
    """Return the whole lines in the last `BYTES_OF_OUTPUT` of a file. Bytes that are no text are replaced."""
    content = file.read_bytes()
    text = content[-BYTES_OF_OUTPUT:].decode(errors="replace")
    return text if len(content) <= BYTES_OF_OUTPUT else text.partition("\n")[2]


def distinct_lines(file: Path) -> list[str]:
    """Return the different lines at the end of a file, in the order in which they first came."""
    return list(dict.fromkeys(read_end(file).splitlines()))


def is_answered(answers: Path) -> bool:
    """Return whether there is an answer, and bash has ended after it or had `SECONDS_AFTER_AN_ANSWER` to do so.

    bash ends at the next command of the script, and notes before that if a program is missing (`explained.sh`).

    Args:
        answers: the file of the answers.
    """
    if not answers.read_text().endswith("\n"):
        return False

    def is_bash(process: psutil.Process) -> bool:
        return belongs_to(answers, process) and Path(process.exe()).name.startswith("bash")

    return not find_processes(is_bash) or time.time() - answers.stat().st_mtime > SECONDS_AFTER_AN_ANSWER


def find_misled_overrides(words: Sequence[str], answers: list[dict[str, Any]], *, is_cut: bool) -> list[str]:
    """Return messages on overrides that became a part of others, or that reached no run.

    Args:
        words: the command, one word of its command line an item.
        answers: the answers of the runs that the command would start. If one has no arguments, as of a sweep, it is
            unknown which overrides are lost.
        is_cut: whether another message says already that the command ended before its last line.
    """
    arguments_by_run = [answer.get("arguments") for answer in answers]
    passed = [argument for arguments in arguments_by_run for argument in arguments or ()]
    if any(argument.endswith("\r") for argument in passed):
        return [OF_WINDOWS]
    lost = []
    messages = []
    for word in filter(OVERRIDE.match, words):
        arguments_with_word = [argument for argument in passed if word in argument.partition("=")[2]]
        if arguments_with_word:
            messages.append(
                f"{word}: the script reads it as its own parameter, and verl gets {arguments_with_word[0]}. Put the "
                "script's own parameters first."
            )
        elif answers and None not in arguments_by_run and word not in passed:
            lost.append(word)
    if lost:
        message = f"{' '.join(lost)}: did not reach verl, so the answer is about a run without it."
        # A blank after a backslash ends the command, and leaves a word that consists of blanks.
        ends_at_blank = not all(word.strip() for word in passed)
        if not is_cut and not ends_at_blank:
            message += f" {PASS_ON}"
        messages.append(message)
    return messages


def put_stand_ins(folder: Path, record: Path) -> dict[str, str]:
    """Create the stand-ins and what bash and Python read first; return the environment variables that use them.

    Args:
        folder: the folder for the stand-ins, which does not exist yet. The other files are created beside it.
        record: the file to which stand-ins append the command lines that they get.
    """
    folder.mkdir()
    python = shlex.join([sys.executable, "-IS", stand_in.__file__, str(record)])
    for program in STAND_INS:
        (folder / program).write_text(f'#!/bin/sh\nexec {python} {program} "$@"\n')
        (folder / program).chmod(0o755)
    startup: list[str] = []
    user_startup = os.environ.get("BASH_ENV")
    if user_startup:
        startup.append(f". {shlex.quote(user_startup)}")
    # A script may put the programs of an environment before the stand-ins on PATH. bash calls a function before any
    # program.
    for program in STAND_INS:
        startup.append(f'{program}() {{ {shlex.quote(str(folder / program))} "$@"; }}')
    for program in NOT_NEEDED:
        if shutil.which(program) is None:
            startup.append(f"{program}() {{ :; }}")
    startup.append(f"sleep() {{ command sleep {SECONDS_OF_A_PAUSE}; }}")
    startup.append(Path(__file__).with_name("explained.sh").read_text())
    startup_file = folder.with_name("first.sh")
    startup_file.write_text("\n".join(startup))
    modules = folder.with_name("modules")
    modules.mkdir()
    shutil.copy(Path(__file__).with_name("without_plugin.py"), modules / "sitecustomize.py")
    python_path = str(modules)
    user_python_path = os.environ.get("PYTHONPATH")
    # Without a path of the user's there is no separator: an empty part after it would be the current folder.
    if user_python_path:
        python_path += f"{os.pathsep}{user_python_path}"
    return {
        "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": python_path,
        "BASH_ENV": str(startup_file),
    }


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Let the signals of `SIGNALS` raise SystemExit in the block, so that what was started there is ended first."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    previous_handlers = {}
    for number in SIGNALS:
        # A signal that is ignored stays so, such as SIGHUP under nohup.
        if signal.getsignal(number) != signal.SIG_IGN:
            previous_handlers[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


class WaitingLoop:
    """Notices that a script waits in a loop for what never comes while it is explained.

    The place where a script waits is a text: the script's line with the command that bash began last. If bash has begun
    none, it is the command line of the program that waits, or that is called again and again.

    Args:
        answers: the file of the answers. Each new answer sets the count of calls back to 0.
        record: the file to which stand-ins append.
        last_command: the file with the place and the text of the command that bash began last.
    """

    def __init__(self, answers: Path, record: Path, last_command: Path):
        self.answers = answers
        self.record = record
        self.last_command = last_command
        # When a program was last seen at work, or this object was made.
        self.idle_since = time.monotonic()
        # The ids of the `sleep` processes seen since then, by the place where the script waits for them.
        self.sleeps_by_place: dict[str, set[int]] = {}
        # The ids of the programs that looked like work at the last look.
        self.working_before: set[int] = set()
        self.size_of_answers = 0
        self.calls_before_answer = 0

    def find_waiting_place(self, members: Sequence[psutil.Process]) -> str:
        """Return the place where the script waits in a loop; an empty text if it does not wait in one.

        Args:
            members: the living processes of the command's session.
        """
        command_by_pid: dict[int, str] = {}
        working_pids: set[int] = set()
        for member in members:
            with contextlib.suppress(psutil.Error):
                words = member.cmdline()
                name = member.name()
                is_stand_in = stand_in.__file__ in words
                if name == "sleep":
                    command_by_pid[member.pid] = shlex.join(words)
                elif not is_stand_in and name not in PROGRAMS_OF_A_LOOP:
                    working_pids.add(member.pid)
        # A program seen at two looks in a row does work. What the loop itself calls ends between two looks.
        if working_pids & self.working_before:
            self.idle_since = time.monotonic()
            self.sleeps_by_place.clear()
        self.working_before = working_pids
        last_place = read_end(self.last_command).strip()
        for pid, command in command_by_pid.items():
            place = last_place or command
            self.sleeps_by_place.setdefault(place, set()).add(pid)
        if time.monotonic() - self.idle_since >= SECONDS_OF_A_LOOP:
            for place, pids in self.sleeps_by_place.items():
                if len(pids) >= SLEEPS_OF_A_LOOP:
                    return place
        return self.find_repeated_call()

    def find_repeated_call(self) -> str:
        """Return the command line with which a stand-in was called again and again since the last answer.

        Returns:
            An empty text if no command line came `CALLS_OF_A_LOOP` times.
        """
        calls = read_end(self.record).splitlines()
        size = self.answers.stat().st_size
        if size != self.size_of_answers:
            self.size_of_answers = size
            self.calls_before_answer = len(calls)
        count_by_command = Counter(calls[self.calls_before_answer :])
        for command, count in count_by_command.items():
            if count >= CALLS_OF_A_LOOP:
                return command
        return ""


class Session:
    """A command that is explained, with all that it starts.

    Args:
        process: the command, which leads a session of its own.
        answers: the file of the answers. All processes that the command starts, in any session, inherit its path in
            the variable `EXPLAIN`.
        notes: the file to which what is wrong with the command is appended.
        loop: notices that the command waits in a loop.
    """

    def __init__(self, process: subprocess.Popen, answers: Path, notes: Path, loop: WaitingLoop):
        self.process = process
        self.answers = answers
        self.notes = notes
        self.loop = loop
        self.last_look = time.monotonic()
        # Those that `lacks_variable` held for at the last look.
        self.pythons_without_variable: list[psutil.Process] = []

    def contains(self, process: psutil.Process) -> bool:
        """Return whether a process is in the session that the command leads."""
        return os.getsid(process.pid) == self.process.pid

    def has_started(self, process: psutil.Process) -> bool:
        """Return whether the command started a process, even if the process has left the command's session."""
        return self.contains(process) or belongs_to(self.answers, process)

    def lacks_variable(self, process: psutil.Process) -> bool:
        """Return whether a process is a Python of the command's session without `EXPLAIN`, so that it would train."""
        if not self.contains(process) or not OF_PYTHON.match(process.name()):
            return False
        return EXPLAIN not in process.environ()

    def run(self, is_done: Callable[[], bool]) -> None:
        """Wait for the command to end, then at most `SECONDS_IN_THE_BACKGROUND` for what it left in the background.

        The wait ends early if the command itself waits in a loop.

        Args:
            is_done: a function that is called again and again; the wait ends once it returns True.
        """
        in_loop = False
        while not in_loop and self.process.poll() is None and not is_done():
            in_loop = self.wait()
        deadline = time.monotonic() + SECONDS_IN_THE_BACKGROUND
        while not in_loop and not is_done() and time.monotonic() < deadline and find_processes(self.has_started):
            in_loop = self.wait()

    def wait(self) -> bool:
        """Wait a moment, and now and then look at what runs; return whether the command waits in a loop."""
        time.sleep(SECONDS_BETWEEN_LOOKS)
        if time.monotonic() - self.last_look <= SECONDS_BETWEEN_LONG_LOOKS:
            return False
        self.last_look = time.monotonic()
        place = self.loop.find_waiting_place(find_processes(self.contains))
        if place:
            self.note(f"{place}: {WAITS}")
            return True
        self.kill_what_would_train()
        return False

    def kill_what_would_train(self) -> None:
        """Kill each Python that two looks in a row have seen without `EXPLAIN`, and note its command line.

        One look is not enough: a process that becomes another program has no environment for a moment.
        """
        seen_before = self.pythons_without_variable
        self.pythons_without_variable = find_processes(self.lacks_variable)
        for process in self.pythons_without_variable:
            if process not in seen_before:
                continue
            with contextlib.suppress(psutil.Error):
                self.note(f"{shlex.join(process.cmdline())}: {ENDED_WITHOUT_THE_VARIABLE}")
                process.kill()

    def note(self, line: str) -> None:
        """Append a line to the notes on what is wrong with the command."""
        with self.notes.open("a", errors="replace") as file:
            file.write(f"{line}\n")

    def kill(self) -> None:
        """Kill all that the command started, until none is left but processes of other users, such as sudo's."""
        of_other_users: set[psutil.Process] = set()
        while processes := set(find_processes(self.has_started)) - of_other_users:
            for process in processes:
                try:
                    process.kill()
                except psutil.AccessDenied:
                    of_other_users.add(process)
                except psutil.Error:
                    # It has ended by itself.
                    continue
        self.process.wait()


def run_session(
    words: Sequence[str],
    *,
    environment: dict[str, str],
    output: Path,
    is_done: Callable[[], bool],
    notes: Path,
    loop: WaitingLoop,
) -> int:
    """Run a command in a session of its own until `Session.run` stops waiting, then kill what it started.

    If the command waits in a loop, `notes` gets the place where it waits. A Python process without `EXPLAIN` would
    train: it is killed, and `notes` gets its command line.

    Args:
        words: the command, one word of its command line an item.
        environment: the command's variables. The one named `EXPLAIN` holds the path of the file of the answers.
        output: the file that gets what the command prints.
        is_done: a function that is called again and again; the command is killed once it returns True.
        notes: the file to which what is wrong with the command is appended.
        loop: notices that the command waits in a loop.

    Returns:
        The command's exit code; minus the signal's number if it was killed.

    Raises:
        ValueError: the program cannot be started, such as one that does not exist or is not executable.
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
    session = Session(process, answers, notes, loop)
    guard = None
    try:
        guard = guard_session(process.pid, answers)
        session.run(is_done)
    finally:
        session.kill()
        if guard is not None:
            # A byte tells the guard that nothing is left to clean up.
            with contextlib.suppress(OSError):
                guard.communicate(b".")
    return process.returncode


def guard_session(session: int, answers: Path) -> subprocess.Popen:
    """Start the process that cleans up if this process is killed (`session_guard.py`).

    It kills the processes of the session and all that write their answers to `answers`, and removes the folder of this
    file.

    Args:
        session: the id of the session that the command leads.
        answers: the file of the answers.
    """
    # The guard has a session of its own and lacks the variable, so that it does not kill itself.
    environment = {name: value for name, value in os.environ.items() if name != EXPLAIN}
    return subprocess.Popen(
        [sys.executable, session_guard.__file__, str(session), EXPLAIN, str(answers), str(answers.parent)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def find_processes(condition: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """Return the living processes for which a condition holds.

    Args:
        condition: a function of a process. If it raises a psutil.Error or an OSError, as it may for another user's
            process or one that has ended, it does not hold.
    """
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if condition(process) and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def belongs_to(answers: Path, process: psutil.Process) -> bool:
    """Return whether a process would write its answer to a file, by the variable `EXPLAIN` in its environment."""
    return process.environ().get(EXPLAIN) == str(answers)


def explain_missing_answer(code: int, output: str, notes: Sequence[str], last: str) -> str:
    """Return why a command gave no answer: what Python and the shell lack, or else the end of what was printed.

    Args:
        code: the command's exit code.
        output: what the command printed.
        notes: what is wrong with the command, one fault an item.
        last: the place and the text of the command of a script that bash began last; empty if there was none.
    """
    lines = [line for line in redact(output).strip().splitlines() if not TRACED.match(line)][-LINES_OF_A_CRASH:]
    missing = [*notes, *filter(NOT_FOUND.search, lines)]
    by_uv = next(filter(OF_UV.search, missing or lines), None)
    if by_uv:
        return f"no configuration seen: {shortened(by_uv, LONGEST_OF_A_CRASH)}. {UV}"
    if missing:
        return f"no configuration seen: {'; '.join(dict.fromkeys(missing))}."
    if code:
        reason = f"it ended with exit code {code} before verl's trainer had its configuration."
    else:
        reason = "it ended before verl's trainer had its configuration."
    if last:
        reason += f" The last command was {shortened(last)}."
    end = "\n".join(shortened(line, LONGEST_OF_A_CRASH) for line in lines)
    if COUNTS.search(f"{last}\n{end}"):
        reason += NOTHING_COUNTED
    return f"no configuration seen: {reason} The end of its output:\n{end or '(none)'}"
