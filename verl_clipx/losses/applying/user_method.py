"""A user's own loss: a class like the built-in ones or, if it is only a weight, one decorated function."""

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from verl_clipx.losses.base.method import qualified_name, register
from verl_clipx.losses.base.parameters import Allowed, boolean, integer, number, only, optional, parameter
from verl_clipx.losses.base.tokens import OPTIONAL, Tokens
from verl_clipx.losses.base.width import Width
from verl_clipx.losses.methods import Bounds, FixedBounds, Method

GradientWeight = TypeVar("GradientWeight", bound=Callable[..., Any])

# Why the number parameters of a function have no narrower range.
ANY_NUMBER = "any that float32 holds: only the function knows its range"
ANY = number(reason=ANY_NUMBER)

# The annotations of a parameter that takes only whole numbers. Under `from __future__ import annotations` an annotation
# is a string. Whether null is allowed follows from the parameter's default value alone.
INTEGER_ANNOTATIONS = (int, int | None, "int", "int | None", "None | int", "Optional[int]", "typing.Optional[int]")

# The names of the arguments that a function may ask for.
OFFERED = ("ratio", "advantages", "bounds", "log_prob", "old_log_prob", "entropy")

# Arguments that a loss in verl's registry has, and a gradient weight never.
VERL_LOSS_ARGUMENTS = {"response_mask", "loss_agg_mode", "rollout_is_weights"}

# The attributes of `Method` that a subclass may turn into parameters.
MAY_BE_PARAMETERS = {"dual_clip"}

# From the qualified name of a decorated function to its method, or to an error that says what is wrong with it.
DECORATED: dict[str, type[Method] | ValueError] = {}


def register_loss(
    name: str,
    *,
    unconstrained_weight: bool = False,
    by_sequence: bool = False,
    by_batch: bool = False,
    formula: tuple[str, ...] = (),
    symbols: str = "",
    bounds_width: Width | None = None,
) -> Callable[[GradientWeight], GradientWeight]:
    """Return a decorator that registers a gradient weight as a policy loss, with everything that built-in losses have.

    The decorated function returns F of every token, with dJ/dlog_prob = F*A. It asks by name for what it needs of the
    tokens: ratio, advantages, log_prob, old_log_prob and entropy (of the current policy, in nats), each (sequences,
    length) and detached. It may ask for `bounds` too, which are the constants clip_low and clip_high; for other bounds
    subclass a method. Its keyword-only parameters (numbers, booleans or text with defaults) become parameters under
    the clipx node, of the kind of their default.

    Use it with `+clipx=custom clipx.function=package.module:name`. A mistake raises an error only when the loss is
    used, so that the other losses of its module still work.

    Args:
        name: the loss is `clipx_<name>` in verl's registry.
        unconstrained_weight: whether F may be 0 or less, or change with the size of the advantages. The contract then
            checks neither.
        by_sequence: whether F of a token depends on the other tokens of its sequence.
        by_batch: whether F of a token depends on the other sequences of its micro-batch. The contract then compares it
            neither over micro-batches nor over sizes of the advantages.
        formula: how a run describes the bounds, as `Method.formula`; empty: by clip_low and clip_high.
        symbols: what the symbols in `formula` stand for, as `Method.symbols`.
        bounds_width: lets `+clipx/hold` solve for the bounds that the function gets; None: `+clipx/hold` refuses the
            loss.

    Returns:
        A decorator that returns the function unchanged.
    """

    def decorate(gradient_weight: GradientWeight) -> GradientWeight:
        """Make the function's method and register it; return the function unchanged.

        What is wrong with the function is kept, and raised by `load_method` when the loss is used. Raised here, it
        would stop the import of the function's module, and with it the module's other losses.
        """
        attributes = dict(
            unconstrained_weight=unconstrained_weight,
            by_sequence=by_sequence,
            by_batch=by_batch,
            formula=formula,
            symbols=symbols,
            bounds_width=bounds_width,
        )
        try:
            method_or_error = make_method_class(name, gradient_weight, **attributes)
        except ValueError as error:
            method_or_error = error
        DECORATED[qualified_name(gradient_weight)] = method_or_error
        return gradient_weight

    return decorate


def make_method_class(name: str, gradient_weight: Callable[..., Any], **attributes: Any) -> type[Method]:
    """Make and register the method that a decorated function stands for.

    Args:
        name: as for `register_loss`.
        gradient_weight: the decorated function.
        attributes: the other arguments of `register_loss`, which become attributes of the class.

    Raises:
        ValueError: the function's signature, a default or the width of its bounds does not fit.
    """
    arguments = inspect.signature(gradient_weight).parameters
    fields = []
    own_parameters = []
    if has_verl_loss_signature(gradient_weight):
        raise ValueError(f"register_loss({name!r}): {explain_verl_loss(gradient_weight)}")
    inherited = {field.name: field.metadata for field in dataclasses.fields(FixedBounds)}
    # The method has bounds if the function asks for them, or has one of the two parameters that set them.
    has_bounds = bool({"bounds", "clip_low", "clip_high"} & arguments.keys())
    for key, argument in arguments.items():
        if key in OFFERED:
            continue
        if argument.kind is not inspect.Parameter.KEYWORD_ONLY or argument.default is inspect.Parameter.empty:
            raise ValueError(
                f"register_loss({name!r}): {qualified_name(gradient_weight)} asks for {key!r}, but a function may ask "
                f"only for {', '.join(OFFERED)}. If {key} is a parameter, make it keyword-only with a default: *, "
                f"{key}=1.0. For statistics, or other fields of the tokens, subclass verl_clipx.Method."
            )
        own_parameters.append(key)
        # A parameter that `FixedBounds` has too keeps its range there, and has the function's default.
        if key in inherited:
            allowed = inherited[key]["allowed"]
            meaning = inherited[key]["meaning"]
        else:
            allowed = allow_kind_of(argument.default, argument.annotation)
            meaning = f"a parameter of {qualified_name(gradient_weight)}"
        fields.append((key, type(argument.default), parameter(argument.default, allowed, meaning)))
    reject_held_parameters(name, gradient_weight, attributes.get("bounds_width"), own_parameters)

    def call_gradient_weight(self: Method, t: Tokens, bounds: Bounds) -> Tensor:
        """Call the function with what it asks for, and with its own parameters as this method has them."""
        # A function that has the clamp as a parameter clamps by itself.
        ratio = t.free_ratio if "log_ratio_clamp" in own_parameters else t.ratio
        offered = {**t._asdict(), "ratio": ratio, "bounds": bounds}
        asked_for = {key: offered[key] for key in OFFERED if key in arguments}
        parameters = {key: getattr(self, key) for key in own_parameters}
        return gradient_weight(**asked_for, **parameters)

    namespace = {
        "__doc__": inspect.getdoc(gradient_weight) or "A gradient weight of your own.",
        "__module__": gradient_weight.__module__,
        "__qualname__": gradient_weight.__qualname__,
        "gradient_weight": call_gradient_weight,
        "asks_for": tuple(key for key in OPTIONAL if key in OFFERED and key in arguments),
        **attributes,
        "loss_value": Method.loss_value,
    }
    base = FixedBounds if has_bounds else Method
    method = dataclasses.make_dataclass(name, fields, bases=(base,), namespace=namespace, frozen=True, kw_only=True)
    method.__module__ = gradient_weight.__module__
    register(method, name)
    return method


def reject_held_parameters(
    name: str, gradient_weight: Callable[..., Any], width: Width | None, own_parameters: list[str]
) -> None:
    """Raise ValueError if a function has, among its own parameters, a bound that `+clipx/hold` would set.

    Args:
        name: as for `register_loss`.
        gradient_weight: the decorated function.
        width: the width of its bounds; None: they have none, so the function may have any parameter.
        own_parameters: the names of the function's parameters.
    """
    if width is None:
        return
    held_parameters = [key for key in width.parameters if key in own_parameters]
    if held_parameters:
        held = " and ".join(held_parameters)
        raise ValueError(
            f"register_loss({name!r}): {qualified_name(gradient_weight)} takes {held} itself, so that it would not "
            "follow a held target. Take `bounds` instead, or leave bounds_width out."
        )


def has_verl_loss_signature(function: Any) -> bool:
    """Return whether a function has one of `VERL_LOSS_ARGUMENTS`."""
    if isinstance(function, type) or not callable(function):
        return False
    try:
        arguments = inspect.signature(function).parameters
    except (TypeError, ValueError):
        # Some callables of C have no signature.
        return False
    return bool(VERL_LOSS_ARGUMENTS & arguments.keys())


def explain_verl_loss(function: Callable[..., Any]) -> str:
    """Return the message that says what to do with a function that has the signature of a loss in verl's registry."""
    name = qualified_name(function)
    module, _, attribute = name.partition(":")
    registers = f"@verl.trainer.ppo.core_algos.register_policy_loss({attribute!r})"
    chooses = f"actor_rollout_ref.actor.policy_loss.loss_mode={attribute}"
    return (
        f"{name} has the signature of a loss in verl's registry, and such a function returns a loss. +clipx=custom "
        f"takes the gradient weight F instead: write a function of {', '.join(OFFERED)}, as many as it needs, that "
        "returns F of every token, and decorate it with @verl_clipx.register_loss(name). To train the loss as it is, "
        f"register it with verl: {registers}, {chooses}, and VERL_USE_EXTERNAL_MODULES={module} wherever verl runs."
    )


def allow_kind_of(default: Any, annotation: Any) -> Allowed:
    """Return the values that a function's parameter may take, by the type of its default value.

    Args:
        default: the parameter's default value. A string allows every string, a boolean allows both booleans, a number
            allows every number in float32's range, and None allows the same numbers and null.
        annotation: the parameter's annotation. One of `INTEGER_ANNOTATIONS` allows whole numbers only; any other is
            ignored.

    Raises:
        ValueError: the default value is of another type.
    """
    if isinstance(default, bool):
        return boolean()
    if type(default) is str:
        return only("text", lambda value: isinstance(value, str))
    if default is None or type(default) in (int, float):
        if annotation in INTEGER_ANNOTATIONS:
            allowed = integer(reason=ANY_NUMBER)
        else:
            # `ANY` converts integers to floats. Here the user's number keeps its type, because a function may need an
            # integer, as for an index.
            allowed = dataclasses.replace(ANY, convert=require_number)
        return optional(allowed) if default is None else allowed
    kind = type(default).__name__
    raise ValueError(f"a default of type {kind} cannot be a configuration value: use a number, true or false, or text.")


def require_number(value: Any) -> int | float:
    """Return a number unchanged; raise ValueError for anything else, and for a number beyond float32's range."""
    ANY.convert(value)
    return value


def load_method(function: str) -> type[Method]:
    """Import a user's method.

    Args:
        function: `package.module:name` of a class or of a decorated function; the module is imported.

    Raises:
        ValueError: `function` is not of that form, cannot be imported, or is not a usable method.
    """
    module_name = ""
    attribute = ""
    if isinstance(function, str):
        module_name, _, attribute = function.partition(":")
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
    return find_method(loaded)


def find_method(loaded: Any) -> type[Method]:
    """Return the method that a user's class is, or that a decorated function stands for.

    Args:
        loaded: what `clipx.function` names, or what a user's test gives to `check_loss`.

    Raises:
        ValueError: `loaded` is neither, or something is wrong with it. The message says what to do.
    """
    is_method = isinstance(loaded, type) and issubclass(loaded, Method)
    method = loaded if is_method else DECORATED.get(qualified_name(loaded))
    if method is None and has_verl_loss_signature(loaded):
        raise ValueError(explain_verl_loss(loaded))
    if method is None:
        raise ValueError(
            f"{qualified_name(loaded)} is not decorated with @verl_clipx.register_loss(name) and is not a subclass of "
            "verl_clipx.Method. Write one of the two."
        )
    if isinstance(method, ValueError):
        raise method
    # The name and the fields must be the class's own: with those that it inherits, a run would announce its parent.
    own_attributes = vars(method)
    if not own_attributes.get("name") or "__dataclass_fields__" not in own_attributes:
        raise ValueError(
            f"{qualified_name(method)}: write it as @dataclass(frozen=True, kw_only=True) "
            f'class {method.__name__}(Method, name="…").'
        )
    reject_unusable_fields(method)
    reject_unusable_formula(method)
    reject_unusable_width(method)
    return method


def reject_unusable_fields(method: type[Method]) -> None:
    """Raise ValueError if a field cannot be a parameter. The message says what to do."""
    parents = [parent for parent in method.__mro__[1:] if dataclasses.is_dataclass(parent)]
    inherited = {field.name for parent in parents for field in dataclasses.fields(parent)}
    for field in dataclasses.fields(method):
        is_new = field.name not in inherited and field.name not in MAY_BE_PARAMETERS
        parents_with_attribute = [parent for parent in parents if hasattr(parent, field.name)]
        # A new parameter must not take the place of a parent's function or constant, which the package reads.
        if is_new and parents_with_attribute:
            # The class furthest up.
            parent = qualified_name(parents_with_attribute[-1])
            raise ValueError(
                f"{qualified_name(method)}: {field.name} is a name that {parent} uses. Give the parameter another "
                "name; if it is a constant of that name, remove its annotation."
            )
        if "allowed" not in field.metadata:
            raise ValueError(
                f"{qualified_name(method)}: write {field.name} = verl_clipx.parameter(default, allowed, meaning)."
            )


def reject_unusable_formula(method: type[Method]) -> None:
    """Raise ValueError if a method's `formula` or `symbols` cannot describe a run. The message says what to do."""
    formula = method.formula
    symbols = method.symbols
    if isinstance(formula, property) or isinstance(symbols, property):
        # They depend on the parameters' values, which only a built method has.
        return
    if not isinstance(formula, tuple) or len(formula) == 1:
        raise ValueError(
            f"{qualified_name(method)}: formula={formula!r} must be a tuple of texts: the lower bound, empty for none, "
            "the upper bound, and any equations for what is in them."
        )
    text_by_parameter = {field.name: "" for field in dataclasses.fields(method)}
    for text in (*formula, symbols):
        try:
            text.format(**text_by_parameter)
        except (LookupError, ValueError) as error:
            names = ", ".join(text_by_parameter)
            raise ValueError(
                f"{qualified_name(method)}: the text {text!r} of its formula or symbols cannot be filled in "
                f"({type(error).__name__}: {error}). Braces must contain the name of a parameter: {names}. "
                "For a brace that is part of the text, write two."
            ) from error


def reject_unusable_width(method: type[Method]) -> None:
    """Raise ValueError if a method's `bounds_width` names parameters that it lacks. The message says what to do."""
    width = method.bounds_width
    if width is None:
        return
    names = {field.name for field in dataclasses.fields(method)}
    names_with_condition = [name for name, _ in width.only_with]
    for name in (*width.parameters, *names_with_condition):
        if name not in names:
            raise ValueError(
                f"{qualified_name(method)}: bounds_width names {name}, which is not one of its parameters. Name the "
                "parameters that bound the weight, or leave bounds_width out."
            )
