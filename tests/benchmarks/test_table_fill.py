"""benchmarks/table_fill.py makes what is missing, and `clipx papers table collect` reads it if its settings fit.

The training itself is replaced by one that writes a log; tests/end_to_end/test_one_process.py compares the real one
with verl's through Ray.
"""

import gzip
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import table_fill
import typer
from click.testing import Result
from typer.testing import CliRunner

from tests.analysis.runs.example_runs import write_log
from tests.messages import assert_names
from verl_clipx.papers.tables.collect import CONFIGURATIONS, read_configurations
from verl_clipx.papers.tables.collect import collect as collect_table
from verl_clipx.papers.tables.definition import load_table
from verl_clipx.run.config import completed

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"

ROWS = ["GRPO, 4 updates", "DAPO, 4 updates"]


class MadeRun(NamedTuple):
    """What sets apart the runs that were made."""

    seed: int
    clip_high: float
    rollout_seed: int


@pytest.fixture
def made_runs(monkeypatch, tmp_path) -> list[MadeRun]:
    """The runs that `fill` has made so far, each of which only writes a log."""
    from one_process import only_rank, trainer

    runs = []

    def write_log_of_run(config, log, trainer):
        clip_high = completed(config.clipx)["clip_high"]
        runs.append(MadeRun(config.data.seed, clip_high, config.actor_rollout_ref.rollout.seed))
        steps = range(1, config.trainer.total_training_steps + 1)
        write_log(log, [{"critic/score/mean": step / 100, "actor/ppo_kl": 0.001, "x": 1} for step in steps])

    monkeypatch.setattr(trainer, "train", write_log_of_run)
    for name in ("reversal/test.parquet", "policies/reversal/config.json", "policies/reversal/model.safetensors"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text("here")
    monkeypatch.setenv("CLIPX_DATA", "")
    monkeypatch.setattr(only_rank, "become_only_rank", lambda: None)
    return runs


def fill(folder, *options, table="reversal", rows=ROWS) -> Result:
    """Run the script for rows of a table, with its runs and the data in a folder."""
    script = typer.Typer()
    script.command()(table_fill.main)
    words = [table, "--runs", folder, "--data", folder / "data", *options]
    for row in rows:
        words += ["--row", row]
    return CliRunner().invoke(script, [str(word) for word in words])


def fill_seeds(folder, *seeds) -> Result:
    options = []
    for seed in seeds:
        options += ["--seed", seed]
    return fill(folder, *options)


def test_missing_runs_are_made_and_no_others(made_runs, tmp_path):
    assert fill_seeds(tmp_path, 1, 2, 3).exit_code == 0
    expected = []
    for seed in (1, 2, 3):
        # GRPO's bound and DAPO's.
        expected += [MadeRun(seed, clip_high, rollout_seed=seed) for clip_high in (1.2, 1.28)]
    assert made_runs == expected
    assert_names(fill_seeds(tmp_path, 1, 2, 3).output, "nothing to do", str(tmp_path))
    (tmp_path / "reversal" / "dapo_4-seed2.jsonl.gz").unlink()
    assert fill_seeds(tmp_path, 1, 2, 3).exit_code == 0
    assert made_runs[6:] == [MadeRun(2, 1.28, rollout_seed=2)]


@pytest.mark.usefixtures("made_runs")
def test_collect_reads_the_runs(tmp_path):
    assert fill_seeds(tmp_path, 1, 2, 3).exit_code == 0
    collected = collect_table(load_table("reversal"), tmp_path, rows=ROWS)
    cells = {(cell["row"], cell["column"]): cell for cell in collected["cells"] if "mean" in cell}
    # The last three of sixteen steps.
    assert cells["GRPO, 4 updates", "reward"]["mean"] == pytest.approx(0.15)
    assert cells["GRPO, 4 updates", "KL a batch"]["by_seed"] == {"1": 0.001, "2": 0.001, "3": 0.001}
    assert cells["DAPO, 4 updates", "collapsed"]["interval"] == "share of seeds"
    assert [run["seed"] for run in collected["runs"]] == [1, 2, 3, 1, 2, 3]
    for run in collected["runs"]:
        assert run["policy"]
        assert run["commit"] is not None


def refusals_by_file(folder) -> dict[str, list[str]]:
    """Return why the collector refuses runs, by the names of their files."""
    refused = collect_table(load_table("reversal"), folder, rows=ROWS)["refused"]
    return {entry["folder"].removeprefix("reversal/"): entry["reasons"] for entry in refused}


@pytest.mark.usefixtures("made_runs")
def test_a_run_of_other_settings_is_refused_with_the_key_and_both_values(tmp_path):
    assert fill_seeds(tmp_path, 1).exit_code == 0
    kept = tmp_path / "reversal" / CONFIGURATIONS
    changed = {}
    for digest, configuration in read_configurations(kept.parent).items():
        changed[digest] = configuration | {"actor_rollout_ref.actor.optim.lr": 1e-3}
    kept.write_bytes(gzip.compress(json.dumps(changed).encode()))
    reasons = refusals_by_file(tmp_path)["grpo_4-seed1.jsonl.gz"]
    assert reasons == ["actor_rollout_ref.actor.optim.lr: preset 0.0003, run 0.001"]


@pytest.mark.usefixtures("made_runs")
def test_a_run_without_its_configuration_and_a_damaged_log_are_refused(tmp_path):
    assert fill_seeds(tmp_path, 1).exit_code == 0
    (tmp_path / "reversal" / CONFIGURATIONS).unlink()
    (tmp_path / "reversal" / "dapo_4-seed1.jsonl.gz").write_bytes(b"no gzip")
    refusals = refusals_by_file(tmp_path)
    assert refusals["grpo_4-seed1.jsonl.gz"][0].startswith("config_hash: ")
    assert "dapo_4-seed1.jsonl.gz: no line `step:1" in refusals["dapo_4-seed1.jsonl.gz"][0]


@pytest.mark.usefixtures("made_runs")
def test_runs_of_another_policy_are_not_made_beside_those_that_there_are(tmp_path):
    assert fill_seeds(tmp_path, 1).exit_code == 0
    (tmp_path / "data/policies/reversal/model.safetensors").write_text("another")
    result = fill_seeds(tmp_path, 2)
    assert result.exit_code == 1
    assert_names(result.output, "is not the policy of", "--runs a folder of its own")


def values_by_seed(table, rows) -> dict[tuple[str, str], dict]:
    """Return the values of each seed by row and column."""
    return {(cell["row"], cell["column"]): cell["by_seed"] for cell in table["cells"] if cell["row"] in rows}


def test_the_committed_runs_are_still_their_presets():
    """Of each way to name a setting one row: the collector takes its runs, and finds the committed numbers."""
    rows = ["GRPO, 4 updates", "ACPO, 16 updates", "GRPO + AR, 4 updates, 3 versions old"]
    committed = json.loads((DOCS / "results" / "reversal.json").read_text())
    collected = collect_table(load_table("reversal"), DOCS / "results" / "runs", rows=rows)
    assert collected["refused"] == []
    assert values_by_seed(collected, rows) == values_by_seed(committed, rows)


def test_another_tables_runs_are_the_recipes(tmp_path):
    result = fill(tmp_path, table="cpu_small", rows=[])
    assert result.exit_code == 1
    assert_names(result.output, "clipx papers table plan cpu_small")
