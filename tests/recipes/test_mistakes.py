"""Launchers with a mistake, by the list of mistakes.txt: a message, exit code 2, and nothing that starts."""

from pathlib import Path

import pytest

from .shell import RECIPES, Machine, stand_in
from .test_ssh import RUN_REMOTE_COMMAND_HERE

CLUSTER = RECIPES / "cluster"
RECIPE = "recipes/acpo/run_qwen2.5_7b_fsdp.sh"
MISTAKES = Path(__file__).with_name("mistakes.txt").read_text().splitlines()[1:]


@pytest.fixture
def machine(tmp_path):
    addresses = 'echo "${ADDRESSES-10.0.0.1}"'
    stand_ins = {name: stand_in(name) for name in ("sbatch", "scontrol", "srun")}
    stand_ins |= {"ssh": RUN_REMOTE_COMMAND_HERE, "hostname": addresses, "ray": "", "kubectl": ""}
    return Machine(tmp_path / "machine", **stand_ins)


def start_refused(machine, launcher, *words, **settings):
    """Starts a launcher, which must end with exit code 2 and have started nothing, and returns its message."""
    if launcher == "sbatch":
        result = machine.run(machine.commands / "sbatch", "--nodes=3", str(CLUSTER / "slurm.sh"), *words, **settings)
    else:
        result = machine.run(CLUSTER / launcher, *words, **settings)
    assert result.returncode == 2
    assert not any(call[0] in ("ray", "kubectl") or "symmetric-run" in call for call in machine.calls)
    return result.stderr


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_says_what_to_do(machine, tmp_path, line):
    launcher, variables, arguments, expected_message = map(str.strip, line.split(" @"))
    settings = dict(variable.split("=", 1) for variable in variables.split())
    words = arguments.replace("{recipe}", RECIPE).split()
    assert expected_message in start_refused(machine, launcher, *words, WORKDIR=str(tmp_path), **settings)


def test_a_slurm_job_is_submitted_in_the_repositorys_root(machine, tmp_path):
    assert "not the root of the repository" in start_refused(machine, "sbatch", RECIPE, cwd=tmp_path)
