"""prime-rl's IPO by hand: the probability's change at and beyond the threshold, for both signs; against autograd.

Not covered: prime-rl's own function, which no package on the index has; its quadratic term, which is not here; which
policy the change is measured from.
"""

import torch

from verl_clipx.methods.ipo import Ipo

from .against_verl import assert_gradient_of, ragged
from .at import At, by_hand, moved

PUBLISHED = {"ipo": dict(threshold=0.3)}
VARIANTS = ({"threshold": None},)
# Changes of 0.25, 0.5, -0.25 and -0.5; equal to the threshold is kept.
MOVES = ((0.25, 0.5), (0.25, 0.75), (0.5, 0.25), (0.75, 0.25))

test_a_token_that_moved_too_far_is_dropped_for_every_sign = by_hand(
    {
        **{
            f"A = {A}": At(Ipo(threshold=0.25), **moved(*MOVES, advantages=A), weight=(2.0, 0.0, 0.5, 0.0))
            for A in (1.0, -1.0, 0.0)
        },
        "no threshold": At(Ipo(threshold=None), **moved(*MOVES, advantages=1.0), weight=(2.0, 3.0, 0.5, 1 / 3)),
        "a large ratio of a rare token": At(Ipo(), **moved((0.001, 0.2), advantages=1.0), weight=(200.0,)),
    }
)


def test_the_gradient_is_that_of_the_stated_objective():
    batch = ragged(3, spread=0.8)
    old = batch["old_log_prob"]

    def objective(log_prob):
        kept = ((log_prob.exp() - old.exp()).abs() <= 0.3).detach()
        assert (~kept & batch["response_mask"]).any()
        return torch.where(kept, (log_prob - old).exp() * batch["advantages"], 0.0)

    assert_gradient_of("ipo", batch, objective)
