"""Describes a method's bounds for `+clipx/hold`, which solves for their width."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Width:
    """How a method's bounds follow from a width w: 1 / (1 + w) and 1 + w on a ratio, or -w and w on a difference.

    Args:
        quantity: what `Method.bounded` returns: a "ratio", which is about 1, or a "difference", which is about 0.
        parameters: the parameters that are the bounds where no target is held. Where one is held, the solved bounds
            take their place.
        every_sign: whether the clip acts wherever the quantity is outside the bounds, whichever sign the advantage has.
        mask: whether F is either 0 or the token's ratio. The second moment of the kept tokens then grows with the
            width.
        floor: the narrowest width, unless the user sets another.
        ceiling: the widest width, unless the user sets another.
        only_with: pairs of a parameter's name and the value that it must have. With any other value the bounds are not
            of this form, and can hold no target.
    """

    quantity: str = "ratio"
    parameters: tuple[str, ...] = ("clip_low", "clip_high")
    every_sign: bool = False
    mask: bool = False
    floor: float = 0.05
    ceiling: float = 1.0
    only_with: tuple[tuple[str, str], ...] = ()
