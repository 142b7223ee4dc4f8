"""A pull towards another policy: a term of the objective whose gradient does not grow with the advantage."""

from collections.abc import Callable, Mapping

from torch import Tensor, ones_like, where

from verl_clipx.losses.base.method import Bounds, Method
from verl_clipx.losses.base.tokens import Tokens

# verl clamps its k3 loss at this. The gradient ends there: at log-ratios below -2.61 and above 11.
LARGEST_K3 = 10.0


def estimate_k1(x: Tensor) -> Tensor:
    """Return x, the estimate k1 of a token's divergence; its gradient is 0 on average on fresh samples.

    Args:
        x: the log-ratio of the current policy to the other one, in nats, (sequences, length); so for all estimators.
    """
    return x


def estimate_k2(x: Tensor) -> Tensor:
    """Return x^2 / 2, the estimate k2 of a token's divergence."""
    return x.square() / 2


def estimate_k3(x: Tensor) -> Tensor:
    """Return e^-x - 1 + x, the estimate k3 of a token's divergence."""
    return (-x).exp() - 1 + x


# From a log-ratio in nats to a token's divergence in nats, both (sequences, length).
ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {"k1": estimate_k1, "k2": estimate_k2, "k3": estimate_k3}


def pull_by(estimator: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a pull adds to the loss of each token, and its derivative by log_prob, both (sequences, length).

    Args:
        estimator: a key of `ESTIMATORS`. k3 is clamped at `LARGEST_K3`, as in verl's kl_penalty, so that a token far
            below the other policy can't outweigh all others; where the clamp acts the derivative is 0.
        x: as for the estimators.
    """
    divergence = ESTIMATORS[estimator](x)
    if estimator == "k1":
        return divergence, ones_like(x)
    if estimator == "k2":
        return divergence, x
    return divergence.clamp(max=LARGEST_K3), where(divergence > LARGEST_K3, 0.0, 1 - (-x).exp())


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
        A = t.advantages
        own = self.own_weight(t, bounds)
        return where(A == 0, own, own - self.pull_on(t, bounds)[1] / where(A == 0, 1.0, A))

    def gradient(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        return where(t.advantages == 0, -self.pull_on(t, bounds)[1], weight * t.advantages)

    def loss_value(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        """The value without the pull, and the divergence."""
        return super().loss_value(t, bounds, self.own_weight(t, bounds)) + self.pull_on(t, bounds)[0]
