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

# The first word of the command that a launcher starts, in case no `--` marks it. The words before it are the launcher's
# own options and their values.
STARTS = re.compile(r"(?:\S*/)?(?:python[\d.]*|bash|sh|env|uv|torchrun|conda|clipx)|\S+\.(?:sh|py)")
# The first words of launchers. What they start sees the same paths as here.
LAUNCHERS = (("srun",), ("salloc",), ("ray", "job", "submit"))
LAUNCHERS += tuple((program, verb) for program in ("apptainer", "singularity") for verb in ("exec", "run"))
# What these start sees other paths and packages.
CONTAINERS = (("docker", "run"), ("docker", "exec"), ("docker", "compose"), ("podman", "run"), ("podman", "exec"))
# An environment that brings the plugin has the plugin's name in its text, or in a file or a folder that it names.
PLUGIN = re.compile(r"clipx", re.IGNORECASE)
FILES_OF_ENVIRONMENT = re.compile(r"""(?:working_dir|pip|uv|conda)["']?\s*:\s*["']?([^"'\s,}\[{]+)""")


def payload_of(program: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that a launcher would start; empty if it starts none that runs here."""
    if program == "sbatch":
        return payload_of_sbatch(arguments)
    if not any(launcher == (program, *arguments)[: len(launcher)] for launcher in LAUNCHERS):
        return []
    return started_by(arguments)


def started_by(arguments: Sequence[str]) -> list[str]:
    """Return the command in a launcher's arguments: from the first word that begins one on; empty if no word does."""
    for index, argument in enumerate(arguments):
        if argument == "--":
            return [*arguments[index + 1 :]]
        if STARTS.fullmatch(argument):
            return [*arguments[index:]]
    return []


def payload_of_sbatch(arguments: Sequence[str]) -> list[str]:
    """Return the command of the script that sbatch would start, by the interpreter that its first line names."""
    wrapped = slurm.options_of(arguments).get("wrap")
    if wrapped:
        return ["sh", "-c", wrapped]
    script_index = slurm.script_of(arguments)
    if script_index is None:
        return []
    text = Path(arguments[script_index]).read_text(errors="replace")
    return [*interpreter_of(text), *arguments[script_index:]]


def interpreter_of(script: str) -> list[str]:
    """Return the program, with its options, that runs a script.

    Args:
        script: the script's text, whose first line names the program.
    """
    words = script.partition("\n")[0].removeprefix("#!").split()
    if not words:
        return ["bash"]
    program, *options = words
    name = Path(program).name
    if name not in ("bash", "sh"):
        return words
    # A login shell would set PATH anew, and lose the stand-ins.
    kept = []
    for option in options:
        if option.startswith("-") and not option.startswith("--"):
            option = option.replace("l", "")
        if option not in ("-", "--login"):
            kept.append(option)
    return [name, *kept]


def lacks_plugin(arguments: Sequence[str]) -> bool:
    """Return whether nothing that `ray job submit` gives a job has the plugin in it.

    Args:
        arguments: those after `ray job submit`.
    """
    options = slurm.options_of(arguments)
    environments = [options.get("runtime-env-json", ""), text_of(options.get("runtime-env", ""))]
    command = " ".join(started_by(arguments))
    texts = [*environments, re.sub(r"\+?clipx[.=/]\S*", "", command)]
    texts += [text_of(name) for text in environments for name in FILES_OF_ENVIRONMENT.findall(text)]
    texts.append(text_of(options.get("working-dir", "")))
    return not any(map(PLUGIN.search, texts))


def text_of(name: str) -> str:
    """Return a file's text or the names in a folder; empty if there is neither."""
    path = Path(name)
    try:
        if not name:
            return ""
        return " ".join(os.listdir(path)) if path.is_dir() else path.read_text(errors="replace")
    except OSError:
        return ""


def main(record_file: str, program: str, *arguments: str) -> None:
    """Record a command line. Then print the program's answer, or run what the program would start, or do nothing.

    What the program would start takes the place of this process.

    Args:
        record_file: in the folder that `explain.py` made for the stand-ins; further files are written beside it.
        program: the program's name.
        arguments: those that it was called with.
    """
    folder = Path(record_file).parent
    answer = slurm.reply(program, [*arguments], os.environ)
    if program == "getent" and not answer:
        # No node is made up, so that the real program answers. This call does not return.
        exec_real_program(folder / "programs", program, arguments)
    note(Path(record_file), program, arguments)
    if answer:
        print(answer)
        return
    payload = [*payload_of(program, arguments)]
    if program == "sbatch":
        if slurm.MADE_UP in os.environ:
            # A job that submits the next one, or itself again, would do so without an end.
            return
        if not payload:
            payload = payload_of_standard_input(folder)
        os.environ |= slurm.variables_of(text_of_script(payload), arguments)
    if not payload:
        return
    is_ray_job = (program, *arguments[:2]) == ("ray", "job", "submit")
    if is_ray_job and lacks_plugin(arguments[2:]):
        # explain.py looks only whether this file is empty.
        (folder / "jobs").write_text(f"{shlex.join([program, *arguments[:2]])}\n")
    note(folder / "started", program, arguments)
    os.execvp(payload[0], payload)


def text_of_script(payload: Sequence[str]) -> str:
    """Return the text of the script that a command runs; empty if it runs none."""
    script_index = slurm.script_of(payload)
    if script_index is None:
        return ""
    return Path(payload[script_index]).read_text(errors="replace")


def note(file: Path, program: str, arguments: Sequence[str]) -> None:
    """Append a command line to a file."""
    with file.open("a", errors="surrogateescape") as record:
        record.write(shlex.join([program, *arguments]) + "\n")


def exec_real_program(folder: Path, program: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the program that it stands for, the first on PATH outside the folder of the stand-ins.

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
    """Return the command of a script that sbatch gets by standard input, and keep the script; empty without one."""
    text = "" if sys.stdin.isatty() else sys.stdin.read()
    if not text.startswith("#!"):
        return []
    script = folder / f"sbatch-{os.getpid()}.sh"
    script.write_text(text)
    return [*interpreter_of(text), str(script)]


if __name__ == "__main__":
    main(*sys.argv[1:])
