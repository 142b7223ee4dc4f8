"""An installation without the extra `tools`: what works all the same, and what the rest says. Not covered: the
commands' work, which their own tests cover, and installing.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from verl_clipx.cli import app
from verl_clipx.common.extras import FOR_CPU, OF_VERL, TOOLS, missing_tool

CHECKOUT = Path(__file__).parents[1]

# Python runs a module of this name before anything else, in every process that inherits PYTHONPATH.
SITECUSTOMIZE = """
import sys
from importlib.machinery import PathFinder


class WithoutTools(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden} else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTools
"""

REQUIRED = {part.name for part in map(Requirement, requires("verl")) if part.marker is None}
NOT_OF_VERL = {module for module, distribution in TOOLS.items() if distribution not in REQUIRED}

PRINTED_WITHOUT_ANY_TOOL = {
    "demo": "clipx-demo/report.html",
    "methods acpo": "parameters of acpo: clipx.<parameter>",
    "check-loss verl_clipx.losses.methods.grpo:Grpo": "kept",
    "papers recipe list cpu/countdown_acpo": "presets: +recipe",
    "papers recipe show cpu/countdown_acpo_off": "optimizer steps for each rollout batch",
}
# Two tables for each environment, with what verl brings and with no package of the extra: each command that works, with
# words that it prints, and each command that fails, with the package that it names.
WITHOUT_WHAT_VERL_LACKS = (
    PRINTED_WITHOUT_ANY_TOOL
    | {
        "metrics": "clipx/ratio_mean",
        "doctor --no-ray": "pip install",
        f"explain -- {sys.executable} -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
        "actor_rollout_ref.actor.use_dynamic_bsz=True +clipx=grpo": "clipx_grpo",
        "papers data list": "clipx papers data build NAME",
        "papers data build countdown --out countdown --split test --limit 2": "2 rows",
        "papers data show countdown/test.parquet": "2 rows",
        "papers recipe check acpo/countdown_3b_acpo_off": "No ground truth was checked",
        "papers table list": "clipx papers table plan NAME",
    },
    {
        **dict.fromkeys(("report . --out out", "diagnose .", "certify . vs .", "replay . +clipx=acpo"), "scipy"),
        "recompute . checkpoint": "scipy",
        **dict.fromkeys((f"papers table {verb} acpo_table1a" for verb in ("plan", "collect", "render")), "scipy"),
        **dict.fromkeys(
            ("papers eval run model --benchmark aime24 --out out --max-tokens 1", "papers eval score out"), "scipy"
        ),
        "papers eval compare first second": "scipy",
    },
)
WITHOUT_ALL = (
    PRINTED_WITHOUT_ANY_TOOL,
    {
        **dict.fromkeys(("papers data list", "papers data show countdown/test.parquet"), "pyarrow"),
    },
)

RUN_COMMANDS = """
import json, sys
from typer.testing import CliRunner
from verl_clipx.cli import app

results = {}
for command in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, command.split())
    print(command, result.output, file=sys.stderr)
    results[command] = result.exit_code, result.output, isinstance(result.exception, SystemExit | None)
print(json.dumps(results))
"""


def python_without(modules: set[str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, its child processes included, where modules are not installed."""
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE.format(hidden=modules))
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{CHECKOUT}", "COLUMNS": "200"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


# The one with all commands, two of which compose a run and plan a table, takes most of a minute.
WITHOUT_SOME = pytest.param(NOT_OF_VERL, marks=[pytest.mark.end_to_end, pytest.mark.matrix])


@pytest.fixture(scope="module", params=[WITHOUT_SOME, set(TOOLS)], ids=["of verl's", "none"])
def outcomes(request, tmp_path_factory):
    """What each command did, and what it should have done; all in one process, for the sake of time."""
    expected = WITHOUT_WHAT_VERL_LACKS if request.param == NOT_OF_VERL else WITHOUT_ALL
    commands = json.dumps([*expected[0], *expected[1]])
    result = python_without(request.param, tmp_path_factory.mktemp("run"), "-c", RUN_COMMANDS, commands)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1]), expected


@pytest.mark.slow
def test_a_command_works_or_names_what_it_needs(outcomes):
    results, (work, lack) = outcomes
    assert results.keys() == {*work, *lack}
    for command, (code, output, ended_itself) in results.items():
        assert ended_itself, f"{command}: a traceback"
        if command in work:
            assert (code, work[command] in output) == (0, True), f"{command}: {output}"
        else:
            names = command.split()
            name = " ".join(names[:2]) if names[0] == "papers" else names[0]
            words = f"clipx {name} needs {lack[command]}: pip install "
            # What reads runs goes together, without what only the papers' data need.
            needed = {"jinja2", "matplotlib", "pandas", "pyarrow", "scipy"} & set(TOOLS)
            assert (code, output.startswith(words)) == (1, True), command
            assert {*output.removeprefix(words).split()} <= needed and lack[command] in output.removeprefix(words)


def test_every_command_is_tried():
    def names(group, before=()):
        for command in group.registered_commands:
            yield (*before, command.name or command.callback.__name__)
        for below in group.registered_groups:
            yield from names(below.typer_instance, (*before, below.name))

    tried = [tuple(command.split()) for some in (*WITHOUT_WHAT_VERL_LACKS, *WITHOUT_ALL) for command in some]
    assert [name for name in names(app) if not any(words[: len(name)] == name for words in tried)] == []


@pytest.mark.slow
def test_verl_has_the_losses_without_any_tool(tmp_path):
    program = """
import verl
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl_clipx import METHODS
assert len(METHODS) >= 8 and all(callable(get_policy_loss_fn(f"clipx_{name}")) for name in METHODS)
"""
    result = python_without(set(TOOLS), tmp_path, "-c", program)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("module", ["worker.training_worker", "worker.tracer", "trainer.log", "trainer.watch"])
def test_training_needs_no_tool_that_verl_does_not_bring(tmp_path, module):
    result = python_without(NOT_OF_VERL, tmp_path, "-c", f"import verl_clipx.training.{module}")
    assert result.returncode == 0, result.stderr


def test_a_reward_of_mathematics_names_the_extra(tmp_path):
    program = "from verl_clipx.papers.tasks.reward import compute_score; compute_score('math', r'\\boxed{1}', '\"1\"')"
    result = python_without(NOT_OF_VERL, tmp_path, "-c", program)
    assert result.returncode == 1
    message = result.stderr.splitlines()[-1]
    start = "ModuleNotFoundError: a reward of mathematics needs math-verify: pip install"
    assert message.startswith(start) and "math-verify" in message.removeprefix(start)


@pytest.mark.parametrize("module", [*TOOLS, *OF_VERL, *FOR_CPU, "gguf", "vllm"])
def test_no_message_asks_pip_for_this_package_which_is_not_on_the_index(module):
    message = missing_tool("clipx replay", ModuleNotFoundError("no such module", name=module))
    assert "verl-clipx" not in message and ": pip install " in message


def test_replay_says_how_to_get_torch():
    message = missing_tool("clipx replay", ModuleNotFoundError("no such module", name="torch"))
    assert message == "clipx replay needs torch, which comes with verl: pip install torch"


def test_another_missing_module_is_no_tool():
    for name in (None, "no_such_module", "scipyx.stats"):
        assert missing_tool("clipx papers eval", ModuleNotFoundError("no such module", name=name)) is None
    message = missing_tool("clipx papers eval", ModuleNotFoundError("no", name="scipy.stats"))
    assert message.startswith("clipx papers eval needs scipy:")
