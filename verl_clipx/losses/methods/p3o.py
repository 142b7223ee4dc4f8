"""P3O (arXiv 2605.12380): the effective sample size of an update caps the ratio and sets the strength of a pull."""

from dataclasses import dataclass

from torch import Tensor, float64, stack, where

from verl_clipx.losses.base.histogram import ratio_or_zero
from verl_clipx.losses.base.method import Bounds, ConstantWeight
from verl_clipx.losses.base.metric import of_decision
from verl_clipx.losses.base.pull import WithPull
from verl_clipx.losses.base.tokens import Tokens, number_in, parts

# Log-ratios in the pull's exponential are clamped to +-this, as in the authors' code, and have no gradient beyond.
LARGEST = 10.0


@dataclass(frozen=True, kw_only=True)
class P3o(WithPull, ConstantWeight, name="p3o", source="P3O (arXiv 2605.12380), Eq. 12, as its authors' code FeynRL"):
    """Caps the ratio at the effective sample size E of the update's ratios, and pulls back by what is missing from 1.

    E = (sum of r)^2 / (n * sum of r^2) over the mini-batch's n tokens. The objective of a token is
    min(r, E) A log pi - (1 - E) (log r + 1 / r - 1), where min(r, E) is held constant, so that
    F = min(r, E) - (1 - E) (1 - 1 / r) / A. Where A is 0, F can't hold the pull: traces show none of it there, while
    the gradient has it. The method has no parameter of its own.

    As in the authors' code, log r is clamped to +-10 in 1 / r = exp(-log r), which has no gradient beyond. There,
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
        """Return the number of tokens, the sum of their ratios, and the sum of the squared ratios: (3,), float64."""
        ratio = parts((t.ratio * t.mask).to(float64))
        return stack([number_in(t.mask).to(float64), ratio.sum(-1), ratio.square().sum(-1)]).sum(-1)

    def decide(self, statistics: Tensor) -> Tensor:
        """Return E, and 1 without tokens: (1,), float64."""
        token_count, total, squares = statistics.view(3, 1)
        effective_share = ratio_or_zero(total.square(), token_count * squares).clamp(max=1.0)
        return effective_share.where(token_count > 0, 1.0)

    def metrics(self, statistics: Tensor, decision: Tensor) -> dict[str, Tensor]:
        return {"ratio_cap": decision[0]}

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        return Bounds(0.0, decision.to(t.ratio.dtype)[0])

    def own_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        return bounds.clip(t.ratio)

    def pull_on(self, t: Tokens, bounds: Bounds) -> tuple[Tensor, Tensor]:
        """Return (1 - E) (log r + 1 / r - 1), with 1 / r clamped, and its derivative with respect to log_prob."""
        strength = 1 - bounds.high
        inverse = (-t.log_ratio).clamp(-LARGEST, LARGEST).exp()
        # The derivative of 1 / r is -1 / r, and 0 where 1 / r is clamped.
        unclamped_inverse = where(t.log_ratio.abs() > LARGEST, 0.0, inverse)
        return strength * (t.log_ratio + inverse - 1), strength * (1 - unclamped_inverse)
