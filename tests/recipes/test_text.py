"""Names and folders reach Hydra as they are.

Covers: quotes, backslashes, dollar signs, blanks, line ends, and what Hydra would take for something else, from the
recipe's variables to the composed value. Not covered: verl.
"""

import subprocess

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from .shell import RECIPES, Machine, overrides_of

NAMES = (
    *("a\\", "a\\\\", "\\", "a b\\", "a\\'b", "a\\\\'b", "it's", "'", "x'", "'\\", '"q"', '"\\', "a\\b", "a\\\nb"),
    *("$HOME", "a${b}c", "a\\${b}", "${", "$'x'", "a$", "a$b", "`ls`", "a b", " a", "a ", "a\tb", "a\nb"),
    *("1", "null", "1e3", "a,b", "[x]", "{a: b}", "(x)", "a=b", "a:b", "#x", "~", "*", "%d", "ü", "true"),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_reaches_hydra_as_it_is(name, tmp_path):
    done = Machine(tmp_path / "machine").run(
        RECIPES / "acpo/run_qwen2.5_3b_fsdp.sh", EXPERIMENT_NAME=name, RUN_FOLDER=f"/r/{name}/x", DRY_RUN="1"
    )
    assert done.returncode == 0, done.stderr
    given = dict(word.split("=", 1) for word in overrides_of(done.stdout))
    for key, expected in (("trainer.experiment_name", name), ("hydra.run.dir", f"/r/{name}/x")):
        value = OverridesParser.create().parse_override(f"k={given[key]}").value()
        assert str(OmegaConf.create({"k": value}).k) == expected


def test_set_x_shows_no_fault_in_the_function(tmp_path):
    done = subprocess.run(
        ["bash", "-xeuo", "pipefail", "-c", f"source {RECIPES}/text.sh; text ''; text \"a'\""],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "''\n'a\\''\n")
