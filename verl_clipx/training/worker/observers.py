"""A rank's observers. Each hook is called in one place, and what fails on one rank goes off on all of them."""

import inspect
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from verl_clipx.training.observing import OFF, Observers
from verl_clipx.training.worker.step import Observer, RolloutBatch

HOOKS = tuple(name for name, member in vars(Observer).items() if inspect.isfunction(member))

# The metric in which a rank's report travels.
REPORT = "clipx_report"
# The name under which the metrics of the loss are made.
METRICS = "the metrics of the loss"


class Report(NamedTuple):
    """A rank's message about an update, sent with each of its micro-batches.

    Args:
        off: the names that are off on it.
        metrics: the keys of the plugin's metrics of the micro-batch.
        reports: by name, what its observers report.
    """

    off: tuple[str, ...]
    metrics: tuple[str, ...]
    reports: dict[str, Any]


class RankObservers(Observers):
    """The observers of one rank, whose hooks are called in the order in which they were added.

    verl gathers each update's metrics over the data-parallel ranks, and a rank's report is one of them: this takes
    neither a collective nor a host sync more. A name that is off on one rank goes off on all of them before verl
    aggregates what the others have: with another number of values on a rank it would end the run.

    Args:
        observers: those that may end the run, as `add` takes them.
    """

    def __init__(self, *observers: Observer):
        super().__init__()
        self._entries: list[tuple[Observer, str | None]] = []
        self._keys: set[str] = set()
        for observer in observers:
            self.add(observer)

    def add(self, observer: Observer, name: str | None = None) -> None:
        """Registers an observer.

        Args:
            name: what goes off when the observer raises; None: its exceptions end the run.

        Raises:
            TypeError: the observer has a public method that is no hook, and so would never be called.
        """
        refuse_unknown_hooks(type(observer))
        self._entries.append((observer, name))

    def remove(self, observer: Observer) -> None:
        """Removes an observer, which is not called any more."""
        self._entries = [entry for entry in self._entries if entry[0] is not observer]

    def __iter__(self) -> Iterator[Observer]:
        return iter([observer for observer, _ in self._entries])

    def __len__(self) -> int:
        return len(self._entries)

    def begin_rollout_batch(self, *arguments: Any) -> None:
        """Calls `Observer.begin_rollout_batch`."""
        self._keys = set()
        self._call("begin_rollout_batch", *arguments)

    def begin_update(self, *arguments: Any) -> None:
        """Calls `Observer.begin_update`."""
        self._call("begin_update", *arguments)

    def end_micro_batch(self, *arguments: Any) -> None:
        """Calls `Observer.end_micro_batch`."""
        self._call("end_micro_batch", *arguments)

    def report(self, metrics: Iterable[str]) -> dict[str, Report]:
        """Returns the report that goes with a micro-batch's metrics, whose own keys are given."""
        reports = {
            name: self.run(name, observer.report)
            for observer, name in self._entries
            if name is not None and name not in self.off
        }
        return {REPORT: Report(off=tuple(self.off), metrics=tuple(metrics), reports=reports)}

    def hear(self, metrics: dict[str, Any]) -> None:
        """Takes the ranks' reports out of an update's metrics, and what belongs to a name that is off."""
        of_ranks = metrics.pop(REPORT, [])
        if of_ranks and not isinstance(of_ranks[0], list):
            of_ranks = [of_ranks]
        latest = [of_rank[-1] for of_rank in of_ranks if of_rank]
        for report in latest:
            self.off.update(report.off)
        for of_rank in of_ranks:
            for report in of_rank:
                self._keys.update(report.metrics)
        self.drop_metrics(metrics)
        for observer, name in self._entries:
            if name is not None:
                self._hear_reports(observer, name, latest)

    def _hear_reports(self, observer: Observer, name: str, latest: list[Report]) -> None:
        reports = [report.reports.get(name) for report in latest]
        self.run(name, lambda: observer.hear(reports))

    def drop_metrics(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Removes the plugin's metrics of the loss, if these are off, and returns what is left."""
        if METRICS in self.off:
            for key in self._keys:
                metrics.pop(key, None)
        return metrics

    def end_update(self, *arguments: Any) -> None:
        """Calls `Observer.end_update`."""
        self._call("end_update", *arguments)

    def end_rollout_batch(self, batch: RolloutBatch) -> dict[str, list[Any]]:
        """Returns the metrics of all observers, and removes those that have finished or gone off.

        From the first rollout batch on, a failure ends no run.
        """
        metrics: dict[str, list[Any]] = {}
        for logged in self._call("end_rollout_batch", batch):
            metrics.update(logged or {})
        self._entries = [entry for entry in self._entries if not self._is_over(*entry)]
        self.begin()
        return metrics | self.off_metrics()

    def off_metrics(self) -> dict[str, list[float]]:
        """Returns the metrics that name, each in a key of its own, what is off."""
        return {f"{OFF}{name}": [1.0] for name in sorted(self.off)}

    def flush(self) -> None:
        """Calls `Observer.flush`."""
        self._call("flush")

    def _call(self, hook: str, *arguments: Any) -> list[Any]:
        return [self._call_hook(observer, name, hook, *arguments) for observer, name in self._entries]

    def _call_hook(self, observer: Observer, name: str | None, hook: str, *arguments: Any) -> Any:
        if name is None:
            return getattr(observer, hook)(*arguments)
        return self.run(name, lambda: getattr(observer, hook)(*arguments))

    def _is_over(self, observer: Observer, name: str | None) -> bool:
        """Returns whether an observer is not to be called again."""
        return observer.finished or name in self.off


def refuse_unknown_hooks(kind: type[Observer]) -> None:
    """Raises TypeError if a class of observers has a public method that is none of `Observer`'s hooks."""
    methods = {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}
    unknown = sorted(methods - set(HOOKS))
    if unknown:
        raise TypeError(
            f"{kind.__name__}.{', '.join(unknown)}: an observer has no such hook, so it would never be called. The "
            f"hooks are {', '.join(HOOKS)}. Give a method that is no hook a name that begins with an underscore."
        )
