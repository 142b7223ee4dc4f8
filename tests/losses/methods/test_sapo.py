"""SAPO's weight and value by hand, at both temperatures; verl's own has the same gradient and value. Not covered: other
aggregations beside verl's own, which hard-codes seq-mean-token-mean.
"""

import math

from verl_clipx.losses.methods.sapo import Sapo

from .against_verl import SameInVerl
from .hand_rows import HandRow, make_test_of_rows

PUBLISHED = {"sapo": dict(tau_positive=1.0, tau_negative=1.05, log_ratio_clamp=20.0)}
VARIANTS = ({"tau_positive": 0.01, "tau_negative": 100, "log_ratio_clamp": None},)
SAME_IN_VERL = {
    f"sapo at {positive} and {negative}": SameInVerl(
        overrides=("+clipx=sapo", f"clipx.tau_positive={positive}", f"clipx.tau_negative={negative}"),
        verl_overrides=("policy_loss.loss_mode=sapo", f"tau_pos={positive}", f"tau_neg={negative}"),
        spreads=(1e-2, 0.7, 15.0),
        aggregations=("seq-mean-token-mean",),
    )
    for positive, negative in ((1, 1.05), (3, 0.4))
}
LOG_3 = math.log(3)
E25 = math.exp(25)

test_by_hand = make_test_of_rows(
    {
        # 4 / tau * sigmoid(0)
        "the ratio itself at 1": HandRow(
            method=Sapo(tau_positive=2.0, tau_negative=4.0),
            ratio=(1.0, 1.0, 1.0),
            advantages=(2.0, -2.0, 0.0),
            weight=1.0,
            value=(-2.0, 1.0, 0.0),
        ),
        # sigmoid(log 3) = 3/4 and sigmoid(-log 3) = 1/4: 4 * 3/4 * 1/4 = 3/4, times r.
        "at both temperatures": HandRow(
            method=Sapo(tau_positive=LOG_3, tau_negative=2 * LOG_3),
            ratio=(2.0, 1.5, 0.5),
            advantages=(1.0, -2.0, -1.0),
            weight=(1.5, 1.125, 0.375),
            value=(-3 / LOG_3, 3 / LOG_3, 0.5 / LOG_3),
        ),
        "A = 0 has that of A < 0": HandRow(
            method=Sapo(tau_positive=9.0, tau_negative=2 * LOG_3), ratio=(1.5,), advantages=0.0, weight=(1.125,)
        ),
        "beyond the clamp there is value but no gradient": HandRow(
            method=Sapo(),
            ratio=(1 / E25, E25),
            advantages=1.0,
            weight=0.0,
            value=(-4 / (1 + math.exp(1 - math.exp(-20))), -4.0),
        ),
        # The gate has long closed on the large one.
        "without the clamp": HandRow(
            method=Sapo(log_ratio_clamp=None),
            ratio=(1 / E25, E25),
            advantages=1.0,
            weight=(4 * math.e / (1 + math.e) ** 2 / E25, 0.0),
        ),
    }
)
