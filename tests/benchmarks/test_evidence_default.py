"""The evidence in verl's default mode: its protocol, which runs are made and in which order, their mode, the test, and
what a kept log says of the code that made it. Not covered: that a run is made (test_scripts.py).
"""

import re
import subprocess
from pathlib import Path

import evidence
import evidence_default_table
import evidence_table
import pytest
from evidence import COUNTED, DEFAULT, TUNING, Wanted, queue, second_look
from one_process import kept, trainer, trees

from tests.analysis.runs.example_runs import write_log
from tests.messages import assert_names
from verl_clipx.analysis.runs.folder import KEPT
from verl_clipx.common.files import hash_of_json, read_json, read_text
from verl_clipx.papers.tables.collect import read_configurations
from verl_clipx.run.resolve import resolve

COLUMNS = DEFAULT.columns
ROWS = DEFAULT.rows
FIRST_RATES = DEFAULT.table["first_rates"]
TUNING_SEEDS = DEFAULT.table[TUNING]


def tune_with_best_rate(best_rate: float) -> dict[Wanted, float]:
    """Return the outcomes of every tuning run that is asked for if each row is best at one rate."""
    outcomes: dict[Wanted, float] = {}
    while True:
        runs = evidence.tuning_of(DEFAULT, outcomes, DEFAULT.rates)
        missing = [run for run in runs if run not in outcomes]
        if not missing:
            return outcomes
        for run in missing:
            outcomes[run] = -abs(DEFAULT.rates.index(run.rate) - DEFAULT.rates.index(best_rate))


def test_the_protocol_is_the_one_that_was_committed_first():
    assert evidence_table.hash_of_protocol(DEFAULT) == DEFAULT.table["protocol"]


def test_a_runs_outcome_is_the_reward_of_its_last_three_batches_in_points():
    rewards = [0.9, 0.1, 0.2, 0.3, 0.7]
    steps = {step: {evidence.FRESH: reward} for step, reward in enumerate(rewards, 1)}
    assert DEFAULT.outcome_of(steps) == pytest.approx(40)
    assert evidence.BYPASS.outcome_of(steps) == pytest.approx(44)


def test_all_tuning_comes_first_with_as_many_runs_for_each_row():
    cells = [(column, row) for column in COLUMNS for row in DEFAULT.rows_of(column)]
    assert len(cells) == 4 * 8 + 2 * 2
    expected = []
    for column, row in cells:
        for rate in FIRST_RATES:
            expected += [Wanted(TUNING, column, row, rate, seed) for seed in TUNING_SEEDS]
    assert queue(DEFAULT, {}) == expected


@pytest.mark.parametrize(
    ("best_rate", "tried_rates"),
    [
        (3e-4, [1e-4, 3e-4, 1e-3]),
        (1e-4, [3e-5, 1e-4, 3e-4, 1e-3]),
        (1e-5, [3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3]),
        (1e-3, [1e-4, 3e-4, 1e-3, 3e-3]),
    ],
)
def test_a_rate_beyond_the_best_one_is_always_tried(best_rate, tried_rates):
    outcomes = tune_with_best_rate(best_rate)
    assert sorted({run.rate for run in outcomes}) == tried_rates
    assert {run.rate for run in queue(DEFAULT, outcomes) if run.part == COUNTED} == {best_rate}


@pytest.mark.parametrize("best_rate", [DEFAULT.rates[0], DEFAULT.rates[-1]])
def test_a_best_rate_at_the_end_of_the_grid_stops_before_any_counted_run(best_rate):
    with pytest.raises(ValueError, match=f"old/grpo: the best learning rate, {best_rate:g}, is an end of the grid"):
        queue(DEFAULT, tune_with_best_rate(best_rate))


def test_counted_runs_are_made_column_by_column_each_row_with_one_seed_before_any_has_the_next():
    counted = [run for run in queue(DEFAULT, tune_with_best_rate(3e-4)) if run.part == COUNTED]
    expected = []
    for column, seeds in (("old", 8), ("fresh_16", 8), ("noisy", 16), ("fresh_64", 8)):
        for seed in range(1, seeds + 1):
            expected += [(column, seed, row) for row in DEFAULT.rows_of(column)]
    assert [(run.column, run.seed, run.row) for run in counted] == expected
    assert len(counted) == 10 * 8 + 8 * 8 + 10 * 16 + 8 * 8


def test_the_pretrained_models_runs_are_four_settings_with_five_seeds_in_rounds():
    assert [(run.seed, run.row) for run in second_look(DEFAULT)] == [
        (seed, row) for seed in range(1, 6) for row in ("grpo", "grpo_w1", "acpo", "dgpo")
    ]


def test_a_kept_run_is_never_made_again(tmp_path):
    first, second, *_ = queue(DEFAULT, {})
    keep_made_up_log(tmp_path, first)
    missing = evidence.missing_runs(DEFAULT, tmp_path, only=None, another_model=False, lower_rates=False)
    assert missing[0] == second
    assert first not in missing


def keep_made_up_log(folder: Path, run: Wanted) -> None:
    """Keep a log of seven steps as that of a run."""
    steps = {step: {evidence.FRESH: 0.5} for step in range(1, 8)}
    kept.keep_run(run.path(folder), {**run._asdict(), "commit": None}, steps)


@pytest.fixture
def on_cpu(monkeypatch):
    """Lets configurations of a CPU be composed."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setenv("SMOLLM2", "smollm2")
    monkeypatch.setenv("CLIPX_DATA", "data")


# One of each row, one of each further column, and one with the pretrained model.
EXAMPLE_RUNS = [
    *(Wanted(COUNTED, "old", row, 3e-4, 1) for row in ROWS),
    *(Wanted(COUNTED, column, "grpo", 3e-4, 1) for column in COLUMNS if column != "old"),
    second_look(DEFAULT)[0],
]


@pytest.mark.slow
@pytest.mark.parametrize("run", EXAMPLE_RUNS, ids=lambda run: run.name)
def test_each_run_is_decoupled_with_the_dual_clip_that_a_users_command_has(on_cpu, run):
    resolved = resolve(evidence.compose_run(evidence.overrides_of(DEFAULT, run)))
    assert resolved.record.schedule.starts_at_ratio_one
    assert_names(resolved.description.line, "old_log_probs are recomputed with the weights at the start")
    has_dual_clip = ROWS[run.row]["overrides"][0] in ("+clipx=grpo", "+clipx=dapo")
    assert getattr(resolved.clipx.method, "dual_clip", None) == (3 if has_dual_clip else None)
    updates_by_column = {"fresh_16": 16, "fresh_64": 64}
    assert resolved.record.schedule.updates == updates_by_column.get(run.column, 4)


@pytest.mark.slow
def test_a_run_in_bypass_mode_is_refused_before_it_trains(on_cpu):
    overrides = evidence.overrides_of(DEFAULT, EXAMPLE_RUNS[0])
    config = evidence.compose_run([*overrides, "algorithm.rollout_correction.bypass_mode=true"])
    with pytest.raises(ValueError, match="not that of decoupled mode"):
        evidence.schedule_of_run(DEFAULT, config)
    assert evidence.schedule_of_run(evidence.BYPASS, config)["starts_at_ratio_one"] is False


def test_the_hypothesis_is_welchs_test_against_five_points_by_hand():
    """Means 11 and 17, variances 1, 3 seeds each: standard error 0.8165, 4 degrees of freedom.

    The t of 97.5 % is 2.7764; that of one point above the 5 is 1.2247, whose upper tail is 0.1439.
    """
    ends = {"old": {"narrow": [10, 11, 12], "wide": [16, 17, 18]}}
    result = evidence_default_table.judge_hypothesis(ends, more=5, narrow="narrow", wide="wide")
    assert result["old"]["difference"] == pytest.approx(6)
    assert result["old"]["low"] == pytest.approx(6 - 2.7764 * 0.8165, abs=2e-4)
    assert result["old"]["high"] == pytest.approx(6 + 2.7764 * 0.8165, abs=2e-4)
    assert result["old"]["p_value"] == pytest.approx(0.1439, abs=2e-4)
    # The only column needs no correction.
    assert result["old"]["holm"] == pytest.approx(0.1439, abs=2e-4)


def test_holm_corrects_over_the_columns():
    """p-values of 0.1439 and, for a difference of 0, nearly 1: the smaller one is doubled."""
    ends = {"old": {"a": [10, 11, 12], "b": [16, 17, 18]}, "noisy": {"a": [10, 11, 12], "b": [10, 11, 12]}}
    result = evidence_default_table.judge_hypothesis(ends, more=5, narrow="a", wide="b")
    assert result["old"]["holm"] == pytest.approx(2 * 0.1439, abs=2e-4)
    assert result["noisy"]["holm"] == result["noisy"]["p_value"] > 0.99


def test_a_correction_is_compared_where_it_was_trained_alone():
    ends = {
        "old": {"grpo": [10, 11, 12], "grpo_w1": [16, 17, 18], "corrected": [17, 18, 19]},
        "fresh_16": {"grpo": [10, 11, 12], "grpo_w1": [16, 17, 18]},
    }
    result = evidence_default_table.compare_corrections(ends, narrow="grpo", wide="grpo_w1")
    assert list(result) == ["old"]
    assert result["old"]["to_narrow"]["difference"] == 7
    assert result["old"]["to_wide"]["difference"] == 1


def test_the_shares_of_a_run_are_means_over_its_batches_in_percent():
    steps = {
        step: {
            evidence.FRESH: 0.5,
            "actor/entropy_loss": 1.0,
            "actor/ppo_kl": 0.1,
            "actor/pg_clipfrac": share,
            "actor/clipx/floor/clip_fraction_low": share / 10,
            "actor/clipx/floor/clip_fraction_high": share / 10,
        }
        for step, share in enumerate([0.1, 0.2, 0.3], start=1)
    }
    numbers = evidence_default_table.measure_run(steps)
    assert numbers["clipped"] == pytest.approx(20)
    assert numbers["floor"] == pytest.approx(4)


def test_the_table_is_what_the_committed_logs_give():
    results = evidence_default_table.collect()
    assert read_json(evidence_default_table.RESULTS) == results
    assert evidence_default_table.numbers_of(results) in read_text(evidence_table.PAGE)


@pytest.fixture(scope="module")
def results() -> dict:
    return read_json(evidence_default_table.RESULTS)


@pytest.fixture(scope="module")
def page() -> str:
    """The page with single blanks, so that line ends don't matter."""
    return " ".join(read_text(evidence_table.PAGE).split())


def in_points(comparison, sign: int = 1) -> str:
    """Return a difference as the page writes it; with the sign -1, that of the first row from the second."""
    return f"{sign * comparison['difference']:.1f}"


def name_interval(comparison, sign: int = 1) -> str:
    """Return the interval of a difference as the page writes it."""
    low, high = sorted((sign * comparison["low"], sign * comparison["high"]))
    return f"({low:.1f} to {high:.1f})"


def test_the_page_has_what_width_1_earns_more_with_many_updates(results, page):
    with_16 = results["hypothesis"]["fresh_16"]
    with_64 = results["hypothesis"]["fresh_64"]
    assert_names(page, f"earned {in_points(with_16)} points more than with 0.8 to 1.2")
    assert_names(page, f"16 updates, and {in_points(with_64)} more")
    assert_names(page, f"{in_points(with_16)} points more than 0.8 to 1.2 with 16 updates {name_interval(with_16)}")
    assert_names(page, f"{in_points(with_64)} more with 64 {name_interval(with_64)}")
    assert max(with_16["holm"], with_64["holm"]) < 0.05


def test_the_page_has_what_width_1_earns_less_on_old_rollouts_and_with_a_noisy_sampler(results, page):
    old = results["hypothesis"]["old"]
    noisy = results["hypothesis"]["noisy"]
    assert_names(page, f"it earned {in_points(old, -1)} points less on old rollouts")
    assert_names(page, f"and {in_points(noisy, -1)} less with a noisy sampler")
    assert_names(page, f"it earns {in_points(old, -1)} points less {name_interval(old, -1)}")
    assert_names(page, f"with the noisy sampler {in_points(noisy, -1)} less {name_interval(noisy, -1)}")


def test_the_page_has_what_a_correction_earns(results, page):
    old = results["corrections"]["old"]
    assert_names(page, f"earns {in_points(old['to_narrow'])} points more on old rollouts")
    assert_names(page, f"than without it {name_interval(old['to_narrow'])}")
    assert_names(page, f"{in_points(old['to_wide'])} more than width 1")
    noisy = results["corrections"]["noisy"]["to_narrow"]
    assert_names(page, f"no gain (−{-noisy['low']:.1f} to {noisy['high']:.1f})")


def test_the_page_has_acpo_on_old_rollouts_and_the_number_of_runs(results, page):
    assert_names(page, f"ACPO lies {in_points(results['methods']['old']['acpo'], -1)} points below these")
    assert_names(page, "one of its runs collapsed")
    assert results["described"]["old"]["acpo"]["collapsed"] == 1
    assert_names(page, f"| runs that count | {results['made'][COUNTED]}, by")


def test_no_method_is_shown_to_earn_more_than_the_best_fixed_bounds(results):
    for rows in results["methods"].values():
        assert all(comparison["low"] < 0 for comparison in rows.values())


def test_width_0_5_is_within_4_points_of_the_best_in_every_column(results):
    for rows in results["described"].values():
        best = max(row["end"][0] for row in rows.values())
        assert rows["grpo_w05"]["end"][0] > best - 4


@pytest.fixture(scope="module")
def outcomes() -> dict[Wanted, float]:
    """The outcomes of all kept runs."""
    return evidence.outcomes_in(DEFAULT, DEFAULT.runs)


@pytest.mark.parametrize("column", ["old", "noisy"])
def test_where_samples_are_off_policy_width_1_needs_a_lower_rate_than_0_8_to_1_2(outcomes, column):
    rates = {row: evidence.best_rate(DEFAULT, column, row, outcomes)[1] for row in ("grpo", "grpo_w1")}
    assert rates == {"grpo": 3e-4, "grpo_w1": 1e-4}
    # At the higher rate some seed fails.
    at_higher_rate = [outcomes[Wanted(TUNING, column, "grpo_w1", 3e-4, seed)] for seed in TUNING_SEEDS]
    assert min(at_higher_rate) < max(at_higher_rate) - 15


def test_with_64_updates_no_rate_below_1e_4_was_tried(outcomes):
    tried = [run.rate for run in outcomes if run.part == TUNING and run.column == "fresh_64" and run.row == "grpo"]
    assert min(tried) == 1e-4


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_readme_has_the_differences_in_whole_points_and_the_number_of_runs(results, name):
    numbers_of_readme = {*re.findall(r"\d+", read_text(evidence.ROOT / name))}
    differences = {str(abs(round(comparison["difference"]))) for comparison in results["hypothesis"].values()}
    assert differences <= numbers_of_readme
    assert str(results["made"][COUNTED]) in numbers_of_readme


def test_nothing_is_tested_before_all_runs_are_there(tmp_path):
    protocol = evidence.Protocol(text=DEFAULT.text, runs=tmp_path, table=DEFAULT.table)
    keep_made_up_log(tmp_path, queue(DEFAULT, {})[0])
    with pytest.raises(ValueError, match="215 runs of the table are missing"):
        evidence_table.outcomes_of_all(protocol)


AUTHOR = ("-c", "user.name=test", "-c", "user.email=test@example.com")


@pytest.fixture
def repository(tmp_path) -> Path:
    """A git repository that has the folders of a run's code, with two commits that change each."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for number in (1, 2):
        for name in (*trees.TREES, "docs"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "file").write_text(f"{name} {number}")
        commit_all(tmp_path)
    return tmp_path


def commit_all(root: Path) -> None:
    """Commit all changes."""
    trees.git(root, "add", "-A")
    trees.git(root, *AUTHOR, "commit", "-q", "-m", "a change")


def find_unknown_trees(recorded: dict[str, str], history: dict[str, set[str]]) -> list[str]:
    """Return the folders whose recorded tree no commit of the history has."""
    return [name for name in trees.TREES if recorded.get(name) not in history[name]]


def test_a_log_names_the_tree_of_each_folder(repository):
    before = trees.committed_trees(repository)
    assert before == {name: trees.git(repository, "rev-parse", f"HEAD:{name}").strip() for name in trees.TREES}
    (repository / "benchmarks" / "file").write_text("benchmarks 3")
    commit_all(repository)
    after = trees.committed_trees(repository)
    assert after["benchmarks"] != before["benchmarks"]
    assert after["configs"] == before["configs"]


def test_the_history_has_the_trees_also_after_a_rebase(repository):
    before = trees.committed_trees(repository)
    (repository / "benchmarks" / "file").write_text("benchmarks 3")
    commit_all(repository)
    after = trees.committed_trees(repository)
    trees.git(repository, *AUTHOR, "commit", "--amend", "-qm", "another name")
    history = trees.trees_in_history(repository)
    # Of benchmarks there are three trees, of the other folders two.
    assert {len(hashes) for hashes in history.values()} == {2, 3}
    assert find_unknown_trees(before, history) == []
    assert find_unknown_trees(after, history) == []
    assert find_unknown_trees(before | {"configs": "0" * 40}, history) == ["configs"]


def change_file(root: Path, name: str) -> None:
    (root / name / "file").write_text("changed")


def change_and_stage_file(root: Path, name: str) -> None:
    change_file(root, name)
    trees.git(root, "add", "-A")


def add_file(root: Path, name: str) -> None:
    (root / name / "another").write_text("new")


def remove_file(root: Path, name: str) -> None:
    (root / name / "file").unlink()


@pytest.mark.parametrize("name", trees.TREES)
@pytest.mark.parametrize("change", [change_file, change_and_stage_file, add_file, remove_file])
def test_a_changed_folder_is_refused(repository, name, change):
    change(repository, name)
    with pytest.raises(ValueError, match=f"{name}/.*: not committed"):
        trees.committed_trees(repository)


def test_a_change_elsewhere_is_no_reason(repository):
    (repository / "docs" / "file").write_text("changed")
    assert len(trees.committed_trees(repository)) == 3


def test_without_a_repository_no_log_can_name_its_code(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ValueError, match="not a git repository"):
        trees.committed_trees(tmp_path)


def train_one_step(config, log, trainer) -> None:
    """Write a log in the place of a training."""
    write_log(log, [{"critic/score/mean": 0.5}])


def test_a_log_is_kept_unless_the_code_changed_while_its_run_was_made(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "train", train_one_step)
    path = tmp_path / f"run{KEPT}"

    def find_change() -> None:
        raise ValueError("changed meanwhile")

    def find_none() -> None:
        pass

    with pytest.raises(ValueError, match="changed meanwhile"):
        kept.train_and_keep(path, None, {}, dict, check=find_change)
    assert not path.exists()
    kept.train_and_keep(path, None, {}, dict, check=find_none)
    assert path.exists()


def test_the_history_has_the_trees_of_every_kept_log_and_its_configuration_is_there():
    history = trees.trees_in_history()
    configurations = read_configurations(DEFAULT.runs)
    assert all(history.values())
    for path in sorted(DEFAULT.runs.glob(f"*/*/*{KEPT}")):
        run, record, _ = evidence.read_kept(path)
        assert find_unknown_trees(record["trees"], history) == [], path
        assert hash_of_json(configurations[record["config_hash"]], str) == record["config_hash"], path
        assert record["schedule"]["starts_at_ratio_one"] is True, path
        assert path == run.path(DEFAULT.runs)
