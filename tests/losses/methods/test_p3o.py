"""P3O's cap and pull by hand, and the cap over a split mini-batch;
tests/training/worker/test_golden.py has the release's own numbers on one micro-batch. Not covered: the release's
per-micro-batch cap, which is clipx.scope=micro_batch; which policy the ratio is to.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from tests.golden.settings import Setup
from verl_clipx.losses.methods import Bounds
from verl_clipx.losses.methods.p3o import P3o

from .against_verl import ragged
from .hand_rows import HandRow, decide, make_test_of_rows, row, tokens_at

PUBLISHED = {"p3o": {}}
GOLDEN = {"feynrl_p3o": Setup("p3o", {})}
CAP = Bounds(0.0, 0.5)

test_by_hand = make_test_of_rows(
    {
        # (1 + 3)^2 / (2 (1 + 9)) = 0.8.
        "its own cap": HandRow(
            method=P3o(), ratio=(1.0, 3.0), advantages=(1.0, -1.0), weight=(0.8, 0.8 + 0.2 * (1 - 1 / 3))
        ),
        "at the cap, and beyond": HandRow(
            method=P3o(), ratio=(0.5, 0.75), advantages=-1.0, weight=(0.0, 0.5 + 0.5 * (1 - 4 / 3)), bounds=CAP
        ),
        # log r + 1 / r - 1 is 0.3069 at r = 2, and log pi is log 2 here.
        "its value": HandRow(
            method=P3o(),
            ratio=(2.0,),
            advantages=3.0,
            weight=(0.5 - 0.25 / 3,),
            value=(-1.5 * math.log(2) + 0.5 * (math.log(2) - 0.5),),
            bounds=CAP,
        ),
        "nothing moved": HandRow(method=P3o(), ratio=(1.0, 1.0), advantages=(1.0, -2.0), weight=1.0),
        "below the cap, and pulled back": HandRow(
            method=P3o(), ratio=(0.25, 0.5), advantages=2.0, weight=(0.25 + 0.75, 0.5 + 0.25), bounds=CAP
        ),
        # The authors' clamp of 1 / r ends its gradient, so that 0.5 log r alone pulls, downwards.
        "beyond the clamp": HandRow(
            method=P3o(),
            ratio=(math.exp(-12), math.exp(12)),
            advantages=1.0,
            weight=(math.exp(-12) - 0.5, 0.0),
            bounds=CAP,
        ),
        "where A is 0 it is not in F": HandRow(method=P3o(), ratio=(2.0,), advantages=0.0, weight=(0.5,), bounds=CAP),
    }
)


@pytest.mark.parametrize("x", [-20.0, -15.0, -11.0, -10.0, -9.0, 9.0, 10.0, 11.0, 15.0, 20.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_its_gradient_is_that_of_the_authors_formula(x, advantage):
    log_ratio = torch.tensor([[x]], dtype=torch.float64, requires_grad=True)
    capped = log_ratio.detach().exp().clamp(max=0.5)
    pull = log_ratio + (-log_ratio).clamp(-10, 10).exp() - 1
    objective = capped * advantage * log_ratio - 0.5 * pull
    objective.sum().backward()
    # The log-ratio itself, since the logarithm of a ratio needn't be exactly 10.
    t = tokens_at(log_ratio.detach().exp(), row(advantage))._replace(log_ratio=log_ratio.detach())
    weight = P3o().gradient_weight(t, CAP)
    assert_close(P3o().gradient(t, CAP, weight), log_ratio.grad, rtol=1e-12, atol=1e-15)


def test_it_pulls_where_the_advantage_is_0():
    t = tokens_at(row(2.0, 0.5, 2.0), row(0.0, 0.0, 1.0))
    assert_close(P3o().gradient(t, CAP, row(0.5, 0.5, 0.25)), row(-0.25, 0.5, 0.25))


def test_the_cap_of_parts_is_that_of_the_whole():
    batch = ragged(4)
    ratio = (batch["log_prob"] - batch["old_log_prob"]).exp()
    whole = tokens_at(ratio, batch["advantages"], mask=batch["response_mask"])
    sums = P3o().statistics(whole)
    parts = [tokens_at(ratio[k::2], batch["advantages"][k::2], mask=batch["response_mask"][k::2]) for k in range(2)]
    assert_close(sum(map(P3o().statistics, parts)), sums)
    assert 0 < float(decide(P3o(), whole)) < 1
    first_cap, second_cap = (float(decide(P3o(), part)) for part in parts)
    assert abs(first_cap - second_cap) > 1e-3


def test_without_tokens_the_cap_is_1():
    assert float(P3o().decide(torch.zeros(3, dtype=torch.float64))) == 1
