"""The lines of a plan: which there are, in what order, which count as done, and that bash and the launchers take them.

No training starts: lines go through the recipes with DRY_RUN, and through the launchers' reading of a payload. Not
covered: the launchers beyond that (tests/recipes).
"""

import shlex
import subprocess
from pathlib import Path

import pandas
import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from tests.papers.tables.runs import write_metrics, write_results, write_run
from tests.papers.tables.tables import make_table
from verl_clipx.cli import app
from verl_clipx.papers.tables import table_plan
from verl_clipx.papers.tables.definition import load_table, table_names
from verl_clipx.papers.tables.table_plan import EVALUATE, PREPARE, TRAIN, Places, plan_table, training_command

ROOT = Path(__file__).parents[3]
GRPO = "cpu/countdown_grpo_near"
DAPO = "cpu/countdown_dapo_near"
TABLE = make_table("plan")


@pytest.fixture
def places(tmp_path):
    return Places(runs=tmp_path / "runs", data=tmp_path / "my data", hardware="cpu", nodes=1)


def leave_run(places, *, trained_steps: int, total_steps: int | None) -> None:
    """Leave what a training of GRPO and one of its evaluations leave."""
    # Two epochs, if the training set can be counted.
    data = {"train_batch_size": 4, "train_files": str(places.runs / "train.parquet")}
    config = OmegaConf.create({"trainer": {"total_training_steps": total_steps, "total_epochs": 2}, "data": data})
    run = write_run(places.runs, GRPO, 1, {trained_steps: {"x": 1.0}}, config)
    write_results(run, "b", [1.0])


def dry_run(line: str) -> subprocess.CompletedProcess:
    """Run a line of a plan, whose training prints its command instead of starting it."""
    return subprocess.run(
        ["bash", "-c", f"export DRY_RUN=1; {line}"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )


def list_words(line: str) -> list[str]:
    """Return the words of the command that a line prints under DRY_RUN."""
    finished = dry_run(line)
    finished.check_returncode()
    return shlex.split(finished.stdout)


def test_data_first_then_models_then_seed_after_seed(places):
    jobs = plan_table(TABLE, places, (1, 2))
    assert [(job.kind, job.label) for job in jobs] == [
        (PREPARE, "b/test.parquet"),
        (EVALUATE, "policy on b"),
        (EVALUATE, "policy on c"),
        (TRAIN, "cpu/countdown_grpo_near, seed 1"),
        (EVALUATE, "countdown_grpo_near-seed1 on b"),
        (EVALUATE, "countdown_grpo_near-seed1 on c"),
        (TRAIN, "cpu/countdown_dapo_near, seed 1"),
        (EVALUATE, "countdown_dapo_near-seed1 on b"),
        (EVALUATE, "countdown_dapo_near-seed1 on c"),
        (TRAIN, "cpu/countdown_grpo_near, seed 2"),
        (EVALUATE, "countdown_grpo_near-seed2 on b"),
        (EVALUATE, "countdown_grpo_near-seed2 on c"),
        (TRAIN, "cpu/countdown_dapo_near, seed 2"),
        (EVALUATE, "countdown_dapo_near-seed2 on b"),
        (EVALUATE, "countdown_dapo_near-seed2 on c"),
    ]
    assert not any(job.done for job in jobs)
    assert jobs[0].command == f"build --out {shlex.quote(str(places.data))}/b"


def test_a_plan_of_chosen_rows_trains_these_alone(places):
    jobs = plan_table(TABLE, places, (1,), rows=("DAPO",))
    assert [job.label for job in jobs if job.kind == TRAIN] == [f"{DAPO}, seed 1"]


def test_an_unknown_row_is_refused(places):
    with pytest.raises(ValueError, match="--row PPO"):
        plan_table(TABLE, places, (1,), rows=("PPO",))


@pytest.fixture
def evaluations(places) -> dict[str, list[str]]:
    """The words of each evaluation's command, by its label."""
    jobs = plan_table(TABLE, places, (1,))
    return {job.label: shlex.split(job.command) for job in jobs if job.kind == EVALUATE}


def test_evaluations_have_the_tables_settings(places, evaluations):
    run = places.runs / f"{GRPO}-seed1"
    assert evaluations["countdown_grpo_near-seed1 on c"] == [
        *("clipx", "papers", "eval", "run", str(run / "checkpoints")),
        *("--benchmark", f"c={places.data}/c/test.parquet"),
        *("--out", str(run / "evaluation" / "c")),
        *("--protocol", "mean-of-last-three"),
        *("--samples", "16"),
        *("--temperature", "1.0"),
        *("--max-tokens", "16"),
        "+hardware=cpu",
    ]


@pytest.mark.parametrize(("benchmark", "protocol"), [("b", "greedy"), ("c", "sampled")])
def test_a_model_that_is_not_trained_has_one_checkpoint(places, evaluations, benchmark, protocol):
    words = evaluations[f"policy on {benchmark}"]
    assert words[4] == str(places.data / "policy")
    assert words[words.index("--protocol") + 1] == protocol
    # The row's options follow the table's.
    assert words[-3:] == ["+hardware=cpu", "--template", "plain"]


@pytest.mark.parametrize(
    ("trained_steps", "total_steps", "training_rows", "is_trained"),
    [
        pytest.param(20, 20, None, True, id="all steps"),
        pytest.param(19, 20, None, False, id="one step less"),
        # 41 rows are ten batches of four, twice.
        pytest.param(20, None, 41, True, id="all batches of all epochs"),
        pytest.param(19, None, 41, False, id="one batch less"),
        pytest.param(20, None, None, False, id="a training set that cannot be counted"),
    ],
)
def test_what_is_there_is_done(places, trained_steps, total_steps, training_rows, is_trained):
    leave_run(places, trained_steps=trained_steps, total_steps=total_steps)
    if training_rows is not None:
        pandas.DataFrame({"prompt": range(training_rows)}).to_parquet(places.runs / "train.parquet")
    (places.data / "b").mkdir(parents=True)
    (places.data / "b" / "test.parquet").touch()
    is_done = {job.label: job.done for job in plan_table(TABLE, places, (1,))}
    assert is_done["b/test.parquet"]
    assert not is_done[f"{DAPO}, seed 1"]
    assert is_done[f"{GRPO}, seed 1"] == is_trained
    # An evaluation of an earlier training does not count.
    assert is_done["countdown_grpo_near-seed1 on b"] == is_trained
    assert not is_done["countdown_grpo_near-seed1 on c"]


def test_a_training_line_is_the_recipes_own(places):
    run = places.runs / "cpu" / "x-seed3"
    words = list_words(training_command(places, GRPO, 3, run))
    assert words[words.index("-m") + 1] == "verl.trainer.main_ppo"
    assert {*words} >= {
        f"+recipe={GRPO}",
        "+hardware=cpu",
        "data.seed=3",
        "actor_rollout_ref.rollout.seed=3",
        f"hydra.run.dir={run}",
        f"trainer.default_local_dir={run}/checkpoints",
        f"VERL_FILE_LOGGER_PATH={run}/metrics.jsonl",
        f"CLIPX_DATA={places.data}",
    }


@pytest.fixture
def lines_with_open_bounds(places) -> dict[str, str]:
    """Training lines of ACPO's ablations, whose bounds are those of a run of ACPO with the same seed."""
    jobs = plan_table(load_table("acpo_table3"), places, (7,), rows=("GRPO (Clip=Avg)", "DAPO (Clip-High=Max)"))
    return {job.label: job.command for job in jobs}


def test_without_the_run_that_measures_open_bounds_nothing_is_launched(lines_with_open_bounds):
    finished = dry_run(lines_with_open_bounds["acpo/countdown_3b_clip_high_off, seed 7"])
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert "countdown_3b_acpo_off-seed7" in finished.stderr


@pytest.mark.parametrize(
    ("preset", "bounds"),
    [
        ("acpo/countdown_3b_clip_average_off", ["clipx.clip_low=0.5", "clipx.clip_high=1.5"]),
        ("acpo/countdown_3b_clip_high_off", ["clipx.clip_high=1.9"]),
    ],
)
def test_measured_bounds_reach_the_launch(places, lines_with_open_bounds, preset, bounds):
    measured_run = places.runs / "acpo/countdown_3b_acpo_off-seed7"
    measured_run.mkdir(parents=True)
    metrics = {
        "actor/clipx/epsilon_highest": 0.9,
        "actor/clipx/epsilon_average": 0.5,
        "actor/clipx/count/bin_0": 8.0,
    }
    write_metrics(measured_run, {1: metrics})
    words = list_words(lines_with_open_bounds[f"{preset}, seed 7"])
    assert [word for word in words if word.startswith("clipx.clip_")] == bounds


# Slurm, SSH, KubeRay and SkyPilot read their words by this function.
PARSE_LINES = (
    'source recipes/cluster/payload.sh; for line in "$@"; do eval "words=($line)"; parse_payload 3 "${words[@]}"; done'
)


@pytest.mark.parametrize("name", [name for name in table_names() if not load_table(name).in_one_process])
def test_bash_and_the_launchers_take_every_line(name, places):
    table = load_table(name)
    jobs = plan_table(table, Places(places.runs, places.data, table.hardware, nodes=3), (1,))
    trainings = [job for job in jobs if job.kind == TRAIN]
    assert len(trainings) == sum(source.preset is not None for source, _ in table.sources())
    script = "\n".join(job.command for job in jobs)
    subprocess.run(["bash", "-n", "-c", script], check=True, timeout=60)
    lines = [job.command for job in jobs if job.kind != PREPARE]
    parsing = ["bash", "-ec", PARSE_LINES, "bash", *lines]
    finished = subprocess.run(parsing, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0
    assert finished.stderr == ""
    if any(row.measured_on for row in table.rows):
        # Its lines need a run that measures bounds.
        return
    for job in (trainings[0], trainings[-1]):
        preset = job.label.split(",")[0]
        assert f"+recipe={preset}" in list_words(job.command)


def test_the_printed_plan_is_a_script(tmp_path):
    words = ["papers", "table", "plan", "cpu_small", "--runs", str(tmp_path / "runs"), "--seed", "5", "--row", "ACPO"]
    summary, *lines = CliRunner().invoke(app, words).stdout.splitlines()
    assert summary == "# cpu_small: 8 of 8 commands left, of which 2 train."
    commands = [line for line in lines if line and not line.startswith("#")]
    assert len(commands) == 8
    assert sum("SEED=5 " in command for command in commands) == 2


def test_a_wheel_says_that_it_needs_a_checkout(places, monkeypatch, tmp_path):
    monkeypatch.setattr(table_plan, "configs_folder", lambda: tmp_path / "configs")
    with pytest.raises(FileNotFoundError, match=r"common\.sh"):
        plan_table(TABLE, places, (1,))
