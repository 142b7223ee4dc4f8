"""scripts/test.sh, and .ci/run with it, with a stand-in for each program: whichever of its steps fails, it fails too.
Not covered: what the steps find, and the environments that it makes.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.shell import Machine

from .documents import ROOT

# Each step by the words that its stand-in sees; a step whose words are in $FAILS fails.
FAIL_IF_NAMED = '[[ "${0##*/} $*" != ${FAILS:-nothing}* ]]'
PROGRAMS = ("ruff", "shellcheck", "hadolint", "lint-imports", "mkdocs", "python", "chromium")
STEPS = [
    "ruff check",
    "ruff format --check",
    "shellcheck",
    "hadolint docker/Dockerfile",
    "lint-imports",
    "mkdocs build --strict",
    "python -m pytest tests",
]


@pytest.fixture
def checkout(tmp_path):
    """A folder with the two scripts, and stand-ins where the environment's programs would be."""
    for script in ("scripts/test.sh", "scripts/beside_verl.sh", ".ci/run"):
        copy = tmp_path / script
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / script, copy)
    (tmp_path / "scripts" / "environment.sh").write_text("[[ ${FAILS:-} != environment ]]\n")
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "Dockerfile.cpu").touch()
    # Triton is there, so that nothing is fetched.
    (tmp_path / ".venv" / "triton" / "triton-3.7.1.dist-info").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def run(checkout):
    """Runs one of the scripts with what is to fail."""
    machine = Machine(checkout / ".venv", **dict.fromkeys(PROGRAMS, FAIL_IF_NAMED), git="echo scripts/test.sh")

    def start(script: str, *words: str, **variables: str):
        result = machine.run(checkout / script, *words, cwd=checkout, **variables)
        return result, machine.calls

    return start


@pytest.mark.parametrize("script", ["scripts/test.sh", ".ci/run"])
def test_where_nothing_fails_every_step_has_run(run, script):
    result, calls = run(script)
    assert result.returncode == 0, result.stderr
    assert "everything passed" in result.stdout
    lines = [" ".join(call) for call in calls]
    assert [step for step in STEPS if not any(line.startswith(step) for line in lines)] == []
    assert "shellcheck scripts/test.sh" in lines
    assert not any("--quiet" in line for line in lines)


def named_tests(calls):
    """The tests that pytest was called with, in the order of its calls."""
    return [[word for word in call if word.startswith("tests/")] for call in calls if "pytest" in call]


def test_beside_another_verl_the_contract_comes_first_and_then_trainings(run, checkout):
    (checkout / "elsewhere" / "verl").mkdir(parents=True)
    result, calls = run("scripts/test.sh", "--verl", str(checkout / "elsewhere"), "-x")
    assert result.returncode == 0, result.stderr
    contract, trainings = named_tests(calls)
    assert "tests/training/worker/test_verl_contract.py" in contract
    assert any("test_resume.py" in name for name in trainings) and any("fully_async" in name for name in trainings)
    assert all("-x" in call for call in calls if "pytest" in call)
    for name in (*contract, *trainings):
        path, _, test = name.partition("::")
        assert (ROOT / path).exists() and (not test or f"def {test}(" in (ROOT / path).read_text())


@pytest.mark.parametrize("failing", ["environment", "python -m pytest -m", "python -m pytest --durations"])
def test_what_fails_beside_another_verl_fails_the_script(run, checkout, failing):
    (checkout / "elsewhere" / "verl").mkdir(parents=True)
    result, _ = run("scripts/test.sh", "--verl", str(checkout / "elsewhere"), FAILS=failing)
    assert result.returncode != 0 and "everything passed" not in result.stdout


@pytest.mark.parametrize("words", [("--verl",), ("--verl", "nowhere")])
def test_a_folder_without_a_verl_is_refused(run, words):
    result, calls = run("scripts/test.sh", *words)
    assert result.returncode == 2 and "checkout of verl" in result.stderr and not named_tests(calls)


# Without the folder that Python starts in, in which this project's tests are found first.
PRINT_PLACES = """
from importlib.util import find_spec
print(find_spec("verl").origin)
print(getattr(find_spec("tests"), "origin", "nowhere"))
"""


def test_a_command_beside_another_verl_sees_its_package_alone(tmp_path):
    for package in ("verl", "tests"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    command = ("bash", "scripts/beside_verl.sh", tmp_path, sys.executable, "-P", "-c", PRINT_PLACES)
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    verl, tests = map(Path, result.stdout.splitlines())
    assert tests != tmp_path / "tests" / "__init__.py"
    assert verl.parts[-2:] == ("verl", "__init__.py") and not verl.exists(), "the link to it is left"


@pytest.mark.parametrize("words", [(), ("nowhere", "true")])
def test_a_command_beside_no_verl_is_refused(words):
    result = subprocess.run(["bash", "scripts/beside_verl.sh", *words], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2 and "checkout of verl" in result.stderr


@pytest.mark.parametrize("script", ["scripts/test.sh", ".ci/run"])
@pytest.mark.parametrize("step", ["environment", *STEPS])
def test_a_step_that_fails_fails_the_script(run, script, step):
    result, _ = run(script, FAILS=step)
    assert result.returncode != 0
    assert "everything passed" not in result.stdout


@pytest.mark.parametrize("words", [(), ("--fast",), ("--all",)])
def test_each_selection_goes_to_pytest_with_further_arguments(run, words):
    _, calls = run("scripts/test.sh", *words, "--maxfail=3", END_TO_END_VLLM="0")
    (pytest_call,) = [call for call in calls if call[:3] == ["python", "-m", "pytest"]]
    assert pytest_call[-1] == "--maxfail=3"
    selection = pytest_call[pytest_call.index("-m", 3) + 1]
    expected = {(): "not matrix", ("--fast",): "not end_to_end and not slow", ("--all",): "not vllm"}
    assert selection == expected[words]
