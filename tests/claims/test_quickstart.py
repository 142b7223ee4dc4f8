"""The methods that scripts/quickstart.sh offers are the groups that train as they are; the others it refuses at once.

Not covered: a quickstart (tests/end_to_end has its training run).
"""

import os
import subprocess
from pathlib import Path

import pytest

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
