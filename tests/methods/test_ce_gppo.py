"""CE-GPPO's weight by hand and its relation to GPPO's; the paper's formula is in the golden vectors."""

import torch

from tests.golden.settings import EPSILONS, UNCLAMPED, Key, Setup
from verl_clipx.methods.ce_gppo import CeGppo
from verl_clipx.methods.gppo import Gppo

from .at import At, by_hand, weight

PUBLISHED = {
    "ce_gppo": dict(clip_low=0.8, clip_high=1.2, beta_low=0.75, beta_high=1.0, dual_clip=None),
    "ce_gppo_reference": dict(beta_low=0.75, beta_high=1.0, dual_clip=3.0),
}
GOLDEN = {
    "paper_cegppo": Setup(
        ("+clipx=ce_gppo",), (*EPSILONS, Key("beta1", "beta_low", 0.75), Key("beta2", "beta_high", 1.0)), UNCLAMPED
    )
}
BOUNDS = {"clip_low": 0.8, "clip_high": 1.25}

test_by_hand = by_hand(
    {
        "scales": At(
            CeGppo(beta_low=0.5, beta_high=2.0, **BOUNDS),
            (0.5, 0.5, 1.0, 1.25, 2.0, 2.0, 4.0),
            (-1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0),
            (0.4, 0.5, 1.0, 1.25, 2.5, 2.0, 4.0),
        ),
        "the dual clip drops negative tokens alone": At(
            CeGppo(dual_clip=3.0, **BOUNDS), (3.0, 4.0, 4.0), (-1.0, -1.0, 1.0), (3.0, 0.0, 1.25)
        ),
    }
)


def test_betas_of_one_are_gppo():
    ratio, advantages = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))
    ours = CeGppo(beta_low=1.0, beta_high=1.0, log_ratio_clamp=5.0, **BOUNDS)
    gppos = Gppo(log_ratio_clamp=5.0, **BOUNDS)
    ratio = (3 * ratio).exp()
    assert torch.equal(weight(ours, ratio, advantages), weight(gppos, ratio, advantages))
