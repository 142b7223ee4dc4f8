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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from verl_clipx.common.secrets import redact
from verl_clipx.run import stand_in

# The last line of an answer that nothing stops (`description.py`, whose import takes seconds).
NOTHING_STOPS = "Nothing in the configuration stops it."

# 1: the driver prints its answer and ends; a path: it appends the answer to this file, one JSON object a line.
EXPLAIN = "CLIPX_EXPLAIN"

LAUNCHERS = ("ray", "sbatch", "srun", "ssh", "docker", "kubectl", "pkill", "killall")
PREPARATIONS = ("rm", "mv", "pip", "pip3", "wget", "curl", "huggingface-cli", "hf")
# Scripts ask these for the accelerators that explaining does not need.
OF_ACCELERATORS = ("nvidia-smi", "npu-smi")
SHELLS = ("bash", "sh")
# Shells that do not read BASH_ENV, by the names of their programs.
OTHER_SHELLS = {"dash", "busybox", "zsh", "ksh", "fish"}
SECONDS_BETWEEN_LOOKS = 0.1
# How long what a command leaves in the background may take to its configuration.
SECONDS_IN_THE_BACKGROUND = 120
# How long bash, and other runs, may take after the first answer.
SECONDS_AFTER_AN_ANSWER = 10
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# An override of Hydra's that is no variable of the environment.
OVERRIDE = re.compile(r"([+~]+[\w./@-]+|\w[\w/@-]*\.[\w./@-]+)=")
# A line of bash's `set -x`, and what shells say of a program that is missing.
TRACED = re.compile(r"\++ ")
NOT_FOUND = re.compile(r": (?:command )?not found$")
# What may start a run in the rest of a script.
MAY_TRAIN = re.compile(r"verl|python|\.sh\b|torchrun")
LOOPS = re.compile(r"(?:^|;)\s*(done|do)\b", re.MULTILINE)
ENDED = f"{EXPLAIN} was removed, as by `env -i`, so that a run would have started. Ended instead:"
OF_UV = re.compile(r"\buv: (?:command )?not found$|^error: .*\buv\.lock\b")
UV = (
    "The script starts Python by uv. VERL_USE_UV=0 before the command makes verl's examples use this Python; "
    "otherwise explain it where uv.lock is, with verl-clipx in uv's environment: `uv pip install` puts it there and "
    "`uv run` keeps it, while `uv sync` and `uv run --exact` remove it."
)
PASS_ON = 'A script passes its arguments on by "$@" at the end of the command that starts verl.'
CUT = "The command that starts verl ended before: a comment, an empty line or a blank after a backslash ends it."
# Functions, comments and quotes, in which $1 is not the first parameter of a shell script.
NOT_OF_A_SCRIPT = re.compile(r"^(?:function )?[\w-]+ *\(\) *\{(?s:.*?)^\}|(?<!\S)#.*|'[^'\n]*'", re.MULTILINE)
ALL_OF_IT = "`clipx explain --all -- …` explains each that the command starts."
MORE = {
    True: f"Only the first run is explained: {ALL_OF_IT}",
    None: f"What its shell, which is not bash, does after the first run is not looked at: {ALL_OF_IT}",
}
LINES_OF_A_CRASH = 15
LONGEST, LONGEST_OF_A_CRASH = 100, 300


@dataclass(frozen=True)
class Explanation:
    """What came of a command.

    Args:
        answers: of every run that it would start, the fields of `description.Description` and `text`, its lines.
        stood_in: the command lines that stand-ins replaced.
        stops: why the command itself would not get to verl's configuration, or not as it is written, in sentences.
        left: processes that took a session of their own and live on.
        goes_on: whether the command would go on to what may be another run; None: a shell that is not bash ran it.
    """

    answers: list[dict[str, Any]]
    stood_in: list[str]
    stops: list[str]
    left: list[str]
    goes_on: bool | None

    @property
    def starts(self) -> bool:
        """Whether there is a run and nothing stops it."""
        return bool(self.answers) and not self.stops and not any(answer["stops"] for answer in self.answers)

    @property
    def content(self) -> dict[str, Any]:
        """The answer, for a program, without credentials."""
        runs = [{key: value for key, value in answer.items() if key != "text"} for answer in self.answers]
        others = {"stood_in": self.stood_in, "stops": self.stops, "left_running": self.left, "goes_on": self.goes_on}
        return redact({"runs": runs, **others})

    @property
    def lines(self) -> list[str]:
        """The answer, for a reader, without credentials."""
        nothing = NOTHING_STOPS if self.stops else None
        answers = [line for answer in self.answers for line in answer["text"] if line != nothing]
        replaced = []
        for command in self.stood_in:
            program, *words = shlex.split(command)
            what = "run here" if stand_in.payload_of(program, words) else "not run"
            replaced.append(f"{what}: {shortened(command)}")
        left = [f"lives on: {process}" for process in self.left]
        more = [MORE[self.goes_on]] if self.goes_on in MORE else []
        return redact([*replaced, *left, *self.stops, *answers, *more])


def shortened(text: str, longest: int = LONGEST) -> str:
    """A line without credentials, cut behind a word; one that is cut before would not be recognised."""
    return textwrap.shorten(redact(text), longest, placeholder=" …")


def explain(words: Sequence[str], *, run_preparations: bool = False, every: bool = False) -> Explanation:
    """Runs a command until its first answer.

    Args:
        words: the command, as for a shell.
        run_preparations: whether rm, mv, pip and downloads run.
        every: whether the command goes on after the first answer, to explain every run that it would start.

    Raises:
        ValueError: the words are no command that can be started.
        SystemExit: one of `SIGNALS` came. What the command started has ended, but for what is named on stderr.
    """
    if "=" in words[0] or words[0].startswith("+"):
        first = redact(words[0])
        raise ValueError(f"{first}: write the whole command: clipx explain -- python -m verl.trainer.main_ppo …")
    given_words = words
    words, stops = without_windows_line_ends(words)
    with signals_noted() as signals, tempfile.TemporaryDirectory(prefix="clipx-explain-") as name:
        folder = Path(name)
        answers, record, output, notes = (folder / part for part in ("answers", "stand_ins", "output", "notes"))
        for file in (answers, record, notes, *([folder / "all"] if every else ())):
            file.touch()
        replaced = LAUNCHERS if run_preparations else (*LAUNCHERS, *PREPARATIONS)
        programs = put_stand_ins(folder / "programs", record, replaced)
        environment = {**os.environ, **programs, EXPLAIN: str(answers)}
        shells: set[str] = set()
        code = run_session(
            words, environment, output, lambda: bool(signals) or (not every and is_answered(answers, shells))
        )
        left = [shortened(f"{job.pid} {shlex.join(job.cmdline())}") for job in living(partial(is_of, answers))]
        given = [json.loads(line) for line in answers.read_text().splitlines()]
        stood_in = list(dict.fromkeys(record.read_text().splitlines()))
        noted = list(dict.fromkeys(notes.read_text().splitlines()))
        printed = output.read_text(errors="replace")
    if signals:
        print(*(f"lives on: {process}" for process in left), sep="\n", end="\n" * bool(left), file=sys.stderr)
        raise SystemExit(128 + signals[0])
    places = [line.split("\t", 2) for line in noted if "\t" in line]
    goes_on = not every and (len(given) > 1 or any(may_train(file, int(line), next) for line, file, next in places))
    given = given if every else given[:1]
    cut = [line for line in noted if NOT_FOUND.search(line)]
    stops += [line for line in noted if given and line.startswith(ENDED)]
    if not given:
        stops.append(without_an_answer(code, printed, [line for line in noted if "\t" not in line]))
    elif cut:
        stops.append(f"{'; '.join(cut)}. {CUT}")
    if shells and not every and not goes_on:
        goes_on = None
    return Explanation(given, stood_in, [*stops, *misled_words(given_words, given, bool(cut))], left, goes_on)


def is_answered(answers: Path, shells: set[str]) -> bool:
    """Whether there is an answer, and bash and other runs have gone on to what they do next, or had the time to.

    Adds the shells that are not bash, and ran when there was an answer, to `shells`.
    """
    if not answers.read_text().endswith("\n"):
        return False

    def is_waited_for(process: psutil.Process) -> bool:
        program = Path(process.exe()).name if is_of(answers, process) else ""
        shells.update({program} & OTHER_SHELLS)
        return program.startswith(("bash", "python"))

    return not living(is_waited_for) or time.time() - answers.stat().st_mtime > SECONDS_AFTER_AN_ANSWER


def may_train(script: str, line: int, command: str) -> bool:
    """Whether what bash would go on to may be another run: from a command in a line of a script on, if the line has it
    as bash writes it, or else from the line on; line 0 is one before the run.
    """
    lines = Path(script).read_text(errors="replace").splitlines()[line - 1 :] if os.path.isfile(script) else []
    if lines:
        lines[0] = lines[0][max(lines[0].find(command), 0) :]
    rest = "\n".join(of_rest.partition("#")[0] for of_rest in lines)
    loops = LOOPS.findall(rest)
    return line == 0 or MAY_TRAIN.search(rest) is not None or loops.count("done") > loops.count("do")


def misled_words(words: Sequence[str], answers: list[dict[str, Any]], is_cut: bool) -> list[str]:
    """Messages on overrides that became a part of others, or that reached no run, if nothing else says why."""
    reached = [answer.get("arguments") for answer in answers]
    passed = [argument for of in reached for argument in of or ()]
    lost, messages = [], []
    for place, word in enumerate(words):
        within = [argument for argument in passed if word in argument.partition("=")[2]]
        is_lost = None not in reached and word not in passed
        if not OVERRIDE.match(word) or not (within or is_lost):
            continue
        reads = reading_of(words, place)
        if within or reads:
            became = f"verl gets {within[0]}" if within else "it does not reach verl"
            messages.append(f"{word}: the script reads it{reads}, and {became}. Put the script's own parameters first.")
        elif answers:
            lost.append(word)
    if not lost:
        return messages
    # Words of blanks are what a blank after a backslash leaves.
    why = "" if is_cut or not all(word.strip() for word in passed) else f" {PASS_ON}"
    return [
        *messages,
        f"{' '.join(lost)}: did not reach verl, so the answer is about a run without it.{why}",
    ]


def reading_of(words: Sequence[str], place: int) -> str:
    """Where the script among the words reads one of them by its number, in words; empty if it has no such line."""
    first = next((at for at, word in enumerate(words) if word.endswith(".sh") and os.path.isfile(word)), place)
    lines = Path(words[first]).read_text(errors="replace") if first < place else ""
    reads = re.compile(rf"^.*\$(?:{place - first}|\{{{place - first})(?!\d).*$", re.MULTILINE)
    line = reads.search(NOT_OF_A_SCRIPT.sub("", lines))
    return f" as its parameter ${place - first} ({line[0].strip()})" if line else ""


def without_windows_line_ends(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command whose script has no carriage returns any more, and a message if it had some; $0 is still the script."""
    place = 0
    if os.path.isfile(words[0]) and (first := re.match(rb"#!(.*)\r\n", Path(words[0]).read_bytes())):
        # The kernel looks for a program whose name ends with a carriage return.
        interpreter = shlex.split(first[1].decode())
        words, place = [*interpreter, *words], len(interpreter)
    elif Path(words[0]).name in SHELLS:
        place = next((place for place, word in enumerate(words) if place and not word.startswith("-")), 0)
    script = Path(words[place])
    if not place or not script.is_file() or b"\r\n" not in (content := script.read_bytes()):
        return list(words), []
    message = f"{script}: its lines end as on Windows (CRLF), and it fails on them: sed -i 's/\\r$//' {script}"
    if any(Path(word).name in SHELLS for word in words[:place]):
        text = content.replace(b"\r\n", b"\n").decode(errors="surrogateescape")
        words = [*words[:place], "-c", text, *words[place:]]
    return list(words), [message]


def put_stand_ins(folder: Path, record: Path, programs: Sequence[str]) -> dict[str, str]:
    """Creates a folder of stand-ins, which append to `record`; returns the environment variables that use them."""
    folder.mkdir()
    python = shlex.join([sys.executable, "-IS", stand_in.__file__, str(record)])
    for program in programs:
        (folder / program).write_text(f'#!/bin/sh\nexec {python} {program} "$@"\n')
        (folder / program).chmod(0o755)
    # A script may put an environment's programs before PATH; bash calls functions before any program.
    functions = "".join(f'{program}() {{ {shlex.quote(str(folder / program))} "$@"; }}\n' for program in programs)
    functions += "".join(f"{program}() {{ :; }}\n" for program in OF_ACCELERATORS if shutil.which(program) is None)
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
def signals_noted() -> Iterator[list[int]]:
    """In the block, signals that would end this process are only noted, so that what it started can be ended first."""
    noted: list[int] = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        # nohup lets SIGHUP be ignored.
        if handler != signal.SIG_IGN:
            signal.signal(number, lambda received, _: noted.append(received))
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_session(words: Sequence[str], environment: dict[str, str], output: Path, until: Callable[[], bool]) -> int:
    """Runs a command in a session of its own until `until` says so, and kills all of it; returns its exit code.

    What the command leaves in the background has `SECONDS_IN_THE_BACKGROUND`. A Python of it without the variable by
    which verl answers is killed at once, and noted.

    Raises:
        ValueError: there is no such program.
    """
    notes = output.with_name("notes")
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

        def in_session(other: psutil.Process) -> bool:
            return os.getsid(other.pid) == process.pid

        def would_start(other: psutil.Process) -> bool:
            return in_session(other) and EXPLAIN not in other.environ() and "python" in Path(other.exe()).name

        def wait() -> None:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            for other in living(would_start):
                with contextlib.suppress(psutil.Error), notes.open("a") as file:
                    file.write(f"{ENDED} {shortened(shlex.join(other.cmdline()))}\n")
                    other.kill()

        try:
            while process.poll() is None and not until():
                wait()
            last = time.monotonic() + SECONDS_IN_THE_BACKGROUND
            while not until() and time.monotonic() < last and living(in_session):
                wait()
        finally:
            # Each may start another before its end.
            while members := living(in_session):
                for member in members:
                    with contextlib.suppress(psutil.Error):
                        member.kill()
            process.wait()
    return process.returncode


def living(is_meant: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """The processes of which something holds, and that have not ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if is_meant(process) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def is_of(answers: Path, process: psutil.Process) -> bool:
    """Whether a process, in whatever session, has this file for its answers."""
    return process.environ().get(EXPLAIN) == str(answers)


def without_an_answer(code: int, output: str, noted: Sequence[str]) -> str:
    """Why a command gave no answer, with what Python and the shell lack, or the end of what it printed."""
    lines = [line for line in redact(output).strip().splitlines() if not TRACED.match(line)][-LINES_OF_A_CRASH:]
    missing = [*noted, *filter(NOT_FOUND.search, lines)]
    why = f"ended with exit code {code} before" if code else "ended before"
    said = "; ".join(dict.fromkeys(missing)) or f"it {why} verl's trainer had its configuration"
    if by_uv := next(filter(OF_UV.search, missing or lines), ""):
        return f"no configuration seen: {shortened(by_uv, LONGEST_OF_A_CRASH)}. {UV}"
    end = "\n".join(shortened(line, LONGEST_OF_A_CRASH) for line in lines)
    return f"no configuration seen: {said}." + ("" if missing else f" The end of its output:\n{end or '(none)'}")
