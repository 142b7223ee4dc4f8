"""README.md and docs: each code block's commands run as printed in one folder, or a mark above it says what they need;
what is marked, and commands in inline code, have existing subcommands, options, files and variables; Hydra groups and
keys of ours in inline code exist. Not covered: other keys and files in inline code; what a mark, `<!-- needs: … -->`,
excuses; what an output says that no page shows; doctor's interpreters and Ray worker, for which
this process stands in (tests/training/test_doctor.py); links (`mkdocs build --strict`).
"""

import contextlib
import dataclasses
import io
import os
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml
from typer.testing import CliRunner
from verl.trainer.ppo import core_algos

from tests.claims.checks import PROGRAMS, check, typer_module, wants_mark
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
    is_as_printed,
)
from tests.claims.preparation import PREPARATIONS
from tests.hydra_main import MAIN_PPO, explained
from verl_clipx.cli import app
from verl_clipx.losses.configs_folder import configs_folder
from verl_clipx.losses.methods import METHODS
from verl_clipx.run.config import NODES, Node, parameters_of
from verl_clipx.training import doctor

# Inline code that is a command, with the variables before it.
COMMAND = re.compile(rf"""([A-Z_]+=("[^"]*"|\S)* )*({"|".join(PROGRAMS)}) """)

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.fixture
def folder(tmp_path, monkeypatch, limit_torch_to_one_thread):
    """A working folder for one page, with what its commands change in this process put back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(doctor, "run_python", in_this_process)
    modules = set(sys.modules)
    registries = (METHODS, core_algos.POLICY_LOSS_REGISTRY)
    with mock.patch.dict(os.environ), mock.patch.dict(registries[0]), mock.patch.dict(registries[1]):
        yield tmp_path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def in_this_process(code: str, seconds: int) -> tuple[str, str]:
    """Stands in for doctor's fresh interpreters, which take 20 s, and its Ray worker."""
    return printed_by(doctor.CHECK_HERE if "ray.init" in code else code), ""


def printed_by(code: str) -> str:
    """What Python code prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(code, {})
    return output.getvalue()


def mistakes_of(page: str) -> list[str]:
    """Runs all that a page's text prints, in the working folder, and returns what does not run, with the line."""
    try:
        blocks = blocks_of(page)
    except Wrong as error:
        return [str(error)]
    printed, names, mistakes = "", {}, []
    for block in blocks:
        if block.language not in RUNNERS:
            mistakes.append(f"line {block.line}: a block of {block.language!r}; the tests read {[*RUNNERS]}")
        elif not block.printed:
            mistakes_in_block, printed = RUNNERS[block.language](block, names)
            mistakes += [f"line {block.line}: {mistake}" for mistake in mistakes_in_block]
        elif not is_as_printed(block.text, printed):
            mistakes.append(f"line {block.line}: the block before prints\n{printed}")
    return mistakes


def run_bash(block: Block, names: dict) -> tuple[list[str], str]:
    """Runs or checks the commands of a block; returns what does not run, and what they print, as every runner does."""
    try:
        commands = commands_of(block)
    except Wrong as error:
        return [str(error)], ""
    excuses_nothing = block.needs and all(wants_mark(command) is False for command in commands)
    mistakes, outputs = ["runs in a test; take the mark away"] if excuses_nothing else [], []
    for command in commands:
        try:
            known = with_variables(command)
            wanted = wants_mark(known)
            if wanted and not block.needs:
                raise Wrong("no test can run this; put <!-- needs: REASON --> above the block")
            check(known)
            # The mark is the block's: it excuses those of its commands that no test can run, and hides no other.
            if wanted is False or not block.needs:
                outputs.append(run(known))
        except Wrong as error:
            mistakes.append(f"{' '.join(command.words)}: {error}")
    return mistakes, "\n".join(outputs)


def with_variables(command: Command) -> Command:
    """The command with `$NAME` and `~` replaced."""

    def value(match: re.Match) -> str:
        if match[1] not in os.environ:
            raise Wrong(f"${match[1]} is not set by this page")
        return os.environ[match[1]]

    words = [os.path.expanduser(re.sub(r"\$\{?(\w+)\}?", value, word)) for word in command.words]
    return Command(tuple(words), command.variables, command.stored_in)


def run(command: Command) -> str:
    """Runs a command that is no launch, which is left to `check`, and returns what it prints; Wrong if it fails."""
    program, *words = command.words
    if program == "clipx" and words[1:5] == ["--", "python3", "-m", MAIN_PPO]:
        # A command of verl's runs in this process, because a new one takes ten seconds to import verl.
        answer = explained(Path(), *words[5:])
        if answer["stops"]:
            raise Wrong("; ".join(answer["stops"]))
        output = "\n".join(answer["text"])
    elif program == "clipx":
        output = output_of(app, words, command.variables)
    elif program == "python" and words[0] == "-c":
        output = printed_by(words[1])
    elif program == "python" and words[0] == "-m" and words[1].startswith("verl_clipx"):
        output = output_of(typer_module(words[:2]), words[2:], command.variables)
    else:
        return ""
    if not output.strip():
        raise Wrong("prints nothing")
    if command.stored_in:
        os.environ[command.stored_in] = output.strip()
    return output


def output_of(command_line, words: list[str], variables: dict[str, str]) -> str:
    """What a command prints; it must end with exit code 0."""
    # What a command sets in its process must not reach the next one.
    with mock.patch.dict(os.environ):
        result = CliRunner(env={"COLUMNS": "200", **variables}).invoke(command_line, words)
    if result.exit_code:
        raise Wrong(f"exit code {result.exit_code}: {result.output[-600:]} {result.exception!r}")
    return result.output


def run_python(block: Block, names: dict) -> tuple[list[str], str]:
    """Runs a block; one that begins with `# name.py` is that file from then on, and knows no other block's names. One
    with a mark is only compiled: tests/end_to_end/test_wheel.py and tests/losses run them.
    """
    if block.needs:
        compile(block.text, "page", "exec")
        return [], ""
    file_name = re.match(r"# (\w+\.py)\n", block.text)
    file = Path(file_name[1] if file_name else f"line_{block.line}.py")
    file.write_text(block.text)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            if file_name:
                __import__(file.stem)
            else:
                variables = runpy.run_path(str(file), names)
                names |= {name: variables[name] for name in variables if not name.startswith("__")}
                for name in variables:
                    if name.startswith("test_"):
                        variables[name]()
    except Exception as error:
        return [repr(error)], ""
    return [], output.getvalue()


def run_yaml(block: Block, names: dict) -> tuple[list[str], str]:
    """Parses a block."""
    try:
        list(yaml.safe_load_all(block.text))
    except yaml.YAMLError as error:
        return [str(error)], ""
    return [], ""


def refuse_commands(block: Block, names: dict) -> tuple[list[str], str]:
    """A block without a language shows output or files, no commands."""
    commands = re.findall(rf"(?m)^ *\$? *(?:{'|'.join(PROGRAMS)}|python3) .*", block.text)
    return [f"{command}: a command in a block without a language; make it ```bash" for command in commands], ""


RUNNERS = {"bash": run_bash, "python": run_python, "yaml": run_yaml, "": refuse_commands}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_blocks_run_as_printed(name, folder):
    for prepare in PREPARATIONS.get(name, ()):
        os.environ.update(prepare(folder) or {})
    assert mistakes_of((ROOT / name).read_text()) == []


# An entry of the log keeps the names that its day had.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "docs/results/log.md"])
def test_inline_code_names_what_there_is(name):
    mistakes = []
    for span in filter(COMMAND.match, inline_code_of((ROOT / name).read_text())):
        try:
            check(command_of(span), complete=False)
        except Wrong as error:
            mistakes.append(f"{span}: {error}")
    assert mistakes == []


# Keys of the node that no method or modifier has as a parameter.
KEYS_OF_NO_METHOD = {"method", "function"}
NAMED_GROUP = re.compile(r"\+?clipx(?P<node>(?:/\w+)*)=(?P<name>\w+)")
NAMED_KEY = re.compile(r"\+?clipx\.(?P<key>\w+)(?:\.(?P<inner>\w+))?(?:=.*)?")


def names_of(kinds):
    """The names of the fields of several dataclasses."""
    return {field.name for kind in kinds for field in dataclasses.fields(kind)}


def known_keys():
    """The names that may follow `clipx.`."""
    method_parameters = {name for method in METHODS.values() for name in parameters_of(method)}
    return method_parameters | names_of([Node]) | {*NODES} | KEYS_OF_NO_METHOD


def unknown_groups_and_keys(page: str) -> list[str]:
    """The groups and keys of ours in a page's inline code that don't exist; a page's own loss may have its own keys."""
    unknown = []
    for word in {word for span in inline_code_of(page) for word in span.split()}:
        if group := NAMED_GROUP.fullmatch(word):
            if not (configs_folder() / f"clipx{group['node']}" / f"{group['name']}.yaml").is_file():
                unknown.append(word)
        elif key := NAMED_KEY.fullmatch(word):
            is_of_page = re.search(rf"(?m)^.*\b{key['key']}: float", page)
            if key["key"] not in known_keys() and not is_of_page:
                unknown.append(word)
            if key["inner"] and key["inner"] not in names_of(NODES.get(key["key"], ())):
                unknown.append(word)
    return unknown


# docs/results/log.md names what is gone.
@pytest.mark.parametrize("name", sorted({*NAMES} - {"docs/results/log.md"}))
def test_groups_and_keys_in_inline_code_exist(name):
    assert unknown_groups_and_keys((ROOT / name).read_text()) == []


@pytest.mark.parametrize(
    "word", ["+clipx=acpi", "clipx/mask=x", "clipx.alhpa", "clipx.alhpa=3", "clipx.select.share=1"]
)
def test_an_unknown_group_or_key_is_found(word):
    assert unknown_groups_and_keys(f"Use `{word}` and `clipx.alpha=3`, `+clipx/select=high_entropy`.") == [word]


FENCE = "```"


def page(*lines: str, language: str = "bash", needs: str = "") -> str:
    """A page with one block, and the mark above it."""
    mark = [f"<!-- needs: {needs} -->"] if needs else []
    return "\n".join(["# Made up", "", *mark, FENCE + language, *lines, FENCE, ""])


def printed_block(*lines: str) -> str:
    """A block with what the block before prints."""
    return "\n".join(["", "<!-- prints -->", FENCE, *lines, FENCE, ""])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        # What a command tree, a run, verl's configuration, a recipe and an output say, and what a mark may hide.
        (page("clipx papers eval run m --benchmark b --out o --max-tok 9", needs="GPUs"), "No such option: --max-tok"),
        (page("clipx papers recipe show $PRESET"), "$PRESET is not set by this page"),
        (page("clipx methods", needs="GPUs"), "take the mark away"),
        (page("python benchmarks/loss.py --repeats 2"), "no test can run this"),
        (page("python -m verl.trainer.main_ppo … +clipx=acpo clipx.alhpa=2", needs="GPUs"), "does not compose"),
        (page("DRY_RUN=1 METOD=acpo bash recipes/acpo/run_qwen2.5_3b_fsdp.sh"), "fsdp.sh has no METOD"),
        (
            page("clipx demo --out x") + printed_block("y/report.html…"),
            "line 9: the block before prints\nx/report.html: ",
        ),
        (page("def test_it():", "    assert 1 == 2", language="python"), "AssertionError"),
    ],
    ids=lambda text: text.partition(FENCE)[2].splitlines()[1] if FENCE in text else "",
)
def test_a_page_with_a_mistake_is_found(text, mistake, folder):
    (mistake_found,) = mistakes_of(text)
    assert mistake in mistake_found
