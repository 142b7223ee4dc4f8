"""What can be said of a printed command without running it: programs, subcommands, options, files, Hydra overrides."""

import importlib
import importlib.metadata
import importlib.util
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

import typer
from verl.utils.config import omega_conf_to_dataclass

from tests.claims.documents import ROOT, Command, Wrong
from tests.composition import composition
from tests.recipes.shell import Machine
from verl_clipx.cli import app
from verl_clipx.papers.tables.definition import load_table
from verl_clipx.papers.tables.presets import preset_names
from verl_clipx.papers.tasks.catalog import definition_named, definitions
from verl_clipx.run.listing import describe_methods

ELLIPSIS = "…"
# They change the machine, or need another one.
NEVER_RUN = frozenset({"pip", "git", "docker", "sbatch", "sky", "srun", "torchrun"})
PROGRAMS = frozenset({"clipx", "python", "pytest", "bash", *NEVER_RUN})

_FOLDERS = ("benchmarks", "configs", "docker", "docs", "recipes", "scripts", "tests")
_OVERRIDE = re.compile(r"\+?[a-z][\w./]*=.*", re.DOTALL)


def is_override(command: Command) -> bool:
    """Whether a line is a Hydra override to add to verl's command."""
    return len(command.words) == 1 and bool(_OVERRIDE.fullmatch(command.words[0]))


def wants_mark(command: Command) -> bool | None:
    """Whether a command's line has to say what it needs, since no test can run it; None where it may.

    A mark on a command that a test can run would only hide it.
    """
    if is_override(command):
        return False
    program, *rest = command.words
    if program == "clipx":
        return _clipx_wants_mark(rest)
    if program == "bash":
        return not (_is_recipe(rest[0]) and command.variables.get("DRY_RUN") == "1")
    if program == "python" and rest[:2] in (["-m", "verl.trainer.main_ppo"], ["-m", "pytest"]):
        return None
    if program == "python":
        # A policy's warm start takes minutes.
        return rest[0].startswith("benchmarks/") or any(word.endswith(".policy") for word in rest[:2])
    return program in NEVER_RUN


def _clipx_wants_mark(words: list[str]) -> bool | None:
    if words[:2] == ["eval", "run"]:
        # It launches verl, which takes a minute even for a small policy on a CPU.
        return True
    if words[:2] == ["data", "build"] and any(definitions()[word].hub for word in words if word in definitions()):
        # Somebody has to fetch a local copy too, unless it is small enough for a test to make.
        return None if "--from" in words else True
    return False


def check(command: Command, *, complete: bool = True) -> None:
    """Checks a command without running it.

    Args:
        command: its variables replaced.
        complete: nothing may be missing; otherwise arguments may be, as in a sentence on `clipx eval run`.

    Raises:
        Wrong: an unknown program, subcommand, option, file, variable, group or key.
    """
    if is_override(command):
        return check_overrides(command.words, command.variables)
    program, *rest = command.words
    if complete and program == "clipx" and ELLIPSIS in rest:
        raise Wrong("clipx …: print the whole command")
    rest = [word for word in rest if word != ELLIPSIS]
    _check_files(rest)
    if program == "clipx":
        _check_clipx(rest, complete)
    elif program == "python":
        _check_python(rest, command.variables, complete)
    elif program == "pytest":
        _check_pytest(rest)
    elif program == "bash":
        _check_script(rest, command.variables, complete)
    elif program == "sbatch":
        _check_script([word for word in rest if not word.startswith("--")], command.variables, complete)
    elif program == "srun":
        check(Command(command.text, command.line, tuple(rest), {}), complete=complete)
    elif program == "pip":
        _check_extras(rest)
    elif program not in PROGRAMS:
        raise Wrong(f"{program}: the tests know no such program")


def check_overrides(overrides: Sequence[str], variables: Mapping[str, str]) -> None:
    """Composes overrides on verl's own main configuration and reads the actor's part as verl's driver does.

    Args:
        overrides: as printed; those whose value is an ellipsis are left out.
        variables: of the environment.

    Raises:
        Wrong: what Hydra, verl or the plugin said.
    """
    given = [override for override in overrides if not override.endswith(f"={ELLIPSIS}")]
    # Without the address verl would start Ray to name its dashboard.
    with mock.patch.dict(os.environ, {"RAY_ADDRESS": "127.0.0.1:6379", **variables}):
        try:
            config = composition(*given)
            omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        except Exception as error:
            raise Wrong(f"does not compose: {error}") from error


def typer_module(words: list[str]) -> typer.Typer:
    """The command line of `python -m MODULE` or `python FILE`.

    Args:
        words: what stands after `python`, with the arguments.
    """
    if words[0] == "-m":
        package = importlib.util.find_spec(words[1]).submodule_search_locations
        main = importlib.import_module(f"{words[1]}.__main__" if package else words[1]).main
    else:
        # Last, unlike Python: a script's neighbours, such as benchmarks/trace.py, must not hide the standard library's.
        with mock.patch.object(sys, "path", [*sys.path, str(Path(words[0]).parent)]):
            main = runpy.run_path(words[0], run_name="documented")["main"]
    command_line = typer.Typer(add_completion=False)
    command_line.command()(main)
    return command_line


def _check_clipx(words: list[str], complete: bool) -> None:
    command, path = typer.main.get_command(app), "clipx"
    while hasattr(command, "commands") and words:
        if words[0] not in command.commands:
            raise Wrong(f"{path} has no {words[0]}; it has {', '.join(command.commands)}")
        command, path, words = command.commands[words[0]], f"{path} {words[0]}", words[1:]
    if not hasattr(command, "commands"):
        _parse(command, path, words, complete)
    elif complete:
        raise Wrong(f"{path} needs a subcommand: {', '.join(command.commands)}")


def _parse(command, path: str, words: list[str], complete: bool) -> None:
    try:
        # The parser's messages are made for a terminal; their class names are the same in click and in typer's copy.
        given = command.make_context(path, list(words)).params
    except Exception as error:
        if type(error).__name__ == "MissingParameter" and not complete:
            return
        raise Wrong(f"{path}: {error.format_message() if hasattr(error, 'format_message') else error}") from None
    name = given.get("name")
    # In capitals it stands for any.
    if name and not name.isupper():
        _check_name(path, name, given.get("prompt"))


def _check_name(path: str, name: str, prompt: str | None) -> None:
    try:
        if path.startswith("clipx data"):
            prompts = definition_named(name).prompts
            if prompt and prompt not in prompts:
                raise Wrong(f"--prompt {prompt}: {name} has {', '.join(prompts)}")
        elif path.startswith("clipx table"):
            load_table(name)
        elif path == "clipx methods":
            describe_methods(name)
        elif path.startswith("clipx recipe") and name not in preset_names():
            raise Wrong(f"{name}: no such preset")
    except ValueError as error:
        raise Wrong(str(error)) from None


# By tests/claims/test_architecture.py.
RUN_ELSEWHERE = (["scripts/draw_architecture.py"], ["scripts/demo.py", "page"], ["scripts/demo.py", "runs"])


def _check_python(words: list[str], variables: dict[str, str], complete: bool) -> None:
    if words[:2] == ["-m", "verl.trainer.main_ppo"]:
        # Hydra's own option, and what it is to show.
        check_overrides([word for word in words[2:] if word not in ("--cfg", "job")], variables)
    elif words[:2] == ["-m", "pytest"]:
        _check_pytest(words[2:])
    elif words[:2] in RUN_ELSEWHERE or words[:1] in RUN_ELSEWHERE:
        pass
    elif words[0] == "-m" and words[1].startswith("verl_clipx"):
        _parse(typer.main.get_command(typer_module(words)), words[1], words[2:], complete)
    elif words[0].startswith("benchmarks/"):
        with mock.patch.dict(os.environ):
            benchmark = typer_module([str(ROOT / words[0])])
        _parse(typer.main.get_command(benchmark), words[0], words[1:], complete)
    elif words[0] == "-c":
        try:
            compile(words[1], "-c", "exec")
        except SyntaxError as error:
            raise Wrong(str(error)) from None
    elif complete or words[:2] not in (["-m", "build"], ["-m", "venv"]):
        raise Wrong(f"python {' '.join(words)}: the tests know no such command")


def _check_pytest(words: list[str]) -> None:
    """A test's command is checked by its file: the suite itself runs what is in it."""
    files = [word for word in words if word.startswith("tests/")]
    if "-k" in words:
        name = words[words.index("-k") + 1]
        if not any(f"def {name}" in (ROOT / file).read_text() for file in files):
            raise Wrong(f"-k {name}: no such test in {', '.join(files)}")


def _check_files(words: list[str]) -> None:
    for word in words:
        path = word.rpartition("=")[2]
        if path.split("/")[0] in _FOLDERS and "/" in path and not _exists(path):
            raise Wrong(f"{path}: no such file")


def _exists(path: str) -> bool:
    # A path of a page may stand for several: docs/a*.md, run_{3b,7b}.sh.
    return bool(list(ROOT.glob(re.sub(r"\{[^}]*\}", "*", path))))


def _check_extras(words: list[str]) -> None:
    offered = importlib.metadata.metadata("verl-clipx").get_all("Provides-Extra")
    for extra in re.findall(r"(?:verl-clipx|\.)\[(\w+)\]", " ".join(words)):
        if extra not in offered:
            raise Wrong(f"[{extra}]: the extras are {', '.join(offered)}")


def _is_recipe(path: str) -> bool:
    return (ROOT / path).is_file() and "common.sh" in (ROOT / path).read_text()


def _check_script(words: list[str], variables: dict[str, str], complete: bool) -> None:
    script, *rest = words
    if not (ROOT / script).is_file():
        raise Wrong(f"{script}: no such file")
    text = (ROOT / script).read_text()
    known = text + (ROOT / "recipes/common.sh").read_text() if _is_recipe(script) else text
    # Python itself reads PYTHONPATH.
    for word in [*({*variables} - {"PYTHONPATH"}), *(word for word in rest if word.startswith("--"))]:
        if not re.search(rf"(?<![\w-]){re.escape(word)}\b", known):
            raise Wrong(f"{script} has no {word}")
    if script.startswith("recipes/cluster/"):
        payload = [word for word in rest if word not in ("start", "run", "stop")]
        given = dict(word.split("=", 1) for word in payload if re.match(r"[A-Z_]+=", word))
        _check_payload([word for word in payload if word.partition("=")[0] not in given], given, complete)
    elif _is_recipe(script):
        _dry_run(script, rest, variables)
    elif script == "scripts/quickstart.sh":
        _check_quickstart(rest)


def _check_payload(words: list[str], variables: dict[str, str], complete: bool) -> None:
    if words:
        _check_script(words, variables, complete)
    elif complete:
        raise Wrong("no recipe for the cluster")


def _dry_run(recipe: str, words: list[str], variables: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        done = Machine(Path(folder)).run(ROOT / recipe, *words, **{**variables, "DRY_RUN": "1"})
    if done.returncode or "+recipe=" not in done.stdout:
        raise Wrong(f"{recipe}: {done.stderr.strip().splitlines()[-1]}")


def _check_quickstart(words: list[str]) -> None:
    # A word in capitals stands for any.
    if words and not words[0].isupper():
        check_overrides([f"+clipx={words[0]}", *words[1:]], {})
