"""The fingerprint of each update of a rollout batch: which rows it trained on, whatever their order and the ranks."""

from typing import Any

from verl_clipx.training.observing import UPDATES
from verl_clipx.training.worker.fingerprints import hash_field
from verl_clipx.training.worker.step import Observer, OptimizerStep, RolloutBatch

# The field of verl's mini-batch that keeps the hashes of its rows.
HASHES = "clipx_row_hash"
# The name of these fingerprints among what observes a run, for the message of a failure.
FINGERPRINTS = "the fingerprints of updates"


class UpdateFingerprints(Observer):
    """Sums the hashes of the rows of each update, over all ranks.

    Rows are hashed when the worker gets the rollout batch, on the host. An update sums the hashes of the rows that verl
    has put into its mini-batch.
    """

    def __init__(self) -> None:
        # The sum over this rank's rows of the current update; None if there are no hashes.
        self._sum_of_rank: int | None = None
        # The fingerprint of each update of the rollout batch so far; None for one that is not known.
        self._fingerprints: list[int | None] = []

    def begin_rollout_batch(self, data: Any, batch: RolloutBatch) -> None:
        """Add the hash of each row to the data of the rollout batch."""
        self._fingerprints = []
        data[HASHES] = hash_field(data)

    def begin_update(self, step: OptimizerStep, batch: RolloutBatch) -> None:
        """Sum the hashes of this rank's rows of the mini-batch."""
        self._sum_of_rank = None
        if step.row_hashes is not None:
            # By Python's integers, which do not overflow.
            self._sum_of_rank = sum(step.row_hashes.tolist())

    def report(self) -> int | None:
        """Return this rank's sum."""
        return self._sum_of_rank

    def hear(self, reports: list[Any]) -> None:
        """Keep the update's fingerprint; None if the sum of some rank is not known.

        Args:
            reports: the sum of each rank.
        """
        is_known = bool(reports) and None not in reports
        self._fingerprints.append(sum(reports) % 2**64 if is_known else None)

    def end_rollout_batch(self, batch: RolloutBatch) -> dict[str, list[Any]]:
        """Return the fingerprints of all updates as a metric; no metric if one of them is not known."""
        if None in self._fingerprints or not self._fingerprints:
            return {}
        return {UPDATES: self._fingerprints}
