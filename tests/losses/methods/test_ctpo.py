"""CTPO's prefix ratio and widening bounds by hand; tests/training/worker/test_golden.py has the release's own numbers.
Not covered: the geometric mean of the prefix; the release's limit of 10 on its log-ratio, far beyond the dual clip and
the bounds.
"""

import math

import torch
from torch.testing import assert_close

from tests.golden.settings import Setup
from verl_clipx.losses.methods.ctpo import Ctpo

from .hand_rows import HandRow, apply_method, make_test_of_rows, row, tokens_at

PUBLISHED = {"ctpo": dict(width_low=0.025, width_high=0.05, width_dual=0.05, power=0.5)}
VARIANTS = ({"width_dual": None, "power": 0.0},)
GOLDEN = {
    "ctpo": Setup(
        "ctpo",
        dict(width_low="la_clip_low", width_high="la_clip_high", width_dual="la_clip_c", power="clip_ratio_la_power"),
    )
}

# Prefixes 1.1, 1.21, 0.605 and 1.21. Upper bounds 1.105, 1.152, 1.189, 1.221; dual 1.162, 1.236, 1.297, 1.350.
RATIO = (1.1, 1.1, 0.5, 2.0)
METHOD = Ctpo(width_low=0.1, width_high=0.1, width_dual=0.15)

test_clipped_by_the_prefix = make_test_of_rows(
    {
        "A > 0": HandRow(method=METHOD, ratio=RATIO, advantages=1.0, weight=(1.1, 0.0, 0.605, 1.21)),
        "A < 0": HandRow(method=METHOD, ratio=RATIO, advantages=-1.0, weight=(1.1, 1.21, 0.0, 1.21)),
        "the dual clip widens too": HandRow(
            method=METHOD, ratio=(1.2, 1.0, 1.0, 1.0), advantages=-1.0, weight=(0.0, 1.2, 1.2, 1.2)
        ),
        "no dual clip": HandRow(
            method=Ctpo(width_low=0.1, width_high=0.1, width_dual=None),
            ratio=(1.2, 1.0),
            advantages=-1.0,
            weight=(1.2, 1.2),
        ),
    }
)


def test_bounds_widen_with_the_position_among_the_responses_tokens():
    bounds = apply_method(METHOD, tokens_at(row(*RATIO), row(*[1.0] * 4))).bounds
    assert_close(bounds.high, row(*(math.exp(0.1 * math.sqrt(position)) for position in (1, 2, 3, 4))))
    assert_close(bounds.low * bounds.high, row(*[1.0] * 4))
    assert_close(
        apply_method(Ctpo(power=0.0), tokens_at(row(*RATIO), row(*[1.0] * 4))).bounds.high, row(*[math.exp(0.05)] * 4)
    )
    masked = tokens_at(row(1.0, 1.0, 1.0), row(1.0, 1.0, 1.0), mask=torch.tensor([[True, False, True]]))
    assert_close(apply_method(METHOD, masked).bounds.high[0, 2].item(), math.exp(0.1 * math.sqrt(2)))
