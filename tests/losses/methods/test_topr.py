"""TOPR's sequence ratio, limits and weights by hand, at both levels, and what the metrics count as clipped. Not
covered: the paper's rewards, which stand where verl's advantages do.
"""

import math

from verl_clipx.losses.methods.topr import Topr

from .against_verl import SameInVerl
from .hand_rows import HandRow, apply_method, make_test_of_rows, rows, tokens_at

PUBLISHED = {
    "topr": dict(level="sequence", positive_low=1.0, positive_high=1.0, negative_low=0.0, negative_high=1.0),
}
VARIANTS = (
    {"level": "token"},
    {"level": "token", "positive_low": 0.5, "positive_high": 2.0},
    {"positive_low": 0.0, "positive_high": 2.0, "log_ratio_clamp": None},
)

SAME_IN_VERL = {
    "gpg as topr": SameInVerl(
        overrides=("+clipx=topr", "clipx.negative_low=1"),
        verl_overrides=("policy_loss.loss_mode=gpg",),
        metrics=(),
    ),
    "bypass_pg_is as topr": SameInVerl(
        overrides=(
            "+clipx=topr",
            "clipx.positive_low=0",
            "clipx.positive_high=1.5",
            "clipx.negative_high=1.5",
            "algorithm.rollout_correction.bypass_mode=true",
            "actor_rollout_ref.rollout.calculate_log_probs=true",
        ),
        # verl's preset RolloutCorrectionConfig.bypass_pg_is(1.5), where verl's trainer writes it.
        verl_overrides=(
            "policy_loss.loss_mode=bypass_mode",
            "policy_loss.rollout_correction={loss_type:reinforce,rollout_is:sequence,rollout_is_threshold:1.5}",
        ),
        metrics=(),
    ),
}


def check_training(values):
    # Negative tokens alone have a bound, and weight 1 above it.
    assert not any(values("actor/clipx/clip_fraction_high")) and sum(values("actor/clipx/gradient_mass/HN")) > 0


# Products 0.3, 0.3, 3, 3 and, without the masked token, 0.5.
RATIO = ((0.5, 0.6), (0.5, 0.6), (1.5, 2.0), (1.5, 2.0), (0.5, 9.0))
ADVANTAGES = ((-1.0, -1.0), (1.0, 1.0), (-1.0, -1.0), (1.0, 1.0), (-2.0, -2.0))
MASK = (*[(True, True)] * 4, (True, False))


def expect_weights(method, *weights):
    """Return the example with the expected weight of each sequence, or with those of its two tokens."""
    of_tokens = tuple(weight if isinstance(weight, tuple) else (weight, weight) for weight in weights)
    return HandRow(method=method, ratio=RATIO, advantages=ADVANTAGES, weight=of_tokens, mask=MASK)


test_by_hand = make_test_of_rows(
    {
        "a sequence has one weight": expect_weights(Topr(), 0.3, 1.0, 1.0, 1.0, 0.5),
        "a token has its own": expect_weights(Topr(level="token"), (0.5, 0.6), 1.0, 1.0, 1.0, (0.5, 1.0)),
        "limits": expect_weights(
            Topr(positive_low=0.5, positive_high=2.0, negative_low=0.4, negative_high=0.45), 0.4, 0.5, 0.45, 2.0, 0.45
        ),
        "truncated importance sampling": expect_weights(
            Topr(positive_low=0.0, positive_high=1.0), 0.3, 0.3, 1.0, 1.0, 0.5
        ),
        "an advantage of 0 is positive": HandRow(method=Topr(), ratio=(0.5,), advantages=0.0, weight=(1.0,)),
        # Log-ratios -3 and 2.5, clamped to -1 and 1; unclamped they are -0.5 together.
        "the clamp acts on each token": HandRow(
            method=Topr(log_ratio_clamp=1.0), ratio=(math.exp(-3.0), math.exp(2.5)), advantages=-1.0, weight=1.0
        ),
        "unclamped": HandRow(
            method=Topr(), ratio=(math.exp(-3.0), math.exp(2.5)), advantages=-1.0, weight=math.exp(-0.5)
        ),
        "value": HandRow(
            method=Topr(),
            ratio=(0.5,),
            advantages=-2.0,
            weight=(0.5,),
            value=(math.log(0.5) - 1.0,),
            old=(math.exp(-1.0),),
        ),
    }
)


def test_limits_that_differ_are_bounds():
    t = tokens_at(rows(RATIO), rows(ADVANTAGES), mask=rows(MASK).bool())
    papers = Topr()
    # Only the negative sequence whose weight is cut to 1.
    assert find_clipped(papers, t) == ([0, 0, 0, 0, 0], [0, 0, 1, 0, 0])
    positive_alone = Topr(positive_low=0.5, positive_high=2.0, negative_low=1.0, negative_high=1.0)
    assert find_clipped(positive_alone, t) == ([0, 1, 0, 0, 0], [0, 0, 0, 1, 0])


def find_clipped(method, t):
    """Return which sequences are below their lower bound, and which are above their upper one."""
    bounds = apply_method(method, t).bounds
    bounded = method.bounded(t)
    below = (bounded < bounds.low)[:, 0].int().tolist()
    above = (bounded > bounds.high)[:, 0].int().tolist()
    return below, above
