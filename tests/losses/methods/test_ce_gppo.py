"""CE-GPPO's weight by hand; the paper's formula is in the golden vectors."""

from tests.golden.settings import EPSILONS, UNCLAMPED, Setup
from verl_clipx.losses.methods.ce_gppo import CeGppo

from .hand_rows import HandRow, make_test_of_rows

PUBLISHED = {
    "ce_gppo": dict(clip_low=0.8, clip_high=1.2, beta_low=0.75, beta_high=1.0, dual_clip=None),
    "ce_gppo_reference": dict(beta_low=0.75, beta_high=1.0, dual_clip=3.0),
}
GOLDEN = {"paper_cegppo": Setup("ce_gppo", {**EPSILONS, "beta_low": "beta1", "beta_high": "beta2"}, UNCLAMPED)}
BOUNDS = {"clip_low": 0.8, "clip_high": 1.25}

test_by_hand = make_test_of_rows(
    {
        "scales": HandRow(
            method=CeGppo(beta_low=0.5, beta_high=2.0, **BOUNDS),
            ratio=(0.5, 0.5, 1.0, 1.25, 2.0, 2.0, 4.0),
            advantages=(-1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0),
            weight=(0.4, 0.5, 1.0, 1.25, 2.5, 2.0, 4.0),
        ),
        "the dual clip drops negative tokens alone": HandRow(
            method=CeGppo(dual_clip=3.0, **BOUNDS),
            ratio=(3.0, 4.0, 4.0),
            advantages=(-1.0, -1.0, 1.0),
            weight=(3.0, 0.0, 1.25),
        ),
    }
)
