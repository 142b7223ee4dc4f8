"""Runs in place of a program while a command is explained: `stand_in.py RECORD PROGRAM ARGUMENT …`.

It appends the command line to RECORD. Then it runs on this machine what `ray job submit`, srun, salloc or apptainer
would start, or the script that sbatch would start, because that leads to verl's configuration. In place of a program
that a script asks about its Slurm job, it answers for a made-up job (`slurm.py`). It does nothing else.
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

# The first word of the command that a launcher starts, if no `--` stands before that command. The words before it are
# the launcher's own options and their values.
STARTS = re.compile(r"(?:\S*/)?(?:python[\d.]*|bash|sh|env|uv|torchrun|conda|clipx)|\S+\.(?:sh|py)")
# The first words of the launchers whose command runs here, because it would see the same paths there.
LAUNCHERS = (
    ("srun",),
    ("salloc",),
    ("ray", "job", "submit"),
    ("apptainer", "exec"),
    ("apptainer", "run"),
    ("singularity", "exec"),
    ("singularity", "run"),
)
# The first words of the launchers whose command does not run here, because it would see other paths and packages there.
CONTAINERS = (("docker", "run"), ("docker", "exec"), ("docker", "compose"), ("podman", "run"), ("podman", "exec"))
# A runtime environment of Ray's with the plugin names it in its own text, or in a file or a folder that it refers to.
PLUGIN = re.compile(r"clipx", re.IGNORECASE)
FILES_OF_ENVIRONMENT = re.compile(r"""(?:working_dir|pip|uv|conda)["']?\s*:\s*["']?([^"'\s,}\[{]+)""")


def payload_of(program: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that a program would start and that runs here; empty if there is none.

    Args:
        program: the program's name.
        arguments: those that it was called with.
    """
    if program == "sbatch":
        return payload_of_sbatch(arguments)
    if not any(launcher == (program, *arguments)[: len(launcher)] for launcher in LAUNCHERS):
        return []
    return find_launched_command(arguments)


def find_launched_command(arguments: Sequence[str]) -> list[str]:
    """Return the command in a launcher's arguments; empty if no word begins one.

    The command begins after `--`, or at the first word that fits `STARTS`, whichever comes first. A word that begins
    with - is an option of the launcher's.
    """
    for index, argument in enumerate(arguments):
        if argument == "--":
            return list(arguments[index + 1 :])
        if not argument.startswith("-") and STARTS.fullmatch(argument):
            return list(arguments[index:])
    return []


def payload_of_sbatch(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs what sbatch would start: its option --wrap, or a script with its interpreter.

    Returns:
        The words of the command; empty if there is neither.
    """
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
    # An override of the plugin's, such as +clipx=acpo, does not bring the plugin.
    command = re.sub(r"\+?clipx[.=/]\S*", "", " ".join(find_launched_command(arguments)))
    texts = [*environments, command]
    texts += [text_of(name) for text in environments for name in FILES_OF_ENVIRONMENT.findall(text)]
    texts.append(text_of(options.get("working-dir", "")))
    return not any(map(PLUGIN.search, texts))


def text_of(path_text: str) -> str:
    """Return the text of a file, or the names in a folder; empty if there is neither, or no path is given."""
    path = Path(path_text)
    try:
        if not path_text:
            return ""
        return " ".join(os.listdir(path)) if path.is_dir() else path.read_text(errors="replace")
    except OSError:
        return ""


def main(record_file: str, program: str, *arguments: str) -> None:
    """Record a command line. Then print the program's answer, or run what the program would start, or do nothing.

    What is run takes the place of this process, so that the call then does not return.

    Args:
        record_file: the file that gets the command line. Other files of `explain.py` are in the same folder.
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
    payload = payload_of(program, arguments)
    if program == "sbatch":
        if slurm.MADE_UP in os.environ:
            # A made-up job that submits the next job, or itself again, would never end.
            return
        if not payload:
            payload = payload_of_standard_input(folder)
        os.environ |= slurm.variables_of(text_of_script(payload), arguments)
    if not payload:
        return
    is_ray_job = (program, *arguments[:2]) == ("ray", "job", "submit")
    if is_ray_job and lacks_plugin(arguments[2:]):
        # explain.py only checks whether this file is empty.
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
