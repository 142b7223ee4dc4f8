"""Launchers with a mistake, by the list of mistakes.txt: a message, exit code 2, and nothing that starts."""

from pathlib import Path

import pytest

from .shell import RECIPES, Machine, stand_in
from .test_ssh import SSH

CLUSTER = RECIPES / "cluster"
RECIPE = "recipes/acpo/run_qwen2.5_7b_fsdp.sh"
MISTAKES = Path(__file__).with_name("mistakes.txt").read_text().splitlines()[1:]


@pytest.fixture
def machine(tmp_path):
    addresses = 'echo "${ADDRESSES-10.0.0.1}"'
    stand_ins = {name: stand_in(name) for name in ("sbatch", "scontrol", "srun")}
    return Machine(tmp_path / "machine", ssh=SSH, hostname=addresses, ray="", kubectl="", **stand_ins)


def refused(machine, launcher, *words, **settings):
    """What a launcher says before it ends, having started nothing."""
    jobs = ["--nodes=3", str(CLUSTER / "slurm.sh")] if launcher == "sbatch" else []
    script = machine.commands / "sbatch" if jobs else CLUSTER / launcher
    done = machine.run(script, *jobs, *words, **settings)
    assert done.returncode == 2
    assert not any(call[0] in ("ray", "kubectl") or "symmetric-run" in call for call in machine.calls)
    return done.stderr


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_says_what_to_do(machine, tmp_path, line):
    launcher, variables, words, message = map(str.strip, line.split(" @"))
    given = dict(variable.split("=", 1) for variable in variables.split())
    said = refused(machine, launcher, *words.replace("{recipe}", RECIPE).split(), WORKDIR=str(tmp_path), **given)
    assert message in said


def test_a_slurm_job_is_submitted_in_the_repositorys_root(machine, tmp_path):
    assert "not the root of the repository" in refused(machine, "sbatch", RECIPE, cwd=tmp_path)
