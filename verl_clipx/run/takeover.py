"""Takes verl's clip keys over into a method's parameters, or refuses the run."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any, NamedTuple

from verl_clipx.losses.base.method import NODE, Method
from verl_clipx.losses.base.parameters import VerlKey
from verl_clipx.losses.base.refusal import Refusal, written
from verl_clipx.run.description import format_value
from verl_clipx.run.keys import ACTOR, CLIP_KEYS, Values


class Takeover(NamedTuple):
    """What becomes of verl's clip keys under a method. A key whose value its parameter has already is in no field.

    Attributes:
        taken: from each parameter that took a value over to verl's `key` by its name below the actor, the value `given`
            there, and the parameter's `value`.
        unused: from the full keys that are set and that the method does not read to their values.
        refused: the settings that are refused.
    """

    taken: dict[str, dict[str, Any]]
    unused: dict[str, Any]
    refused: list[Refusal]


def take_clip_keys_over(method: Method, values: Values, named: Collection[str] = ()) -> Takeover:
    """Decide what becomes of verl's clip keys under a method.

    Args:
        method: built with its group's parameters and the user's overrides. A parameter that still has its default takes
            verl's value over.
        values: from `keys.read`.
        named: the full keys that the command line names, verl's and the plugin's. A key that the method reads counts as
            set if it is named, even with verl's default. So does a key that clipx.hold replaces.
    """
    taken: dict[str, dict[str, Any]] = {}
    refused = []
    read_keys = set()
    keys_replaced_by_hold = set()
    for field in dataclasses.fields(method):
        verl_key = find_verl_key(type(method), field.name)
        if verl_key is None:
            continue
        if field.name in method.solved_parameters:
            keys_replaced_by_hold.update(verl_key.names, [verl_key.instead])
            continue
        read_keys.update(verl_key.names, [verl_key.instead])
        set_keys = find_set_keys(verl_key, values, named)
        for key in set_keys:
            value = values[f"{ACTOR}.{key}"]
            first_value = values[f"{ACTOR}.{set_keys[0]}"]
            if value != first_value:
                reason = f"contradicts {ACTOR}.{set_keys[0]}={written(first_value)}"
                refused.append(Refusal(f"{ACTOR}.{key}", value, reason, "Remove one of the two."))
                continue
            converted = convert_setting(method, field, verl_key, key, value, named)
            if isinstance(converted, Refusal):
                refused.append(converted)
            elif field.name not in taken and not is_same_bound(converted, getattr(method, field.name)):
                taken[field.name] = {"key": key, "given": value, "value": converted}
    unused = find_unused_keys(values, named, read_keys, keys_replaced_by_hold)
    return Takeover(taken, unused, refused)


def find_unused_keys(
    values: Values, named: Collection[str], read_keys: Collection[str], keys_replaced_by_hold: Collection[str]
) -> dict[str, Any]:
    """Return `Takeover.unused`.

    Args:
        values, named: as for `take_clip_keys_over`.
        read_keys: the names below the actor that the method's parameters read.
        keys_replaced_by_hold: those of parameters in whose place clipx.hold solves for the bounds. Such a key counts
            if it is named, even with verl's default.
    """
    unused = {}
    for key, default in CLIP_KEYS.items():
        full_key = f"{ACTOR}.{key}"
        value = values[full_key]
        if key in read_keys or value is None:
            continue
        is_replaced_and_named = key in keys_replaced_by_hold and full_key in named
        if value != default or is_replaced_and_named:
            unused[full_key] = value
    return unused


def find_verl_key(method: type[Method], parameter: str) -> VerlKey | None:
    """Return verl's key for a parameter as the class, or the nearest of its bases, declares it; None if none does."""
    for base in method.__mro__:
        field = getattr(base, "__dataclass_fields__", {}).get(parameter)
        verl_key = None if field is None else field.metadata.get("verl")
        if verl_key is not None:
            return verl_key
    return None


def find_set_keys(verl_key: VerlKey, values: Values, named: Collection[str]) -> list[str]:
    """Return the names below the actor of the keys that the user has set for a parameter.

    Args:
        verl_key: the parameter's. Its `instead` counts only if none of its `names` is set.
        values, named: as for `take_clip_keys_over`.
    """
    names = [name for name in verl_key.names if is_set(name, verl_key, values, named)]
    if not names and verl_key.instead and is_set(verl_key.instead, verl_key, values, named):
        return [verl_key.instead]
    return names


def is_set(name: str, verl_key: VerlKey, values: Values, named: Collection[str]) -> bool:
    """Return whether the user has set a key of verl's.

    null counts as not set where another key then counts (`VerlKey.instead`), and where null is verl's default.

    Args:
        name: the key below the actor.
        verl_key: the one that it belongs to.
        values, named: as for `take_clip_keys_over`.
    """
    value = values[f"{ACTOR}.{name}"]
    default = CLIP_KEYS[name]
    null_is_unset = verl_key.instead is not None or default is None
    if value is None and null_is_unset:
        return False
    return value != default or f"{ACTOR}.{name}" in named


def convert_setting(
    method: Method, field: dataclasses.Field, verl_key: VerlKey, name: str, given: Any, named: Collection[str]
) -> float | Refusal | None:
    """Return the value of a parameter that follows from a key of verl's, or the refusal of that key.

    Args:
        method: as for `take_clip_keys_over`.
        field: the parameter.
        verl_key: the parameter's.
        name: the key below the actor.
        given: the key's value.
        named: as for `take_clip_keys_over`.
    """
    full_key = f"{ACTOR}.{name}"
    own_key = f"{NODE}.{field.name}"
    current = getattr(method, field.name)
    if given is not None and (isinstance(given, bool) or not isinstance(given, int | float)):
        return Refusal(full_key, given, "must be a number")
    value = None
    if given is not None:
        try:
            value = verl_key.conversion.convert(given)
        except OverflowError:
            # The exponential of a large width.
            value = math.inf
    if is_same_bound(value, current):
        return value
    would_be = f"would be {own_key}={format_value(value)}"
    kept = f"{own_key}={format_value(current)}"
    allowed = field.metadata["allowed"]
    try:
        allowed.convert(value)
    except (ValueError, TypeError, OverflowError):
        # Keys with another one in their place are widths. A width above 1 was probably written in per cent.
        if verl_key.instead and given is not None and given > 1:
            change = f"For {given:g} %, write {given / 100:g}"
        else:
            change = "Change it"
        reason = f"{would_be}, which must be {allowed.description}"
        return Refusal(full_key, given, reason, f"{change}, or remove it to keep {kept}.")
    if current != field.default or own_key in named:
        reason = f"{would_be}, but its group or the command line says {kept}"
        return Refusal(full_key, given, reason, "Remove one of the two.")
    if verl_key.usual_because and value is not None and not allowed.usual[0] <= value <= allowed.usual[1]:
        # The user may copy this value, so that it has all its digits.
        advice = f"Remove it to keep {kept}, or also set {own_key}={written(value)} if you mean it."
        return Refusal(full_key, given, f"{would_be}: {verl_key.usual_because}", advice)
    return value


def is_same_bound(value: float | None, current: float | None) -> bool:
    """Return whether a parameter has a value already. A bound of 0 or less equals null, because ratios are above 0."""
    if value is None:
        return current is None
    if current is None:
        return value <= 0
    return math.isclose(value, current, rel_tol=1e-9)
