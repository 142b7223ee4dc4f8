"""BAPO's vectorised search against the papers' loops, written plainly.

Two loops: Algorithm 1 of the paper (upper bound first, full steps) and the released code's (lower bound first, last
step clipped to the stop). Both recompute every contribution token by token at each candidate. Does not cover the
weights or the mask, which test_bapo.py does.
"""

import math

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from verl_clipx.controllers.bapo import BapoController

TOKENS = st.lists(st.tuples(st.floats(0.05, 6.0), st.floats(-3.0, 3.0)), min_size=1, max_size=14)
TARGETS = st.floats(0.02, 3.0)
CONTRIBUTIONS = st.sampled_from(["share", "net", "ratio"])
COUNTED = st.sampled_from(["surrogate", "gradient"])


def _criterion(tokens, c_low, c_high, contribution, counted, epsilon):
    if counted == "surrogate":
        positive = math.fsum(a * min(r, c_high) for r, a in tokens if a > 0)
        negative = math.fsum(-a * max(r, c_low) for r, a in tokens if a < 0)
    else:
        positive = math.fsum(a * r for r, a in tokens if a > 0 and r <= c_high)
        negative = math.fsum(-a * r for r, a in tokens if a < 0 and r >= c_low)
    if negative == 0:
        return math.inf
    if contribution == "share":
        return positive / (positive + negative)
    if contribution == "net":
        return positive / abs(positive - negative) if positive != negative else math.inf
    return positive / (negative + epsilon)


def _next(bound, start, stop, step, last_step):
    """The next candidate, or None; counted in whole steps from start, so that 0.6 + 15 * 0.02 is 0.9."""
    taken = round((bound - start) / step)
    if abs(start + taken * step - bound) > 1e-9:
        return None
    candidate = round(start + (taken + 1) * step, 12)
    if candidate <= stop:
        return candidate
    return stop if last_step == "clipped" and bound < stop else None


def _loop(tokens, controller, target):
    """Move the first bound while the criterion is missed and there is room, then the other."""
    bounds = {"lower": controller.lower_start, "upper": controller.upper_start}
    order = ["upper", "lower"] if controller.first == "upper" else ["lower", "upper"]
    for side in order:
        start, stop, step = (getattr(controller, f"{side}_{part}") for part in ("start", "stop", "step"))
        while (
            _criterion(
                tokens,
                bounds["lower"],
                bounds["upper"],
                controller.contribution,
                controller.counted,
                controller.epsilon,
            )
            < target
        ):
            candidate = _next(bounds[side], start, stop, step, controller.last_step)
            if candidate is None:
                break
            bounds[side] = candidate
    return bounds["lower"], bounds["upper"]


def _vectorised(tokens, controller):
    ratio, advantages = (torch.tensor([column], dtype=torch.float64) for column in zip(*tokens, strict=True))
    zeros = torch.zeros_like(ratio)
    statistics = controller.statistics(
        ratio=ratio,
        advantages=advantages,
        mask=torch.ones_like(ratio, dtype=torch.bool),
        log_prob=zeros,
        old_log_prob=zeros,
    )
    c_low, c_high, _, _ = controller.decide(statistics).tolist()
    return c_low, c_high


def _assert_equal(tokens, controller):
    # Sums in another order differ in the last digits: where that decides, either answer is right.
    answers = [_loop(tokens, controller, controller.target * (1 + shift)) for shift in (-1e-11, 0.0, 1e-11)]
    assume(answers[0] == answers[1] == answers[2])
    assert _vectorised(tokens, controller) == answers[1]


@given(tokens=TOKENS, target=TARGETS, contribution=CONTRIBUTIONS, counted=COUNTED)
@settings(max_examples=300, deadline=None)
def test_algorithm_1(tokens, target, contribution, counted):
    controller = BapoController(target=target, contribution=contribution, counted=counted, weight="none")
    _assert_equal(tokens, controller)


@given(tokens=TOKENS, target=TARGETS, counted=COUNTED, upper_step=st.sampled_from([0.1, 0.3, 0.7]))
@settings(max_examples=300, deadline=None)
def test_the_releases_loops(tokens, target, counted, upper_step):
    controller = BapoController(
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
    _assert_equal(tokens, controller)


@given(
    picks=st.lists(
        st.tuples(st.integers(0, 15), st.integers(0, 36), st.floats(0.1, 3.0), st.booleans()), min_size=1, max_size=14
    ),
    target=TARGETS,
    contribution=CONTRIBUTIONS,
    first=st.sampled_from(["upper", "lower"]),
)
@settings(max_examples=300, deadline=None)
def test_ratios_exactly_on_candidates(picks, target, contribution, first):
    tokens = [
        (round(1.2 + 0.05 * upper, 2), advantage) if positive else (round(0.6 + 0.02 * lower, 2), -advantage)
        for lower, upper, advantage, positive in picks
    ]
    controller = BapoController(
        target=target, contribution=contribution, counted="gradient", first=first, weight="none"
    )
    _assert_equal(tokens, controller)
