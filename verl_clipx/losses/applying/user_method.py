"""A user's own loss: a class like the built-in ones or, if it is only a weight, one decorated function."""

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from verl_clipx.losses.base.method import described, register
from verl_clipx.losses.base.parameters import Allowed, boolean, integer, number, only, optional, parameter
from verl_clipx.losses.base.tokens import OPTIONAL, Tokens
from verl_clipx.losses.methods import Bounds, FixedBounds, Method

GradientWeight = TypeVar("GradientWeight", bound=Callable[..., Any])

# Why the number parameters of a function have no narrower range.
ANY_NUMBER = "any that float32 holds: only the function knows its range"
ANY = number(reason=ANY_NUMBER)

# What a function may ask for, by these names.
OFFERED = ("ratio", "advantages", "bounds", "log_prob", "old_log_prob", "entropy")

# Arguments of a loss in verl's registry that no function of ours has.
OF_VERLS_LOSSES = {"response_mask", "loss_agg_mode", "rollout_is_weights"}

# From the name of a decorated function to its method, or to an error that says what is wrong with it.
DECORATED: dict[str, type[Method] | ValueError] = {}


def register_loss(
    name: str,
    *,
    unconstrained_weight: bool = False,
    by_sequence: bool = False,
    by_batch: bool = False,
) -> Callable[[GradientWeight], GradientWeight]:
    """Registers a gradient weight as a policy loss with everything that the built-in losses have.

    The function asks by name for what it needs of the tokens: ratio, advantages, log_prob, old_log_prob and entropy (of
    the current policy, in nats), each (sequences, length) and detached, and the clip bounds, which are constants
    (clip_low, clip_high); subclass a method for others. It returns F with
    dJ/dlog_prob = F*A per token. Its keyword-only parameters (numbers, booleans or text with defaults) become
    parameters under the clipx node, of the kind of their default. Use it with `+clipx=custom
    clipx.function=package.module:name`. A mistake raises an error only when the loss is used, so that the other losses
    of its module still work.

    Args:
        name: the loss is `clipx_<name>` in verl's registry.
        unconstrained_weight: whether F may be 0 or less, or change with the size of the advantages. The contract then
            checks neither.
        by_sequence: whether F of a token depends on the other tokens of its sequence.
        by_batch: whether F of a token depends on the other sequences of its micro-batch. The contract then compares it
            neither over micro-batches nor over sizes of the advantages.

    Returns:
        A decorator that returns the function unchanged.
    """

    def decorate(gradient_weight: GradientWeight) -> GradientWeight:
        flags = dict(unconstrained_weight=unconstrained_weight, by_sequence=by_sequence, by_batch=by_batch)
        try:
            made = method_class(name, gradient_weight, **flags)
        except ValueError as error:
            made = error
        DECORATED[described(gradient_weight)] = made
        return gradient_weight

    return decorate


def method_class(name: str, gradient_weight: Callable[..., Any], **flags: bool) -> type[Method]:
    """The method that a decorated function stands for; the arguments are those of `register_loss`.

    Raises:
        ValueError: the function's signature or a default does not fit.
    """
    signature, fields, own = inspect.signature(gradient_weight).parameters, [], []
    if has_signature_of_verls(gradient_weight):
        raise ValueError(f"register_loss({name!r}): {returns_a_loss(gradient_weight)}")
    inherited = {field.name: field.metadata for field in dataclasses.fields(FixedBounds)}
    # A function with neither the argument `bounds` nor one of their parameters has none.
    has_bounds = {"bounds", "clip_low", "clip_high"} & signature.keys()
    for key, given in signature.items():
        if key in OFFERED:
            continue
        if given.kind is not inspect.Parameter.KEYWORD_ONLY or given.default is inspect.Parameter.empty:
            raise ValueError(
                f"register_loss({name!r}): {described(gradient_weight)} asks for {key!r}, but a function may ask only "
                f"for {', '.join(OFFERED)}. If {key} is a parameter, make it keyword-only with a default: *, "
                f"{key}=1.0. For statistics, or other fields of the tokens, subclass verl_clipx.Method."
            )
        own.append(key)
        # A parameter that the bounds have too keeps their range, with the function's default.
        known = inherited.get(key)
        allowed = allowed_like(given.default, given.annotation) if known is None else known["allowed"]
        meaning = f"of {described(gradient_weight)}" if known is None else known["meaning"]
        fields.append((key, type(given.default), parameter(given.default, allowed, meaning)))

    def weight(self: Method, t: Tokens, bounds: Bounds) -> Tensor:
        ratio = t.free_ratio if "log_ratio_clamp" in own else t.ratio
        offered = {**t._asdict(), "ratio": ratio, "bounds": bounds}
        asked_for = {key: offered[key] for key in OFFERED if key in signature}
        return gradient_weight(**asked_for, **{key: getattr(self, key) for key in own})

    namespace = {
        "__doc__": inspect.getdoc(gradient_weight) or "A gradient weight of your own.",
        "__module__": gradient_weight.__module__,
        "__qualname__": gradient_weight.__qualname__,
        "gradient_weight": weight,
        "asks_for": tuple(name for name in OPTIONAL if name in {*OFFERED} & signature.keys()),
        **flags,
        "loss_value": Method.loss_value,
    }
    made = dataclasses.make_dataclass(
        name, fields, bases=(FixedBounds if has_bounds else Method,), namespace=namespace, frozen=True, kw_only=True
    )
    made.__module__ = gradient_weight.__module__
    register(made, name)
    return made


def has_signature_of_verls(function: Any) -> bool:
    """Return whether a function takes what verl gives to the losses of its registry, whichever kind it takes it as."""
    if isinstance(function, type) or not callable(function):
        return False
    try:
        return bool(OF_VERLS_LOSSES & inspect.signature(function).parameters.keys())
    except (TypeError, ValueError):
        # Some callables of C have no signature.
        return False


def returns_a_loss(function: Callable[..., Any]) -> str:
    """Return what to do with a function that has the signature of a loss in verl's registry, in sentences."""
    name = described(function)
    module, _, attribute = name.partition(":")
    registers = f"@verl.trainer.ppo.core_algos.register_policy_loss({attribute!r})"
    chooses = f"actor_rollout_ref.actor.policy_loss.loss_mode={attribute}"
    return (
        f"{name} has the signature of a loss in verl's registry, and such a function returns a loss. +clipx=custom "
        f"takes the gradient weight F instead: write a function of {', '.join(OFFERED)}, as many as it needs, that "
        "returns F of every token, and decorate it with @verl_clipx.register_loss(name). To train the loss as it is, "
        f"register it with verl: {registers}, {chooses}, and VERL_USE_EXTERNAL_MODULES={module} wherever verl runs."
    )


def allowed_like(default: Any, annotation: Any) -> Allowed:
    """Values of a default's kind: text, booleans, or numbers, only whole ones if the annotation is int; null for None.

    Raises:
        ValueError: the default is of another type.
    """
    if isinstance(default, bool):
        return boolean()
    if type(default) is str:
        return only("text", lambda value: isinstance(value, str))
    if default is None or type(default) in (int, float):
        # A function's annotations may be texts.
        whole = annotation in (int, "int")
        allowed = integer(reason=ANY_NUMBER) if whole else dataclasses.replace(ANY, convert=as_written)
        return optional(allowed) if default is None else allowed
    kind = type(default).__name__
    raise ValueError(f"a default of type {kind} cannot be a configuration value: use a number, true or false, or text.")


def as_written(value: Any) -> int | float:
    """A number that float32 holds, unchanged; raises a ValueError for what is none."""
    ANY.convert(value)
    return value


def load_method(function: str) -> type[Method]:
    """A user's method.

    Args:
        function: `package.module:name` of a class or of a decorated function; the module is imported.

    Raises:
        ValueError: `function` is not of that form, cannot be imported, or is not a usable method.
    """
    module_name, _, attribute = function.partition(":") if isinstance(function, str) else ("", "", "")
    if not attribute or not all(part.isidentifier() for part in module_name.split(".")):
        raise ValueError(
            f"clipx.function={function!r}: write it as package.module:name. For a file my_losses.py write "
            "my_losses:name, with the file's folder on PYTHONPATH."
        )
    try:
        loaded = getattr(importlib.import_module(module_name), attribute)
    except SystemExit as error:
        raise ValueError(
            f"clipx.function={function!r}: importing {module_name} ends the process (SystemExit: {error.code}). A "
            "module of losses must not exit or parse arguments when it is imported: put that under "
            'if __name__ == "__main__":.'
        ) from error
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"clipx.function={function!r}: {error}. The module must be importable in the driver and in every Ray "
            "worker: install it, or put its folder on PYTHONPATH there."
        ) from error
    return method_of(loaded)


def method_of(loaded: Any) -> type[Method]:
    """The method of a class or of a decorated function; raises a ValueError if it is neither, or not usable."""
    method = loaded if isinstance(loaded, type) and issubclass(loaded, Method) else DECORATED.get(described(loaded))
    if method is None and has_signature_of_verls(loaded):
        raise ValueError(returns_a_loss(loaded))
    if method is None:
        raise ValueError(
            f"{described(loaded)} is not decorated with @verl_clipx.register_loss(name) and is not a subclass of "
            "verl_clipx.Method. Write one of the two."
        )
    if isinstance(method, ValueError):
        raise method
    # These must be the class's own and not a parent's, or it would be announced as another method.
    if not vars(method).get("name") or "__dataclass_fields__" not in vars(method):
        raise ValueError(
            f"{described(method)}: write it as @dataclass(frozen=True, kw_only=True) "
            f'class {method.__name__}(Method, name="…").'
        )
    reject_unusable_fields(method)
    return method


def reject_unusable_fields(method: type[Method]) -> None:
    """Raises a ValueError for a field that cannot be a parameter, with what to do."""
    parents = [parent for parent in method.__mro__[1:] if dataclasses.is_dataclass(parent)]
    inherited = {field.name for parent in parents for field in dataclasses.fields(parent)}
    for field in dataclasses.fields(method):
        if field.name not in inherited and any(hasattr(parent, field.name) for parent in parents):
            raise ValueError(
                f"{described(method)}: {field.name} is a name that every method uses. Give the parameter another "
                "name; if it is a constant of that name, remove its annotation."
            )
        if "allowed" not in field.metadata:
            raise ValueError(
                f"{described(method)}: write {field.name} = verl_clipx.parameter(default, allowed, meaning)."
            )
