"""The receipt's checks: which there are, which did not hold, and what one that does not hold does to the run."""

import logging
from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import Tensor

from verl_clipx.losses.base.method import NODE

logger = logging.getLogger(__name__)


class Check(Enum):
    """What the receipt looks at; each is counted once, however often it does not hold."""

    # The worker's settings and sources are those of the driver, and of the other ranks.
    SETTINGS = auto()
    # The bounds follow from the statistics, and are those of the other ranks.
    DECISION = auto()
    # An update trains the tokens of its pass.
    PASS = auto()
    # Each row is the one that the worker got, and is trained as often as the others.
    ROWS = auto()
    TRAINED_ONCE = auto()
    # Weights and rejection are those of verl's own code.
    WEIGHTS = auto()
    REJECTION = auto()
    OLD_LOG_PROBS = auto()
    # The policy's term on copies, what verl's loss function adds to it, and the gradient in the backward pass.
    COPIES = auto()
    BESIDES = auto()
    BACKWARD = auto()
    FACTORS = auto()
    # What the loss is divided by, and the tokens behind metrics, selection and bounds.
    SIZES = auto()
    COUNTED = auto()
    SELECTED = auto()
    BOUNDS = auto()
    # The number of updates, and whether anything was compared at all.
    UPDATES = auto()
    COMPARED = auto()


class Checks:
    """Stops the run or warns where a check does not hold, and keeps which ones did not.

    Args:
        asked: clipx.receipt: auto, stop or warn.
        tested: whether tests have run all of the run's options, so that `auto` stops.
    """

    def __init__(self, asked: str, *, tested: bool):
        self._asked = asked
        self._tested = tested
        self._failed: set[Check] = set()

    def expect(self, check: Check, holds: bool, otherwise: str, *, stops: bool | None = None) -> None:
        """Stops the run or warns if something does not hold.

        Args:
            otherwise: what is so instead.
            stops: whether `auto` stops; None: where tests ran.

        Raises:
            RuntimeError: it does not hold, and that stops the run.
        """
        if holds:
            return
        self._failed.add(check)
        message = f"receipt: {otherwise}: the run does not train what its line says"
        stops = self._tested if stops is None else stops
        if self._asked == "stop" or (self._asked == "auto" and stops):
            raise RuntimeError(f"{message}. To continue with only a warning, set {NODE}.receipt=warn.")
        logger.warning("clipx: %s.", message)

    def failures(self) -> Tensor:
        """Returns which checks did not hold on this rank, 0 or 1 in the order of `Check`, float64: for a sum."""
        return torch.tensor([float(check in self._failed) for check in Check], dtype=torch.float64)

    def number(self, over_ranks: Sequence[float]) -> int:
        """Returns how many checks did not hold on any rank, or since then on this one.

        Args:
            over_ranks: the sum of `failures` over the ranks.
        """
        return sum(count > 0 or check in self._failed for check, count in zip(Check, over_ranks, strict=True))
