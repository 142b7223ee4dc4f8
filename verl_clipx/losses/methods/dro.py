"""DRO (arXiv 2405.19107): the advantage and a pull back to the old policy, instead of a ratio and its bounds."""

from dataclasses import dataclass

from torch import Tensor

from verl_clipx.losses.base.method import Bounds, ConstantWeight, clamp_parameter
from verl_clipx.losses.base.parameters import VerlKey, number, parameter
from verl_clipx.losses.base.pull import WithPull
from verl_clipx.losses.base.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class Dro(WithPull, ConstantWeight, name="dro", source="DRO (arXiv 2405.19107), Eq. 8, per token as in verl's dro"):
    """A penalty on the squared log-ratio instead of bounds; it also pulls where A is 0.

    The objective of a token is A log pi - beta/2 (log r)^2, and its gradient is A - beta log r. F is this gradient
    divided by A, so it depends on the size of A. Where A is 0, F does not exist: traces show 0, while the gradient is
    still -beta log r.
    """

    log_ratio_clamp: float | None = clamp_parameter(
        None, "log importance-sampling ratios are clamped to plus or minus this; null: no clamp, as in verl's dro"
    )
    # As in the example of verl's pull request 7245 and in Tinker's documentation; verl itself has no default.
    beta: float = parameter(
        0.05,
        number(above=0, at_most=100),
        "how strongly the gradient pulls back, per nat of the log-ratio",
        "choice",
        VerlKey(("policy_loss.dro_beta",)),
        role="penalty",
    )

    def own_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        """Return 1, and 0 where A is 0, where F does not exist: (sequences, length)."""
        return (t.advantages != 0).to(t.ratio.dtype)

    def pull_on(self, t: Tokens, bounds: Bounds) -> tuple[Tensor, Tensor]:
        """Return beta/2 (log r)^2, and its derivative with respect to log_prob."""
        return self.beta / 2 * t.log_ratio.square(), self.beta * t.log_ratio
