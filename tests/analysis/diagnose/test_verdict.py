"""The page's verdict on methods: none from runs of one setting, from constants or from fewer than three seeds; its
direction; --baseline. Not covered: how often settings without a difference, or with one, get a verdict
(tests/common/statistics).
"""

import re
from pathlib import Path

import pytest

from tests.analysis.diagnose.test_findings import setting
from tests.analysis.runs.commands import clipx, page_of
from tests.analysis.runs.example_runs import write_log
from verl_clipx.analysis.diagnose.findings import compare_rewards
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.analysis.runs.settings import baseline_of, settings_of
from verl_clipx.training.trainer.log import write_record

VERDICT = re.compile("told apart|higher|lower|more|less|ahead|behind|better|worse|best|worst")
NO_VERDICT = "This does not say which method is better"


def with_record(folder: Path, method: str, seed: int, rewards: list[float]) -> Path:
    log = write_log(folder / "metrics.jsonl", [{keys.REWARD: reward, keys.ENTROPY: 1.0} for reward in rewards])
    write_record(
        log, {"clipx": {"method": method}, "data": {"seed": seed}, "trainer": {"experiment_name": folder.name}}
    )
    return folder


@pytest.mark.parametrize("counts", [(1, 1), (1, 3), (3, 1), (2, 2), (2, 3)])
def test_fewer_than_three_seeds_give_no_verdict(counts):
    one, two = (
        setting(label, *([base + 0.01 * seed] * 4 for seed in range(count)))
        for label, base, count in (("A", 0.1, counts[0]), ("B", 0.9, counts[1]))
    )
    (found,) = compare_rewards([one, two])
    assert not VERDICT.search(found.head) and f"here are {counts[0]} and {counts[1]}" in found.text
    # Why is said once, and runs of one setting are never compared with each other.
    found = compare_rewards([setting(label, [0.1, 0.2 + 0.1 * place]) for place, label in enumerate("ABC")])
    assert [NO_VERDICT in one.text for one in found] == [True, False] and compare_rewards([one]) == []


def test_a_table_by_seed_has_the_mean_of_the_runs_of_a_seed():
    one = setting("A", [0.0, 0.5], [0.4, 0.1], [1.0, 2.0], seeds=(1, 2, 1))
    table = one.by_seed(one.table(keys.REWARD))
    assert {seed: values.tolist() for seed, values in table.items()} == {1: [0.5, 1.25], 2: [0.4, 0.1]}


def test_runs_of_one_seed_count_as_one():
    def settings(seeds):
        return [
            setting("A", [0.1, 0.1], [0.11, 0.11], [0.12, 0.12], seeds=seeds),
            setting("B", [0.5, 0.5], [0.51, 0.51], [0.52, 0.52], seeds=(1, 2, 3)),
        ]

    assert "higher" in compare_rewards(settings((1, 2, 3)))[0].head
    (found,) = compare_rewards(settings((1, 1, 2)))
    assert NO_VERDICT in found.text and "here are 2 and 3" in found.text


@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 1e-9, 1e6])
def test_constants_are_no_evidence(value):
    """Means of equal floats differ in their last bit: an interval of width 0 but for rounding."""
    one = setting("A", *([value] * steps for steps in (3, 3, 3)))
    two = setting("B", *([1.5 * value] * steps for steps in (3, 3, 3)))
    for pair in ([one, two], [two, one]):
        (found,) = compare_rewards(pair)
        assert not VERDICT.search(found.head)
        assert "nothing says how far chance goes" in found.text and "interval" not in found.text


@pytest.mark.parametrize(
    ("means", "head", "signs"),
    [
        ((0.1, 0.5), "The training reward of B is higher than that of A.", "+++"),
        ((0.5, 0.1), "The training reward of B is lower than that of A.", "−−−"),
        ((0.1, 0.105), "The training reward of B cannot be told apart from that of A.", "+−+"),
        ((0.105, 0.1), "The training reward of B cannot be told apart from that of A.", "−−+"),
    ],
)
def test_the_sentence_goes_the_way_of_the_number(means, head, signs):
    settings = [
        setting(label, *([mean + 0.01 * seed] * 2 for seed in range(3)))
        for label, mean in zip("AB", means, strict=True)
    ]
    (found,) = compare_rewards(settings)
    numbers = re.search(r"B minus A: ([+−][\d.]+), 95\u202f% interval ([−\d.]+) to ([−\d.]+)", found.text).groups()
    assert found.head == head and ["−" if one.startswith("−") else "+" for one in numbers] == [*signs]


def test_several_comparisons_are_corrected():
    settings = [
        setting("A", [0.1, 0.1], [0.11, 0.11], [0.12, 0.12]),
        setting("B", [0.5, 0.5], [0.51, 0.51], [0.52, 0.52]),
        setting("C", [0.11, 0.1], [0.12, 0.1], [0.13, 0.1]),
    ]
    found = compare_rewards(settings)
    assert [one.head for one in found] == [
        "The training reward of B is higher than that of A.",
        "The training reward of C cannot be told apart from that of A.",
    ]
    assert all("Holm’s over 2 comparisons" in one.text for one in found)


def test_the_baseline_is_grpo_or_what_a_run_or_a_method_names(tmp_path):
    runs = (("mine", "acpo", 1), ("theirs", "grpo", 1), ("again", "grpo", 2), ("third", "bapo", 1))
    folders = [
        with_record(tmp_path / name, method, seed, [0.1 + 0.1 * index] * 3)
        for index, (name, method, seed) in enumerate(runs)
    ]
    settings = settings_of([read_run(folder) for folder in folders])
    names = {None: "GRPO", "ACPO": "ACPO", "again": "GRPO", "third": "BAPO"}
    assert {name: baseline_of(settings, name).label for name in names} == names

    said = clipx("report", *folders, "--out", tmp_path / "out", "--baseline", "third")
    assert said.count("The training reward was 0.400 in BAPO, seed 1 and") == 2
    assert "Rewards are compared with those of BAPO" in page_of(tmp_path / "out")
    said = clipx("report", *folders, "--out", tmp_path / "none", "--baseline", "dgpo", code=1)
    assert not (tmp_path / "none").exists() and "--baseline dgpo: no such run or method." in said
    assert "The runs: mine, theirs, again, third. The methods: acpo, grpo, bapo." in said
    # Two settings of one method.
    write_record(folders[3] / "metrics.jsonl", {"clipx": {"method": "acpo", "alpha": 2.0}, "data": {"seed": 1}})
    said = clipx("report", folders[0], folders[3], "--out", tmp_path / "out", "--baseline", "acpo", code=1)
    assert "--baseline acpo: 2 settings have that name" in said and "mine, third" in said
