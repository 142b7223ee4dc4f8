"""Collecting a small table from run folders that the tests make: configurations composed by Hydra on verl's own,
metrics written by verl's file logger, results in the form of `clipx eval run`. What is missing is said, what is another
run or another evaluation is refused with the key and both values, and intervals, means, gains and differences are as by
hand.

`clipx eval run` itself is not run here: tests/papers/evaluation covers it.
"""

import json
from pathlib import Path

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from tests.papers.tables.tables import small_table
from verl_clipx.cli import app
from verl_clipx.papers.tables.collect import collect
from verl_clipx.papers.tables.presets import compose_preset
from verl_clipx.papers.tables.render import render
from verl_clipx.runs.sameness import significant_values

GRPO, ACPO = "cpu/countdown_grpo_near", "cpu/countdown_acpo_near"

# Student's t at 0.975 with two degrees of freedom.
T_2 = 4.302652730

VERSIONS = {"verl": "0.9.1", "torch": "2.13.0", "vllm": None}


def definition(**changes):
    return small_table(
        f"""
        seeds: [1, 2]
        evaluation: {{protocol: sampled, samples: 8, temperature: 1.0, max_tokens: 16}}
        benchmarks: {{b: {{file: b/test.parquet, questions: 4}}, c: {{file: c/test.parquet, questions: 4}}}}
        columns:
          - {{name: B, measure: {{benchmark: b, metric: avg@8}}}}
          - {{name: C, measure: {{benchmark: c, metric: avg@8}}}}
          - {{name: Avg, measure: {{mean_of: [B, C]}}}}
          - {{name: Gain, measure: {{gain_of: Avg}}}}
        rows:
          - {{name: GRPO, preset: {GRPO}, expected: [40.0, 60.0, 50.0, null]}}
          - {{name: ACPO, preset: {ACPO}, baseline: GRPO}}
          - {{name: before, model: hub/model}}
          - {{name: paper, quoted: because, expected: [1.0, 2.0, 1.5, null]}}
          - {{name: difference, minus: [ACPO, GRPO]}}
        """,
        **changes,
    )


@pytest.fixture(scope="module")
def configs():
    return {name: compose_preset(name, ["+hardware=cpu", "trainer.nnodes=2"]) for name in (GRPO, ACPO)}


@pytest.fixture(scope="module")
def preset_values():
    values = {name: significant_values(compose_preset(name)) for name in (GRPO, ACPO)}
    return values.__getitem__


@pytest.fixture
def make_run(tmp_path, configs, monkeypatch):
    """Writes a finished run of a preset with its evaluations."""

    def make(preset: str, seed: int, b: float | None, c: float | None, steps: int = 20, **changes) -> Path:
        folder = tmp_path / f"{preset}-seed{seed}"
        config = configs[preset].copy()
        for key, value in {"data.seed": seed, **changes}.items():
            OmegaConf.update(config, key, value)
        (folder / ".hydra").mkdir(parents=True)
        OmegaConf.save(config, folder / ".hydra" / "config.yaml")
        write_metrics(monkeypatch, folder, {step: {"timing_s/step": float(step)} for step in range(1, steps + 1)})
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(steps))
        for name, mean in (("b", b), ("c", c)):
            if mean is not None:
                write_results(folder, name, mean, f"{folder}/checkpoints", steps)
        return folder

    return make


def write_metrics(monkeypatch, folder: Path, steps: dict, name: str = "metrics.jsonl") -> None:
    from verl.utils.tracking import FileLogger

    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(folder / name))
    logger = FileLogger("project", "experiment")
    for step, data in steps.items():
        logger.log(data, step)
    logger.finish()


def write_results(
    folder: Path,
    benchmark: str,
    mean: float,
    model: str,
    step: int | None,
    questions: int = 4,
    values: list[float] | None = None,
    **sampling,
) -> None:
    out = folder / "evaluation" / benchmark
    out.mkdir(parents=True, exist_ok=True)
    settings = {"samples": 8, "max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0} | sampling
    config = {
        "model": model,
        "checkpoints": {"last": {"source": model, "step": step}},
        "protocol": "sampled",
        "sampling": settings,
        "benchmarks": {benchmark: {"questions": questions, "limit": None}},
        "versions": VERSIONS,
    }
    result = {f"avg@{settings['samples']}": {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}}
    found = {"result": result} | ({"values": dict.fromkeys(result, values)} if values else {})
    (out / "results.json").write_text(json.dumps({"config": config, "benchmarks": {benchmark: found}}))


def cells_of(results):
    return {(cell["row"], cell["column"]): cell for cell in results["cells"]}


@pytest.mark.slow
def test_two_seeds_of_every_row(tmp_path, make_run, preset_values):
    make_run(GRPO, 1, 0.40, 0.60)
    make_run(GRPO, 2, 0.50, 0.70)
    make_run(ACPO, 1, 0.60, 0.60)
    make_run(ACPO, 2, 0.60, 0.84)
    write_results(tmp_path / "models" / "small" / "hub--model", "b", 0.25, "hub/model", None)
    write_results(tmp_path / "models" / "small" / "hub--model", "c", 0.35, "hub/model", None)
    results = collect(definition(), tmp_path, preset_values)
    assert results["refused"] == [] and results["missing"] == []
    cells = cells_of(results)

    # An interval over seeds takes three.
    grpo = cells["GRPO", "B"]
    assert grpo["mean"] == pytest.approx(45.0) and grpo["interval"] is grpo["low"] is None and grpo["seeds"] == [1, 2]
    assert grpo["difference"] == pytest.approx(5.0)
    assert grpo["by_seed"] == {"1": pytest.approx(40.0), "2": pytest.approx(50.0)}

    # Seed by seed the means of B and C are 50 and 60.
    average = cells["GRPO", "Avg"]
    assert average["by_seed"] == {"1": pytest.approx(50.0), "2": pytest.approx(60.0)}
    assert average["mean"] == pytest.approx(55.0) and average["high"] is None
    # ACPO's are 60 and 72: 66, which is 20 % above 55.
    assert cells["ACPO", "Avg"]["mean"] == pytest.approx(66.0)
    assert cells["ACPO", "Gain"]["mean"] == pytest.approx(20.0)
    assert cells["ACPO", "Gain"]["low"] is None
    assert "mean" not in cells["GRPO", "Gain"]
    assert cells["difference", "B"]["mean"] == pytest.approx(15.0)

    # One evaluation of a model that is not trained has the interval over questions.
    before = cells["before", "C"]
    assert (before["mean"], before["interval"], before["seeds"]) == (35.0, "questions", [])
    assert before["by_seed"] == {}
    assert before["low"] == pytest.approx(25.0) and before["high"] == pytest.approx(45.0)
    assert cells["before", "Avg"]["mean"] == pytest.approx(30.0)
    assert cells["paper", "B"] == {"row": "paper", "column": "B", "expected": 1.0}

    runs = {run["folder"]: run for run in results["runs"]}
    assert set(runs) == {
        *(f"{preset}-seed{seed}" for preset in (GRPO, ACPO) for seed in (1, 2)),
        "models/small/hub--model",
    }
    run = runs[f"{GRPO}-seed2"]
    assert (run["seed"], run["steps"], run["versions"], run["commit"]) == (2, 20, VERSIONS, None)
    assert run["config_hash"] == runs[f"{GRPO}-seed1"]["config_hash"] != runs[f"{ACPO}-seed1"]["config_hash"]
    assert run["started_from"] == "${oc.env:CLIPX_DATA,data}/policies/countdown"


@pytest.mark.slow
def test_three_seeds_are_compared_with_the_baseline_over_seeds_and_questions(tmp_path, make_run, preset_values):
    for preset, better in ((GRPO, 0.0), (ACPO, 0.2)):
        for seed in (1, 2, 3):
            folder = make_run(preset, seed, None, None)
            by_question = [0.1 + better + 0.01 * seed, 0.5, 0.3 + better, 0.6 + better / 2]
            for benchmark in "bc":
                mean = sum(by_question) / 4
                # Of c there are only the means.
                kept = by_question if benchmark == "b" else None
                write_results(folder, benchmark, mean, "checkpoints", 20, values=kept)
    results = collect(definition(), tmp_path, preset_values)
    found = {one["column"]: one for one in results["comparisons"]}
    assert {one["row"] for one in results["comparisons"]} == {"ACPO"} and found["B"]["baseline"] == "GRPO"
    assert found["B"]["difference"] == pytest.approx(12.5) and found["B"]["seeds"] == (3, 3)
    assert found["B"]["over"] == "seeds and questions" and found["B"]["wins"] == 3 and found["B"]["ties"] == 1
    # Differences of 20, 0, 20 and 10 points: variance 275 / 3 over 4 questions.
    assert found["B"]["error"]["question"] == pytest.approx(275 / 3 / 4)
    assert found["C"]["over"] == found["Avg"]["over"] == "seeds" and "Gain" not in found
    # Means of 37.75, 38 and 38.25: the standard error is 0.25 / sqrt(3).
    cell = cells_of(results)["GRPO", "C"]
    assert cell["interval"] == "seeds" and cell["high"] - cell["mean"] == pytest.approx(0.25 * T_2 / 3**0.5)


def test_nothing_there_leaves_every_cell_empty(tmp_path, preset_values):
    results = collect(definition(), tmp_path, preset_values)
    assert not [cell for cell in results["cells"] if "mean" in cell]
    assert f"{GRPO}: 0 of 2 seeds" in results["missing"]
    assert "models/small/hub--model: no evaluation/b/results.json" in results["missing"]
    assert results["runs"] == []


def test_another_configuration_is_refused_with_key_and_values(tmp_path, make_run, preset_values):
    make_run(GRPO, 1, 0.40, 0.60, **{"actor_rollout_ref.actor.optim.lr": 1e-5, "data.train_batch_size": 64})
    results = collect(definition(), tmp_path, preset_values)
    (refused,) = results["refused"]
    assert refused == {
        "folder": f"{GRPO}-seed1",
        "preset": GRPO,
        "reasons": [
            "actor_rollout_ref.actor.optim.lr: preset 0.0003, run 1e-05",
            "data.train_batch_size: preset 32, run 64",
        ],
    }
    assert "mean" not in cells_of(results)["GRPO", "B"]


def test_the_same_seed_twice_is_refused(tmp_path, make_run, preset_values):
    make_run(GRPO, 1, 0.40, 0.60)
    make_run(GRPO, 2, 0.50, 0.70, **{"data.seed": 1})
    results = collect(definition(), tmp_path, preset_values)
    assert results["refused"][0]["reasons"] == [f"data.seed: 1 like another run of {GRPO}"]
    assert cells_of(results)["GRPO", "B"]["mean"] == pytest.approx(40.0)


@pytest.mark.slow
def test_a_training_that_goes_on_is_missing(tmp_path, make_run, preset_values):
    make_run(GRPO, 1, 0.40, 0.60, steps=12)
    results = collect(definition(), tmp_path, preset_values)
    assert f"{GRPO}-seed1: trained to step 12 of 20" in results["missing"]
    assert "mean" not in cells_of(results)["GRPO", "B"]


def test_a_missing_evaluation_leaves_its_cells_and_their_means_empty(tmp_path, make_run, preset_values):
    make_run(GRPO, 1, 0.40, None)
    results = collect(definition(), tmp_path, preset_values)
    cells = cells_of(results)
    assert cells["GRPO", "B"]["mean"] == pytest.approx(40.0) and cells["GRPO", "B"]["interval"] == "questions"
    assert "mean" not in cells["GRPO", "C"] and "mean" not in cells["GRPO", "Avg"]
    assert f"{GRPO}-seed1: no evaluation/c/results.json" in results["missing"]
    assert f"{GRPO}: 1 of 2 seeds" in results["missing"]


@pytest.mark.parametrize(
    ("step", "changes", "reason"),
    [
        (20, {"temperature": 0.6}, "temperature: table 1.0, evaluation 0.6"),
        (20, {"samples": 4}, "samples: table 8, evaluation 4"),
        (20, {"max_tokens": 32}, "max_tokens: table 16, evaluation 32"),
        (20, {"top_p": 0.95}, "top_p: table 1.0, evaluation 0.95"),
        (20, {"questions": 5}, "questions: table 4, evaluation 5"),
        (10, {}, "checkpoints: step 20 is the last, but [10] was evaluated"),
    ],
)
def test_another_evaluation_is_refused_alone(tmp_path, make_run, preset_values, step, changes, reason):
    folder = make_run(GRPO, 1, None, 0.60)
    write_results(folder, "b", 0.4, "checkpoints", step, **changes)
    results = collect(definition(), tmp_path, preset_values)
    assert results["refused"] == [{"folder": f"{GRPO}-seed1", "preset": None, "reasons": [f"evaluation/b: {reason}"]}]
    assert cells_of(results)["GRPO", "C"]["mean"] == pytest.approx(60.0)


def test_correlations_with_the_score_are_over_all_responses(tmp_path, make_run, preset_values):
    folder = make_run(GRPO, 1, 0.4, None)
    scores = pandas.DataFrame({"reward/words": [0.0, 1.0, 2.0, 9.0], "reward/score": [0.0, 1.0, 0.0, 1.0]})
    path = folder / "evaluation" / "b" / "step_20" / "b" / "scores.parquet"
    path.parent.mkdir(parents=True)
    scores.to_parquet(path)
    table = definition(
        unit="number",
        columns=[{"name": "words", "measure": {"benchmark": "b", "metric": "reward/words"}}],
        rows=[{"name": how, "preset": GRPO, "measure": {"correlation": how}} for how in ("pearson", "spearman")],
    )
    cells = cells_of(collect(table, tmp_path, preset_values))
    # Deviations -3, -2, -1, 6 and -1/2, 1/2, -1/2, 1/2: 4 / sqrt(50 * 1). Ranks 1 to 4 and 1.5, 3.5: 2 / sqrt(5 * 4).
    assert cells["pearson", "words"]["mean"] == pytest.approx(4 / 50**0.5)
    assert cells["spearman", "words"]["mean"] == pytest.approx(2 / 20**0.5)
    path.write_bytes(b"cut off")
    (refused,) = collect(table, tmp_path, preset_values)["refused"]
    assert "scores.parquet: " in refused["reasons"][0]


@pytest.mark.slow
def test_the_share_of_collapsed_seeds_has_an_exact_interval(tmp_path, make_run, preset_values, monkeypatch):
    reward = "critic/score/mean"
    table = definition(
        seeds=[1, 2, 3],
        baseline="GRPO",
        benchmarks={},
        columns=[{"name": "collapsed", "measure": {"collapse": reward}}],
        rows=[{"name": "GRPO", "preset": GRPO}, {"name": "ACPO", "preset": ACPO}],
    )
    for preset, fell in ((GRPO, ()), (ACPO, (1, 2, 3))):
        for seed in (1, 2, 3):
            falls = {step: 0.0 for step in range(8, 21)} if seed in fell else {}
            rewards = {step: 0.4 + 0.01 * (step % 2) for step in range(1, 21)} | falls
            folder = make_run(preset, seed, None, None)
            write_metrics(monkeypatch, folder, {step: {reward: value} for step, value in rewards.items()})
    results = collect(table, tmp_path, preset_values)
    none, every = (cells_of(results)[row, "collapsed"] for row in ("GRPO", "ACPO"))
    # Of three: the largest share p with (1 - p)^3 = 0.025, and one less it.
    edge = 100 * 0.025 ** (1 / 3)
    assert (none["mean"], none["low"], none["high"]) == pytest.approx((0.0, 0.0, 100 - edge))
    assert (every["mean"], every["low"], every["high"]) == pytest.approx((100.0, edge, 100.0))
    assert none["interval"] == "share of seeds" and every["by_seed"] == {"1": 100.0, "2": 100.0, "3": 100.0}
    (found,) = results["comparisons"]
    assert found["p_value"] == pytest.approx(2 / 64) and found["difference"] == 100.0
    text = render(table, results, "markdown")
    assert "95 % intervals of 2 cells: Clopper and Pearson's, exact, of the share of 3 seeds that collapsed." in text


def test_best_validation_of_a_log_whose_last_line_was_cut_off(tmp_path, make_run, preset_values, monkeypatch):
    table = definition(
        benchmarks={"countdown": {"file": "countdown/test.parquet", "questions": 256}},
        columns=[{"name": "best", "measure": {"validation": "countdown", "samples": 4}}],
        rows=[{"name": "GRPO", "preset": GRPO}],
    )
    folder = make_run(GRPO, 1, None, None)
    write_metrics(monkeypatch, folder, {20: {"val-core/countdown/acc/mean@8": 0.5}})
    missing = collect(table, tmp_path, preset_values)["missing"]
    assert any("no val-core/countdown/acc/mean@4 in metrics.jsonl" in line for line in missing)
    accuracy = "val-core/countdown/acc/mean@4"
    write_metrics(monkeypatch, folder, {0: {accuracy: 0.1}, 10: {accuracy: 0.7}, 20: {accuracy: 0.6}})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step":21,"data":{"val')
    cell = cells_of(collect(table, tmp_path, preset_values))["GRPO", "best"]
    assert cell["mean"] == pytest.approx(70.0) and cell["low"] is None and cell["interval"] is None


def test_a_validation_on_another_number_of_questions_is_refused(tmp_path, make_run, preset_values, monkeypatch):
    table = definition(
        columns=[{"name": "best", "measure": {"validation": "b", "samples": 4}}],
        rows=[{"name": "GRPO", "preset": GRPO}],
    )
    validation = tmp_path / "test.parquet"
    pq.write_table(pa.table({"data_source": ["b"] * 5 + ["c"] * 4}), validation)
    folder = make_run(GRPO, 1, None, None, **{"data.val_files": str(validation)})
    write_metrics(monkeypatch, folder, {20: {"val-core/b/acc/mean@4": 0.5}})
    (refused,) = collect(table, tmp_path, preset_values)["refused"]
    assert refused["reasons"] == ["data.val_files: table 4 questions of b, the files have 5"]
    pq.write_table(pa.table({"data_source": ["b"] * 4}), validation)
    assert cells_of(collect(table, tmp_path, preset_values))["GRPO", "best"]["mean"] == pytest.approx(50.0)


def test_times_are_means_over_steps_in_seconds(tmp_path, make_run, preset_values, monkeypatch):
    table = definition(
        unit="seconds",
        columns=[{"name": "GRPO", "preset": GRPO, "measure": {"steps": [1, 2]}}],
        rows=[
            {"name": "total", "measure": {"timing": {"timing_s/step": 1}}},
            {"name": "rest", "measure": {"timing": {"timing_s/step": 1, "timing_s/gen": -1}}},
            {"name": "other", "measure": {"timing": {"timing_s/nobody": 1}}},
        ],
    )
    folder = make_run(GRPO, 1, None, None)
    steps = {step: {"timing_s/step": 10.0 * step, "timing_s/gen": 4.0} for step in (1, 2, 20)}
    write_metrics(monkeypatch, folder, steps)
    results = collect(table, tmp_path, preset_values)
    cells = cells_of(results)
    assert cells["total", "GRPO"]["mean"] == pytest.approx(15.0)
    assert cells["rest", "GRPO"]["mean"] == pytest.approx(11.0)
    assert "mean" not in cells["other", "GRPO"]
    assert f"{GRPO}-seed1: no timing_s/nobody of step 1 in metrics.jsonl" in results["missing"]


BOMB = "[" * 100_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.run.json", '{"commit": "abc", "ver'),
        ("metrics.run.json", "[]"),
        ("metrics.run.json", None),
        (".hydra/config.yaml", "data: {seed: 1"),
        (".hydra/config.yaml", BOMB),
        ("checkpoints/latest_checkpointed_iteration.txt", ""),
        ("checkpoints/latest_checkpointed_iteration.txt", None),
        ("evaluation/b/results.json", BOMB),
        ("evaluation/b/results.json", None),
    ],
)
def test_what_cannot_be_read_is_named_and_stops_its_run_alone(tmp_path, make_run, preset_values, file, content):
    """Without content there is a folder in the file's place."""
    folder = make_run(GRPO, 1, 0.40, 0.60)
    make_run(GRPO, 2, 0.50, 0.70)
    (folder / file).unlink(missing_ok=True)
    if content is None:
        (folder / file).mkdir(parents=True)
    else:
        (folder / file).write_text(content)
    results = collect(definition(), tmp_path, preset_values)
    (refused,) = results["refused"]
    assert refused["folder"] == f"{GRPO}-seed1" and str(folder / file) in refused["reasons"][0]
    assert cells_of(results)["GRPO", "B"]["mean"] == pytest.approx(50.0)


def clipx(*words):
    done = CliRunner().invoke(app, ["table", *map(str, words)])
    return done.exit_code, done.output


def test_a_folder_of_runs_that_is_not_there_is_refused_and_not_made(tmp_path):
    code, output = clipx("collect", "bapo_table2", "--runs", tmp_path / "typo")
    assert code == 1 and f"--runs {tmp_path}/typo" in output.replace("\n", "")
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize("content", ["{", BOMB, "[]"])
def test_results_that_cannot_be_read_are_named(tmp_path, content):
    (tmp_path / "found.json").write_text(content)
    code, output = clipx("render", "bapo_table2", "--results", tmp_path / "found.json")
    assert code == 1 and f"{tmp_path}/found.json: " in output
    assert clipx("render", "bapo_table2", "--out", tmp_path)[0] == 1


def test_the_command_writes_the_results_of_the_chosen_rows_and_says_what_is_missing(tmp_path):
    file = tmp_path / "tables" / "bapo_table2.json"
    code, output = clipx("collect", "bapo_table2", "--runs", tmp_path)
    assert code == 0
    result, missing, where = output.splitlines()
    assert f"{tmp_path}/bapo/octothinker_3b_bapo*" in where
    assert result == f"0 of 6 cells from 0 runs: {file}"
    assert missing == f"missing 2 runs or numbers, listed in {file} under missing"
    results = json.loads(file.read_text())
    assert results["table"] == "bapo_table2" and len(results["cells"]) == 6
    assert results["missing"] == ["bapo/octothinker_3b_grpo: 0 of 1 seeds", "bapo/octothinker_3b_bapo: 0 of 1 seeds"]

    code, output = clipx("collect", "bapo_table2", "--runs", tmp_path, "--row", "BAPO")
    assert code == 0 and output.startswith("0 of 3 cells from 0 runs: ")
    assert json.loads(file.read_text())["missing"] == ["bapo/octothinker_3b_bapo: 0 of 1 seeds"]
    code, output = clipx("collect", "bapo_table2", "--runs", tmp_path, "--row", "BAPOO")
    assert code == 1 and "Did you mean BAPO?" in " ".join(output.split())
