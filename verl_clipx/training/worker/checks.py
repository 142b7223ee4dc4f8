"""The receipt's checks: which there are, which did not hold, and what one that does not hold does to the run."""

import logging
from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import Tensor

from verl_clipx.losses.base.method import NODE

logger = logging.getLogger(__name__)


class Check(Enum):
    """What the receipt checks. Each is counted once, however often it does not hold."""

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
    # The gradient of the policy's term on copies, that of what verl's loss function adds to it, the gradient in the
    # backward pass, and what the engine multiplies losses by.
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
    """Stops the run or warns if a check does not hold, and remembers which ones did not.

    Args:
        asked: the run's clipx.receipt: auto, stop or warn.
        tested: whether tests have run all of the run's options. If so, every check stops the run under `auto`.
    """

    def __init__(self, asked: str, *, tested: bool):
        self._asked = asked
        self._tested = tested
        self._failed: set[Check] = set()

    def expect(self, check: Check, holds: bool, failure: str, *, stops: bool | None = None) -> None:
        """Stop the run or warn if a check does not hold.

        Args:
            check: the check, which is remembered as failed if it does not hold.
            holds: whether it holds.
            failure: what is wrong if it does not, for the message: a clause without a full stop.
            stops: whether it stops the run under `auto`; None: if tests have run all of the run's options.

        Raises:
            RuntimeError: it does not hold, and that stops the run.
        """
        if holds:
            return
        self._failed.add(check)
        message = f"receipt: {failure}: the run does not train what its line says"
        stops_under_auto = self._tested if stops is None else stops
        if self._asked == "stop" or (self._asked == "auto" and stops_under_auto):
            raise RuntimeError(f"{message}. To continue with only a warning, set {NODE}.receipt=warn.")
        logger.warning("clipx: %s.", message)

    def failures(self) -> Tensor:
        """Return which checks did not hold on this rank: 1 for each of them and 0 for the others, float64, (checks,).

        They are in the order of `Check`, so that the ranks can sum them.
        """
        return torch.tensor([float(check in self._failed) for check in Check], dtype=torch.float64)

    def count_failed(self, over_ranks: Sequence[float]) -> int:
        """Return how many checks did not hold on some rank or, since `failures` was summed, on this rank.

        Args:
            over_ranks: the sum of `failures` over the ranks.
        """
        failed = [check for check, ranks in zip(Check, over_ranks, strict=True) if ranks > 0 or check in self._failed]
        return len(failed)
