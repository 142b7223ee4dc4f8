"""Holds a target: in each optimizer step, solves for the width of a method's bounds from one additive histogram."""

import functools
import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from torch import Tensor, cat, float64, int64, where

from verl_clipx.losses.base.histogram import Octaves, ratio_or_zero
from verl_clipx.losses.base.method import LARGEST_BOUND, METHODS, NODE, Bounds, Method
from verl_clipx.losses.base.parameters import Parameters, choice, number, optional, parameter
from verl_clipx.losses.base.refusal import NO_VALUE, Refusal
from verl_clipx.losses.base.shared_metrics import HELD_MISSED, HELD_REACHED, HELD_WIDTH
from verl_clipx.losses.base.tokens import Tokens
from verl_clipx.losses.base.width import Width

# The targets.
CLIP_FRACTION = "clip_fraction"
SECOND_MOMENT = "second_moment"

# What the narrowest and the widest width may be.
WIDTHS = optional(number(at_least=1e-6, at_most=LARGEST_BOUND - 1))


@dataclass(frozen=True, kw_only=True)
class Hold(Parameters):
    """The target that the width of a method's bounds holds, and the narrowest and the widest width.

    A width w stands for the bounds 1 / (1 + w) and 1 + w on a ratio, and -w and w on a difference of probabilities.
    """

    node_key: ClassVar[str] = "clipx.hold"

    target: str = parameter(
        CLIP_FRACTION,
        choice(CLIP_FRACTION, SECOND_MOMENT),
        "clip_fraction: the share of tokens on which the clip acts; second_moment: the mean squared log-ratio of the "
        "tokens that keep their gradient, among those that the clip can act on",
    )
    value: float | None = parameter(
        None, optional(number(at_least=1e-4, at_most=1)), "the target's largest value", "choice"
    )
    floor: float | None = parameter(None, WIDTHS, "the narrowest width; null: 0.05, under gspo 1e-5", "choice")
    ceiling: float | None = parameter(None, WIDTHS, "the widest width; null: 1, under gspo 0.05", "choice")


class HeldBounds(Method):
    """A method with its own F and value, whose bounds hold a target. `held` makes a subclass for each target.

    Distances are from the centre of the bounds: of a difference from 0, and of a ratio's logarithm from 0.
    """

    # The target that is held, the width with the user's floor and ceiling, and the buckets of distances.
    hold: ClassVar[Hold]
    bounds_width: ClassVar[Width]
    octaves: ClassVar[Octaves]
    # The target and the range of the width, in words.
    held_target: ClassVar[str]

    logs = (HELD_WIDTH, HELD_REACHED, HELD_MISSED)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make this method again: from the method without the target, and the target.

        Pickle needs it, because no module has the class that `held` makes.
        """
        _, own_class = type(self).__bases__
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return held, (own_class(**values), self.hold)

    @property
    def parameters(self) -> dict[str, Any]:
        """The method's own parameters, but the target, in words, instead of those whose place it takes."""
        kept = {name: value for name, value in super().parameters.items() if name not in self.solved_parameters}
        return {**kept, "hold": self.held_target}

    @property
    def limits(self) -> dict[str, str]:
        return {name: role for name, role in super().limits.items() if name not in self.solved_parameters}

    def statistics(self, t: Tokens) -> Tensor:
        """Count the tokens, and sum the squares of their distances, in each bucket of the distance.

        A clip fraction is a share of all tokens, of which those that the clip can't act on count with the distance 0. A
        second moment is only of the tokens that the clip can act on.

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
        count_up_to, squares_up_to = statistics.view(2, -1).cumsum(1)
        total_count = count_up_to[-1]
        # The last bucket has no upper edge.
        kept_count = count_up_to[:-1]
        kept_squares = squares_up_to[:-1]
        if self.hold.target == CLIP_FRACTION:
            # The wider the bounds, the fewer tokens are clipped. The first edge that meets the target is chosen.
            value_at_edge = ratio_or_zero(total_count - kept_count, total_count)
            index = (value_at_edge > self.hold.value).sum(dtype=int64)
        else:
            # The wider the bounds, the larger the moment of the kept tokens. The last edge that meets the target is
            # chosen.
            value_at_edge = ratio_or_zero(kept_squares, kept_count)
            index = (value_at_edge <= self.hold.value).sum(dtype=int64) - 1
        floor, ceiling = distances(self.bounds_width)
        # If no edge meets the target, the index is -1, or one more than that of the last edge. The distance is then 0
        # or infinite, before it is clamped.
        candidates = cat([edges.new_zeros(1), edges, edges.new_full((1,), math.inf)])
        distance = candidates.gather(0, index.view(1) + 1).clamp(floor, ceiling)
        # The value at the floor or the ceiling itself is not known. That at the nearest edge between the two is taken.
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
    if width is None:
        return None
    for name, value in width.only_with:
        if getattr(method, name) != value:
            return None
    return width


def advise_methods(method: Method) -> str:
    """Return what to do where a method can hold no target: the methods that can, and how one of the user's own can."""
    names = []
    for name, method_class in METHODS.items():
        if method_class.bounds_width is None:
            continue
        conditions = [f"{key}={value}" for key, value in method_class.bounds_width.only_with]
        if conditions:
            name = f"{name} with {' and '.join(conditions)}"
        names.append(name)
    advice = f"Leave it out, or choose one of {', '.join(names)}."
    is_users = not type(method).__module__.startswith("verl_clipx.")
    if is_users and not method.statistics_size and method.bounds_width is None:
        advice += f" If {method.name} clips at fixed bounds, declare bounds_width = verl_clipx.Width()."
    return advice


def distances(width: Width) -> tuple[float, float]:
    """Return the narrowest and the widest distance that a width allows, as `HeldBounds` measures distances."""
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
        reason = f"{method.name} cannot hold a target: its bounds {why}"
        raise Refusal(hold.node_key, NO_VALUE, reason, advise_methods(method))
    if hold.target == SECOND_MOMENT and not width.mask:
        reason = f"{method.name} does not mask tokens by their ratio, so no single width belongs to a value"
        raise Refusal(f"{hold.node_key}.target", hold.target, reason, f"Choose +{NODE}/hold={CLIP_FRACTION}.")
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
        key = f"{hold.node_key}.value"
        why = f"{hold.target} has no value that suits every run"
        raise Refusal(key, None, why, f"Set {key}. {advice}")
    floor = width.floor if hold.floor is None else hold.floor
    ceiling = width.ceiling if hold.ceiling is None else hold.ceiling
    if floor >= ceiling:
        raise Refusal(f"{hold.node_key}.floor", floor, f"must be below {hold.node_key}.ceiling={ceiling:g}")
    class_with_target = held_class(type(method), hold, replace(width, floor=floor, ceiling=ceiling))
    return class_with_target(**{field.name: getattr(method, field.name) for field in fields(method)})


@functools.cache
def held_class(method_class: type[Method], hold: Hold, width: Width) -> type[Method]:
    """Return the class of a method that holds a target.

    It is made once for equal arguments, because methods are equal only if they have the same class.

    Args:
        method_class: the class of the method without the target.
        hold: the target.
        width: the width of the method's bounds, with the floor and the ceiling of the target.
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
        "__doc__": method_class.__doc__,
        "__module__": method_class.__module__,
        "__qualname__": method_class.__qualname__,
    }
    return type(method_class.__name__, (HeldBounds, method_class), namespace)
