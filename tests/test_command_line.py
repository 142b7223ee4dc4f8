"""What every command has in common: the version, JSON, suggestions, speed, the extra that a missing package needs. Not
covered: what the commands find (their own tests), a launch of verl (tests/run/test_explain.py).
"""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import verl_clipx
from tests.analysis.runs.example_runs import write_run
from tests.claims.checks import check
from tests.claims.documents import command_of
from tests.composition import composition
from tests.papers.evaluation.tiny import save_questions
from verl_clipx.cli import app
from verl_clipx.common.extras import FOR_CPU


def clipx(*words: object):
    """Runs a command, which may end with an exit code but not with a traceback."""
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result


def as_json(*words: object, code: int = 0) -> dict:
    """The object that a command prints on standard output, where nothing else may be."""
    result = clipx(*words, "--json")
    assert result.exit_code == code, result.output
    printed = json.loads(result.stdout)
    assert list(printed)[:2] == ["command", "version"] and printed["version"] == version("verl-clipx")
    assert f"{printed['command']} " in f"{' '.join(map(str, words))} "
    return printed


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with traces."""
    return write_run(tmp_path_factory.mktemp("run"), "acpo", steps=2)


def test_what_a_user_asks_first_imports_nothing_heavy():
    result = clipx("--version")
    assert (result.exit_code, result.stdout) == (0, f"clipx {version('verl-clipx')}\n")
    program = """
import sys
from typer.testing import CliRunner
from verl_clipx.cli import app
heavy = {"torch", "pandas", "hydra", "verl", "rich.markdown"}
for words in (["--version"], ["--help"], ["methods", "--help"]):
    print(CliRunner().invoke(app, words).exit_code, sorted(heavy & {*sys.modules}))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "0 []\n" * 3


def headings_of(help_text: str) -> dict[str, list[str]]:
    """Return the commands under each heading of a group's help, in their order."""
    headings = {}
    for section in help_text.split("\n\n"):
        heading, *lines = section.strip("\n").splitlines()
        if heading.endswith(":") and heading != "Options:":
            headings[heading] = [line.split()[0] for line in lines if re.match(r"  \S", line)]
    return headings


def test_the_commands_stand_in_the_order_of_a_runs_life():
    assert headings_of(clipx("--help").output) == {
        "Before a run:": ["demo", "doctor", "methods", "metrics", "explain", "check-loss"],
        "After a run:": ["diagnose", "report", "replay", "certify", "recompute"],
        "The papers' experiments:": ["papers"],
    }
    assert headings_of(clipx("papers", "--help").output) == {"Commands:": ["data", "eval", "recipe", "table"]}


def commands_below(command: Any, *words: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command that is no group."""
    if hasattr(command, "commands"):
        for name, below in command.commands.items():
            yield from commands_below(below, *words, name)
    else:
        yield words


GROUPS = ((), ("papers",), *(("papers", group) for group in ("data", "eval", "recipe", "table")))


@pytest.mark.parametrize("words", GROUPS, ids=" ".join)
def test_a_list_of_commands_cuts_no_sentence(words):
    output = clipx(*words, "--help").output
    assert [line for line in output.splitlines() if line.startswith("  ") and line.endswith("...")] == []


@pytest.mark.parametrize("words", list(commands_below(typer.main.get_command(app))), ids=" ".join)
def test_help_names_the_files_that_a_command_reads_and_two_lines_that_it_parses(words):
    _, _, end = clipx(*words, "--help").output.partition("\n  Reads ")
    reads, _, examples = end.partition("Examples:\n")
    assert reads.strip().endswith(".")
    first, second = (line.strip() for line in examples.strip().splitlines())
    for line in (first, second):
        assert line.startswith(" ".join(("clipx", *words)))
        check(command_of(line))


def test_a_package_without_the_folder_papers_has_all_other_commands(tmp_path):
    package = Path(verl_clipx.__file__).parent
    shutil.copytree(package, tmp_path / "verl_clipx", ignore=shutil.ignore_patterns("papers", "__pycache__"))
    shutil.copytree(package.parent / "configs", tmp_path / "verl_clipx" / "configs")

    def run_there(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "verl_clipx.cli", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    with_papers = headings_of(clipx("--help").output)
    assert headings_of(run_there("--help").stdout) == {
        heading: names for heading, names in with_papers.items() if names != ["papers"]
    }
    assert "parameters of acpo" in run_there("methods", "acpo").stdout
    result = run_there("papers", "table", "list")
    assert result.returncode == 2 and "No such command 'papers'" in result.stderr


def test_a_methods_parameters_its_own_first():
    (method,) = as_json("methods", "acpo")["methods"]
    parameters = {part["name"]: part for part in method["parameters"]}
    names = list(parameters)
    cap = parameters["epsilon_max"]
    assert names[:2] == ["alpha", "epsilon_base"]
    assert names.index("min_tokens") < names.index("dual_clip") < names.index("log_ratio_clamp") < names.index("scope")
    assert (cap["in_groups"], cap["default"]) == ({"acpo": None, "acpo_reference": 3.0}, None)
    assert cap["allowed"].startswith("a number") and not cap["of_every_method"]
    output = clipx("methods", "acpo").output
    places = [output.index(name) for name in ("alpha", "log_ratio_clamp", "of every method", "scope")]
    assert places == sorted(places)


def test_a_loss_of_the_users_own_is_described(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(
        'from verl_clipx import register_loss\n\n\n@register_loss("fading")\n'
        "def fading(ratio, advantages, bounds, *, power: float = 2.0):\n"
        '    """Fades with a power."""\n    return ratio.clamp(max=1.0) ** power\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    (method,) = as_json("methods", "my_losses:fading")["methods"]
    assert (method["name"], method["summary"]) == ("fading", "Fades with a power.")
    assert method["parameters"][0]["name"] == "power"
    assert "+clipx=custom clipx.function=my_losses:fading" in clipx("methods", "my_losses:fading").output
    assert "my_losses" in as_json("methods", "my_losses:absent", code=1)["error"]


def test_doctor_prints_each_finding_with_its_group_as_json(monkeypatch):
    from verl_clipx.training.doctor import DoctorFinding

    findings = [DoctorFinding("ok", "Python", "3.11"), DoctorFinding("error", "verl", "not installed", "install it")]
    monkeypatch.setattr("verl_clipx.training.doctor.examine_environment", lambda ray: [("versions", findings)])
    _, error = as_json("doctor", "--no-ray", code=1)["findings"]
    assert error == {"group": "versions", **vars(findings[1])}


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("diagnose {run}", "findings", []),
        ("replay {run} +clipx=acpo clipx.alpha=1,2", "settings", ["acpo alpha=1", "acpo alpha=2"]),
        ("methods", "methods", "acpo"),
        ("papers table list", "tables", "cpu_small"),
        pytest.param("papers table plan cpu_small --runs {folder}", "commands", None, marks=pytest.mark.slow),
        ("diagnose {folder}", "error", "no such log"),
        ("replay {run} +clipx=acp0", "error", "Did you mean +clipx=acpo"),
        ("papers table render acpo_table1", "error", "Did you mean acpo_table1"),
    ],
)
def test_a_command_prints_one_object_also_where_it_fails(run, tmp_path, words, key, value):
    content = as_json(*words.format(run=run, folder=tmp_path).split(), code=int(key == "error"))[key]
    names = content if key == "error" else [part.get("name", part.get("setting")) for part in content]
    assert value is None or value == names or value in names


def test_numbers_that_json_does_not_have_are_null(run):
    # ASPO's upper bound is infinite.
    assert "Infinity" not in clipx("replay", run, "+clipx=cispo_minimax", "--json").stdout


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["methods", "acpoo"], "Did you mean acpo"),
        (["methods", "acpo_referense"], "Did you mean acpo_reference"),
        (["metrics", "observed"], "Did you mean observe?"),
        (["papers", "data", "build", "countdwn", "--out", "x"], "Did you mean countdown"),
        (["papers", "table", "plan", "cpu_smal"], "Did you mean cpu_small?"),
        (["papers", "recipe", "show", "cpu/countdown_acpo_of"], "did you mean cpu/countdown_acpo_off"),
        (["method"], "Did you mean 'methods'"),
        (["methods", "--jsn"], "--json"),
    ],
)
def test_a_mistyped_name_is_answered_with_the_nearest(words, hint):
    result = clipx(*words)
    assert result.exit_code in (1, 2) and hint in result.output


def hide_modules(monkeypatch, *modules: str) -> None:
    """Makes modules look as if they were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in modules else find(name, *rest))
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


def test_a_missing_package_is_named_with_a_command_that_needs_no_release_of_this_one(monkeypatch, tmp_path):
    path = save_questions(tmp_path / "data", 1)
    hide_modules(monkeypatch, "vllm", *FOR_CPU)
    result = clipx("papers", "eval", "run", "m", "--benchmark", path, "--out", tmp_path / "e", "--max-tokens", 1)
    assert "needs vLLM: pip install vLLM" in result.output
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    expected_message = "+hardware=cpu needs cachetools: pip install cachetools fastapi uvicorn TransferQueue"
    with pytest.raises(Exception, match=re.escape(expected_message)):
        _ = composition("+clipx=acpo", "+hardware=cpu").trainer.device
