"""What changed first in a run, and where two runs part: made-up logs whose changes begin at known steps. Not covered:
how often healthy logs have a change (benchmarks/diagnosis.py counts them).
"""

from collections.abc import Callable, Mapping

import numpy
import pandas
import pytest

from tests.analysis.runs.commands import answer, clipx
from tests.analysis.runs.example_runs import write_log
from tests.messages import assert_names
from verl_clipx.analysis.diagnose.parting import find_parting, say_where
from verl_clipx.analysis.diagnose.timeline import find_changes
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run import Run

# Takes training steps and returns a metric's values in them.
ValuesOfSteps = Callable[[numpy.ndarray], numpy.ndarray]


def make_log(columns: Mapping[str, ValuesOfSteps], *, steps: int = 60, noise: float = 0.1) -> pandas.DataFrame:
    """Return a log of made-up metrics.

    Args:
        columns: from a metric to its values without noise.
        steps: how many.
        noise: how far a value is from that without noise, at most, as a part of it.
    """
    generator = numpy.random.default_rng(0)
    numbers = numpy.arange(1, steps + 1)
    values = {}
    for metric, values_of_steps in columns.items():
        values[metric] = values_of_steps(numbers) * (1 + noise * generator.uniform(-1, 1, steps))
    return pandas.DataFrame(values, index=pandas.RangeIndex(1, steps + 1, name="step"))


def jump_at(step: int, before: float, after: float) -> ValuesOfSteps:
    """Return a function whose value changes at a step."""
    return lambda steps: numpy.where(steps < step, before, after)


def stay_at(value: float) -> ValuesOfSteps:
    """Return a function that has the same value in each step."""
    return lambda steps: numpy.full(steps.shape, value)


def fall_slowly(steps: numpy.ndarray) -> numpy.ndarray:
    return 1 - 0.01 * steps


# A gradient jumps, then responses are cut, then the reward collapses.
COLLAPSE_WITH_TRIGGER = {
    keys.LOSS: stay_at(0.1),
    keys.GRADIENT_NORM: jump_at(20, 0.3, 4.5),
    keys.CUT: jump_at(22, 0.02, 0.42),
    keys.REWARD: jump_at(30, 0.5, 0.02),
    keys.ENTROPY: fall_slowly,
    "timing_s/step": jump_at(9, 1.0, 99.0),
}


def test_the_trigger_stands_before_the_collapse_and_neither_trends_nor_clocks_do(tmp_path):
    write_log(tmp_path / "run/metrics.jsonl", make_log(COLLAPSE_WITH_TRIGGER).to_dict("records"))
    found_changes = answer("diagnose", tmp_path / "run")["changes"]
    assert {change["key"]: change["step"] for change in found_changes} == {
        keys.GRADIENT_NORM: 20,
        keys.CUT: 22,
        keys.REWARD: 30,
    }
    gradient = found_changes[0]
    assert gradient["before"] == pytest.approx(0.3, rel=0.1)
    assert gradient["after"] == pytest.approx(4.5, rel=0.1)
    output = clipx("diagnose", tmp_path / "run")
    assert output.index("step 20: actor/grad_norm 0.3") < output.index("step 22: health/cut")


@pytest.mark.parametrize(
    ("steps", "facts"),
    [
        (7, ["what changed first", "from 8 steps on", "this log has 7"]),
        (9, ["no logged value jumped and stayed", "rose fourfold"]),
    ],
)
def test_a_log_without_a_change_says_whether_it_is_too_short_for_one(tmp_path, steps, facts):
    rows = make_log(COLLAPSE_WITH_TRIGGER).to_dict("records")
    write_log(tmp_path / "short/metrics.jsonl", rows[:steps])
    assert_names(clipx("diagnose", tmp_path / "short"), *facts)


def rise_from_150_to_190(steps: numpy.ndarray) -> numpy.ndarray:
    return 0.1 + 0.4 * numpy.clip((steps - 150) / 40, 0, 1)


def rise_throughout(steps: numpy.ndarray) -> numpy.ndarray:
    return 0.1 + steps / 1000


def rise_fourfold_in_12_steps(steps: numpy.ndarray) -> numpy.ndarray:
    return 0.1 * 4.8 ** numpy.clip((steps - 30) / 12, 0, 1)


def rise_fourfold_in_24_steps(steps: numpy.ndarray) -> numpy.ndarray:
    return 0.1 * 4.8 ** numpy.clip((steps - 5) / 24, 0, 1)


@pytest.mark.parametrize(
    ("values_of_steps", "steps", "noise", "change_at"),
    [
        # Only a window of many steps shows it.
        pytest.param(rise_from_150_to_190, 300, 0.1, 153, id="rise over 40 steps"),
        pytest.param(rise_throughout, 1000, 0.1, None, id="trend"),
        # It is no jump, but rises fourfold within 15 steps on the way.
        pytest.param(rise_fourfold_in_12_steps, 60, 0.05, 31, id="fourfold in 12 steps"),
        pytest.param(rise_fourfold_in_24_steps, 29, 0.1, None, id="less than threefold in 15 steps"),
        pytest.param(jump_at(30, 10.0, 11.0), 60, 0.01, None, id="a tenth more"),
        pytest.param(jump_at(5, 0.1, 0.9), 60, 0.1, None, id="too few steps before"),
        pytest.param(jump_at(59, 0.1, 0.9), 60, 0.1, None, id="too few steps since"),
    ],
)
def test_a_change_that_stays_is_a_jump_or_a_fourfold_rise(values_of_steps, steps, noise, change_at):
    log = make_log({"x": values_of_steps}, steps=steps, noise=noise)
    found_steps = [change.step for change in find_changes(log) if change.stays]
    if change_at is None:
        assert found_steps == []
    else:
        assert found_steps == [pytest.approx(change_at, abs=3)]


@pytest.mark.parametrize("starts_quietly", [False, True])
@pytest.mark.parametrize("steps", [60, 300])
def test_noise_around_zero_is_no_change_though_its_spread_grows(steps, starts_quietly):
    """As verl's loss is where ratios are near 1. Its first values may lie close together."""
    generator = numpy.random.default_rng(3)
    for number in range(60):
        noise = generator.standard_normal(steps) * numpy.linspace(0.002, 0.012, steps)
        if starts_quietly:
            noise[:6] = 0.0005 * generator.standard_normal(6)
        log = pandas.DataFrame({keys.LOSS: noise, "x": noise}, index=range(1, steps + 1))
        assert find_changes(log) == [], number


def test_the_loss_goes_around_zero_though_all_its_values_so_far_are_above():
    loss = [0.0021, 0.0022, 0.0023, 0.0021, 0.0022, *(0.013 + 0.01 * (-1) ** number for number in range(20))]
    assert find_changes(pandas.DataFrame({keys.LOSS: loss}, index=range(1, 26))) == []


def test_a_level_that_leaves_noise_around_zero_is_a_change():
    loss = 0.01 * numpy.random.default_rng(3).standard_normal(60)
    loss[30:] += 0.2
    (jump,) = find_changes(pandas.DataFrame({keys.LOSS: loss}, index=range(1, 61)))
    assert jump.step == 31
    assert jump.stays


def values_but(usual: float, exceptions: Mapping[int, float]) -> ValuesOfSteps:
    """Return a function that has a usual value, and another one in single steps."""
    return lambda steps: numpy.array([exceptions.get(int(step), usual) for step in steps])


def spike_at_20_and_jump_at_40(steps: numpy.ndarray) -> numpy.ndarray:
    return numpy.where(steps == 20, 0.4, numpy.where(steps >= 40, 2.9, 0.1))


@pytest.mark.parametrize(
    ("values_of_steps", "spikes"),
    [
        pytest.param(values_but(0.1, {30: 0.35}), [(30, 0.35)], id="in the middle"),
        pytest.param(values_but(0.1, {60: 0.35}), [(60, 0.35)], id="in the last step"),
        pytest.param(values_but(0.1, {30: 0.2}), [], id="twice as high"),
        pytest.param(values_but(0.1, {5: 0.9}), [], id="in step 5"),
        pytest.param(values_but(0.0, {30: 0.2}), [], id="from nothing"),
        pytest.param(values_but(0.1, {9: -0.2, 30: 0.35}), [], id="after a negative value"),
        pytest.param(jump_at(30, 0.1, 0.9), [], id="that stays"),
        pytest.param(spike_at_20_and_jump_at_40, [(20, 0.4)], id="before what stays"),
    ],
)
def test_a_spike_is_three_times_all_before(values_of_steps, spikes):
    log = make_log({"x": values_of_steps}, noise=0.0)
    found_spikes = [change for change in find_changes(log) if not change.stays]
    assert [(spike.step, spike.after) for spike in found_spikes] == spikes
    assert all(spike.before == 0.1 for spike in found_spikes)


def make_log_of_constant_reward() -> pandas.DataFrame:
    """Return a log that has no reward in step 3."""
    log = make_log({keys.REWARD: stay_at(0.5), "timing_s/step": stay_at(1.0)})
    log.loc[3, keys.REWARD] = numpy.nan
    return log


def test_runs_that_differ_in_clocks_and_rounding_do_not_part():
    first = make_log_of_constant_reward()
    second = first.assign(**{"timing_s/step": 7.0})
    second.loc[4, keys.REWARD] *= 1 + 1e-9
    assert find_parting(Run("a", first), Run("b", second)).step is None


def test_two_runs_of_one_seed_part_at_the_first_value_that_differs(tmp_path):
    first = make_log_of_constant_reward()
    second = first.copy()
    second.loc[31, keys.REWARD] = numpy.nan
    parting = find_parting(Run("a", first), Run("b", second, not_finite={keys.REWARD: [31]}))
    assert parting.step == 31
    assert parting.same_samples
    assert [*parting.values] == [keys.REWARD]

    for name, log in (("a", first), ("b", second)):
        write_log(tmp_path / name / "metrics.jsonl", log.assign(**{keys.LOSS: 0.1}).to_dict("records"))
    assert answer("diagnose", tmp_path / "a", tmp_path / "b")["parting"]["step"] == 31
    output = clipx("diagnose", tmp_path / "a", tmp_path / "b")
    values = f"{keys.REWARD} {first.loc[31, keys.REWARD]:.6g} and nan"
    assert_names(output, "a and b", "same samples", f"part at step 31: {values}")


def test_three_runs_are_not_compared(tmp_path):
    write_log(tmp_path / "a/metrics.jsonl", make_log_of_constant_reward().to_dict("records"))
    output = clipx("diagnose", *[tmp_path / "a"] * 3, code=2)
    assert_names(output, "3 runs", "name one, or two")


def test_runs_that_validate_in_different_steps_part_only_at_a_validation_of_both():
    frequent = make_log({keys.REWARD: stay_at(0.5), "val": stay_at(0.3)})
    seldom = frequent.copy()
    seldom.loc[seldom.index % 5 != 0, "val"] = numpy.nan
    assert find_parting(Run("a", frequent), Run("b", seldom)).step is None
    seldom.loc[30, "val"] = 0.9
    assert find_parting(Run("a", frequent), Run("b", seldom)).step == 30


def test_an_equal_reward_shows_the_same_samples_only_with_an_equal_length():
    first = make_log({keys.REWARD: stay_at(0.5), keys.LOSS: stay_at(0.1)})
    second = first.assign(**{keys.LOSS: 0.2})
    assert not find_parting(Run("a", first), Run("b", second)).same_samples
    length = {keys.LENGTH: 17.25}
    assert find_parting(Run("a", first.assign(**length)), Run("b", second.assign(**length))).same_samples


def make_logs_of_other_samples() -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """Return two logs with noise of their own, of which the second one's reward jumps at step 30."""
    first = make_log({keys.REWARD: stay_at(0.5), "x": stay_at(1.0)})
    second = make_log({keys.REWARD: jump_at(30, 0.5, 0.9), "x": stay_at(1.0)})
    return first, second * numpy.random.default_rng(1).uniform(0.99, 1.01, second.shape)


def test_runs_with_other_samples_are_compared_by_jumps_of_their_difference():
    first, second = make_logs_of_other_samples()
    parting = find_parting(Run("a", first), Run("b", second))
    assert parting.step == 1
    assert not parting.same_samples
    assert [(change.key, change.step) for change in parting.changes] == [(keys.REWARD, 30)]
    assert_names(say_where("a", "b", parting)[0], "b minus a", "jumped and stayed")


def test_a_difference_without_a_jump_is_not_told_from_noise():
    first, _ = make_logs_of_other_samples()
    parting = find_parting(Run("a", first), Run("b", first * 1.001))
    assert_names(say_where("a", "b", parting)[0], "no lasting jump", "can't be told from noise")


def test_runs_without_a_common_step_are_refused():
    first, second = make_logs_of_other_samples()
    later = second.rename(index=lambda step: step + 100)
    with pytest.raises(ValueError, match="no logged training step, or no metric, in common") as error:
        find_parting(Run("a", first), Run("b", later))
    assert_names(str(error.value), "a and b")
