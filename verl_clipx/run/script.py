"""Finds the verl commands that a shell script would run, without running them.

The script runs in a restricted bash (no redirection of output, no cd, no program by its path, no variable by which a
program would load code of the script's), in an empty folder and with a new environment. Its PATH contains only some
programs that change nothing, stand-ins that do nothing, and stand-ins for Python that record their arguments. A line
that needs more is named and refused.
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
# These programs start Python too. Their arguments are recorded, and count if -m is among them.
LAUNCHERS = ("ray", "torchrun", "uv")
# These programs only read or print. None writes a file, starts a program that a script chooses, or reaches a network.
HARMLESS = ("basename", "cat", "cut", "dirname", "grep", "head", "realpath", "seq", "tr")
# These are as harmless, but print facts about the machine.
OF_THE_MACHINE = ("date", "hostname", "nproc")
# Scripts prepare a run or end other runs with these. Here they do nothing and print nothing.
WITHOUT_EFFECT = ("chmod", "cp", "curl", "git", "hf", "huggingface-cli", "lsof", "mkdir", "mv")
WITHOUT_EFFECT += ("npu-smi", "nvidia-smi", "pip", "pip3", "pkill", "rm", "sleep", "sysctl", "touch", "wget")
# Bash itself opens a network connection when it reads from these.
NETWORK = ("/dev/tcp", "/dev/udp")
# The dynamic linker and the C library load code, or write files, where these variables say (man ld.so, man 3 iconv).
LOADING = ("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "LD_DEBUG", "LD_DEBUG_OUTPUT", "LD_ORIGIN_PATH", "LD_PROFILE")
LOADING += ("LD_PROFILE_OUTPUT", "LD_TRACE_LOADED_OBJECTS", "GLIBC_TUNABLES", "GCONV_PATH", "LOCPATH", "NLSPATH")
SECONDS = 10.0


def commands_of(words: Sequence[str], *, seconds: float = SECONDS) -> list[list[str]]:
    """The Python commands that a script would run, in order, each as a list of words.

    Args:
        words: `bash SCRIPT ARGUMENT …`.
        seconds: how long the script may take.

    Raises:
        ValueError: there is no script; or it needs something that it does not get here, takes too long, starts no
            Python, or drops an override.
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
        programs, record, empty, first = (Path(folder) / name for name in ("programs", "record", "empty", "first.sh"))
        empty.mkdir()
        record.touch()
        # Bash runs this file before the script.
        write_text(first, f"readonly {' '.join(LOADING)}\nunset BASH_ENV\n")
        put_programs(programs, record)
        bash = subprocess.Popen(
            [shutil.which("bash"), "--restricted", str(script.resolve()), *words[2:]],
            cwd=empty,
            env={"PATH": str(programs), "HOME": str(empty), "BASH_ENV": str(first)},
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
    """Raises if a script passes an override that it gets on to none of its commands.

    Args:
        arguments: the script's arguments. Those that are not overrides may be for the script itself.

    Raises:
        ValueError: names the overrides, and says how a script passes them on.
    """
    passed_on = {word for command in commands for word in command}
    dropped = [word for word in arguments if ("=" in word or word.startswith("~")) and word not in passed_on]
    if dropped:
        raise ValueError(
            f"{script}: drops {' '.join(dropped)}, because it does not pass its arguments on. End its python command "
            'with "$@".'
        )


def end_session(leader: int) -> None:
    """Kills every process of a session, including those in the background and in other process groups.

    Args:
        leader: the process id of the session's first process, which may have ended already.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == leader:
                process.kill()


def refuse_network(script: Path, arguments: Sequence[str]) -> None:
    """Raises if a script, or one of its arguments, names a file for which bash would open a network connection.

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
    """The commands in the record that the stand-ins have written, each as a list of words."""
    words, commands = iter(text.split("\0")[:-1]), []
    for number in words:
        commands.append([next(words) for _ in range(int(number))])
    return commands


def put_programs(folder: Path, record: Path, real: Sequence[str] = (*HARMLESS, *OF_THE_MACHINE)) -> None:
    """Creates a folder of programs to be used as PATH.

    Args:
        folder: the folder, which must not exist yet.
        record: the file to which the stand-ins for Python and its launchers append their arguments.
        real: the programs that really run. All others are stand-ins.
    """
    folder.mkdir()
    # Each record is the number of words and then the words, separated by null bytes, which no argument can contain. A
    # script that tries something out with python -c is told that it failed.
    writes = f"""[[ ${{1:-}} != -c ]] || exit 1
printf '%s\\0' $(($# + 1)) "${{0##*/}}" "$@" >>'{record}'"""
    bodies = dict.fromkeys((*WITHOUT_EFFECT, *OF_THE_MACHINE), ":") | {"tee": f"exec {shutil.which('cat')}"}
    for name, body in (bodies | dict.fromkeys((*PYTHONS, *LAUNCHERS), writes)).items():
        if name not in real:
            # -p: functions, options and startup files that the script exports would act in here without restrictions.
            write_text(folder / name, f"#!{shutil.which('bash')} -p\n{body}\n")
            (folder / name).chmod(0o755)
    for name in real:
        if (program := shutil.which(name)) is not None:
            (folder / name).symlink_to(program)


def refuse_what_failed(script: Path, errors: str) -> None:
    """Raises for the first line of a script that failed because something was missing.

    Raises:
        ValueError: names the line and what it needed.
    """
    for number, what in re.findall(rf"^{re.escape(str(script.resolve()))}: line (\d+): (.+)$", errors, re.MULTILINE):
        line = read_text(script).splitlines()[int(number) - 1].strip()
        raise ValueError(
            f"{script}, line {number}, {line!r}: {what}. A script is explained without redirection, cd, other "
            "programs, libraries or the environment's variables: give the command that it ends in instead."
        )
