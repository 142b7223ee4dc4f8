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
from tests.messages import assert_names
from tests.papers.tables.compositions import compose_on_machine
from tests.papers.tables.runs import (
    ACPO,
    GRPO,
    VERSIONS,
    collect_results,
    find_cell,
    write_results,
    write_run,
)
from tests.papers.tables.tables import make_table
from verl_clipx.papers.tables.collect import collect
from verl_clipx.papers.tables.render import render
from verl_clipx.papers.tables.table_commands import _print_collected

REWARD = "critic/score/mean"
ACCURACY = "val-core/b/acc/mean@4"
REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())


def make_table_of_one_cell(measure: dict, **changes):
    """Return a table of GRPO's runs whose only column is called `measured`."""
    entries = {
        "columns": [{"name": "measured", "measure": measure}],
        "rows": [{"name": "GRPO", "preset": GRPO}],
    }
    return make_table("collect", **entries | changes)


def write_evaluated_run(runs, preset, seed, *, b=None, c=None, **changes) -> Path:
    """Write a run, with evaluations where an accuracy on the benchmark b or c is given; return its folder."""
    folder = write_run(runs, preset, seed, **changes)
    for benchmark, accuracy in (("b", b), ("c", c)):
        if accuracy is not None:
            write_results(folder, benchmark, [accuracy] * 4)
    return folder


@pytest.fixture(scope="module")
def two_seeds(tmp_path_factory):
    """The results of two seeds of every row."""
    runs = tmp_path_factory.mktemp("runs")
    write_evaluated_run(runs, GRPO, 1, b=0.4, c=0.6)
    write_evaluated_run(runs, GRPO, 2, b=0.5, c=0.7)
    write_evaluated_run(runs, ACPO, 1, b=0.6, c=0.6)
    write_evaluated_run(runs, ACPO, 2, b=0.6, c=0.84)
    model = runs / "models" / "small" / "hub--model"
    write_results(model, "b", [0.25] * 4, model="hub/model", step=None)
    write_results(model, "c", [0.35] * 4, model="hub/model", step=None)
    results = collect_results(make_table("collect"), runs)
    assert results["refused"] == []
    assert results["missing"] == []
    return results


def test_two_seeds_of_a_training_have_a_mean_and_no_interval(two_seeds):
    cell = find_cell(two_seeds, "GRPO", "B")
    assert cell["mean"] == pytest.approx(45.0)
    assert cell["difference"] == pytest.approx(5.0)
    assert cell["by_seed"] == {"1": pytest.approx(40.0), "2": pytest.approx(50.0)}
    assert cell["seeds"] == [1, 2]
    # An interval over seeds takes three.
    assert cell["interval"] is cell["low"] is None


def test_means_and_gains_over_columns_and_differences_of_rows_by_hand(two_seeds):
    # Seed by seed GRPO's means of B and C are 50 and 60.
    average = find_cell(two_seeds, "GRPO", "Avg")
    assert average["by_seed"] == {"1": pytest.approx(50.0), "2": pytest.approx(60.0)}
    assert average["mean"] == pytest.approx(55.0)
    assert average["high"] is None
    # ACPO's are 60 and 72: 66, which is 20 % above 55.
    assert find_cell(two_seeds, "ACPO", "Avg")["mean"] == pytest.approx(66.0)
    gain = find_cell(two_seeds, "ACPO", "Gain")
    assert gain["mean"] == pytest.approx(20.0)
    assert gain["low"] is None
    assert "mean" not in find_cell(two_seeds, "GRPO", "Gain")
    assert find_cell(two_seeds, "difference", "B")["mean"] == pytest.approx(15.0)


def test_a_model_that_is_not_trained_has_the_interval_over_questions(two_seeds):
    cell = find_cell(two_seeds, "before", "C")
    assert cell["mean"] == 35.0
    assert cell["interval"] == "questions"
    assert (cell["low"], cell["high"]) == pytest.approx((25.0, 45.0))
    assert cell["seeds"] == []
    assert cell["by_seed"] == {}
    assert find_cell(two_seeds, "before", "Avg")["mean"] == pytest.approx(30.0)


def test_a_quoted_row_has_the_papers_number_alone(two_seeds):
    assert find_cell(two_seeds, "paper", "B") == {"row": "paper", "column": "B", "expected": 1.0}


def test_the_results_say_which_runs_they_are_from(two_seeds):
    runs = {run["folder"]: run for run in two_seeds["runs"]}
    trainings = {f"{preset}-seed{seed}" for preset in (GRPO, ACPO) for seed in (1, 2)}
    assert {*runs} == trainings | {"models/small/hub--model"}
    run = runs[f"{GRPO}-seed2"]
    assert run["seed"] == 2
    assert run["steps"] == 20
    assert run["versions"] == VERSIONS
    assert run["commit"] is None
    assert run["started_from"] == "${oc.env:CLIPX_DATA,data}/m"
    assert run["config_hash"] == runs[f"{GRPO}-seed1"]["config_hash"]
    assert run["config_hash"] != runs[f"{ACPO}-seed1"]["config_hash"]


def test_three_seeds_are_compared_with_the_baseline_over_seeds_and_questions(tmp_path):
    for seed in (1, 2, 3):
        grpo = write_run(tmp_path, GRPO, seed)
        acpo = write_run(tmp_path, ACPO, seed)
        for benchmark in ("b", "c"):
            write_results(grpo, benchmark, [0.1 + 0.01 * seed, 0.5, 0.3, 0.6])
            write_results(acpo, benchmark, [0.3 + 0.01 * seed, 0.5, 0.5, 0.7])
    results = collect_results(make_table("collect"), tmp_path)
    comparisons = {comparison["column"]: comparison for comparison in results["comparisons"]}
    assert "Gain" not in comparisons
    assert {comparison["row"] for comparison in results["comparisons"]} == {"ACPO"}
    of_b = comparisons["B"]
    assert of_b["baseline"] == "GRPO"
    assert of_b["over"] == "seeds and questions"
    assert of_b["difference"] == pytest.approx(12.5)
    assert of_b["seeds"] == (3, 3)
    assert of_b["wins"] == 3
    assert of_b["ties"] == 1
    # Differences of 20, 0, 20 and 10 points: variance 275 / 3 over 4 questions.
    assert of_b["error"]["question"] == pytest.approx(275 / 3 / 4)


def test_three_seeds_have_an_interval_over_seeds(tmp_path):
    for seed in (1, 2, 3):
        folder = write_run(tmp_path, GRPO, seed)
        write_results(folder, "c", [0.1 + 0.01 * seed, 0.5, 0.3, 0.6])
    cell = find_cell(collect_results(make_table("collect"), tmp_path), "GRPO", "C")
    assert cell["interval"] == "seeds"
    # Means of 37.75, 38 and 38.25: the standard error is 0.25 / sqrt(3). Student's t at 0.975 with two degrees of
    # freedom is 4.3027.
    assert cell["high"] - cell["mean"] == pytest.approx(4.302652730 * 0.25 / 3**0.5)


def test_a_run_of_a_real_preset_counts_on_another_machine(tmp_path):
    preset = "cpu/countdown_grpo_near"
    config = compose_on_machine(preset).copy()
    config.data.seed = 1
    write_run(tmp_path, preset, 1, config=config)
    table = make_table_of_one_cell({"level": "timing_s/step"}, rows=[{"name": "GRPO", "preset": preset}])
    results = collect(table, tmp_path)
    assert results["refused"] == []
    assert [run["seed"] for run in results["runs"]] == [1]


@pytest.mark.parametrize(("seed", "changes", "reasons"), REFUSED["another configuration"])
def test_another_configuration_and_the_same_seed_twice_are_refused(tmp_path, seed, changes, reasons):
    write_evaluated_run(tmp_path, GRPO, 2, b=0.5, c=0.7)
    write_evaluated_run(tmp_path, GRPO, seed, b=0.4, c=0.6, **changes)
    results = collect_results(make_table("collect"), tmp_path)
    assert results["refused"] == [{"folder": f"{GRPO}-seed{seed}", "preset": GRPO, "reasons": reasons}]
    assert find_cell(results, "GRPO", "B")["mean"] == pytest.approx(50.0)


def test_a_missing_evaluation_leaves_its_cells_empty(tmp_path):
    write_evaluated_run(tmp_path, GRPO, 1, b=0.4)
    results = collect_results(make_table("collect"), tmp_path)
    of_b = find_cell(results, "GRPO", "B")
    assert of_b["mean"] == pytest.approx(40.0)
    assert of_b["interval"] == "questions"
    assert "mean" not in find_cell(results, "GRPO", "C")
    assert "mean" not in find_cell(results, "GRPO", "Avg")
    assert f"{GRPO}-seed1: no evaluation/c/results.json" in results["missing"]
    assert f"{GRPO}: 1 of 2 seeds" in results["missing"]


def test_a_training_that_goes_on_leaves_its_cells_empty(tmp_path):
    write_evaluated_run(tmp_path, ACPO, 1, b=0.4, c=0.6, metrics={12: {"x": 1.0}})
    results = collect_results(make_table("collect"), tmp_path)
    assert "mean" not in find_cell(results, "ACPO", "B")
    assert f"{ACPO}-seed1: trained to step 12 of 20" in results["missing"]


@pytest.mark.parametrize(("changes", "reason"), REFUSED["another evaluation"])
def test_another_evaluation_is_refused_alone(tmp_path, changes, reason):
    folder = write_evaluated_run(tmp_path, GRPO, 1, c=0.6)
    write_results(folder, "b", [0.4] * 4, **changes)
    results = collect_results(make_table("collect"), tmp_path)
    assert results["refused"] == [{"folder": f"{GRPO}-seed1", "preset": None, "reasons": [f"evaluation/b: {reason}"]}]
    assert find_cell(results, "GRPO", "C")["mean"] == pytest.approx(60.0)


@pytest.mark.parametrize(("template", "is_refused"), [("plain", False), ("chat", True)])
def test_the_last_template_among_a_rows_options_is_that_of_its_evaluations(tmp_path, template, is_refused):
    row = {"name": "GRPO", "preset": GRPO, "evaluation_options": "--template plain"}
    table = make_table("collect", rows=[row], evaluation_options="--template other")
    folder = write_run(tmp_path, GRPO, 1)
    write_results(folder, "b", [0.4] * 4, template=template)
    refused = collect_results(table, tmp_path)["refused"]
    assert len(refused) == (1 if is_refused else 0)


def test_the_share_of_collapsed_seeds_has_an_exact_interval(tmp_path):
    rows = [{"name": "GRPO", "preset": GRPO}, {"name": "ACPO", "preset": ACPO}]
    table = make_table_of_one_cell({"collapse": REWARD}, seeds=[1, 2, 3], baseline="GRPO", rows=rows)
    steady = {step: {REWARD: 0.4 + 0.01 * (step % 2)} for step in range(1, 21)}
    collapsed = steady | {step: {REWARD: 0.0} for step in range(8, 21)}
    for seed in (1, 2, 3):
        write_run(tmp_path, GRPO, seed, steady)
        write_run(tmp_path, ACPO, seed, collapsed)
    results = collect_results(table, tmp_path)
    # The share p with (1 - p)^3 = 0.025 is the largest with which three trainings of three without a collapse are not
    # unlikely.
    largest_share = 100 - 100 * 0.025 ** (1 / 3)
    of_none = find_cell(results, "GRPO", "measured")
    assert (of_none["mean"], of_none["low"], of_none["high"]) == pytest.approx((0.0, 0.0, largest_share))
    assert of_none["interval"] == "share of seeds"
    of_all = find_cell(results, "ACPO", "measured")
    assert (of_all["mean"], of_all["low"], of_all["high"]) == pytest.approx((100.0, 100 - largest_share, 100.0))
    assert of_all["by_seed"] == {"1": 100.0, "2": 100.0, "3": 100.0}
    (comparison,) = results["comparisons"]
    assert comparison["difference"] == 100.0
    assert comparison["p_value"] == pytest.approx(2 / 64)
    text = render(table, results)
    assert_names(text, "95 % intervals of 2 cells", "Clopper and Pearson's exact interval", "with 3 seeds")
    assert_names(text, "Shares of collapsed trainings", "Boschloo's exact test")
    assert "| ACPO | **+100.0, p 0.031** |" in text


VALIDATION = {"validation": "b", "samples": 4}


@pytest.fixture
def validation_file(tmp_path):
    """Four questions of b, as many as the table has."""
    path = tmp_path / "test.parquet"
    pq.write_table(pa.table({"data_source": ["b"] * 4}), path)
    return path


def test_a_validation_on_another_number_of_questions_is_refused(tmp_path, validation_file):
    pq.write_table(pa.table({"data_source": ["b"] * 5 + ["c"] * 4}), validation_file)
    write_run(tmp_path, GRPO, 1, {20: {ACCURACY: 0.5}}, **{"data.val_files": str(validation_file)})
    (refused,) = collect_results(make_table_of_one_cell(VALIDATION), tmp_path)["refused"]
    assert refused["reasons"] == ["data.val_files: the table says 4 questions of b, the files have 5"]


def test_a_validation_with_another_number_of_samples_is_missing(tmp_path, validation_file):
    of_eight_samples = {20: {"val-core/b/acc/mean@8": 0.5}}
    write_run(tmp_path, GRPO, 1, of_eight_samples, **{"data.val_files": str(validation_file)})
    missing = collect_results(make_table_of_one_cell(VALIDATION), tmp_path)["missing"]
    assert any(f"no {ACCURACY} in metrics.jsonl" in line for line in missing)


def test_a_mean_over_a_part_of_the_questions_is_no_validation(tmp_path, validation_file):
    # verl logs these if some of the questions have eight samples and the others four. The second is of the others only.
    of_unequal_samples = {20: {"val-core/b/acc/mean@8": 0.5, "val-aux/b/acc/mean@4": 0.9}}
    write_run(tmp_path, GRPO, 1, of_unequal_samples, **{"data.val_files": str(validation_file)})
    missing = collect_results(make_table_of_one_cell(VALIDATION), tmp_path)["missing"]
    assert any(f"no {ACCURACY} in metrics.jsonl" in line for line in missing)


def test_the_best_validation_is_found_in_a_log_whose_last_line_was_cut_off(tmp_path, validation_file):
    validations = {0: {ACCURACY: 0.1}, 10: {ACCURACY: 0.7}, 20: {ACCURACY: 0.6}}
    folder = write_run(tmp_path, GRPO, 1, validations, **{"data.val_files": str(validation_file)})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step":21,"data":{"val')
    cell = find_cell(collect_results(make_table_of_one_cell(VALIDATION), tmp_path), "GRPO", "measured")
    assert cell["mean"] == pytest.approx(70.0)
    assert cell["low"] is cell["interval"] is None


@pytest.fixture
def run_with_times(tmp_path):
    """A run whose step n takes 10 n seconds, of which generation takes 4."""
    metrics = {step: {"timing_s/step": 10.0 * step, "timing_s/gen": 4.0} for step in range(1, 21)}
    return write_run(tmp_path, GRPO, 1, metrics)


@pytest.mark.usefixtures("run_with_times")
def test_times_are_means_over_steps_in_seconds(tmp_path):
    columns = [{"name": "measured", "preset": GRPO, "measure": {"steps": [1, 2]}}]
    rows = [
        {"name": "total", "measure": {"timing": {"timing_s/step": 1}}},
        {"name": "without generation", "measure": {"timing": {"timing_s/step": 1, "timing_s/gen": -1}}},
        {"name": "unknown", "measure": {"timing": {"timing_s/nobody": 1}}},
    ]
    table = make_table_of_one_cell({}, unit="seconds", columns=columns, rows=rows)
    results = collect_results(table, tmp_path)
    assert find_cell(results, "total", "measured")["mean"] == pytest.approx(15.0)
    assert find_cell(results, "without generation", "measured")["mean"] == pytest.approx(11.0)
    assert "mean" not in find_cell(results, "unknown", "measured")
    assert f"{GRPO}-seed1: no timing_s/nobody of step 1 in metrics.jsonl" in results["missing"]


@pytest.mark.usefixtures("run_with_times")
@pytest.mark.parametrize(
    ("measure", "expected_mean"),
    [
        pytest.param({"level": "timing_s/step"}, 190.0, id="a level, over the last tenth of the steps"),
        pytest.param({"average": "timing_s/step"}, 105.0, id="an average, over all steps"),
    ],
)
def test_levels_and_averages_by_hand(tmp_path, measure, expected_mean):
    results = collect_results(make_table_of_one_cell(measure, unit="number"), tmp_path)
    assert find_cell(results, "GRPO", "measured")["mean"] == pytest.approx(expected_mean)


@pytest.mark.parametrize(("file", "content"), REFUSED["cannot be read"])
def test_what_cannot_be_read_is_named_and_stops_its_run_alone(tmp_path, file, content):
    folder = write_evaluated_run(tmp_path, GRPO, 1, b=0.4, c=0.6)
    write_evaluated_run(tmp_path, GRPO, 2, b=0.5, c=0.7)
    (folder / file).unlink(missing_ok=True)
    if content is None:
        (folder / file).mkdir(parents=True)
    else:
        (folder / file).write_text(content.replace("{bomb}", "[" * 100_000))
    results = collect_results(make_table("collect"), tmp_path)
    (refused,) = results["refused"]
    assert refused["folder"] == f"{GRPO}-seed1"
    assert str(folder / file) in refused["reasons"][0]
    assert find_cell(results, "GRPO", "B")["mean"] == pytest.approx(50.0)


def test_the_command_writes_the_results_and_says_what_is_missing(tmp_path):
    # Without any run a table has no number, which is a failure for people and for programs.
    output = clipx("papers", "table", "collect", "bapo_table2", "--runs", tmp_path, code=1)
    file = tmp_path / "tables" / "bapo_table2.json"
    assert output.startswith("0 of 6 cells from 0 runs: ")
    assert_names(output, "missing 2 runs or numbers", f"{file} lists them")
    assert f"{tmp_path}/bapo/octothinker_3b_grpo-seed1 would be one." in output
    results = json.loads(file.read_text())
    assert results["table"] == "bapo_table2"
    assert len(results["cells"]) == 6
    assert results["missing"] == ["bapo/octothinker_3b_grpo: 0 of 1 seeds", "bapo/octothinker_3b_bapo: 0 of 1 seeds"]
    answered = answer("papers", "table", "collect", "bapo_table2", "--runs", tmp_path, code=1)
    assert answered["missing"] == results["missing"]


def test_the_command_writes_the_results_of_the_chosen_rows_alone(tmp_path):
    output = clipx("papers", "table", "collect", "bapo_table2", "--runs", tmp_path, "--row", "BAPO", code=1)
    assert output.startswith("0 of 3 cells from 0 runs: ")
    assert_names(output, "only the runs of BAPO", "replaces an earlier file")
    results = json.loads((tmp_path / "tables" / "bapo_table2.json").read_text())
    assert results["missing"] == ["bapo/octothinker_3b_bapo: 0 of 1 seeds"]


def test_only_cells_of_the_chosen_rows_are_counted(tmp_path, capsys):
    for preset in (GRPO, ACPO):
        for seed in (1, 2):
            write_evaluated_run(tmp_path, preset, seed, b=0.4, c=0.6)
    table = make_table("collect")
    rows = ["GRPO", "ACPO"]
    results = collect_results(table, tmp_path, rows)
    measured_differences = [cell for cell in results["cells"] if cell["row"] == "difference" and "mean" in cell]
    assert len(measured_differences) == 3
    _print_collected(table, rows, results, tmp_path, tmp_path / "small.json")
    # Of GRPO the two benchmarks and their mean, of ACPO also the gain.
    assert capsys.readouterr().out.startswith("7 of 7 cells from 4 runs: ")


def test_a_row_that_no_run_fills_is_named(tmp_path):
    output = clipx("papers", "table", "collect", "ar_lopti_figure4", "--runs", tmp_path, "--row", "GPT-4o", code=1)
    assert output.startswith("0 of 0 cells from 0 runs: ")
    assert_names(output, "No run fills GPT-4o", "only quoted", "the difference of two other rows", "--row")


def test_a_broken_definition_ends_the_list_with_a_message(monkeypatch):
    def refuse(name):
        raise ValueError(f"table {name}: the file is [], not fields with values")

    monkeypatch.setattr("verl_clipx.papers.tables.definition.load_table", refuse)
    assert "the file is [], not fields with values" in clipx("papers", "table", "list", code=1)
