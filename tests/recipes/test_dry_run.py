"""The commands that the recipes would run, by DRY_RUN=1.

Covers: every preset is reached by some recipe's variables and nothing else is; each user variable's
override; a few commands composed on verl's own configuration. Not covered: a run.
"""

from itertools import product
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from verl.trainer.ppo.reward import get_custom_reward_fn

from verl_clipx.papers.tables.presets import preset_names

from .shell import RECIPES, ROOT, Machine, overrides_of

GROUPS = ("acpo", "ar_lopti", "bapo", "cpu", "dgpo")

ACPO_REGIMES = ["near", "off", "near_script", "off_script"]
ACPO_METHODS = ["acpo", "dapo", "cispo"]
AR_LOPTI = [
    f"{algorithm}{variant}{script}"
    for algorithm, variant, script in product(
        ("grpo", "reinforce"), ("", "_ar", "_lopti", "_ar_lopti"), ("", "_script")
    )
]
AR_LOPTI_GRPO = [method for method in AR_LOPTI if method.startswith("grpo")]
FIGURE_6 = [
    *("grpo_low_only", "grpo_lopti_high_first"),
    *(f"grpo_ar_alpha_0_{tenths}" for tenths in (1, 2, 4)),
    *(f"grpo_lopti_eta_0_{tenths}" for tenths in (1, 3, 7)),
]
BAPO = ["grpo", "clip_higher", "bapo"]
DGPO = ["grpo", "cispo", "gppo", "ce_gppo", "aspo", "dgpo"]
DGPO_GRID = [f"dgpo_n{n}_m{m}" for n, m in product((1, 2), (1, 2))]
CPU = [*DGPO, "dapo", "acpo", "bapo", "ar", "lopti"]
STALENESS = ["", "epochs_1", "epochs_2", "epochs_4", "partial_rollout", "separate_async", "script"]

# What each recipe offers: lists of values that go together, all combinations.
OFFERED = {
    "acpo/run_qwen2.5_3b_fsdp.sh": [
        {"DATA": ["countdown"], "METHOD": [*ACPO_METHODS, "clip_high", "clip_average"], "REGIME": ACPO_REGIMES},
        {"DATA": ["hitab"], "METHOD": ACPO_METHODS, "REGIME": ACPO_REGIMES},
    ],
    "acpo/run_qwen2.5_7b_fsdp.sh": [
        {"DATA": ["hitab"], "METHOD": ACPO_METHODS, "REGIME": ACPO_REGIMES},
        {
            "DATA": ["orz"],
            "METHOD": [*ACPO_METHODS, "ar", "lopti", "ar_lopti", "high_entropy", "low_entropy"],
            "REGIME": ACPO_REGIMES,
        },
    ],
    "ar_lopti/run_qwen2.5_3b_fsdp.sh": [{"METHOD": [*AR_LOPTI, *FIGURE_6]}],
    "ar_lopti/run_qwen2.5_7b_fsdp.sh": [
        {"DATA": ["kk"], "METHOD": AR_LOPTI},
        {"DATA": ["dsr", "orz"], "METHOD": AR_LOPTI_GRPO},
    ],
    "bapo/run_octothinker_llama_3b_fsdp.sh": [{"METHOD": BAPO}],
    "bapo/run_r1_distill_qwen_7b_fsdp.sh": [
        {"METHOD": BAPO, "REGIME": STALENESS},
        {"METHOD": ["clip_lower"]},
        {"METHOD": ["grpo"], "REGIME": ["epochs_1_8k", "epochs_4_8k", "on_policy"]},
        {"METHOD": ["grpo", "bapo"], "INITIAL_MODEL": ["bp_math"]},
    ],
    "bapo/run_r1_distill_qwen_32b_fsdp.sh": [
        {"METHOD": BAPO},
        {"METHOD": ["grpo", "bapo"], "INITIAL_MODEL": ["bp_math"]},
    ],
    "cpu/run_tiny_fsdp.sh": [
        {"DATA": ["countdown"], "METHOD": CPU, "REGIME": ["near", "off"]},
        {"DATA": ["kk"], "METHOD": ["grpo", "ar", "lopti", "ar_lopti"]},
    ],
    "dgpo/run_r1_distill_qwen_1.5b_fsdp.sh": [{"METHOD": [*DGPO, *DGPO_GRID]}],
    "dgpo/run_r1_distill_qwen_7b_fsdp.sh": [{"METHOD": [*DGPO, *DGPO_GRID]}],
    "dgpo/run_r1_distill_qwen_14b_fsdp.sh": [{"METHOD": DGPO}],
}


@pytest.fixture
def dry_run(tmp_path):
    machine = Machine(tmp_path / "machine")

    def run(recipe, *words, **variables):
        done = machine.run(RECIPES / recipe, *words, DRY_RUN="1", **variables)
        assert (done.returncode, done.stderr) == (0, "")
        return overrides_of(done.stdout)

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


@pytest.mark.parametrize(
    ("variable", "value", "override"),
    [
        ("HARDWARE", "h100x8", "+hardware=h100x8"),
        ("HARDWARE_MODEL", "14b", "+hardware/model=14b"),
        ("HARDWARE_RESPONSE", "64k", "+hardware/response=64k"),
        ("NNODES", "4", "trainer.nnodes=4"),
        ("NGPUS_PER_NODE", "4", "trainer.n_gpus_per_node=4"),
        ("MODEL_PATH", "some/hub-name", "actor_rollout_ref.model.path=some/hub-name"),
        ("MODEL_PATH", "recipes", f"actor_rollout_ref.model.path={RECIPES}"),
        ("TRAIN_FILE", "/data/train.parquet", "data.train_files=/data/train.parquet"),
        ("TEST_FILE", "[/a.parquet,/b.parquet]", "data.val_files=[/a.parquet,/b.parquet]"),
        ("ROLLOUT_N", "4", "actor_rollout_ref.rollout.n=4"),
        ("ACTOR_LR", "2e-6", "actor_rollout_ref.actor.optim.lr=2e-6"),
        ("TOTAL_STEPS", "7", "trainer.total_training_steps=7"),
        ("SAVE_FREQ", "3", "trainer.save_freq=3"),
        ("TEST_FREQ", "5", "trainer.test_freq=5"),
        ("SEED", "2", "data.seed=2"),
        ("SEED", "2", f"hydra.run.dir={ROOT}/runs/acpo/countdown_3b_acpo_near-seed2"),
        ("PROJECT_NAME", "mine", "trainer.project_name='mine'"),
        ("EXPERIMENT_NAME", "first_one", "trainer.experiment_name=first_one"),
        ("LOGGER", "[console,file,wandb]", "trainer.logger=[console,file,wandb]"),
        ("RUN_FOLDER", "elsewhere/run", f"trainer.default_local_dir={ROOT}/elsewhere/run/checkpoints"),
        ("RUN_FOLDER", "/shared/run", "trainer.validation_data_dir=/shared/run/validation"),
        (
            "CLIPX_DATA",
            "/shared/data",
            "+ray_kwargs.ray_init.runtime_env.env_vars.CLIPX_DATA=/shared/data",
        ),
    ],
)
def test_a_variable_becomes_an_override(dry_run, variable, value, override):
    assert override in dry_run("acpo/run_qwen2.5_3b_fsdp.sh", **{variable: value})


def test_a_cluster_that_is_there_is_not_told_what_it_has_and_the_users_overrides_come_last(dry_run):
    number, own = "ray_kwargs.ray_init.num_gpus=null", ["clipx.m=3", "data.train_files=[a b,c]"]
    overrides = dry_run("cpu/run_tiny_fsdp.sh", *own, RAY_ADDRESS="10.0.0.1:6379", NNODES="2", SEED="5")
    assert number in overrides and overrides[-2:] == own
    alone = dry_run("cpu/run_tiny_fsdp.sh")
    assert number not in alone and alone[:2] == ["+hardware=cpu", "+recipe=cpu/countdown_grpo_near"]


def test_an_unknown_method_stops_with_the_presets_that_there_are(tmp_path):
    machine = Machine(tmp_path / "machine")
    done = machine.run(RECIPES / "bapo/run_octothinker_llama_3b_fsdp.sh", DRY_RUN="1", METHOD="bpao")
    assert done.returncode == 2
    assert "no preset bapo/octothinker_3b_bpao" in done.stderr
    assert "\nbapo/octothinker_3b_bapo\n" in done.stderr and "bapo/base" not in done.stderr


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
    assert (trainer.nnodes, trainer.n_gpus_per_node) == machines
    assert (trainer.resume_mode, trainer.default_local_dir) == ("auto", "/shared/run/checkpoints")
    assert list(trainer.logger) == ["console", "file"]
    assert actor_rollout_ref.rollout.name == "vllm"
    assert (config.data.seed, actor_rollout_ref.actor.data_loader_seed, actor_rollout_ref.rollout.seed) == (3, 3, 3)
    environment = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert environment.CLIPX_DATA == "/shared/data"
    assert Path(environment.VERL_FILE_LOGGER_PATH) == Path("/shared/run/metrics.jsonl")


QUICKSTARTS = ["countdown_tiny", "knights_and_knaves_tiny", "sums_pretrained"]


def quickstart(folder, recipe, **variables):
    """The configuration that a recipe of the quick start calls verl with."""
    # In the place of Python: what verl would be called with.
    machine = Machine(folder / "machine", python3="")
    done = machine.run(RECIPES / f"quickstart/run_{recipe}_cpu.sh", cwd=folder, METHOD="grpo", **variables)
    assert done.returncode == 0, done.stderr
    ((_, *words),) = machine.calls
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", words[words.index("verl.trainer.main_ppo") + 1 :])


def test_a_dry_run_of_the_quick_start_trains_nothing(tmp_path):
    machine = Machine(tmp_path / "machine", python3="")
    done = machine.run(RECIPES / "quickstart/run_countdown_tiny_cpu.sh", cwd=tmp_path, DRY_RUN="1", METHOD="dgpo")
    assert "+clipx=dgpo" in overrides_of(done.stdout) and done.stderr == ""
    assert machine.calls == [] and [path.name for path in tmp_path.iterdir()] == ["machine"]


@pytest.mark.parametrize("recipe", QUICKSTARTS)
def test_the_quick_starts_folders_and_names_reach_verl_as_they_are(tmp_path, recipe):
    odd = str(tmp_path / "a=b,c 'd'")
    variables = dict.fromkeys(("RUN_FOLDER", "TRAIN_FILE", "TEST_FILE", "MODEL_PATH", "PROJECT_NAME"), odd)
    config = quickstart(tmp_path, recipe, EXPERIMENT_NAME="1e3", **variables)
    assert (config.trainer.experiment_name, config.trainer.project_name) == ("1e3", odd)
    assert (config.data.train_files, config.data.val_files, config.actor_rollout_ref.model.path) == (odd, odd, odd)
    assert config.trainer.default_local_dir == f"{odd}/checkpoints"


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "compute_score_of_last_answer"), ({"REWARD_FUNCTION": "compute_score"}, "compute_score")],
)
def test_the_pretrained_model_trains_on_the_chosen_reward(tmp_path, given, expected):
    config = quickstart(tmp_path, "sums_pretrained", RUN_FOLDER=str(tmp_path / "run"), **given)
    reward = get_custom_reward_fn(config)
    result = reward(data_source="sums", solution_str="40 + 2 = 42", ground_truth="42")
    # The answer is right, but is not a bare number.
    assert (result["acc"], result["format"], result["skill"]) == (float(expected != "compute_score"), 0, 1)
