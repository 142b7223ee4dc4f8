"""Takes verl's clip keys over into a method's parameters, or refuses the run."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

from verl_clipx.losses.base.method import NODE, Method
from verl_clipx.losses.base.parameters import VerlKey
from verl_clipx.losses.base.refusal import Refusal, written
from verl_clipx.run.description import shown
from verl_clipx.run.keys import ACTOR, CLIP_KEYS, Values


def clip_keys(
    method: Method, values: Values, named: Collection[str] = ()
) -> tuple[dict[str, dict[str, Any]], dict[str, Any], list[Refusal]]:
    """Decides what becomes of verl's clip keys under a method.

    Args:
        method: with the parameters of its group and of the user's overrides. A parameter that still has its default
            takes verl's value over.
        values: from `read`.
        named: full keys that the command line names, verl's and the plugin's. Such a key counts even if it repeats
            verl's default.

    Returns:
        `taken` and `unused`, as in `record.Loss`, and what is refused.
    """
    taken = {}
    refused = []
    known = set()
    replaced = set()
    for field in dataclasses.fields(method):
        verl = verl_key(type(method), field.name)
        if verl is None:
            continue
        if field.name in method.solved_parameters:
            replaced |= {*verl.names, verl.instead}
            continue
        known |= {*verl.names, verl.instead}
        sources = [name for name in verl.names if is_set(name, verl, values, named)]
        if not sources and verl.instead and is_set(verl.instead, verl, values, named):
            sources = [verl.instead]
        for index, name in enumerate(sources):
            value = values[f"{ACTOR}.{name}"]
            if index and value != (first := values[f"{ACTOR}.{sources[0]}"]):
                reason = f"contradicts {ACTOR}.{sources[0]}={written(first)}"
                refused.append(Refusal(f"{ACTOR}.{name}", value, reason, "Remove one of the two."))
                continue
            became = becomes(method, field, verl, name, value, named)
            if isinstance(became, Refusal):
                refused.append(became)
            elif not is_same_bound(became, getattr(method, field.name)):
                taken.setdefault(field.name, {"key": name, "given": value, "value": became})
    unused = {
        f"{ACTOR}.{key}": value
        for key, default in CLIP_KEYS.items()
        if key not in known
        and (value := values[f"{ACTOR}.{key}"]) is not None
        and (value != default or (key in replaced and f"{ACTOR}.{key}" in named))
    }
    return taken, unused, refused


def verl_key(method: type[Method], parameter: str) -> VerlKey | None:
    """The key of verl's that a parameter takes over, by its class or by a base that has the same parameter."""
    for base in method.__mro__:
        field = getattr(base, "__dataclass_fields__", {}).get(parameter)
        if field is not None and (key := field.metadata.get("verl")) is not None:
            return key
    return None


def is_set(name: str, verl: VerlKey, values: Values, named: Collection[str]) -> bool:
    """Returns whether a key of verl's has been set; null leaves widths and keys without a default to others."""
    value = values[f"{ACTOR}.{name}"]
    default = CLIP_KEYS[name]
    if value is None and (verl.instead is not None or default is None):
        return False
    return value != default or f"{ACTOR}.{name}" in named


def becomes(
    method: Method, field: dataclasses.Field, verl: VerlKey, name: str, given: Any, named: Collection[str]
) -> float | Refusal | None:
    """Returns a parameter's value from that of verl's key `name` below the actor, or why it cannot have it."""
    full = f"{ACTOR}.{name}"
    own = f"{NODE}.{field.name}"
    current = getattr(method, field.name)
    if given is not None and (isinstance(given, bool) or not isinstance(given, int | float)):
        return Refusal(full, given, "must be a number")
    value = None if given is None else verl.conversion.convert(given)
    if is_same_bound(value, current):
        return value
    would_be = f"would be {own}={shown(value)}"
    kept = f"{own}={shown(current)}"
    allowed = field.metadata["allowed"]
    try:
        allowed.convert(value)
    except (ValueError, TypeError, OverflowError):
        change = f"For {given:g} %, write {given / 100:g}" if verl.instead and given and given > 1 else "Change it"
        return Refusal(
            full, given, f"{would_be}, which must be {allowed.description}", f"{change}, or remove it to keep {kept}."
        )
    if current != field.default or own in named:
        reason = f"{would_be}, but its group or the command line says {kept}"
        return Refusal(full, given, reason, "Remove one of the two.")
    if verl.usual_because and value is not None and not allowed.usual[0] <= value <= allowed.usual[1]:
        advice = f"Remove it to keep {kept}, or also set {own}={shown(value)} if you mean it."
        return Refusal(full, given, f"{would_be}: {verl.usual_because}", advice)
    return value


def is_same_bound(value: float | None, current: float | None) -> bool:
    """Returns whether a parameter has a value already. A bound of 0 or less equals null, because ratios are above 0."""
    if value is None:
        return current is None
    return value <= 0 if current is None else math.isclose(value, current, rel_tol=1e-9)
