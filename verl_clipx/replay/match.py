"""Finds the value of a parameter at which a number of a replay reaches a target."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy

from verl_clipx.common.statistics.bootstrap import percentile_interval
from verl_clipx.replay.loss import apply_to, why_refused
from verl_clipx.replay.measures import QUANTITIES, measures, over_updates, resample
from verl_clipx.replay.tokens import TokenBatch, TracedTokens
from verl_clipx.run.candidates import Candidate
from verl_clipx.run.config import Settings

# The number is first computed at this many points of the range, since it need not rise or fall all the way.
POINTS = 17

# Halving the range this often leaves a millionth of a millionth of its width.
HALVINGS = 40

# For a resample, a small part of the interval's width is precise enough.
HALVINGS_OF_RESAMPLE = 9


class Match(NamedTuple):
    """The value that was found.

    Args:
        parameter: the key under the clipx node.
        value: the parameter's value.
        reached: the number there.
        crossings: how often the number passes the target in the range; 0: never, and `value` comes nearest.
        least, greatest: the least and the greatest number in the range.
        low, high: the ends of the value's 95 % interval over prompts; None where it is exact, or has none: fewer than
            five prompts in an update, or not one crossing. An end of the range stands for what lies beyond it.
        beyond: the number on the other side of the step at `value`; None where it never crosses.
        others: further parameters of the method's own that are numbers other than 0.
    """

    parameter: str
    value: float
    reached: float
    crossings: int
    least: float
    greatest: float
    low: float | None = None
    high: float | None = None
    beyond: float | None = None
    others: tuple[str, ...] = ()


def target_of(text: str) -> tuple[str, float]:
    """The quantity and the number that `--match` names.

    Raises:
        ValueError: says what is allowed.
    """
    name, _, number = text.partition("=")
    try:
        if name in QUANTITIES and math.isfinite(target := float(number)):
            return name, target
    except ValueError:
        pass
    raise ValueError(f"--match {text}: must be {' or '.join(f'{name}=NUMBER' for name in QUANTITIES)}.")


def find_match(
    candidate: Candidate, quantity: str, target: float, own: Settings | None, updates: Sequence[TracedTokens]
) -> Match:
    """Finds the value of a candidate's one swept parameter at which a number reaches a target.

    Args:
        candidate: its swept parameter's least and greatest value are the range.
        own: the run's settings, or None if unknown.
        updates: of one step.

    Raises:
        ValueError: there isn't one swept parameter with two numbers, or the trace lacks what the loss needs.
    """
    if len(candidate.swept) != 1:
        raise ValueError(f"--match: give {candidate.group} one parameter, with the ends of its range: clipx.alpha=0,4.")
    ((parameter, values),) = candidate.swept.items()
    numbers = [one for one in values if isinstance(one, int | float) and not isinstance(one, bool)]
    if len(values) < 2 or len(numbers) < len(values) or not all(map(math.isfinite, numbers)):
        raise ValueError(
            f"--match: clipx.{parameter}={','.join(map(str, values))}: the ends of a range are two numbers."
        )

    def number_at(value: float, batches: Sequence[TokenBatch]) -> float:
        settings = candidate.settings({parameter: float(value)})
        for update in updates:
            if reason := why_refused(settings, own, update):
                raise ValueError(f"{candidate.label({parameter: value})}: {reason}")
        pairs = zip(updates, batches, strict=True)
        measured = [measures(apply_to(settings, own, update, batch), batch) for update, batch in pairs]
        return QUANTITIES[quantity](over_updates(measured))

    traced = [update.batch for update in updates]
    low, high = min(values), max(values)
    match = crossing(parameter, lambda value: number_at(value, traced), low, high, target)
    method = candidate.settings({parameter: float(low)}).method
    own_numbers = [name for name in type(method).__annotations__ if isinstance(getattr(method, name), float)]
    if getattr(method, parameter, 0) and parameter in own_numbers:
        others = (name for name in own_numbers if name != parameter and getattr(method, name))
        match = match._replace(others=tuple(others))
    if match.crossings != 1 or all(update.whole for update in updates):
        return match
    side = numpy.sign(number_at(low, traced) - target)
    places = []
    for batches in resample(updates):

        def is_left(value: float, batches: list[TokenBatch] = batches) -> bool:
            return numpy.sign(number_at(value, batches) - target) == side

        places.append(sum(_halve(is_left, low, high, HALVINGS_OF_RESAMPLE)) / 2)
    interval = percentile_interval(places)
    return match if interval is None else match._replace(low=interval[0], high=interval[1])


def crossing(parameter: str, number_at: Callable[[float], float], low: float, high: float, target: float) -> Match:
    """Where a function of a parameter, of any shape, passes a target in a range: the first place, by bisection."""
    points = numpy.linspace(low, high, POINTS)
    numbers = [number_at(point) for point in points]
    sides = numpy.sign(numpy.array(numbers) - target)
    # The points after which the side of the target changes; a point that meets the target itself ends a change.
    changes = [i for i in range(POINTS - 1) if sides[i] != sides[i + 1] and sides[i] != 0]
    least, greatest = min(numbers), max(numbers)
    nearest = int(numpy.abs(numpy.array(numbers) - target).argmin())
    if not changes or sides[0] == 0:
        at = 0 if sides[0] == 0 else nearest
        return Match(parameter, float(points[at]), numbers[at], int(sides[at] == 0), least, greatest)
    side, ends = sides[changes[0]], points[changes[0] : changes[0] + 2]
    left, right = _halve(lambda value: numpy.sign(number_at(value) - target) == side, *ends, HALVINGS)
    # A number of finitely many tokens moves in steps: take the nearer side of the step.
    value, other = sorted((left, right), key=lambda end: abs(number_at(end) - target))
    return Match(parameter, float(value), number_at(value), len(changes), least, greatest, beyond=number_at(other))


def _halve(is_left: Callable[[float], bool], left: float, right: float, times: int) -> tuple[float, float]:
    """The ends of a range after halving it towards the place where `is_left` stops holding."""
    for _ in range(times):
        middle = (left + right) / 2
        left, right = (middle, right) if is_left(middle) else (left, middle)
    return left, right
