"""benchmarks/table_fill.py makes what is missing, and `clipx papers table collect` reads it if its settings fit.

The training itself is replaced by one that writes a log; tests/end_to_end/test_one_process.py compares the real one
with verl's through Ray.
"""

import gzip
import json
from pathlib import Path

import pytest
import table_fill
import typer
from typer.testing import CliRunner

from tests.analysis.runs.example_runs import write_log
from verl_clipx.papers.tables.collect import CONFIGURATIONS, read_configurations
from verl_clipx.papers.tables.collect import collect as collect_table
from verl_clipx.papers.tables.definition import load_table
from verl_clipx.run.config import completed

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"

ROWS = ["--row", "GRPO, 4 updates", "--row", "DAPO, 4 updates"]


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Makes `fill` write logs; returns the settings of the runs that it made."""
    from one_process import only_rank, trainer

    made = []

    def train(config, log, trainer):
        made.append((config.data.seed, completed(config.clipx)["clip_high"], config.actor_rollout_ref.rollout.seed))
        steps = range(1, config.trainer.total_training_steps + 1)
        write_log(log, [{"critic/score/mean": step / 100, "actor/ppo_kl": 0.001, "x": 1} for step in steps])

    monkeypatch.setattr(trainer, "train", train)
    for name in ("reversal/test.parquet", "policies/reversal/config.json", "policies/reversal/model.safetensors"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text("here")
    monkeypatch.setenv("CLIPX_DATA", "")
    monkeypatch.setattr(only_rank, "become_only_rank", lambda: None)
    return made


def fill(folder, *arguments, table="reversal"):
    script = typer.Typer()
    script.command()(table_fill.main)
    words = [table, "--runs", folder, "--data", folder / "data", *arguments]
    done = CliRunner().invoke(script, list(map(str, words if table == "cpu_small" else [*words, *ROWS])))
    return done.exit_code, done.output


def test_missing_runs_are_made_and_no_others_and_collect_reads_them(trained, tmp_path):
    seeds = ["--seed", 1, "--seed", 2, "--seed", 3]
    assert fill(tmp_path, *seeds)[0] == 0
    assert trained == [(seed, bound, seed) for seed in (1, 2, 3) for bound in (1.2, 1.28)]
    assert f"nothing to do: every run that was asked for is in {tmp_path}" in fill(tmp_path, *seeds)[1]
    (tmp_path / "reversal" / "dapo_4-seed2.jsonl.gz").unlink()
    assert fill(tmp_path, *seeds)[0] == 0
    assert trained[6:] == [(2, 1.28, 2)]
    found = collect_table(load_table("reversal"), tmp_path, rows=ROWS[1::2])
    cells = {(cell["row"], cell["column"]): cell for cell in found["cells"] if "mean" in cell}
    # The last three of sixteen steps.
    assert cells["GRPO, 4 updates", "reward"]["mean"] == pytest.approx(0.15)
    assert cells["GRPO, 4 updates", "KL a batch"]["by_seed"] == {"1": 0.001, "2": 0.001, "3": 0.001}
    assert cells["DAPO, 4 updates", "collapsed"]["interval"] == "share of seeds"
    assert [run["seed"] for run in found["runs"]] == [1, 2, 3, 1, 2, 3]
    assert all(run["policy"] and run["commit"] is not None for run in found["runs"])


def test_runs_of_other_settings_and_of_another_policy_are_refused(trained, tmp_path):
    assert fill(tmp_path, "--seed", 1)[0] == 0
    kept = tmp_path / "reversal" / CONFIGURATIONS
    made = read_configurations(kept.parent)
    changed = {hashed: values | {"actor_rollout_ref.actor.optim.lr": 1e-3} for hashed, values in made.items()}
    kept.write_bytes(gzip.compress(json.dumps(changed).encode()))
    (tmp_path / "reversal" / "dapo_4-seed1.jsonl.gz").write_bytes(b"no gzip")

    def refused():
        entries = collect_table(load_table("reversal"), tmp_path, rows=ROWS[1::2])["refused"]
        return {entry["folder"].removeprefix("reversal/"): entry["reasons"] for entry in entries}

    assert refused()["grpo_4-seed1.jsonl.gz"] == ["actor_rollout_ref.actor.optim.lr: preset 0.0003, run 0.001"]
    assert "dapo_4-seed1.jsonl.gz: no line `step:1" in refused()["dapo_4-seed1.jsonl.gz"][0]
    kept.unlink()
    assert refused()["grpo_4-seed1.jsonl.gz"][0].startswith("config_hash: ")
    (tmp_path / "data/policies/reversal/model.safetensors").write_text("another")
    (tmp_path / "reversal" / "dapo_4-seed1.jsonl.gz").unlink()
    code, output = fill(tmp_path, "--seed", 2)
    assert code == 1 and "is not the policy of" in output and "--runs a folder of its own" in output


def test_the_committed_runs_are_still_their_presets():
    """Of each way to name a setting one row: the collector takes its runs, and finds the committed numbers."""
    committed = json.loads((DOCS / "results" / "reversal.json").read_text())
    rows = ["GRPO, 4 updates", "ACPO, 16 updates", "GRPO + AR, 4 updates, 3 versions old"]
    found = collect_table(load_table("reversal"), DOCS / "results" / "runs", rows=rows)
    assert found["refused"] == []
    numbers, expected = (
        {(cell["row"], cell["column"]): cell["by_seed"] for cell in of["cells"] if cell["row"] in rows}
        for of in (found, committed)
    )
    assert numbers == expected


def test_another_tables_runs_are_the_recipes(tmp_path):
    code, output = fill(tmp_path, table="cpu_small")
    assert code == 1 and "clipx papers table plan cpu_small" in output
