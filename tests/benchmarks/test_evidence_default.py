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
from verl_clipx.analysis.runs.folder import KEPT
from verl_clipx.common.files import hash_of_json, read_json, read_text
from verl_clipx.papers.tables.collect import read_configurations
from verl_clipx.run.resolve import resolve

COLUMNS, ROWS = DEFAULT.columns, DEFAULT.rows
FIRST_RATES = DEFAULT.table["first_rates"]
SEEDS = DEFAULT.table[TUNING]


def outcomes_best_at(rate: float) -> dict[Wanted, float]:
    """Outcomes of every tuning run that is asked for where each row is best at a rate."""
    outcomes: dict[Wanted, float] = {}
    while missing := [run for run in evidence.tuning_of(DEFAULT, outcomes, DEFAULT.rates) if run not in outcomes]:
        outcomes |= {run: -abs(DEFAULT.rates.index(run.rate) - DEFAULT.rates.index(rate)) for run in missing}
    return outcomes


def test_the_protocol_is_the_one_that_was_committed_first():
    assert evidence_table.hash_of_protocol(DEFAULT) == DEFAULT.table["protocol"]


def test_a_runs_outcome_is_the_reward_of_its_last_three_batches_in_points():
    rewards = [0.9, 0.1, 0.2, 0.3, 0.7]
    steps = {step: {evidence.FRESH: reward} for step, reward in enumerate(rewards, 1)}
    assert DEFAULT.outcome_of(steps) == pytest.approx(40)
    assert evidence.BYPASS.outcome_of(steps) == pytest.approx(44)


def test_all_tuning_comes_first_with_as_many_runs_for_each_row():
    asked = queue(DEFAULT, {})
    places = [(column, row) for column in COLUMNS for row in DEFAULT.rows_of(column)]
    assert len(places) == 4 * 8 + 2 * 2
    assert asked == [
        Wanted(TUNING, column, row, rate, seed) for column, row in places for rate in FIRST_RATES for seed in SEEDS
    ]


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (3e-4, [1e-4, 3e-4, 1e-3]),
        (1e-4, [3e-5, 1e-4, 3e-4, 1e-3]),
        (1e-5, [3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3]),
        (1e-3, [1e-4, 3e-4, 1e-3, 3e-3]),
    ],
)
def test_a_rate_beyond_the_best_one_is_always_tried(best, tried):
    outcomes = outcomes_best_at(best)
    assert sorted({run.rate for run in outcomes}) == tried
    assert {run.rate for run in queue(DEFAULT, outcomes) if run.part == COUNTED} == {best}


@pytest.mark.parametrize("end", [DEFAULT.rates[0], DEFAULT.rates[-1]])
def test_a_best_rate_at_the_end_of_the_grid_stops_before_any_counted_run(end):
    with pytest.raises(ValueError, match=f"old/grpo: the best learning rate, {end:g}, is an end of the grid"):
        queue(DEFAULT, outcomes_best_at(end))


def test_counted_runs_are_made_column_by_column_each_row_with_one_seed_before_any_has_the_next():
    counted = [run for run in queue(DEFAULT, outcomes_best_at(3e-4)) if run.part == COUNTED]
    assert [(run.column, run.seed, run.row) for run in counted] == [
        (column, seed, row)
        for column, seeds in (("old", 8), ("fresh_16", 8), ("noisy", 16), ("fresh_64", 8))
        for seed in range(1, seeds + 1)
        for row in DEFAULT.rows_of(column)
    ]
    assert len(counted) == 10 * 8 + 8 * 8 + 10 * 16 + 8 * 8


def test_the_pretrained_models_runs_are_four_settings_with_five_seeds_in_rounds():
    assert [(run.seed, run.row) for run in second_look(DEFAULT)] == [
        (seed, row) for seed in range(1, 6) for row in ("grpo", "grpo_w1", "acpo", "dgpo")
    ]


def test_a_kept_run_is_never_made_again(tmp_path):
    first, second, *_ = queue(DEFAULT, {})
    keep_run(tmp_path, first)
    asked = evidence.missing_runs(DEFAULT, tmp_path, only=None, another_model=False, lower_rates=False)
    assert asked[0] == second and first not in asked


def keep_run(folder: Path, run: Wanted) -> None:
    """Keeps a made log of a run."""
    steps = {step: {evidence.FRESH: 0.5} for step in range(1, 8)}
    kept.keep_run(run.path(folder), {**run._asdict(), "commit": None}, steps)


def composed(run: Wanted):
    """A run's configuration, resolved by the plugin."""
    return resolve(evidence.compose_run(evidence.overrides_of(DEFAULT, run)))


@pytest.fixture
def on_cpu(monkeypatch):
    """Lets configurations of a CPU be composed."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setenv("SMOLLM2", "smollm2")
    monkeypatch.setenv("CLIPX_DATA", "data")


OF_EACH_ROW = [Wanted(COUNTED, "old", row, 3e-4, 1) for row in ROWS]
OF_EACH_COLUMN = [Wanted(COUNTED, column, "grpo", 3e-4, 1) for column in COLUMNS if column != "old"]


@pytest.mark.slow
@pytest.mark.parametrize("run", [*OF_EACH_ROW, *OF_EACH_COLUMN, second_look(DEFAULT)[0]], ids=lambda run: run.name)
def test_each_run_is_decoupled_with_the_dual_clip_that_a_users_command_has(on_cpu, run):
    found = composed(run)
    assert found.record.schedule.starts_at_ratio_one
    assert "old_log_probs are recomputed with the weights at the start" in found.description.line
    is_clip = ROWS[run.row]["overrides"][0] in ("+clipx=grpo", "+clipx=dapo")
    assert getattr(found.clipx.method, "dual_clip", None) == (3 if is_clip else None)
    assert found.record.schedule.updates == {"fresh_16": 16, "fresh_64": 64}.get(run.column, 4)


@pytest.mark.slow
def test_a_run_in_bypass_mode_is_refused_before_it_trains(on_cpu):
    overrides = evidence.overrides_of(DEFAULT, OF_EACH_ROW[0])
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
    low, high = 6 - 2.7764 * 0.8165, 6 + 2.7764 * 0.8165
    expected = {"difference": 6, "low": low, "high": high, "p_value": 0.1439, "holm": 0.1439}
    assert result["old"] == pytest.approx(expected, abs=2e-4)


def test_holm_corrects_over_the_columns():
    """p-values of 0.1439 and, for a difference of 0, nearly 1: the smaller one is doubled."""
    ends = {"old": {"a": [10, 11, 12], "b": [16, 17, 18]}, "noisy": {"a": [10, 11, 12], "b": [10, 11, 12]}}
    result = evidence_default_table.judge_hypothesis(ends, more=5, narrow="a", wide="b")
    assert result["old"]["holm"] == pytest.approx(2 * 0.1439, abs=2e-4)
    assert result["noisy"]["holm"] == result["noisy"]["p_value"] > 0.99


def test_a_correction_is_compared_where_it_was_trained_alone():
    rows = {"grpo": [10, 11, 12], "grpo_w1": [16, 17, 18], "corrected": [17, 18, 19]}
    without = {"grpo": [10, 11, 12], "grpo_w1": [16, 17, 18]}
    ends = {"old": rows, "fresh_16": without}
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


def test_each_number_of_the_page_is_the_tables():
    results = read_json(evidence_default_table.RESULTS)
    tested, described, corrections = (results[key] for key in ("hypothesis", "described", "corrections"))

    def ends(numbers, sign=1):
        low, high = sorted((sign * numbers["low"], sign * numbers["high"]))
        return f"({low:.1f} to {high:.1f})"

    def points(numbers, sign=1):
        return f"{sign * numbers['difference']:.1f}"

    many, most, old, noisy = (tested[column] for column in ("fresh_16", "fresh_64", "old", "noisy"))
    corrected, uncorrected = corrections["old"]["to_narrow"], corrections["noisy"]["to_narrow"]
    sentences = [
        f"earned {points(many)} points more than with 0.8 to 1.2 when a batch gave 16 updates, and {points(most)} more",
        f"it earned {points(old, -1)} points less on old rollouts, and {points(noisy, -1)} less with a noisy sampler.",
        f"earns {points(many)} points more than 0.8 to 1.2 with 16 updates {ends(many)}, and "
        f"{points(most)} more with 64 {ends(most)}.",
        f"it earns {points(old, -1)} points less {ends(old, -1)}, with the noisy sampler {points(noisy, -1)} less "
        f"{ends(noisy, -1)}.",
        f"earns {points(corrected)} points more on old rollouts than without it {ends(corrected)}, and "
        f"{points(corrections['old']['to_wide'])} more than width 1.",
        f"no gain (−{-uncorrected['low']:.1f} to {uncorrected['high']:.1f})",
        f"ACPO lies {points(results['methods']['old']['acpo'], -1)} points below these, and one of its runs collapsed.",
        f"| runs that count | {results['made'][COUNTED]}, by",
    ]
    page = " ".join(read_text(evidence_table.PAGE).split())
    assert [sentence for sentence in sentences if sentence not in page] == []
    assert described["old"]["acpo"]["collapsed"] == 1
    assert max(many["holm"], most["holm"]) < 0.05
    assert all(numbers["low"] < 0 for rows in results["methods"].values() for numbers in rows.values())
    for rows in described.values():
        assert rows["grpo_w05"]["end"][0] > max(row["end"][0] for row in rows.values()) - 4


def test_the_rates_are_as_the_page_says():
    outcomes = evidence.outcomes_in(DEFAULT, DEFAULT.runs)
    for column in ("old", "noisy"):
        rates = {row: evidence.best_rate(DEFAULT, column, row, outcomes)[1] for row in ("grpo", "grpo_w1")}
        assert rates == {"grpo": 3e-4, "grpo_w1": 1e-4}
        tried = [outcomes[Wanted(TUNING, column, "grpo_w1", 3e-4, seed)] for seed in SEEDS]
        assert min(tried) < max(tried) - 15
    tried = [run.rate for run in outcomes if (run.part, run.column, run.row) == (TUNING, "fresh_64", "grpo")]
    assert min(tried) == 1e-4


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_readme_has_the_differences_in_whole_points(name):
    results = read_json(evidence_default_table.RESULTS)
    page = read_text(evidence.ROOT / name)
    numbers = {str(abs(round(column["difference"]))) for column in results["hypothesis"].values()}
    assert {*numbers, str(results["made"][COUNTED])} <= {*re.findall(r"\d+", page)}


def test_nothing_is_tested_before_all_runs_are_there(tmp_path):
    protocol = evidence.Protocol(text=DEFAULT.text, runs=tmp_path, table=DEFAULT.table)
    keep_run(tmp_path, queue(DEFAULT, {})[0])
    with pytest.raises(ValueError, match="215 runs of the table are missing"):
        evidence_table.outcomes_of_all(protocol)


@pytest.fixture
def repository(tmp_path) -> Path:
    """A git repository that has the folders of a run's code, with two commits."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for number in (1, 2):
        for name in (*trees.TREES, "docs"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "file").write_text(f"{name} {number}")
        commit(tmp_path)
    return tmp_path


def commit(root: Path) -> None:
    """Commits all changes."""
    author = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    trees.git(root, "add", "-A")
    trees.git(root, *author, "commit", "-q", "-m", "a change")


def test_a_log_names_the_tree_of_each_folder_and_the_history_has_it_also_after_a_rebase(repository):
    now = trees.committed_trees(repository)
    assert now == {name: trees.git(repository, "rev-parse", f"HEAD:{name}").strip() for name in trees.TREES}
    (repository / "benchmarks" / "file").write_text("benchmarks 3")
    commit(repository)
    later = trees.committed_trees(repository)
    assert later["benchmarks"] != now["benchmarks"] and later["configs"] == now["configs"]
    trees.git(repository, "-c", "user.name=test", "-c", "user.email=test@example.com", "commit", "--amend", "-qm", "b")
    history = trees.trees_in_history(repository)
    assert {len(hashes) for hashes in history.values()} == {2, 3}
    assert unknown_trees(now, history) == unknown_trees(later, history) == []
    assert unknown_trees({**now, "configs": "0" * 40}, history) == ["configs"]


def unknown_trees(recorded: dict[str, str], history: dict[str, set[str]]) -> list[str]:
    """The folders whose recorded tree no commit of the history has."""
    return [name for name in trees.TREES if recorded.get(name) not in history[name]]


@pytest.mark.parametrize("name", trees.TREES)
@pytest.mark.parametrize("change", ["changed", "staged", "added", "removed"])
def test_a_changed_folder_is_refused(repository, name, change):
    if change == "added":
        (repository / name / "another").write_text("new")
    elif change == "removed":
        (repository / name / "file").unlink()
    else:
        (repository / name / "file").write_text("changed")
    if change == "staged":
        trees.git(repository, "add", "-A")
    with pytest.raises(ValueError, match=f"{name}/.*: not committed"):
        trees.committed_trees(repository)


def test_a_change_elsewhere_is_no_reason(repository):
    (repository / "docs" / "file").write_text("changed")
    assert len(trees.committed_trees(repository)) == 3


def test_without_a_repository_no_log_can_name_its_code(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ValueError, match="not a git repository"):
        trees.committed_trees(tmp_path)


def test_what_changed_while_a_run_was_made_leaves_its_log_unkept(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "train", lambda config, log, _: write_log(log, [{"critic/score/mean": 0.5}]))
    path = tmp_path / f"run{KEPT}"

    def refuse() -> None:
        raise ValueError("changed meanwhile")

    with pytest.raises(ValueError, match="changed meanwhile"):
        kept.train_and_keep(path, None, {}, dict, check=refuse)
    assert not path.exists()
    kept.train_and_keep(path, None, {}, dict, check=lambda: None)
    assert path.exists()


def test_the_history_has_the_trees_of_every_kept_log_and_its_configuration_is_there():
    history, configurations = trees.trees_in_history(), read_configurations(DEFAULT.runs)
    assert all(history.values())
    for path in sorted(DEFAULT.runs.glob(f"*/*/*{KEPT}")):
        run, record, _ = evidence.read_kept(path)
        assert unknown_trees(record["trees"], history) == [], path
        assert hash_of_json(configurations[record["config_hash"]], str) == record["config_hash"], path
        assert record["schedule"]["starts_at_ratio_one"] is True, path
        assert path == run.path(DEFAULT.runs)
