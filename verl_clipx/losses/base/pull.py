"""A pull towards another policy: a term of the objective whose gradient does not grow with the advantage."""

from torch import Tensor, where

from verl_clipx.losses.base.method import Bounds, Method
from verl_clipx.losses.base.tokens import Tokens

# From a log-ratio x to the divergence of a token and to its gradient, which under k1 is 0 on average on fresh samples.
ESTIMATORS = {
    "k1": (lambda x: x, lambda x: x * 0 + 1),
    "k2": (lambda x: x.square() / 2, lambda x: x),
    "k3": (lambda x: (-x).exp() - 1 + x, lambda x: 1 - (-x).exp()),
}


class WithPull(Method):
    """A method whose objective also loses the divergence from another policy.

    F holds its gradient divided by A; where A is 0 it can't, and only `gradient` has it. Without the divergence, F is
    `own_weight`, and the value that of the class behind this one.
    """

    unconstrained_weight = True

    def pull_on(self, t: Tokens, bounds: Bounds) -> tuple[Tensor, Tensor]:
        """Returns what each token's objective loses, and its derivative by log_prob, both (sequences, length)."""
        raise NotImplementedError(f"{type(self).__name__}.pull_on: return what pulls every token, and its gradient")

    def own_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        """F without the pull, (sequences, length)."""
        return super().gradient_weight(t, bounds)

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        A, own = t.advantages, self.own_weight(t, bounds)
        return where(A == 0, own, own - self.pull_on(t, bounds)[1] / where(A == 0, 1.0, A))

    def gradient(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        return where(t.advantages == 0, -self.pull_on(t, bounds)[1], weight * t.advantages)

    def loss_value(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        """The value without the pull, and the divergence."""
        return super().loss_value(t, bounds, self.own_weight(t, bounds)) + self.pull_on(t, bounds)[0]
