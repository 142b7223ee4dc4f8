"""The receipt's checks: which there are, which did not hold, and what one that does not hold does to the run."""

import logging
from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import Tensor

from verl_clipx.losses.base.method import NODE

logger = logging.getLogger(__name__)


class Check(Enum):
    """What the receipt checks. Each check that does not hold is counted once, however often it is made."""

    # The worker's settings and sources are those of the driver, and of the other ranks.
    SETTINGS = auto()
    # The bounds are those that the method decides from the step's statistics, and those of the other ranks.
    DECISION = auto()
    # Each of Lopti's passes trains the group of tokens that is its turn, by the threshold of the settings.
    PASS = auto()
    # Each row has the values that the worker got for it.
    ROWS = auto()
    # Each row is trained as often as the others, and not again before them.
    TRAINED_ONCE = auto()
    # The samples have the weights of verl's own code if the run announces weights, and otherwise none.
    WEIGHTS = auto()
    # The rejected tokens are those that verl's own code rejects.
    REJECTION = auto()
    # The old log-probabilities come from where the run announces: recomputed before the first update, or the rollout's.
    OLD_LOG_PROBS = auto()
    # On copies of a micro-batch, the gradient of the policy's term is that of the announced loss.
    COPIES = auto()
    # On copies of a micro-batch, verl's loss function adds to the policy's term no other than verl's own terms.
    BESIDES = auto()
    # In the backward pass of each micro-batch, the gradient is that of the announced loss.
    BACKWARD = auto()
    # The engine multiplies all losses by the same factor: within an update, on all ranks, and since the first update.
    FACTORS = auto()
    # The losses are divided by the size that the mini-batch has.
    SIZES = auto()
    # The bounds and metrics are computed from as many tokens as were trained on.
    COUNTED = auto()
    # The losses are divided by as many selected tokens as were selected.
    SELECTED = auto()
    # The bounds are those of the tokens that were trained on.
    BOUNDS = auto()
    # The first rollout batch has as many updates as announced.
    UPDATES = auto()
    # Some token was compared.
    COMPARED = auto()


class Checks:
    """Stops the run or warns if a check does not hold, and remembers which ones did not.

    Args:
        asked: the run's clipx.receipt: "auto", "stop" or "warn".
        tested: whether tests have run all of the run's options. If so, a check that does not hold stops the run under
            "auto", unless `expect` is told otherwise.
    """

    def __init__(self, asked: str, *, tested: bool):
        self._asked = asked
        self._tested = tested
        self._failed: set[Check] = set()

    def expect(self, check: Check, holds: bool, failure: str, *, stops: bool | None = None) -> None:
        """Note a check that does not hold, and stop the run or warn. A check that holds does nothing.

        Args:
            check: the check.
            holds: whether the check holds.
            failure: what is wrong if the check does not hold, as a clause without a full stop. The message begins with
                it.
            stops: whether a failure stops the run if `asked` is "auto"; None: it does if `tested`. A failure always
                stops the run under "stop", and never under "warn".

        Raises:
            RuntimeError: the check does not hold, and that stops the run.
        """
        if holds:
            return
        self._failed.add(check)
        message = f"receipt: {failure}: the run does not train what the line 'clipx: clipx_…' at its start announces"
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
