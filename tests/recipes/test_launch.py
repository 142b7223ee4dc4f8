"""What a recipe does around verl, which is a stand-in here: the checks come first and stop the run, the exit code is
verl's. Not covered: the checks themselves, verl.
"""

import sys

import pytest

from .shell import RECIPES, Machine, overrides_of

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


def test_doctor_and_explain_come_before_verl_and_see_what_verl_sees(machine, tmp_path):
    done = launch(machine, tmp_path / "run", "clipx.scope=lagged", HARDWARE_MODEL="14b", NNODES="2")
    assert done.returncode == 0, done.stderr
    doctor, explain, plan, verl = machine.calls
    assert doctor == ["clipx", "doctor", "--no-ray"]
    assert explain[:4] == ["clipx", "explain", "--", "env"] and explain[6:] == verl
    assert plan[1:8] == ["recipe", "plan", "acpo/countdown_3b_acpo_near", "--hardware", "a100x8", "--nodes", "2"]
    known_by_its_options = {"+hardware=a100x8", "+recipe=acpo/countdown_3b_acpo_near", f"hydra.run.dir={tmp_path}/run"}
    assert set(plan[8:]) == set(verl[3:]) - known_by_its_options
    assert verl[1:3] == ["-m", "verl.trainer.main_ppo"] and verl[-1] == "clipx.scope=lagged"
    # The command, and nothing of the shell's: what a dry run prints.
    assert done.stderr == "" and overrides_of(done.stdout) == verl[3:]


@pytest.mark.parametrize("check", ["doctor", "explain"])
def test_a_failed_check_stops_before_verl(machine, tmp_path, check):
    done = launch(machine, tmp_path / "run", CLIPX_FAILS=check)
    assert done.returncode == 1 and trained(machine) == [] and not (tmp_path / "run").exists()


def test_a_failed_estimate_stops_no_run_and_the_exit_code_is_verls(machine, tmp_path):
    done = launch(machine, tmp_path / "run", CLIPX_FAILS="recipe", VERL_EXIT="3")
    assert done.returncode == 3 and len(trained(machine)) == 1
    assert "there is no estimate" in done.stderr
    machine.record.unlink()
    # It knows GPUs only.
    assert launch(machine, tmp_path / "run", HARDWARE="cpu").returncode == 0
    assert [call[1] for call in machine.calls if call[0] == "clipx"] == ["doctor", "explain"]


@pytest.mark.parametrize("variable", ["PREFLIGHT", "CLIPX_EXPLAIN"])
def test_the_checks_can_be_left_out_and_are_while_the_recipe_is_explained(machine, tmp_path, variable):
    assert launch(machine, tmp_path / "run", **{variable: "0"}).returncode == 0
    assert all(call[0] == "python3" for call in machine.calls) and len(trained(machine)) == 1
