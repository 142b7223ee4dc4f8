"""The methods: which weight, value, controller and configuration belong together under which name."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_clipx.controllers.acpo import AcpoController
from verl_clipx.controllers.bapo import BapoController
from verl_clipx.controllers.fixed import FixedBounds
from verl_clipx.losses import aspo, ce_gppo, cispo, dgpo, gppo, grpo
from verl_clipx.training.config import (
    AcpoConfig,
    AspoConfig,
    BapoConfig,
    CeGppoConfig,
    CispoConfig,
    DgpoConfig,
    GppoConfig,
    GrpoConfig,
    MethodConfig,
    values,
)


@dataclass(frozen=True)
class Method:
    """One policy loss.

    Args:
        name: without prefix; verl knows it as `clipx_<name>`.
        summary: one line for `clipx methods`.
        source: paper and equation.
        config: the class of its configuration.
        gradient_weight: (ratio, advantages, bounds, *, parameters by name) -> F.
        controller: the class whose instances turn statistics into bounds; its fields are parameters by name.
        loss_value: what is logged as the loss, from the names that `policy_loss.token_loss` offers; None: -F*A.
    """

    name: str
    summary: str
    source: str
    config: type[MethodConfig]
    gradient_weight: Callable[..., Any]
    controller: type
    loss_value: Callable[..., Any] | None = None

    @property
    def registered_name(self) -> str:
        """The name in verl's registry."""
        return f"clipx_{self.name}"


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "grpo",
            "PPO's clip with separate lower and upper bounds (DAPO's clip-higher with clip_high 1.28)",
            "GRPO (arXiv 2402.03300); DAPO (arXiv 2503.14476), Eq. 10",
            GrpoConfig,
            grpo.gradient_weight,
            FixedBounds,
            grpo.loss_value,
        ),
        Method(
            "cispo",
            "clips the importance weight and keeps every token's gradient",
            "MiniMax-M1 (arXiv 2506.13585), Eq. 4-5",
            CispoConfig,
            cispo.gradient_weight,
            FixedBounds,
            cispo.loss_value,
        ),
        Method(
            "gppo",
            "tokens outside the bounds keep the bound as their weight",
            "GPPO, in the form of DGPO's Eq. 4",
            GppoConfig,
            gppo.gradient_weight,
            FixedBounds,
        ),
        Method(
            "ce_gppo",
            "GPPO with a scale on each side",
            "CE-GPPO, in the form of DGPO's Eq. 5",
            CeGppoConfig,
            ce_gppo.gradient_weight,
            FixedBounds,
        ),
        Method(
            "aspo",
            "the reciprocal ratio as the weight of positive tokens, with a soft cap",
            "ASPO, in the form of DGPO's Eq. 6 and its authors' code",
            AspoConfig,
            aspo.gradient_weight,
            FixedBounds,
        ),
        Method(
            "dgpo",
            "a gradient that decays as a power of the ratio outside the bounds",
            "DGPO, Eq. 9-10",
            DgpoConfig,
            dgpo.gradient_weight,
            FixedBounds,
        ),
        Method(
            "acpo",
            "bounds per probability bin, from the spread of the ratio in the bin",
            "ACPO (arXiv 2606.22570), Eq. 8",
            AcpoConfig,
            grpo.gradient_weight,
            AcpoController,
            grpo.loss_value,
        ),
        Method(
            "bapo",
            "bounds searched until positive tokens contribute enough",
            "BAPO, Eq. 8 and Algorithm 1",
            BapoConfig,
            grpo.gradient_weight,
            BapoController,
            grpo.loss_value,
        ),
    )
}


def method_named(name: str) -> Method:
    """The method of that name.

    Args:
        name: with or without the prefix `clipx_`.

    Raises:
        ValueError: names the key, the value and the methods that exist.
    """
    method = METHODS.get(name.removeprefix("clipx_")) if isinstance(name, str) else None
    if method is None:
        raise ValueError(f"clipx.method={name!r}: must be one of {', '.join(METHODS)}.")
    return method


@functools.cache
def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's or class's parameters, self excluded."""
    return tuple(inspect.signature(function).parameters)


def call_by_name(function: Callable[..., Any], offered: dict[str, Any]) -> Any:
    """Calls a function with those of the offered values that it asks for by name.

    Args:
        function: every parameter is offered or has a default.
        offered: name to value.

    Returns:
        What the function returns.
    """
    return function(**{name: offered[name] for name in parameter_names(function) if name in offered})


@functools.cache
def controller_of(method: Method, config: MethodConfig) -> Any:
    """The controller of a method under a configuration, built once.

    Args:
        method: the method.
        config: its configuration (frozen, so it is a key).
    """
    return call_by_name(method.controller, values(config))
