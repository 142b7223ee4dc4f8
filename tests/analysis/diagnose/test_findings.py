"""Sentences: each is said of made-up logs that it is true of, and not of those that it isn't. Numbers by hand. Not
covered: real runs.
"""

import itertools

import pandas
import pytest

from tests.analysis.runs.example_runs import write_log, write_validation
from verl_clipx.analysis.diagnose.findings import compare_collapses, compare_rewards, find_alarms
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.analysis.runs.held_out import read_held_out_rewards
from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.settings import Setting, settings_of


def findings(settings):
    """All sentences of a page."""
    return [*find_alarms(settings), *compare_rewards(settings)]


def run(columns, configuration=None, held_out=(), name="run"):
    length = max(map(len, columns.values()))
    log = pandas.DataFrame(columns, index=pandas.RangeIndex(1, length + 1, name="step"))
    return Run(name, log, configuration or {}, held_out=list(held_out))


def of(columns, label="M", **clipx):
    """A setting of one run."""
    return Setting(label, [run(columns, {f"clipx.{name}": value for name, value in clipx.items()})])


def setting(label, *rewards, seeds=()):
    """A setting of runs with these training rewards, and with seeds in their records where they are given."""
    of_runs = enumerate(itertools.zip_longest(rewards, seeds))
    records = ((index, one, {"data.seed": seed} if seed else {}) for index, (one, seed) in of_runs)
    return Setting(label, [run({keys.REWARD: one}, record, name=f"{label}{index}") for index, one, record in records])


def held_out(folder, label, *runs):
    """A setting whose runs were validated: by step, the scores of each problem's samples."""
    folders = [folder / f"{label}{index}" for index in range(len(runs))]
    for one, scores in zip(folders, runs, strict=True):
        write_validation(one, scores)
    return Setting(
        label, [run({keys.REWARD: [0.1]}, held_out=read_held_out_rewards(one), name=one.name) for one in folders]
    )


@pytest.mark.parametrize(
    ("right", "what"), [(9, "The held-out reward rose."), (2, "The held-out reward did not clearly change.")]
)
def test_a_run_alone_is_compared_with_its_start(tmp_path, right, what):
    one = held_out(tmp_path, "A", {0: [(0.0,)] * 9 + [(1.0,)], 5: [(1.0,)] * right + [(0.0,)] * (10 - right)})
    assert compare_rewards([one])[0].head == what
    assert compare_rewards([setting("M", [0.1, 0.2])]) == []
    equal = compare_rewards([setting(label, [0.1, 0.3, 0.5]) for label in "AB"])
    assert equal[0] == ("The training rewards of A and B are equal.", "All of them are, over 3 steps.")


def test_held_out_problems_of_two_runs_are_compared_one_by_one(tmp_path):
    one = held_out(tmp_path, "A", {0: [(0,), (0,), (0,)], 4: [(0, 1), (0, 0), (1, 1)]})
    # The same step and the same problems; differences 0.5, 0.5, 0: mean 1/3, s / sqrt(3) = 1/6, t(0.975, 2) = 4.302653.
    two = held_out(tmp_path, "B", {0: [(0,), (0,), (0,)], 4: [(1, 1), (0, 1), (1, 1)], 6: [(0,), (0,), (0,)]})
    (found,) = compare_rewards([one, two])
    assert found.head == "The held-out reward was 0.500 in A and 0.833 in B."
    assert "over 3 problems after step 4; the latter minus the former: +0.333" in found.text
    assert "95\u202f% interval −0.384 to 1.050 over problems, which speaks only of these runs" in found.text


def test_held_out_problems_are_compared_over_seeds_and_problems(tmp_path):
    # Means of the seeds 0.5, 0.625, 0.375 and 0.75, 0.875, 1.
    scores = {"A": ((1, 0, 1, 0), (1, 0, 1, 0.5), (1, 0, 0.5, 0)), "B": ((1, 1, 1, 0), (1, 1, 1, 0.5), (1, 1, 1, 1))}
    one, two = (held_out(tmp_path, name, *({4: [(s,) for s in run]} for run in runs)) for name, runs in scores.items())
    (found,) = compare_rewards([one, two])
    assert "is 0.500 with A and 0.875 with B. B minus A: +0.375" in found.text
    assert "over seeds and problems, 3 and 3 seeds" in found.text


@pytest.mark.parametrize(
    "other",
    [{0: [(0,), (1,)]}, {4: [(0,), (1,), (1,)]}, {5: [(0,), (1,)]}, {}],
    ids=["start", "problems", "step", "none"],
)
def test_what_was_not_validated_alike_is_not_compared(tmp_path, other):
    one = held_out(tmp_path, "A", {0: [(0,), (1,)], 4: [(0,), (1,)]})
    assert compare_rewards([one, held_out(tmp_path, "B", other)]) == []


FELL, KEPT = [0.4] * 4 + [0.0] * 3, [0.4, 0.41] * 3 + [0.4]


def test_collapsed_seeds_are_counted_with_an_exact_interval():
    # Of 4 and 4 seeds all and none: Boschloo's p is 2 / 256.
    one, two = setting("A", *[KEPT] * 4), setting("B", *[FELL] * 4)
    found = compare_collapses([one, two])
    assert found.head == "4 of 4 seeds of B collapsed."
    assert "A: 0 of 4, exact 95\u202f% interval 0.00\u202f% to 60.2\u202f%." in found.text
    assert "B: 4 of 4 (from step 5, 5, 5, 5 on), exact 95" in found.text and "Go back to a checkpoint" in found.text
    # Once, not in each run's diagnosis too.
    assert [one.head for one in findings([one, two]) if "collapse" in one.head] == [found.head]
    assert "B against A: p 0.008." in found.text and "3 seeds holds the true difference in about 64 %" in found.text
    # A seed of which one run collapsed did.
    one = setting("A", KEPT, FELL, KEPT, KEPT, seeds=(1, 1, 2, 3))
    assert compare_collapses([one]).head == "1 of 3 seeds of A collapsed."


def test_that_no_seed_collapsed_is_said_where_there_is_a_verdict():
    one, two = (setting(label, *[KEPT] * 3) for label in "AB")
    found = compare_collapses([one, two])
    assert found.head == "No seed collapsed."
    assert (found.head, found.text) in [(finding.head, finding.text) for finding in findings([one, two])]
    assert found.text.count("0 of 3") == 2 and "B against A: p 1.000." in found.text
    assert compare_collapses([one]) is None and compare_collapses([one, setting("B", KEPT)]) is None
    # Below three seeds only the diagnosis says that a run collapsed.
    settings = [setting("A", FELL, KEPT), setting("B", KEPT)]
    assert compare_collapses(settings) is None
    assert sum("collapse" in one.head for one in findings(settings)) == 1


def test_what_holds_of_several_runs_is_said_once(tmp_path):
    for name, cut in (("a-seed1", 0.25), ("a-seed2", 0.5), ("b", 0.0)):
        steps = [{"actor/pg_loss": 0.1, "health/cut_responses": cut, "health/alike_prompts": 0.0} for _ in range(8)]
        write_log(tmp_path / name / "metrics.jsonl", steps)
    found = findings(settings_of([read_run(tmp_path / name) for name in ("a-seed1", "a-seed2", "b")]))
    (cut,) = [one for one in found if "responses cut at the limit" in one.head]
    assert cut.head == "2 of 3 runs: responses cut at the limit."
    assert "a-seed1 from step 1 on: health/cut_responses 0.25" in cut.text
    assert "a-seed2 from step 1 on: health/cut_responses 0.5" in cut.text and cut.text.count("See docs/") == 1
