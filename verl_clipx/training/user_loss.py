"""A user's own loss: one function, one decorator."""

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from verl_clipx.training.config import AcpoConfig, BapoConfig, FixedBoundsConfig, MethodConfig
from verl_clipx.training.methods import METHODS, Method
from verl_clipx.training.parameters import Allowed, boolean, choice, number, optional, parameter

GradientWeight = TypeVar("GradientWeight", bound=Callable[..., Any])

# The reason why a function's own numbers have no narrower range.
ANY_NUMBER = "any that float32 holds: the function alone knows its range"

CONTROLLER_CONFIGS: dict[str, type[MethodConfig]] = {
    "fixed": FixedBoundsConfig,
    "acpo": AcpoConfig,
    "bapo": BapoConfig,
}


def register_loss(name: str, *, bounds: str = "fixed") -> Callable[[GradientWeight], GradientWeight]:
    """Registers a gradient weight as a policy loss with everything the built-in ones have.

    The function gets the importance-sampling ratio, the advantages and the clip bounds, and returns F with
    dJ/dlog_prob = F*A per token. Its keyword-only parameters (numbers, booleans or text with defaults) become
    parameters under the clipx node. Use it with `+clipx=custom clipx.function=package.module:name`.

    Args:
        name: the loss is `clipx_<name>` in verl's registry.
        bounds: where the bounds come from: "fixed" (clip_low, clip_high), "acpo" or "bapo" (their parameters).

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        ValueError: the name is taken, `bounds` is unknown, or the function's signature does not fit.
    """

    def decorate(gradient_weight: GradientWeight) -> GradientWeight:
        existing = METHODS.get(name)
        if existing is not None and not same_function(existing.gradient_weight, gradient_weight):
            raise ValueError(
                f"register_loss({name!r}): the name belongs to {describe(existing.gradient_weight)}, "
                f"{describe(gradient_weight)} needs another one."
            )
        if bounds not in CONTROLLER_CONFIGS:
            raise ValueError(f"register_loss(bounds={bounds!r}): must be one of {', '.join(CONTROLLER_CONFIGS)}.")
        model = METHODS["grpo" if bounds == "fixed" else bounds]
        METHODS[name] = Method(
            name=name,
            summary=(inspect.getdoc(gradient_weight) or "").split("\n")[0],
            source=describe(gradient_weight),
            config=config_class(name, gradient_weight, CONTROLLER_CONFIGS[bounds]),
            gradient_weight=gradient_weight,
            controller=model.controller,
        )
        register_if_verl_is_loaded()
        return gradient_weight

    return decorate


def config_class(name: str, gradient_weight: Callable[..., Any], base: type[MethodConfig]) -> type[MethodConfig]:
    """A configuration class with the function's keyword-only parameters as fields.

    Args:
        name: the method's name.
        gradient_weight: the user's function.
        base: the configuration of its bounds.

    Raises:
        ValueError: a positional parameter other than ratio, advantages, bounds; or a parameter without default.
    """
    fields = []
    for parameter_name, described in inspect.signature(gradient_weight).parameters.items():
        if parameter_name in ("ratio", "advantages", "bounds"):
            continue
        if described.kind is not inspect.Parameter.KEYWORD_ONLY or described.default is inspect.Parameter.empty:
            raise ValueError(
                f"register_loss({name!r}): parameter {parameter_name!r} of {describe(gradient_weight)} must be "
                "keyword-only with a default; only ratio, advantages and bounds come before the *."
            )
        if parameter_name in {field.name for field in dataclasses.fields(base)}:
            continue
        fields.append(
            (
                parameter_name,
                type(described.default),
                parameter(described.default, allowed_like(described.default), f"of {describe(gradient_weight)}"),
            )
        )
    return dataclasses.make_dataclass(
        f"{name.title().replace('_', '')}Config",
        fields,
        bases=(base,),
        namespace={"method": name, "__module__": __name__},
        frozen=True,
        kw_only=True,
    )


def allowed_like(default: Any) -> Allowed:
    """Values of the default's kind: a number for numbers, true/false for booleans, text for text."""
    if isinstance(default, bool):
        return boolean()
    if isinstance(default, int | float):
        return number(reason=ANY_NUMBER)
    if default is None:
        return optional(number(reason=ANY_NUMBER))
    if isinstance(default, str):
        return Allowed("text", lambda value: value if isinstance(value, str) else choice().convert(value))
    raise ValueError(f"a default of type {type(default).__name__} cannot be a configuration value: use a number.")


def load_method(function: str) -> Method:
    """The method of a user's decorated function.

    Args:
        function: `package.module:name`; the module is imported.

    Raises:
        ValueError: not of that form, not importable, or not decorated with register_loss.
    """
    module_name, separator, attribute = function.partition(":") if isinstance(function, str) else ("", "", "")
    if not separator or not module_name or not attribute:
        raise ValueError(f"clipx.function={function!r}: write it as package.module:name.")
    try:
        loaded = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"clipx.function={function!r}: {error}. The module must be importable in the driver and in every Ray "
            "worker: install it, or put its folder on PYTHONPATH there."
        ) from error
    return method_of(loaded)


def method_of(gradient_weight: Callable[..., Any]) -> Method:
    """The method of a decorated function.

    Raises:
        ValueError: it is not decorated with register_loss.
    """
    for method in METHODS.values():
        if method.gradient_weight is gradient_weight and method.source == describe(gradient_weight):
            return method
    raise ValueError(f"{describe(gradient_weight)} is not decorated with @verl_clipx.register_loss(name).")


def register_if_verl_is_loaded() -> None:
    """Puts new methods into verl's registry if verl has one already; otherwise the plugin does it later."""
    import sys

    if "verl.trainer.ppo.core_algos" in sys.modules:
        from verl_clipx.training.registry import register_losses

        register_losses(sys.modules["verl.trainer.ppo.core_algos"])


def same_function(first: Callable[..., Any], second: Callable[..., Any]) -> bool:
    """Whether two functions are the same one, a re-imported module's copy included."""
    return (first.__module__, first.__qualname__) == (second.__module__, second.__qualname__)


def describe(function: Any) -> str:
    """module:name of a function, for messages."""
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', repr(function))}"
