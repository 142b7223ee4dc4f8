"""What a held target must know of a method's bounds: the quantity that they are a width of."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Width:
    """The quantity that a method's bounds are a width of, for `+clipx/hold`, which solves for it.

    Args:
        quantity: what `Method.bounded` returns: a "ratio" about 1, or a "difference" about 0.
        parameters: the bounds where no target is held; the solved bounds take their place.
        every_sign: whether the clip acts wherever the value is outside, whichever sign the advantage has.
        mask: whether F is 0 or the ratio of a token: the second moment of what is kept then grows with the width.
        floor: the narrowest width, unless the user sets another.
        ceiling: the widest width, unless the user sets another.
        only_with: parameters of the method with the value that each must have; with another there is no width.
    """

    quantity: str = "ratio"
    parameters: tuple[str, ...] = ("clip_low", "clip_high")
    every_sign: bool = False
    mask: bool = False
    floor: float = 0.05
    ceiling: float = 1.0
    only_with: tuple[tuple[str, str], ...] = ()
