"""The page's verdict on methods: there is none from runs of one setting, from constants or from fewer than three seeds;
which way it goes; which setting the others are compared with, by default and by --baseline. Not covered: how often
settings without a difference, or with one, get a verdict (tests/common/statistics).
"""

import re
from pathlib import Path

import pytest

from tests.analysis.diagnose.example_settings import make_setting
from tests.analysis.runs.commands import clipx, page_of
from tests.analysis.runs.example_runs import write_log
from tests.messages import assert_names
from verl_clipx.analysis.diagnose.findings import compare_rewards
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.analysis.runs.settings import Setting, baseline_of, settings_of
from verl_clipx.training.trainer.log import write_record

WORDS_OF_VERDICT = re.compile("told apart|higher|lower|more|less|ahead|behind|better|worse|best|worst")
NO_VERDICT = "This does not say which method is better"


def write_run(folder: Path, *, method: str, seed: int, rewards: list[float]) -> Path:
    """Write a run with a record, whose experiment has the folder's name."""
    log = write_log(folder / "metrics.jsonl", [{keys.REWARD: reward, keys.ENTROPY: 1.0} for reward in rewards])
    record = {
        "clipx": {"method": method},
        "data": {"seed": seed},
        "trainer": {"experiment_name": folder.name},
    }
    write_record(log, record)
    return folder


def make_setting_of_seeds(label: str, *, base: float, seeds: int, steps: int) -> Setting:
    """Return a setting of runs with constant rewards: `base` and 0.01 more for each further run."""
    return make_setting(label, *([base + 0.01 * seed] * steps for seed in range(seeds)))


@pytest.mark.parametrize(("seeds_of_a", "seeds_of_b"), [(1, 1), (1, 3), (3, 1), (2, 2), (2, 3)])
def test_fewer_than_three_seeds_give_no_verdict(seeds_of_a, seeds_of_b):
    settings = [
        make_setting_of_seeds("A", base=0.1, seeds=seeds_of_a, steps=4),
        make_setting_of_seeds("B", base=0.9, seeds=seeds_of_b, steps=4),
    ]
    (finding,) = compare_rewards(settings)
    assert not WORDS_OF_VERDICT.search(finding.head)
    assert_names(finding.text, "takes 3 seeds", f"here are {seeds_of_a} and {seeds_of_b}")


def test_why_there_is_no_verdict_is_said_once():
    settings = [make_setting(label, [0.1, last_reward]) for label, last_reward in (("A", 0.2), ("B", 0.3), ("C", 0.4))]
    assert [NO_VERDICT in finding.text for finding in compare_rewards(settings)] == [True, False]


def test_runs_of_one_setting_are_not_compared_with_each_other():
    assert compare_rewards([make_setting_of_seeds("A", base=0.1, seeds=3, steps=4)]) == []


def test_a_table_by_seed_has_the_mean_of_the_runs_of_a_seed():
    setting = make_setting("A", [0.0, 0.5], [0.4, 0.1], [1.0, 2.0], seeds=(1, 2, 1))
    table = setting.by_seed(setting.table(keys.REWARD))
    assert {seed: values.tolist() for seed, values in table.items()} == {1: [0.5, 1.25], 2: [0.4, 0.1]}


def test_runs_of_one_seed_count_as_one():
    def compare_with_seeds_of_a(seeds):
        first = make_setting("A", [0.1, 0.1], [0.11, 0.11], [0.12, 0.12], seeds=seeds)
        second = make_setting("B", [0.5, 0.5], [0.51, 0.51], [0.52, 0.52], seeds=(1, 2, 3))
        (finding,) = compare_rewards([first, second])
        return finding

    assert "higher" in compare_with_seeds_of_a((1, 2, 3)).head
    assert_names(compare_with_seeds_of_a((1, 1, 2)).text, NO_VERDICT, "here are 2 and 3")


@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 1e-9, 1e6])
def test_constants_are_no_evidence(value):
    """Means of equal floats differ in their last bit: an interval would have the width 0 but for rounding."""
    first = make_setting("A", *[[value] * 3] * 3)
    second = make_setting("B", *[[1.5 * value] * 3] * 3)
    for settings in ([first, second], [second, first]):
        (finding,) = compare_rewards(settings)
        assert not WORDS_OF_VERDICT.search(finding.head)
        assert_names(finding.text, "nothing says how far chance goes")
        assert "interval" not in finding.text


@pytest.mark.parametrize(
    ("mean_of_a", "mean_of_b", "verdict", "signs"),
    [
        # The signs of the difference and of the ends of its interval.
        (0.1, 0.5, "is higher than", "+++"),
        (0.5, 0.1, "is lower than", "−−−"),
        (0.1, 0.105, "cannot be told apart from", "+−+"),
        (0.105, 0.1, "cannot be told apart from", "−−+"),
    ],
)
def test_the_sentence_goes_the_way_of_the_number(mean_of_a, mean_of_b, verdict, signs):
    settings = [
        make_setting_of_seeds("A", base=mean_of_a, seeds=3, steps=2),
        make_setting_of_seeds("B", base=mean_of_b, seeds=3, steps=2),
    ]
    (finding,) = compare_rewards(settings)
    assert finding.head == f"The training reward of B {verdict} that of A."
    numbers = re.search(r"B minus A: ([+−][\d.]+), 95\u202f% interval ([−\d.]+) to ([−\d.]+)", finding.text).groups()
    assert "".join("−" if number.startswith("−") else "+" for number in numbers) == signs


def test_several_comparisons_are_corrected():
    settings = [
        make_setting("A", [0.1, 0.1], [0.11, 0.11], [0.12, 0.12]),
        make_setting("B", [0.5, 0.5], [0.51, 0.51], [0.52, 0.52]),
        make_setting("C", [0.11, 0.1], [0.12, 0.1], [0.13, 0.1]),
    ]
    findings = compare_rewards(settings)
    assert [finding.head for finding in findings] == [
        "The training reward of B is higher than that of A.",
        "The training reward of C cannot be told apart from that of A.",
    ]
    for finding in findings:
        assert_names(finding.text, "Holm’s over 2 comparisons")


@pytest.fixture
def folders(tmp_path):
    """Runs with the names mine, theirs, again and third, of three methods; third has a reward of 0.4."""
    return [
        write_run(tmp_path / "mine", method="acpo", seed=1, rewards=[0.1] * 3),
        write_run(tmp_path / "theirs", method="grpo", seed=1, rewards=[0.2] * 3),
        write_run(tmp_path / "again", method="grpo", seed=2, rewards=[0.3] * 3),
        write_run(tmp_path / "third", method="bapo", seed=1, rewards=[0.4] * 3),
    ]


@pytest.mark.parametrize(("name", "label"), [(None, "GRPO"), ("ACPO", "ACPO"), ("again", "GRPO"), ("third", "BAPO")])
def test_the_baseline_is_grpo_or_what_a_run_or_a_method_names(folders, name, label):
    settings = settings_of([read_run(folder) for folder in folders])
    assert baseline_of(settings, name).label == label


def test_a_report_compares_with_the_setting_of_a_named_run(folders, tmp_path):
    output = clipx("report", *folders, "--out", tmp_path / "out", "--baseline", "third")
    assert output.count("The training reward was 0.400 in BAPO, seed 1 and") == 2
    assert "Rewards are compared with those of BAPO" in page_of(tmp_path / "out")


def test_a_report_refuses_an_unknown_baseline_and_names_the_runs_and_methods(folders, tmp_path):
    output = clipx("report", *folders, "--out", tmp_path / "out", "--baseline", "dgpo", code=1)
    assert not (tmp_path / "out").exists()
    assert_names(output, "--baseline dgpo", "no such run or method")
    assert_names(output, "mine, theirs, again, third", "acpo, grpo, bapo")


def test_a_report_refuses_a_baseline_that_two_settings_have_for_a_method(folders, tmp_path):
    write_record(folders[3] / "metrics.jsonl", {"clipx": {"method": "acpo", "alpha": 2.0}, "data": {"seed": 1}})
    output = clipx("report", folders[0], folders[3], "--out", tmp_path / "out", "--baseline", "acpo", code=1)
    assert_names(output, "--baseline acpo", "2 settings", "mine, third")
