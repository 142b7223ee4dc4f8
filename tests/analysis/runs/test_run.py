"""Runs as settings: what groups them, names them and sets them apart, by configurations from a record, from Hydra and
none; what was trained, in words. Not covered: which keys of verl's real configuration count (test_sameness.py).
"""

import json
from dataclasses import replace

import pandas
import pytest

from tests.analysis.runs.example_runs import write_log
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.sameness import flat
from verl_clipx.analysis.runs.settings import find_differing_values, settings_of
from verl_clipx.analysis.runs.trained import describe_training
from verl_clipx.run.record import record_of
from verl_clipx.training.trainer.log import write_record

ROWS = [{"actor/entropy": 1.0, "critic/score/mean": 0.5}]


@pytest.fixture
def make(tmp_path):
    def run(name, configuration=None, rows=ROWS, first=1):
        log = write_log(tmp_path / name / "metrics.jsonl", rows, first)
        if configuration:
            write_record(log, configuration)
        return read_run(tmp_path / name)

    return run


def of_method(name, seed=1, lr=1e-6, **clipx):
    """A configuration of a run, with a name and places of its own."""
    return {
        "clipx": clipx,
        "data": {"seed": seed},
        "trainer": {"default_local_dir": f"/runs/{name}", "experiment_name": name, "total_epochs": 3},
        "actor_rollout_ref": {
            "actor": {"optim": {"lr": lr}, "data_loader_seed": seed, "policy_loss": {"clipx": clipx}},
            "rollout": {"trace": {"experiment_name": name}},
        },
    }


def test_which_entropy_is_read(make):
    # In bypass mode that of the updates.
    of_updates = make("bypass", rows=[{"actor/entropy_loss": 2.0}, {"actor/entropy_loss": 1.5}])
    assert of_updates.values(keys.ENTROPY).tolist() == [2.0, 1.5]
    both = make("both", rows=[{"actor/entropy": 3.0, "actor/entropy_loss": 2.0}])
    assert both.values(keys.ENTROPY).tolist() == [3.0]


def test_seeds_names_and_places_do_not_make_a_setting(make):
    given = {"a": (1, "acpo"), "b": (2, "acpo"), "c": (1, "grpo")}
    settings = settings_of([make(name, of_method(name, seed, method=one)) for name, (seed, one) in given.items()])
    assert [(one.label, [run.name for run in one.runs]) for one in settings] == [("ACPO", ["a", "b"]), ("GRPO", ["c"])]
    apart = find_differing_values([one.runs[0] for one in settings])
    # The methods' parameters, with their defaults.
    assert apart.pop("clipx.method") == ['"acpo"', '"grpo"'] and apart["clipx.alpha"] == ["3", None]
    assert {key.partition(".")[0] for key in apart} == {"clipx"}


def test_what_a_method_does_not_read_makes_no_setting(make):
    key, runs = f"{ACTOR}.clip_ratio_high", []
    for name, method, value in (("a", "acpo", 0.2), ("b", "acpo", 0.28), ("c", "grpo", 0.28), ("d", "grpo", 0.2)):
        unused = {"run": {"unused": {key: value}}} if name == "b" else {}
        actor = {"clip_ratio_high": value, "policy_loss": unused}
        configuration = flat({"clipx": {"method": method}, "actor_rollout_ref": {"actor": actor}})
        runs.append(replace(make(name), configuration=configuration, record=None))
    settings = settings_of(runs)
    assert [[run.name for run in one.runs] for one in settings] == [["a", "b"], ["c"], ["d"]]


ACTOR = "actor_rollout_ref.actor"
MODEL, DATA = "actor_rollout_ref.model.path", "data.train_files"
MICRO = f"{ACTOR}.ppo_micro_batch_size_per_gpu"


@pytest.mark.parametrize(
    ("key", "pair", "scope", "settings"),
    [
        (MODEL, ["/a/small", "/b/small"], "mini_batch", 1),
        (MODEL, ["/a/small", "/a/large"], "mini_batch", 2),
        (DATA, [["/x/gsm8k/train.parquet"], ["/y/gsm8k/train.parquet"]], "mini_batch", 1),
        (DATA, ["/x/gsm8k/train.parquet", "/x/math/train.parquet"], "mini_batch", 2),
        (MICRO, [4, 8], "mini_batch", 1),
        (MICRO, [4, 8], "micro_batch", 2),
    ],
)
def test_the_model_the_data_and_under_one_scope_the_micro_batches_are_of_the_setting(make, key, pair, scope, settings):
    clipx = {"clipx.method": "acpo", "clipx.scope": scope}
    runs = [
        replace(make(name), configuration=clipx | {key: one}, record=None) for name, one in zip("ab", pair, strict=True)
    ]
    assert len(settings_of(runs)) == settings


def test_credentials_of_an_older_record_are_not_read(make, tmp_path):
    make("x", {"clipx": {"method": "acpo"}})
    path = tmp_path / "x" / "metrics.run.json"
    record = json.loads(path.read_text())
    record["configuration"]["reward"] = {"api_key": "xyz", "num_workers": 3}
    record["configuration"]["data.train_files"] = "http://me:xyz@host/path"
    for schema in (None, 1):
        path.write_text(json.dumps({**record, "schema": schema}))
        read = read_run(tmp_path / "x")
        assert "xyz" not in str(read.record) and read.configuration["reward.num_workers"] == 3
        assert read.configuration["data.train_files"] == "http://host/path"


def test_what_names_a_setting(make, tmp_path):
    def labels(**values):
        return [
            one.label for one in settings_of([make(n, of_method(n, method="acpo", **v)) for n, v in values.items()])
        ]

    # What sets apart those of one method.
    assert labels(a={"alpha": 3.0}, b={"alpha": 2.0}) == ["ACPO, alpha 3", "ACPO, alpha 2"]
    assert labels(c={}, d={"lr": 1e-5}) == ["ACPO, lr 1e-06", "ACPO, lr 1e-05"]
    # A loss of verl's and losses of the user's own.
    of_verl = {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "gspo"}}}}
    assert make("x", {"clipx": {"method": "observe"}, **of_verl}).method == "gspo"
    own = [
        replace(make(name), configuration={"clipx.function": f"my.losses:{name}"}, record=None)
        for name in ("soft", "hard")
    ]
    assert [setting.label for setting in settings_of(own)] == ["soft", "hard"]
    # Hydra's configuration serves where there is no record.
    (tmp_path / "y" / ".hydra").mkdir(parents=True)
    (tmp_path / "y" / ".hydra" / "config.yaml").write_text("clipx: {method: bapo}\ndata: {seed: 7, x: '${nowhere}'}\n")
    run = make("y")
    assert (run.method, run.seed, run.versions) == ("bapo", 7, {})
    # A run without any is a setting of its own, with its folder's name.
    runs = [make(name) for name in ("acpo-seed1", "acpo-seed12", "grpo-seed1")]
    assert [run.seed for run in runs] == [1, 12, 1]
    settings = settings_of(runs)
    assert [(one.label, len(one.runs)) for one in settings] == [("acpo-seed1", 1), ("acpo-seed12", 1), ("GRPO", 1)]


def test_long_names_of_folders_are_cut_to_what_differs(make):
    names = [f"qwen3_8b_long_context_{method}_lr1e6_batch512_seed" for method in ("grpo", "acpo")]
    settings = settings_of([make(name, rows=[{keys.REWARD: 0.5, keys.ENTROPY: 1.0}] * 3) for name in names])
    assert [setting.label for setting in settings] == ["grpo", "acpo"]
    numbered = settings_of([make(f"a_long_name_of_a_run_{number}") for number in (1, 2)])
    assert [setting.name_of(setting.runs[0]) for setting in numbered] == ["run 1", "run 2"]


def test_a_log_is_named_by_its_folder_or_itself_and_is_of_a_policy(tmp_path):
    assert read_run(write_log(tmp_path / "mine" / "metrics.jsonl", ROWS)).name == "mine"
    assert read_run(write_log(tmp_path / "project" / "experiment.jsonl", ROWS)).name == "experiment"
    with pytest.raises(ValueError, match="not the log of a policy's training"):
        read_run(write_log(tmp_path / "metrics.jsonl", [{"train/loss": 1.0}]))


def test_only_steps_that_all_runs_of_a_setting_have_count(make):
    one = make("a-seed1", of_method("a", 1, method="acpo"), [{"actor/x": 1.0}, {"actor/x": 2.0}])
    two = make("a-seed2", of_method("a", 2, method="acpo"), [{"actor/x": 4.0}, {"actor/x": 6.0}], first=2)
    (setting,) = settings_of([one, two])
    assert setting.mean("actor/x").to_dict() == {2: 3.0}
    assert setting.mean("actor/y").empty


WHOLE = {
    MODEL: "/models/Qwen/Qwen2.5-7B/",
    DATA: ["/data/math/train.parquet", "/data/code/train.parquet"],
    "data.train_batch_size": 512,
    "actor_rollout_ref.rollout.n": 16,
    f"{ACTOR}.ppo_mini_batch_size": 32,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.optim.lr": 1e-6,
    "trainer.nnodes": 4,
    "trainer.n_gpus_per_node": 8,
    "trainer.device": "cuda",
}
LINE = (
    "Qwen2.5-7B on math/train.parquet and code/train.parquet, 512 prompts × 16 responses a rollout batch, "
    "16 updates on each, learning rate 1e-06, 4 × 8 H100."
)


REWARD_PATH = "reward.custom_reward_function.path"
REWARD_OF_TASK = {REWARD_PATH: "pkg://verl_clipx.papers.tasks.countdown.reward"}


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (1_000_064, "1M"),
        (873_000, "873K"),
        (999_936, "1M"),
        (494_032_768, "494M"),
        (1_540_000_000, "1.5B"),
        (950, "950"),
    ],
)
def test_a_model_whose_name_a_program_made_is_named_by_its_size(parameters, said):
    record = record_of({MODEL: "policies/tiny_policy-43c84e590a02bc27-363b5dcf70fd609e", **REWARD_OF_TASK})
    record = replace(record, model=replace(record.model, parameters=parameters))
    run = Run("run", pandas.DataFrame({"actor/entropy": [1.0]}, index=[1]), record=record)
    assert describe_training({"M": [run]}) == [f"A policy of {said} parameters on Countdown."]


@pytest.mark.parametrize(
    ("configuration", "records", "lines"),
    [
        (
            WHOLE,
            [{"accelerators": ["H100"], "started": f"2026-11-2{day} 10:00 UTC"} for day in (2, 1)],
            [LINE, "Started 2026-11-21 10:00 UTC to 2026-11-22 10:00 UTC."],
        ),
        ({}, [{}], []),
        ({"trainer.nnodes": 1, "trainer.n_gpus_per_node": 2, "trainer.device": "cpu"}, [{}], ["2 workers on the CPU."]),
        ({"trainer.nnodes": 1, "trainer.n_gpus_per_node": 2}, [{"accelerators": 3}], ["2 accelerators."]),
        ({"trainer.nnodes": 1, "trainer.n_gpus_per_node": 1}, [{}], ["1 accelerator."]),
        ({"data.train_files": "gsm8k.parquet"}, [{}], ["gsm8k.parquet."]),
        ({f"{ACTOR}.optim.lr": None, "trainer.nnodes": "x"}, [{}], []),
        # The name that a program gave, and the task that a reward's folder names.
        ({MODEL: "policies/tiny_policy-43c84e590a02bc27", **REWARD_OF_TASK}, [{}], ["tiny policy on Countdown."]),
        (REWARD_OF_TASK | {REWARD_PATH: "/x/knights_and_knaves/reward.py"}, [{}], ["Knights and knaves."]),
        (REWARD_OF_TASK | {REWARD_PATH: "/x/my_rewards.py", DATA: "gsm8k.parquet"}, [{}], ["gsm8k.parquet."]),
        # A date is no hash, an abbreviation keeps its capitals, and a file's path has dots of its own.
        ({MODEL: "/models/my-model-20250115"}, [{}], ["my-model-20250115."]),
        ({REWARD_PATH: "/x/GSM8K/reward.py"}, [{}], ["GSM8K."]),
        ({REWARD_PATH: "/x/gsm8k-v1.5/reward.py"}, [{}], ["Gsm8k-v1.5."]),
        ({MODEL: f"/hub/models--Qwen--Qwen2.5-0.5B/snapshots/{'ab' * 20}"}, [{}], ["Qwen2.5-0.5B."]),
    ],
)
def test_the_line_has_what_the_record_has(configuration, records, lines):
    log = pandas.DataFrame({"actor/entropy": [1.0]}, index=[1])
    runs = [Run("run", log, configuration, record_of(configuration, record)) for record in records]
    assert describe_training({"M": runs}) == lines


def test_settings_that_were_trained_otherwise_have_lines_with_their_labels():
    log = pandas.DataFrame({"actor/entropy": [1.0]}, index=[1])
    small, large = (Run("run", log, {DATA: "gsm8k.parquet", "data.train_batch_size": size}) for size in (8, 64))
    assert describe_training({"A": [small, small], "B": [large], "C": [small]}) == [
        "A, C: gsm8k.parquet, 8 prompts a rollout batch.",
        "B: gsm8k.parquet, 64 prompts a rollout batch.",
    ]
