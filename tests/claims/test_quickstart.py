"""What scripts/quickstart.sh runs: GRPO and the method, by seed, with whose overrides; which methods it refuses.

Covers: its order of commands, with stand-ins for Python and clipx. Not covered: training and the page
(tests/end_to_end/test_quickstart.py).
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.recipes.shell import Machine

from .test_groups import METHODS, REFUSED

SCRIPT = Path(__file__).parents[2] / "scripts" / "quickstart.sh"


# What would follow a missing refusal ends at its first step and leaves nothing behind.
NOWHERE = {"PYTHON": "/nowhere/python", "VENV": "/nowhere/venv", "RUNS": "/nowhere/runs"}


def refusal(*arguments: str) -> str:
    done = subprocess.run(
        ["bash", SCRIPT, *arguments], capture_output=True, text=True, check=False, env=os.environ | NOWHERE
    )
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


def test_its_list_is_of_the_groups_that_need_nothing_more():
    _, _, offered = refusal("nonsense").partition("there are: ")
    assert offered.split() == sorted(group.removeprefix("+clipx=") for group in {*METHODS} - {*REFUSED})


@pytest.mark.parametrize("group", sorted(REFUSED))
def test_a_group_that_cannot_train_as_it_is_is_refused_at_once(group):
    name = group.removeprefix("+clipx=")
    message = refusal(name)
    expected = {
        "base": "no method base",
        "custom": "add clipx.function=…",
        "grpo_clip_high_acpo": "add clipx.clip_high=…",
    }
    assert expected.get(name, "add clipx.clip_low=…") in message


def test_each_value_that_is_missing_is_asked_for():
    assert "add clipx.clip_high=…" in refusal("grpo_clip_acpo_average", "clipx.clip_low=0.5")


def commands(tmp_path, *arguments: str, **variables: str) -> tuple[list[list[str]], list[str]]:
    """The arguments of each training, as `clipx watch` gets them, and the runs that the page is of."""
    machine = Machine(tmp_path / "venv", python="echo policy", clipx="")
    done = machine.run(SCRIPT, *arguments, VENV=str(tmp_path / "venv"), RUNS=str(tmp_path / "runs"), **variables)
    assert done.returncode == 0, done.stderr
    calls = [words[1:] for words in machine.calls if words[0] == "clipx"]
    *trainings, (command, *folders) = calls
    assert command == "report" and {training[0] for training in trainings} == {"watch"}
    return [training[1:] for training in trainings], [Path(name).name for name in folders[: folders.index("--out")]]


def test_grpo_comes_first_and_gets_the_overrides_that_are_not_the_method_s(tmp_path):
    shared, own = "data.train_batch_size=8", ["clipx.alpha=2", "+clipx/update=lopti", "++clipx.bins=10"]
    (grpo, acpo), runs = commands(tmp_path, "acpo", own[0], shared, *own[1:], TOTAL_STEPS="3")
    assert runs == ["grpo-seed1", "acpo-seed1"]
    recipe = ["--", "bash", "recipes/quickstart/run_countdown_tiny_cpu.sh"]
    folder = str(tmp_path / "runs")
    assert grpo == [f"{folder}/grpo-seed1", "--steps", "3", "--label", "grpo", *recipe, shared]
    assert acpo == [f"{folder}/acpo-seed1", "--steps", "3", "--label", "acpo", *recipe, own[0], shared, *own[1:]]


def test_a_method_is_compared_by_seeds(tmp_path):
    _, runs = commands(tmp_path, "dgpo", SEED="2", SEEDS="3")
    assert runs == [f"{method}-seed{seed}" for seed in (2, 3, 4) for method in ("grpo", "dgpo")]


def test_grpo_stands_alone_with_all_overrides(tmp_path):
    ((*_, last),), runs = commands(tmp_path, "grpo", "clipx.clip_high=1.28")
    assert (last, runs) == ("clipx.clip_high=1.28", ["grpo-seed1"])


@pytest.mark.parametrize("wrong", [{"SEEDS": "0"}, {"SEEDS": "three"}, {"SEED": "-1"}, {"SEED": "08"}])
def test_seeds_are_whole_numbers(tmp_path, wrong):
    done = Machine(tmp_path).run(SCRIPT, **wrong, **NOWHERE)
    assert (done.returncode, done.stdout) == (2, "") and "give a whole number" in done.stderr
