"""Clip bounds on the importance-sampling ratio."""

from typing import NamedTuple

from torch import Tensor


class Bounds(NamedTuple):
    """Clip bounds stated on the ratio itself (0.8 and 1.28, not 0.2 and 0.28).

    Attributes:
        low: lower bound; a float, or a tensor of the ratio's dtype that broadcasts to (sequences, length). 0 or less
            means no lower bound, since a ratio is never negative.
        high: upper bound, likewise; ``inf`` means no upper bound.
    """

    low: Tensor | float
    high: Tensor | float

    def clip(self, ratio: Tensor) -> Tensor:
        """The ratio within the bounds, (sequences, length); where they cross, the upper one."""
        if isinstance(self.low, Tensor) == isinstance(self.high, Tensor):
            return ratio.clamp(self.low, self.high)
        return ratio.clamp(min=self.low).clamp(max=self.high)
