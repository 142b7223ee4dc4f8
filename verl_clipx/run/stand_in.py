"""Runs in place of a program while a command is explained: `stand_in.py RECORD PROGRAM ARGUMENT …`.

It appends the command line to RECORD. What `ray job submit`, srun or apptainer would start, and the script of sbatch,
then runs here, because it leads to verl's configuration. Programs that a script asks about a Slurm job answer for one
that is made up (`slurm.py`). It does nothing else.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":
    # Python is started without the packages of any environment.
    sys.path.append(str(Path(__file__).parents[2]))

from verl_clipx.run import slurm

# Programs with which what a launcher starts begins, if no -- says where; options and their values come before.
STARTS = re.compile(r"(?:\S*/)?(?:python[\d.]*|bash|sh|env|uv|torchrun|conda|clipx)|\S+\.(?:sh|py)")
# The words with which launchers begin; what they start sees the same paths as here.
LAUNCHERS = (("srun",), ("salloc",), ("ray", "job", "submit"))
LAUNCHERS += tuple((program, verb) for program in ("apptainer", "singularity") for verb in ("exec", "run"))
# These start something among other paths and packages.
CONTAINERS = (("docker", "run"), ("docker", "exec"), ("docker", "compose"), ("podman", "run"), ("podman", "exec"))
# What of a job's environment brings the plugin has its name in the text, or names a folder with it.
PLUGIN = re.compile(r"clipx", re.IGNORECASE)
FILES_OF_ENVIRONMENT = re.compile(r"""(?:working_dir|pip|uv|conda)["']?\s*:\s*["']?([^"'\s,}\[{]+)""")


def payload_of(program: str, arguments: Sequence[str]) -> list[str]:
    """The command that a launcher would start; empty if it starts none that runs here."""
    if program == "sbatch":
        return payload_of_sbatch(arguments)
    if not any(launcher == (program, *arguments)[: len(launcher)] for launcher in LAUNCHERS):
        return []
    return started_by(arguments)


def started_by(arguments: Sequence[str]) -> list[str]:
    """Returns the command in a launcher's arguments, from the first that begins one on; empty if none does."""
    for place, argument in enumerate(arguments):
        if argument == "--":
            return [*arguments[place + 1 :]]
        if STARTS.fullmatch(argument):
            return [*arguments[place:]]
    return []


def payload_of_sbatch(arguments: Sequence[str]) -> list[str]:
    """The script that sbatch would start, with its arguments, by the interpreter that its first line names."""
    wrapped = slurm.options_of(arguments).get("wrap")
    if wrapped:
        return ["sh", "-c", wrapped]
    place = slurm.script_of(arguments)
    if place is None:
        return []
    first = Path(arguments[place]).read_text(errors="replace").partition("\n")[0]
    interpreter = first.removeprefix("#!").split() or ["bash"]
    if Path(interpreter[0]).name in ("bash", "sh"):
        interpreter = [Path(interpreter[0]).name]
    return [*interpreter, *arguments[place:]]


def lacks_plugin(arguments: Sequence[str]) -> bool:
    """Return whether nothing that `ray job submit` gives a job has the plugin in it.

    Args:
        arguments: those behind the program's name.
    """
    options = slurm.options_of(arguments)
    environments = [options.get("runtime-env-json", ""), text_of(options.get("runtime-env", ""))]
    command = " ".join(started_by(arguments))
    texts = [*environments, re.sub(r"\+?clipx[.=/]\S*", "", command)]
    texts += [text_of(name) for text in environments for name in FILES_OF_ENVIRONMENT.findall(text)]
    texts.append(text_of(options.get("working-dir", "")))
    return not any(map(PLUGIN.search, texts))


def text_of(name: str) -> str:
    """A file's text or the names in a folder; empty if there is neither."""
    path = Path(name)
    try:
        if not name:
            return ""
        return " ".join(os.listdir(path)) if path.is_dir() else path.read_text(errors="replace")
    except OSError:
        return ""


def main(record: str, program: str, *arguments: str) -> None:
    """Records a command line, and answers it, or becomes its payload if it has one."""
    folder = Path(record).parent
    answer = slurm.reply(program, [*arguments], os.environ)
    if program == "getent" and not answer:
        exec_real_program(folder / "programs", program, arguments)
    note(Path(record), program, arguments)
    if answer:
        print(answer)
        return
    payload = [*payload_of(program, arguments)]
    if program == "sbatch":
        if slurm.MADE_UP in os.environ:
            # A job that submits the next one, or itself again, would do so without an end.
            return
        payload = payload or payload_of_standard_input(folder)
        place = slurm.script_of(payload)
        script = "" if place is None else Path(payload[place]).read_text(errors="replace")
        os.environ |= slurm.variables_of(script, arguments)
    if not payload:
        return
    if (program, *arguments[:2]) == ("ray", "job", "submit") and lacks_plugin(arguments[2:]):
        (folder / "jobs").write_text(f"{shlex.join([program, *arguments[:2]])}\n")
    note(folder / "started", program, arguments)
    os.execvp(payload[0], payload)


def note(file: Path, program: str, arguments: Sequence[str]) -> None:
    """Append a command line to a file."""
    with file.open("a", errors="surrogateescape") as record:
        record.write(shlex.join([program, *arguments]) + "\n")


def exec_real_program(folder: Path, program: str, arguments: Sequence[str]) -> NoReturn:
    """Becomes the program that this one stands for: the first of its name on PATH outside the folder of the stand-ins.

    Args:
        folder: the folder of the stand-ins.
        program: the program's name.
        arguments: those that it was called with.

    Raises:
        SystemExit: there is no such program; with 127, as a shell ends where a command is not found.
    """
    others = [part for part in os.environ["PATH"].split(os.pathsep) if part != str(folder)]
    real = shutil.which(program, path=os.pathsep.join(others))
    if real is None:
        raise SystemExit(127)
    os.execv(real, [program, *arguments])


def payload_of_standard_input(folder: Path) -> list[str]:
    """The script that sbatch gets by its standard input, kept in a file; empty if there is none."""
    text = "" if sys.stdin.isatty() else sys.stdin.read()
    if not text.startswith("#!"):
        return []
    script = folder / f"sbatch-{os.getpid()}.sh"
    script.write_text(text)
    return ["bash", str(script)]


if __name__ == "__main__":
    main(*sys.argv[1:])
