"""Holding a target: in each optimizer step the width of a method's bounds is solved for from one additive histogram."""

import functools
import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from torch import Tensor, cat, float64, int64, where

from verl_clipx.losses.base.histogram import Octaves, ratio_or_zero
from verl_clipx.losses.base.method import LARGEST_BOUND, METHODS, NODE, Bounds, Method
from verl_clipx.losses.base.parameters import Parameters, choice, number, optional, parameter
from verl_clipx.losses.base.refusal import ABSENT, Refusal
from verl_clipx.losses.base.shared_metrics import HELD_MISSED, HELD_REACHED, HELD_WIDTH
from verl_clipx.losses.base.tokens import Tokens
from verl_clipx.losses.base.width import Width

CLIP_FRACTION = "clip_fraction"
SECOND_MOMENT = "second_moment"
ENDS = optional(number(at_least=1e-6, at_most=LARGEST_BOUND - 1))


@dataclass(frozen=True, kw_only=True)
class Hold(Parameters):
    """The target that the width of a method's bounds holds, and the narrowest and the widest width.

    A width w stands for the bounds 1 / (1 + w) and 1 + w on a ratio, and -w and w on a difference of probabilities.
    """

    node: ClassVar[str] = "clipx.hold"

    target: str = parameter(
        CLIP_FRACTION,
        choice(CLIP_FRACTION, SECOND_MOMENT),
        "clip_fraction: the share of tokens on which the clip acts; second_moment: the mean squared log-ratio of the "
        "tokens that keep their gradient, among those that the clip can act on",
    )
    value: float | None = parameter(
        None, optional(number(at_least=1e-4, at_most=1)), "the target's largest value", "choice"
    )
    floor: float | None = parameter(None, ENDS, "the narrowest width; null: 0.05, under gspo 1e-5", "choice")
    ceiling: float | None = parameter(None, ENDS, "the widest width; null: 1, under gspo 0.05", "choice")


class HeldBounds(Method):
    """A method with its own F and value, whose bounds hold a target. `held` makes a subclass for each target.

    The decision is the bounds' distance from the centre (of the logarithm of a ratio), the target's value there, and 1
    if the target cannot be met between floor and ceiling.
    """

    hold: ClassVar[Hold]
    bounds_width: ClassVar[Width]
    octaves: ClassVar[Octaves]
    # The target and the range of the width, in words.
    held_target: ClassVar[str]

    logs = (HELD_WIDTH, HELD_REACHED, HELD_MISSED)

    def __reduce__(self) -> tuple[Any, ...]:
        # No module has the class that `held` makes.
        kind = type(self).__bases__[1]
        return held, (kind(**{field.name: getattr(self, field.name) for field in fields(self)}), self.hold)

    @property
    def parameters(self) -> dict[str, Any]:
        own = {name: value for name, value in super().parameters.items() if name not in self.solved_parameters}
        return {**own, "hold": self.held_target}

    @property
    def limits(self) -> dict[str, str]:
        return {name: role for name, role in super().limits.items() if name not in self.solved_parameters}

    def statistics(self, t: Tokens) -> Tensor:
        """Returns `Octaves.counts_and_squares` of the distances.

        A share is of all tokens: those that the clip can't act on have the distance 0.
        """
        A = t.advantages
        x = self.bounded(t)
        x = x.log() if self.bounds_width.quantity == "ratio" else x
        acts = ((A > 0) & (x > 0)) | ((A < 0) & (x < 0))
        if self.bounds_width.every_sign:
            acts = (A.abs() > 0) & (x.abs() > 0)
        counted = t.mask if self.hold.target == CLIP_FRACTION else t.mask & acts
        return self.octaves.counts_and_squares(where(acts, x, 0.0), counted)

    def decide(self, statistics: Tensor) -> Tensor:
        edges = self.octaves.edges(statistics.device)
        numbers, squares = statistics.view(2, -1).cumsum(1)
        within = numbers[:-1]
        if self.hold.target == CLIP_FRACTION:
            # It falls with the width: the narrowest edge at which it is met, or none.
            reached = ratio_or_zero(numbers[-1] - within, numbers[-1])
            place = (reached > self.hold.value).sum(dtype=int64)
        else:
            # It rises with the width: the widest one.
            reached = ratio_or_zero(squares[:-1], within)
            place = (reached <= self.hold.value).sum(dtype=int64) - 1
        floor, ceiling = distances(self.bounds_width)
        solved = cat([edges.new_zeros(1), edges, edges.new_full((1,), math.inf)])
        distance = solved.gather(0, place.view(1) + 1).clamp(floor, ceiling)
        # At floor and ceiling it is known at the nearest edge between them.
        first = (edges < floor).sum()
        last = (edges <= ceiling).sum() - 1
        found = reached.gather(0, place.clamp(first, last).view(1))
        return cat([distance, found, (found > self.hold.value).to(float64)])

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        distance, _, _ = decision.to(t.ratio.dtype).unbind()
        if self.bounds_width.quantity == "ratio":
            return Bounds((-distance).exp(), distance.exp())
        return Bounds(-distance, distance)

    def metrics(self, statistics: Tensor, decision: Tensor) -> dict[str, Tensor]:
        distance, reached, missed = decision.unbind()
        width = distance.expm1() if self.bounds_width.quantity == "ratio" else distance
        return {HELD_WIDTH.name: width, HELD_REACHED.name: reached, HELD_MISSED.name: missed}


def width_of(method: Method) -> Width | None:
    """The width that a method's bounds have with its parameters; None if they can hold no target."""
    width = method.bounds_width
    if width is None or any(getattr(method, name) != value for name, value in width.only_with):
        return None
    return width


def methods_to_choose(method: Method) -> str:
    """Returns what to do where a method can hold no target: the methods that can, and how one of the user's own can."""
    names = []
    for name, kind in METHODS.items():
        if kind.bounds_width is not None:
            conditions = [f"{key}={value}" for key, value in kind.bounds_width.only_with]
            names.append(f"{name} with {' and '.join(conditions)}" if conditions else name)
    advice = f"Leave it out, or choose one of {', '.join(names)}."
    is_users = not type(method).__module__.startswith("verl_clipx.")
    if is_users and not method.statistics_size and method.bounds_width is None:
        advice += f" If {method.name} clips at fixed bounds, declare bounds_width = verl_clipx.Width()."
    return advice


def distances(width: Width) -> tuple[float, float]:
    """The narrowest and the widest distance of bounds from the centre: of a ratio, that of its logarithm from 0."""
    ends = width.floor, width.ceiling
    return tuple(map(math.log1p, ends)) if width.quantity == "ratio" else ends


def held(method: Method, hold: Hold) -> Method:
    """A method with the same parameters whose bounds hold a target.

    Raises:
        Refusal: the method has no width, the target has no value or determines no width, or the floor is not below the
            ceiling.
    """
    width = width_of(method)
    if method.statistics_size or width is None:
        why = "follow statistics already" if method.statistics_size else "have no width to solve for"
        raise Refusal(
            hold.node, ABSENT, f"{method.name} cannot hold a target: its bounds {why}", methods_to_choose(method)
        )
    if hold.target == SECOND_MOMENT and not width.mask:
        reason = f"{method.name} does not mask tokens by their ratio, so no single width belongs to a value"
        raise Refusal(f"{hold.node}.target", hold.target, reason, f"Choose +{NODE}/hold={CLIP_FRACTION}.")
    if hold.value is None:
        # What a value means, for a user who has to choose one.
        advice = "It is in nats²; 0.04, the threshold of M2PO's paper, is a log-ratio of 0.2."
        if hold.target == CLIP_FRACTION:
            advice = "0.02 lets the clip act on two tokens in a hundred"
            # Elsewhere the clip acts on more than what PPO would clip.
            advice += "." if width.every_sign else "; with fixed bounds a run logs its own as pg_clipfrac."
        key = f"{hold.node}.value"
        why = f"{hold.target} has no value that suits every run"
        raise Refusal(key, None, why, f"Set {key}. {advice}")
    floor = hold.floor or width.floor
    ceiling = hold.ceiling or width.ceiling
    if floor >= ceiling:
        raise Refusal(f"{hold.node}.floor", floor, f"must be below {hold.node}.ceiling={ceiling:g}")
    kind = held_class(type(method), hold, replace(width, floor=floor, ceiling=ceiling))
    return kind(**{field.name: getattr(method, field.name) for field in fields(method)})


@functools.cache
def held_class(kind: type[Method], hold: Hold, width: Width) -> type[Method]:
    """The class of a method that holds a target; always the same one, by which equal methods are equal."""
    floor, ceiling = distances(width)
    lowest = math.floor(math.log2(floor))
    octaves = Octaves(lowest, math.ceil(math.log2(ceiling)) - lowest)
    namespace = {
        "hold": hold,
        "bounds_width": width,
        "octaves": octaves,
        "held_target": f"{hold.target} {hold.value:g} (width {width.floor:g} to {width.ceiling:g})",
        "solved_parameters": width.parameters,
        "formula": ("1 / (1 + width)", "1 + width") if width.quantity == "ratio" else ("-width", "width"),
        "statistics_size": 2 * octaves.buckets,
    }
    namespace |= {name: getattr(kind, name) for name in ("__doc__", "__module__", "__qualname__")}
    return type(kind.__name__, (HeldBounds, kind), namespace)
