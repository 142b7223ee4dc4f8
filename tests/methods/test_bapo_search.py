"""BAPO's vectorised search against the papers' loops, written plainly.

Two loops: Algorithm 1 of the paper (upper bound first, full steps) and the released code's (lower bound first, last
step clipped to the stop). Both recompute every contribution token by token at each candidate. Does not cover the
weights or the mask, which test_bapo.py does, nor contributions so small that BAPO's units round them.
"""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from verl_clipx.methods.bapo import Bapo

from .at import row, tokens_at

# A contribution is rounded to 2^-36 of the largest possible one: with these, at most 3e-8 of itself.
ADVANTAGES = st.just(0.0) | st.floats(0.1, 3.0) | st.floats(-3.0, -0.1)
ROUNDING = 1e-7

TOKENS = st.lists(st.tuples(st.floats(0.05, 6.0), ADVANTAGES), min_size=1, max_size=14)
# A share is at most 1.
CRITERIA = st.tuples(st.just("share"), st.floats(0.02, 1.0)) | st.tuples(
    st.sampled_from(["net", "ratio"]), st.floats(0.02, 3.0)
)
COUNTED = st.sampled_from(["surrogate", "gradient"])


def criterion(tokens, c_low, c_high, method):
    if method.counted == "surrogate":
        positive = math.fsum(a * min(r, c_high) for r, a in tokens if a > 0)
        negative = math.fsum(-a * max(r, c_low) for r, a in tokens if a < 0)
    else:
        positive = math.fsum(a * r for r, a in tokens if a > 0 and r <= c_high)
        negative = math.fsum(-a * r for r, a in tokens if a < 0 and r >= c_low)
    if negative == 0:
        return math.inf
    if method.contribution == "share":
        return positive / (positive + negative)
    if method.contribution == "net":
        return positive / abs(positive - negative) if positive != negative else math.inf
    return positive / (negative + method.epsilon)


def next_bound(bound, start, stop, step, last_step):
    """The next candidate, or None; counted in whole steps from start, so that 0.6 + 15 * 0.02 is 0.9."""
    taken = round((bound - start) / step)
    if abs(start + taken * step - bound) > 1e-9:
        return None
    candidate = round(start + (taken + 1) * step, 12)
    if candidate <= stop:
        return candidate
    return stop if last_step == "clipped" and bound < stop else None


def loop(tokens, method, target):
    """Move the first bound while the criterion is missed and there is room, then the other."""
    bounds = {"lower": method.lower_start, "upper": method.upper_start}
    for side in ("upper", "lower") if method.first == "upper" else ("lower", "upper"):
        start, stop, step = (getattr(method, f"{side}_{part}") for part in ("start", "stop", "step"))
        while criterion(tokens, bounds["lower"], bounds["upper"], method) < target:
            candidate = next_bound(bounds[side], start, stop, step, method.last_step)
            if candidate is None:
                break
            bounds[side] = candidate
    return bounds["lower"], bounds["upper"]


def assert_same_bounds(tokens, method):
    # Where the rounding of the sums decides, either answer is right.
    answers = [loop(tokens, method, method.target * (1 + shift)) for shift in (-ROUNDING, 0.0, ROUNDING)]
    assume(answers[0] == answers[1] == answers[2])
    ratio, advantages = (row(*column) for column in zip(*tokens, strict=True))
    c_low, c_high, _, _ = method.decide(method.statistics(tokens_at(ratio, advantages))).tolist()
    assert (c_low, c_high) == answers[1]


@given(tokens=TOKENS, criteria=CRITERIA, counted=COUNTED)
@settings(max_examples=300, deadline=None)
def test_algorithm_1(tokens, criteria, counted):
    contribution, target = criteria
    assert_same_bounds(tokens, Bapo(target=target, contribution=contribution, counted=counted, weight="none"))


@pytest.mark.slow
@given(tokens=TOKENS, target=st.floats(0.02, 3.0), counted=COUNTED, upper_step=st.sampled_from([0.1, 0.3, 0.7]))
@settings(max_examples=300, deadline=None)
def test_the_releases_loops(tokens, target, counted, upper_step):
    method = Bapo(
        target=target,
        contribution="ratio",
        counted=counted,
        weight="none",
        first="lower",
        last_step="clipped",
        lower_start=0.8,
        lower_stop=0.95,
        lower_step=0.04,
        upper_start=1.2,
        upper_stop=2.0,
        upper_step=upper_step,
    )
    assert_same_bounds(tokens, method)


@given(
    picks=st.lists(
        st.tuples(st.integers(0, 15), st.integers(0, 36), st.floats(0.1, 3.0), st.booleans()), min_size=1, max_size=14
    ),
    criteria=CRITERIA,
    first=st.sampled_from(["upper", "lower"]),
)
@settings(max_examples=300, deadline=None)
def test_ratios_exactly_on_candidates(picks, criteria, first):
    contribution, target = criteria
    tokens = [
        (round(1.2 + 0.05 * upper, 2), advantage) if positive else (round(0.6 + 0.02 * lower, 2), -advantage)
        for lower, upper, advantage, positive in picks
    ]
    method = Bapo(target=target, contribution=contribution, counted="gradient", first=first, weight="none")
    assert_same_bounds(tokens, method)
