"""Declares metrics: one entry each, from which vectors, reductions, pages and charts all follow."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import reduce
from operator import add
from typing import Any

# If a key contains one of these, the driver of verl reduces it by maximum or minimum instead of the mean.
REDUCED_OTHERWISE = ("max", "min")

# Lopti logs each metric of a pass again with "low" or "high" before its name, as in clipx/low/ratio_mean.
PREFIXED = re.compile(r"(low|high)/(?P<name>.+)")


class Over(Enum):
    """What a metric is computed over. It determines how the metric adds up over micro-batches, ranks and updates."""

    TOKENS = "mean over the mini-batch's tokens, exact over micro-batches and ranks; verl averages it over updates"
    UPDATE = "made of sums over the mini-batch's tokens once they are whole; verl averages it over updates"
    DECISION = "of what the method decided; verl averages it over updates"
    ROLLOUT_BATCH = "one number for all updates on a rollout batch"


def total(*sums: Any) -> Any:
    """Return the sum of several sums, or the only one."""
    # Not `sum`, which would begin with 0 and so add a number to a tensor.
    return reduce(add, sums)


@dataclass(frozen=True)
class Metric:
    """A number that a run logs, or a family of numbered ones.

    Attributes:
        name: its name, without the prefix `clipx/`.
        meaning: what it is, in one line.
        unit: its unit.
        over: what it is computed over.
        section: the heading of docs/metrics.md that it is listed under.
        chart: the chart that it is drawn in, with other metrics; "" for no chart.
        numbered: what the members of a family are called: "bin" for name/bin_0, name/bin_1, …; "" for a single number.
        adds_up: for a DECISION that each micro-batch makes by itself: whether the numbers of the micro-batches add up
            over the mini-batch, as counts do, or are averaged.
        sums: the names of the sums over tokens that a metric over TOKENS or an UPDATE is made of.
        compute: computes the metric from these sums, each divided by the number of tokens. It must be linear if the
            metric is over TOKENS. If the metric is over an UPDATE, it gets floats.
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
    compute: Callable[..., Any] = total
    logged_as: str = ""

    @property
    def key(self) -> str:
        """The key as the worker logs it; for a family, without the numbers of its members."""
        return self.logged_as or f"clipx/{self.name}"

    @property
    def pattern(self) -> str:
        """A regular expression that matches its keys and no others."""
        if self.numbered:
            return rf"{re.escape(self.key)}/{self.numbered}_\d+"
        return re.escape(self.key)


def of_decision(name: str, meaning: str, unit: str, **further: Any) -> Metric:
    """Declare a metric of what a method decided in an update. The arguments are as for `Metric`."""
    return Metric(name=name, meaning=meaning, unit=unit, over=Over.DECISION, **further)


def of_rollout_batch(name: str, meaning: str, unit: str, **further: Any) -> Metric:
    """Declare a metric that is one number for all updates on a rollout batch. The arguments are as for `Metric`."""
    return Metric(name=name, meaning=meaning, unit=unit, over=Over.ROLLOUT_BATCH, **further)


def may_share_key(first: Metric, second: Metric) -> bool:
    """Return whether two metrics may be logged under the same key.

    They may if they have the same name, or if one is named like a member of the other's family, as name/bin_0.
    """
    if first.name == second.name:
        return True
    return has_member_named_like(first, second) or has_member_named_like(second, first)


def has_member_named_like(family: Metric, metric: Metric) -> bool:
    """Return whether a member of a family has the name of a metric, or of the first member of that metric's family.

    Args:
        family: a family, or a single metric, which counts as its own only member.
        metric: the metric, which may be a family too.
    """
    name = f"{metric.name}/{metric.numbered}_0" if metric.numbered else metric.name
    # `pattern` matches keys. It matches names if the name is the key.
    pattern_of_names = replace(family, logged_as=family.name).pattern
    return re.fullmatch(pattern_of_names, name) is not None


def wrong_names(own: Iterable[Metric], shared: Iterable[Metric]) -> Iterator[str]:
    """Yield a sentence, without its full stop, for each mistake in the names of a method's own metrics.

    Args:
        own: the metrics that the method declares.
        shared: the metrics that every method has.
    """
    own = list(own)
    shared = list(shared)
    for metric in own:
        name = metric.name
        others = [other for other in (*shared, *own) if other is not metric]
        if any(letters in f"{name}/{metric.numbered}" for letters in REDUCED_OTHERWISE):
            yield f"the metric {name!r}: verl does not average names with {' or '.join(REDUCED_OTHERWISE)} in them"
        if any(may_share_key(metric, other) for other in others):
            yield f"the metric {name!r}: another metric already has this name"
        prefixed = PREFIXED.fullmatch(name)
        if prefixed is None:
            continue
        # Under Lopti, the metric without the prefix is logged under this name too.
        without_prefix = replace(metric, name=prefixed["name"])
        if any(may_share_key(without_prefix, other) for other in others):
            yield f"the metric {name!r}: the plugin also logs {prefixed['name']!r} under this name"
