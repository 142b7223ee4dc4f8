"""The page's verdict on methods: none from runs of one setting (A/A), from constants or from one seed; its direction.

Covers: the stored logs of the 78 runs of docs/results, seed against seed; both signs of a difference; runs of one seed;
--baseline. Not covered: how often settings without a difference, or with one, get a verdict (tests/common/statistics).
"""

import functools
import itertools
import re
from pathlib import Path

import numpy
import pandas
import pytest

from tests.runs.commands import clipx, page_of
from tests.runs.example_runs import write_log, write_validation
from verl_clipx.diagnose.findings import rewards
from verl_clipx.runs import keys
from verl_clipx.runs.folder import read_run
from verl_clipx.runs.run import Run
from verl_clipx.runs.settings import Setting, baseline_of, settings_of
from verl_clipx.trainer.log import write_record

STORED = Path(__file__).parents[2] / "docs" / "results" / "cpu_small_steps.csv"
COLUMNS = {"reward": keys.REWARD, "entropy": keys.ENTROPY, "kl": keys.KL}
VERDICT = re.compile("told apart|higher|lower|more|less|ahead|behind|better|worse|best|worst")
NO_VERDICT = "That is no verdict on methods"


@functools.cache
def stored() -> dict[str, dict[int, pandas.DataFrame]]:
    """The logs of the stored runs, by preset and seed."""
    table = pandas.read_csv(STORED).rename(columns=COLUMNS)
    return {
        preset: {int(seed): rows.set_index("step")[[*COLUMNS.values()]] for seed, rows in of_preset.groupby("seed")}
        for preset, of_preset in table.groupby("preset")
    }


PAIRS = [(preset, *pair) for preset, runs in stored().items() for pair in itertools.combinations(runs, 2)]


def with_record(folder: Path, method: str, seed: int, rewards: list[float]) -> Path:
    log = write_log(folder / "metrics.jsonl", [{keys.REWARD: reward, keys.ENTROPY: 1.0} for reward in rewards])
    write_record(
        log, {"clipx": {"method": method}, "data": {"seed": seed}, "trainer": {"experiment_name": folder.name}}
    )
    return folder


def setting(label: str, *runs: list[float], seeds=()) -> Setting:
    """A setting of runs with these rewards."""
    return Setting(
        label,
        [
            Run(
                f"{label}{index}",
                pandas.DataFrame({keys.REWARD: rewards}, index=pandas.RangeIndex(1, len(rewards) + 1, name="step")),
                {"data.seed": seed} if seed else {},
            )
            for index, (rewards, seed) in enumerate(itertools.zip_longest(runs, seeds))
        ],
    )


def test_two_seeds_of_one_setting_give_no_verdict():
    """By their steps, taken as independent, 12 of the 78 pairs differ "significantly"."""
    assert len(PAIRS) == 78
    for preset, *seeds in PAIRS:
        runs = [Run(f"{preset}-seed{seed}", stored()[preset][seed]) for seed in seeds]
        (found,) = rewards(settings_of(runs))
        assert not VERDICT.search(found.head) and NO_VERDICT in found.text, found


@pytest.mark.slow
def test_the_page_of_two_seeds_of_one_setting_gives_no_verdict(tmp_path):
    """Two that differ most by their steps: +0.119, "0.056 to 0.182"."""
    folders = [tmp_path / f"gppo-seed{seed}" for seed in (1, 3)]
    for folder, seed in zip(folders, (1, 3), strict=True):
        write_log(folder / "metrics.jsonl", stored()["countdown_gppo_off"][seed].to_dict("records"))
    said = clipx("report", *folders, "--out", tmp_path / "out")
    page = page_of(tmp_path / "out")
    for text in (page, said):
        assert "The training reward was 0.049 in gppo-seed1 and 0.168 in gppo-seed3." in text and NO_VERDICT in text
        assert "told apart" not in text
    assert page.count("one seed: no verdict") == 2


def test_runs_of_one_setting_are_never_compared_with_each_other(tmp_path):
    folders = [with_record(tmp_path / f"grpo-{seed}", "grpo", seed, [0.1 * seed] * 5) for seed in (1, 2, 3)]
    settings = settings_of([read_run(folder) for folder in folders])
    assert len(settings) == 1 and rewards(settings) == []


def test_why_there_is_no_verdict_is_said_once():
    found = rewards([setting(label, [0.1, 0.2 + 0.1 * place]) for place, label in enumerate("ABC")])
    assert [NO_VERDICT in one.text for one in found] == [True, False]


@pytest.mark.parametrize("counts", [(1, 1), (1, 3), (3, 1), (2, 2), (2, 3)])
def test_fewer_than_three_seeds_give_no_verdict(counts):
    one, two = (
        setting(label, *([base + 0.01 * seed] * 4 for seed in range(count)))
        for label, base, count in (("A", 0.1, counts[0]), ("B", 0.9, counts[1]))
    )
    (found,) = rewards([one, two])
    assert not VERDICT.search(found.head) and f"here are {counts[0]} and {counts[1]}" in found.text


def test_a_table_by_seed_has_the_mean_of_the_runs_of_a_seed():
    """Seeds are numbers like steps are; and a table's only column is its mean."""
    one = setting("A", [0.0, 0.5], [0.4, 0.1], [1.0, 2.0], seeds=(1, 2, 1))
    table = one.by_seed(one.table(keys.REWARD))
    assert {seed: values.tolist() for seed, values in table.items()} == {1: [0.5, 1.25], 2: [0.4, 0.1]}


def test_runs_of_one_seed_count_as_one():
    def settings(seeds):
        return [
            setting("A", [0.1, 0.1], [0.11, 0.11], [0.12, 0.12], seeds=seeds),
            setting("B", [0.5, 0.5], [0.51, 0.51], [0.52, 0.52], seeds=(1, 2, 3)),
        ]

    assert "higher" in rewards(settings((1, 2, 3)))[0].head
    (found,) = rewards(settings((1, 1, 2)))
    assert NO_VERDICT in found.text and "here are 2 and 3" in found.text


@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 1e-9, 1e6])
def test_constants_are_no_evidence(value):
    """Means of equal floats differ in their last bit: an interval of width 0 but for rounding."""
    one = setting("A", *([value] * steps for steps in (3, 3, 3)))
    two = setting("B", *([1.5 * value] * steps for steps in (3, 3, 3)))
    for pair in ([one, two], [two, one]):
        (found,) = rewards(pair)
        assert not VERDICT.search(found.head)
        assert "nothing says how far chance goes" in found.text and "interval" not in found.text


def drawn(seed):
    """Two settings of three runs each, with a difference that a drawn sign and size decide."""
    draw = numpy.random.default_rng(seed)
    shift = draw.choice([-1, 1]) * draw.uniform(0.0, 0.3)
    runs = draw.uniform(-0.5, 0.5) + 0.02 * draw.standard_normal((2, 3, 6))
    return setting("A", *runs[0].tolist()), setting("B", *(runs[1] + shift).tolist())


def test_the_sentence_goes_the_way_of_the_number():
    words = set()
    for first, second in (
        pair for seed in range(60) for one, two in [drawn(seed)] for pair in ((one, two), (two, one))
    ):
        (found,) = rewards([first, second])
        means = [float(each.table(keys.REWARD).to_numpy().mean()) for each in (first, second)]
        sign, low, high = re.search(
            rf"{second.label} minus {first.label}: ([+−])[\d.]+, 95\u202f% interval ([−\d.]+) to ([−\d.]+)", found.text
        ).groups()
        assert sign == ("+" if means[1] > means[0] else "−")
        if "told apart" in found.head:
            assert low.startswith("−") and not high.startswith("−")
            continue
        word = "higher" if sign == "+" else "lower"
        words.add(word)
        assert found.head == f"The training reward of {second.label} is {word} than that of {first.label}."
        assert low.startswith("−") == high.startswith("−") == (sign == "−")
    assert words == {"higher", "lower"}


@pytest.mark.parametrize("sign", [1, -1])
def test_the_sentence_on_held_out_problems_goes_the_way_of_the_number(tmp_path, sign):
    for method, base in (("grpo", 0.5), ("acpo", 0.5 + 0.2 * sign)):
        for seed in (1, 2, 3):
            folder = with_record(tmp_path / f"{method}-seed{seed}", method, seed, [0.5, 0.5])
            scores = [(base + 0.01 * seed * (problem % 3),) for problem in range(12)]
            write_validation(folder / "validation", {2: scores})
    runs = [read_run(tmp_path / f"{method}-seed{seed}") for method in ("grpo", "acpo") for seed in (1, 2, 3)]
    (found,) = [one for one in rewards(settings_of(runs)) if "held-out" in one.head]
    assert found.head == f"The held-out reward of ACPO is {'higher' if sign > 0 else 'lower'} than that of GRPO."
    assert f"ACPO minus GRPO: {'+' if sign > 0 else '−'}0.200" in found.text


def test_several_comparisons_are_corrected():
    settings = [
        setting("A", [0.1, 0.1], [0.11, 0.11], [0.12, 0.12]),
        setting("B", [0.5, 0.5], [0.51, 0.51], [0.52, 0.52]),
        setting("C", [0.11, 0.1], [0.12, 0.1], [0.13, 0.1]),
    ]
    found = rewards(settings)
    assert [one.head for one in found] == [
        "The training reward of B is higher than that of A.",
        "The training reward of C cannot be told apart from that of A.",
    ]
    assert all("Holm’s over 2 comparisons" in one.text for one in found)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    runs = (("mine", "acpo", 1), ("theirs", "grpo", 1), ("again", "grpo", 2), ("third", "bapo", 1))
    return {
        name: with_record(folder / name, method, seed, [0.1 + 0.1 * index] * 3)
        for index, (name, method, seed) in enumerate(runs)
    }


def test_a_run_or_a_method_names_the_baseline(folders):
    settings = settings_of([read_run(folder) for folder in folders.values()])
    names = {None: "GRPO", "ACPO": "ACPO", "again": "GRPO", "third": "BAPO"}
    assert {name: baseline_of(settings, name).label for name in names} == names


def test_rewards_are_compared_with_the_baseline(folders, tmp_path):
    said = clipx("report", *folders.values(), "--out", tmp_path / "out", "--baseline", "third")
    assert said.count("The training reward was 0.400 in BAPO, seed 1 and") == 2
    assert "Rewards are compared with those of BAPO" in page_of(tmp_path / "out")


def test_a_baseline_that_is_not_there_is_refused_with_the_names_there_are(folders, tmp_path):
    said = clipx("report", *folders.values(), "--out", tmp_path / "out", "--baseline", "dgpo", code=1)
    assert not (tmp_path / "out").exists() and "--baseline dgpo: no such run or method." in said
    assert "The runs: mine, theirs, again, third. The methods: acpo, grpo, bapo." in said


def test_a_baseline_that_names_two_settings_is_refused(tmp_path):
    one, two = (with_record(tmp_path / name, "acpo", 1, [0.1, 0.2]) for name in ("one", "two"))
    write_record(two / "metrics.jsonl", {"clipx": {"method": "acpo", "alpha": 2.0}, "data": {"seed": 1}})
    said = clipx("report", one, two, "--out", tmp_path / "out", "--baseline", "acpo", code=1)
    assert "--baseline acpo: 2 settings have that name" in said and "one, two" in said
