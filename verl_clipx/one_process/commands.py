"""`clipx table fill`: makes a table's missing runs in this process."""

import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from verl_clipx.common.command_line import fail, failing
from verl_clipx.common.files import hash_of_file, hash_of_json, read_bytes

# The entries of verl's log that tables and figures of such runs show.
METRICS = (
    "critic/score/mean",
    "actor/entropy_loss",
    "actor/ppo_kl",
    "actor/grad_norm",
    "actor/clipx/clip_fraction_low",
    "actor/clipx/clip_fraction_high",
    "response_length/mean",
    "training/off_policy/trajectory_staleness/mean",
)

SEED_KEYS = ("data.seed", "actor_rollout_ref.actor.data_loader_seed", "actor_rollout_ref.rollout.seed")
"""The keys that recipes/common.sh sets to SEED."""


def fill(
    name: Annotated[str, typer.Argument(help="A table whose runs take a minute; `clipx table list` names them.")],
    runs: Annotated[
        Path,
        typer.Option(help="Folder of all runs, such as reversal/grpo_4-seed1.jsonl.gz: <preset>-seed<seed>.jsonl.gz."),
    ] = Path("runs"),
    data: Annotated[Path | None, typer.Option(help="Folder of the data sets; the table's by default.")] = None,
    row: Annotated[list[str] | None, typer.Option(help="Only this row; may be given several times.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Training seed; may be given several times.")] = None,
) -> None:
    """Make the runs of a table that are missing, one after the other in this process, without Ray.

    verl's trainer and worker do the training, as in a separate run; docs/tables.md says what differs. Each run's log is
    kept when the run ends, so that an interrupted command can continue, and further seeds add to existing ones.
    """
    from verl_clipx.one_process.only_rank import become_only_rank
    from verl_clipx.papers.tables.definition import load_table
    from verl_clipx.papers.tables.run_folder import kept_path
    from verl_clipx.papers.tables.table_plan import PREPARE, Places, plan_table, run_job

    with failing():
        table = load_table(name)
        if not table.in_one_process:
            raise ValueError(f"table {name}: its runs are the recipes', see `clipx table plan {name}`")
        places = Places(runs=runs, data=data or Path(table.data), hardware=table.hardware, nodes=table.nodes)
        os.environ["CLIPX_DATA"] = str(places.data.resolve())
        jobs = plan_table(table, places, (), tuple(row or ()))
        wanted = [source.preset for source, _ in table.sources(row or ())]
        missing = [
            (preset, number)
            for number in seed or table.seeds
            for preset in wanted
            if not kept_path(runs, preset, number).exists()
        ]
    if not missing:
        typer.echo(f"nothing to do: every run that was asked for is in {runs}", err=True)
        return
    for job in jobs:
        if job.kind != PREPARE or job.done:
            continue
        typer.echo(f"{job.label}: made once (log: {job.folder / 'prepare.log'})", err=True)
        if run_job(job, lambda step, total: None):
            fail(f"{job.label}: failed; its log is {job.folder / 'prepare.log'}")
    become_only_rank()
    for done, (preset, number) in enumerate(missing):
        typer.echo(f"{preset}, seed {number}: run {done + 1} of {len(missing)}", err=True)
        with failing():
            make_run(kept_path(runs, preset, number), preset, number)
    typer.echo(f"done: {len(missing)} runs kept in {runs}; next: clipx table collect {name} --runs {runs}", err=True)


def make_run(path: Path, preset: str, seed: int) -> None:
    """Train a preset with a seed and keep its log at a path.

    Raises:
        ValueError: the runs beside it started from another policy.
    """
    from verl_clipx.one_process.trainer import train
    from verl_clipx.papers.tables.collect import commit_here, versions_here
    from verl_clipx.papers.tables.config_hash import as_written, significant_values
    from verl_clipx.papers.tables.presets import compose_preset
    from verl_clipx.papers.tables.run_folder import KEPT, KeptRun, keep_run, metrics_of

    overrides = [f"{key}={seed}" for key in SEED_KEYS]
    config = compose_preset(
        preset, ["+hardware=cpu", *overrides, "trainer.logger=[file]", "trainer.resume_mode=disable"]
    )
    record = {
        "seed": seed,
        "config_hash": hash_of_json(significant_values(config), str),
        "steps": config.trainer.total_training_steps,
        "started_from": as_written(config, "actor_rollout_ref.model.path"),
        "policy": hash_of_file(Path(config.actor_rollout_ref.model.path) / "model.safetensors"),
        "trained_on": as_written(config, "data.train_files"),
        "commit": commit_here(),
        "versions": versions_here(),
    }
    other = next((KeptRun(beside) for beside in sorted(path.parent.glob(f"*{KEPT}"))), None)
    if other is not None and other.record["policy"] != record["policy"]:
        raise ValueError(
            f"{record['started_from']}: {record['policy'][:12]} is not the policy of {other.path}, "
            f"{other.record['policy'][:12]}: seeds of one table start from one. Give --runs a folder of its own"
        )
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "metrics.jsonl"
        train(config, log)
        metrics = metrics_of(read_bytes(log).splitlines())
    kept = {step: {key: data[key] for key in METRICS if key in data} for step, data in metrics.items()}
    record["seconds"] = round(time.process_time() - started, 1)
    keep_run(path, record, kept)
