"""Every command in a code block of README.md and docs runs as printed, or says at the end of its line what it needs.

Covers: `clipx` commands and `python -m verl_clipx…` run in this process, a page's commands in order in one folder; verl's
own command and printed overrides are composed and read as verl's driver reads them; recipes make a dry run; Python
blocks run, YAML is parsed; marked commands and inline code have existing subcommands, options, files and variables; a
page that breaks any of these rules fails.

Not covered: what the output says, beyond that there is some; commands marked `# needs: …`; the fresh interpreters and the
Ray worker of `clipx doctor`, for which this process stands in (tests/test_doctor.py, tests/end_to_end); whether a
`python -m pytest` command passes, which is its own test's matter.
"""

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner
from verl.trainer.ppo import core_algos

from tests.claims.checks import (
    ELLIPSIS,
    PROGRAMS,
    check,
    check_overrides,
    is_override,
    must_be_marked,
    typer_module,
)
from tests.claims.documents import (
    PAGES,
    ROOT,
    Block,
    Command,
    Wrong,
    blocks_of,
    command_of,
    commands_of,
    inline_code_of,
)
from tests.claims.preparation import PREPARATIONS
from verl_clipx import doctor
from verl_clipx.cli import app
from verl_clipx.training.methods import METHODS

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder for one page, with what its commands change in this process put back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(doctor, "run_python", in_this_process)
    environment, modules, methods = dict(os.environ), set(sys.modules), dict(METHODS)
    losses = dict(core_algos.POLICY_LOSS_REGISTRY)
    yield tmp_path
    os.environ.clear()
    os.environ.update(environment)
    for registry, before in ((METHODS, methods), (core_algos.POLICY_LOSS_REGISTRY, losses)):
        for name in set(registry) - set(before):
            del registry[name]
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def in_this_process(code: str, seconds: int) -> tuple[str, str]:
    """Stands in for doctor's fresh interpreters, which take 20 s, and its Ray worker."""
    return printed_by(doctor.REGISTERED if "ray.init" in code else code), ""


def printed_by(code: str) -> str:
    """What Python code prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(code, {})
    return output.getvalue()


def mistakes_of(page: str) -> list[str]:
    """Runs all that a page prints, in the working folder.

    Args:
        page: its text.

    Returns:
        What does not run, with the line.
    """
    try:
        blocks = blocks_of(page)
    except Wrong as error:
        return [str(error)]
    return [mistake for block in blocks for mistake in RUNNERS[block.language](block)]


def run_bash(block: Block) -> list[str]:
    """Runs or checks the commands of a block."""
    try:
        commands = commands_of(block)
    except Wrong as error:
        return [str(error)]
    mistakes = []
    for command in commands:
        try:
            known = with_variables(command)
            if must_be_marked(known) and not known.needs:
                raise Wrong("no test can run this; end the line with '# needs: REASON'")
            check(known)
            if not known.needs:
                run(known)
        except Wrong as error:
            mistakes.append(f"line {command.line}: {command.text}: {error}")
    return mistakes


def with_variables(command: Command) -> Command:
    """The command with `$NAME` and `~` replaced."""

    def value(match: re.Match) -> str:
        if match[1] not in os.environ:
            raise Wrong(f"${match[1]} is not set by this page")
        return os.environ[match[1]]

    words = [os.path.expanduser(re.sub(r"\$\{?(\w+)\}?", value, word)) for word in command.words]
    return Command(command.text, command.line, tuple(words), command.variables, command.needs, command.stored_in)


def run(command: Command) -> None:
    """Runs a command that is no launch: those are composed or make a dry run in `check`.

    Raises:
        Wrong: it fails, or prints nothing.
    """
    if is_override(command):
        return
    program, *words = command.words
    if program == "clipx":
        output = output_of(app, words, command.variables)
    elif program == "python" and words[0] == "-c":
        output = printed_by(words[1])
    elif program == "python" and words[0] == "-m" and words[1].startswith("verl_clipx"):
        output = output_of(typer_module(words), words[2:], command.variables)
    else:
        return
    if not output.strip():
        raise Wrong("prints nothing")
    if command.stored_in:
        os.environ[command.stored_in] = output.strip()


def output_of(command_line, words: list[str], variables: dict[str, str]) -> str:
    """What a command prints; it must end with exit code 0."""
    result = CliRunner(env={"COLUMNS": "200", **variables}).invoke(command_line, words)
    if result.exit_code:
        raise Wrong(f"exit code {result.exit_code}: {result.output[-600:]} {result.exception!r}")
    return result.output


def run_python(block: Block) -> list[str]:
    """Runs a block; one that begins with `# name.py` is that file from then on."""
    named = re.match(r"# (\w+\.py)\n", block.text)
    file = Path(named[1] if named else f"line_{block.line}.py")
    file.write_text(block.text)
    try:
        if named:
            __import__(file.stem)
        else:
            found = runpy.run_path(str(file))
            for name in found:
                if name.startswith("test_"):
                    found[name]()
    except Exception as error:
        return [f"line {block.line}: {error!r}"]
    return []


def run_yaml(block: Block) -> list[str]:
    """Parses a block."""
    try:
        list(yaml.safe_load_all(block.text))
    except yaml.YAMLError as error:
        return [f"line {block.line}: {error}"]
    return []


def refuse_commands(block: Block) -> list[str]:
    """A block without a language shows output or files, no commands."""
    first_words = [(number, line.split()) for number, line in enumerate(block.text.splitlines(), start=block.line)]
    return [
        f"line {number}: a command in a block without a language; make it ```bash"
        for number, words in first_words
        if words and words[0].removeprefix("$") in {*PROGRAMS, "python3"}
    ]


RUNNERS = {"bash": run_bash, "python": run_python, "yaml": run_yaml, "": refuse_commands}


@pytest.mark.parametrize("name", NAMES)
def test_blocks_run_as_printed(name, folder):
    for prepare in PREPARATIONS.get(name, ()):
        os.environ.update(prepare(folder) or {})
    assert mistakes_of((ROOT / name).read_text()) == []


@pytest.mark.parametrize("name", NAMES)
def test_inline_code_names_what_there_is(name):
    mistakes = []
    for span in inline_code_of((ROOT / name).read_text()):
        if not re.match(rf"([A-Z_]+=\S* )*({'|'.join(PROGRAMS)}) ", span):
            continue
        try:
            check(command_of(span), complete=False)
        except Wrong as error:
            mistakes.append(f"{span}: {error}")
    assert mistakes == []
