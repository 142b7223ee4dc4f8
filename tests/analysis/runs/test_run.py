"""Runs as settings: what groups them, names them and sets them apart, by configurations from a record, from Hydra and
none; what was trained, in words. Not covered: which keys of verl's real configuration count (test_sameness.py).
"""

import json
from dataclasses import replace

import pandas
import pytest

from tests.analysis.runs.example_runs import write_log
from tests.messages import assert_names
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.sameness import flat
from verl_clipx.analysis.runs.settings import find_differing_values, settings_of
from verl_clipx.analysis.runs.trained import describe_training
from verl_clipx.run.record import record_of
from verl_clipx.training.trainer.log import write_record

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model.path"
TRAIN_FILES = "data.train_files"
MICRO_BATCH = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
REWARD_PATH = "reward.custom_reward_function.path"
ONE_STEP = [{"actor/entropy": 1.0, "critic/score/mean": 0.5}]


@pytest.fixture
def make_run(tmp_path):
    """A function that writes a run, with a record if it is given a configuration, and reads it."""

    def make(name, configuration=None, rows=ONE_STEP, first_step=1):
        log = write_log(tmp_path / name / "metrics.jsonl", rows, first_step)
        if configuration:
            write_record(log, configuration)
        return read_run(tmp_path / name)

    return make


@pytest.fixture
def make_run_of(make_run):
    """A function that returns a run with a configuration of dotted keys, as if its record kept all of it."""

    def make(name, configuration):
        return replace(make_run(name), configuration=configuration, record=None)

    return make


def configure(name, *, seed=1, lr=1e-6, **clipx):
    """Return the configuration of a run that has this clipx node, and names and places of its own."""
    return {
        "clipx": clipx,
        "data": {"seed": seed},
        "trainer": {"default_local_dir": f"/runs/{name}", "experiment_name": name, "total_epochs": 3},
        "actor_rollout_ref": {
            "actor": {"optim": {"lr": lr}, "data_loader_seed": seed, "policy_loss": {"clipx": clipx}},
            "rollout": {"trace": {"experiment_name": name}},
        },
    }


def label_settings(runs) -> list[str]:
    return [setting.label for setting in settings_of(runs)]


def test_in_bypass_mode_the_entropy_of_the_updates_is_read(make_run):
    run = make_run("bypass", rows=[{"actor/entropy_loss": 2.0}, {"actor/entropy_loss": 1.5}])
    assert run.values(keys.ENTROPY).tolist() == [2.0, 1.5]


def test_the_entropy_of_the_old_policy_is_read_where_both_are_logged(make_run):
    run = make_run("both", rows=[{"actor/entropy": 3.0, "actor/entropy_loss": 2.0}])
    assert run.values(keys.ENTROPY).tolist() == [3.0]


def test_seeds_names_and_places_do_not_make_a_setting(make_run):
    settings = settings_of(
        [
            make_run("a", configure("a", seed=1, method="acpo")),
            make_run("b", configure("b", seed=2, method="acpo")),
            make_run("c", configure("c", seed=1, method="grpo")),
        ]
    )
    names_by_label = {setting.label: [run.name for run in setting.runs] for setting in settings}
    assert names_by_label == {"ACPO": ["a", "b"], "GRPO": ["c"]}


def test_settings_of_two_methods_differ_in_the_method_and_its_parameters_with_their_defaults(make_run):
    acpo = make_run("a", configure("a", method="acpo"))
    grpo = make_run("c", configure("c", method="grpo"))
    differing = find_differing_values([acpo, grpo])
    assert differing["clipx.method"] == ['"acpo"', '"grpo"']
    assert differing["clipx.alpha"] == ["3", None]
    assert {key.partition(".")[0] for key in differing} == {"clipx"}


def test_a_key_that_a_method_does_not_read_makes_no_setting(make_run_of):
    clip_ratio_high = f"{ACTOR}.clip_ratio_high"
    # Only the record of the second run says that its method left the key unread.
    acpo = {"clipx.method": "acpo", clip_ratio_high: 0.2}
    acpo_with_other_value = {
        "clipx.method": "acpo",
        clip_ratio_high: 0.28,
        **flat({"actor_rollout_ref": {"actor": {"policy_loss": {"run": {"unused": {clip_ratio_high: 0.28}}}}}}),
    }
    runs = [
        make_run_of("a", acpo),
        make_run_of("b", acpo_with_other_value),
        make_run_of("c", {"clipx.method": "grpo", clip_ratio_high: 0.28}),
        make_run_of("d", {"clipx.method": "grpo", clip_ratio_high: 0.2}),
    ]
    assert [[run.name for run in setting.runs] for setting in settings_of(runs)] == [["a", "b"], ["c"], ["d"]]


@pytest.mark.parametrize(
    ("key", "values", "scope", "settings"),
    [
        pytest.param(MODEL, ["/a/small", "/b/small"], "mini_batch", 1, id="one model in two places"),
        pytest.param(MODEL, ["/a/small", "/a/large"], "mini_batch", 2, id="two models"),
        pytest.param(
            TRAIN_FILES,
            [["/x/gsm8k/train.parquet"], ["/y/gsm8k/train.parquet"]],
            "mini_batch",
            1,
            id="one data set in two places",
        ),
        pytest.param(
            TRAIN_FILES, ["/x/gsm8k/train.parquet", "/x/math/train.parquet"], "mini_batch", 2, id="two data sets"
        ),
        pytest.param(MICRO_BATCH, [4, 8], "mini_batch", 1, id="two micro-batches"),
        pytest.param(MICRO_BATCH, [4, 8], "micro_batch", 2, id="two micro-batches that the statistics are over"),
    ],
)
def test_the_model_the_data_and_under_one_scope_the_micro_batches_are_of_the_setting(
    make_run_of, key, values, scope, settings
):
    clipx = {"clipx.method": "acpo", "clipx.scope": scope}
    runs = [make_run_of("a", clipx | {key: values[0]}), make_run_of("b", clipx | {key: values[1]})]
    assert len(settings_of(runs)) == settings


@pytest.mark.parametrize("schema", [None, 1])
def test_credentials_of_an_older_record_are_not_read(make_run, tmp_path, schema):
    make_run("x", {"clipx": {"method": "acpo"}})
    path = tmp_path / "x" / "metrics.run.json"
    record = json.loads(path.read_text())
    record["schema"] = schema
    record["configuration"]["reward"] = {"api_key": "xyz", "num_workers": 3}
    record["configuration"]["data.train_files"] = "http://me:xyz@host/path"
    path.write_text(json.dumps(record))
    run = read_run(tmp_path / "x")
    assert "xyz" not in str(run.record)
    assert run.configuration["reward.num_workers"] == 3
    assert run.configuration["data.train_files"] == "http://host/path"


def test_settings_of_one_method_are_named_by_what_sets_them_apart(make_run):
    alphas = [make_run(name, configure(name, method="acpo", alpha=alpha)) for name, alpha in (("a", 3.0), ("b", 2.0))]
    assert label_settings(alphas) == ["ACPO, alpha 3", "ACPO, alpha 2"]
    rates = [make_run(name, configure(name, method="acpo", lr=lr)) for name, lr in (("c", 1e-6), ("d", 1e-5))]
    assert label_settings(rates) == ["ACPO, lr 1e-06", "ACPO, lr 1e-05"]


def test_a_run_that_observes_a_loss_of_verls_is_named_by_that_loss(make_run):
    observed = {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "gspo"}}}}
    assert make_run("x", {"clipx": {"method": "observe"}, **observed}).method == "gspo"


def test_runs_of_losses_of_ones_own_are_named_by_their_functions(make_run_of):
    runs = [make_run_of(name, {"clipx.function": f"my.losses:{name}"}) for name in ("soft", "hard")]
    assert label_settings(runs) == ["soft", "hard"]


def test_hydras_configuration_serves_where_there_is_no_record(make_run, tmp_path):
    (tmp_path / "y" / ".hydra").mkdir(parents=True)
    (tmp_path / "y" / ".hydra" / "config.yaml").write_text("clipx: {method: bapo}\ndata: {seed: 7, x: '${nowhere}'}\n")
    run = make_run("y")
    assert run.method == "bapo"
    assert run.seed == 7
    assert run.versions == {}


def test_a_run_without_a_configuration_is_a_setting_of_its_own_with_its_folder_s_name(make_run):
    runs = [make_run("acpo-seed1"), make_run("acpo-seed12"), make_run("grpo-seed1")]
    assert [run.seed for run in runs] == [1, 12, 1]
    settings = settings_of(runs)
    assert [setting.label for setting in settings] == ["acpo-seed1", "acpo-seed12", "GRPO"]
    assert [len(setting.runs) for setting in settings] == [1, 1, 1]


def test_long_names_of_folders_are_cut_to_what_differs(make_run):
    names = [f"qwen3_8b_long_context_{method}_lr1e6_batch512_seed" for method in ("grpo", "acpo")]
    rows = [{keys.REWARD: 0.5, keys.ENTROPY: 1.0}] * 3
    assert label_settings([make_run(name, rows=rows) for name in names]) == ["grpo", "acpo"]


def test_long_names_that_differ_in_a_number_keep_the_word_before_it(make_run):
    settings = settings_of([make_run(f"a_long_name_of_a_run_{number}") for number in (1, 2)])
    assert [setting.name_of(setting.runs[0]) for setting in settings] == ["run 1", "run 2"]


def test_a_log_is_named_by_its_folder_or_itself(tmp_path):
    assert read_run(write_log(tmp_path / "mine" / "metrics.jsonl", ONE_STEP)).name == "mine"
    assert read_run(write_log(tmp_path / "project" / "experiment.jsonl", ONE_STEP)).name == "experiment"


def test_a_log_that_is_not_of_a_policy_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not the log of a policy's training"):
        read_run(write_log(tmp_path / "metrics.jsonl", [{"train/loss": 1.0}]))


def test_only_steps_that_all_runs_of_a_setting_have_count(make_run):
    steps_1_and_2 = make_run("a-seed1", configure("a", seed=1, method="acpo"), [{"actor/x": 1.0}, {"actor/x": 2.0}])
    steps_2_and_3 = make_run(
        "a-seed2", configure("a", seed=2, method="acpo"), [{"actor/x": 4.0}, {"actor/x": 6.0}], first_step=2
    )
    (setting,) = settings_of([steps_1_and_2, steps_2_and_3])
    assert setting.mean("actor/x").to_dict() == {2: 3.0}
    assert setting.mean("actor/y").empty


ONE_LOGGED_STEP = pandas.DataFrame({"actor/entropy": [1.0]}, index=[1])
COUNTDOWN_REWARD = {REWARD_PATH: "pkg://verl_clipx.papers.tasks.countdown.reward"}
ALL_THAT_THE_LINE_NAMES = {
    MODEL: "/models/Qwen/Qwen2.5-7B/",
    TRAIN_FILES: ["/data/math/train.parquet", "/data/code/train.parquet"],
    "data.train_batch_size": 512,
    "actor_rollout_ref.rollout.n": 16,
    f"{ACTOR}.ppo_mini_batch_size": 32,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.optim.lr": 1e-6,
    "trainer.nnodes": 4,
    "trainer.n_gpus_per_node": 8,
    "trainer.device": "cuda",
}


@pytest.mark.parametrize(
    ("parameters", "size"),
    [
        (1_000_064, "1M"),
        (873_000, "873K"),
        (999_936, "1M"),
        (494_032_768, "494M"),
        (1_540_000_000, "1.5B"),
        (950, "950"),
    ],
)
def test_a_model_whose_name_a_program_made_is_named_by_its_size(parameters, size):
    record = record_of({MODEL: "policies/tiny_policy-43c84e590a02bc27-363b5dcf70fd609e", **COUNTDOWN_REWARD})
    record = replace(record, model=replace(record.model, parameters=parameters))
    run = Run("run", ONE_LOGGED_STEP, record=record)
    assert describe_training({"M": [run]}) == [f"A policy of {size} parameters on Countdown."]


def test_the_line_names_all_that_the_record_has_and_the_days_on_which_the_runs_started():
    records = [
        {"accelerators": ["H100"], "started": "2026-11-22 10:00 UTC"},
        {"accelerators": ["H100"], "started": "2026-11-21 10:00 UTC"},
    ]
    runs = [
        Run("run", ONE_LOGGED_STEP, ALL_THAT_THE_LINE_NAMES, record_of(ALL_THAT_THE_LINE_NAMES, record))
        for record in records
    ]
    training, days = describe_training({"M": runs})
    assert_names(training, "Qwen2.5-7B", "math/train.parquet and code/train.parquet")
    assert_names(training, "512 prompts × 16 responses a rollout batch", "16 updates on each")
    assert_names(training, "learning rate 1e-06", "4 × 8 H100")
    assert_names(days, "2026-11-21 10:00 UTC to 2026-11-22 10:00 UTC")


@pytest.mark.parametrize(
    ("configuration", "record", "lines"),
    [
        pytest.param({}, {}, [], id="nothing"),
        pytest.param(
            {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 2, "trainer.device": "cpu"},
            {},
            ["2 workers on the CPU."],
            id="CPU",
        ),
        pytest.param(
            {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 2},
            {"accelerators": 3},
            ["2 accelerators."],
            id="accelerators without names",
        ),
        pytest.param({"trainer.nnodes": 1, "trainer.n_gpus_per_node": 1}, {}, ["1 accelerator."], id="one accelerator"),
        pytest.param({TRAIN_FILES: "gsm8k.parquet"}, {}, ["gsm8k.parquet."], id="a file"),
        pytest.param({f"{ACTOR}.optim.lr": None, "trainer.nnodes": "x"}, {}, [], id="no numbers"),
        # The name that a program gave, and the task that a reward's folder names.
        pytest.param(
            {MODEL: "policies/tiny_policy-43c84e590a02bc27", **COUNTDOWN_REWARD},
            {},
            ["tiny policy on Countdown."],
            id="a made policy and a task of the package",
        ),
        pytest.param(
            {REWARD_PATH: "/x/knights_and_knaves/reward.py"}, {}, ["Knights and knaves."], id="a task by its folder"
        ),
        pytest.param(
            {REWARD_PATH: "/x/my_rewards.py", TRAIN_FILES: "gsm8k.parquet"},
            {},
            ["gsm8k.parquet."],
            id="a reward that names no task",
        ),
        pytest.param({MODEL: "/models/my-model-20250115"}, {}, ["my-model-20250115."], id="a date, which is no hash"),
        pytest.param({REWARD_PATH: "/x/GSM8K/reward.py"}, {}, ["GSM8K."], id="an abbreviation keeps its capitals"),
        pytest.param({REWARD_PATH: "/x/gsm8k-v1.5/reward.py"}, {}, ["Gsm8k-v1.5."], id="a dot in a folder's name"),
        pytest.param(
            {MODEL: f"/hub/models--Qwen--Qwen2.5-0.5B/snapshots/{'ab' * 20}"},
            {},
            ["Qwen2.5-0.5B."],
            id="Hugging Face's cache",
        ),
    ],
)
def test_the_line_has_what_the_record_has(configuration, record, lines):
    run = Run("run", ONE_LOGGED_STEP, configuration, record_of(configuration, record))
    assert describe_training({"M": [run]}) == lines


def test_settings_that_were_trained_otherwise_have_lines_with_their_labels():
    small = Run("run", ONE_LOGGED_STEP, {TRAIN_FILES: "gsm8k.parquet", "data.train_batch_size": 8})
    large = Run("run", ONE_LOGGED_STEP, {TRAIN_FILES: "gsm8k.parquet", "data.train_batch_size": 64})
    assert describe_training({"A": [small, small], "B": [large], "C": [small]}) == [
        "A, C: gsm8k.parquet, 8 prompts a rollout batch.",
        "B: gsm8k.parquet, 64 prompts a rollout batch.",
    ]
