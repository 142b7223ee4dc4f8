"""Holding a target: widths by hand and at their ends, refusals, and runs through a configuration. Covers too: what the
line and explain say, metrics, the state's description. Not covered: the contract with its splits
(tests/losses/methods/test_properties.py), ranks and micro-batches (tests/end_to_end/test_invariance.py).
"""

import math
import pickle
import re
from dataclasses import dataclass

import pytest
import torch

from tests.claims.configuration import ACTOR, actor_of, decide, merge, refusals_in
from tests.claims.first_call import NEAR_OLD_POLICY, make_batch, train_once
from tests.losses.methods.hand_rows import apply_method, row, tokens_at
from tests.messages import assert_names
from tests.training.worker.updates import loss_function, train
from verl_clipx.losses.base.parameters import choice, number, parameter
from verl_clipx.losses.methods import BUILT_IN, METHODS, FixedBounds
from verl_clipx.losses.modifiers.hold import HeldBounds, Hold, held, width_of
from verl_clipx.run.config import build
from verl_clipx.run.description import describe_bounds
from verl_clipx.run.start import resolve_into_config
from verl_clipx.training.worker.state import describe_owner

# How much larger than the exact width a width may be: by a bucket of the statistics, and a little for rounding.
BUCKET = 2 ** (1 / 64) * 1.01


def make_method(name="grpo", **hold):
    """Return a method that holds a target; **hold: values of the hold node."""
    return build(name, hold=hold).method


def solve(method, log_ratio, advantages):
    """Return what a method decides for one sequence: width, the target's value there, and whether it is missed."""
    t = tokens_at(row(*log_ratio).exp(), row(*advantages))
    statistics = method.statistics(t)
    metrics = method.metrics(statistics, method.decide(statistics))
    return tuple(value.item() for value in metrics.values())


# The clip can act on seven of ten tokens: their distances are 0.06, 0.1, 0.15, 0.2, 0.3, 0.4 and 0.5.
LOG_RATIOS = [0.06, 0.1, -0.15, 0.2, 0.3, -0.4, 0.5, -0.9, 0.9, 0.9]
ADVANTAGES = [1.0, 1.0, -1.0, 2.0, 1.0, -1.0, 1.0, 1.0, -1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "hold", "distance_between", "expected_value"),
    [
        # Two tokens of ten are beyond, one, none.
        pytest.param("grpo", dict(value=0.2), (0.3, 0.4), 0.2, id="two tokens beyond"),
        pytest.param("gppo", dict(value=0.19), (0.4, 0.5), 0.1, id="one token beyond"),
        pytest.param("dgpo", dict(value=0.05), (0.5, 0.55), 0.0, id="no token beyond"),
        # The two that move back count too, and the one without an advantage doesn't.
        pytest.param("two_sided", dict(value=0.2), (0.5, 0.9), 0.2, id="tokens that move back count, two_sided"),
        pytest.param("cispo", dict(value=0.39), (0.4, 0.5), 0.3, id="tokens that move back count, cispo"),
        # Mean squares of the nearest four and five: 0.019025 and 0.03322.
        pytest.param(
            "grpo", dict(value=0.02, target="second_moment"), (0.2, 0.3), 0.019025, id="the mean square of four"
        ),
        pytest.param(
            "grpo", dict(value=0.034, target="second_moment"), (0.3, 0.4), 0.03322, id="the mean square of five"
        ),
    ],
)
def test_a_width_by_hand(name, hold, distance_between, expected_value):
    method = make_method(name, **hold)
    width, value, missed = solve(method, LOG_RATIOS, ADVANTAGES)
    at_least, below = distance_between
    assert at_least <= math.log1p(width) < below
    assert missed == 0
    assert value == pytest.approx(expected_value, abs=1e-7)
    t = tokens_at(row(*LOG_RATIOS).exp(), row(*ADVANTAGES))
    bounds = apply_method(method, t).bounds
    assert (bounds.low.item(), bounds.high.item()) == pytest.approx((1 / (1 + width), 1 + width), rel=1e-12)
    if method.hold.target == "clip_fraction" and not method.bounds_width.every_sign:
        assert int(bounds.clipped(t.ratio, t.advantages).sum()) == round(10 * expected_value)


@pytest.mark.parametrize(("name", "share"), [("dppo", 0.25), ("ipo", 0.5)])
def test_a_width_of_the_change_of_probability_by_hand(name, share):
    # From 0.5 by 0.1, 0.3, 0.4 up and 0.35 down with A > 0: what moves back counts for ipo alone.
    method = make_method(name, value=share)
    old = row(0.5, 0.5, 0.5, 0.5)
    change = row(0.1, 0.3, 0.4, -0.35)
    t = tokens_at((old + change) / old, row(1.0, 1.0, 1.0, 1.0), old_log_prob=old.log())
    width, value, missed = method.decide(method.statistics(t)).tolist()
    assert 0.3 * (1 - 1e-6) <= width <= 0.3 * BUCKET
    assert (value, missed) == (share, 0)
    assert (apply_method(method, t).weight == 0).sum() == 4 * share


def test_a_width_of_a_sequences_ratio_by_hand():
    # Sequences of two tokens whose mean log-ratios are 1e-4, 2e-4 and 4e-4.
    log_ratio = torch.tensor([[1e-4, 1e-4], [3e-4, 1e-4], [0.0, 8e-4]], dtype=torch.float64)
    method = make_method("gspo", value=0.34)
    t = tokens_at(log_ratio.exp(), torch.ones_like(log_ratio))
    width, clip_fraction, _ = method.decide(method.statistics(t)).tolist()
    assert 2e-4 * (1 - 1e-6) <= width <= 2e-4 * BUCKET
    assert clip_fraction == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("hold", "log_ratio", "expected_width", "expected_missed"),
    [
        pytest.param(
            dict(value=0.02), [0.01, 0.02, 0.03], 0.05, False, id="a fresh batch is not clipped for its noise"
        ),
        pytest.param(
            dict(value=0.02), [0.01, 0.8, 0.9], 1.0, True, id="a batch far away is clipped at the ceiling at the widest"
        ),
        pytest.param(
            dict(value=0.02, floor=0.1, ceiling=0.5), [0.01, 0.8, 0.9], 0.5, True, id="a ceiling of the user's"
        ),
        pytest.param(
            dict(value=0.5, floor=0.1, ceiling=0.5), [0.01, 0.02, 0.9], 0.1, False, id="a floor of the user's"
        ),
        pytest.param(
            dict(value=0.1, target="second_moment"), [0.01, 0.02, 0.03], 1.0, False, id="nothing has to be masked"
        ),
        pytest.param(
            dict(value=1e-4, target="second_moment"),
            [0.04, 0.045, 0.2],
            0.05,
            True,
            id="everything would have to be masked",
        ),
        pytest.param(dict(value=0.02), [], 0.05, False, id="no token, clip_fraction"),
        pytest.param(dict(value=0.02, target="second_moment"), [], 1.0, False, id="no token, second_moment"),
    ],
)
def test_the_width_stays_between_its_ends(hold, log_ratio, expected_width, expected_missed):
    width, value, missed = solve(make_method(**hold), log_ratio, [1.0] * len(log_ratio))
    assert width == pytest.approx(expected_width, rel=1e-12)
    assert missed == expected_missed == (value > hold["value"])


def test_the_methods_that_can_hold_a_target_are_these():
    widths = {name: width_of(METHODS[name]()) for name in BUILT_IN}
    methods_with_width = [name for name, width in widths.items() if width is not None]
    assert sorted(methods_with_width) == [
        "ce_gppo",
        "cispo",
        "dgpo",
        "dppo",
        "gppo",
        "grpo",
        "gspo",
        "ipo",
        "two_sided",
    ]
    assert [name for name in sorted(methods_with_width) if widths[name].mask] == ["grpo", "two_sided"]


def test_a_micro_batch_has_too_few_sequences_for_gspo():
    with pytest.raises(ValueError, match=r"clipx\.scope=micro_batch"):
        build("gspo", scope="micro_batch", hold={"value": 0.02})


def test_a_method_of_a_users_own_holds_what_the_one_does_that_it_is_derived_from():
    @dataclass(frozen=True, kw_only=True)
    class Derived(METHODS["grpo"], name="tests_derived_from_grpo"):
        # Names that mean something else where a target is held.
        width: float = parameter(2.0, number(at_least=1, at_most=3), "")
        divergence: str = parameter("kl", choice("kl", "tv"), "")

    hold = Hold(target="second_moment", value=0.034)
    derived = held(Derived(), hold)
    base = held(METHODS["grpo"](), hold)
    assert solve(derived, LOG_RATIOS, ADVANTAGES) == solve(base, LOG_RATIOS, ADVANTAGES)
    assert {*derived.parameters} == {*base.parameters, "width", "divergence"}
    assert derived.width == 2


def test_a_method_without_a_width_cannot_be_held():
    with pytest.raises(ValueError, match="no width to solve for"):
        held(FixedBounds(), Hold(value=0.02))


@pytest.mark.parametrize("target", ["clip_fraction", "second_moment"])
@pytest.mark.parametrize("name", ["PlainClip", "plain_clip"])
def test_a_loss_of_a_users_own_with_fixed_bounds_holds_a_target_as_grpo_does(name, target):
    hold_values = {"clipx.hold.value": 0.05}
    grpo_values = {**hold_values, "clipx.dual_clip": None}
    users_values = {**hold_values, "clipx.function": f"tests.example_losses:{name}"}
    grpo = actor_of(merge(["+clipx=grpo", f"+clipx/hold={target}"], grpo_values))
    users_loss = actor_of(merge(["+clipx=custom", f"+clipx/hold={target}"], users_values))
    batch = make_batch(NEAR_OLD_POLICY)
    trained = train(loss_function(users_loss), batch)
    expected = train(loss_function(grpo), batch)
    torch.testing.assert_close(trained.gradient, expected.gradient)
    for metric in ("width", "reached", "missed"):
        key = f"clipx/hold/{metric}"
        assert trained.metrics[key] == expected.metrics[key]


@pytest.mark.parametrize(
    ("name", "may_declare"), [("soft", True), ("Slowing", True), ("WithinSpread", False), ("ByEntropy", False)]
)
def test_a_loss_of_a_users_own_without_a_width_is_told_how_to_declare_one(name, may_declare):
    values = {"clipx.function": f"tests.example_losses:{name}", "clipx.hold.value": 0.05}
    with pytest.raises(Exception) as raised:
        actor_of(merge(["+clipx=custom", "+clipx/hold=clip_fraction"], values))
    (refusal,) = refusals_in(raised.value)
    assert refusal.key == "clipx.hold" and "choose one of grpo" in refusal.advice
    assert "dppo with divergence=tv" in refusal.advice and "tests_plain_clip" in refusal.advice
    assert ("declare bounds_width = verl_clipx.Width()" in refusal.advice) == may_declare


@pytest.mark.parametrize(
    ("hold", "key", "value"),
    [
        ({"value": None}, "clipx.hold.value", None),
        ({"value": 2}, "clipx.hold.value", 2),
        ({"floor": 1.5}, "clipx.hold.floor", 1.5),
        ({"ceiling": 0.01}, "clipx.hold.floor", 0.05),
        ({"target": "kl"}, "clipx.hold.target", "kl"),
    ],
)
def test_a_value_that_hold_cannot_have_is_refused(hold, key, value):
    refusal = refuse_hold("grpo", hold)
    assert (refusal.key, refusal.value) == (key, value)


@pytest.mark.parametrize("method", ["gppo", "ipo", "gspo"])
def test_a_second_moment_that_a_method_cannot_hold_is_refused(method):
    refusal = refuse_hold(method, {"target": "second_moment"})
    assert (refusal.key, refusal.value) == ("clipx.hold.target", "second_moment")


@pytest.mark.parametrize("method", ["acpo", "bapo", "m2po", "gmpo", "dppo_kl", "clip_cov", "sapo"])
def test_a_method_that_can_hold_no_target_is_refused(method):
    assert refuse_hold(method, {}).key == "clipx.hold"


def hold_overrides(hold):
    """Return values of the hold node by their keys, with a target's value of 0.02 unless they have another one."""
    return {f"clipx.hold.{name}": value for name, value in {"value": 0.02, **hold}.items()}


def refuse_hold(method, hold):
    """Return the one refusal of a configuration whose hold node has some values."""
    with pytest.raises(Exception) as raised:
        actor_of(merge([f"+clipx={method}", "+clipx/hold=clip_fraction"], hold_overrides(hold)))
    (refusal,) = refusals_in(raised.value)
    assert refusal.advice != refusal.reason
    return refusal


@pytest.mark.parametrize("scope", ["mini_batch", "lagged", "micro_batch"])
@pytest.mark.parametrize(
    ("method", "target", "value"), [("grpo", "clip_fraction", 0.1), ("two_sided", "second_moment", 0.05)]
)
def test_through_a_composed_configuration_it_trains_and_logs(method, target, value, scope):
    values = {"clipx.hold.value": value, "clipx.scope": scope}
    actor = actor_of(merge([f"+clipx={method}", f"+clipx/hold={target}"], values))
    for metrics in train_once(actor):
        assert 0.05 <= metrics["clipx/hold/width"] <= 1 and metrics["clipx/hold/reached"] >= 0
        if target == "clip_fraction" and scope != "lagged" and not metrics["clipx/hold/missed"]:
            clipped = metrics["clipx/clip_fraction_low"] + metrics["clipx/clip_fraction_high"]
            assert clipped == pytest.approx(metrics["clipx/hold/reached"], abs=1e-6) and clipped <= value


@pytest.mark.parametrize(
    "hold",
    [{"value": 1e-4}, {"value": 1}, {"floor": 1e-6}, {"floor": 1e-6, "ceiling": 2e-6}, {"floor": 18.9, "ceiling": 19}],
)
@pytest.mark.parametrize("target", ["clip_fraction", "second_moment"])
def test_a_parameter_at_an_end_of_its_range_trains(target, hold):
    train_once(actor_of(merge(["+clipx=grpo", f"+clipx/hold={target}"], hold_overrides(hold))))


def test_the_line_and_explain_say_what_is_held():
    _, decision = decide(
        "+clipx=dapo", "+clipx/hold=clip_fraction", "clipx.hold.value=0.02", f"{ACTOR}.clip_ratio_high=0.3"
    )
    target = "clip_fraction 0.02 (width 0.05 to 1)"
    assert_names(decision.record.line, f"holds {target}", "verl's clip_ratio_high=0.3 not used")
    # The solved bounds take nothing over from verl, and the group's own have no part in the run.
    assert decision.record.loss.taken == {}
    assert "clip_high=" not in decision.record.line
    assert_names(describe_bounds(decision.clipx.method), f"the width that holds {target}")
    assert_names(decision.description.settings, "dual_clip 3", "the paper's", target)


def test_a_bound_that_nobody_says_who_has_set_is_named_as_not_used():
    # As in a notebook: no command line tells which keys its user has set.
    for group, bounds in (("grpo", {"clip_high": 1.3, "clip_low": 0.7}), ("dppo", {"threshold_low": 0.1})):
        values = {"clipx.hold.value": 0.02} | {f"clipx.{name}": value for name, value in bounds.items()}
        line = resolve_into_config(merge([f"+clipx={group}", "+clipx/hold=clip_fraction"], values)).record.line
        for name, value in bounds.items():
            assert re.search(rf"\b{name}={value} \(group: [\d.]+; not used, clipx\.hold ", line)


def test_verls_bounds_are_named_as_not_used_even_if_they_repeat_its_default():
    _, decision = decide(
        "+clipx=grpo", "+clipx/hold=clip_fraction", "clipx.hold.value=0.02", f"{ACTOR}.clip_ratio_high=0.2"
    )
    assert "verl's clip_ratio_high=0.2 not used" in decision.record.line
    assert decision.record.loss.unused == {f"{ACTOR}.clip_ratio_high": 0.2}


@pytest.mark.parametrize(
    ("method", "no_bounds"),
    [
        ("grpo", {"clipx.clip_low": None, "clipx.clip_high": None}),
        ("gppo", {"clipx.clip_low": None, "clipx.clip_high": None}),
        ("ce_gppo", {"clipx.clip_low": None, "clipx.clip_high": None}),
        # Bounds are part of its formula: these are too far away to act.
        ("dgpo", {"clipx.clip_low": 0.01, "clipx.clip_high": 20}),
        ("dppo", {"clipx.threshold_low": None, "clipx.threshold_high": None}),
        ("gspo", {"clipx.clip_low": None, "clipx.clip_high": None}),
    ],
)
def test_the_metric_named_where_a_value_is_missing_is_the_share_on_which_the_clip_acts(method, no_bounds):
    with pytest.raises(ValueError, match=r"clipx\.hold\.value.*logs its own as pg_clipfrac"):
        make_method(method, value=None)
    batch = make_batch(NEAR_OLD_POLICY)
    tokens = int(batch["mask"].sum())
    with_bounds = train(loss_function(actor_of(merge([f"+clipx={method}"], {}))), batch)
    without_bounds = train(loss_function(actor_of(merge([f"+clipx={method}"], no_bounds))), batch)
    # Where the bounds change a token's gradient, the clip acts.
    is_changed = ~torch.isclose(with_bounds.gradient, without_bounds.gradient, rtol=1e-5, atol=0)
    assert is_changed.any()
    assert with_bounds.metrics["actor/pg_clipfrac"] == pytest.approx(int(is_changed.sum()) / tokens)


def test_methods_that_hold_the_same_are_equal_and_a_state_belongs_to_its_target():
    method = make_method(value=0.02)
    same = make_method(value=0.02)
    other = make_method(value=0.03)
    assert isinstance(method, HeldBounds)
    assert method.name == "grpo"
    assert method == same
    assert method == pickle.loads(pickle.dumps(method))
    assert method != other
    assert method != METHODS["grpo"]()
    owner = describe_owner(method)
    assert owner["hold"] == "clip_fraction 0.02 (width 0.05 to 1)"
    assert owner["hold"] != describe_owner(other)["hold"]
    assert {"clip_low", "clip_high"} & {*owner} == set()
