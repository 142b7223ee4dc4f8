"""VESPO's weight of a sequence's ratio by hand, its range, and the constants that it refuses. TRL's numbers are in
tests/training/worker/test_golden.py. Not covered: TRL's truncated correction inside the sequence's ratio, which this
plugin leaves to verl's correction.
"""

import math

import pytest

from tests.golden.settings import Setup
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.losses.contract.contract import finite_for_every_finite_input
from verl_clipx.losses.methods.vespo import Vespo

from .hand_rows import HandRow, make_test_of_rows

PUBLISHED = {"vespo": dict(k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0)}
VARIANTS = ({"k_positive": 1.0, "lambda_negative": 5.0},)
KEYS = dict(k_positive="k_pos", lambda_positive="lambda_pos", k_negative="k_neg", lambda_negative="lambda_neg")
GOLDEN = {"trl_vespo": Setup("vespo", KEYS)}
# Sequences with w = 1, 2 and 0.5.
RATIO = ((0.5, 2.0), (1.0, 2.0), (0.25, 2.0))


def weights(k, decay):
    return tuple((w**k * math.exp(decay * (1 - w)),) * 2 for w in (1.0, 2.0, 0.5))


test_by_hand = make_test_of_rows(
    {
        **{
            f"A = {A}": HandRow(method=Vespo(), ratio=RATIO, advantages=A, weight=weights(*by))
            for A, by in ((1.0, (2, 3)), (0.0, (2, 3)), (-1.0, (3, 2)))
        },
        "masked tokens are no part of the product": HandRow(
            method=Vespo(), ratio=(1.0, 50.0), advantages=1.0, weight=(1.0, math.nan), mask=(True, False)
        ),
        "the least ratio of a sequence": HandRow(
            method=Vespo(), ratio=(1e-6, 1e-6), advantages=1.0, weight=(1e-16 * math.exp(3 - 3e-8),) * 2
        ),
        # exp(20) inside the exponent: no weight is left, and none overflows.
        "the largest": HandRow(method=Vespo(), ratio=(1e6, 1e6), advantages=-1.0, weight=0.0),
    }
)


@pytest.mark.parametrize("sign", ["positive", "negative"])
@pytest.mark.parametrize(("k", "lambda_"), [(20, 0.05), (10, 1e-30), (3.5, 1e-30)])
def test_constants_that_let_the_weight_grow_too_large_are_refused(sign, k, lambda_):
    with pytest.raises(Refusal, match=f"clipx.lambda_{sign}") as raised:
        Vespo(**{f"k_{sign}": k, f"lambda_{sign}": lambda_})
    assert raised.value.key == f"clipx.k_{sign}"
    assert raised.value.value == k


@pytest.mark.parametrize("sign", ["positive", "negative"])
@pytest.mark.parametrize(("k", "lambda_"), [(20, 0.5), (20, 30), (3.4, 1e-30), (1e-30, 30)])
def test_other_constants_give_finite_weights(sign, k, lambda_):
    finite_for_every_finite_input(Vespo(**{f"k_{sign}": k, f"lambda_{sign}": lambda_}))
