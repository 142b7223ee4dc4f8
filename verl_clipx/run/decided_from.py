"""The tokens that an update's bounds were decided from: what a run records and a replay reads."""

from enum import Enum


class DecidedFrom(str, Enum):
    """The tokens behind an update's bounds."""

    MINI_BATCH = "mini_batch"
    """All of the mini-batch, under the weights that the update starts from."""

    RATIO_ONE = "ratio_one"
    """All of the mini-batch, where the current log-probabilities are taken to equal the old ones."""

    LAGGED = "lagged"
    """The tokens of the same update on an earlier rollout batch."""

    MICRO_BATCH = "micro_batch"
    """Each micro-batch's own tokens. Bounds that depend on no token count here too."""
