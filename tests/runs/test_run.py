"""Runs as settings: what groups them, names them and sets them apart. Covers: configurations from a record, from Hydra
and none; seeds. Not covered: the page."""

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from tests.claims.configuration import hydra_s
from tests.recipes.shell import RECIPES, Machine
from tests.runs.example_runs import write_log
from verl_clipx.diagnose.findings import name_unread_values
from verl_clipx.report.drawing import style
from verl_clipx.report.log_figures import log_plates
from verl_clipx.report.palette import with_colours
from verl_clipx.runs import keys
from verl_clipx.runs.folder import read_run
from verl_clipx.runs.run import flat
from verl_clipx.runs.settings import differing_values, settings_of
from verl_clipx.trainer.log import write_record

ROWS = [{"actor/entropy": 1.0, "critic/score/mean": 0.5}]


@pytest.fixture
def make(tmp_path):
    def run(name, seed=1, lr=1e-6, **clipx):
        log = write_log(tmp_path / name / "metrics.jsonl", ROWS)
        write_record(
            log,
            {
                "clipx": clipx,
                "data": {"seed": seed},
                "trainer": {"default_local_dir": f"/runs/{name}", "experiment_name": name, "total_epochs": 3},
                "actor_rollout_ref": {
                    "actor": {"optim": {"lr": lr}, "data_loader_seed": seed, "policy_loss": {"clipx": clipx}},
                    "rollout": {"trace": {"experiment_name": name}},
                },
            },
        )
        return read_run(tmp_path / name)

    return run


def test_in_bypass_mode_the_entropy_is_that_of_the_updates(tmp_path):
    rows = [{"actor/entropy_loss": 2.0}, {"actor/entropy_loss": 1.5}]
    write_log(tmp_path / "run/metrics.jsonl", rows)
    assert read_run(tmp_path / "run").values(keys.ENTROPY).tolist() == [2.0, 1.5]
    write_log(tmp_path / "run/metrics.jsonl", [{"actor/entropy": 3.0, **rows[0]}])
    assert read_run(tmp_path / "run").values(keys.ENTROPY).tolist() == [3.0]


def test_seeds_names_and_places_do_not_make_a_setting(make):
    runs = [make("a", 1, method="acpo"), make("b", 2, method="acpo"), make("c", 1, method="grpo")]
    settings = settings_of(runs)
    assert [(one.label, [run.name for run in one.runs]) for one in settings] == [("ACPO", ["a", "b"]), ("GRPO", ["c"])]
    apart = differing_values([one.runs[0] for one in settings])
    # The methods' parameters, with their defaults.
    assert apart.pop("clipx.method") == ['"acpo"', '"grpo"'] and apart["clipx.alpha"] == ["3", None]
    assert {key.partition(".")[0] for key in apart} == {"clipx"}


def test_what_a_method_does_not_read_makes_no_setting_and_is_said(make):
    key = "actor_rollout_ref.actor.clip_ratio_high"

    def given(name, value, **clipx):
        record = {"clipx": clipx, "actor_rollout_ref": {"actor": {"clip_ratio_high": value}}}
        if value != 0.2 and clipx["method"] == "acpo":
            record["actor_rollout_ref"]["actor"]["policy_loss"] = {"run": {"unused": {key: value}}}
        run = make(name, **clipx)
        return replace(run, configuration=flat(record))

    runs = [given("a", 0.2, method="acpo"), given("b", 0.28, method="acpo"), given("c", 0.28, method="grpo")]
    runs.append(given("d", 0.2, method="grpo"))
    settings = settings_of(runs)
    assert [[run.name for run in one.runs] for one in settings] == [["a", "b"], ["c"], ["d"]]
    assert (
        name_unread_values(settings[0]).text.startswith(f"{key} 0.2, 0.28.") and name_unread_values(settings[1]) is None
    )


def test_the_model_the_data_and_under_one_scope_the_micro_batches_are_of_the_setting(make):
    def given(name, clipx, **values):
        return replace(make(name), configuration={f"clipx.{key}": value for key, value in clipx.items()} | values)

    model, micro = "actor_rollout_ref.model.path", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    acpo, by_micro = {"method": "acpo"}, {"method": "acpo", "scope": "micro_batch"}
    for values, clipx, settings in (
        ({model: ["/a/small", "/b/small"]}, acpo, 1),
        ({model: ["/a/small", "/a/large"]}, acpo, 2),
        ({"data.train_files": [["/x/gsm8k/train.parquet"], ["/y/gsm8k/train.parquet"]]}, acpo, 1),
        ({"data.train_files": ["/x/gsm8k/train.parquet", "/x/math/train.parquet"]}, acpo, 2),
        ({micro: [4, 8]}, acpo, 1),
        ({micro: [4, 8]}, by_micro, 2),
    ):
        ((key, pair),) = values.items()
        runs = [given(name, clipx, **{key: value}) for name, value in zip("ab", pair, strict=True)]
        assert len(settings_of(runs)) == settings, values


@pytest.mark.slow
@pytest.mark.parametrize(("other", "settings"), [({}, 1), ({"ACTOR_LR": "1e-4"}, 2), ({"METHOD": "grpo"}, 2)])
def test_two_seeds_of_the_quickstart_are_one_setting(tmp_path, monkeypatch, other, settings):
    """By the configurations that verl composes of the recipe's own command lines."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    runs = []
    for seed, variables in (("1", {}), ("2", other)):
        folder = tmp_path / f"run{seed}"
        machine = Machine(tmp_path / f"machine{seed}", python3="")
        names = {"RUN_FOLDER": str(folder), "EXPERIMENT_NAME": f"seed{seed}", "SEED": seed}
        done = machine.run(RECIPES / "quickstart" / "run_countdown_tiny_cpu.sh", **names, **variables)
        assert done.returncode == 0, done.stderr
        ((_, _, _, *overrides),) = machine.calls
        log = write_log(folder / "metrics.jsonl", ROWS)
        write_record(log, OmegaConf.to_container(hydra_s(*overrides), resolve=True))
        runs.append(read_run(folder))
    assert [run.seed for run in runs] == [1, 2]
    assert runs[0].updates_a_step == 8
    assert len(settings_of(runs)) == settings


def test_settings_of_one_method_are_named_by_what_sets_them_apart(make):
    settings = settings_of([make("a", method="acpo", alpha=3.0), make("b", method="acpo", alpha=2.0)])
    assert [one.label for one in settings] == ["ACPO, alpha 3", "ACPO, alpha 2"]
    settings = settings_of([make("a", method="acpo"), make("b", method="acpo", lr=1e-5)])
    assert [one.label for one in settings] == ["ACPO, lr 1e-06", "ACPO, lr 1e-05"]


def test_an_observed_loss_is_named_as_verl_names_it(tmp_path):
    log = write_log(tmp_path / "x" / "metrics.jsonl", ROWS)
    of_verl = {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "gspo"}}}}
    write_record(log, {"clipx": {"method": "observe"}, **of_verl})
    assert read_run(tmp_path / "x").method == "gspo"


def test_hydras_configuration_serves_where_there_is_no_record(tmp_path):
    write_log(tmp_path / "x" / "metrics.jsonl", ROWS)
    (tmp_path / "x" / ".hydra").mkdir()
    (tmp_path / "x" / ".hydra" / "config.yaml").write_text("clipx: {method: bapo}\ndata: {seed: 7, x: '${nowhere}'}\n")
    run = read_run(tmp_path / "x")
    assert (run.method, run.seed, run.versions) == ("bapo", 7, {})


def test_a_run_without_a_configuration_is_a_setting_of_its_own(tmp_path):
    for name in ("acpo-seed1", "acpo-seed12", "grpo-seed1"):
        write_log(tmp_path / name / "metrics.jsonl", ROWS)
    runs = [read_run(tmp_path / name) for name in ("acpo-seed1", "acpo-seed12", "grpo-seed1")]
    assert [run.seed for run in runs] == [1, 12, 1]
    settings = settings_of(runs)
    assert [(one.label, len(one.runs)) for one in settings] == [("acpo-seed1", 1), ("acpo-seed12", 1), ("GRPO", 1)]


def test_long_names_leave_the_figures_room_and_stay_as_they_are(tmp_path):
    names = [f"qwen3_8b_long_context_{method}_lr1e6_batch512_seed" for method in ("grpo", "acpo")]
    for name in names:
        write_log(tmp_path / name / "metrics.jsonl", [{keys.REWARD: 0.5, keys.ENTROPY: 1.0}] * 3)
    settings = settings_of([read_run(tmp_path / name) for name in names])
    assert [setting.label for setting in settings] == names
    with style():
        (plate,) = log_plates(with_colours(settings))
        for panel in plate.panels:
            (axes,) = panel.drawing.axes
            assert {text.get_text() for text in axes.texts} == {"…grpo_lr1e6_batch51…", "…acpo_lr1e6_batch51…"}
            assert max(text.get_window_extent().x1 for text in axes.texts) <= panel.drawing.bbox.x1
            assert axes.bbox.width > panel.drawing.bbox.width / 3


def test_a_log_is_named_by_its_folder_or_itself(tmp_path):
    assert read_run(write_log(tmp_path / "mine" / "metrics.jsonl", ROWS)).name == "mine"
    assert read_run(write_log(tmp_path / "project" / "experiment.jsonl", ROWS)).name == "experiment"


def test_only_steps_that_all_runs_of_a_setting_have_count(tmp_path):
    one = write_log(tmp_path / "a-seed1" / "metrics.jsonl", [{"actor/x": 1.0}, {"actor/x": 2.0}])
    two = write_log(tmp_path / "a-seed2" / "metrics.jsonl", [{"actor/x": 4.0}, {"actor/x": 6.0}], first=2)
    for seed, log in enumerate((one, two), 1):
        write_record(log, {"clipx": {"method": "acpo"}, "data": {"seed": seed}})
    (setting,) = settings_of([read_run(tmp_path / name) for name in ("a-seed1", "a-seed2")])
    assert setting.mean("actor/x").to_dict() == {2: 3.0}
    assert setting.mean("actor/y").empty


def test_a_log_of_no_policy_is_refused(tmp_path):
    path = write_log(tmp_path / "metrics.jsonl", [{"train/loss": 1.0}])
    with pytest.raises(ValueError, match="not the log of a policy's training by verl"):
        read_run(path)
