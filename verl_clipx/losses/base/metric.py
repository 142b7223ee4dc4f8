"""Declares metrics: one entry each, from which vectors, reductions, pages and charts all follow."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import reduce
from operator import add
from typing import Any

# The driver of verl reduces a key with one of these in it by maximum or minimum instead of the mean.
REDUCED_OTHERWISE = ("max", "min")

# Lopti's passes put these before the name of a metric: clipx/low/ratio_mean.
PREFIXED = re.compile(r"(low|high)/(?P<name>.+)")


class Over(Enum):
    """The range of a number, which determines how it adds up over micro-batches, ranks and updates."""

    TOKENS = "mean over the mini-batch's tokens, exact over micro-batches and ranks; verl averages it over updates"
    UPDATE = "made of sums over the mini-batch's tokens once they are whole; verl averages it over updates"
    DECISION = "of what the method decided; verl averages it over updates"
    ROLLOUT_BATCH = "one number for all updates on a rollout batch"


def total(*sums: Any) -> Any:
    """Returns the sum of several sums, or the only one."""
    return reduce(add, sums)


@dataclass(frozen=True)
class Metric:
    """A number that a run logs.

    Attributes:
        name: without the prefix `clipx/`.
        meaning: what it is, in one line.
        unit: of the number.
        over: what it is computed over.
        section: the heading of docs/metrics.md that it is listed under.
        chart: the chart that it is drawn in, with other metrics; "" for no chart.
        numbered: for a family of metrics, what its members are called: "bin" for name/bin_0, name/bin_1, …
        adds_up: for a DECISION that each micro-batch makes by itself: whether the numbers of the micro-batches add up
            over the mini-batch, as counts do, or are averaged.
        sums: over TOKENS or an UPDATE: the names of the sums over tokens that it is made of.
        of: from the sums, each divided by the number of tokens, to the metric. It must be linear over TOKENS; over an
            UPDATE it gets floats.
        logged_as: its whole key if that is not clipx/<name>, for example the key under which verl's own losses log it.
    """

    name: str
    meaning: str
    unit: str
    over: Over
    section: str = "The method's own bounds"
    chart: str = ""
    numbered: str = ""
    adds_up: bool = False
    sums: tuple[str, ...] = ()
    of: Callable[..., Any] = total
    logged_as: str = ""

    @property
    def key(self) -> str:
        """The key as the worker logs it; for a family, without the numbers of its members."""
        return self.logged_as or f"clipx/{self.name}"

    @property
    def pattern(self) -> str:
        """A regular expression that matches its keys and no others."""
        return re.escape(self.key) + (rf"/{self.numbered}_\d+" if self.numbered else "")


def of_decision(name: str, meaning: str, unit: str, **further: Any) -> Metric:
    """A metric of what a method decided; arguments as for `Metric`."""
    return Metric(name, meaning, unit, Over.DECISION, **further)


def of_rollout_batch(name: str, meaning: str, unit: str, **further: Any) -> Metric:
    """A metric of all updates on a rollout batch; arguments as for `Metric`."""
    return Metric(name, meaning, unit, Over.ROLLOUT_BATCH, **further)


def same_key(one: Metric, other: Metric) -> bool:
    """Returns whether two metrics may share a key: equal names, or one is a member of the other's family."""
    members = [f"{metric.name}/{metric.numbered}_0" if metric.numbered else metric.name for metric in (one, other)]
    of_families = zip((one, other), reversed(members), strict=True)
    return one.name == other.name or any(
        re.fullmatch(replace(metric, logged_as=metric.name).pattern, member) for metric, member in of_families
    )


def wrong_names(own: Iterable[Metric], shared: Iterable[Metric]) -> Iterator[str]:
    """Yields a sentence for each mistake in the names of a method's own metrics."""
    own = list(own)
    shared = list(shared)
    for metric in own:
        name = metric.name
        others = [other for other in (*shared, *own) if other is not metric]
        if any(letters in f"{name}/{metric.numbered}" for letters in REDUCED_OTHERWISE):
            yield f"the metric {name!r}: verl does not average names with {' or '.join(REDUCED_OTHERWISE)} in them"
        if any(same_key(metric, other) for other in others):
            yield f"the metric {name!r}: another metric already has this name"
        if inner := PREFIXED.fullmatch(name):
            prefixed = replace(metric, name=inner["name"])
            if any(same_key(prefixed, other) for other in others):
                yield f"the metric {name!r}: the plugin also logs {inner['name']!r} under this name"
