"""P3O (arXiv 2605.12380): the effective sample size of an update caps the ratio and sets the strength of a pull."""

from dataclasses import dataclass

from torch import Tensor, float64, stack, where

from verl_clipx.losses.base.histogram import ratio_or_zero
from verl_clipx.losses.base.method import Bounds, ConstantWeight
from verl_clipx.losses.base.metric import of_decision
from verl_clipx.losses.base.pull import WithPull
from verl_clipx.losses.base.tokens import Tokens, number_in, parts

# The exponential in the pull takes log-ratios up to this size, as in the authors' code; beyond, it has no gradient.
LARGEST = 10.0


@dataclass(frozen=True, kw_only=True)
class P3o(WithPull, ConstantWeight, name="p3o", source="P3O (arXiv 2605.12380), Eq. 12, as its authors' code FeynRL"):
    """Caps the ratio at the effective sample size E of the update's ratios, and pulls back by what is missing from 1.

    E = (sum of r)^2 / (n * sum of r^2) over the mini-batch's n tokens. The objective of a token is
    min(r, E) A log pi - (1 - E) (log r + 1 / r - 1), its first weight a constant, so that
    F = min(r, E) - (1 - E) (1 - 1 / r) / A. Where A is 0, F can't hold the pull: traces show none of it there, while
    the gradient has it. It has no parameter of its own.

    As in the authors' code, log r is clamped to +-10 inside of 1 / r = exp(-log r), whose gradient ends there. Beyond,
    F = min(r, E) - (1 - E) / A: a token far below the old policy is pushed down a little, and no longer pulled up.

    The authors measure from the policy that sampled.
    """

    formula = ("", "E")
    symbols = "E the effective sample size of the mini-batch's ratios, at most 1, with a pull back"

    logs = (
        of_decision(
            "ratio_cap",
            "the cap on the ratio: the effective sample size of the update, as a share of its tokens",
            "fraction",
        ),
    )

    never_negative = slice(None)
    statistics_size = 3

    def statistics(self, t: Tokens) -> Tensor:
        """The number of tokens, the sum of their ratios, and that of their squares."""
        ratio = parts((t.ratio * t.mask).to(float64))
        return stack([number_in(t.mask).to(float64), ratio.sum(-1), ratio.square().sum(-1)]).sum(-1)

    def decide(self, statistics: Tensor) -> Tensor:
        """E, and 1 without tokens."""
        number, total, squares = statistics.view(3, 1)
        share = ratio_or_zero(total.square(), number * squares).clamp(max=1.0)
        return share.where(number > 0, 1.0)

    def metrics(self, statistics: Tensor, decision: Tensor) -> dict[str, Tensor]:
        return {"ratio_cap": decision[0]}

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        return Bounds(0.0, decision.to(t.ratio.dtype)[0])

    def own_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        return bounds.clip(t.ratio)

    def pull_on(self, t: Tokens, bounds: Bounds) -> tuple[Tensor, Tensor]:
        """(1 - E) (log r + 1 / r - 1), with 1 / r clamped, and its derivative."""
        missing = 1 - bounds.high
        inverse = (-t.log_ratio).clamp(-LARGEST, LARGEST).exp()
        slope = where(t.log_ratio.abs() > LARGEST, 0.0, inverse)
        return missing * (t.log_ratio + inverse - 1), missing * (1 - slope)
