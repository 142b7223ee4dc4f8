"""Every command in a code block of README.md and docs runs as printed, or a mark above the block says what it needs.

Covers: `clipx` commands and `python -m verl_clipx…` run in this process, a page's commands in order in one folder;
verl's own command and printed overrides are composed and read as verl's driver reads them; recipes make a dry run;
Python blocks run, each with the names of those before, YAML is parsed; a block under `<!-- prints -->` has what the
block before prints; marked commands and inline code have existing subcommands, options, files and
variables; a page that breaks any of these rules fails.

Not covered: what an output says that no page shows, beyond that there is some; what a mark, `<!-- needs: … -->`,
excuses; the fresh interpreters of `clipx doctor`, for which this process stands in (tests/check/test_doctor.py starts
them), and its Ray worker; whether a `python -m pytest` command passes, which is its own test's matter.
"""

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from typer.testing import CliRunner
from verl.trainer.ppo import core_algos

from tests.claims.checks import PROGRAMS, check, is_override, typer_module, wants_mark
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
from verl_clipx.check import doctor
from verl_clipx.cli import app
from verl_clipx.methods import METHODS

# Inline code that is a command, with the variables before it.
COMMAND = re.compile(rf"""([A-Z_]+=("[^"]*"|\S)* )*({"|".join(PROGRAMS)}) """)

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder for one page, with what its commands change in this process put back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(doctor, "run_python", in_this_process)
    environment, modules, threads = dict(os.environ), set(sys.modules), torch.get_num_threads()
    methods, losses = dict(METHODS), dict(core_algos.POLICY_LOSS_REGISTRY)
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)
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
    printed, names = "", {}
    mistakes = []
    for block in blocks:
        if block.printed and not is_as_printed(block.text, printed):
            mistakes.append(f"line {block.line}: the block before prints\n{printed}")
        elif not block.printed:
            found, printed = RUNNERS[block.language](block, names)
            mistakes += found
    return mistakes


def run_bash(block: Block, names: dict) -> tuple[list[str], str]:
    """Runs or checks the commands of a block.

    Returns:
        What does not run, and what the commands print, as every runner does.
    """
    try:
        commands = commands_of(block)
    except Wrong as error:
        return [str(error)], ""
    excuses_nothing = block.needs and all(wants_mark(command) is False for command in commands)
    mistakes, outputs = [], []
    for command in commands:
        try:
            known = with_variables(command)
            wanted = wants_mark(known)
            if wanted and not known.needs:
                raise Wrong("no test can run this; put <!-- needs: REASON --> above the block")
            check(known)
            if excuses_nothing:
                raise Wrong("runs in a test; take the mark away")
            # The mark is the block's: it excuses those of its commands that no test can run, and hides no other.
            if wanted is False or not known.needs:
                outputs.append(run(known))
        except Wrong as error:
            mistakes.append(f"line {command.line}: {command.text}: {error}")
    return mistakes, "\n".join(outputs)


def with_variables(command: Command) -> Command:
    """The command with `$NAME` and `~` replaced."""

    def value(match: re.Match) -> str:
        if match[1] not in os.environ:
            raise Wrong(f"${match[1]} is not set by this page")
        return os.environ[match[1]]

    words = [os.path.expanduser(re.sub(r"\$\{?(\w+)\}?", value, word)) for word in command.words]
    return Command(command.text, command.line, tuple(words), command.variables, command.needs, command.stored_in)


def run(command: Command) -> str:
    """Runs a command that is no launch: those are composed or make a dry run in `check`.

    Returns:
        What it prints; empty for a command that is left to `check`.

    Raises:
        Wrong: it fails, or prints nothing.
    """
    if is_override(command):
        return ""
    program, *words = command.words
    if program == "clipx" and words[1:5] == ["--", "python3", "-m", MAIN_PPO]:
        # Of a command of verl's in this process, because a new one takes ten seconds to import verl.
        answer = explained(Path(), *words[5:])
        if answer["stops"]:
            raise Wrong("; ".join(answer["stops"]))
        output = "\n".join(answer["text"])
    elif program == "clipx":
        output = output_of(app, words, command.variables)
    elif program == "python" and words[0] == "-c":
        output = printed_by(words[1])
    elif program == "python" and words[0] == "-m" and words[1].startswith("verl_clipx"):
        output = output_of(typer_module(words), words[2:], command.variables)
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
    """Runs a block; one that begins with `# name.py` is that file from then on, and knows no other block's names."""
    named = re.match(r"# (\w+\.py)\n", block.text)
    file = Path(named[1] if named else f"line_{block.line}.py")
    file.write_text(block.text)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            if named:
                __import__(file.stem)
            else:
                found = runpy.run_path(str(file), names)
                names |= {name: found[name] for name in found if not name.startswith("__")}
                for name in found:
                    if name.startswith("test_"):
                        found[name]()
    except Exception as error:
        return [f"line {block.line}: {error!r}"], ""
    return [], output.getvalue()


def run_yaml(block: Block, names: dict) -> tuple[list[str], str]:
    """Parses a block."""
    try:
        list(yaml.safe_load_all(block.text))
    except yaml.YAMLError as error:
        return [f"line {block.line}: {error}"], ""
    return [], ""


def refuse_commands(block: Block, names: dict) -> tuple[list[str], str]:
    """A block without a language shows output or files, no commands."""
    first_words = [(number, line.split()) for number, line in enumerate(block.text.splitlines(), start=block.line)]
    return [
        f"line {number}: a command in a block without a language; make it ```bash"
        for number, words in first_words
        if words and words[0].removeprefix("$") in {*PROGRAMS, "python3"}
    ], ""


RUNNERS = {"bash": run_bash, "python": run_python, "yaml": run_yaml, "": refuse_commands}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_blocks_run_as_printed(name, folder):
    for prepare in PREPARATIONS.get(name, ()):
        os.environ.update(prepare(folder) or {})
    assert mistakes_of((ROOT / name).read_text()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_inline_code_names_what_there_is(name):
    mistakes = []
    # What is gone may be named where it is said to be gone.
    text = re.sub(r"^### Removed\n.*?(?=^##|\Z)", "", (ROOT / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    for span in inline_code_of(text):
        if not COMMAND.match(span):
            continue
        try:
            check(command_of(span), complete=False)
        except Wrong as error:
            mistakes.append(f"{span}: {error}")
    assert mistakes == []


FENCE = "```"


def page(*lines: str, language: str = "bash", needs: str = "") -> str:
    """A page with one block, and the mark above it."""
    mark = [f"<!-- needs: {needs} -->"] if needs else []
    return "\n".join(["# Made up", "", *mark, FENCE + language, *lines, FENCE, ""])


def shown(*lines: str) -> str:
    """A block with what the block before prints."""
    return "\n".join(["", "<!-- prints -->", FENCE, *lines, FENCE, ""])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        # clipx: what the command tree, the product's names and a run say
        (page("clipx recipes list"), "clipx has no recipes"),
        (page("clipx recipe"), "clipx recipe needs a subcommand"),
        (page("clipx data list --all"), "No such option: --all"),
        (page("clipx data build countdown"), "Missing option '--out'"),
        (page("clipx report runs/nowhere --out report"), "exit code 1"),
        (page("clipx methods \\", "    nothing"), "nothing"),
        (page("clipx report …"), "print the whole command"),
        (page("clipx recipe show $PRESET"), "$PRESET is not set by this page"),
        # marks
        (page("clipx eval run m --benchmark b --out o --max-token 9", needs="GPUs"), "No such option: --max-token"),
        (page("clipx data build orz_75k --out o", needs="the hub"), "data set 'orz_75k' is unknown"),
        (page("clipx table plan acpo_table9"), "acpo_table9"),
        (page("clipx methods", needs="luck"), "needs: luck; the reasons are"),
        (page("# needs: GPUs", "clipx methods"), "belongs above the block"),
        ("<!-- needs: GPUs -->\n\n# Made up\n" + page("clipx methods"), "belongs right above a code block"),
        (page("clipx methods") + "<!-- needs: GPUs -->\n", "belongs right above a code block"),
        (page("clipx methods nothing", "python benchmarks/table_fill.py reversal", needs="hours"), "nothing"),
        (page("clipx methods", needs="GPUs"), "take the mark away"),
        (page("clipx data build orz_57k --out o"), "no test can run this"),
        (page("python benchmarks/loss.py --repeats 2"), "no test can run this"),
        # verl's command
        (page("python -m verl.trainer.main_ppo … +clipx=acpi"), "Did you mean +clipx=acpo?"),
        (page("python -m verl.trainer.main_ppo … +clipx=acpo clipx.alhpa=2", needs="GPUs"), "does not compose"),
        (page("reward.custom_reward_functoin.name=compute_score"), "does not compose"),
        # scripts
        (page("bash scripts/test.sh --fats", needs="hours"), "scripts/test.sh has no --fats"),
        (page("bash scripts/tests.sh", needs="hours"), "scripts/tests.sh: no such file"),
        (page("bash scripts/quickstart.sh acpi", needs="minutes"), "Did you mean +clipx=acpo?"),
        (page("DRY_RUN=1 METHOD=acpi bash recipes/acpo/run_qwen2.5_3b_fsdp.sh"), "run_qwen2.5_3b_fsdp.sh: "),
        (page("DRY_RUN=1 METOD=acpo bash recipes/acpo/run_qwen2.5_3b_fsdp.sh"), "fsdp.sh has no METOD"),
        (page("METHOD=acpo bash recipes/acpo/run_qwen2.5_3b_fsdp.sh"), "no test can run this"),
        (page("sbatch recipes/cluster/slurm.sh METHOD=acpo", needs="a cluster"), "no recipe for the cluster"),
        # outputs
        (page("clipx demo --out x") + shown("y/report.html…"), "line 9: the block before prints\nx/report.html: "),
        (page("print(1)", "print(2)", language="python") + shown("1"), "prints\n1\n2"),
        ("<!-- prints -->\n\n# Made up\n", "a mark belongs right above a code block"),
        # other programs
        (page("pip install 'verl-clipx[gpus]'", needs="the network"), "[gpus]: the extras are"),
        (page("docker build --file docker/Dockerfile.tpu .", needs="Docker"), "docker/Dockerfile.tpu: no such file"),
        (page("python benchmarks/loss.py --repeat 2", needs="minutes"), "No such option: --repeat"),
        (page("python -m pytest tests/check/test_doctor.py -k test_nothing"), "-k test_nothing: no such test"),
        (page("python -c 'print('"), "never closed"),
        (page("make install"), "make: the tests know no such program"),
        # blocks
        (page("clipx methods | head"), "the tests follow && only"),
        (page("clipx methods 'acpo"), "quotes that do not close"),
        (page("$ clipx methods", language="console"), "a block of 'console'"),
        (page("clipx methods", language=""), "a command in a block without a language"),
        (page("def test_it():", "    assert 1 == 2", language="python"), "AssertionError"),
        (page("a: [1", language="yaml"), "line 4: while parsing"),
    ],
    ids=lambda text: text.partition(FENCE)[2].splitlines()[1] if FENCE in text else "",
)
def test_a_page_with_a_mistake_is_found(text, mistake, folder):
    found = mistakes_of(text)
    assert len(found) == 1
    assert mistake in found[0]


def test_a_page_without_mistakes(folder):
    text = page(
        "# what there is",
        "clipx data build countdown --out data/small \\",
        "    --option size=3 && clipx data show data/small/test.parquet   # built and shown",
        "NAMES=$(python -c 'print(\"acpo\")')",
        'clipx methods "$NAMES"',
        "python benchmarks/table_fill.py reversal  # half an hour",
        "METHOD=acpo bash recipes/acpo/run_qwen2.5_3b_fsdp.sh  # one machine of 8 GPUs",
        needs="GPUs, the hub, hours",
    )
    assert mistakes_of(text) == []
    assert (folder / "data/small/test.parquet").is_file()
    assert mistakes_of(page("a: 1", language="yaml") + page("plain # text", language="")) == []
    python = page("one = 1", language="python") + page("print(one, 'of three', 2)", language="python")
    assert mistakes_of(python + shown("1 …", "three 2")) == []


@pytest.mark.parametrize(
    ("span", "mistake"),
    [
        ("clipx eval run … --rewards x", "No such option: --rewards"),
        ("clipx bound FILE", "clipx has no bound"),
        ("METOD=x bash recipes/acpo/run_qwen2.5_3b_fsdp.sh", "has no METOD"),
        ("python benchmarks/nothing.py", "no such file"),
    ],
)
def test_inline_code_with_a_mistake_is_found(span, mistake):
    assert COMMAND.match(span)
    with pytest.raises(Wrong, match=mistake):
        check(command_of(span), complete=False)
