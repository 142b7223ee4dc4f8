"""KPop by hand, both divergences and both signs, and against autograd of its objective. Not covered: prime-rl's own
function, which no package on the index has; which policy the divergence is measured from.
"""

import math

import pytest
import torch

from verl_clipx.methods.kpop import Kpop

from .against_verl import assert_gradient_of, ragged
from .at import At, by_hand, moved, row, tokens_at

PUBLISHED = {"kpop": dict(threshold=0.1, kl_tau=1e-3)}
# Few probabilities move by its threshold in a few steps.
SEEN_UNDER = ("clipx.threshold=1e-6",)
VARIANTS = ({"threshold": 0}, {"kl_tau": 0}, {"kl_tau": 100})


def kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


# KL(0.5, 0.2) is 0.223 and KL(0.2, 0.5) 0.193: only the larger one is beyond 0.2.
BETWEEN = 0.2
FREE = {"kl_tau": 0.0}

test_by_hand = by_hand(
    {
        **{
            f"either divergence and either direction, A = {A}": At(
                Kpop(threshold=BETWEEN, **FREE),
                **moved((0.2, 0.5), (0.5, 0.2), (0.2, 0.45), (0.5, 0.25), advantages=A),
                weight=(0.0, 0.0, 2.25, 0.5),
            )
            for A in (1.0, -1.0)
        },
        "a ratio of 100 of a rare token stays": At(
            Kpop(**FREE), **moved((1e-4, 1e-2), advantages=1.0), weight=(100.0,)
        ),
        "pulled back, kept or dropped": At(
            Kpop(threshold=BETWEEN, kl_tau=0.5),
            **moved((0.2, 0.5), (0.5, 0.25), advantages=2.0),
            weight=(-math.log(2.5) / 2, 0.5 + math.log(2) / 2),
        ),
    }
)


def test_the_divergence_is_the_larger_of_the_two():
    for before, now in ((0.2, 0.5), (0.9, 0.99), (0.01, 0.3), (0.999, 0.5)):
        ratio, old = row(now / before), row(before).log()
        found = float(Kpop().bounded(tokens_at(ratio, torch.ones_like(ratio), old_log_prob=old)))
        assert found == pytest.approx(max(kl(now, before), kl(before, now)) * (1 if now > before else -1), rel=1e-6)


def test_the_gradient_is_that_of_the_stated_objective():
    batch = ragged(3, spread=0.8)
    old = batch["old_log_prob"]

    def objective(log_prob):
        p, q = log_prob.detach().exp(), old.exp()
        either = [a * (a / b).log() + (1 - a) * ((1 - a) / (1 - b)).log() for a, b in ((p, q), (q, p))]
        kept = torch.stack(either).amax(0) <= 0.1
        assert (~kept & batch["response_mask"]).any()
        of_kept = torch.where(kept, (log_prob - old).exp() * batch["advantages"], 0.0)
        return of_kept - 1e-3 * (log_prob - old).square()

    assert_gradient_of("kpop", batch, objective)
