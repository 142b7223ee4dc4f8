"""GMPO's weight and value by hand, and the settings of verl's own geo_mean, with sequences' advantages as in the paper.
Not covered: verl's mean of advantages that differ within a sequence, and its geometric mean of correction weights: ours
weighs each token by itself.
"""

import math

import pytest

from verl_clipx.losses.methods.gmpo import Gmpo

from .against_verl import SameInVerl
from .hand_rows import HandRow, make_test_of_rows

# A width of 0.4 on the log-ratio.
PUBLISHED = {
    "gmpo": dict(clip_low=pytest.approx(math.exp(-0.4)), clip_high=pytest.approx(math.exp(0.4)), log_ratio_clamp=None)
}
VARIANTS = ({"clip_low": None, "clip_high": None, "log_ratio_clamp": None},)


def check_training(values):
    assert sum(values("actor/pg_clipfrac")) > 0


def give_the_papers_form(batch):
    """Take out the empty sequence, and give all tokens of a sequence one advantage."""
    batch.update({name: tensor[:-1] for name, tensor in batch.items()})
    batch["advantages"] = batch["advantages"][:, :1].expand(-1, 12).clone()


SAME_IN_VERL = {
    "gmpo": SameInVerl(
        overrides=("+clipx=gmpo",),
        verl_overrides=("policy_loss.loss_mode=geo_mean", "clip_ratio_low=0.4", "clip_ratio_high=0.4"),
        metrics=(),
        spreads=(1e-2, 0.5, 3.0),
        aggregations=("seq-mean-token-mean",),
        change_batch=give_the_papers_form,
        # verl divides by (tokens + 1e-8).
        rtol=1e-6,
    )
}
METHOD = Gmpo(clip_low=0.5, clip_high=2.0)
WITHOUT_BOUNDS = Gmpo(clip_low=None, clip_high=None)

test_by_hand = make_test_of_rows(
    {
        # The geometric mean of 4 and 1/4 is 1; with 4 clipped at 2 it is the root of 1/2.
        "clipped above": HandRow(
            method=METHOD, ratio=(4.0, 0.25), advantages=1.0, weight=(0.0, 0.5**0.5), value=-(0.5**0.5)
        ),
        "clipped below": HandRow(
            method=METHOD, ratio=(4.0, 0.25), advantages=-1.0, weight=(2.0**0.5, 0.0), value=2.0**0.5
        ),
        "inside": HandRow(method=METHOD, ratio=(1.5, 1.5), advantages=1.0, weight=1.5, value=-1.5),
        "below with A > 0": HandRow(method=METHOD, ratio=(0.25, 0.25), advantages=2.0, weight=0.25, value=-0.5),
        "above with A < 0": HandRow(method=METHOD, ratio=(4.0, 4.0), advantages=-2.0, weight=4.0, value=8.0),
        "A = 0, as in verl": HandRow(method=METHOD, ratio=(4.0, 2.0), advantages=0.0, weight=1.0, value=0.0),
        "no upper bound": HandRow(method=WITHOUT_BOUNDS, ratio=(9.0, 1.0), advantages=1.0, weight=3.0),
        "no lower bound": HandRow(method=WITHOUT_BOUNDS, ratio=(1 / 9, 1.0), advantages=-1.0, weight=1 / 3),
        "tokens outside the mask": HandRow(
            method=Gmpo(),
            ratio=(4.0, 1.0, 9.0),
            advantages=(-1.0, -1.0, 0.0),
            weight=(2.0, 2.0, math.nan),
            mask=(True, True, False),
        ),
    }
)
