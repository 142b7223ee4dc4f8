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

from tests.messages import assert_names
from verl_clipx.common.files import read_json, read_text
from verl_clipx.losses.methods import METHODS

ROOT = evidence.ROOT
TABLE = BYPASS.table
COLUMNS = BYPASS.columns
ROWS = BYPASS.rows
TUNING_SEEDS = TABLE[TUNING]
# Of a row like another one, the rate is the other's.
TUNED_ROWS = [name for name, row in ROWS.items() if "like" not in row]


def made_up_outcome(run: Wanted) -> float:
    """Return an outcome by which every row is best at 3e-4 and later rows are better.

    The first tuning seed is better by 2 points, so that the seeds' standard deviation is 1.4.
    """
    outcome = 50 - abs(run.rate - 3e-4) * 1e3 + 0.1 * list(ROWS).index(run.row)
    if run.seed == TUNING_SEEDS[0]:
        outcome += 2
    return outcome


MADE_UP_OUTCOMES = {run: made_up_outcome(run) for run in queue(BYPASS, {})}


def test_the_protocol_is_the_one_that_was_committed_first():
    assert evidence_table.hash_of_protocol(BYPASS) == TABLE["protocol"]
    assert read_json(evidence_table.RESULTS)["protocol"] == TABLE["protocol"]
    assert evidence_table.hash_of_rule() == TABLE["rule"]


def test_the_table_and_the_page_are_what_the_committed_logs_give():
    results = evidence_table.collect()
    outcomes = evidence.outcomes_in(BYPASS, BYPASS.runs)
    assert read_json(evidence_table.RESULTS) == results
    # Every run that the protocol asks for is made.
    assert [run for run in queue(BYPASS, outcomes) if run not in outcomes] == []
    assert evidence_table.numbers_of(results) in read_text(evidence_table.PAGE)
    assert evidence_table.numbers_of_lower_rates(results) in read_text(evidence_table.LOWER_RATES)
    assert {run.path(BYPASS.runs).name for run in outcomes} == {path.name for path in BYPASS.runs.glob("*/*/*.gz")}


def read_one_line(path) -> str:
    """Return a page with single blanks, so that line ends don't matter."""
    return " ".join(read_text(path).split())


@pytest.fixture(scope="module")
def results() -> dict:
    return read_json(evidence_table.RESULTS)


@pytest.fixture(scope="module")
def page() -> str:
    return read_one_line(evidence_table.PAGE)


@pytest.fixture(scope="module")
def outcomes() -> dict[Wanted, float]:
    """The outcomes of all kept runs."""
    return evidence.outcomes_in(BYPASS, BYPASS.runs)


def means_by_row(rows) -> dict[str, list[float]]:
    """Return the outcomes of a column's counted runs, by row."""
    return {name: [run["mean"] for run in runs] for name, runs in rows.items()}


def describe(results, column: str, row: str, outcome: str = "mean") -> str:
    """Return the mean over seeds of an outcome, as pages write it."""
    return f"{results['described'][column][row][outcome][0]:.1f}"


def name_range(values) -> str:
    return f"{min(values):.1f} to {max(values):.1f}"


def gains_of_width_1(results) -> list[float]:
    """Return by how much width 1 is above 0.8 to 1.2 in each column."""
    gains = []
    for rows in results[COUNTED].values():
        means = means_by_row(rows)
        gains.append(np.mean(means["grpo_w1"]) - np.mean(means["grpo"]))
    return gains


def largest_gap(results, row: str) -> str:
    """Return by how much a row lies below the best fixed width in its worst column."""
    differences = [column["difference"] for column in results["tests"]["no_worse"][row].values()]
    return f"{-min(differences):.1f}"


def test_the_page_has_the_number_of_runs_and_how_the_rows_compare(results, page):
    assert_names(page, f"{results['made'][COUNTED]} counted runs")
    assert_names(page, f"earn {name_range(gains_of_width_1(results))} points more than 0.8 to 1.2")
    assert_names(page, f"at most {largest_gap(results, 'grpo_w1')} below")
    assert_names(page, f"3 % clipped lies at most {largest_gap(results, 'hold_share_3')} points below")
    assert_names(page, f"of 0.16 at most {largest_gap(results, 'hold_moment_16')} points")
    for rows in results[COUNTED].values():
        means = {row: np.mean(values) for row, values in means_by_row(rows).items()}
        for row in ("grpo", "bapo", "m2po"):
            assert means[row] < means["grpo_w1"]


def test_the_page_has_what_a_correction_of_stale_samples_earns(results, page):
    old = f"{describe(results, 'old', 'corrected')} instead of {describe(results, 'old', 'grpo')} points"
    noisy = f"{describe(results, 'noisy', 'corrected')} instead of {describe(results, 'noisy', 'grpo')} with"
    assert_names(page, old, noisy)


def test_the_page_has_the_seeds_that_failed(results, page):
    failed, *others = sorted(results[COUNTED]["old"]["grpo_w2"], key=lambda run: run["mean"])
    assert_names(page, f"width 2 has {failed['mean']:.1f} points, {failed['end']:.1f} in its last three batches")
    assert_names(page, f"the others have {name_range([run['mean'] for run in others])}")
    worst_of_acpo = min(run["mean"] for run in results[COUNTED]["fresh_64"]["acpo"])
    assert_names(page, f"ACPO's worst has {worst_of_acpo:.1f} with 64 updates")


def test_the_page_has_the_spread_of_narrow_and_wide_bounds_with_a_noisy_sampler(results, page):
    noisy = means_by_row(results[COUNTED]["noisy"])
    assert_names(page, f"over its {len(noisy['grpo'])} seeds 0.8 to 1.2")
    narrow = np.std(noisy["grpo"], ddof=1)
    wide = np.std(noisy["grpo_w1"], ddof=1)
    assert_names(page, f"standard deviation of {narrow:.1f}, width 1 of {wide:.1f}")


def test_the_page_has_dgpo_s_largest_p(results, page):
    tests = results["tests"]
    assert_names(page, f"its largest p, {tests['in_every_column']['dgpo']:.3f}, comes from 16 updates")
    passed = {column for column, test in tests["no_worse"]["dgpo"].items() if test["p_value"] < 0.05}
    assert passed == {"fresh_64", "noisy"}
    assert tests["no_worse"]["dgpo"]["fresh_16"]["p_value"] > 0.25


def test_the_page_has_the_last_three_batches_on_old_rollouts(results, page):
    assert_names(page, f"width 1 has {describe(results, 'old', 'grpo_w1', 'end')}")
    assert_names(page, f"DGPO {describe(results, 'old', 'dgpo', 'end')}")
    assert_names(page, f"ACPO {describe(results, 'old', 'acpo', 'end')} and width 2")
    assert_names(page, f"by the protocol's outcome, {describe(results, 'old', 'grpo_w2', 'end')}")


def test_the_page_has_the_deviations_of_tuning_and_counted_seeds(results, page, outcomes):
    of_tuning = [deviation_of(BYPASS, column, outcomes) for column in COLUMNS]
    of_counted = []
    for column in COLUMNS:
        variances = [np.var(means, ddof=1) for means in means_by_row(results[COUNTED][column]).values()]
        of_counted.append(np.sqrt(np.mean(variances)))
    for deviations in (of_tuning, of_counted):
        *first, last = (f"{deviation:.1f}" for deviation in deviations)
        assert_names(page, f"{', '.join(first)} and {last}")
    power_of_noisy = power(16, deviation_of(BYPASS, "noisy", outcomes), 3)
    assert_names(page, f"a power of {100 * power_of_noisy:.0f} %, not 90 %")


def test_the_page_has_how_many_rows_were_best_at_the_edge_of_the_grid(results, page, outcomes):
    tuned = [row for row in TUNED_ROWS if row in BYPASS.rows_of("fresh_64")]
    lowest_rate = BYPASS.rates[0]
    at_edge = [row for row in tuned if evidence.best_rate(BYPASS, "fresh_64", row, outcomes)[1] == lowest_rate]
    assert_names(page, f"With 64 updates, {len(at_edge)} of the {len(tuned)} tuned rows")
    best_fixed = results["tests"]["best_fixed"]["fresh_64"]
    assert best_fixed == "grpo_w5"
    assert best_fixed not in at_edge


def test_the_page_has_what_rates_below_the_grid_gained(results, page):
    gains_of_tuning = {}
    gains_of_counted = {}
    for entry in results["lower_rates"]:
        row = entry["row"]
        if entry["tuning"]:
            gains_of_tuning[row] = entry["tuning"]["1e-05"] - entry["tuning"]["3e-05"]
        if "mean" in entry:
            mean_at_edge = results["described"]["fresh_64"][row]["mean"][0]
            gains_of_counted[row] = round(entry["mean"][0] - mean_at_edge, 1)
    assert gains_of_counted == {"grpo": 1.7, "again": 2.2, "m2po": -0.8, "narrow": -0.2}
    assert_names(page, "0.8 to 1.2 gain 1.7 points", "2.2 with other seeds")
    assert {row for row, gain in gains_of_tuning.items() if gain > 0} == {"grpo", "m2po", "hold_moment_04"}
    worse = len(gains_of_tuning) - 3
    assert_names(page, f"{worse} of the {len(gains_of_tuning)} rows at the edge get worse")


def test_the_page_has_the_difference_on_the_pretrained_model(results, page):
    rows = results[SECOND_LOOK]["sums"]
    narrow = [run["mean"] for run in rows["grpo"]]
    wide = [run["mean"] for run in rows["grpo_w2"]]
    lowest = stats.ttest_ind(wide, narrow, equal_var=False).confidence_interval(0.95).low
    assert_names(page, f"by {np.mean(wide) - np.mean(narrow):.1f} points", f"95 % interval from −{-lowest:.1f} to")


@pytest.fixture(scope="module")
def opening() -> str:
    """What the section on bypass mode says above its picture."""
    section = read_text(evidence_table.PAGE).partition("\n## In bypass mode\n")[2]
    return " ".join(section.partition("\n![")[0].split())


def test_the_section_opens_with_mode_dual_clip_and_outcome(opening):
    assert_names(
        opening, "algorithm.rollout_correction.bypass_mode=true", "default", "dual clip", "mean reward over all batches"
    )


def test_the_kept_runs_have_the_mode_and_no_dual_clip():
    base = yaml.safe_load(read_text(ROOT / "configs" / "recipe" / "reversal" / "base.yaml"))
    assert base["algorithm"]["rollout_correction"]["bypass_mode"] is True
    for path in BYPASS.runs.glob("counted/*/*.gz"):
        run, record, _ = evidence.read_kept(path)
        is_decoupled = "algorithm.rollout_correction.bypass_mode=false" in record["overrides"]
        assert is_decoupled == (run.row == "corrected"), path
        method_has_none = run.row in METHODS and METHODS[run.row]().parameters.get("dual_clip") is None
        assert method_has_none or "clipx.dual_clip=null" in record["overrides"], path


@pytest.mark.parametrize("column", ["old", "noisy"])
def test_the_section_opens_with_the_corrected_rows(results, opening, column):
    corrected = results["described"][column]["corrected"]
    width_1 = results["described"][column]["grpo_w1"]
    lead_at_end = corrected["end"][0] - width_1["end"][0]
    assert_names(opening, f"{corrected['mean'][0]:.1f}", f"{width_1['mean'][0]:.1f}", f"{lead_at_end:.1f}")


def test_the_section_opens_with_the_keys_of_stock_verl_that_give_width_1(opening):
    width_low = float(re.search(r"actor\.clip_ratio_low=([\d.]+)", opening)[1])
    width_high = float(re.search(r"actor\.clip_ratio_high=([\d.]+)", opening)[1])
    # verl clamps the ratio to 1 - low and 1 + high.
    bounds = {f"clipx.clip_low={1 - width_low:g}", f"clipx.clip_high={1 + width_high:g}"}
    assert bounds <= {*ROWS["grpo_w1"]["overrides"]}


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_readme_has_the_number_of_runs_and_none_of_their_rewards(results, name):
    readme = read_one_line(ROOT / name)
    assert f"{results['made'][COUNTED]} " in readme
    assert "bypass" in readme
    assert "dual clip" in readme
    rewards = {f"{gain:.1f}" for gain in gains_of_width_1(results)}
    for rows in results[COUNTED].values():
        rewards |= {f"{np.mean(means):.1f}" for means in means_by_row(rows).values()}
    assert rewards.isdisjoint(re.findall(r"\d+\.\d+", readme))


def read_rewards(run: Wanted, folder) -> list[float]:
    """Return the rewards of fresh samples of a kept run, batch by batch."""
    _, _, metrics = evidence.read_kept(run.path(folder))
    return [step[evidence.FRESH] for step in metrics.values()]


def test_what_repeated_on_another_machine_is_as_the_page_says(page):
    folder = ROOT / "docs" / "results" / "runs" / "repeated"
    repeated = evidence.outcomes_in(BYPASS, folder)
    assert len(repeated) == 5
    # How many rewards at the end of a run differ from those that were kept first.
    differing_at_end = {}
    for run in repeated:
        first = read_rewards(run, BYPASS.runs)
        again = read_rewards(run, folder)
        places = [place for place, pair in enumerate(zip(first, again, strict=True)) if pair[0] != pair[1]]
        if places:
            differing_at_end[run] = len(first) - places[0]
    assert sorted(differing_at_end.values()) == [1, 2]
    failed = Wanted(COUNTED, "old", "grpo_w2", 3e-4, 8)
    assert differing_at_end[failed] == 2
    assert len(read_rewards(failed, folder)) == 12
    first_outcome = evidence.outcomes_in(BYPASS, BYPASS.runs)[failed]
    assert_names(page, f"({first_outcome:.1f}) reproduces ten of twelve rewards, then diverges")
    assert_names(page, f"diverges and has {repeated[failed]:.1f}")


class QueueBelowTheGrid:
    """The runs that are asked for below the grid of rates, while outcomes come in."""

    def __init__(self, outcomes: dict[Wanted, float]):
        self.outcomes = dict(outcomes)

    def missing(self) -> list[Wanted]:
        return [run for run in queue(BYPASS, self.outcomes, BYPASS.wider_rates) if run not in self.outcomes]

    def finish(self, outcome_by_row: dict[str, float]) -> None:
        """Give each missing run the outcome of its row."""
        for run in self.missing():
            self.outcomes[run] = outcome_by_row[run.row]

    def set_tuning_outcome(self, column: str, row: str, rate: float, outcome: float) -> None:
        for seed in TUNING_SEEDS:
            self.outcomes[Wanted(TUNING, column, row, rate, seed)] = outcome


def exploratory_runs(row: str, rate: float, seeds) -> list[Wanted]:
    return [Wanted("exploratory", "old", row, rate, seed) for seed in seeds]


def test_rates_below_the_grid_are_tried_until_one_is_worse_and_then_counted_seeds_are_run():
    # Width 0.5 and ACPO are best at the lowest rate of the grid, 3e-5.
    below = QueueBelowTheGrid(MADE_UP_OUTCOMES)
    for row in ("grpo_w05", "acpo"):
        for rate in BYPASS.rates:
            below.set_tuning_outcome("old", row, rate, 60 - rate * 1e4)
    assert below.missing() == [
        *exploratory_runs("grpo_w05", 1e-5, TUNING_SEEDS),
        *exploratory_runs("acpo", 1e-5, TUNING_SEEDS),
    ]
    # Only width 0.5 is better still.
    below.finish({"grpo_w05": 70, "acpo": 50})
    assert below.missing() == exploratory_runs("grpo_w05", 3e-6, TUNING_SEEDS)
    below.finish({"grpo_w05": 65})
    seeds = evidence.seeds_of(BYPASS, "old", below.outcomes)
    assert seeds == list(range(1, len(seeds) + 1))
    assert below.missing() == exploratory_runs("grpo_w05", 1e-5, seeds)
    below.finish({"grpo_w05": 70})
    assert below.missing() == []


def test_rows_like_one_that_is_better_below_the_grid_are_run_again_with_it():
    below = QueueBelowTheGrid(MADE_UP_OUTCOMES)
    for rate in BYPASS.rates[:2]:
        below.set_tuning_outcome("noisy", "grpo", rate, 60)
    # 1e-5 is better than the grid, and the next lower rate is worse.
    below.finish({"grpo": 80})
    below.finish({"grpo": 70})
    assert {(run.row, run.rate) for run in below.missing()} == {("grpo", 1e-5), ("narrow", 1e-5), ("again", 1e-5)}


def test_a_column_has_as_many_seeds_as_its_power_needs():
    assert deviation_of(BYPASS, "old", MADE_UP_OUTCOMES) == pytest.approx(2**0.5)
    assert len(evidence.seeds_of(BYPASS, "old", MADE_UP_OUTCOMES)) == 8
    with_wider_spread = {}
    for run, outcome in MADE_UP_OUTCOMES.items():
        with_wider_spread[run] = outcome + 2 if run.seed == TUNING_SEEDS[0] else outcome
    seeds = len(evidence.seeds_of(BYPASS, "old", with_wider_spread))
    deviation = deviation_of(BYPASS, "old", with_wider_spread)
    assert power(seeds - 1, deviation, 3) < 0.9 <= power(seeds, deviation, 3)


def test_the_power_is_that_of_the_protocol():
    # From tables of the noncentral t distribution.
    assert power(8, 1.7, 3) == pytest.approx(0.956, abs=0.001)
    assert power(8, 3.1, 5) == pytest.approx(0.922, abs=0.001)


def test_no_worse_is_welchs_test_by_hand():
    """Means 2 and 3, variances 1, 3 seeds each: standard error 0.8165, 4 degrees of freedom, t of 95 % 2.132."""
    result = evidence_table.no_worse([1, 2, 3], [2, 3, 4], margin=3)
    assert result["difference"] == pytest.approx(-1)
    assert result["low"] == pytest.approx(-1 - 2.1318 * 0.8165, abs=2e-4)
    assert result["p_value"] == pytest.approx(0.0352, abs=2e-4)


def level_outcomes() -> dict[str, dict[str, list[float]]]:
    """Return outcomes of three seeds by column and row: 50 to 52, but 30 to 32 for narrow and 44 to 46 for ACPO."""
    rows = [name for name, row in ROWS.items() if row["kind"] != "held" and name != "corrected"]
    levels = dict.fromkeys(rows, 50.0) | {"narrow": 30.0, "acpo": 44.0}
    return {column: {row: [level, level + 1, level + 2] for row, level in levels.items()} for column in COLUMNS}


def test_a_setting_passes_by_its_worst_column():
    outcomes = level_outcomes()
    outcomes["noisy"]["bapo"] = [44.0, 45.0, 46.0]
    tests = evidence_table.tests_of(outcomes, dict.fromkeys(COLUMNS, "grpo"))
    assert tests["in_every_column"]["bapo"] == tests["no_worse"]["bapo"]["noisy"]["p_value"] > 0.9
    assert tests["in_every_column"]["grpo"] == 0
    assert tests["in_every_column"]["dgpo"] < 0.05
    assert tests["holm"]["acpo"] > 0.05
    fixed_widths = ["grpo", "grpo_w01", "grpo_w05", "grpo_w1", "grpo_w2", "grpo_w5"]
    assert tests["claimed"] == [*fixed_widths, "m2po", "dgpo"]


def test_the_controls_tell_narrow_bounds_apart_and_the_same_row_with_other_seeds_not():
    tests = evidence_table.tests_of(level_outcomes(), dict.fromkeys(COLUMNS, "grpo"))
    assert tests["controls"]["old"]["narrow"] < 0.05
    assert tests["controls"]["old"]["again"] > 0.05


def test_nothing_is_claimed_where_a_control_fails():
    outcomes = level_outcomes()
    outcomes["old"]["narrow"] = outcomes["old"]["grpo"]
    assert evidence_table.tests_of(outcomes, dict.fromkeys(COLUMNS, "grpo"))["claimed"] == []
