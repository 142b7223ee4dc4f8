"""The lines of a plan: which there are, in what order, which count as done, and that bash and the launchers take them.

No training starts: lines go through the recipes with DRY_RUN, and through the launchers' reading of a payload. Not
covered: the launchers beyond that (tests/recipes).
"""

import json
import shlex
import subprocess
from pathlib import Path

import pandas
import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from tests.papers.tables.runs import write_results, write_run
from tests.papers.tables.tables import made_table
from verl_clipx.cli import app
from verl_clipx.papers.tables import table_plan
from verl_clipx.papers.tables.definition import load_table, table_names
from verl_clipx.papers.tables.table_plan import EVALUATE, PREPARE, TRAIN, Places, plan_table, training_command

ROOT = Path(__file__).parents[3]
GRPO, DAPO = "cpu/countdown_grpo_near", "cpu/countdown_dapo_near"

TABLE = made_table("plan")


@pytest.fixture
def places(tmp_path):
    return Places(runs=tmp_path / "runs", data=tmp_path / "my data", hardware="cpu", nodes=1)


def leave(places, steps: int, total: int | None) -> Path:
    """Leave what a training of GRPO and one of its evaluations leave."""
    # Ten batches of two epochs, if the training set could be counted.
    data = {"train_batch_size": 4, "train_files": str(places.runs / "train.parquet")}
    config = OmegaConf.create({"trainer": {"total_training_steps": total, "total_epochs": 2}, "data": data})
    run = write_run(places.runs, GRPO, 1, {steps: {"x": 1.0}}, config)
    write_results(run, "b", [1.0])
    return run


def printed(line: str, **variables: str) -> list[str]:
    """The words of the command that a line prints under DRY_RUN."""
    given = "".join(f"export {name}={value}; " for name, value in {"DRY_RUN": "1", **variables}.items())
    done = subprocess.run(
        ["bash", "-c", given + line], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT
    )
    return shlex.split(done.stdout)


def test_data_first_then_models_then_seed_after_seed(places):
    jobs = plan_table(TABLE, places, (1, 2))
    assert [(job.kind, job.label) for job in jobs] == [
        (PREPARE, "b/test.parquet"),
        (EVALUATE, "policy on b"),
        (EVALUATE, "policy on c"),
        *(
            job
            for seed in (1, 2)
            for preset in (GRPO, DAPO)
            for job in (
                (TRAIN, f"{preset}, seed {seed}"),
                (EVALUATE, f"{preset[4:]}-seed{seed} on b"),
                (EVALUATE, f"{preset[4:]}-seed{seed} on c"),
            )
        ),
    ]
    assert not any(job.done for job in jobs)
    assert jobs[0].command == f"build --out {shlex.quote(str(places.data))}/b"
    chosen = [job.label for job in plan_table(TABLE, places, (1,), rows=("DAPO",)) if job.kind == TRAIN]
    assert chosen == [f"{DAPO}, seed 1"]
    with pytest.raises(ValueError, match="--row PPO"):
        plan_table(TABLE, places, (1,), rows=("PPO",))


def test_evaluations_have_the_tables_settings(places):
    jobs = {job.label: shlex.split(job.command) for job in plan_table(TABLE, places, (1,)) if job.kind == EVALUATE}
    run = places.runs / f"{GRPO}-seed1"
    assert jobs["countdown_grpo_near-seed1 on c"] == [
        *("clipx", "papers", "eval", "run", str(run / "checkpoints")),
        *("--benchmark", f"c={places.data}/c/test.parquet", "--out", str(run / "evaluation" / "c")),
        *("--protocol", "mean-of-last-three", "--samples", "16", "--temperature", "1.0", "--max-tokens", "16"),
        "+hardware=cpu",
    ]
    # A model that is not trained has one checkpoint.
    base = jobs["policy on b"]
    assert base[4] == str(places.data / "policy")
    assert [jobs[f"policy on {name}"][base.index("--protocol") + 1] for name in "bc"] == ["greedy", "sampled"]
    assert base[-3:] == ["+hardware=cpu", "--template", "plain"]


@pytest.mark.parametrize(
    ("steps", "total", "rows", "trained"),
    # 41 rows are ten batches of four, twice.
    [(20, 20, None, True), (19, 20, None, False), (20, None, 41, True), (19, None, 41, False), (20, None, None, False)],
)
def test_what_is_there_is_done(places, steps, total, rows, trained):
    leave(places, steps, total)
    if rows:
        pandas.DataFrame({"prompt": range(rows)}).to_parquet(places.runs / "train.parquet")
    (places.data / "b").mkdir(parents=True)
    (places.data / "b" / "test.parquet").touch()
    done = {job.label: job.done for job in plan_table(TABLE, places, (1,))}
    assert done["b/test.parquet"] and not done[f"{DAPO}, seed 1"]
    assert done[f"{GRPO}, seed 1"] == trained
    # Those of an earlier training do not count.
    assert (done["countdown_grpo_near-seed1 on b"], done["countdown_grpo_near-seed1 on c"]) == (trained, False)


def test_a_training_line_is_the_recipes_own(places):
    run = places.runs / "cpu" / "x-seed3"
    words = printed(training_command(places, GRPO, 3, run))
    assert words[words.index("-m") + 1] == "verl.trainer.main_ppo"
    assert {
        *(f"+recipe={GRPO}", "+hardware=cpu", "data.seed=3", "actor_rollout_ref.rollout.seed=3"),
        *(f"hydra.run.dir={run}", f"trainer.default_local_dir={run}/checkpoints"),
        *(f"VERL_FILE_LOGGER_PATH={run}/metrics.jsonl", f"CLIPX_DATA={places.data}"),
    } <= set(words)


def test_open_clip_bounds_are_measured_on_the_run_of_the_same_seed_and_reach_the_launch(places):
    jobs = plan_table(load_table("acpo_table3"), places, (7,), rows=("GRPO (Clip=Avg)", "DAPO (Clip-High=Max)"))
    lines = {job.label: job.command for job in jobs}
    average, highest = (lines[f"acpo/countdown_3b_clip_{name}_off, seed 7"] for name in ("average", "high"))
    # Without that run nothing is launched.
    before = subprocess.run(["bash", "-c", f"export DRY_RUN=1; {highest}"], capture_output=True, text=True, cwd=ROOT)
    assert before.returncode == 1 and before.stdout == "" and "countdown_3b_acpo_off-seed7" in before.stderr
    step = {f"actor/clipx/{key}": value for key, value in {"epsilon_highest": 0.9, "epsilon_average": 0.5}.items()}
    measured_on = places.runs / "acpo/countdown_3b_acpo_off-seed7"
    measured_on.mkdir(parents=True)
    entry = {"step": 1, "data": step | {"actor/clipx/count/bin_0": 8.0}}
    (measured_on / "metrics.jsonl").write_text(f"{json.dumps(entry)}\n")
    bounds = [[word for word in printed(line) if word.startswith("clipx.clip_")] for line in (average, highest)]
    assert bounds == [["clipx.clip_low=0.5", "clipx.clip_high=1.5"], ["clipx.clip_high=1.9"]]


TAKEN = (
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
    # Slurm, SSH, KubeRay and SkyPilot read their words by this function.
    done = subprocess.run(["bash", "-ec", TAKEN, "bash", *lines], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    # The recipes take the first and the last one's preset.
    for job in {trainings[0], trainings[-1]} if not any(row.measured_on for row in table.rows) else ():
        assert f"+recipe={job.label.split(',')[0]}" in printed(job.command)


def test_the_printed_plan_is_a_script(tmp_path):
    words = ["papers", "table", "plan", "cpu_small", "--runs", str(tmp_path / "runs"), "--seed", "5", "--row", "ACPO"]
    first, *rest = CliRunner().invoke(app, words).stdout.splitlines()
    lines = [line for line in rest if line and not line.startswith("#")]
    assert len(lines) == 4 + 2 * 2 and sum("SEED=5 " in line for line in lines) == 2
    assert first == "# cpu_small: 8 of 8 commands left, of which 2 train."


def test_a_wheel_says_that_it_needs_a_checkout(places, monkeypatch, tmp_path):
    monkeypatch.setattr(table_plan, "configs_folder", lambda: tmp_path / "configs")
    with pytest.raises(FileNotFoundError, match=r"common\.sh"):
        plan_table(TABLE, places, (1,))
