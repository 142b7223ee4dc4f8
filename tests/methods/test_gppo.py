"""GPPO's weight by hand and its relation to GRPO's; the paper's formula is in the golden vectors."""

import math

import torch

from tests.golden.settings import EPSILONS, UNCLAMPED, Setup
from verl_clipx.methods import Bounds
from verl_clipx.methods.gppo import Gppo
from verl_clipx.methods.grpo import Grpo

from .at import At, by_hand, row, weight

PUBLISHED = {"gppo": dict(clip_low=0.8, clip_high=1.2)}
GOLDEN = {"paper_gppo": Setup(("+clipx=gppo",), EPSILONS, UNCLAMPED)}
GPPO = Gppo(clip_low=0.8, clip_high=1.25)

test_by_hand = by_hand(
    {
        "A of every sign": At(
            GPPO,
            (0.5, 0.5, 0.8, 1.0, 1.25, 2.0, 2.0, 2.0),
            (-1.0, 1.0, -1.0, 1.0, 1.0, 1.0, -1.0, 0.0),
            (0.8, 0.5, 0.8, 1.0, 1.25, 1.25, 2.0, 2.0),
        ),
        "beyond the clamp only the bounds keep a gradient": At(
            GPPO,
            (math.exp(25), math.exp(25), math.exp(-25), math.exp(-25)),
            (1.0, -1.0, 1.0, -1.0),
            (1.25, 0.0, 0.0, 0.8),
        ),
        "bounds of each token": At(GPPO, (0.7, 0.7), -1.0, (0.9, 0.7), bounds=Bounds(row(0.9, 0.5), row(1.5, 1.5))),
    }
)


def test_bounds_replace_exactly_what_grpo_zeroes():
    ratio, advantages = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))
    ours, zeroed = (
        weight(method, ratio.exp(), advantages) for method in (GPPO, Grpo(clip_low=0.8, clip_high=1.25, dual_clip=None))
    )
    kept = zeroed != 0
    assert torch.equal(ours[kept], zeroed[kept])
    assert set(ours[~kept].tolist()) == set(torch.tensor([0.8, 1.25]).tolist())
