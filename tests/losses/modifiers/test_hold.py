"""Holding a target: widths by hand, ends, refusals, and through a configuration. Covers too: what the line and explain
say, metrics, the state's description. Not covered: the contract with its splits
(tests/losses/methods/test_properties.py), ranks and micro-batches (tests/end_to_end/test_invariance.py).
"""

import math
import pickle
import re
from dataclasses import dataclass

import pytest
import torch

from tests.claims.configuration import ACTOR, actor_of, decided, merged, refusals_in
from tests.claims.first_call import NEAR, first_call, moved_batch
from tests.losses.methods.at import outcome, row, tokens_at
from tests.training.worker.updates import loss_function, train
from verl_clipx.losses.base.parameters import choice, number, parameter
from verl_clipx.losses.methods import BUILT_IN, METHODS, FixedBounds
from verl_clipx.losses.modifiers.hold import HeldBounds, Hold, held, width_of
from verl_clipx.run.config import build
from verl_clipx.run.description import describe_bounds
from verl_clipx.run.start import resolve_into_config
from verl_clipx.training.worker.state import describe_owner

WITH_WIDTH = ["grpo", "gppo", "ce_gppo", "cispo", "dgpo", "two_sided", "dppo", "ipo", "gspo"]
MASKS = ["grpo", "two_sided"]
BUCKET = 2 ** (1 / 64) * 1.01


def holding(method="grpo", parameters=None, **hold):
    return build(method, **(parameters or {}), hold=hold).method


def solved(method, log_ratio, advantages):
    """Width, the target's value there, and whether it is missed."""
    t = tokens_at(row(*log_ratio).exp(), row(*advantages))
    decision = method.decide(method.statistics(t))
    return tuple(value.item() for value in method.metrics(method.statistics(t), decision).values())


# The clip can act on seven of ten tokens: their distances are 0.06, 0.1, 0.15, 0.2, 0.3, 0.4 and 0.5.
LOG_RATIOS = [0.06, 0.1, -0.15, 0.2, 0.3, -0.4, 0.5, -0.9, 0.9, 0.9]
ADVANTAGES = [1.0, 1.0, -1.0, 2.0, 1.0, -1.0, 1.0, 1.0, -1.0, 0.0]


@pytest.mark.parametrize(
    ("method", "hold", "distance", "reached"),
    [
        # Two tokens of ten are beyond, one, none.
        ("grpo", dict(value=0.2), (0.3, 0.4), 0.2),
        ("gppo", dict(value=0.19), (0.4, 0.5), 0.1),
        ("dgpo", dict(value=0.05), (0.5, 0.55), 0.0),
        # The two that move back count too, and the one without an advantage doesn't.
        ("two_sided", dict(value=0.2), (0.5, 0.9), 0.2),
        ("cispo", dict(value=0.39), (0.4, 0.5), 0.3),
        # Mean squares of the nearest four and five: 0.019025 and 0.03322.
        ("grpo", dict(value=0.02, target="second_moment"), (0.2, 0.3), 0.019025),
        ("grpo", dict(value=0.034, target="second_moment"), (0.3, 0.4), 0.03322),
    ],
)
def test_a_width_by_hand(method, hold, distance, reached):
    held = holding(method, **hold)
    width, found, missed = solved(held, LOG_RATIOS, ADVANTAGES)
    assert distance[0] <= math.log1p(width) < distance[1] and missed == 0
    assert found == pytest.approx(reached, abs=1e-7)
    t = tokens_at(row(*LOG_RATIOS).exp(), row(*ADVANTAGES))
    bounds = held.bounds(t, held.decide(held.statistics(t)))
    assert (bounds.low.item(), bounds.high.item()) == pytest.approx((1 / (1 + width), 1 + width), rel=1e-12)
    if held.hold.target == "clip_fraction" and not held.bounds_width.every_sign:
        assert int(bounds.clipped(t.ratio, t.advantages).sum()) == round(10 * reached)


@pytest.mark.parametrize(("method", "share", "moved"), [("dppo", 0.25, 0.3), ("ipo", 0.5, 0.3)])
def test_a_width_of_the_change_of_probability_by_hand(method, share, moved):
    # From 0.5 by 0.1, 0.3, 0.4 up and 0.35 down with A > 0: what moves back counts for ipo alone.
    held = holding(method, value=share)
    old, change = row(*[0.5] * 4), row(0.1, 0.3, 0.4, -0.35)
    t = tokens_at((old + change) / old, row(1.0, 1.0, 1.0, 1.0), old_log_prob=old.log())
    width, reached, missed = held.decide(held.statistics(t)).tolist()
    assert moved * (1 - 1e-6) <= width <= moved * BUCKET and (reached, missed) == (share, 0)
    assert (outcome(held, t).weight == 0).sum() == 4 * share


def test_a_width_of_a_sequences_ratio_by_hand():
    # Sequences of two tokens whose mean log-ratios are 1e-4, 2e-4 and 4e-4.
    log_ratio = torch.tensor([[1e-4, 1e-4], [3e-4, 1e-4], [0.0, 8e-4]], dtype=torch.float64)
    held = holding("gspo", value=0.34)
    t = tokens_at(log_ratio.exp(), torch.ones_like(log_ratio))
    width, reached, _ = held.decide(held.statistics(t)).tolist()
    assert 2e-4 * (1 - 1e-6) <= width <= 2e-4 * BUCKET and reached == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("hold", "log_ratio", "width", "missed"),
    [
        # A fresh batch is not clipped for noise, and a batch far away not more widely than the ceiling.
        (dict(value=0.02), [0.01, 0.02, 0.03], 0.05, 0),
        (dict(value=0.02), [0.01, 0.8, 0.9], 1.0, 1),
        (dict(value=0.02, floor=0.1, ceiling=0.5), [0.01, 0.8, 0.9], 0.5, 1),
        (dict(value=0.5, floor=0.1, ceiling=0.5), [0.01, 0.02, 0.9], 0.1, 0),
        # Nothing has to be masked; everything would have to be.
        (dict(value=0.1, target="second_moment"), [0.01, 0.02, 0.03], 1.0, 0),
        (dict(value=1e-4, target="second_moment"), [0.04, 0.045, 0.2], 0.05, 1),
        (dict(value=0.02), [], 0.05, 0),
        (dict(value=0.02, target="second_moment"), [], 1.0, 0),
    ],
)
def test_the_width_stays_between_its_ends(hold, log_ratio, width, missed):
    found, reached, is_missed = solved(holding(**hold), log_ratio, [1.0] * len(log_ratio))
    assert found == pytest.approx(width, rel=1e-12) and is_missed == missed == (reached > hold["value"])


def test_the_methods_with_a_width_are_these_and_a_micro_batch_has_too_few_sequences_for_gspo():
    assert {name for name in BUILT_IN if width_of(METHODS[name]()) is not None} == {*WITH_WIDTH}
    assert [name for name in WITH_WIDTH if width_of(METHODS[name]()).mask] == MASKS
    with pytest.raises(ValueError, match=r"clipx\.scope=micro_batch"):
        build("gspo", scope="micro_batch", hold={"value": 0.02})


def test_a_method_of_a_users_own_holds_what_the_one_does_that_it_is_derived_from():
    @dataclass(frozen=True, kw_only=True)
    class Derived(METHODS["grpo"], name="tests_derived_from_grpo"):
        # Names that mean something else where a target is held.
        width: float = parameter(2.0, number(at_least=1, at_most=3), "")
        divergence: str = parameter("kl", choice("kl", "tv"), "")

    (own, of_base) = (held(kind(), Hold(target="second_moment", value=0.034)) for kind in (Derived, METHODS["grpo"]))
    assert solved(own, LOG_RATIOS, ADVANTAGES) == solved(of_base, LOG_RATIOS, ADVANTAGES)
    assert {*own.parameters} == {*of_base.parameters, "width", "divergence"} and own.width == 2
    with pytest.raises(ValueError, match="no width to solve for"):
        held(FixedBounds(), Hold(value=0.02))


@pytest.mark.parametrize("target", ["clip_fraction", "second_moment"])
@pytest.mark.parametrize("own", ["PlainClip", "plain_clip"])
def test_a_loss_of_a_users_own_with_fixed_bounds_holds_a_target_as_grpo_does(own, target):
    hold = {"clipx.hold.value": 0.05}
    of_grpo = actor_of(merged(["+clipx=grpo", f"+clipx/hold={target}"], hold | {"clipx.dual_clip": None}))
    function = {"clipx.function": f"tests.example_losses:{own}"}
    of_user = actor_of(merged(["+clipx=custom", f"+clipx/hold={target}"], hold | function))
    batch = moved_batch(NEAR)
    trained, expected = train(loss_function(of_user), batch), train(loss_function(of_grpo), batch)
    torch.testing.assert_close(trained.gradient, expected.gradient)
    for metric in ("width", "reached", "missed"):
        name = f"clipx/hold/{metric}"
        assert trained.metrics[name] == expected.metrics[name]


@pytest.mark.parametrize(
    ("own", "may_declare"), [("soft", True), ("Slowing", True), ("WithinSpread", False), ("ByEntropy", False)]
)
def test_a_loss_of_a_users_own_without_a_width_is_told_how_to_declare_one(own, may_declare):
    values = {"clipx.function": f"tests.example_losses:{own}", "clipx.hold.value": 0.05}
    with pytest.raises(Exception) as raised:
        actor_of(merged(["+clipx=custom", "+clipx/hold=clip_fraction"], values))
    (refusal,) = refusals_in(raised.value)
    assert refusal.key == "clipx.hold" and "choose one of grpo" in refusal.advice
    assert "dppo with divergence=tv" in refusal.advice and "tests_plain_clip" in refusal.advice
    assert ("declare bounds_width = verl_clipx.Width()" in refusal.advice) == may_declare


@pytest.mark.parametrize(
    ("method", "values", "key", "value"),
    [
        ("grpo", {"value": None}, "clipx.hold.value", None),
        ("grpo", {"value": 2}, "clipx.hold.value", 2),
        ("grpo", {"floor": 1.5}, "clipx.hold.floor", 1.5),
        ("grpo", {"ceiling": 0.01}, "clipx.hold.floor", 0.05),
        ("grpo", {"target": "kl"}, "clipx.hold.target", "kl"),
        *(
            (name, {"target": "second_moment"}, "clipx.hold.target", "second_moment")
            for name in ("gppo", "ipo", "gspo")
        ),
        *((name, {}, "clipx.hold", None) for name in ("acpo", "bapo", "m2po", "gmpo", "dppo_kl", "clip_cov", "sapo")),
    ],
)
def test_what_cannot_be_held_is_refused(method, values, key, value):
    given = {f"clipx.hold.{name}": of for name, of in {"value": 0.02, **values}.items()}
    with pytest.raises(Exception) as raised:
        actor_of(merged([f"+clipx={method}", "+clipx/hold=clip_fraction"], given))
    (refusal,) = refusals_in(raised.value)
    assert refusal.key == key and (value is None or refusal.value == value) and refusal.advice != refusal.reason


@pytest.mark.parametrize("scope", ["mini_batch", "lagged", "micro_batch"])
@pytest.mark.parametrize(
    ("method", "target", "value"), [("grpo", "clip_fraction", 0.1), ("two_sided", "second_moment", 0.05)]
)
def test_through_a_composed_configuration_it_trains_and_logs(method, target, value, scope):
    values = {"clipx.hold.value": value, "clipx.scope": scope}
    actor = actor_of(merged([f"+clipx={method}", f"+clipx/hold={target}"], values))
    for metrics in first_call(actor):
        assert 0.05 <= metrics["clipx/hold/width"] <= 1 and metrics["clipx/hold/reached"] >= 0
        if target == "clip_fraction" and scope != "lagged" and not metrics["clipx/hold/missed"]:
            clipped = metrics["clipx/clip_fraction_low"] + metrics["clipx/clip_fraction_high"]
            assert clipped == pytest.approx(metrics["clipx/hold/reached"], abs=1e-6) and clipped <= value


@pytest.mark.parametrize(
    "values",
    [{"value": 1e-4}, {"value": 1}, {"floor": 1e-6}, {"floor": 1e-6, "ceiling": 2e-6}, {"floor": 18.9, "ceiling": 19}],
)
@pytest.mark.parametrize("target", ["clip_fraction", "second_moment"])
def test_a_parameter_at_an_end_trains(target, values):
    given = {f"clipx.hold.{name}": of for name, of in {"value": 0.02, **values}.items()}
    first_call(actor_of(merged(["+clipx=grpo", f"+clipx/hold={target}"], given)))


def test_the_line_and_explain_say_what_is_held():
    _, decision = decided(
        "+clipx=dapo", "+clipx/hold=clip_fraction", "clipx.hold.value=0.02", f"{ACTOR}.clip_ratio_high=0.3"
    )
    held = "clip_fraction 0.02 (width 0.05 to 1)"
    # The solved bounds take nothing over from verl, and the group's own have no part in the run.
    assert f"holds {held}" in decision.record.line and "verl's clip_ratio_high=0.3 not used" in decision.record.line
    assert decision.record.loss.taken == {} and "clip_high=" not in decision.record.line
    assert f"the width that holds {held}" in describe_bounds(decision.clipx.method)
    assert decision.description.settings == f"dual_clip 3: the paper's but for bounds that hold {held}"


def test_a_bound_that_nobody_says_who_has_set_is_named_as_not_used():
    # As in a notebook: no command line tells which keys its user has set.
    held = {"clipx.hold.value": 0.02}
    for group, changed in (("grpo", {"clip_high": 1.3, "clip_low": 0.7}), ("dppo", {"threshold_low": 0.1})):
        values = held | {f"clipx.{name}": value for name, value in changed.items()}
        line = resolve_into_config(merged([f"+clipx={group}", "+clipx/hold=clip_fraction"], values)).record.line
        for name, value in changed.items():
            assert re.search(rf"\b{name}={value} \(group: [\d.]+; not used, clipx\.hold ", line)


def test_verls_bounds_are_named_as_not_used_even_if_they_repeat_its_default():
    words = ("+clipx=grpo", "+clipx/hold=clip_fraction", "clipx.hold.value=0.02", f"{ACTOR}.clip_ratio_high=0.2")
    _, decision = decided(*words)
    assert "verl's clip_ratio_high=0.2 not used" in decision.record.line
    assert decision.record.loss.unused == {f"{ACTOR}.clip_ratio_high": 0.2}


@pytest.mark.parametrize("method", ["grpo", "gppo", "ce_gppo", "dgpo", "dppo", "gspo"])
def test_the_metric_named_where_a_value_is_missing_is_the_share_on_which_the_clip_acts(method):
    with pytest.raises(ValueError, match=r"clipx\.hold\.value.*logs its own as pg_clipfrac"):
        holding(method, value=None)
    unlimited = {
        "dppo": dict(threshold_low=None, threshold_high=None),
        "dgpo": dict(clip_low=0.01, clip_high=20),
    }.get(method, dict(clip_low=None, clip_high=None))
    batch, tokens = moved_batch(NEAR), int(moved_batch(NEAR)["mask"].sum())
    fixed, unbounded = (
        train(
            loss_function(actor_of(merged([f"+clipx={method}"], {f"clipx.{key}": of for key, of in values.items()}))),
            batch,
        )
        for values in ({}, unlimited)
    )
    # Where the bounds change a token's gradient, the clip acts.
    acts = int((~torch.isclose(fixed.gradient, unbounded.gradient, rtol=1e-5, atol=0)).sum())
    assert fixed.metrics["actor/pg_clipfrac"] == pytest.approx(acts / tokens) and acts > 0


def test_methods_that_hold_the_same_are_equal_and_a_state_belongs_to_its_target():
    method, same, other = (holding(value=value) for value in (0.02, 0.02, 0.03))
    assert isinstance(method, HeldBounds) and method == same == pickle.loads(pickle.dumps(method)) != other
    assert method != METHODS["grpo"]() and method.name == "grpo"
    assert describe_owner(method)["hold"] == "clip_fraction 0.02 (width 0.05 to 1)" != describe_owner(other)["hold"]
    assert {"clip_low", "clip_high"} & {*describe_owner(method)} == set()
