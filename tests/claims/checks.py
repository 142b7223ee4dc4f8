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
from verl_clipx.losses.groups import group_names
from verl_clipx.papers.tables.definition import table_names
from verl_clipx.papers.tables.presets import preset_names
from verl_clipx.papers.tasks.catalog import definitions

ELLIPSIS = "…"
# They change the machine, or need another one.
NEVER_RUN = ("pip", "uv", "git", "docker", "sbatch", "sky", "srun", "torchrun")
PROGRAMS = ("clipx", "python", "pytest", "bash", *NEVER_RUN)
# By tests/claims/test_architecture.py and tests/analysis/demo.
RUN_ELSEWHERE = r"scripts/(draw_architecture|demo)\.py"

# What the NAME of a subcommand may be.
_NAMES = {
    "papers data": definitions,
    "papers table": table_names,
    "papers recipe": preset_names,
    "methods": group_names,
}
_FOLDERS = ("benchmarks", "configs", "docker", "docs", "recipes", "scripts", "tests")
_HUB = "|".join(name for name, definition in definitions().items() if definition.hub)
# By how a command begins, whether its block has to say what it needs, since no test can run it; None where it may.
_WANTS_MARK = (
    # It launches verl, which takes a minute even for a small policy on a CPU.
    (r"clipx papers eval run ", True),
    # Somebody has to fetch a local copy too, unless it is small enough for a test to make.
    (rf"clipx papers data build ({_HUB}) .*--from ", None),
    (rf"clipx papers data build ({_HUB}) ", True),
    (r"python -m (verl\.trainer\.main_ppo|pytest) ", None),
    # A policy's warm start takes minutes.
    (r"python (benchmarks/|(-m )?\S+\.policy )", True),
    (rf"({'|'.join(NEVER_RUN)}) ", True),
)


def is_override(command: Command) -> bool:
    """Whether a line is a Hydra override to add to verl's command."""
    return len(command.words) == 1 and bool(re.fullmatch(r"(?s)\+?[a-z][\w./]*=.*", command.words[0]))


def wants_mark(command: Command) -> bool | None:
    """What _WANTS_MARK says of a command: a mark on one that a test can run would only hide it."""
    program, *rest = command.words
    if program == "bash":
        return not (_is_recipe(rest[0]) and command.variables.get("DRY_RUN") == "1")
    line = " ".join([*command.words, ""])
    return next((wanted for beginning, wanted in _WANTS_MARK if re.match(beginning, line)), False)


def check(command: Command, *, complete: bool = True) -> None:
    """Raises Wrong for an unknown program, subcommand, option, file, variable, group or key of a command.

    Its variables are replaced. Where it is not complete, arguments may be missing, as in a sentence on
    `clipx papers data`.
    """
    if is_override(command):
        return check_overrides(command.words, command.variables)
    program, *rest = command.words
    if complete and program == "clipx" and ELLIPSIS in rest:
        raise Wrong("clipx …: print the whole command")
    words = [word for word in rest if word != ELLIPSIS]
    check_paths(words)
    check_program(program, words, command.variables, complete)


def check_paths(words: Sequence[str]) -> None:
    """Raises Wrong for a path of this repository, as a word or as the value of an option, at which there is no file."""
    for path in (word.rpartition("=")[2] for word in words):
        # A path of a page may stand for several: docs/a*.md, run_{3b,7b}.sh.
        pattern = re.sub(r"\{[^}]*\}", "*", path)
        if path.split("/")[0] in _FOLDERS and "/" in path and not any(ROOT.glob(pattern)):
            raise Wrong(f"{path}: no such file")


def check_program(program: str, words: list[str], variables: Mapping[str, str], complete: bool) -> None:
    """Raises Wrong for an unknown program, or for words after it that it doesn't take; as `check`."""
    if program == "clipx":
        _check_clipx(words, complete)
    elif program == "python":
        _check_python(words, variables, complete)
    elif program == "bash":
        _check_script(words, variables, complete)
    elif program == "sbatch":
        _check_script([word for word in words if word[:2] != "--"], variables, complete)
    elif program == "srun":
        check(Command(tuple(words), {}), complete=complete)
    elif program == "uv" and "python3" in words:
        _check_python(words[words.index("python3") + 1 :], variables, complete)
    elif program == "pip":
        check_extras(words)
    elif program not in PROGRAMS:
        raise Wrong(f"{program}: the tests know no such program")


def check_extras(words: Sequence[str]) -> None:
    """Raises Wrong for an extra of this package that it doesn't have."""
    offered = importlib.metadata.metadata("verl-clipx").get_all("Provides-Extra")
    if unknown := {*re.findall(r"(?:verl-clipx|\.)\[(\w+)\]", " ".join(words))} - {*offered}:
        raise Wrong(f"{unknown}: the extras are {', '.join(offered)}")


def check_overrides(overrides: Sequence[str], variables: Mapping[str, str]) -> None:
    """Composes printed overrides, but for ellipses, on verl's configuration and reads the actor as verl's driver does;
    Wrong with what Hydra, verl or the plugin said.
    """
    written_out = [override for override in overrides if not override.endswith(f"={ELLIPSIS}")]
    # Without the address verl would start Ray to name its dashboard.
    with mock.patch.dict(os.environ, {"RAY_ADDRESS": "127.0.0.1:6379", **variables}):
        try:
            config = composition(*written_out)
            omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        except Exception as error:
            raise Wrong(f"does not compose: {error}") from error


def typer_module(words: list[str]) -> typer.Typer:
    """The command line of `python -m MODULE` or `python FILE`, by what stands after `python`."""
    if words[0] == "-m":
        package = importlib.util.find_spec(words[1]).submodule_search_locations
        main = importlib.import_module(f"{words[1]}.__main__" if package else words[1]).main
    else:
        # Last, unlike Python: a script's neighbours must not hide the standard library's.
        with mock.patch.object(sys, "path", [*sys.path, str(Path(words[0]).parent)]):
            main = runpy.run_path(words[0], run_name="documented")["main"]
    command_line = typer.Typer(add_completion=False)
    command_line.command()(main)
    return command_line


def _check_clipx(words: list[str], complete: bool) -> None:
    command = typer.main.get_command(app)
    path = "clipx"
    while hasattr(command, "commands") and words:
        name, *words = words
        if name not in command.commands:
            raise Wrong(f"{path} has no {name}; it has {', '.join(command.commands)}")
        command = command.commands[name]
        path = f"{path} {name}"
    if not hasattr(command, "commands"):
        _parse(command, path, words, complete)
    elif complete:
        raise Wrong(f"{path} needs a subcommand: {', '.join(command.commands)}")


def _parse(command, path: str, words: list[str], complete: bool) -> None:
    try:
        # The parser's messages are made for a terminal; their class names are the same in click and in typer's copy.
        parameters = command.make_context(path, list(words)).params
    except Exception as error:
        if type(error).__name__ == "MissingParameter" and not complete:
            return
        raise Wrong(f"{path}: {error.format_message() if hasattr(error, 'format_message') else error}") from None
    words = path.removeprefix("clipx ").split()
    group = " ".join(words[:2]) if words[0] == "papers" else words[0]
    name = parameters.get("name")
    known = _NAMES[group]() if group in _NAMES else []
    # In capitals it stands for any; with a colon it is a user's own.
    if name and known and not name.isupper() and ":" not in name and name not in known:
        raise Wrong(f"{path} {name}: must be one of {', '.join(known)}")


def _check_python(words: list[str], variables: dict[str, str], complete: bool) -> None:
    line = " ".join(words)
    if words[:2] == ["-m", "verl.trainer.main_ppo"]:
        check_overrides(words[2:], variables)
    elif words[:2] == ["-m", "verl_clipx.cli"]:
        _check_clipx(words[2:], complete)
    elif re.match(r"benchmarks/|-m verl_clipx", line):
        if words[0] == "-m":
            program = words[:2]
            arguments = words[2:]
        else:
            program = [str(ROOT / words[0])]
            arguments = words[1:]
        with mock.patch.dict(os.environ):
            command = typer.main.get_command(typer_module(program))
        _parse(command, program[-1], arguments, complete)
    # A test's command is checked by its files: the suite itself runs what is in them.
    elif not re.match(rf"-m pytest |-c |{RUN_ELSEWHERE}", line):
        raise Wrong(f"python {line}: the tests know no such command")


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
        payload_variables = dict(word.split("=", 1) for word in payload if re.match(r"[A-Z_]+=", word))
        recipe = payload[len(payload_variables) :]
        if recipe:
            _check_script(recipe, payload_variables, complete)
        elif complete:
            raise Wrong("no recipe for the cluster")
    elif _is_recipe(script):
        with tempfile.TemporaryDirectory() as folder:
            result = Machine(Path(folder)).run(ROOT / script, *rest, **{**variables, "DRY_RUN": "1"})
        if result.returncode or "+recipe=" not in result.stdout:
            raise Wrong(f"{script}: {result.stderr.strip().splitlines()[-1]}")
    elif script == "scripts/quickstart.sh" and rest:
        check_overrides([f"+clipx={rest[0]}", *rest[1:]], {})
