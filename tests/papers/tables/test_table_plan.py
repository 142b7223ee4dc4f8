"""The commands that a plan has, in order, which of them count as done, and running them: resumed, failing, interrupted.
Trainings are stand-ins here: no verl run starts. The commands' text goes through the real recipes with DRY_RUN, and
through bash.
"""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from tests.papers.tables.tables import small_table
from verl_clipx.cli import app
from verl_clipx.papers.tables import table_plan
from verl_clipx.papers.tables.definition import load_table
from verl_clipx.papers.tables.table_plan import (
    EVALUATE,
    PREPARE,
    TRAIN,
    Job,
    Places,
    plan_table,
    run_job,
    training_command,
)

ROOT = Path(__file__).parents[3]

TABLE = small_table(
    """
    seeds: [1, 2]
    prepare:
      - {makes: b/test.parquet, command: "build --out {data}/b"}
    evaluation: {protocol: mean-of-last-three, samples: 1, temperature: 0.0, max_tokens: 16}
    evaluation_options: --backend cpu
    benchmarks:
      b: {file: b/test.parquet, questions: 4}
      c: {file: c/test.parquet, questions: 4, samples: 16, temperature: 1.0}
    columns:
      - {name: B, measure: {benchmark: b, metric: avg@1}}
      - {name: C, measure: {benchmark: c, metric: avg@16}}
    rows:
      - {name: base, model: "{data}/policy", evaluation_options: --template plain}
      - {name: GRPO, preset: cpu/countdown_grpo_near}
      - {name: DAPO, preset: cpu/countdown_dapo_near}
    """
)


@pytest.fixture
def places(tmp_path):
    return Places(runs=tmp_path / "runs", data=tmp_path / "my data", hardware="cpu", nodes=1)


def finish_training(run: Path, steps: int, total: int | None = 20) -> None:
    (run / ".hydra").mkdir(parents=True)
    config = {"trainer": {"total_training_steps": total, "total_epochs": 2}}
    # Ten batches of two epochs, if the training set could be counted.
    config["data"] = {"train_batch_size": 4, "train_files": str(run / "train.parquet")}
    (run / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "metrics.jsonl").write_text(json.dumps({"step": steps, "data": {}}) + "\n")


def finish_evaluation(folder: Path, benchmark: str) -> None:
    (folder / "evaluation" / benchmark).mkdir(parents=True)
    sampling = {"samples": 1, "temperature": 1.0, "max_tokens": 8, "top_p": 1.0}
    config = {"model": "m", "protocol": "p", "checkpoints": {}, "benchmarks": {}, "sampling": sampling, "versions": {}}
    results = {"config": config, "benchmarks": {}}
    (folder / "evaluation" / benchmark / "results.json").write_text(json.dumps(results))


def test_data_first_then_models_then_seed_after_seed(places):
    jobs = plan_table(TABLE, places, (1, 2))
    assert [(job.kind, job.label) for job in jobs] == [
        (PREPARE, "b/test.parquet"),
        (EVALUATE, "policy on b"),
        (EVALUATE, "policy on c"),
        *(
            one
            for seed in (1, 2)
            for method in ("grpo", "dapo")
            for one in (
                (TRAIN, f"cpu/countdown_{method}_near, seed {seed}"),
                (EVALUATE, f"countdown_{method}_near-seed{seed} on b"),
                (EVALUATE, f"countdown_{method}_near-seed{seed} on c"),
            )
        ),
    ]
    assert not any(job.done for job in jobs)
    assert jobs[0].command == f"build --out {shlex.quote(str(places.data))}/b"


def test_rows_can_be_chosen(places):
    labels = [job.label for job in plan_table(TABLE, places, (1,), rows=("DAPO",)) if job.kind != PREPARE]
    assert labels[0] == "cpu/countdown_dapo_near, seed 1" and len(labels) == 3
    with pytest.raises(ValueError, match=r"--row PPO: table small has no such row\. It has base, GRPO, DAPO"):
        plan_table(TABLE, places, (1,), rows=("PPO",))


def test_evaluations_have_the_tables_settings(places):
    jobs = {job.label: shlex.split(job.command) for job in plan_table(TABLE, places, (1,)) if job.kind == EVALUATE}
    run = places.runs / "cpu" / "countdown_grpo_near-seed1"
    assert jobs["countdown_grpo_near-seed1 on c"] == [
        *("clipx", "eval", "run", str(run / "checkpoints")),
        *("--benchmark", f"c={places.data}/c/test.parquet", "--out", str(run / "evaluation" / "c")),
        *("--protocol", "mean-of-last-three", "--samples", "16", "--temperature", "1.0", "--max-tokens", "16"),
        *("--backend", "cpu"),
    ]
    # A model that is not trained has one checkpoint.
    base = jobs["policy on b"]
    assert base[3] == str(places.data / "policy")
    assert base[base.index("--protocol") + 1] == "greedy"
    assert jobs["policy on c"][base.index("--protocol") + 1] == "sampled"
    assert base[-4:] == ["--backend", "cpu", "--template", "plain"]


def test_what_is_there_is_done(places):
    run = places.runs / "cpu" / "countdown_grpo_near-seed1"
    finish_training(run, steps=20)
    finish_evaluation(run, "b")
    (places.data / "b").mkdir(parents=True)
    (places.data / "b" / "test.parquet").touch()
    jobs = {(job.kind, job.label): job.done for job in plan_table(TABLE, places, (1,))}
    assert jobs[PREPARE, "b/test.parquet"]
    assert jobs[TRAIN, "cpu/countdown_grpo_near, seed 1"]
    assert jobs[EVALUATE, "countdown_grpo_near-seed1 on b"]
    assert not jobs[EVALUATE, "countdown_grpo_near-seed1 on c"]
    assert not jobs[TRAIN, "cpu/countdown_dapo_near, seed 1"]


def test_a_training_half_done_is_not_done_and_neither_are_its_evaluations(places):
    run = places.runs / "cpu" / "countdown_grpo_near-seed1"
    finish_training(run, steps=19)
    finish_evaluation(run, "b")
    jobs = {(job.kind, job.label): job.done for job in plan_table(TABLE, places, (1,))}
    assert not jobs[TRAIN, "cpu/countdown_grpo_near, seed 1"]
    assert not jobs[EVALUATE, "countdown_grpo_near-seed1 on b"]


@pytest.mark.parametrize("steps, done", [(19, False), (20, True)])
def test_steps_follow_from_the_data_where_the_preset_gives_epochs(places, steps, done):
    import pandas

    run = places.runs / "cpu" / "countdown_grpo_near-seed1"
    finish_training(run, steps=steps, total=None)
    # 41 rows are ten batches of four, twice.
    pandas.DataFrame({"prompt": range(41)}).to_parquet(run / "train.parquet")
    (train,) = [job for job in plan_table(TABLE, places, (1,)) if job.label == "cpu/countdown_grpo_near, seed 1"]
    assert train.done == done


def test_the_training_command_is_the_recipes_own(places, monkeypatch):
    monkeypatch.chdir(ROOT)
    run = places.runs / "cpu" / "x-seed3"
    command = training_command(places, "cpu/countdown_grpo_near", 3, run)
    assert "source recipes/common.sh; launch cpu/countdown_grpo_near" in command
    done = subprocess.run(
        ["bash", "-c", f"export DRY_RUN=1; {command}"], capture_output=True, text=True, check=True, timeout=60
    )
    words = shlex.split(done.stdout)
    assert words[words.index("-m") + 1] == "verl.trainer.main_ppo"
    assert {
        "+recipe=cpu/countdown_grpo_near",
        "+hardware=cpu",
        "data.seed=3",
        "actor_rollout_ref.rollout.seed=3",
        f"hydra.run.dir={run}",
        f"trainer.default_local_dir={run}/checkpoints",
        f"VERL_FILE_LOGGER_PATH={run}/metrics.jsonl",
        f"CLIPX_DATA={places.data}",
    } <= set(words)


def test_open_clip_bounds_are_measured_on_the_run_of_the_same_seed(places):
    jobs = plan_table(load_table("acpo_table3"), places, (7,), rows=("GRPO (Clip=Avg)",))
    (command,) = [job.command for job in jobs if job.label == "acpo/countdown_3b_clip_average_off, seed 7"]
    script = shlex.split(command)[-1]
    assert f"clipx bounds {shlex.quote(str(places.runs / 'acpo/countdown_3b_acpo_off-seed7/metrics.jsonl'))}" in script
    assert "s/^+clipx=grpo_clip_acpo_average //p" in script


def test_open_clip_bounds_reach_the_launch(places, tmp_path):
    """With a stand-in for `clipx bounds` on PATH that prints what the real one prints for two groups."""
    fake = tmp_path / "bin"
    fake.mkdir()
    lines = "epsilon over 3 steps\\n+clipx=grpo_clip_high_acpo clipx.clip_high=1.9\\n+clipx=other clipx.clip_high=7\\n"
    (fake / "clipx").write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    (fake / "clipx").chmod(0o755)
    command = training_command(
        places, "acpo/countdown_3b_clip_high_near", 1, tmp_path / "run", ("grpo_clip_high_acpo", Path("metrics.jsonl"))
    )
    done = subprocess.run(
        ["bash", "-c", f"export DRY_RUN=1 PATH={fake}:$PATH; {command}"],
        **dict(capture_output=True, text=True, check=True, timeout=60, cwd=ROOT),
    )
    words = shlex.split(done.stdout)
    assert [word for word in words if word.startswith("clipx.")] == ["clipx.clip_high=1.9"]


def test_every_committed_table_has_a_plan(places):
    for name in ("acpo_table1a", "ar_lopti_figure4", "dgpo_table4", "bapo_table1", "cpu_small"):
        table = load_table(name)
        jobs = plan_table(table, places, table.seeds)
        trainings = [job for job in jobs if job.kind == TRAIN]
        assert len(trainings) == len(table.seeds) * sum(source.preset is not None for source, _ in table.sources())
        assert all(
            subprocess.run(["bash", "-n", "-c", job.command], check=False, timeout=60).returncode == 0
            for job in jobs[:8]
        )


def test_running_a_command_keeps_its_output(tmp_path):
    job = Job(PREPARE, "x", f"echo hello > {tmp_path}/made; echo noise", tmp_path / "logs", False)
    assert run_job(job, lambda step, total: None) == 0
    assert (tmp_path / "made").read_text() == "hello\n"
    assert (tmp_path / "logs" / "prepare.log").read_text() == "noise\n"


def test_a_failed_command_gives_its_exit_code(tmp_path):
    assert run_job(Job(EVALUATE, "x", "echo why; exit 3", tmp_path, False), lambda step, total: None) == 3
    assert (tmp_path / "evaluate.log").read_text() == "why\n"


@pytest.mark.slow
def test_a_training_tells_its_steps_and_leaves_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr(table_plan, "SECONDS_BETWEEN_LOOKS", 0.1)
    run = tmp_path / "run"
    stand_in = (
        f"mkdir -p {run}/.hydra; echo 'trainer: {{total_training_steps: 20}}' > {run}/.hydra/config.yaml; "
        f'echo \'{{"step": 7, "data": {{"critic/score/mean": 0.5}}}}\' > {run}/metrics.jsonl; sleep 3'
    )
    seen = []
    code = run_job(Job(TRAIN, "x", stand_in, run, False), lambda step, total: seen.append((step, total)))
    assert code == 0, (run / "train.log").read_text()
    # Once for each time that the log was written, not at every look.
    assert 1 <= len(seen) <= 2 and seen[-1] == (7, 20)
    record = json.loads((run / "run.json").read_text())
    assert record["versions"]["verl"] == "0.9.1" and record["seconds"] > 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_the_command_and_what_it_started(tmp_path, number):
    script = (
        "import sys; from pathlib import Path; from verl_clipx.papers.tables.table_plan import *; "
        "folder = Path(sys.argv[1]); "
        "command = f'sleep 300 & echo $! > {folder}/pid; wait'; "
        "sys.exit(run_job(Job(EVALUATE, 'x', command, folder, False), lambda *_: None))"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    pid = tmp_path / "pid"
    wait_until(lambda: pid.exists() and pid.read_text().strip())
    child = psutil.Process(int(pid.read_text()))
    process.send_signal(number)
    assert process.wait(30) == 130
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_command_runs_what_is_left_and_stops_at_a_failure(tmp_path, monkeypatch):
    done = tmp_path / "done"
    jobs = [
        Job(PREPARE, "first", "exit 1", tmp_path, True),
        Job(PREPARE, "second", f"echo x >> {done}", tmp_path, False),
        Job(EVALUATE, "third", "echo the reason; exit 4", tmp_path, False),
        Job(EVALUATE, "fourth", f"echo y >> {done}", tmp_path, False),
    ]
    monkeypatch.setattr(table_plan, "plan_table", lambda *arguments: jobs)
    result = CliRunner().invoke(app, ["table", "plan", "cpu_small", "--runs", str(tmp_path), "--run"])
    assert result.exit_code == 1
    assert done.read_text() == "x\n"
    text = " ".join(result.output.split())
    assert "3 of 4 commands left" in text
    assert "evaluate: third failed with exit code 4." in text and "the reason" in text


def test_the_printed_plan_is_a_script(tmp_path):
    result = CliRunner().invoke(
        app, ["table", "plan", "cpu_small", "--runs", str(tmp_path / "runs"), "--seed", "5", "--row", "ACPO"]
    )
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if line and not line.startswith("#")]
    assert len(lines) == 4 + 2 * 2
    assert "2 trainings, about 0.2 h: 205 s of preparation, then 180 s each" in result.stdout.splitlines()[0]
    assert sum("SEED=5 " in line for line in lines) == 2
    subprocess.run(["bash", "-n", "-c", result.stdout], check=True, timeout=60)


def test_a_wheel_says_that_it_needs_a_checkout(places, monkeypatch, tmp_path):
    monkeypatch.setattr(table_plan, "configs_folder", lambda: tmp_path / "configs")
    with pytest.raises(FileNotFoundError, match=r"common\.sh: does not exist\. Run this from a checkout"):
        plan_table(TABLE, places, (1,))


def test_the_environments_own_commands_come_first(tmp_path):
    job = Job(PREPARE, "x", "command -v python", tmp_path, False)
    assert run_job(job, lambda step, total: None) == 0
    assert Path((tmp_path / "prepare.log").read_text().strip()).parent == Path(sys.executable).parent
