"""A user's own loss: a class like the built-in ones or, if it is only a weight, one decorated function."""

import dataclasses
import importlib
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from torch import Tensor

from verl_clipx.base.method import described, register
from verl_clipx.base.parameters import Allowed, boolean, choice, integer, number, only, optional, parameter
from verl_clipx.base.tokens import OPTIONAL, Tokens
from verl_clipx.methods import BUILT_IN, METHODS, Bounds, FixedBounds, Method

GradientWeight = TypeVar("GradientWeight", bound=Callable[..., Any])

# Why the number parameters of a function have no narrower range.
ANY_NUMBER = "any that float32 holds: only the function knows its range"

# What a function may ask for, by these names.
OFFERED = ("ratio", "advantages", "bounds", "log_prob", "old_log_prob", "entropy")

# Where bounds on the ratio come from: constants, or the statistics of a method that has them.
BASES: dict[str, type[Method]] = {"fixed": FixedBounds} | {
    name: METHODS[name]
    for name in BUILT_IN
    if METHODS[name]().statistics_size and METHODS[name].bounded is Method.bounded
}

# From the name of a decorated function to its method, or to an error that says what is wrong with it.
DECORATED: dict[str, type[Method] | ValueError] = {}


def register_loss(
    name: str,
    *,
    bounds: str = "fixed",
    unconstrained_weight: bool = False,
    by_sequence: bool = False,
    by_batch: bool = False,
) -> Callable[[GradientWeight], GradientWeight]:
    """Registers a gradient weight as a policy loss with everything that the built-in losses have.

    The function asks by name for what it needs of the tokens: ratio, advantages, log_prob, old_log_prob and entropy (of
    the current policy, in nats), each (sequences, length) and detached, and the clip bounds. It returns F with
    dJ/dlog_prob = F*A per token. Its keyword-only parameters (numbers, booleans or text with defaults) become
    parameters under the clipx node, and arrive in the type of their annotation. Use it with `+clipx=custom
    clipx.function=package.module:name`. A mistake raises an error only when the loss is used, so that the other losses
    of its module still work.

    Args:
        name: the loss is `clipx_<name>` in verl's registry.
        bounds: where the bounds come from: "fixed" (clip_low, clip_high), "acpo" or "bapo" (their parameters). A
            function with neither the argument `bounds` nor one of these parameters has no bounds.
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
            made = method_class(name, gradient_weight, bounds, **flags)
        except ValueError as error:
            made = error
        DECORATED[described(gradient_weight)] = made
        return gradient_weight

    return decorate


def method_class(name: str, gradient_weight: Callable[..., Any], bounds: str, **flags: bool) -> type[Method]:
    """The method that a decorated function stands for; the arguments are those of `register_loss`.

    Raises:
        ValueError: `bounds` is unknown, or the function's signature or a default does not fit.
    """
    if bounds not in BASES:
        raise ValueError(f"register_loss(bounds={bounds!r}): must be one of {', '.join(BASES)}.")
    base, fields, own = BASES[bounds], [], []
    inherited = {field.name: field.metadata for field in dataclasses.fields(base)}
    signature, hints = inspect.signature(gradient_weight).parameters, annotations_of(gradient_weight)
    of_bounds = inherited.keys() - {field.name for field in dataclasses.fields(Method)}
    if not {"bounds", *of_bounds} & signature.keys():
        if bounds != "fixed":
            raise ValueError(
                f"register_loss({name!r}, bounds={bounds!r}): {described(gradient_weight)} has no argument bounds, so "
                f"the bounds of {bounds} would be ignored. Add the argument, or remove bounds={bounds!r}."
            )
        base = Method
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
        allowed = allowed_like(given.default, hints.get(key, Any)) if known is None else known["allowed"]
        meaning = f"of {described(gradient_weight)}" if known is None else known["meaning"]
        fields.append((key, type(given.default), parameter(given.default, allowed, meaning)))

    def weight(self: Method, t: Tokens, bounds: Bounds) -> Tensor:
        ratio = t.free_ratio if "log_ratio_clamp" in own else t.ratio
        offered = {**t._asdict(), "ratio": ratio, "bounds": bounds}
        asked_for = {key: offered[key] for key in OFFERED if key in signature}
        return gradient_weight(**asked_for, **{key: getattr(self, key) for key in own})

    def asks_for(self: Method) -> tuple[str, ...]:
        return (*super(made, self).asks_for, *(name for name in OPTIONAL if name in signature and name in OFFERED))

    namespace = {
        "__doc__": inspect.getdoc(gradient_weight) or "A gradient weight of your own.",
        "__module__": gradient_weight.__module__,
        "__qualname__": gradient_weight.__qualname__,
        "gradient_weight": weight,
        "asks_for": property(asks_for),
        **flags,
        "loss_value": Method.loss_value,
    }
    made = dataclasses.make_dataclass(name, fields, bases=(base,), namespace=namespace, frozen=True, kw_only=True)
    made.__module__ = gradient_weight.__module__
    register(made, name)
    return made


def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """A function's annotations as types; none of them if one names what its module does not have."""
    try:
        return typing.get_type_hints(function)
    except Exception:
        return {}


def allowed_like(default: Any, annotation: Any = Any) -> Allowed:
    """Values of the annotated kind or, without an annotation, of the default's: numbers, booleans, text, or null.

    A number whose annotation does not say int or float stays what the user wrote.

    Raises:
        ValueError: the default is of another type.
    """
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = set(typing.get_args(annotation)) if is_union else {annotation}
    if default is None or types.NoneType in kinds:
        kinds -= {types.NoneType}
        without = next(iter(kinds)) if len(kinds) == 1 else float | int
        return optional(_allowed(default, float if without is Any else without))
    return _allowed(default, annotation)


def _allowed(default: Any, annotation: Any) -> Allowed:
    """As `allowed_like`, without null."""
    if typing.get_origin(annotation) is Literal and all(isinstance(word, str) for word in typing.get_args(annotation)):
        return choice(*typing.get_args(annotation))
    kind = annotation if default is None else type(default)
    if kind is bool:
        return boolean()
    if kind is str:
        return only("text", lambda value: isinstance(value, str))
    if kind in (int, float) or (default is None and kind == float | int):
        any_number = number(reason=ANY_NUMBER)
        if annotation is int:
            return integer(reason=ANY_NUMBER)
        return any_number if float in (annotation, kind) else dataclasses.replace(any_number, convert=as_written)
    raise ValueError(
        f"a default of type {getattr(kind, '__name__', kind)} cannot be a configuration value: use a number, true or "
        "false, text, or one of some words with the annotation Literal['word', 'other']."
    )


def as_written(value: Any) -> int | float:
    """A number that float32 holds, unchanged; raises a ValueError for what is none."""
    number(reason=ANY_NUMBER).convert(value)
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
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"clipx.function={function!r}: {error}. The module must be importable in the driver and in every Ray "
            "worker: install it, or put its folder on PYTHONPATH there."
        ) from error
    return method_of(loaded)


def method_of(loaded: Any) -> type[Method]:
    """The method of a class or of a decorated function; raises a ValueError if it is neither, or not usable."""
    method = loaded if isinstance(loaded, type) and issubclass(loaded, Method) else DECORATED.get(described(loaded))
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
