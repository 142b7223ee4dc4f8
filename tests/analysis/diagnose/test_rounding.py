"""When a log's clipping can't be told from rounding: made-up shares and counts of clipped tokens, in all updates and in
the first one of a rollout batch, where nothing has moved. Not covered: the onset (test_rules.py); how often made-up
logs are taken for rounding (docs/dev/diagnosis_evidence.md).
"""

import pytest

from tests.analysis.diagnose.example_settings import (
    ACTOR,
    BINS,
    FLOOR_OF_2_PERCENT,
    FLOOR_TOKENS,
    FOUR_UPDATES_IN_SYNC,
    ONE_UPDATE_IN_SYNC,
    RECUT_TOKENS,
    find_rules,
    make_run,
)
from tests.messages import assert_names
from verl_clipx.analysis.diagnose.diagnosis import diagnose
from verl_clipx.analysis.diagnose.rules import ROUNDING
from verl_clipx.analysis.runs import keys

# All updates clip as much as rounding does in the first ones.
ALL_CLIPPING_IS_ROUNDING = FLOOR_OF_2_PERCENT | {keys.CLIPPED_LOW: 0.01, keys.CLIPPED_HIGH: 0.01}
STEPS = 12
NAN = float("nan")


@pytest.mark.parametrize(
    ("clipped_share", "tokens"),
    [
        pytest.param(0.05, 1000.0, id="later updates clip three times as much as the first"),
        pytest.param(0.02, 10.0, id="12 clipped tokens in five steps"),
    ],
)
def test_clipping_that_exceeds_rounding_or_is_of_few_tokens_is_no_finding(clipped_share, tokens):
    metrics = {
        keys.CLIPPED_LOW: clipped_share / 2,
        keys.CLIPPED_HIGH: clipped_share / 2,
        keys.FLOOR_LOW: 0.01,
        keys.FLOOR_HIGH: 0.01,
    }
    metrics |= {f"actor/clipx/floor/tokens/bin_{index}": tokens / 5 for index in BINS}
    assert diagnose(make_run(metrics, FOUR_UPDATES_IN_SYNC, steps=STEPS)) == []
    # As of verl's own log, which does not say how many updates a rollout batch gets.
    assert diagnose(make_run(metrics, steps=STEPS)) == []


@pytest.mark.parametrize("missing", [keys.CLIPPED_LOW, keys.CLIPPED_HIGH, keys.FLOOR_LOW, keys.FLOOR_HIGH])
def test_a_log_that_lacks_one_share_of_clipped_tokens_is_no_finding(missing):
    metrics = {metric: value for metric, value in ALL_CLIPPING_IS_ROUNDING.items() if metric != missing}
    assert diagnose(make_run(metrics, FOUR_UPDATES_IN_SYNC, steps=STEPS)) == []


def test_a_log_that_lacks_one_share_of_a_second_measurement_is_judged_by_the_first():
    recut_without_upper_share = {keys.RECUT_LOW: 0.0, "actor/clipx/floor_recut/tokens/bin_0": 5000.0}
    run = make_run(ALL_CLIPPING_IS_ROUNDING | recut_without_upper_share, FOUR_UPDATES_IN_SYNC, steps=STEPS)
    assert find_rules(run) == [ROUNDING]


def test_a_second_measurement_of_few_tokens_does_not_take_clipping_for_rounding():
    # As in float32: rounding clips none of 500 tokens in each first update, and none of 300 in the second measurement.
    metrics = {
        keys.FLOOR_LOW: 0.0,
        keys.FLOOR_HIGH: 0.0,
        keys.RECUT_LOW: 0.0,
        keys.RECUT_HIGH: 0.0,
        keys.CLIPPED_LOW: 0.007,
        keys.CLIPPED_HIGH: 0.007,
        "actor/clipx/floor/tokens/bin_0": 500.0,
        "actor/clipx/floor_recut/tokens/bin_0": [300.0] + [NAN] * (STEPS - 1),
    }
    assert diagnose(make_run(metrics, FOUR_UPDATES_IN_SYNC, steps=STEPS)) == []


@pytest.mark.parametrize(
    ("floor", "rules"),
    [
        # 180 of 34650 tokens are clipped in later updates of five steps, and none of 550 in the first ones, where the
        # same share would be three.
        pytest.param({"actor/clipx/floor/tokens/bin_0": 110.0, keys.FLOOR_LOW: 0.0}, [], id="too few to tell"),
        pytest.param({"actor/clipx/floor/tokens/bin_0": 1100.0, keys.FLOOR_LOW: 0.0051}, [ROUNDING], id="enough"),
    ],
)
def test_a_floor_is_found_where_first_updates_have_tokens_enough_to_show_it(floor, rules):
    # As in float32, with 64 updates a rollout batch.
    many_updates = ONE_UPDATE_IN_SYNC | {f"{ACTOR}.ppo_mini_batch_size": 2, f"{ACTOR}.ppo_epochs": 16}
    metrics = {keys.FLOOR_HIGH: 0.0, keys.CLIPPED_LOW: 0.0051, keys.CLIPPED_HIGH: 0.0} | floor
    assert find_rules(make_run(metrics, many_updates, steps=STEPS)) == rules


@pytest.mark.parametrize(("target", "rules"), [("second_moment", [ROUNDING]), ("clip_fraction", []), (None, [])])
def test_a_held_clip_fraction_is_as_large_in_first_updates_without_being_rounding(target, rules):
    hold = {"clipx.method": "grpo", "clipx.hold.value": 0.02}
    if target is not None:
        hold["clipx.hold.target"] = target
    assert find_rules(make_run(ALL_CLIPPING_IS_ROUNDING, FOUR_UPDATES_IN_SYNC | hold, steps=STEPS)) == rules


# Rounding alone gives a mean squared log-ratio of 0.004 over 5000 tokens, and of 0.006 in other micro-batches.
FLOOR_SQUARES = {f"actor/clipx/floor/squared_sum/bin_{index}": 4.0 for index in BINS} | FLOOR_TOKENS
RECUT_SQUARES = {f"actor/clipx/floor_recut/squared_sum/bin_{index}": 6.0 for index in BINS} | RECUT_TOKENS


@pytest.mark.parametrize(
    ("target", "value", "measured", "facts"),
    [
        pytest.param("clip_fraction", 0.01, {}, ["above 0.02"], id="a fraction below rounding's"),
        pytest.param("clip_fraction", 0.03, {}, None, id="a fraction above rounding's"),
        pytest.param("second_moment", 0.001, FLOOR_SQUARES, ["above 0.004"], id="a moment below rounding's"),
        pytest.param("second_moment", 0.005, FLOOR_SQUARES, None, id="a moment above rounding's"),
        pytest.param(
            "second_moment",
            0.005,
            FLOOR_SQUARES | RECUT_SQUARES,
            ["above 0.006"],
            id="a moment below that of the second measurement",
        ),
        pytest.param("second_moment", 0.001, {}, None, id="rounding's moment was not logged"),
        # A floor that is not finite says nothing. A measurement that is finite counts by itself.
        pytest.param(
            "clip_fraction",
            0.01,
            {keys.FLOOR_LOW: NAN, keys.FLOOR_HIGH: NAN},
            None,
            id="rounding's fraction is not finite",
        ),
        pytest.param(
            "clip_fraction",
            0.01,
            {keys.FLOOR_LOW: NAN, keys.FLOOR_HIGH: NAN, keys.RECUT_LOW: 0.02, keys.RECUT_HIGH: 0.01},
            ["above 0.03"],
            id="only the second measurement is finite",
        ),
        pytest.param(
            "second_moment",
            0.001,
            {key: NAN for key in FLOOR_SQUARES if "squared_sum" in key},
            None,
            id="rounding's moment is not finite",
        ),
    ],
)
def test_a_held_target_is_said_to_be_below_what_rounding_alone_gives_where_it_is(target, value, measured, facts):
    hold = {"clipx.method": "grpo", "clipx.hold.target": target, "clipx.hold.value": value}
    metrics = ALL_CLIPPING_IS_ROUNDING | measured | {keys.HOLD_MISSED: 1.0}
    run = make_run(metrics, ONE_UPDATE_IN_SYNC | hold, steps=STEPS)
    (missed,) = [diagnosis for diagnosis in diagnose(run) if diagnosis.rule.name == "held target out of reach"]
    assert_names(missed.remedy, "Raise clipx.hold.value", f"here {value}")
    if facts is None:
        assert "rounding" not in missed.remedy
    else:
        assert_names(missed.remedy, "rounding alone", *facts)
