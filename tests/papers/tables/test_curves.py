"""A figure from run folders, through `collect` and `clipx table render`: the numbers in the CSV and in the table of
last numbers are the logged ones, smoothed by hand."""

import csv
import io
import json

import pytest
from typer.testing import CliRunner

from tests.papers.tables.runs import collected, write_run
from tests.papers.tables.tables import made_table
from tests.runs.commands import clipx
from verl_clipx.cli import app
from verl_clipx.papers.tables import definition

RUNS = {
    ("made/grpo", 1): ([0.0, 1.0, 1.0], 0.5),
    ("made/grpo", 2): ([1.0, 1.0, 0.0], 0.7),
    ("made/bapo", 1): ([0.5, 0.5, 0.5], None),
}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """What `collect` leaves, where `clipx table render small` finds it."""
    for (preset, seed), (rewards, entropy) in RUNS.items():
        metrics = {step: {"critic/score/mean": reward} for step, reward in enumerate(rewards, 18)}
        if entropy is not None:
            metrics[19]["actor/entropy"] = entropy
        write_run(tmp_path, preset, seed, metrics)
    table = made_table("curves")
    monkeypatch.setattr(definition, "load_table", lambda name: table)
    found = collected(table, tmp_path)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "small.json").write_text(json.dumps({k: v for k, v in found.items() if k != "at"}))
    return found


def test_each_seeds_curve_and_the_last_numbers_over_seeds(results, tmp_path):
    curves = {(curve["row"], curve["column"], curve["seed"]): curve for curve in results["curves"]}
    first = curves["GRPO", "Reward", 1]
    assert (first["steps"], first["values"], first["smooth"]) == ([18, 19, 20], [0.0, 1.0, 1.0], [0.0, 0.5, 0.75])
    assert curves["GRPO", "Entropy", 2]["smooth"] == curves["GRPO", "Entropy", 2]["values"] == [0.7]
    # The seeds end at 0.75 and 0.5.
    cell = results["at"]["GRPO", "Reward"]
    assert cell["mean"] == pytest.approx(0.625) and cell["seeds"] == [1, 2]
    assert "made/bapo-seed1: no actor/entropy in metrics.jsonl" in results["missing"]
    assert "| GRPO | **0.6** | **0.6** |" in clipx("table", "render", "small", "--runs", tmp_path)


def test_the_csv_has_every_point(results, tmp_path):
    words = ["table", "render", "small", "--runs", str(tmp_path), "--format", "csv"]
    head, *rows = csv.reader(io.StringIO(CliRunner().invoke(app, words).stdout))
    assert head == ["row", "panel", "seed", "step", "value", "smooth"] and len(rows) == 3 * 3 + 2
    assert ["GRPO", "Reward", "2", "20", "0.0", "0.5"] in rows
    assert ["BAPO, wide", "Reward", "1", "18", "0.5", "0.5"] in rows


def test_a_figure_without_runs_is_refused(results, tmp_path):
    words = ("table", "render", "small", "--runs", tmp_path, "--format")
    (tmp_path / "tables" / "small.json").unlink()
    assert "no curve of small has been collected" in clipx(*words, "csv", code=1)
