"""The observers of a rank's updates. One that fails on one rank is switched off on all of them."""

import inspect
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from verl_clipx.training.observing import OFF, Observers
from verl_clipx.training.worker.step import Observer, RolloutBatch

# The names of the methods of an observer that are called.
HOOKS = tuple(name for name, member in vars(Observer).items() if inspect.isfunction(member))

# The key of the metric with which a rank's report is sent.
REPORT = "clipx_report"

# The name of the plugin's metrics among what observes a run, for the message of a failure.
METRICS = "the metrics of the loss"


class Report(NamedTuple):
    """A rank's message about an update, sent with the metrics of each of its micro-batches.

    Args:
        off: the names of what is switched off on the rank.
        metrics: the keys of the plugin's metrics of the micro-batch.
        reports: from the name of an observer to what its `report` returned.
    """

    off: tuple[str, ...]
    metrics: tuple[str, ...]
    reports: dict[str, Any]


class RankObservers(Observers):
    """The observers of one rank, whose hooks are called in the order in which they were added.

    verl gathers each update's metrics over the data-parallel ranks, and a rank's report is one of them: this takes
    neither a collective nor a host sync more. What is switched off on one rank is switched off on all of them before
    verl aggregates the metrics. Otherwise that rank would have fewer metrics than the others, which ends the run.

    Args:
        observers: added without a name, so that their exceptions end the run.
    """

    def __init__(self, *observers: Observer):
        super().__init__()
        # The observers, each with its name; None for one whose exceptions end the run.
        self._entries: list[tuple[Observer, str | None]] = []
        # The keys of the plugin's metrics in the reports of this rollout batch, from all ranks.
        self._keys: set[str] = set()
        for observer in observers:
            self.add(observer)

    def add(self, observer: Observer, name: str | None = None) -> None:
        """Add an observer, whose hooks are called from now on.

        Args:
            observer: an object whose public methods are among `Observer`'s hooks.
            name: under which an exception of the observer is logged and the observer switched off; None: its exceptions
                end the run.

        Raises:
            TypeError: the observer has a public method that is no hook, and so would never be called.
        """
        refuse_unknown_hooks(type(observer))
        self._entries.append((observer, name))

    def remove(self, observer: Observer) -> None:
        """Remove an observer, whose hooks are called no more."""
        self._entries = [(added, name) for added, name in self._entries if added is not observer]

    def __iter__(self) -> Iterator[Observer]:
        return iter([observer for observer, _ in self._entries])

    def __len__(self) -> int:
        return len(self._entries)

    def begin_rollout_batch(self, *arguments: Any) -> None:
        """Call `Observer.begin_rollout_batch` of every observer."""
        self._keys = set()
        self._call("begin_rollout_batch", *arguments)

    def begin_update(self, *arguments: Any) -> None:
        """Call `Observer.begin_update` of every observer."""
        self._call("begin_update", *arguments)

    def end_micro_batch(self, *arguments: Any) -> None:
        """Call `Observer.end_micro_batch` of every observer."""
        self._call("end_micro_batch", *arguments)

    def report(self, metrics: Iterable[str]) -> dict[str, Report]:
        """Return this rank's report as a metric of a micro-batch.

        Args:
            metrics: the keys of the plugin's other metrics of the micro-batch.
        """
        reports = {}
        for observer, name in self._entries:
            if name is not None and name not in self.off:
                reports[name] = self.run(name, observer.report)
        return {REPORT: Report(off=tuple(self.off), metrics=tuple(metrics), reports=reports)}

    def hear(self, metrics: dict[str, Any]) -> None:
        """Take all ranks' reports out of an update's metrics, and switch off here what is off on any rank.

        Args:
            metrics: an update's. The reports are removed, and the metrics of the loss if these are switched off.
        """
        # A list of reports for each rank, one for each of its micro-batches; verl gives a single rank's without a list.
        reports_of_ranks = metrics.pop(REPORT, [])
        if reports_of_ranks and not isinstance(reports_of_ranks[0], list):
            reports_of_ranks = [reports_of_ranks]
        latest_reports = [reports[-1] for reports in reports_of_ranks if reports]
        for report in latest_reports:
            self.off.update(report.off)
        for reports in reports_of_ranks:
            for report in reports:
                self._keys.update(report.metrics)
        self.drop_metrics(metrics)
        for observer, name in self._entries:
            if name is not None:
                self._hear_reports(observer, name, latest_reports)

    def _hear_reports(self, observer: Observer, name: str, latest_reports: list[Report]) -> None:
        """Give an observer what the observers of its name on all ranks reported."""
        own_reports = [report.reports.get(name) for report in latest_reports]
        self.run(name, lambda: observer.hear(own_reports))

    def drop_metrics(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Remove the plugin's metrics of the loss from an update's, if they are switched off; return what is left."""
        if METRICS in self.off:
            for key in self._keys:
                metrics.pop(key, None)
        return metrics

    def end_update(self, *arguments: Any) -> None:
        """Call `Observer.end_update` of every observer."""
        self._call("end_update", *arguments)

    def end_rollout_batch(self, batch: RolloutBatch) -> dict[str, list[Any]]:
        """Call `Observer.end_rollout_batch` of every observer, and remove those that are finished or switched off.

        Once the first rollout batch has ended, exceptions of observers with a name end the run no more.

        Returns:
            The metrics that the observers return, and those that say what is switched off.
        """
        metrics: dict[str, list[Any]] = {}
        for metrics_of_observer in self._call("end_rollout_batch", batch):
            metrics.update(metrics_of_observer or {})
        self._entries = [(observer, name) for observer, name in self._entries if self._is_needed(observer, name)]
        self.begin()
        return metrics | self.off_metrics()

    def off_metrics(self) -> dict[str, list[float]]:
        """Return the metrics that say what is switched off, one for each name."""
        return {f"{OFF}{name}": [1.0] for name in sorted(self.off)}

    def flush(self) -> None:
        """Call `Observer.flush` of every observer."""
        self._call("flush")

    def _call(self, hook: str, *arguments: Any) -> list[Any]:
        """Call a hook of every observer; return what each returns, None where it fails or is switched off."""
        return [self._call_hook(observer, name, hook, *arguments) for observer, name in self._entries]

    def _call_hook(self, observer: Observer, name: str | None, hook: str, *arguments: Any) -> Any:
        """Call a hook of one observer. Only an exception of an observer without a name leaves this."""
        if name is None:
            return getattr(observer, hook)(*arguments)
        return self.run(name, lambda: getattr(observer, hook)(*arguments))

    def _is_needed(self, observer: Observer, name: str | None) -> bool:
        """Return whether an observer is to be called again."""
        return not observer.finished and name not in self.off


def refuse_unknown_hooks(kind: type[Observer]) -> None:
    """Raise TypeError if a class of observers has a public method that is none of `Observer`'s hooks."""
    methods = {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}
    unknown = sorted(methods - set(HOOKS))
    if unknown:
        raise TypeError(
            f"{kind.__name__}.{', '.join(unknown)}: an observer has no such hook, so it would never be called. The "
            f"hooks are {', '.join(HOOKS)}. Give a method that is no hook a name that begins with an underscore."
        )
