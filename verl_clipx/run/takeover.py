"""Takes verl's clip keys over into a method's parameters, or refuses the run.

A clip key is here called by its name below `actor_rollout_ref.actor`, such as clip_ratio_low. A full key has all of its
path.
"""

import dataclasses
import math
from collections.abc import Collection
from typing import Any, NamedTuple

from verl_clipx.losses.base.method import NODE, Method
from verl_clipx.losses.base.parameters import VerlKey
from verl_clipx.losses.base.refusal import Refusal, format_exactly
from verl_clipx.run.description import format_value
from verl_clipx.run.keys import ACTOR, CLIP_KEYS, Values


class Takeover(NamedTuple):
    """What becomes of verl's clip keys under a method. A key that agrees with its parameter's value is in no field.

    Attributes:
        taken: by parameter, for each that took a value over: `key`, verl's clip key; `given`, the value of that key;
            `value`, the value that the parameter gets.
        unused: by full key, the values of the clip keys that are set and that the method does not read.
        refused: a refusal for each clip key that contradicts another setting, or whose value is not allowed.
    """

    taken: dict[str, dict[str, Any]]
    unused: dict[str, Any]
    refused: list[Refusal]


def decide_takeover(method: Method, values: Values, named: Collection[str] = ()) -> Takeover:
    """Decide what becomes of verl's clip keys under a method.

    Args:
        method: built with its group's parameters and the user's overrides. A parameter that still has its default takes
            verl's value over.
        values: the values of verl's keys, from `keys.read`.
        named: the full keys that the command line names, verl's and the plugin's. A clip key that has verl's default
            counts as set only if it is named, and only if the method reads it or clipx.hold replaces it.
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
            keys_replaced_by_hold.update(verl_key.all_names)
            continue
        read_keys.update(verl_key.all_names)
        set_keys = find_set_keys(verl_key, values, named)
        for key in set_keys:
            value = values[f"{ACTOR}.{key}"]
            first_value = values[f"{ACTOR}.{set_keys[0]}"]
            if value != first_value:
                reason = f"contradicts {ACTOR}.{set_keys[0]}={format_exactly(first_value)}"
                refused.append(Refusal(f"{ACTOR}.{key}", value, reason, "Remove one of the two."))
                continue
            converted = convert_setting(method, field, verl_key, key, value, named)
            if isinstance(converted, Refusal):
                refused.append(converted)
                continue
            # Set keys that agree give the same value: the first is recorded, and none if the parameter has it already.
            if field.name not in taken and not is_same_bound(converted, getattr(method, field.name)):
                taken[field.name] = {"key": key, "given": value, "value": converted}
    unused = find_unused_keys(values, named, read_keys, keys_replaced_by_hold)
    return Takeover(taken, unused, refused)


def find_unused_keys(
    values: Values, named: Collection[str], read_keys: Collection[str], keys_replaced_by_hold: Collection[str]
) -> dict[str, Any]:
    """Return `Takeover.unused`.

    Args:
        values: the values of verl's keys, from `keys.read`.
        named: the full keys that the command line names.
        read_keys: the clip keys that the method's parameters read.
        keys_replaced_by_hold: the clip keys of those parameters in whose place clipx.hold solves for the bounds.
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
    """Return the keys of verl's that set a parameter, as the nearest class declares them; None if none does.

    Args:
        method: the first class that is asked; its bases follow, in the order of inheritance.
        parameter: the parameter's name.
    """
    for base in method.__mro__:
        field = getattr(base, "__dataclass_fields__", {}).get(parameter)
        verl_key = None if field is None else field.metadata.get("verl")
        if verl_key is not None:
            return verl_key
    return None


def find_set_keys(verl_key: VerlKey, values: Values, named: Collection[str]) -> list[str]:
    """Return the clip keys that the user has set for a parameter.

    Args:
        verl_key: the keys of verl's that set the parameter. `fallback` counts only if none of `names` is set.
        values: the values of verl's keys, from `keys.read`.
        named: the full keys that the command line names.
    """
    set_keys = [name for name in verl_key.names if is_set(name, verl_key, values, named)]
    if not set_keys and verl_key.fallback and is_set(verl_key.fallback, verl_key, values, named):
        return [verl_key.fallback]
    return set_keys


def is_set(key: str, verl_key: VerlKey, values: Values, named: Collection[str]) -> bool:
    """Return whether the user has set a clip key.

    A key that is null counts as not set if null is verl's default, or if verl then reads another key
    (`VerlKey.fallback`).

    Args:
        key: the clip key.
        verl_key: all keys of verl's that set the same parameter.
        values: the values of verl's keys, from `keys.read`.
        named: the full keys that the command line names.
    """
    value = values[f"{ACTOR}.{key}"]
    default = CLIP_KEYS[key]
    null_is_unset = verl_key.fallback is not None or default is None
    if value is None and null_is_unset:
        return False
    return value != default or f"{ACTOR}.{key}" in named


def convert_setting(
    method: Method, field: dataclasses.Field, verl_key: VerlKey, key: str, given: Any, named: Collection[str]
) -> float | Refusal | None:
    """Return the value that a parameter gets from a clip key, or the refusal of that key.

    The key is refused if its value is no number, or gives the parameter a value that is not allowed. A value outside
    the parameter's usual range is refused where `VerlKey.usual_because` says why. The key is also refused if the group
    or the command line gives the parameter another value.

    Args:
        method: as for `decide_takeover`.
        field: the parameter.
        verl_key: all keys of verl's that set the parameter.
        key: the clip key.
        given: the key's value.
        named: the full keys that the command line names.

    Returns:
        The parameter's value, or the refusal; None is null, with which the parameter has no bound.
    """
    full_key = f"{ACTOR}.{key}"
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
        # All keys with a fallback are widths. A width above 1 was probably meant in per cent.
        if verl_key.fallback and given is not None and given > 1:
            change = f"For {given:g} %, write {given / 100:g}"
        else:
            change = "Change it"
        reason = f"{would_be}, which must be {allowed.description}"
        return Refusal(full_key, given, reason, f"{change}, or remove it to keep {kept}.")
    if current != field.default or own_key in named:
        reason = f"{would_be}, but its group or the command line says {kept}"
        return Refusal(full_key, given, reason, "Remove one of the two.")
    if verl_key.usual_because and value is not None and not allowed.usual[0] <= value <= allowed.usual[1]:
        # The user may copy this value, so it keeps all its digits.
        advice = f"Remove it to keep {kept}, or also set {own_key}={format_exactly(value)} if you mean it."
        return Refusal(full_key, given, f"{would_be}: {verl_key.usual_because}", advice)
    return value


def is_same_bound(value: float | None, current: float | None) -> bool:
    """Return whether a value is the one that a parameter has; None is null.

    A bound of 0 or less is the same as null, because ratios are above 0.
    """
    if value is None:
        return current is None
    if current is None:
        return value <= 0
    return math.isclose(value, current, rel_tol=1e-9)
