"""A pull towards another policy: a term of the objective whose gradient does not grow with the advantage."""

from torch import Tensor, where


def pulled_weight(weight: Tensor, pull: Tensor, advantages: Tensor) -> Tensor:
    """F with a pull, divided by A, in it; where A is 0 it can't hold one. All are (sequences, length)."""
    return where(advantages == 0, weight, weight - pull / where(advantages == 0, 1.0, advantages))


def pulled_gradient(weight: Tensor, pull: Tensor, advantages: Tensor) -> Tensor:
    """dJ/dlog_prob with a pull, from F with the pull in it, (sequences, length)."""
    return where(advantages == 0, -pull, weight * advantages)
