"""A figure from run folders that the test makes, through `collect` and `clipx table render`: the numbers in the CSV and
in the table of last numbers are the logged ones, smoothed by hand, and SVG and PNG have every panel and row.

What the drawing looks like is not tested.
"""

import csv
import io
import json
import xml.etree.ElementTree as ElementTree

import matplotlib.image
import pytest
import yaml
from omegaconf import OmegaConf
from typer.testing import CliRunner

from tests.papers.tables.tables import HEAD, small_table
from verl_clipx.cli import app
from verl_clipx.papers.tables import definition
from verl_clipx.papers.tables.collect import collect
from verl_clipx.papers.tables.curves import draw

DEFINITION = """
unit: logged
seeds: [1, 2]
columns:
  - {name: Reward, measure: {curve: critic/score/mean, smooth: 0.5}}
  - {name: Entropy, measure: {curve: actor/entropy}}
rows:
  - {name: GRPO, preset: cpu/countdown_grpo_near}
  - {name: "BAPO, wide", preset: cpu/countdown_bapo_near}
"""

CONFIG = {"trainer": {"total_training_steps": 3}, "data": {"seed": 1, "train_files": "x"}}
CONFIG["actor_rollout_ref"] = {"model": {"path": "m"}}


def make_run(runs, preset: str, seed: int, rewards: list[float], entropy: dict[int, float]) -> None:
    folder = runs / f"{preset}-seed{seed}"
    (folder / ".hydra").mkdir(parents=True)
    OmegaConf.save(OmegaConf.merge(CONFIG, {"data": {"seed": seed}}), folder / ".hydra" / "config.yaml")
    lines = [{"step": step, "data": {"critic/score/mean": reward}} for step, reward in enumerate(rewards, start=1)] + [
        {"step": step, "data": {"actor/entropy": value}} for step, value in entropy.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def runs(tmp_path):
    make_run(tmp_path, "cpu/countdown_grpo_near", 1, [0.0, 1.0, 1.0], {2: 0.5})
    make_run(tmp_path, "cpu/countdown_grpo_near", 2, [1.0, 1.0, 0.0], {2: 0.7})
    make_run(tmp_path, "cpu/countdown_bapo_near", 1, [0.5, 0.5, 0.5], {})
    return tmp_path


def collected(runs):
    from verl_clipx.runs.sameness import significant_values

    return collect(small_table(DEFINITION), runs, lambda preset: significant_values(OmegaConf.create(CONFIG)))


@pytest.fixture
def rendered(runs, monkeypatch):
    """`clipx table render small`, with results there."""
    entries = HEAD | yaml.safe_load(DEFINITION)
    monkeypatch.setattr(definition, "load_table", lambda name: definition.build_table(name, entries))
    (runs / "tables").mkdir()
    (runs / "tables" / "small.json").write_text(json.dumps(collected(runs)))
    return lambda *options: CliRunner().invoke(app, ["table", "render", "small", "--runs", str(runs), *options])


def test_each_seeds_curve_and_the_last_numbers_over_seeds(runs):
    results = collected(runs)
    curves = {(curve["row"], curve["column"], curve["seed"]): curve for curve in results["curves"]}
    assert set(curves) == {
        *((row, "Reward", seed) for row, seed in (("GRPO", 1), ("GRPO", 2), ("BAPO, wide", 1))),
        *(("GRPO", "Entropy", seed) for seed in (1, 2)),
    }
    first = curves["GRPO", "Reward", 1]
    assert (first["steps"], first["values"], first["smooth"]) == ([1, 2, 3], [0.0, 1.0, 1.0], [0.0, 0.5, 0.75])
    assert curves["GRPO", "Entropy", 2]["smooth"] == curves["GRPO", "Entropy", 2]["values"] == [0.7]
    # The seeds end at 0.75 and 0.5.
    (cell,) = [cell for cell in results["cells"] if (cell["row"], cell["column"]) == ("GRPO", "Reward")]
    assert cell["mean"] == pytest.approx(0.625) and cell["seeds"] == [1, 2]
    assert "cpu/countdown_bapo_near-seed1: no actor/entropy in metrics.jsonl" in results["missing"]


def test_the_csv_has_every_point(rendered):
    done = rendered("--format", "csv")
    assert done.exit_code == 0
    rows = list(csv.reader(io.StringIO(done.stdout)))
    assert rows[0] == ["row", "panel", "seed", "step", "value", "smooth"]
    assert len(rows) == 1 + 3 * 3 + 2
    assert ["GRPO", "Reward", "2", "3", "0.0", "0.5"] in rows and [
        "BAPO, wide",
        "Reward",
        "1",
        "1",
        "0.5",
        "0.5",
    ] in rows


def test_svg_and_png_have_the_panels_and_rows(rendered, tmp_path):
    svg, png = tmp_path / "f.svg", tmp_path / "f.png"
    assert rendered("--format", "svg", "--out", str(svg)).exit_code == 0
    texts = {element.text.strip() for element in ElementTree.parse(svg).iter() if element.tag.endswith("}text")}
    assert {"Reward", "Entropy", "critic/score/mean", "training step", "GRPO", "BAPO, wide"} <= texts
    before = svg.read_bytes()
    assert rendered("--format", "svg", "--out", str(svg)).exit_code == 0 and svg.read_bytes() == before
    assert rendered("--format", "png", "--out", str(png)).exit_code == 0
    assert matplotlib.image.imread(png).shape[1] > 600


def test_the_strong_line_is_the_mean_over_seeds(runs):
    drawing = draw(small_table(DEFINITION), collected(runs)["curves"])
    reward, entropy = drawing.axes
    lines = {tuple(line.get_ydata()) for line in reward.lines}
    # Seeds as logged, then the mean of the smoothed 0, 0.5, 0.75 and 1, 1, 0.5.
    assert {(0.0, 1.0, 1.0), (1.0, 1.0, 0.0), (0.5, 0.75, 0.625)} <= lines
    assert {tuple(line.get_ydata()) for line in entropy.lines} == {(0.5,), (0.7,), (0.6,)}


def test_the_table_has_the_last_numbers(rendered):
    assert "| GRPO | **0.6** | **0.6** |" in rendered().stdout


def test_what_cannot_be_drawn_is_refused(rendered, runs, tmp_path):
    done = rendered("--format", "png")
    assert done.exit_code == 1 and "--format png: name a file with --out" in done.output
    (runs / "tables" / "small.json").unlink()
    done = rendered("--format", "svg")
    assert done.exit_code == 1 and "Run `clipx table collect small` first" in " ".join(done.output.split())
    done = CliRunner().invoke(app, ["table", "render", "small", "--format", "pdf"])
    assert done.exit_code == 1 and "--format pdf: must be one of markdown, html, latex" in done.output


def test_a_table_without_curves_and_a_figure_without_runs_are_refused(tmp_path):
    from verl_clipx.papers.tables.curves import write_curves

    with pytest.raises(ValueError, match="table small has no curves\. Use markdown"):
        write_curves(small_table("{columns: [], rows: []}"), {"curves": []}, "svg")
    with pytest.raises(ValueError, match="no curve of small has been collected; `clipx table plan small` prints"):
        write_curves(small_table(DEFINITION), {"curves": []}, "svg")
