"""GMPO's weight and value by hand, and against verl's own geo_mean.

Covers both bounds, the mean over the sequence's clipped ratios, loss and gradient where the sequences' advantages are
their tokens', as the paper has them. Not covered: verl's mean of advantages that differ within a sequence, and its
geometric mean of correction weights: ours weighs each token by itself.
"""

import math

import pytest
from torch.testing import assert_close

from tests.composition import built_once
from tests.golden.runs import registered_loss
from verl_clipx.methods.gmpo import Gmpo

from .against_verl import ACTOR, ragged
from .at import At, by_hand

# A width of 0.4 on the log-ratio.
PUBLISHED = {
    "gmpo": dict(clip_low=pytest.approx(math.exp(-0.4)), clip_high=pytest.approx(math.exp(0.4)), log_ratio_clamp=None)
}
VARIANTS = ({"clip_low": None, "clip_high": None, "log_ratio_clamp": None},)


def SEEN(values):
    assert sum(values("actor/pg_clipfrac")) > 0


OURS = ("+clipx=gmpo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean")
OF_VERL = (f"{ACTOR}.policy_loss.loss_mode=geo_mean", f"{ACTOR}.clip_ratio_low=0.4", f"{ACTOR}.clip_ratio_high=0.4")
METHOD, FREE = Gmpo(clip_low=0.5, clip_high=2.0), Gmpo(clip_low=None, clip_high=None)

test_by_hand = by_hand(
    {
        # The geometric mean of 4 and 1/4 is 1; with 4 clipped at 2 it is the root of 1/2.
        "clipped above": At(METHOD, (4.0, 0.25), 1.0, (0.0, 0.5**0.5), value=-(0.5**0.5)),
        "clipped below": At(METHOD, (4.0, 0.25), -1.0, (2.0**0.5, 0.0), value=2.0**0.5),
        "inside": At(METHOD, (1.5, 1.5), 1.0, 1.5, value=-1.5),
        "below with A > 0": At(METHOD, (0.25, 0.25), 2.0, 0.25, value=-0.5),
        "above with A < 0": At(METHOD, (4.0, 4.0), -2.0, 4.0, value=8.0),
        "A = 0, as in verl": At(METHOD, (4.0, 2.0), 0.0, 1.0, value=0.0),
        "no upper bound": At(FREE, (9.0, 1.0), 1.0, 3.0),
        "no lower bound": At(FREE, (1 / 9, 1.0), -1.0, 1 / 3),
        "tokens outside the mask": At(
            Gmpo(), (4.0, 1.0, 9.0), (-1.0, -1.0, 0.0), (2.0, 2.0, math.nan), mask=(True, True, False)
        ),
    }
)


@pytest.mark.parametrize("spread", [1e-2, 0.5, 3.0])
def test_same_as_verls_own(spread):
    batch = {name: tensor[:-1] for name, tensor in ragged(0, spread=spread).items()}
    batch["advantages"] = batch["advantages"][:, :1].expand(-1, 12).clone()
    found, expected = (
        registered_loss(built_once(of), batch, loss_agg_mode="seq-mean-token-mean") for of in (OURS, OF_VERL)
    )
    # verl divides by (tokens + 1e-8).
    assert_close(found[:2], expected[:2], rtol=1e-6, atol=1e-9)
    assert found[1].any() and (found[1] == 0).any()
