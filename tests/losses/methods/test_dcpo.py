"""DCPO's bounds and weights by hand and against autograd. Not covered: the paper's advantages and its average over
tokens, which are not the plugin's.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from verl_clipx.losses.contract.contract import example
from verl_clipx.losses.methods.dcpo import Dcpo

from .against_verl import assert_gradient_of
from .hand_rows import HandRow, apply_method, make_test_of_rows, row, tokens_at

PUBLISHED = {
    "dcpo": dict(epsilon_low=0.16, epsilon_high=0.2, largest_ratio=10.0, dual_clip=10.0),
    "dcpo_reference": dict(epsilon_low=0.2, epsilon_high=0.28, largest_ratio=10.0, dual_clip=10.0),
}
VARIANTS = ({"largest_ratio": None, "dual_clip": None}, {"epsilon_low": 0.0, "epsilon_high": 0.0})

# Bounds 0.5 and 1.25 for all.
RATIO = (0.49, 0.51, 1.24, 1.26, 0.4, 1.3, 9.0, 11.0, 11.0)
ADVANTAGES = (-1.0, -1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0)
WEIGHTS = (0.0, 0.51, 1.24, 0.0, 0.4, 1.3, 9.0)

test_weights_by_hand = make_test_of_rows(
    {
        "dual clip": HandRow(method=Dcpo(), ratio=RATIO, advantages=ADVANTAGES, weight=(*WEIGHTS, 0.0, 11.0), old=0.64),
        "no dual clip": HandRow(
            method=Dcpo(dual_clip=None), ratio=RATIO, advantages=ADVANTAGES, weight=(*WEIGHTS, 11.0, 11.0), old=0.64
        ),
    }
)


def bounds_at(method, *probability, dtype=torch.float64):
    q = row(*probability, dtype=dtype)
    return apply_method(method, tokens_at(torch.ones_like(q), torch.ones_like(q), old_log_prob=q.log())).bounds


def test_bounds_by_hand():
    # The paper's numbers are those at which a likely token has GRPO's bounds: 0.8 at q = 1 and 1.2 at q = 1 / 1.2.
    low, high = bounds_at(Dcpo(), 1.0, 1 / 1.2, 0.64, 0.01, 1e-4)
    # 4 * 0.16 / q is 0.64, 0.768, 1, 64, 6400; 4 * 0.2 / q is 0.8, 0.96, 1.25, 80, 8000.
    assert_close(low, row(0.8, 0.5 + 0.5 * math.sqrt(0.232), 0.5, 0.5, 0.5))
    assert_close(high, row(0.5 + 0.5 * math.sqrt(1.8), 1.2, 1.25, 5.0, 10.0))
    assert bounds_at(Dcpo(largest_ratio=3.0), 0.01).high.tolist() == [[3.0]]
    assert_close(bounds_at(Dcpo(largest_ratio=None), 1e-4).high, row(0.5 + 0.5 * math.sqrt(8001)))
    # A probability of zero has bounds too.
    for epsilon, expected in ((0.2, (0.5, 10.0)), (0.0, (1.0, 1.0))):
        for dtype in (torch.float32, torch.float64):
            of_zero = bounds_at(Dcpo(epsilon_low=epsilon, epsilon_high=epsilon), 0.0, dtype=dtype)
            assert (of_zero.low.item(), of_zero.high.item()) == expected


@pytest.mark.parametrize(("group", "epsilon_low", "epsilon_high"), [("dcpo", 0.16, 0.2), ("dcpo_reference", 0.2, 0.28)])
def test_the_registered_loss_against_autograd(group, epsilon_low, epsilon_high):
    batch = example()
    batch["response_mask"] = batch.pop("mask")
    batch["log_prob"] = (batch["old_log_prob"] + 4 * (batch["log_prob"] - batch["old_log_prob"])).clamp(max=0)

    def objective(log_prob):
        A, q, r = batch["advantages"], batch["old_log_prob"].exp(), (log_prob - batch["old_log_prob"]).exp()
        low = 0.5 + 0.5 * (1 - 4 * epsilon_low / q).clamp(min=0).sqrt()
        high = (0.5 + 0.5 * (1 + 4 * epsilon_high / q).sqrt()).clamp(max=10)
        surrogate = torch.minimum(r * A, r.clamp(low, high) * A)
        return torch.where(A < 0, torch.maximum(surrogate, 10 * A), surrogate)

    assert assert_gradient_of(group, batch, objective)["actor/pg_clipfrac"] > 0
