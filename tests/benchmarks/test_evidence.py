"""The table of docs/results/evidence.md: its protocol, its queue, its test, and that it is what the logs say. Not
covered: verl's default mode (test_evidence_default.py); that a run is made (test_scripts.py); the training itself,
which tests/end_to_end/test_one_process.py compares with verl's through Ray.
"""

import re

import evidence
import evidence_table
import numpy as np
import pytest
import yaml
from evidence import BYPASS, COUNTED, SECOND_LOOK, TUNING, Wanted, deviation_of, power, queue
from scipy import stats

from verl_clipx.common.files import read_json, read_text
from verl_clipx.losses.methods import METHODS

ROOT = evidence.ROOT
TABLE, COLUMNS, ROWS = BYPASS.table, BYPASS.columns, BYPASS.rows

TUNED = [name for name, row in ROWS.items() if "like" not in row]


def outcome_of(run: Wanted) -> float:
    """Every row is best at 3e-4, by its place; the seeds differ by 2 points, so that their deviation is 1.4."""
    return 50 - abs(run.rate - 3e-4) * 1e3 + 0.1 * list(ROWS).index(run.row) + 2 * (run.seed == TABLE[TUNING][0])


OUTCOMES = {run: outcome_of(run) for run in queue(BYPASS, {})}


def test_the_protocol_is_the_one_that_was_committed_first():
    assert evidence_table.hash_of_protocol(BYPASS) == TABLE["protocol"] == read_json(evidence_table.RESULTS)["protocol"]
    assert evidence_table.hash_of_rule() == TABLE["rule"]


def test_the_table_and_the_page_are_what_the_committed_logs_give():
    results, outcomes = evidence_table.collect(), evidence.outcomes_in(BYPASS, BYPASS.runs)
    assert read_json(evidence_table.RESULTS) == results
    # Every run that the protocol asks for is made.
    assert [run for run in queue(BYPASS, outcomes) if run not in outcomes] == []
    assert evidence_table.numbers_of(results) in read_text(evidence_table.PAGE)
    assert evidence_table.numbers_of_lower_rates(results) in read_text(evidence_table.LOWER_RATES)
    assert {run.path(BYPASS.runs).name for run in outcomes} == {path.name for path in BYPASS.runs.glob("*/*/*.gz")}


def test_each_number_of_the_pages_is_the_table_s():
    results = read_json(evidence_table.RESULTS)
    tests, counted, described = (results[key] for key in ("tests", COUNTED, "described"))

    def means(column, row):
        return sorted(round(run["mean"], 1) for run in counted[column][row])

    def mean(column, row, outcome="mean"):
        return f"{described[column][row][outcome][0]:.1f}"

    def range_of(values):
        return f"{min(values):.1f} to {max(values):.1f}"

    def lowest_difference(row):
        return f"{-min(of['difference'] for of in tests['no_worse'][row].values()):.1f}"

    def chosen(*deviations):
        return f"{', '.join(f'{one:.1f}' for one in deviations[:-1])} and {deviations[-1]:.1f}"

    wider = [np.mean(means_of["grpo_w1"]) - np.mean(means_of["grpo"]) for means_of in map(exact, counted.values())]
    failed, *others = sorted(counted["old"]["grpo_w2"], key=lambda run: run["mean"])
    outcomes = evidence.outcomes_in(BYPASS, BYPASS.runs)
    spread = {
        column: np.sqrt(np.mean([np.var(means_of, ddof=1) for means_of in exact(rows).values()]))
        for column, rows in counted.items()
    }
    noisy = [f"{np.std(exact(counted['noisy'])[row], ddof=1):.1f}" for row in ("grpo", "grpo_w1")]
    passed = [column for column, of in tests["no_worse"]["dgpo"].items() if of["p_value"] < 0.05]
    edges = [row for row in TUNED if row in BYPASS.rows_of("fresh_64")]
    at_edge = [row for row in edges if evidence.best_rate(BYPASS, "fresh_64", row, outcomes)[1] == BYPASS.rates[0]]
    by_tuning = [deviation_of(BYPASS, column, outcomes) for column in COLUMNS]
    page = one_line(evidence_table.PAGE)
    own = [
        f"{results['made'][COUNTED]} counted runs",
        f"earn {range_of(wider)} points more than 0.8 to 1.2, and lie at most {lowest_difference('grpo_w1')} below",
        f"earns {mean('old', 'corrected')} instead of {mean('old', 'grpo')} points on old rollouts, and "
        f"{mean('noisy', 'corrected')} instead of {mean('noisy', 'grpo')} with",
        f"width 2 has {failed['mean']:.1f} points, {failed['end']:.1f} in its last three batches, and the others have "
        f"{range_of([run['mean'] for run in others])}; ACPO's worst has {means('fresh_64', 'acpo')[0]} with 64 updates",
        f"over its {len(counted['noisy']['grpo'])} seeds 0.8 to 1.2 has a standard deviation of {noisy[0]}, width 1 of "
        f"{noisy[1]}.",
        f"its largest p, {tests['in_every_column']['dgpo']:.3f}, comes from 16 updates",
        f"width 1 has {mean('old', 'grpo_w1', 'end')}, DGPO {mean('old', 'dgpo', 'end')}, ACPO "
        f"{mean('old', 'acpo', 'end')} and width 2, the best fixed width by the protocol's outcome, "
        f"{mean('old', 'grpo_w2', 'end')}.",
        f"With 64 updates, {len(at_edge)} of the {len(edges)} tuned rows",
        chosen(*by_tuning),
        chosen(*(spread[column] for column in COLUMNS)),
        f"a power of {100 * power(16, by_tuning[list(COLUMNS).index('noisy')], 3):.0f} %, not 90 %, even",
        f"3 % clipped lies at most {lowest_difference('hold_share_3')} points below",
        f"of 0.16 at most {lowest_difference('hold_moment_16')} points.",
    ]
    fixed, wide = ([run["mean"] for run in results[SECOND_LOOK]["sums"][row]] for row in ("grpo", "grpo_w2"))
    ends = stats.ttest_ind(wide, fixed, equal_var=False).confidence_interval(0.95)
    own.append(
        f"by {np.mean(wide) - np.mean(fixed):.1f} points on average with a 95 % interval from −{-ends.low:.1f} to"
    )
    lower = {of["row"]: of["tuning"]["1e-05"] - of["tuning"]["3e-05"] for of in results["lower_rates"] if of["tuning"]}
    counted_at_lower = {
        of["row"]: round(of["mean"][0] - results["described"]["fresh_64"][of["row"]]["mean"][0], 1)
        for of in results["lower_rates"]
        if "mean" in of
    }
    assert counted_at_lower == {"grpo": 1.7, "again": 2.2, "m2po": -0.8, "narrow": -0.2}
    assert {row for row, gain in lower.items() if gain > 0} == {"grpo", "m2po", "hold_moment_04"}
    own.append("At 1e-5 the counted seeds of 0.8 to 1.2 gain 1.7 points (2.2 with other seeds).")
    own.append(f"On the tuning seeds, {len(lower) - 3} of the {len(lower)} rows at the edge get worse.")
    assert [text for text in own if text not in page] == []
    assert {*passed} == {"fresh_64", "noisy"} and tests["no_worse"]["dgpo"]["fresh_16"]["p_value"] > 0.25
    assert "grpo_w5" == tests["best_fixed"]["fresh_64"] not in at_edge
    for column in COLUMNS:
        below = {row: np.mean(of) for row, of in exact(counted[column]).items()}
        assert max(below[row] for row in ("grpo", "bapo", "m2po")) < below["grpo_w1"]


def opening():
    """What the section on bypass mode says above its picture."""
    section = read_text(evidence_table.PAGE).partition("\n## In bypass mode\n")[2]
    return " ".join(section.partition("\n![")[0].split())


def test_the_page_opens_with_mode_dual_clip_and_outcome_as_the_kept_runs_have_them():
    base = yaml.safe_load(read_text(ROOT / "configs" / "recipe" / "reversal" / "base.yaml"))
    assert base["algorithm"]["rollout_correction"]["bypass_mode"] is True
    for path in BYPASS.runs.glob("counted/*/*.gz"):
        run, record, _ = evidence.read_kept(path)
        is_decoupled = "algorithm.rollout_correction.bypass_mode=false" in record["overrides"]
        assert is_decoupled == (run.row == "corrected"), path
        has_none = run.row in METHODS and METHODS[run.row]().parameters.get("dual_clip") is None
        assert "clipx.dual_clip=null" in record["overrides"] or has_none, path
    facts = ("bypass_mode=true", "default", "dual clip", "mean reward over all batches")
    assert [fact for fact in facts if fact not in opening()] == []


def test_the_page_opens_with_the_corrected_rows_and_the_keys_of_stock_verl():
    described = read_json(evidence_table.RESULTS)["described"]
    for column in ("old", "noisy"):
        corrected, wide = described[column]["corrected"], described[column]["grpo_w1"]
        numbers = (corrected["mean"][0], wide["mean"][0], corrected["end"][0] - wide["end"][0])
        assert [f"{value:.1f}" for value in numbers if f"{value:.1f}" not in opening()] == []
    low, high = (float(re.search(rf"actor\.clip_ratio_{side}=([\d.]+)", opening())[1]) for side in ("low", "high"))
    # verl clamps the ratio to 1 - low and 1 + high.
    assert {f"clipx.clip_low={1 - low:g}", f"clipx.clip_high={1 + high:g}"} <= {*ROWS["grpo_w1"]["overrides"]}


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_readme_has_the_number_of_runs_and_none_of_their_rewards(name):
    results = read_json(evidence_table.RESULTS)
    page = one_line(ROOT / name)
    assert f"{results['made'][COUNTED]} " in page and "bypass" in page and "dual clip" in page
    means = {row: np.mean(runs) for of in results[COUNTED].values() for row, runs in exact(of).items()}
    wider = [np.mean(of["grpo_w1"]) - np.mean(of["grpo"]) for of in map(exact, results[COUNTED].values())]
    rewards = {f"{value:.1f}" for value in [*means.values(), *wider]}
    assert rewards.isdisjoint(re.findall(r"\d+\.\d+", page))


def test_what_repeated_on_another_machine_is_as_the_page_says():
    repeated = evidence.ROOT / "docs" / "results" / "runs" / "repeated"
    agreeing, whole = {}, {}
    for run in evidence.outcomes_in(BYPASS, repeated):
        rewards = [
            [step[evidence.FRESH] for step in evidence.read_kept(run.path(folder))[2].values()]
            for folder in (repeated, BYPASS.runs)
        ]
        parts = [index for index, (again, first) in enumerate(zip(*rewards, strict=True)) if again != first]
        agreeing[run], whole[run] = min(parts, default=len(rewards[0])), len(rewards[0])
    parted = {run: whole[run] - count for run, count in agreeing.items() if count < whole[run]}
    assert len(whole) == 5 and sorted(parted.values()) == [1, 2]
    failed = Wanted(COUNTED, "old", "grpo_w2", 3e-4, 8)
    assert (parted[failed], whole[failed]) == (2, 12)
    said = [f"{evidence.outcomes_in(BYPASS, folder)[failed]:.1f}" for folder in (BYPASS.runs, repeated)]
    sentence = "({}) reproduces ten of twelve rewards, then diverges and has {}."
    assert sentence.format(*said) in one_line(evidence_table.PAGE)


def one_line(path):
    """A page with single blanks, so that line ends don't matter."""
    return " ".join(read_text(path).split())


def exact(rows):
    """The outcomes of a column's counted runs, by row."""
    return {name: [run["mean"] for run in runs] for name, runs in rows.items()}


def test_rates_below_the_grid_are_tried_until_one_is_worse_and_only_such_rows_are_run_again():
    """Width 0.5 is best at 3e-5, and better still at 1e-5; the row like it and rows inside the grid get no run."""
    edge = [(TUNING, "old", row, rate) for row in ("grpo_w05", "acpo") for rate in BYPASS.rates]
    known = OUTCOMES | {Wanted(*of, seed): 60 - of[3] * 1e4 for of in edge for seed in TABLE[TUNING]}

    def missing():
        return [tuple(run) for run in queue(BYPASS, known, BYPASS.wider_rates) if run not in known]

    def make(value):
        known.update({Wanted(*run): value for run in missing()})

    assert missing() == [
        ("exploratory", "old", row, 1e-5, seed) for row in ("grpo_w05", "acpo") for seed in TABLE[TUNING]
    ]
    known.update({Wanted(*run): 70 if run[2] == "grpo_w05" else 50 for run in missing()})
    assert missing() == [("exploratory", "old", "grpo_w05", 3e-6, seed) for seed in TABLE[TUNING]]
    make(65)
    counted = [("exploratory", "old", "grpo_w05", 1e-5, seed) for seed in evidence.seeds_of(BYPASS, "old", known)]
    assert missing() == counted and [seed for *_, seed in counted] == list(range(1, len(counted) + 1))
    make(70)
    assert missing() == []
    known |= {Wanted(TUNING, "noisy", "grpo", rate, seed): 60 for rate in BYPASS.rates[:2] for seed in TABLE[TUNING]}
    make(80)
    make(70)
    assert {run[2:4] for run in missing()} == {(row, 1e-5) for row in ("grpo", "narrow", "again")}


def test_a_column_has_as_many_seeds_as_its_power_needs():
    assert deviation_of(BYPASS, "old", OUTCOMES) == pytest.approx(2**0.5)
    assert len(evidence.seeds_of(BYPASS, "old", OUTCOMES)) == 8
    wider = {run: value + 2 * (run.seed == TABLE[TUNING][0]) for run, value in OUTCOMES.items()}
    seeds = len(evidence.seeds_of(BYPASS, "old", wider))
    deviation = deviation_of(BYPASS, "old", wider)
    assert power(seeds - 1, deviation, 3) < 0.9 <= power(seeds, deviation, 3)
    # From tables of the noncentral t distribution: the protocol's numbers.
    assert (power(8, 1.7, 3), power(8, 3.1, 5)) == pytest.approx((0.956, 0.922), abs=0.001)


def test_no_worse_is_welchs_test_by_hand():
    """Means 2 and 3, variances 1, 3 seeds each: standard error 0.8165, 4 degrees of freedom, t of 95 % 2.132."""
    found = evidence_table.no_worse([1, 2, 3], [2, 3, 4], margin=3)
    assert found == pytest.approx({"difference": -1, "low": -1 - 2.1318 * 0.8165, "p_value": 0.0352}, abs=2e-4)


def test_a_setting_passes_by_its_worst_column():
    names = [name for name in ROWS if ROWS[name]["kind"] != "held" and name != "corrected"]
    level = dict.fromkeys(names, 50.0) | {"narrow": 30.0, "acpo": 44.0}
    means = {column: {name: [mean + seed for seed in range(3)] for name, mean in level.items()} for column in COLUMNS}
    means["noisy"]["bapo"] = [44.0, 45.0, 46.0]
    found = evidence_table.tests_of(means, dict.fromkeys(COLUMNS, "grpo"))
    assert found["in_every_column"]["bapo"] == found["no_worse"]["bapo"]["noisy"]["p_value"] > 0.9
    assert found["in_every_column"]["grpo"] == 0 and found["in_every_column"]["dgpo"] < 0.05 < found["holm"]["acpo"]
    assert found["controls"]["old"]["narrow"] < 0.05 < found["controls"]["old"]["again"]
    assert found["claimed"] == [*("grpo", "grpo_w01", "grpo_w05", "grpo_w1", "grpo_w2", "grpo_w5", "m2po", "dgpo")]
    means["old"]["narrow"] = means["old"]["grpo"]
    assert evidence_table.tests_of(means, dict.fromkeys(COLUMNS, "grpo"))["claimed"] == []
