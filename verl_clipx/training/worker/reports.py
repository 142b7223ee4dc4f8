"""Parts of a rank that only observe: none ends the run, and one whose numbers are joined over ranks is off on all."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from verl_clipx.common.files import EMPTY
from verl_clipx.training.observing import Part
from verl_clipx.training.worker.fingerprints import hash_field

# The metric in which a rank's report travels, and the field of verl's mini-batch that keeps the hashes of its rows.
REPORT, HASHES = "clipx_report", "clipx_row_hash"
# What the trainer's process takes out of a rollout batch's metrics: the fingerprint of each update, and names of parts.
UPDATES, OFF = "clipx_updates", "clipx_off/"


class Report(NamedTuple):
    """A rank's message about an update, sent with each of its micro-batches.

    Args:
        rows: the sum of the hashes of its mini-batch's rows; None if they are not made.
        off: the names of its parts that have failed.
        metrics: the keys of the plugin's metrics of the micro-batch.
    """

    rows: int | None
    off: tuple[str, ...]
    metrics: tuple[str, ...]


class Reports:
    """This rank's observations of its updates, and what the ranks say to each other of them.

    verl gathers each update's metrics over the data-parallel ranks, and a rank's report is one of them: this takes
    neither a collective nor a host sync more. Rows are hashed where the worker gets them, on the host, and each update
    counts those in its mini-batch as verl cut it, whatever the order and the number of ranks. A part that failed on one
    rank goes off on all of them before verl aggregates what the others have: with another number of values on a rank
    it would end the run.
    """

    def __init__(self) -> None:
        self.metrics, self.rows = Part("the metrics of the loss"), Part("the fingerprints of updates")
        # The others may be off on one rank alone.
        self.parts = [self.metrics, self.rows]
        self._rows: int | None = None
        self._updates: list[int | None] = []
        self._off: set[str] = set()
        self._keys: set[str] = set()

    def begin_rollout_batch(self, data: Any) -> None:
        """Gives each row of the rollout batch, on the host, its hash."""
        self._updates, self._keys = [], set()
        if (hashes := self.rows.run(lambda: hash_field(data))) is not None:
            data[HASHES] = hashes

    def begin_update(self, data: Any) -> None:
        """Takes the hashes out of a mini-batch, before it goes to the accelerator."""
        hashes = data.pop(HASHES, None)
        self._rows = None if hashes is None else self.rows.run(lambda: sum(hashes.tolist()))

    def of_rank(self, metrics: Iterable[str]) -> dict[str, Report]:
        """Returns the report that goes with a micro-batch's metrics, whose own keys are given."""
        return {REPORT: Report(self._rows, tuple(part.name for part in self.parts if part.off), tuple(metrics))}

    def end_update(self, metrics: dict[str, Any]) -> None:
        """Takes the ranks' reports out of an update's metrics, and what belongs to a part that is off."""
        reports = metrics.pop(REPORT, [])
        of_ranks = reports if reports and isinstance(reports[0], list) else [reports]
        latest = [of_rank[-1] for of_rank in of_ranks if of_rank]
        self._off |= {name for report in latest for name in report.off}
        for part in self.parts:
            part.off |= part.name in self._off
        self._keys |= {key for of_rank in of_ranks for report in of_rank for key in report.metrics}
        self.remove(metrics)
        rows = [report.rows for report in latest]
        self._updates.append(sum(rows) % 2**64 if rows and None not in rows else None)

    def remove(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Removes the plugin's metrics of the loss, if that part is off, and returns what is left."""
        for key in self._keys if self.metrics.off else ():
            metrics.pop(key, None)
        return metrics

    def end_rollout_batch(self) -> dict[str, list[Any]]:
        """Returns what the trainer's process is told; from the first rollout batch on a failure ends no run."""
        self._off |= {part.name for part in self.parts if part.off}
        for part in self.parts:
            part.armed = True
        updates = {} if self.rows.off or None in self._updates or not self._updates else {UPDATES: self._updates}
        return updates | {f"{OFF}{name}": [1.0] for name in sorted(self._off)}


class Guarded:
    """Calls a `step.Observer` without collectives as a part of the run, which may be off on one rank alone."""

    def __init__(self, observer: Any, part: Part):
        self.observer, self._part = observer, part

    @property
    def finished(self) -> bool:
        """Returns whether it is not called any more."""
        return self._part.off or self.observer.finished

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *of: self._part.run(lambda: getattr(self.observer, method)(*of), EMPTY)
