"""The oldest verl that is admitted, in an environment of its own on top of this one. Covers: what the plugin relies on,
the doctor's verdict, the composition of a preset on machines of GPUs with verl's own checks, three steps of ACPO. Not
covered: the other end-to-end runs, GPUs.
"""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from packaging.version import Version

from tests.test_dependencies import required

from .runs import REPOSITORY, train
from .test_wheel import make_environment

pytestmark = [pytest.mark.end_to_end, pytest.mark.matrix]


OLDEST = min(Version(part.version) for verl in required("cpu") if verl.name == "verl" for part in verl.specifier)


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> str:
    """The interpreter of an environment that has the oldest verl and takes all else from the one of the tests."""
    beneath = f"{sysconfig.get_path('purelib')}\n{REPOSITORY}"
    return str(make_environment(tmp_path_factory.mktemp("environment"), beneath, str(OLDEST)))


def run_python(python: str, *arguments: str) -> str:
    """What a command of this environment prints."""
    variables = {**os.environ, "RAY_ADDRESS": "127.0.0.1:6379"}
    result = subprocess.run([python, *arguments], cwd=REPOSITORY, env=variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_environments_verl_is_the_oldest_that_is_admitted_and_has_what_the_plugin_relies_on(python):
    code = "import verl, verl_clipx; from verl_clipx.training.doctor import check_verl; "
    code += "print(verl.__version__, verl.__file__, verl_clipx.__file__, check_verl().level)"
    version, file_of_verl, file_of_plugin, level = run_python(python, "-c", code).split()[-4:]
    assert version == str(OLDEST) == "0.9.0" and level == "ok"
    assert file_of_verl.startswith(str(Path(python).parents[1])) and file_of_plugin.startswith(str(REPOSITORY))
    run_python(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/training/worker/test_verl_contract.py")


@pytest.mark.parametrize("hardware", ["a100x8", "h100x8"])
def test_the_same_command_line_composes_and_passes_verls_checks(python, hardware):
    code = (
        "import sys; from tests.claims.checks import check_overrides; check_overrides(sys.argv[1:], {}); print('fine')"
    )
    preset = [f"+hardware={hardware}", "+recipe=acpo/countdown_3b_acpo_off"]
    assert run_python(python, "-c", code, *preset).strip().endswith("fine")


def test_acpo_trains_on_the_oldest_verl(python, task, tmp_path):
    run = train(task, tmp_path / "run", "+clipx=acpo", steps=3, python=python)
    assert any("clipx: clipx_acpo (+clipx=acpo), scope mini_batch" in line for line in run.output.splitlines())
    assert len(run.log) == 3
    assert all(value > 0 for value in run.values("actor/clipx/epsilon_highest"))
    assert all(0 <= value <= 1 for value in run.values("actor/clipx/clip_fraction_high"))
