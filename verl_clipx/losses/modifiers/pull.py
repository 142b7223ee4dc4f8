"""Adds a pull to the policy that sampled, or to the old one, to the loss of any method."""

import functools
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor

from verl_clipx.losses.base.method import NODE, Bounds, Method
from verl_clipx.losses.base.parameters import Parameters, choice, number, parameter
from verl_clipx.losses.base.pull import ESTIMATORS, WithPull, pull_by
from verl_clipx.losses.base.refusal import NO_VALUE, Refusal
from verl_clipx.losses.base.tokens import LARGEST_LOG_RATIO, Tokens


@dataclass(frozen=True, kw_only=True)
class Pull(Parameters):
    """Takes coefficient times an estimate of the divergence from another policy off the objective of every token."""

    node_key: ClassVar[str] = "clipx.pull"

    estimator: str = parameter(
        "k2", choice(*ESTIMATORS), "of the divergence: k1 (x), k2 (x^2 / 2) or k3 (e^-x - 1 + x, at most 10)"
    )
    coefficient: float = parameter(1e-3, number(above=0, at_most=100), "of the divergence in the objective", "choice")
    anchor: str = parameter(
        "old", choice("old", "rollout"), "the policy of x = log(current / anchor): old or the sampler's"
    )

    def log_ratio(self, t: Tokens) -> Tensor:
        """Return x, the log-ratio of the current policy to the anchor, clamped as in verl: (sequences, length)."""
        anchor = t.old_log_prob if self.anchor == "old" else t.rollout_log_prob
        return (t.log_prob - anchor).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


class PulledMethod(WithPull):
    """A method with its own F, bounds and value, and a pull. `pulled` makes a subclass for each pull."""

    pull: ClassVar[Pull]
    unconstrained_weight = True

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make this method again: from the method without the pull, and the pull.

        Pickle needs it, because no module has the class that `pulled` makes.
        """
        return pulled, (self.without_pull, self.pull)

    @property
    def without_pull(self) -> Method:
        """The method with the same parameters and no pull."""
        _, own_class = type(self).__bases__
        return own_class(**{field.name: getattr(self, field.name) for field in fields(self)})

    @property
    def parameters(self) -> dict[str, Any]:
        pull = self.pull
        return {**super().parameters, "pull": f"{pull.estimator} to {pull.anchor}, times {pull.coefficient:g}"}

    @property
    def limits(self) -> dict[str, str]:
        return {**super().limits, "pull": "penalty"}

    @property
    def acts_at_ratio_one(self) -> bool:
        # At ratio 1 to the old policy, the estimates k2 and k3 of the divergence from it have no gradient. That of k1
        # is constant.
        pull_acts = self.pull.anchor == "rollout" or self.pull.estimator == "k1"
        return pull_acts or self.without_pull.acts_at_ratio_one

    @property
    def asks_for_itself(self) -> tuple[str, ...]:
        """The fields that the method needs without its pull."""
        return super().asks_for

    @property
    def asks_for(self) -> tuple[str, ...]:
        own = self.asks_for_itself
        if self.pull.anchor == "rollout" and "rollout_log_prob" not in own:
            return (*own, "rollout_log_prob")
        return own

    def pull_on(self, t: Tokens, bounds: Bounds) -> tuple[Tensor, Tensor]:
        """Return the coefficient times the estimate of the divergence, and its derivative with respect to log_prob."""
        divergence, derivative = pull_by(self.pull.estimator, self.pull.log_ratio(t))
        return self.pull.coefficient * divergence, self.pull.coefficient * derivative


def pulled(method: Method, pull: Pull) -> Method:
    """Return a method with the same parameters and a pull.

    Raises:
        Refusal: the method has a pull of its own.
    """
    # A `MovedTooFar` is a `WithPull` too, but pulls only if its kl_tau is above 0, as unconstrained_weight then says.
    if isinstance(method, WithPull) and method.unconstrained_weight:
        tau = getattr(method, "kl_tau", 0)
        own = f"{NODE}.kl_tau={tau:g}" if tau else "its penalty"
        reason = f"{method.name} already has its own pull, {own}"
        raise Refusal(pull.node_key, NO_VALUE, reason, f"Leave out +{NODE}/pull, or choose another method.")
    class_with_pull = pulled_class(type(method), pull)
    return class_with_pull(**{field.name: getattr(method, field.name) for field in fields(method)})


@functools.cache
def pulled_class(method_class: type[Method], pull: Pull) -> type[Method]:
    """Return the class of a method with a pull.

    It is made once for equal arguments, because methods are equal only if they have the same class.

    Args:
        method_class: the class of the method without the pull.
        pull: the pull.
    """
    namespace = {
        "pull": pull,
        "__doc__": method_class.__doc__,
        "__module__": method_class.__module__,
        "__qualname__": method_class.__qualname__,
    }
    return type(method_class.__name__, (PulledMethod, method_class), namespace)
