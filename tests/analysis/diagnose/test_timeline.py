"""What changed first in a run, and where two runs part: made-up logs whose changes begin at known steps. Not covered:
how often healthy logs have a change (benchmarks/diagnosis.py counts them).
"""

import numpy
import pandas
import pytest

from tests.analysis.runs.commands import answer, clipx
from tests.analysis.runs.example_runs import write_log
from verl_clipx.analysis.diagnose.parting import find_parting, say_where
from verl_clipx.analysis.diagnose.timeline import find_changes
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run import Run


def log_of(steps: int = 60, noise: float = 0.1, **columns) -> pandas.DataFrame:
    """Noise, relative, around columns that are functions of the step; a name's __ stands for /."""
    generator = numpy.random.default_rng(0)
    at = numpy.arange(1, steps + 1)
    values = {
        name.replace("__", "/"): of(at) * (1 + noise * generator.uniform(-1, 1, steps)) for name, of in columns.items()
    }
    return pandas.DataFrame(values, index=pandas.RangeIndex(1, steps + 1, name="step"))


def from_step(step: int, before: float, after: float):
    return lambda at: numpy.where(at < step, before, after)


TRIGGER = {
    "actor__grad_norm": from_step(20, 0.3, 4.5),
    "health__cut_responses": from_step(22, 0.02, 0.42),
    "critic__score__mean": from_step(30, 0.5, 0.02),
    "actor__entropy": lambda at: 1 - 0.01 * at,
    "timing_s__step": from_step(9, 1.0, 99.0),
}


def test_the_trigger_stands_before_the_collapse_and_neither_trends_nor_clocks_do(tmp_path):
    rows = log_of(actor__pg_loss=from_step(9, 0.1, 0.1), **TRIGGER).to_dict("records")
    write_log(tmp_path / "run/metrics.jsonl", rows)
    found = answer("diagnose", tmp_path / "run")["changes"]
    steps = {"actor/grad_norm": 20, "health/cut_responses": 22, "critic/score/mean": 30}
    assert {one["key"]: one["step"] for one in found} == steps
    assert (found[0]["before"], found[0]["after"]) == pytest.approx((0.3, 4.5), rel=0.1)
    said = clipx("diagnose", tmp_path / "run")
    assert said.index("step 20: actor/grad_norm 0.3") < said.index("step 22: health/cut")
    short = ((7, "from 8 steps on; this log has 7"), (9, "no logged value jumped and stayed, rose fourfold"))
    for count, text in short:
        write_log(tmp_path / "short/metrics.jsonl", rows[:count])
        assert text in clipx("diagnose", tmp_path / "short")


@pytest.mark.parametrize(
    ("steps", "noise", "of", "step"),
    [
        # Over 40 steps, which only a window of many steps shows.
        (300, 0.1, lambda at: 0.1 + 0.4 * numpy.clip((at - 150) / 40, 0, 1), 153),
        (1000, 0.1, lambda at: 0.1 + at / 1000, None),
        # Fourfold within 15 steps on the way, as no jump is; and less than threefold in as many.
        (60, 0.05, lambda at: 0.1 * 4.8 ** numpy.clip((at - 30) / 12, 0, 1), 31),
        (29, 0.1, lambda at: 0.1 * 4.8 ** numpy.clip((at - 5) / 24, 0, 1), None),
        # A tenth more, what has no range before it, and what doesn't last.
        (60, 0.01, from_step(30, 10.0, 11.0), None),
        (60, 0.1, from_step(5, 0.1, 0.9), None),
        (60, 0.1, from_step(59, 0.1, 0.9), None),
    ],
)
def test_what_is_a_change(steps, noise, of, step):
    found = [one.step for one in find_changes(log_of(steps, noise, x=of)) if one.stays]
    assert len(found) == (step is not None) and all(abs(at - step) <= 3 for at in found)


def test_noise_around_zero_is_no_change_and_a_level_that_leaves_it_is():
    """As verl's loss is where ratios are near 1: its few first values may lie close together."""
    generator = numpy.random.default_rng(3)
    # Noise whose spread grows, and whose first values lie together, in half of the logs by construction.
    for steps in (60, 300):
        for number in range(60):
            noise = generator.standard_normal(steps) * numpy.linspace(0.002, 0.012, steps)
            if number % 2:
                noise[:6] = 0.0005 * generator.standard_normal(6)
            log = pandas.DataFrame({"actor/pg_loss": noise, "x": noise}, index=range(1, steps + 1))
            assert find_changes(log) == [], (steps, number)
    # The loss goes around 0 in runs to come, though all its values so far are above.
    first = [0.0021, 0.0022, 0.0023, 0.0021, 0.0022, *(0.013 + 0.01 * (-1) ** number for number in range(20))]
    assert find_changes(pandas.DataFrame({"actor/pg_loss": first}, index=range(1, 26))) == []
    noise = 0.01 * generator.standard_normal(60)
    noise[30:] += 0.2
    (jump,) = find_changes(pandas.DataFrame({"actor/pg_loss": noise}, index=range(1, 61)))
    assert (jump.step, jump.stays) == (31, True)


@pytest.mark.parametrize(
    ("after", "of", "step"),
    [
        (0.35, lambda at: numpy.where(at == 30, 0.35, 0.1), 30),
        # Its last step, which nothing follows; twice; not yet after five steps; from nothing; before what stays.
        (0.35, lambda at: numpy.where(at == 60, 0.35, 0.1), 60),
        (None, lambda at: numpy.where(at == 30, 0.2, 0.1), None),
        (None, lambda at: numpy.where(at == 5, 0.9, 0.1), None),
        (None, lambda at: numpy.where(at == 30, 0.2, 0.0), None),
        (None, lambda at: numpy.where(at == 30, 0.35, numpy.where(at == 9, -0.2, 0.1)), None),
        (None, lambda at: numpy.where(at >= 30, 0.9, 0.1), None),
        (0.4, lambda at: numpy.where(at == 20, 0.4, numpy.where(at >= 40, 2.9, 0.1)), 20),
    ],
)
def test_a_spike_is_three_times_all_before(after, of, step):
    spikes = [one for one in find_changes(log_of(60, 0.0, x=of)) if not one.stays]
    assert [(one.step, one.after) for one in spikes] == ([] if step is None else [(step, after)])
    assert all(one.before == 0.1 for one in spikes)


def test_two_runs_of_one_seed_part_at_the_first_value_that_differs(tmp_path):
    one = log_of(critic__score__mean=from_step(99, 0.5, 0.5), timing_s__step=from_step(99, 1.0, 1.0))
    one.loc[3, keys.REWARD] = numpy.nan
    two = one.assign(**{"timing_s/step": 7.0})
    # Rounding is no difference, nor is what is not finite in both.
    two.loc[4, keys.REWARD] *= 1 + 1e-9
    assert find_parting(Run("a", one), Run("b", two)).step is None
    two.loc[31, keys.REWARD] = numpy.nan
    parting = find_parting(Run("a", one), Run("b", two, not_finite={keys.REWARD: [31]}))
    assert (parting.step, parting.same_samples, [*parting.values]) == (31, True, [keys.REWARD])
    for name, log in (("a", one), ("b", two)):
        write_log(tmp_path / name / "metrics.jsonl", log.assign(**{"actor/pg_loss": 0.1}).to_dict("records"))
    said = clipx("diagnose", tmp_path / "a", tmp_path / "b")
    assert "a and b begin with the same samples and part at step 31: critic/score/mean 0.518845 and nan." in said
    assert answer("diagnose", tmp_path / "a", tmp_path / "b")["parting"]["step"] == 31
    assert "name one, or two" in clipx("diagnose", *[tmp_path / "a"] * 3, code=2)


def test_runs_that_validate_in_different_steps_do_not_part():
    frequent = log_of(critic__score__mean=from_step(99, 0.5, 0.5), val=from_step(99, 0.3, 0.3))
    seldom = frequent.copy()
    seldom.loc[seldom.index % 5 != 0, "val"] = numpy.nan
    assert find_parting(Run("a", frequent), Run("b", seldom)).step is None
    seldom.loc[30, "val"] = 0.9
    assert find_parting(Run("a", frequent), Run("b", seldom)).step == 30


def test_an_equal_reward_alone_does_not_show_the_same_samples():
    first = log_of(critic__score__mean=from_step(99, 0.5, 0.5), actor__pg_loss=from_step(99, 0.1, 0.1))
    second = first.assign(**{"actor/pg_loss": 0.2})
    assert not find_parting(Run("a", first), Run("b", second)).same_samples
    lengths = {keys.LENGTH: 17.25}
    assert find_parting(Run("a", first.assign(**lengths)), Run("b", second.assign(**lengths))).same_samples


def test_runs_with_other_samples_are_compared_by_changes_of_their_difference():
    one, two = (log_of(critic__score__mean=from_step(step, 0.5, 0.9), x=lambda at: at * 0 + 1.0) for step in (99, 30))
    two = two * numpy.random.default_rng(1).uniform(0.99, 1.01, two.shape)
    found = find_parting(Run("a", one), Run("b", two))
    assert (found.step, found.same_samples, [(c.key, c.step) for c in found.changes]) == (1, False, [(keys.REWARD, 30)])
    assert "jumped and stayed:" in say_where("a", "b", found)[0]
    assert "can't be told from noise" in say_where("a", "b", find_parting(Run("a", one), Run("b", one * 1.001)))[0]
    with pytest.raises(ValueError, match="a and b have no logged training step, or no metric, in common"):
        find_parting(Run("a", one), Run("b", two.rename(index=lambda step: step + 100)))
