"""Which value of a parameter brings a number of a replay where it is wanted."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy

from verl_clipx.diagnostics.replay.loss import refused, replayed
from verl_clipx.diagnostics.replay.measures import QUANTITIES, measures, over_updates
from verl_clipx.diagnostics.replay.tokens import TracedTokens
from verl_clipx.driver.candidates import Candidate
from verl_clipx.driver.config import Settings

# Between the ends of the range the number is looked at here first, since it need not rise or fall all the way.
POINTS = 17

# The width of the range, halved so often, is a millionth of a millionth of it.
HALVINGS = 40


class Match(NamedTuple):
    """The value that was found.

    Args:
        parameter: the key under the clipx node.
        value: of the parameter.
        reached: the number there.
        crossings: how often the number passes the wanted one in the range; 0: never, and `value` comes nearest.
        least, greatest: of the number in the range.
    """

    parameter: str
    value: float
    reached: float
    crossings: int
    least: float
    greatest: float


def target_of(text: str) -> tuple[str, float]:
    """The quantity and the number that `--match` names.

    Raises:
        ValueError: says what is allowed.
    """
    name, _, number = text.partition("=")
    try:
        if name in QUANTITIES:
            return name, float(number)
    except ValueError:
        pass
    raise ValueError(f"--match {text}: must be {' or '.join(f'{name}=NUMBER' for name in QUANTITIES)}.")


def matched(
    candidate: Candidate, quantity: str, target: float, own: Settings | None, updates: Sequence[TracedTokens]
) -> Match:
    """Finds the value of a candidate's one swept parameter at which a number is what is wanted.

    Args:
        candidate: its swept parameter's least and greatest value are the range.
        quantity, target: from `target_of`.
        own: the run's settings, or None if unknown.
        updates: of one step.

    Raises:
        ValueError: there isn't one swept parameter with two numbers, or the trace lacks what the loss needs.
    """
    if len(candidate.swept) != 1:
        raise ValueError(f"--match: give {candidate.group} one parameter, with the ends of its range: clipx.alpha=0,4.")
    ((parameter, values),) = candidate.swept.items()
    if len(values) < 2 or not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        raise ValueError(
            f"--match: clipx.{parameter}={','.join(map(str, values))}: the ends of a range are two numbers."
        )

    def number_at(value: float) -> float:
        settings = candidate.settings({parameter: float(value)})
        for update in updates:
            if reason := refused(settings, own, update):
                raise ValueError(f"{candidate.label({parameter: value})}: {reason}")
        found = [measures(replayed(settings, own, update, update.batch), update.batch) for update in updates]
        return QUANTITIES[quantity](over_updates(found))

    return crossing(parameter, number_at, min(values), max(values), target)


def crossing(parameter: str, number_at: Callable[[float], float], low: float, high: float, target: float) -> Match:
    """Where a function of a parameter passes a number: the first place from below, by bisection.

    Args:
        parameter: the key.
        number_at: the function, of which any shape is allowed, steps too.
        low, high: the range.
        target: the number.
    """
    points = numpy.linspace(low, high, POINTS)
    numbers = [number_at(point) for point in points]
    sides = numpy.sign(numpy.array(numbers) - target)
    # From one point to the next the side changes; a point that meets the number by itself ends one.
    changes = [i for i in range(POINTS - 1) if sides[i] != sides[i + 1] and sides[i] != 0]
    least, greatest = min(numbers), max(numbers)
    nearest = int(numpy.abs(numpy.array(numbers) - target).argmin())
    if not changes or sides[0] == 0:
        found = 0 if sides[0] == 0 else nearest
        return Match(parameter, float(points[found]), numbers[found], int(sides[found] == 0), least, greatest)
    left, right = points[changes[0]], points[changes[0] + 1]
    side = sides[changes[0]]
    for _ in range(HALVINGS):
        middle = (left + right) / 2
        left, right = (middle, right) if numpy.sign(number_at(middle) - target) == side else (left, middle)
    # The number of finitely many tokens has steps: of both sides of one, the nearer.
    value = min((left, right), key=lambda end: abs(number_at(end) - target))
    return Match(parameter, float(value), number_at(value), len(changes), least, greatest)
