"""Makes the runs of a table that are missing, one after the other in this process, without Ray.

Run: python benchmarks/table_fill.py reversal --runs RUNS [--row ROW …] [--seed SEED …]

verl's trainer and worker do the training (benchmarks/one_process). Each run's log is kept when the run ends, as
<preset>-seed<seed>.jsonl.gz, so that an interrupted command can continue, and further seeds add to existing ones.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from one_process import only_rank
from one_process.kept import kept_path

from verl_clipx.analysis.runs.folder import KEPT, RunFolder
from verl_clipx.analysis.runs.sameness import significant_values
from verl_clipx.common.command_line import reporting_errors
from verl_clipx.papers.tables.against_preset import as_written
from verl_clipx.papers.tables.definition import load_table
from verl_clipx.papers.tables.table_plan import PREPARE, Job, Places, plan_table

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


def main(
    name: Annotated[str, typer.Argument(help="A table with `in_one_process` in its definition.")],
    runs: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    data: Annotated[Path | None, typer.Option(help="Folder of the data sets; the table's by default.")] = None,
    row: Annotated[list[str] | None, typer.Option(help="Only this row; may be given several times.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Training seed; may be given several times.")] = None,
    steps: Annotated[int | None, typer.Option(help="Batches of each run, for a rehearsal.")] = None,
) -> None:
    """Make the runs of a table that are missing."""
    with reporting_errors():
        table = load_table(name)
        if not table.in_one_process:
            raise ValueError(f"table {name}: the recipes make its runs, see `clipx papers table plan {name}`.")
        places = Places(runs=runs, data=data or Path(table.data), hardware=table.hardware, nodes=table.nodes)
        os.environ["CLIPX_DATA"] = str(places.data.resolve())
        jobs = plan_table(table, places, (), tuple(row or ()))
        presets = [source.preset for source, _ in table.sources(row or ())]
        missing = [
            (preset, number)
            for number in seed or table.seeds
            for preset in presets
            if not kept_path(runs, preset, number).exists()
        ]
        if not missing:
            typer.echo(f"nothing to do: every run that was asked for is in {runs}", err=True)
            return
        for job in jobs:
            if job.kind == PREPARE and not job.done:
                prepare(job)
        only_rank.become_only_rank()
        for number, (preset, chosen) in enumerate(missing, 1):
            typer.echo(f"{preset}, seed {chosen}: run {number} of {len(missing)}", err=True)
            make_run(kept_path(runs, preset, chosen), preset, chosen, steps)
    typer.echo(f"{len(missing)} runs kept in {runs}; next: clipx papers table collect {name} --runs {runs}", err=True)


def prepare(job: Job) -> None:
    """Run a command that makes data or a policy, with this environment's `clipx` and `python`.

    Raises:
        ValueError: it failed.
    """
    typer.echo(f"{job.label}: made once", err=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(["bash", "-c", job.command], env={**os.environ, "PATH": path}, check=False)
    if done.returncode:
        raise ValueError(f"{job.label}: exit code {done.returncode} of {job.command}")


def make_run(path: Path, preset: str, seed: int, steps: int | None = None) -> None:
    """Train a preset with a seed and keep its log at a path.

    Args:
        steps: batches of the run; None: those of the preset.

    Raises:
        ValueError: the runs beside it started from another policy.
    """
    from one_process.kept import compose_here, describe, keep_configuration, shortened, train_and_keep

    config = compose_here(preset, seed, shortened(steps))
    record = {
        "seed": seed,
        "config_hash": keep_configuration(path.parent, significant_values(config)),
        "steps": config.trainer.total_training_steps,
        "started_from": as_written(config, "actor_rollout_ref.model.path"),
        "trained_on": as_written(config, "data.train_files"),
        **describe(config),
    }
    other = next((RunFolder(beside) for beside in sorted(path.parent.glob(f"*{KEPT}"))), None)
    if other is not None and other.record_content["policy"] != record["policy"]:
        raise ValueError(
            f"{record['started_from']}: {record['policy'][:12]} is not the policy of {other.path}, "
            f"{other.record_content['policy'][:12]}: seeds of one table start from one. Give --runs a folder of its own"
        )
    train_and_keep(path, config, record, lambda data: {key: data[key] for key in METRICS if key in data})


if __name__ == "__main__":
    typer.run(main)
