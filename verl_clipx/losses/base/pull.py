"""A pull towards another policy: a term of the objective whose gradient does not grow with the advantage."""

from collections.abc import Callable, Mapping

from torch import Tensor, ones_like, where

from verl_clipx.losses.base.method import Bounds, Method
from verl_clipx.losses.base.tokens import Tokens

# verl clamps its k3 loss at this, which k3 exceeds at log-ratios below -2.61 and above 11. There it has no gradient.
LARGEST_K3 = 10.0


def estimate_k1(x: Tensor) -> Tensor:
    """Return x, the estimate k1 of a token's divergence. On fresh samples its gradient is 0 on average.

    Args:
        x: the log-ratio of the current policy to the other one, in nats, (sequences, length). It is the same for all
            estimators.
    """
    return x


def estimate_k2(x: Tensor) -> Tensor:
    """Return x^2 / 2, the estimate k2 of a token's divergence."""
    return x.square() / 2


def estimate_k3(x: Tensor) -> Tensor:
    """Return e^-x - 1 + x, the estimate k3 of a token's divergence."""
    return (-x).exp() - 1 + x


# Each estimator, by its name: from a log-ratio in nats to a token's divergence in nats, both (sequences, length).
ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {"k1": estimate_k1, "k2": estimate_k2, "k3": estimate_k3}


def pull_by(estimator: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a pull adds to the loss of each token, and its derivative with respect to log_prob.

    Args:
        estimator: a key of `ESTIMATORS`. k3 is clamped at `LARGEST_K3`, as in verl's kl_penalty, so that a token far
            below the other policy can't outweigh all others. Where the clamp acts, the derivative is 0.
        x: as for the estimators.

    Returns:
        Both (sequences, length), the first in nats.
    """
    divergence = ESTIMATORS[estimator](x)
    if estimator == "k1":
        return divergence, ones_like(x)
    if estimator == "k2":
        return divergence, x
    return divergence.clamp(max=LARGEST_K3), where(divergence > LARGEST_K3, 0.0, 1 - (-x).exp())


class WithPull(Method):
    """A method with a pull: a divergence from another policy is subtracted from its objective.

    The gradient of the divergence is a part of F, where it is divided by A. Where A is 0, F cannot hold it, and only
    `gradient` has it. Without the divergence, F is `own_weight`, and the value is that of the next class in the order
    of inheritance.
    """

    unconstrained_weight = True

    def pull_on(self, t: Tokens, bounds: Bounds) -> tuple[Tensor, Tensor]:
        """Return what is subtracted from the objective of each token, and its derivative with respect to log_prob.

        Returns:
            Both (sequences, length).
        """
        raise NotImplementedError(f"{type(self).__name__}.pull_on: return what pulls every token, and its gradient")

    def own_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        """Return F without the pull, (sequences, length)."""
        return super().gradient_weight(t, bounds)

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        A = t.advantages
        own = self.own_weight(t, bounds)
        # In one expression, so that its intermediate tensors are freed at once.
        return where(A == 0, own, own - self._pull_derivative(t, bounds) / where(A == 0, 1.0, A))

    def gradient(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        A = t.advantages
        return where(A == 0, -self._pull_derivative(t, bounds), weight * A)

    def loss_value(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        """Return the value without the pull, plus the divergence."""
        value = super().loss_value(t, bounds, self.own_weight(t, bounds))
        return value + self.pull_on(t, bounds)[0]

    def _pull_derivative(self, t: Tokens, bounds: Bounds) -> Tensor:
        """Return the derivative of the pull with respect to log_prob, (sequences, length)."""
        return self.pull_on(t, bounds)[1]
