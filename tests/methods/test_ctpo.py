"""CTPO's prefix ratio and widening bounds by hand.

tests/worker/test_golden.py has the release's own numbers.

Not covered: the release's other ratio, the geometric mean of the prefix; its limit of 10 on the prefix's log-ratio,
which its dual clip and bounds never reach for responses of under 40,000 tokens.
"""

import math

import torch
from torch.testing import assert_close

from verl_clipx.methods.ctpo import Ctpo

from .at import row, tokens_at

# Prefixes 1.1, 1.21, 0.605 and 1.21 with bounds, at power 0.5, of e^(0.1 sqrt t) and e^(-0.1 sqrt t).
RATIO = row(1.1, 1.1, 0.5, 2.0)
METHOD = Ctpo(width_low=0.1, width_high=0.1, width_dual=0.15)


def weight(method, t):
    return method.gradient_weight(t, method.bounds(t, method.decide(method.statistics(t))))


def test_bounds_widen_with_the_position():
    t = tokens_at(RATIO, torch.ones_like(RATIO))
    bounds = METHOD.bounds(t, METHOD.decide(METHOD.statistics(t)))
    assert_close(bounds.high, row(*(math.exp(0.1 * math.sqrt(position)) for position in (1, 2, 3, 4))))
    assert_close(bounds.low * bounds.high, torch.ones_like(RATIO))
    assert_close(METHOD.bounded(t), row(1.1, 1.21, 0.605, 1.21))
    flat = Ctpo(power=0.0)
    assert_close(flat.bounds(t, flat.decide(flat.statistics(t))).high, row(*[math.exp(0.05)] * 4))


def test_clipped_by_the_prefix_for_either_sign():
    # Upper bounds 1.105, 1.152, 1.189, 1.221; dual 1.162, 1.236, 1.297, 1.350.
    assert_close(weight(METHOD, tokens_at(RATIO, row(1.0, 1.0, 1.0, 1.0))), row(1.1, 0.0, 0.605, 1.21))
    assert_close(weight(METHOD, tokens_at(RATIO, row(-1.0, -1.0, -1.0, -1.0))), row(1.1, 1.21, 0.0, 1.21))


def test_the_dual_clip_widens_as_the_bounds_do():
    ratio = row(1.2, 1.0, 1.0, 1.0)
    assert_close(weight(METHOD, tokens_at(ratio, row(*[-1.0] * 4))), row(0.0, 1.2, 1.2, 1.2))
    none = Ctpo(width_low=0.1, width_high=0.1, width_dual=None)
    assert_close(weight(none, tokens_at(ratio, row(*[-1.0] * 4))), row(1.2, 1.2, 1.2, 1.2))


def test_positions_are_counted_over_the_responses_tokens():
    ratio, mask = row(1.0, 9.0, 1.0), torch.tensor([[True, False, True]])
    # What a loss sees outside the mask is 1.
    t = tokens_at(torch.where(mask, ratio, 1.0), torch.ones_like(ratio), mask=mask)
    assert_close(METHOD.bounds(t, METHOD.decide(METHOD.statistics(t))).high[0, 2].item(), math.exp(0.1 * math.sqrt(2)))
