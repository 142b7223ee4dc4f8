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
        """Pickle the method without the target, and the target: pickle finds no class that `held` makes by its name."""
        _, kind = type(self).__bases__
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return held, (kind(**values), self.hold)

    @property
    def parameters(self) -> dict[str, Any]:
        """The method's own parameters without those that the target takes the place of, and the target in words."""
        kept = {name: value for name, value in super().parameters.items() if name not in self.solved_parameters}
        return {**kept, "hold": self.held_target}

    @property
    def limits(self) -> dict[str, str]:
        return {name: role for name, role in super().limits.items() if name not in self.solved_parameters}

    def statistics(self, t: Tokens) -> Tensor:
        """Count the tokens, and sum their squares, by the distance of what the bounds act on from the centre.

        A clip fraction is a share of all tokens, of which those that the clip can't act on have the distance 0. A
        second moment is only of tokens that it can act on.

        Returns:
            What `Octaves.counts_and_squares` returns: (statistics_size,), float64.
        """
        A = t.advantages
        distance = self.bounded(t)
        if self.bounds_width.quantity == "ratio":
            distance = distance.log()
        if self.bounds_width.every_sign:
            can_be_clipped = (A.abs() > 0) & (distance.abs() > 0)
        else:
            can_be_clipped = ((A > 0) & (distance > 0)) | ((A < 0) & (distance < 0))
        is_counted = t.mask if self.hold.target == CLIP_FRACTION else t.mask & can_be_clipped
        return self.octaves.counts_and_squares(where(can_be_clipped, distance, 0.0), is_counted)

    def decide(self, statistics: Tensor) -> Tensor:
        """Choose the bounds' distance among the edges of the buckets, the floor and the ceiling.

        Returns:
            (3,), float64: the distance, the target's value there, and 1 if that is above the value that is held.
        """
        edges = self.octaves.edges(statistics.device)
        # Each entry from here on is about one choice of the distance: the upper edge of its bucket.
        counts, squares = statistics.view(2, -1).cumsum(1)
        total_count = counts[-1]
        kept_count = counts[:-1]
        if self.hold.target == CLIP_FRACTION:
            # The wider the bounds, the fewer tokens are clipped: the first edge at which the target is met.
            value_at_edge = ratio_or_zero(total_count - kept_count, total_count)
            index = (value_at_edge > self.hold.value).sum(dtype=int64)
        else:
            # The wider the bounds, the larger the moment of the tokens that are kept: the last such edge.
            value_at_edge = ratio_or_zero(squares[:-1], kept_count)
            index = (value_at_edge <= self.hold.value).sum(dtype=int64) - 1
        floor, ceiling = distances(self.bounds_width)
        # If no edge meets the target, the index is -1 or that after the last edge.
        candidates = cat([edges.new_zeros(1), edges, edges.new_full((1,), math.inf)])
        distance = candidates.gather(0, index.view(1) + 1).clamp(floor, ceiling)
        # At the floor or the ceiling itself the value is not known; it is that at the nearest edge between the two.
        first = (edges < floor).sum()
        last = (edges <= ceiling).sum() - 1
        reached = value_at_edge.gather(0, index.clamp(first, last).view(1))
        is_missed = (reached > self.hold.value).to(float64)
        return cat([distance, reached, is_missed])

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
    """Return the width that a method's bounds have with its parameters; None if they can hold no target."""
    width = method.bounds_width
    if width is None or any(getattr(method, name) != value for name, value in width.only_with):
        return None
    return width


def methods_to_choose(method: Method) -> str:
    """Return what to do where a method can hold no target: the methods that can, and how one of the user's own can."""
    names = []
    for name, kind in METHODS.items():
        if kind.bounds_width is None:
            continue
        conditions = [f"{key}={value}" for key, value in kind.bounds_width.only_with]
        if conditions:
            name = f"{name} with {' and '.join(conditions)}"
        names.append(name)
    advice = f"Leave it out, or choose one of {', '.join(names)}."
    is_users = not type(method).__module__.startswith("verl_clipx.")
    if is_users and not method.statistics_size and method.bounds_width is None:
        advice += f" If {method.name} clips at fixed bounds, declare bounds_width = verl_clipx.Width()."
    return advice


def distances(width: Width) -> tuple[float, float]:
    """Return the narrowest and the widest distance of bounds from the centre: of a ratio, of its logarithm from 0."""
    if width.quantity == "ratio":
        return math.log1p(width.floor), math.log1p(width.ceiling)
    return width.floor, width.ceiling


def held(method: Method, hold: Hold) -> Method:
    """Return a method with the same parameters whose bounds hold a target.

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
        if hold.target == SECOND_MOMENT:
            advice = "It is in nats²; 0.04, the threshold of M2PO's paper, is a log-ratio of 0.2."
        elif width.every_sign:
            # The clip acts on more tokens than PPO's, which pg_clipfrac counts.
            advice = "0.02 lets the clip act on two tokens in a hundred."
        else:
            advice = (
                "0.02 lets the clip act on two tokens in a hundred; with fixed bounds a run logs its own as "
                "pg_clipfrac."
            )
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
    """Return the class of a method that holds a target.

    It is made once for equal arguments: methods are equal only if they have the same class.
    """
    floor, ceiling = distances(width)
    lowest = math.floor(math.log2(floor))
    octaves = Octaves(lowest=lowest, count=math.ceil(math.log2(ceiling)) - lowest)
    is_ratio = width.quantity == "ratio"
    namespace = {
        "hold": hold,
        "bounds_width": width,
        "octaves": octaves,
        "held_target": f"{hold.target} {hold.value:g} (width {width.floor:g} to {width.ceiling:g})",
        "solved_parameters": width.parameters,
        "formula": ("1 / (1 + width)", "1 + width") if is_ratio else ("-width", "width"),
        "statistics_size": 2 * octaves.buckets,
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind.__name__, (HeldBounds, kind), namespace)
