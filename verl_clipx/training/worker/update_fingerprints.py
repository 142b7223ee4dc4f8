"""The fingerprint of each update of a rollout batch: which rows it trained on, whatever their order and the ranks."""

from typing import Any

from verl_clipx.training.observing import UPDATES
from verl_clipx.training.worker.fingerprints import hash_field
from verl_clipx.training.worker.step import Observer, OptimizerStep, RolloutBatch

# The field of verl's mini-batch that keeps the hashes of its rows.
HASHES = "clipx_row_hash"
FINGERPRINTS = "the fingerprints of updates"


class UpdateFingerprints(Observer):
    """Sums the hashes of the rows of each update, over all ranks.

    Rows are hashed where the worker gets them, on the host, and each update counts those in its mini-batch as verl cut
    it.
    """

    def __init__(self) -> None:
        self._rows: int | None = None
        self._updates: list[int | None] = []

    def begin_rollout_batch(self, data: Any, batch: RolloutBatch) -> None:
        """Gives each row of the rollout batch its hash."""
        self._updates = []
        data[HASHES] = hash_field(data)

    def begin_update(self, step: OptimizerStep, batch: RolloutBatch) -> None:
        """Sums the hashes of this rank's rows of the mini-batch."""
        self._rows = None if step.row_hashes is None else sum(step.row_hashes.tolist())

    def report(self) -> int | None:
        """Returns this rank's sum."""
        return self._rows

    def hear(self, reports: list[Any]) -> None:
        """Keeps the update's fingerprint; None where a rank has none."""
        is_known = bool(reports) and None not in reports
        self._updates.append(sum(reports) % 2**64 if is_known else None)

    def end_rollout_batch(self, batch: RolloutBatch) -> dict[str, list[Any]]:
        """Returns the fingerprints of all updates; nothing if one of them is not known."""
        if None in self._updates or not self._updates:
            return {}
        return {UPDATES: self._updates}
