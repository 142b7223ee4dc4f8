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


# From variables of a recipe to what becomes of them; folders are absolute, so that they stay as they are.
VARIABLES = {
    "EXPERIMENT_NAME": ("{}", "trainer.experiment_name"),
    "PROJECT_NAME": ("{}", "trainer.project_name"),
    "MODEL_PATH": ("/r/{}", "actor_rollout_ref.model.path"),
    "TRAIN_FILE": ("/r/{}", "data.train_files"),
    "CLIPX_DATA": ("/r/{}", "+ray_kwargs.ray_init.runtime_env.env_vars.CLIPX_DATA"),
    "RUN_FOLDER": ("/r/{}/x", "hydra.run.dir"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_reaches_hydra_as_it_is(name, tmp_path):
    values = {variable: form.replace("{}", name) for variable, (form, _) in VARIABLES.items()}
    done = Machine(tmp_path / "machine").run(RECIPES / "acpo/run_qwen2.5_3b_fsdp.sh", DRY_RUN="1", **values)
    assert done.returncode == 0, done.stderr
    given = dict(word.split("=", 1) for word in overrides_of(done.stdout))
    for variable, (_, key) in VARIABLES.items():
        value = OverridesParser.create().parse_override(f"k={given[key]}").value()
        assert str(OmegaConf.create({"k": value}).k) == values[variable], variable


def test_set_x_shows_no_fault_in_the_function(tmp_path):
    done = subprocess.run(
        ["bash", "-xeuo", "pipefail", "-c", f"source {RECIPES}/text.sh; text ''; text \"a'\""],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "''\n'a\\''\n")
