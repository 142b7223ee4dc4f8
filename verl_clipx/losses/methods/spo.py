"""SPO (arXiv 2401.16025): a quadratic penalty on the ratio, whose gradient turns back beyond the bounds."""

from dataclasses import dataclass

from torch import Tensor, where

from verl_clipx.losses.base.method import Bounds, Method
from verl_clipx.losses.base.parameters import number, parameter
from verl_clipx.losses.base.tokens import Tokens

# Without log_ratio_clamp a ratio counts as at most this, so that float32 holds its square times any usual advantage.
LARGEST_RATIO = 1e15


@dataclass(frozen=True, kw_only=True)
class Spo(Method, name="spo", source="Simple Policy Optimization (arXiv 2401.16025); CFPO in verl's pull request 5252"):
    """A penalty on the squared distance of the ratio from 1 instead of the clip.

    The objective of a token is r A - |A| (r - 1)^2 / (2 epsilon), so that F = r (1 - sign(A) (r - 1) / epsilon). It is
    0 at the edge of PPO's clip and has the other sign beyond it. F = 0 beyond log_ratio_clamp.
    """

    # F is 1 at ratio 1, and below 0 beyond the edge of PPO's clip.
    unconstrained_weight = True

    epsilon: float = parameter(
        0.2,
        number(at_least=0.01, at_most=100, usual=(0.05, 1)),
        "distance from 1 at which the gradient turns back; at 12.5, which a framework uses, F is r to within 8 % of it "
        "for ratios of 0 to 2, which is hardly a limit",
        "paper",
        role="penalty",
    )

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        r = t.free_ratio.clamp(max=LARGEST_RATIO)
        return where(t.unclamped, r * (1 - t.advantages.sign() * (r - 1) / self.epsilon), 0.0)

    def loss_value(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        """Return |A| (r - 1)^2 / (2 epsilon) - A r."""
        A = t.advantages
        r = t.ratio.clamp(max=LARGEST_RATIO)
        return A.abs() * (r - 1).square() / (2 * self.epsilon) - A * r
