"""What a recipe does around verl, which is a stand-in here: the checks come first and stop the run, the exit code is
verl's. By DRY_RUN=1 the commands that the recipes would run: every preset is reached by some recipe's variables and
nothing else is; each user variable's override, whatever quotes, backslashes, dollar signs, blanks, line ends and words
of Hydra's are in it; a few commands composed on verl's own configuration. Not covered: the checks themselves, verl.
"""

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from verl.trainer.ppo.reward import get_custom_reward_fn

from verl_clipx.papers.tables.presets import preset_names

from .shell import RECIPES, ROOT, Machine, overrides_of

RECIPE = RECIPES / "acpo/run_qwen2.5_3b_fsdp.sh"

# Runs in place of Python: `python3 -m …`, verl's start, only ends with the code in VERL_EXIT; all else is the real
# Python.
PYTHON_WITHOUT_VERL = f"""
if [[ $1 == -m ]]; then
    exit "${{VERL_EXIT:-0}}"
fi
exec {sys.executable} "$@"
"""


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path / "machine", python3=PYTHON_WITHOUT_VERL, clipx='[[ $1 != "${CLIPX_FAILS:-}" ]]')


def launch(machine, folder, *words, **variables):
    return machine.run(RECIPE, *words, RUN_FOLDER=str(folder), **variables)


def training_calls(machine):
    return [call for call in machine.calls if call[:2] == ["python3", "-m"]]


def test_doctor_and_explain_come_before_verl_and_see_what_verl_sees(machine, tmp_path):
    result = launch(machine, tmp_path / "run", "clipx.scope=lagged", HARDWARE_MODEL="14b", NNODES="2")
    assert result.returncode == 0, result.stderr
    doctor, explain, check, verl = machine.calls
    assert doctor == ["clipx", "doctor", "--no-ray"]
    assert explain[:4] == ["clipx", "explain", "--", "env"] and explain[6:] == verl
    assert check[1:5] == ["papers", "recipe", "check", "acpo/countdown_3b_acpo_near"]
    assert set(check[5:]) == set(verl[3:]) - {"+recipe=acpo/countdown_3b_acpo_near", f"hydra.run.dir={tmp_path}/run"}
    assert verl[1:3] == ["-m", "verl.trainer.main_ppo"] and verl[-1] == "clipx.scope=lagged"
    # The command, and nothing of the shell's: what a dry run prints.
    assert result.stderr == "" and overrides_of(result.stdout) == verl[3:]


@pytest.mark.parametrize("check", ["doctor", "explain"])
def test_a_failed_check_stops_before_verl(machine, tmp_path, check):
    result = launch(machine, tmp_path / "run", CLIPX_FAILS=check)
    assert result.returncode == 1 and training_calls(machine) == [] and not (tmp_path / "run").exists()


def test_unusable_data_stop_no_run_and_the_exit_code_is_verls(machine, tmp_path):
    result = launch(machine, tmp_path / "run", CLIPX_FAILS="papers", VERL_EXIT="3")
    assert result.returncode == 3 and len(training_calls(machine)) == 1
    assert "the run starts all the same" in result.stderr
    machine.record.unlink()
    assert launch(machine, tmp_path / "run", HARDWARE="cpu").returncode == 0
    assert [call[1] for call in machine.calls if call[0] == "clipx"] == ["doctor", "explain"]


@pytest.mark.parametrize("variable", ["PREFLIGHT", "CLIPX_EXPLAIN"])
def test_the_checks_can_be_left_out_and_are_while_the_recipe_is_explained(machine, tmp_path, variable):
    assert launch(machine, tmp_path / "run", **{variable: "0"}).returncode == 0
    assert all(call[0] == "python3" for call in machine.calls) and len(training_calls(machine)) == 1


GROUPS = ("acpo", "ar_lopti", "bapo", "cpu", "dgpo")

# What each recipe offers.
OFFERED = yaml.safe_load(Path(__file__).with_name("offered.yaml").read_text())


@pytest.fixture
def dry_run(tmp_path):
    machine = Machine(tmp_path / "machine")

    def run(recipe, *words, **variables):
        result = machine.run(RECIPES / recipe, *words, DRY_RUN="1", **variables)
        assert (result.returncode, result.stderr) == (0, "")
        return overrides_of(result.stdout)

    return run


def presets() -> set[str]:
    return {name for name in preset_names() if name.split("/")[0] in GROUPS}


@pytest.mark.slow
def test_the_recipes_reach_every_preset(dry_run):
    assert {str(file.relative_to(RECIPES)) for group in GROUPS for file in (RECIPES / group).iterdir()} == set(OFFERED)
    reached = set()
    for recipe, offers in OFFERED.items():
        for offer in offers:
            for values in product(*offer.values()):
                overrides = dry_run(recipe, **dict(zip(offer, values, strict=True)))
                (preset,) = [word.removeprefix("+recipe=") for word in overrides if word.startswith("+recipe=")]
                assert preset not in reached, f"two ways to {preset}"
                reached.add(preset)
    assert reached == presets()


def test_what_is_not_set_is_left_to_the_preset(dry_run):
    overrides = dry_run("acpo/run_qwen2.5_3b_fsdp.sh")
    assert overrides[:2] == ["+hardware=a100x8", "+recipe=acpo/countdown_3b_acpo_near"]
    set_by_presets = {"actor_rollout_ref.model.path", "actor_rollout_ref.rollout.n", "actor_rollout_ref.actor.optim.lr"}
    set_by_presets |= {f"data.{key}" for key in ("train_files", "val_files")}
    set_by_presets |= {f"trainer.{key}" for key in ("total_training_steps", "save_freq", "test_freq", "project_name")}
    assert set_by_presets.isdisjoint(override.partition("=")[0] for override in overrides)


# A list of starts, each a table from variable to its value and the override that it must become.
STARTS = yaml.safe_load(Path(__file__).with_name("variables.yaml").read_text())


@pytest.mark.parametrize("variables", STARTS)
def test_each_variable_becomes_an_override(dry_run, variables):
    values = {variable: value for variable, (value, _) in variables.items()}
    overrides = dry_run("acpo/run_qwen2.5_3b_fsdp.sh", **values)
    assert {expected.format(root=ROOT) for _, expected in variables.values()} <= {*overrides}


def test_a_cluster_that_is_there_is_not_told_what_it_has_and_the_users_overrides_come_last(dry_run):
    no_number_of_gpus = "ray_kwargs.ray_init.num_gpus=null"
    own_overrides = ["clipx.m=3", "data.train_files=[a b,c]"]
    overrides = dry_run("cpu/run_tiny_fsdp.sh", *own_overrides, RAY_ADDRESS="10.0.0.1:6379", NNODES="2", SEED="5")
    assert no_number_of_gpus in overrides and overrides[-2:] == own_overrides
    alone = dry_run("cpu/run_tiny_fsdp.sh")
    assert no_number_of_gpus not in alone and alone[:2] == ["+hardware=cpu", "+recipe=cpu/countdown_grpo_near"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "variables", "machines"),
    [
        ("acpo/run_qwen2.5_7b_fsdp.sh", {"METHOD": "ar_lopti", "REGIME": "off", "HARDWARE": "a100x4"}, (1, 4)),
        ("dgpo/run_r1_distill_qwen_14b_fsdp.sh", {"NNODES": "2", "HARDWARE": "h100x8"}, (2, 8)),
    ],
)
def test_the_command_composes_on_verls_configuration(dry_run, recipe, variables, machines):
    overrides = dry_run(recipe, RUN_FOLDER="/shared/run", CLIPX_DATA="/shared/data", SEED="3", **variables)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides)
    trainer, actor_rollout_ref = config.trainer, config.actor_rollout_ref
    assert (trainer.nnodes, trainer.n_gpus_per_node) == machines and list(trainer.logger) == ["console", "file"]
    assert (trainer.resume_mode, trainer.default_local_dir) == ("auto", "/shared/run/checkpoints")
    assert actor_rollout_ref.rollout.name == "vllm"
    assert (config.data.seed, actor_rollout_ref.actor.data_loader_seed, actor_rollout_ref.rollout.seed) == (3, 3, 3)
    environment = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert environment.CLIPX_DATA == "/shared/data"
    assert Path(environment.VERL_FILE_LOGGER_PATH) == Path("/shared/run/metrics.jsonl")


NAMES_HARD_TO_QUOTE = (
    # Quotes and backslashes.
    *("a\\", "a\\\\", "\\", "a b\\", "a\\'b", "a\\\\'b", "it's", "'", "x'", "'\\", '"q"', '"\\', "a\\b", "a\\\nb"),
    # What a shell would expand or split.
    *("$HOME", "a${b}c", "a\\${b}", "${", "$'x'", "a$", "a$b", "`ls`", "a b", " a", "a ", "a\tb", "a\nb"),
    # What Hydra or YAML would read as something other than a text.
    *("1", "null", "1e3", "a,b", "[x]", "{a: b}", "(x)", "a=b", "a:b", "#x", "~", "*", "%d", "ü", "true"),
)
# Variable of a recipe to its value, where {} stands for the name, and the key that gets it. Folders are absolute, so
# that they stay as they are.
NAME_VARIABLES = {
    "EXPERIMENT_NAME": ("{}", "trainer.experiment_name"),
    "PROJECT_NAME": ("{}", "trainer.project_name"),
    "MODEL_PATH": ("/r/{}", "actor_rollout_ref.model.path"),
    "TRAIN_FILE": ("/r/{}", "data.train_files"),
    "CLIPX_DATA": ("/r/{}", "+ray_kwargs.ray_init.runtime_env.env_vars.CLIPX_DATA"),
    "RUN_FOLDER": ("/r/{}/x", "hydra.run.dir"),
}


@pytest.mark.parametrize("name", NAMES_HARD_TO_QUOTE)
def test_a_name_reaches_hydra_as_it_is(dry_run, name):
    values = {variable: form.replace("{}", name) for variable, (form, _) in NAME_VARIABLES.items()}
    overrides = dict(word.split("=", 1) for word in dry_run("acpo/run_qwen2.5_3b_fsdp.sh", **values))
    for variable, (_, key) in NAME_VARIABLES.items():
        value = OverridesParser.create().parse_override(f"k={overrides[key]}").value()
        assert str(OmegaConf.create({"k": value}).k) == values[variable], variable


def test_set_x_shows_no_fault_in_the_function_that_quotes():
    code = f"source {RECIPES}/text.sh; text ''; text \"a'\""
    result = subprocess.run(["bash", "-xeuo", "pipefail", "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "''\n'a\\''\n")


QUICK_START_RECIPES = ["countdown_tiny", "knights_and_knaves_tiny", "sums_pretrained"]


def quickstart(folder, recipe, **variables):
    """The configuration that a recipe of the quick start calls verl with."""
    # A stand-in for Python records what verl would be called with.
    machine = Machine(folder / "machine", python3="")
    result = machine.run(RECIPES / f"quickstart/run_{recipe}_cpu.sh", cwd=folder, METHOD="grpo", **variables)
    assert result.returncode == 0, result.stderr
    (call,) = machine.calls
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", call[call.index("verl.trainer.main_ppo") + 1 :])


def test_a_dry_run_of_the_quick_start_trains_nothing(tmp_path):
    machine = Machine(tmp_path / "machine", python3="")
    result = machine.run(RECIPES / "quickstart/run_countdown_tiny_cpu.sh", cwd=tmp_path, DRY_RUN="1", METHOD="dgpo")
    assert "+clipx=dgpo" in overrides_of(result.stdout) and result.stderr == ""
    assert machine.calls == [] and [path.name for path in tmp_path.iterdir()] == ["machine"]


@pytest.mark.parametrize("recipe", QUICK_START_RECIPES)
def test_the_quick_starts_folders_and_names_reach_verl_as_they_are(tmp_path, recipe):
    odd = str(tmp_path / "a=b,c 'd'")
    variables = dict.fromkeys(("RUN_FOLDER", "TRAIN_FILE", "TEST_FILE", "MODEL_PATH", "PROJECT_NAME"), odd)
    config = quickstart(tmp_path, recipe, EXPERIMENT_NAME="1e3", **variables)
    assert (config.trainer.experiment_name, config.trainer.project_name) == ("1e3", odd)
    assert (config.data.train_files, config.data.val_files, config.actor_rollout_ref.model.path) == (odd, odd, odd)
    assert config.trainer.default_local_dir == f"{odd}/checkpoints"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, "compute_score_of_last_answer"), ({"REWARD_FUNCTION": "compute_score"}, "compute_score")],
)
def test_the_pretrained_model_trains_on_the_chosen_reward(tmp_path, variables, expected):
    config = quickstart(tmp_path, "sums_pretrained", RUN_FOLDER=str(tmp_path / "run"), **variables)
    reward = get_custom_reward_fn(config)
    result = reward(data_source="sums", solution_str="40 + 2 = 42", ground_truth="42")
    # The answer is right, but is not a bare number.
    assert (result["acc"], result["format"], result["skill"]) == (float(expected != "compute_score"), 0, 1)
