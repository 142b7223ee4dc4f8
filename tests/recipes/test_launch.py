"""What a recipe does before, around and after verl, which is a stand-in here.

Covers: the checks come first and stop the run, the exit code is verl's. Not covered: the checks themselves,
verl.
"""

import sys

import pytest

from .shell import RECIPES, Machine

RECIPE = RECIPES / "acpo/run_qwen2.5_3b_fsdp.sh"

# Everything but verl is the real Python.
PYTHON = f"""
if [[ $1 == -m ]]; then
    exit "${{VERL_EXIT:-0}}"
fi
exec {sys.executable} "$@"
"""


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path / "machine", python3=PYTHON, clipx='[[ $1 != "${CLIPX_FAILS:-}" ]]')


def launch(machine, folder, *words, **variables):
    return machine.run(RECIPE, *words, RUN_FOLDER=str(folder), **variables)


def trained(machine):
    return [call for call in machine.calls if call[:2] == ["python3", "-m"]]


def test_doctor_and_plan_come_before_verl_and_see_what_verl_sees(machine, tmp_path):
    done = launch(machine, tmp_path / "run", "clipx.scope=lagged", HARDWARE_MODEL="14b", NNODES="2")
    assert done.returncode == 0, done.stderr
    names = [call[:3] for call in machine.calls]
    assert names[0] == ["clipx", "doctor", "--no-ray"]
    assert names[1] == ["clipx", "recipe", "plan"]
    assert names[2] == ["python3", "-m", "verl.trainer.main_ppo"]
    plan = next(call for call in machine.calls if call[1:3] == ["recipe", "plan"])
    assert plan[3:8] == ["acpo/countdown_3b_acpo_near", "--hardware", "a100x8", "--nodes", "2"]
    (verl,) = trained(machine)
    known_by_its_options = {"+hardware=a100x8", "+recipe=acpo/countdown_3b_acpo_near", f"hydra.run.dir={tmp_path}/run"}
    assert set(plan[8:]) == set(verl[3:]) - known_by_its_options
    assert "clipx.scope=lagged" in plan


def test_a_failed_check_stops_before_verl(machine, tmp_path):
    done = launch(machine, tmp_path / "run", CLIPX_FAILS="doctor")
    assert done.returncode == 1
    assert trained(machine) == []
    assert not (tmp_path / "run").exists()


def test_a_failed_estimate_stops_no_run(machine, tmp_path):
    done = launch(machine, tmp_path / "run", CLIPX_FAILS="recipe")
    assert done.returncode == 0 and len(trained(machine)) == 1
    assert "there is no estimate" in done.stderr


def test_the_checks_can_be_left_out(machine, tmp_path):
    done = launch(machine, tmp_path / "run", PREFLIGHT="0")
    assert done.returncode == 0
    assert all(call[0] == "python3" for call in machine.calls) and len(trained(machine)) == 1


def test_the_plan_is_left_out_where_it_knows_nothing(machine, tmp_path):
    assert launch(machine, tmp_path / "run", HARDWARE="cpu").returncode == 0
    assert [call[1] for call in machine.calls if call[0] == "clipx"] == ["doctor"]


def test_the_exit_code_is_verls(machine, tmp_path):
    assert launch(machine, tmp_path / "run", VERL_EXIT="3").returncode == 3
