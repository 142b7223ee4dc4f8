"""KPop by hand, both divergences and both signs, against autograd of its objective, and its authors' finding that
IcePop masks ever fewer tokens while the gap widens, on a made trace. tests/worker/test_golden.py has the numbers of
prime-rl's own function. Not covered: which policy the divergence is measured from.
"""

import math

import pytest
import torch

from tests.golden.settings import Setup
from verl_clipx.base.tokens import Inputs
from verl_clipx.methods.kpop import Kpop
from verl_clipx.modifiers.masks import IcePop, remaining

from .against_verl import assert_gradient_of, ragged
from .at import At, by_hand, moved, row, tokens_at

PUBLISHED = {"kpop": dict(threshold=0.1, kl_tau=1e-3)}
GOLDEN = {"primerl_kpop": Setup("kpop", dict(threshold="kpop_threshold", kl_tau="kl_tau"))}
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
        # KL(0.5, 0.3) is 0.0872, KL(0.5, 0.28) 0.1084.
        "just within the threshold, and just beyond": At(
            Kpop(**FREE), **moved((0.3, 0.5), (0.5, 0.28), (0.28, 0.5), advantages=1.0), weight=(5 / 3, 0.0, 0.0)
        ),
        # Both count as 1e-6, and 1 - 1e-9 as 1 - 1e-6.
        "next to 0 and to 1": At(
            Kpop(**FREE),
            **moved((1e-9, 1e-7), (1 - 1e-9, 0.5), (0.5, 1 - 1e-9), advantages=1.0),
            weight=(100.0, 0.0, 0.0),
        ),
        "pulled back, kept or dropped": At(
            Kpop(threshold=BETWEEN, kl_tau=0.5),
            **moved((0.2, 0.5), (0.5, 0.25), advantages=2.0),
            weight=(-math.log(2.5) / 2, 0.5 + math.log(2) / 2),
            value=(math.log(2.5) ** 2 / 2, math.log(2) ** 2 / 2 - 1),
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


def shares(sharpness: float, gap: float) -> tuple[float, float]:
    """The shares of tokens that IcePop's mask and KPop take out, of tokens whose probability fell by a gap.

    Args:
        sharpness: how close the sampler's probabilities are to 1: they are 1 - e^-sharpness and a little less.
        gap: by how much the probability fell.
    """
    sampled = torch.linspace(0.0, 1.0, 1000, dtype=torch.float64)[None] * 0.05 + 1 - math.exp(-sharpness) - 0.05
    current = (sampled - gap * torch.linspace(0.0, 1.0, 1000, dtype=torch.float64)[None]).log()
    ones, mask = torch.ones_like(current), torch.ones_like(current, dtype=torch.bool)
    inputs = Inputs(current, current, ones, mask, rollout_log_prob=sampled.log())
    of_icepop = 1 - float(remaining(IcePop(), inputs).double().mean())
    ratio = (current - sampled.log()).exp()
    t = tokens_at(ratio, ones, old_log_prob=sampled.log())

    method = Kpop(kl_tau=0.0)
    dropped = method.gradient_weight(t, method.bounds(t, ratio.new_zeros(0))) == 0
    return of_icepop, float(dropped.double().mean())


def test_icepop_masks_ever_fewer_tokens_where_probabilities_near_1_fall_ever_further():
    # From tokens of 0.4 that lose 0.25 to tokens of 0.95 that lose 0.45: the gap widens, and the ratio stays above 0.5.
    made = [shares(sharpness, gap) for sharpness, gap in ((0.6, 0.25), (1.2, 0.37), (3.0, 0.45))]
    of_icepop, of_kpop = zip(*made, strict=True)
    assert of_icepop[0] > of_icepop[1] > of_icepop[2] == 0
    assert of_kpop[0] < of_kpop[1] < of_kpop[2]
