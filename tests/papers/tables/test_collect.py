"""Collecting a small table from run folders: what is missing is said, what is another run or another evaluation is
refused with the key and both values, and intervals, means, gains and differences are as by hand. One run has a real
preset's configuration as Hydra composes it.

`clipx papers eval run` itself is not run here: tests/papers/evaluation covers it.
"""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.analysis.runs.commands import answer, clipx
from tests.papers.tables.compositions import on_a_machine
from tests.papers.tables.runs import (
    ACPO,
    GRPO,
    VERSIONS,
    collected,
    config_of,
    write_metrics,
    write_results,
    write_run,
)
from tests.papers.tables.tables import made_table
from verl_clipx.analysis.runs.sameness import significant_values
from verl_clipx.papers.tables.collect import collect
from verl_clipx.papers.tables.render import render
from verl_clipx.papers.tables.table_commands import _print_collected

# Student's t at 0.975 with two degrees of freedom.
T_2 = 4.302652730
REWARD, ACCURACY = "critic/score/mean", "val-core/b/acc/mean@4"
REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())


def of_grpo(measure: dict, **changes):
    """A table of one cell, which is called `one`."""
    return made_table(
        "collect",
        **{"columns": [{"name": "one", "measure": measure}], "rows": [{"name": "GRPO", "preset": GRPO}], **changes},
    )


def write_evaluated(runs, preset, seed, b=None, c=None, **changes) -> Path:
    folder = write_run(runs, preset, seed, **changes)
    for name, mean in (("b", b), ("c", c)):
        if mean is not None:
            write_results(folder, name, [mean] * 4)
    return folder


def test_two_seeds_of_every_row(tmp_path):
    for preset, seed, b, c in ((GRPO, 1, 0.4, 0.6), (GRPO, 2, 0.5, 0.7), (ACPO, 1, 0.6, 0.6), (ACPO, 2, 0.6, 0.84)):
        write_evaluated(tmp_path, preset, seed, b, c)
    for name, mean in (("b", 0.25), ("c", 0.35)):
        write_results(tmp_path / "models" / "small" / "hub--model", name, [mean] * 4, "hub/model", None)
    results = collected(made_table("collect"), tmp_path)
    assert results["refused"] == [] and results["missing"] == []
    cells = results["at"]

    # An interval over seeds takes three.
    grpo = cells["GRPO", "B"]
    assert grpo["mean"] == pytest.approx(45.0) and grpo["interval"] is grpo["low"] is None and grpo["seeds"] == [1, 2]
    assert grpo["difference"] == pytest.approx(5.0)
    assert grpo["by_seed"] == {"1": pytest.approx(40.0), "2": pytest.approx(50.0)}

    # Seed by seed the means of B and C are 50 and 60.
    average = cells["GRPO", "Avg"]
    assert average["by_seed"] == {"1": pytest.approx(50.0), "2": pytest.approx(60.0)} and average["high"] is None
    # ACPO's are 60 and 72: 66, which is 20 % above 55.
    means = {("GRPO", "Avg"): 55.0, ("ACPO", "Avg"): 66.0, ("ACPO", "Gain"): 20.0, ("difference", "B"): 15.0}
    assert {key: cells[key]["mean"] for key in means} == pytest.approx(means)
    assert cells["ACPO", "Gain"]["low"] is None and "mean" not in cells["GRPO", "Gain"]

    # One evaluation of a model that is not trained has the interval over questions.
    before = cells["before", "C"]
    assert (before["mean"], before["interval"], before["seeds"], before["by_seed"]) == (35.0, "questions", [], {})
    assert (before["low"], before["high"]) == pytest.approx((25.0, 45.0))
    assert cells["before", "Avg"]["mean"] == pytest.approx(30.0)
    assert cells["paper", "B"] == {"row": "paper", "column": "B", "expected": 1.0}

    runs = {run["folder"]: run for run in results["runs"]}
    trained = {f"{preset}-seed{seed}" for preset in (GRPO, ACPO) for seed in (1, 2)}
    assert set(runs) == trained | {"models/small/hub--model"}
    run = runs[f"{GRPO}-seed2"]
    assert (run["seed"], run["steps"], run["versions"], run["commit"]) == (2, 20, VERSIONS, None)
    assert run["config_hash"] == runs[f"{GRPO}-seed1"]["config_hash"] != runs[f"{ACPO}-seed1"]["config_hash"]
    assert run["started_from"] == "${oc.env:CLIPX_DATA,data}/m"


def test_three_seeds_are_compared_with_the_baseline_over_seeds_and_questions(tmp_path):
    for preset, better in ((GRPO, 0.0), (ACPO, 0.2)):
        for seed in (1, 2, 3):
            folder = write_run(tmp_path, preset, seed)
            for benchmark in "bc":
                by_question = [0.1 + better + 0.01 * seed, 0.5, 0.3 + better, 0.6 + better / 2]
                write_results(folder, benchmark, by_question)
    results = collected(made_table("collect"), tmp_path)
    found = {one["column"]: one for one in results["comparisons"]}
    assert {one["row"] for one in results["comparisons"]} == {"ACPO"} and found["B"]["baseline"] == "GRPO"
    assert found["B"]["difference"] == pytest.approx(12.5) and found["B"]["seeds"] == (3, 3)
    assert found["B"]["over"] == "seeds and questions" and found["B"]["wins"] == 3 and found["B"]["ties"] == 1
    # Differences of 20, 0, 20 and 10 points: variance 275 / 3 over 4 questions.
    assert found["B"]["error"]["question"] == pytest.approx(275 / 3 / 4) and "Gain" not in found
    # Means of 37.75, 38 and 38.25: the standard error is 0.25 / sqrt(3).
    cell = results["at"]["GRPO", "C"]
    assert cell["interval"] == "seeds" and cell["high"] - cell["mean"] == pytest.approx(0.25 * T_2 / 3**0.5)


def test_a_run_of_a_real_preset_counts_on_another_machine(tmp_path):
    preset = "cpu/countdown_grpo_near"
    config = on_a_machine(preset).copy()
    config.data.seed = 1
    write_run(tmp_path, preset, 1, config=config)
    found = collect(of_grpo({"level": "timing_s/step"}, rows=[{"name": "GRPO", "preset": preset}]), tmp_path)
    assert found["refused"] == [] and [run["seed"] for run in found["runs"]] == [1]


@pytest.mark.parametrize(("seed", "changes", "reasons"), REFUSED["another configuration"])
def test_another_configuration_and_the_same_seed_twice_are_refused(tmp_path, seed, changes, reasons):
    write_evaluated(tmp_path, GRPO, 2, 0.5, 0.7)
    write_evaluated(tmp_path, GRPO, seed, 0.4, 0.6, **changes)
    results = collected(made_table("collect"), tmp_path)
    assert results["refused"] == [{"folder": f"{GRPO}-seed{seed}", "preset": GRPO, "reasons": reasons}]
    assert results["at"]["GRPO", "B"]["mean"] == pytest.approx(50.0)


def test_a_training_that_goes_on_and_a_missing_evaluation_leave_cells_empty(tmp_path):
    write_evaluated(tmp_path, GRPO, 1, 0.4)
    write_evaluated(tmp_path, ACPO, 1, 0.4, 0.6, metrics={12: {"x": 1.0}})
    results = collected(made_table("collect"), tmp_path)
    cells = results["at"]
    assert cells["GRPO", "B"]["mean"] == pytest.approx(40.0) and cells["GRPO", "B"]["interval"] == "questions"
    assert not any("mean" in cells[key] for key in (("GRPO", "C"), ("GRPO", "Avg"), ("ACPO", "B")))
    assert {
        f"{GRPO}-seed1: no evaluation/c/results.json",
        f"{GRPO}: 1 of 2 seeds",
        f"{ACPO}-seed1: trained to step 12 of 20",
    } <= {*results["missing"]}


@pytest.mark.parametrize(("changes", "reason"), REFUSED["another evaluation"])
def test_another_evaluation_is_refused_alone(tmp_path, changes, reason):
    folder = write_evaluated(tmp_path, GRPO, 1, c=0.6)
    write_results(folder, "b", [0.4] * 4, **changes)
    results = collected(made_table("collect"), tmp_path)
    assert results["refused"] == [{"folder": f"{GRPO}-seed1", "preset": None, "reasons": [f"evaluation/b: {reason}"]}]
    assert results["at"]["GRPO", "C"]["mean"] == pytest.approx(60.0)


@pytest.mark.parametrize(("template", "refused"), [("plain", 0), ("chat", 1)])
def test_the_last_template_among_a_rows_options_is_that_of_its_evaluations(tmp_path, template, refused):
    row = {"name": "GRPO", "preset": GRPO, "evaluation_options": "--template plain"}
    table = made_table("collect", rows=[row], evaluation_options="--template other")
    folder = write_run(tmp_path, GRPO, 1)
    write_results(folder, "b", [0.4] * 4, template=template)
    assert len(collected(table, tmp_path)["refused"]) == refused


def test_the_share_of_collapsed_seeds_has_an_exact_interval(tmp_path):
    rows = [{"name": "GRPO", "preset": GRPO}, {"name": "ACPO", "preset": ACPO}]
    table = of_grpo({"collapse": REWARD}, seeds=[1, 2, 3], baseline="GRPO", rows=rows)
    for preset in (GRPO, ACPO):
        for seed in (1, 2, 3):
            falls = {step: 0.0 for step in range(8, 21)} if preset == ACPO else {}
            rewards = {step: 0.4 + 0.01 * (step % 2) for step in range(1, 21)} | falls
            write_run(tmp_path, preset, seed, {step: {REWARD: value} for step, value in rewards.items()})
    results = collected(table, tmp_path)
    none, every = (results["at"][row, "one"] for row in ("GRPO", "ACPO"))
    # Of three: the largest share p with (1 - p)^3 = 0.025, and one less it.
    edge = 100 * 0.025 ** (1 / 3)
    assert (none["mean"], none["low"], none["high"]) == pytest.approx((0.0, 0.0, 100 - edge))
    assert (every["mean"], every["low"], every["high"]) == pytest.approx((100.0, edge, 100.0))
    assert none["interval"] == "share of seeds" and every["by_seed"] == {"1": 100.0, "2": 100.0, "3": 100.0}
    (found,) = results["comparisons"]
    assert found["p_value"] == pytest.approx(2 / 64) and found["difference"] == 100.0
    text = render(table, results)
    interval = "Clopper and Pearson's exact interval for the share of trainings that collapsed, with 3 seeds"
    assert f"95 % intervals of 2 cells: {interval}." in text
    assert "| ACPO | **+100.0, p 0.031** |" in text and "Shares of collapsed trainings: Boschloo's exact test." in text


def test_best_validation_of_a_log_whose_last_line_was_cut_off_on_the_tables_questions(tmp_path):
    table = of_grpo({"validation": "b", "samples": 4})
    validation = tmp_path / "test.parquet"
    pq.write_table(pa.table({"data_source": ["b"] * 5 + ["c"] * 4}), validation)
    other = {20: {"val-core/b/acc/mean@8": 0.5}}
    folder = write_run(tmp_path, GRPO, 1, other, **{"data.val_files": str(validation)})
    (refused,) = collected(table, tmp_path)["refused"]
    assert refused["reasons"] == ["data.val_files: the table says 4 questions of b, the files have 5"]
    pq.write_table(pa.table({"data_source": ["b"] * 4}), validation)
    assert any(f"no {ACCURACY} in metrics.jsonl" in line for line in collected(table, tmp_path)["missing"])
    write_metrics(folder, {0: {ACCURACY: 0.1}, 10: {ACCURACY: 0.7}, 20: {ACCURACY: 0.6}})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step":21,"data":{"val')
    cell = collected(table, tmp_path)["at"]["GRPO", "one"]
    assert cell["mean"] == pytest.approx(70.0) and cell["low"] is None and cell["interval"] is None


def test_times_are_means_over_steps_in_seconds_and_levels_of_the_last_tenth(tmp_path):
    step, generation = "timing_s/step", "timing_s/gen"
    write_run(tmp_path, GRPO, 1, {at: {step: 10.0 * at, generation: 4.0} for at in range(1, 21)})
    timers = {"total": {step: 1}, "rest": {step: 1, generation: -1}, "other": {"timing_s/nobody": 1}}
    rows = [{"name": name, "measure": {"timing": one}} for name, one in timers.items()]
    columns = [{"name": "one", "preset": GRPO, "measure": {"steps": [1, 2]}}]
    results = collected(of_grpo({}, unit="seconds", columns=columns, rows=rows), tmp_path)
    assert results["at"]["total", "one"]["mean"] == pytest.approx(15.0)
    assert results["at"]["rest", "one"]["mean"] == pytest.approx(11.0) and "mean" not in results["at"]["other", "one"]
    assert f"{GRPO}-seed1: no timing_s/nobody of step 1 in metrics.jsonl" in results["missing"]
    for kind, mean in (("level", 190.0), ("average", 105.0)):
        found = collected(of_grpo({kind: step}, unit="number"), tmp_path)
        assert found["at"]["GRPO", "one"]["mean"] == pytest.approx(mean)


@pytest.mark.parametrize(("file", "content"), REFUSED["cannot be read"])
def test_what_cannot_be_read_is_named_and_stops_its_run_alone(tmp_path, file, content):
    folder = write_evaluated(tmp_path, GRPO, 1, 0.4, 0.6)
    write_evaluated(tmp_path, GRPO, 2, 0.5, 0.7)
    (folder / file).unlink(missing_ok=True)
    if content is None:
        (folder / file).mkdir(parents=True)
    else:
        (folder / file).write_text(content.replace("{bomb}", "[" * 100_000))
    results = collected(made_table("collect"), tmp_path)
    (refused,) = results["refused"]
    assert refused["folder"] == f"{GRPO}-seed1" and str(folder / file) in refused["reasons"][0]
    assert results["at"]["GRPO", "B"]["mean"] == pytest.approx(50.0)


def test_the_command_writes_the_results_of_the_chosen_rows_and_says_what_is_missing(tmp_path):
    file, runs = tmp_path / "tables" / "bapo_table2.json", ("--runs", tmp_path)
    # Without any run a table has no number, which is a failure for people and for programs.
    output = clipx("papers", "table", "collect", "bapo_table2", *runs, code=1)
    assert f"0 of 6 cells from 0 runs: {file} missing 2 runs or numbers; {file} lists them under the key" in output
    assert f"{tmp_path}/bapo/octothinker_3b_grpo-seed1 would be one." in output
    results = json.loads(file.read_text())
    assert results["table"] == "bapo_table2" and len(results["cells"]) == 6
    assert results["missing"] == ["bapo/octothinker_3b_grpo: 0 of 1 seeds", "bapo/octothinker_3b_bapo: 0 of 1 seeds"]
    assert answer("papers", "table", "collect", "bapo_table2", *runs, code=1)["missing"] == results["missing"]
    output = clipx("papers", "table", "collect", "bapo_table2", *runs, "--row", "BAPO", code=1)
    assert output.startswith("0 of 3 cells from 0 runs: ")
    assert "The file has only the runs of BAPO, and replaces an earlier file of this name." in output
    assert json.loads(file.read_text())["missing"] == ["bapo/octothinker_3b_bapo: 0 of 1 seeds"]


def test_only_cells_of_the_chosen_rows_are_counted(tmp_path, capsys):
    for preset in (GRPO, ACPO):
        for seed in (1, 2):
            write_evaluated(tmp_path, preset, seed, 0.4, 0.6)
    table, rows = made_table("collect"), ["GRPO", "ACPO"]
    results = collect(table, tmp_path, lambda preset: significant_values(config_of(preset)), rows)
    assert sum(cell["row"] == "difference" and "mean" in cell for cell in results["cells"]) == 3
    _print_collected(table, rows, results, tmp_path, tmp_path / "small.json")
    # Of GRPO the two benchmarks and their mean, of ACPO also the gain.
    assert capsys.readouterr().out.startswith("7 of 7 cells from 4 runs: ")


def test_a_row_that_no_run_fills_is_named(tmp_path):
    output = clipx("papers", "table", "collect", "ar_lopti_figure4", "--runs", tmp_path, "--row", "GPT-4o", code=1)
    assert output.startswith("0 of 0 cells from 0 runs: ")
    assert output.endswith(
        "No run fills GPT-4o: such a row is only quoted, or is the difference of two other rows; name those with "
        "--row, too."
    )


def test_a_broken_definition_ends_the_list_with_a_message(monkeypatch):
    def refuse(name):
        raise ValueError(f"table {name}: the file is [], not fields with values")

    monkeypatch.setattr("verl_clipx.papers.tables.definition.load_table", refuse)
    assert "the file is [], not fields with values" in clipx("papers", "table", "list", code=1)
