"""The verl commands that a shell script would run, found without running them.

The script runs in a restricted bash (no redirection of output, no cd, no program by its path), in an empty folder, with
its own environment. The only programs on its PATH are some that change nothing, stand-ins that do nothing, and
stand-ins for Python that record their arguments. A line that needs more is named and refused.
"""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from verl_clipx.common.files import read_text, write_text

SHELLS = ("bash", "sh")
PYTHONS = ("python", "python3")
# They start Python, too: their arguments are written down, and count where -m is among them.
LAUNCHERS = ("ray", "torchrun", "uv")
# They read, or print; none writes a file, starts a program of a script's choice or reaches a network.
HARMLESS = ("basename", "cat", "cut", "dirname", "grep", "head", "realpath", "seq", "tr")
# As harmless, but what they print is the machine's.
OF_THE_MACHINE = ("date", "hostname", "nproc")
# What scripts prepare a run by, and end others by: here it does nothing and prints nothing.
WITHOUT_EFFECT = ("chmod", "cp", "curl", "git", "hf", "huggingface-cli", "lsof", "mkdir", "mv")
WITHOUT_EFFECT += ("npu-smi", "nvidia-smi", "pip", "pip3", "pkill", "rm", "sleep", "sysctl", "touch", "wget")
# Bash itself opens a connection where it reads from these.
NETWORK = ("/dev/tcp", "/dev/udp")
SECONDS = 10.0


def commands_of(words: Sequence[str], *, seconds: float = SECONDS) -> list[list[str]]:
    """The Python commands that a script would run, in its order, each as its words.

    Args:
        words: `bash SCRIPT ARGUMENT …`.
        seconds: how long the script may take.

    Raises:
        ValueError: no script, one that needs what is not given to it, takes too long, starts no Python, or drops an
            override.
    """
    if len(words) < 2 or words[1].startswith("-"):
        raise ValueError(
            f"{' '.join(words)}: no script is named. Name one, as in clipx explain -- bash run.sh KEY=VALUE …"
        )
    script = Path(words[1])
    if not script.is_file():
        raise ValueError(f"{script}: this script does not exist.")
    refuse_network(script, words[2:])
    with tempfile.TemporaryDirectory() as folder:
        programs, record, empty = (Path(folder) / name for name in ("programs", "record", "empty"))
        empty.mkdir()
        record.touch()
        put_programs(programs, record)
        bash = subprocess.Popen(
            [shutil.which("bash"), "--restricted", str(script.resolve()), *words[2:]],
            cwd=empty,
            env={"PATH": str(programs), "HOME": str(empty)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            _, errors = bash.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise ValueError(
                f"{script}: it did not finish within {seconds:g} s, although nothing in it was trained. Give the "
                "command that it ends in instead."
            ) from None
        finally:
            end_session(bash.pid)
            bash.wait()
        found = [command for command in recorded(read_text(record)) if command[0] in PYTHONS or "-m" in command]
    refuse_what_failed(script, errors)
    if not found:
        raise ValueError(f"{script}: it does not start Python (exit code {bash.returncode}).")
    refuse_dropped(script, words[2:], found)
    return found


def refuse_dropped(script: Path, arguments: Sequence[str], commands: Sequence[Sequence[str]]) -> None:
    """Raises for overrides that a script gets and gives to none of its commands.

    Args:
        script: its path.
        arguments: which it gets; those that are no overrides may be for the script itself.
        commands: which it would run.

    Raises:
        ValueError: names the overrides, and how a script passes them on.
    """
    passed_on = {word for command in commands for word in command}
    dropped = [word for word in arguments if ("=" in word or word.startswith("~")) and word not in passed_on]
    if dropped:
        raise ValueError(
            f"{script}: drops {' '.join(dropped)}, because it does not pass its arguments on. End its python command "
            'with "$@".'
        )


def end_session(leader: int) -> None:
    """Kills every process of a session, those in the background and in process groups of their own too.

    Args:
        leader: the process that the session began with, whether it still runs or not.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == leader:
                process.kill()


def refuse_network(script: Path, arguments: Sequence[str]) -> None:
    """Raises where a script, or an argument of its, names what bash would open a connection for.

    Args:
        script: its path.
        arguments: which it gets.

    Raises:
        ValueError: names the line or the argument.
    """
    lines = {f"line {number}": line for number, line in enumerate(read_text(script).splitlines(), 1)}
    for where, text in (lines | {f"argument {argument!r}": argument for argument in arguments}).items():
        if any(name in text for name in NETWORK):
            raise ValueError(
                f"{script}, {where}, {text.strip()!r}: bash would reach a network. A script is explained without: "
                "give the command that it ends in instead."
            )


def recorded(text: str) -> list[list[str]]:
    """The commands that the stand-ins have written down, each as its words."""
    words, commands = iter(text.split("\0")[:-1]), []
    for number in words:
        commands.append([next(words) for _ in range(int(number))])
    return commands


def put_programs(folder: Path, record: Path, real: Sequence[str] = (*HARMLESS, *OF_THE_MACHINE)) -> None:
    """Fills a folder for PATH.

    Args:
        folder: made here.
        record: file that the stand-ins for Python and for what starts it append their arguments to.
        real: programs that are themselves there; what else scripts commonly call does nothing.
    """
    folder.mkdir()
    # With null bytes, which no argument can hold: how many words follow, then they. A script that has Python try out
    # something learns that it is not there.
    writes = f"""[[ ${{1:-}} != -c ]] || exit 1
printf '%s\\0' $(($# + 1)) "${{0##*/}}" "$@" >>'{record}'"""
    bodies = dict.fromkeys((*WITHOUT_EFFECT, *OF_THE_MACHINE), ":") | {"tee": f"exec {shutil.which('cat')}"}
    for name, body in (bodies | dict.fromkeys((*PYTHONS, *LAUNCHERS), writes)).items():
        if name not in real:
            write_text(folder / name, f"#!{shutil.which('bash')}\n{body}\n")
            (folder / name).chmod(0o755)
    for name in real:
        if (program := shutil.which(name)) is not None:
            (folder / name).symlink_to(program)


def refuse_what_failed(script: Path, errors: str) -> None:
    """Raises for the first line of a script that needed what it did not get.

    Args:
        script: its path.
        errors: what bash said.

    Raises:
        ValueError: names the line and what it needed.
    """
    for number, what in re.findall(rf"^{re.escape(str(script.resolve()))}: line (\d+): (.+)$", errors, re.MULTILINE):
        line = read_text(script).splitlines()[int(number) - 1].strip()
        raise ValueError(
            f"{script}, line {number}, {line!r}: {what}. A script is explained without redirection, cd, other programs "
            "or the environment's variables: give the command that it ends in instead."
        )
