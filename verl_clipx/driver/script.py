"""Which commands of verl's a shell script would run, without running them.

The script runs in a restricted bash (no redirection of output, no cd, no program by its path), in an empty folder, with
an environment of its own. The only programs on its PATH are some that change nothing, and stand-ins for Python that
write down their arguments. What needs more is refused with its line.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from verl_clipx.common.files import read_text, write_text

SHELLS = ("bash", "sh")
PYTHONS = ("python", "python3")
# They read, or print; none writes a file, starts a program of a script's choice or reaches a network.
HARMLESS = ("basename", "cat", "cut", "date", "dirname", "grep", "head", "hostname", "nproc", "realpath", "seq", "tr")
# Common in scripts, and of no account here: they do nothing, or pass on what they read.
STAND_INS = {"mkdir": ":", "sleep": ":", "tee": f"exec {shutil.which('cat')}"}
SECONDS = 10.0


def commands_of(words: Sequence[str], *, seconds: float = SECONDS) -> list[list[str]]:
    """The Python commands that a script would run, in its order, each as its words.

    Args:
        words: `bash SCRIPT ARGUMENT …`.
        seconds: how long the script may take.

    Raises:
        ValueError: no script, one that needs what is not given to it, takes too long, or starts no Python.
    """
    if len(words) < 2 or words[1].startswith("-"):
        raise ValueError(f"{' '.join(words)}: name a script, as in clipx explain -- bash run.sh KEY=VALUE …")
    script = Path(words[1])
    if not script.is_file():
        raise ValueError(f"{script}: no such script.")
    with tempfile.TemporaryDirectory() as folder:
        programs, record, empty = (Path(folder) / name for name in ("programs", "record", "empty"))
        empty.mkdir()
        record.touch()
        put_programs(programs, record)
        try:
            done = subprocess.run(
                [shutil.which("bash"), "--restricted", str(script.resolve()), *words[2:]],
                cwd=empty,
                env={"PATH": str(programs), "HOME": str(empty)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"{script}: not done within {seconds:g} s, though nothing in it was trained.") from None
        found = recorded(read_text(record))
    refuse_what_failed(script, done.stderr)
    if not found:
        raise ValueError(f"{script}: it starts no Python (exit code {done.returncode}).")
    return found


def recorded(text: str) -> list[list[str]]:
    """The commands that the stand-ins have written down, each as its words."""
    words, commands = iter(text.split("\0")[:-1]), []
    for number in words:
        commands.append([next(words) for _ in range(int(number))])
    return commands


def put_programs(folder: Path, record: Path) -> None:
    """Fills a folder for PATH.

    Args:
        folder: made here.
        record: file that the stand-ins for Python append their arguments to.
    """
    folder.mkdir()
    # With null bytes, which no argument can hold: how many words follow, then they.
    writes = 'printf \'%s\\0\' $(($# + 1)) "${0##*/}" "$@"'
    bodies = dict.fromkeys(PYTHONS, f"{writes} >>'{record}'") | STAND_INS
    for name, body in bodies.items():
        write_text(folder / name, f"#!{shutil.which('bash')}\n{body}\n")
        (folder / name).chmod(0o755)
    for name in HARMLESS:
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
