"""Where a launcher's own arguments end and the command that it starts begins. What the command then does is in
test_explain_slurm.py.
"""

import pytest

from verl_clipx.run.stand_in import find_launched_command


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="none"),
        pytest.param(("--nodes=2", "--"), id="a double dash after them"),
        pytest.param(("--working-dir=./env", "--"), id="a folder with a program's name"),
        pytest.param(("--task-prolog=/x/prolog.sh",), id="a script as the value of an option"),
    ],
)
def test_the_command_begins_after_the_launchers_options(options):
    command = ["python", "train.py", "--", "key=value"]
    assert find_launched_command([*options, *command]) == command


def test_there_is_no_command_where_no_word_begins_one():
    assert find_launched_command(["--nodes=2", "hostname"]) == []
