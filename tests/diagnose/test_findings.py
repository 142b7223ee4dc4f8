"""Sentences: each is said of made-up logs that it is true of, and not of those that it isn't. Numbers by hand.

Not covered: real runs.
"""

import numpy
import pandas
import pytest

from tests.runs.example_runs import write_log, write_validation
from verl_clipx.diagnose.findings import (
    collapses,
    entropy_changes,
    findings,
    rewards,
    same_signs,
    unequal_starts,
    went_as_estimated,
    what_bounds_did,
    what_clipping_did,
)
from verl_clipx.runs import keys
from verl_clipx.runs.folder import read_run
from verl_clipx.runs.held_out import held_out_rewards
from verl_clipx.runs.run import Run
from verl_clipx.runs.settings import Setting, settings_of


def run(columns, configuration=None, held_out=(), name="run", traces=None):
    length = max(map(len, columns.values()))
    log = pandas.DataFrame(columns, index=pandas.RangeIndex(1, length + 1, name="step"))
    return Run(name, log, configuration or {}, held_out=list(held_out), traces=traces)


def setting(*runs, label="M"):
    return Setting(label, list(runs))


def of(columns, **clipx):
    return setting(run(columns, {f"clipx.{name}": value for name, value in clipx.items()}))


def clip(low, high, **more):
    return {keys.CLIPPED_LOW: low, keys.CLIPPED_HIGH: high, **more}


def test_that_nothing_was_clipped_is_said():
    found = what_clipping_did(of(clip([0, 0], [0, 0])))
    assert found.head == "M clipped nothing." and "in 2 steps" in found.text


def test_how_much_is_clipped():
    found = what_clipping_did(of(clip([0.02, 0.06], [0.01, 0.03])))
    assert found.head == "M clipped 6.0\u202f% of the tokens."
    assert "4.0\u202f% of the tokens lay below" in found.text and "most in step 2, 9.0\u202f%" in found.text
    assert what_clipping_did(of(clip([0.001, 0.002], [0, 0]))).head == "M hardly clipped."
    # Within what is usual.
    assert what_clipping_did(of(clip([0.009, 0.008], [0, 0]))).head == "M clipped 0.85\u202f% of the tokens."


def test_a_soft_clip_keeps_a_gradient():
    masses = {keys.MASS["LN"]: [0.1], keys.MASS["HP"]: [0.1], keys.MASS["LP"]: [0.0], keys.MASS["HN"]: [0.0]}
    masses[keys.MASS["M"]] = [0.8]
    found = what_clipping_did(of(clip([0.02], [0.02], **masses)))
    assert found.head == "M kept a gradient outside its bounds." and "20.0\u202f%" in found.text


def test_a_loss_that_is_not_the_plugins_is_not_diagnosed():
    found = what_clipping_did(of({keys.ENTROPY: [1.0]}))
    assert "not known" in found.head and "+clipx=observe" in found.text


BAPO = {"contribution": "share", "target": 0.4, "lower_start": 0.6, "upper_start": 1.2}


def searched(low, high, before):
    after = {keys.SHARE_AFTER: before}
    return {keys.BOUND_LOW: low, keys.BOUND_HIGH: high, keys.SHARE_BEFORE: before, **after}


def test_bounds_of_a_search_that_stood_still():
    found = what_bounds_did(of(searched([0.6, 0.6], [1.2, 1.2], [0.5, 0.57]), **BAPO))
    assert found.head == "M’s bounds stood still." and "The lower bound was 0.60, the upper 1.20" in found.text


def test_a_search_that_moved():
    found = what_bounds_did(of(searched([0.6, 0.6], [1.2, 3.0], [0.3, 0.2]), **BAPO))
    assert found.head == "M moved its upper bound." and "the upper 1.20 to 3.00" in found.text


def bins(first, last):
    return {"actor/clipx/epsilon/bin_0": first, "actor/clipx/epsilon/bin_1": last}


def test_bounds_by_probability():
    found = what_bounds_did(of(bins([0.5, 1.7], [0.2, 0.3])))
    assert "wide where the policy was unsure" in found.head
    assert "0.50 to 1.70 for tokens of probability below 0.5 and 0.20 to 0.30 above" in found.text
    assert "hardly differed" in what_bounds_did(of(bins([0.3, 0.4], [0.3, 0.3]))).head
    assert "stood still" in what_bounds_did(of(bins([0.2, 0.2], [0.2, 0.2]))).head
    assert what_bounds_did(of(clip([0.1], [0.1]))) is None


def estimated(estimate, entropy):
    return of({keys.ENTROPY_ESTIMATE: estimate, keys.ENTROPY: entropy})


def test_a_steps_estimate_goes_with_the_change_to_the_next_step():
    # Falls by 0.5, rises by 0.25, stands still; what comes after the last step is not known.
    found = estimated([-2.0, -1.0, 4.0, 3.0], [1.0, 0.5, 0.75, 0.75])
    changes = entropy_changes(found)
    assert changes.index.tolist() == [1, 2, 3]
    assert changes.estimate.tolist() == [-2, -1, 4] and changes.change.tolist() == [-0.5, 0.25, 0]
    assert same_signs(found) == (1, 2)


def test_the_change_over_a_step_that_is_not_in_the_log_is_not_known():
    assert entropy_changes(estimated([-1.0] * 3, [1.0, float("nan"), 0.25])).empty


FALLING = [1.0 - 0.1 * step for step in range(7)]


def seeds_of(*estimates, label="M", entropy=FALLING):
    """A setting with a seed for each constant estimate."""
    runs = (
        run({keys.ENTROPY_ESTIMATE: [one] * len(entropy), keys.ENTROPY: entropy}, {"data.seed": seed})
        for seed, one in enumerate(estimates, 1)
    )
    return setting(*runs, label=label)


def test_whether_entropy_moved_as_estimated():
    # Of six seeds all alike have a probability of 2 / 64, below 0.05; five, or five of six, do not.
    assert went_as_estimated([seeds_of(*[-1.0] * 6)]) == (
        "Entropy moved the way of the Entropy-Clip estimate in most steps of 6 of 6 seeds"
    )
    assert "against the Entropy-Clip estimate in most steps of 6 of 6" in went_as_estimated([seeds_of(*[1.0] * 6)])
    for few in (seeds_of(*[-1.0] * 5), seeds_of(1.0, *[-1.0] * 5)):
        assert went_as_estimated([few]).startswith(
            "The Entropy-Clip estimate had the sign of entropy’s change in 30 of"
        )
    assert "in 0 of 0 steps" in went_as_estimated([estimated([-1.0] * 3, [1.0] * 3)])


def test_a_seed_of_two_settings_is_one_and_runs_of_unknown_seed_are_not():
    assert "in 36 of 36 steps" in went_as_estimated([seeds_of(*[-1.0] * 3, label=label) for label in "AB"])
    unknown = [setting(*(estimated([-1.0] * 7, FALLING).runs * 3), label=label) for label in "AB"]
    assert "6 of 6 seeds" in went_as_estimated(unknown)


@pytest.mark.parametrize("steps", [8, 200])
def test_the_steps_of_one_run_are_no_evidence_however_many(steps):
    """An estimate and an entropy that keep their directions, which chance has drawn, agree in all steps or in none."""
    falling = [1.0 - step / steps for step in range(steps)]
    draw = numpy.random.default_rng(0)
    claims = [
        "seeds" in went_as_estimated([seeds_of(*draw.choice([-1.0, 1.0], 6), entropy=falling)]) for _ in range(60)
    ]
    # Of 60 at most 5 % are expected to claim something, 3; 9 is the 99.9 % quantile.
    assert sum(claims) <= 9


def rewarded(*runs, label="M"):
    return setting(
        *(run({keys.REWARD: values}, name=f"{label}{index}") for index, values in enumerate(runs)), label=label
    )


def test_equal_rewards_are_said_to_be_equal():
    one, two = rewarded([0.1, 0.3, 0.5], label="A"), rewarded([0.1, 0.3, 0.5], label="B")
    assert rewards([one, two])[0] == ("The training rewards of A0 and B0 are equal.", "All of them are, over 3 steps.")


def test_a_run_alone_is_compared_with_its_start(tmp_path):
    write_validation(tmp_path, {0: [(0.0,)] * 9 + [(1.0,)], 5: [(1.0,)] * 9 + [(0.0,)]})
    alone = setting(run({keys.REWARD: [0.1, 0.2]}, held_out=held_out_rewards(tmp_path)))
    assert rewards([alone])[0].head == "The held-out reward rose."
    write_validation(tmp_path, {5: [(0.0,)] * 8 + [(1.0,)] * 2})
    alone = setting(run({keys.REWARD: [0.1, 0.2]}, held_out=held_out_rewards(tmp_path)))
    assert rewards([alone])[0].head == "The held-out reward did not clearly change."
    assert rewards([rewarded([0.1, 0.2])]) == []


def held_out(folder, label, *runs):
    """A setting whose runs were validated: by step, the scores of each problem's samples."""
    for index, scores in enumerate(runs):
        write_validation(folder / f"{label}{index}", scores)
    rewarded = {keys.REWARD: [0.1]}
    return setting(
        *(
            run(rewarded, held_out=held_out_rewards(folder / f"{label}{index}"), name=f"{label}{index}")
            for index in range(len(runs))
        ),
        label=label,
    )


def test_held_out_problems_of_two_runs_are_compared_one_by_one(tmp_path):
    one = held_out(tmp_path, "A", {0: [(0,), (0,), (0,)], 4: [(0, 1), (0, 0), (1, 1)]})
    # The same step and the same problems; differences 0.5, 0.5, 0: mean 1/3, s / sqrt(3) = 1/6, t(0.975, 2) = 4.302653.
    two = held_out(tmp_path, "B", {0: [(0,), (0,), (0,)], 4: [(1, 1), (0, 1), (1, 1)], 6: [(0,), (0,), (0,)]})
    (found,) = rewards([one, two])
    assert found.head == "The held-out reward was 0.500 in A0 and 0.833 in B0."
    assert "over 3 problems after step 4; the latter minus the former: +0.333" in found.text
    assert "95\u202f% interval −0.384 to 1.050 over problems, which speaks only of these runs" in found.text


def test_held_out_problems_are_compared_over_seeds_and_problems(tmp_path):
    # Means of the seeds 0.5, 0.625, 0.375 and 0.75, 0.875, 1.
    one = held_out(
        tmp_path, "A", *({4: [(a,), (b,), (c,), (d,)]} for a, b, c, d in ((1, 0, 1, 0), (1, 0, 1, 0.5), (1, 0, 0.5, 0)))
    )
    two = held_out(
        tmp_path, "B", *({4: [(a,), (b,), (c,), (d,)]} for a, b, c, d in ((1, 1, 1, 0), (1, 1, 1, 0.5), (1, 1, 1, 1)))
    )
    (found,) = rewards([one, two])
    assert "is 0.500 with A and 0.875 with B. B minus A: +0.375" in found.text
    assert "over seeds and problems, 3 and 3 seeds" in found.text


FELL, KEPT = [0.4] * 4 + [0.0] * 3, [0.4, 0.41] * 3 + [0.4]


def test_collapsed_seeds_are_counted_with_an_exact_interval():
    # Of 4 and 4 seeds all and none: Boschloo's p is 2 / 256.
    one, two = rewarded(*[KEPT] * 4, label="A"), rewarded(*[FELL] * 4, label="B")
    found = collapses([one, two])
    assert found.head == "4 of 4 seeds of B collapsed."
    assert "A: 0 of 4, exact 95\u202f% interval 0.00\u202f% to 60.2\u202f%." in found.text
    assert "B: 4 of 4 (from step 5, 5, 5, 5 on), exact 95" in found.text and "Go back to a checkpoint" in found.text
    # Once, not in each run's diagnosis too.
    assert [one.head for one in findings([one, two]) if "collapse" in one.head] == [found.head]
    assert "B against A: p 0.008." in found.text and "3 seeds holds the true difference in about 64 %" in found.text


def test_that_no_seed_collapsed_is_said_where_there_is_a_verdict():
    one, two = (rewarded(*[KEPT] * 3, label=label) for label in "AB")
    found = collapses([one, two])
    assert (
        found.head == "No seed collapsed." and found.text.count("0 of 3") == 2 and "B against A: p 1.000." in found.text
    )
    assert collapses([one]) is None and collapses([one, rewarded(KEPT, label="B")]) is None
    assert found in findings([one, two])


def test_below_three_seeds_only_the_diagnosis_says_that_a_run_collapsed():
    settings = [rewarded(FELL, KEPT, label="A"), rewarded(KEPT, label="B")]
    assert collapses(settings) is None
    assert sum("collapse" in one.head for one in findings(settings)) == 1


def test_a_seed_of_which_one_run_collapsed_did():
    runs = ((KEPT, 1), (FELL, 1), (KEPT, 2), (KEPT, 3))
    one = setting(*(run({keys.REWARD: values}, {"data.seed": seed}) for values, seed in runs), label="A")
    assert collapses([one]).head == "1 of 3 seeds of A collapsed."


@pytest.mark.parametrize(
    "other",
    [{0: [(0,), (1,)]}, {4: [(0,), (1,), (1,)]}, {5: [(0,), (1,)]}, {}],
    ids=["start", "problems", "step", "none"],
)
def test_what_was_not_validated_alike_is_not_compared(tmp_path, other):
    one = held_out(tmp_path, "A", {0: [(0,), (1,)], 4: [(0,), (1,)]})
    assert rewards([one, held_out(tmp_path, "B", other)]) == []


def test_a_seed_that_did_not_fix_the_samples():
    first, second = ({"data.seed": 1}, {"data.seed": 2})
    one = setting(run({keys.REWARD: [0.188, 0.3]}, first, name="one"))
    two = setting(run({keys.REWARD: [0.117, 0.3]}, first, name="two"))
    assert "0.188 in one and 0.117 in two" in unequal_starts([one, two]).text
    assert unequal_starts([one, one]) is None
    assert unequal_starts([one, setting(run({keys.REWARD: [0.117]}, second))]) is None


def test_tokens_come_before_rewards():
    heads = [found.head for found in findings([of(clip([0.1], [0.1], **{keys.REWARD: [0.1]}))])]
    assert heads[0].startswith("M clipped")


def test_what_holds_of_several_runs_is_said_once(tmp_path):
    for name, cut in (("a-seed1", 0.25), ("a-seed2", 0.5), ("b", 0.0)):
        steps = [{"actor/pg_loss": 0.1, "health/cut_responses": cut, "health/alike_prompts": 0.0} for _ in range(8)]
        write_log(tmp_path / name / "metrics.jsonl", steps)
    found = findings(settings_of([read_run(tmp_path / name) for name in ("a-seed1", "a-seed2", "b")]))
    (cut,) = [one for one in found if "responses cut at the limit" in one.head]
    assert cut.head == "2 of 3 runs: responses cut at the limit."
    assert "a-seed1 from step 1 on: health/cut_responses 0.25" in cut.text
    assert "a-seed2 from step 1 on: health/cut_responses 0.5" in cut.text and cut.text.count("See docs/") == 1
