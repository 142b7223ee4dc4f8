"""`clipx explain -- COMMAND`: runs a command until verl has its configuration, and says what would be trained.

The command itself runs, with CLIPX_EXPLAIN set: the plugin's hook in verl's driver (`answer.py`) then answers and ends
the process before Ray starts. Programs that would launch or prepare something elsewhere are replaced by stand-ins on
PATH (`stand_in.py`). This is no sandbox: whatever else a script does, it does.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from verl_clipx.run import stand_in

# 1: the driver prints its answer and ends; a path: it appends the answer to this file, one JSON object a line.
EXPLAIN = "CLIPX_EXPLAIN"

LAUNCHERS = ("ray", "sbatch", "srun", "scontrol", "ssh", "docker", "kubectl", "pkill", "killall")
PREPARATIONS = ("rm", "mv", "pip", "pip3", "wget", "curl", "huggingface-cli", "hf")
# Scripts ask these for the accelerators that explaining does not need.
OF_ACCELERATORS = ("nvidia-smi", "npu-smi")
SHELLS = ("bash", "sh")
SECONDS_BETWEEN_LOOKS = 0.1
# How long what a command leaves in the background may take to its configuration.
SECONDS_IN_THE_BACKGROUND = 120
# An override of Hydra's that is no variable of the environment.
OVERRIDE = re.compile(r"([+~]+[\w./@-]+|\w[\w/@-]*\.[\w./@-]+)=")
LINES_OF_A_CRASH = 15
LONGEST = 100


@dataclass(frozen=True)
class Explanation:
    """What came of a command.

    Args:
        answers: of every run that it would start, the fields of `answer.Answer` and `text`, its lines.
        stood_in: the command lines that stand-ins replaced.
        stops: why the command itself would not get to verl's configuration, or not as it is written, in sentences.
    """

    answers: list[dict[str, Any]]
    stood_in: list[str]
    stops: list[str]

    @property
    def starts(self) -> bool:
        """Whether there is a run and nothing stops it."""
        return bool(self.answers) and not self.stops and not any(answer["stops"] for answer in self.answers)

    @property
    def lines(self) -> list[str]:
        """The answer, for a reader."""
        answers = [line for answer in self.answers for line in answer["text"]]
        replaced = []
        for command in self.stood_in:
            program, *words = shlex.split(command)
            what = "run here" if stand_in.payload_of(program, words) else "not run"
            replaced.append(f"{what}: {textwrap.shorten(command, LONGEST, placeholder=' …')}")
        return [*replaced, *self.stops, *answers]


def explain(words: Sequence[str], *, run_preparations: bool = False, every: bool = False) -> Explanation:
    """Runs a command until its first answer.

    Args:
        words: the command, as for a shell.
        run_preparations: whether rm, mv, pip and downloads run.
        every: whether the command goes on after the first answer, to explain every run that it would start.

    Raises:
        ValueError: the words are no command that can be started.
    """
    if "=" in words[0] or words[0].startswith("+"):
        raise ValueError(f"{words[0]}: write the whole command: clipx explain -- python -m verl.trainer.main_ppo …")
    words, stops = without_windows_line_ends(words)
    with tempfile.TemporaryDirectory(prefix="clipx-explain-") as name:
        folder = Path(name)
        answers, record, output = folder / "answers", folder / "stand_ins", folder / "output"
        for file in (answers, record):
            file.touch()
        replaced = LAUNCHERS if run_preparations else (*LAUNCHERS, *PREPARATIONS)
        programs = put_stand_ins(folder / "programs", record, replaced)
        code = run_session(
            words,
            {**os.environ, **programs, EXPLAIN: str(answers)},
            output,
            until=lambda: not every and answers.read_text().endswith("\n"),
        )
        given = [json.loads(line) for line in answers.read_text().splitlines()][: None if every else 1]
        stood_in = list(dict.fromkeys(record.read_text().splitlines()))
        if not given:
            stops.append(without_an_answer(code, output.read_text(errors="replace")))
    return Explanation(given, stood_in, [*stops, *lost_words(words, given)])


def lost_words(words: Sequence[str], answers: list[dict[str, Any]]) -> list[str]:
    """A message if overrides of a command reached none of its runs; empty if they did, or nothing tells it."""
    reached = [answer.get("arguments") for answer in answers]
    if not reached or None in reached:
        return []
    lost = [word for word in words if OVERRIDE.match(word) and not any(word in of for of in reached)]
    if not lost:
        return []
    return [
        f"{' '.join(lost)}: did not reach verl, so the answer is about a run without it. A script passes its arguments "
        'on by "$@" at the end of the command that starts verl.'
    ]


def without_windows_line_ends(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command whose script has no carriage returns any more, and a message if it had some; $0 is still the script."""
    place = 1
    while place < len(words) and words[place].startswith("-"):
        place += 1
    script = Path(words[place]) if Path(words[0]).name in SHELLS and place < len(words) else None
    if script is None or not script.is_file() or b"\r\n" not in (content := script.read_bytes()):
        return list(words), []
    text = content.replace(b"\r\n", b"\n").decode(errors="surrogateescape")
    message = f"{script}: its lines end as on Windows (CRLF), and {words[0]} fails on them: sed -i 's/\\r$//' {script}"
    return [*words[:place], "-c", text, str(script), *words[place + 1 :]], [message]


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
    first.write_text((f". {shlex.quote(own)}\n" if own else "") + functions)
    return {"PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}", "BASH_ENV": str(first)}


def run_session(words: Sequence[str], environment: dict[str, str], output: Path, until: Callable[[], bool]) -> int:
    """Runs a command in a session of its own until `until` says so, and kills all of it; returns its exit code.

    What the command leaves in the background has `SECONDS_IN_THE_BACKGROUND`.

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
            raise ValueError(f"{words[0]}: {error.strerror}.") from None
        try:
            while process.poll() is None and not until():
                time.sleep(SECONDS_BETWEEN_LOOKS)
            last = time.monotonic() + SECONDS_IN_THE_BACKGROUND
            while not until() and time.monotonic() < last and members_of(process.pid):
                time.sleep(SECONDS_BETWEEN_LOOKS)
        finally:
            for member in members_of(process.pid):
                with contextlib.suppress(psutil.Error):
                    member.kill()
            process.wait()
    return process.returncode


def members_of(session: int) -> list[psutil.Process]:
    """The processes of a session that have not ended."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def without_an_answer(code: int, output: str) -> str:
    """Why a command gave no answer, with the end of what it printed."""
    end = "\n".join(output.strip().splitlines()[-LINES_OF_A_CRASH:])
    why = "it ended" if code == 0 else f"it ended with exit code {code}"
    return (
        f"no configuration seen: {why} before verl's trainer had its configuration, in an environment that has the "
        f"plugin. The end of its output:\n{end or '(none)'}"
    )
