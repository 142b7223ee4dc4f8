"""verl's own clip keys under a method of the plugin: taken over as its parameters, or refused.

verl's scripts set clip_ratio_high and the like, which only verl's own losses read. Here they mean what they mean there,
and where they can mean nothing, the run stops: a number that a user wrote down is never ignored.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from verl_clipx.methods.dppo import Dppo
from verl_clipx.methods.gspo import Gspo
from verl_clipx.methods.method import NODE, FixedBounds, Method

ACTOR = "actor_rollout_ref.actor"

# What stands in verl's configuration when nobody sets them.
VERL_S_DEFAULTS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}

# GSPO's scripts set widths of 3e-4 for the ratio of a sequence, others 0.2 for that of a token: nobody means one of
# them on the other.
NARROWEST_ON_TOKENS = WIDEST_ON_SEQUENCES = 0.01


class Meaning(NamedTuple):
    """What one of verl's keys is to a method.

    Attributes:
        parameter: the method's parameter.
        value: from verl's value to the parameter's.
        narrowest: verl's value cannot be meant below this.
        widest: nor above this.
    """

    parameter: str
    value: Callable[[float], float]
    narrowest: float = 0.0
    widest: float = math.inf


class Taken(NamedTuple):
    """A value that a method takes over.

    Attributes:
        value: of the method's parameter.
        key: verl's key that it comes from.
        verl_s: what that key says.
    """

    value: float
    key: str
    verl_s: float


def as_it_is(value: float) -> float:
    """Thresholds and the dual clip are the same number in both."""
    return value


def below_one(width: float) -> float:
    """A lower bound on the ratio; rounded, so that 1 - 0.2 is 0.8 to the last bit."""
    return round(1 - width, 12)


def above_one(width: float) -> float:
    """An upper bound on the ratio."""
    return round(1 + width, 12)


def meanings(method: Method) -> dict[str, Meaning]:
    """What verl's clip_ratio_low, clip_ratio_high and clip_ratio_c are to a method; without an entry: nothing."""
    if isinstance(method, Dppo):
        # As in verl's own dppo losses.
        return {
            "clip_ratio_low": Meaning("threshold_low", as_it_is),
            "clip_ratio_high": Meaning("threshold_high", as_it_is),
            "clip_ratio_c": Meaning("weight_high", as_it_is),
        }
    found = {}
    if isinstance(method, FixedBounds):
        narrowest = NARROWEST_ON_TOKENS if type(method).bounded is Method.bounded else 0.0
        widest = WIDEST_ON_SEQUENCES if isinstance(method, Gspo) else math.inf
        found["clip_ratio_low"] = Meaning("clip_low", below_one, narrowest, widest)
        found["clip_ratio_high"] = Meaning("clip_high", above_one, narrowest, widest)
    if "dual_clip" in method.parameters:
        found["clip_ratio_c"] = Meaning("dual_clip", as_it_is)
    return found


def given(key: str, verl_s: Mapping[str, Any], named: Collection[str]) -> tuple[str, Any] | None:
    """Which of verl's keys says something about a bound, and what; None if none does.

    Args:
        key: clip_ratio_low, clip_ratio_high or clip_ratio_c; clip_ratio stands in for the first two.
        verl_s: verl's clip keys and their values.
        named: full keys that the command line names: it counts even if it repeats verl's default.
    """
    for source in (key,) if key == "clip_ratio_c" else (key, "clip_ratio"):
        value = verl_s[source]
        if value is not None and (value != VERL_S_DEFAULTS[source] or f"{ACTOR}.{source}" in named):
            return source, value
    return None


def taken_over(method: Method, verl_s: Mapping[str, Any], named: Collection[str] = ()) -> dict[str, Taken]:
    """What a method takes over from verl's clip keys.

    A method whose parameter is its default takes verl's value. What was taken over once changes nothing when asked
    again with the result, so driver and workers agree.

    Args:
        method: as its group and the user's overrides made it.
        verl_s: verl's clip keys and their values.
        named: full keys that the command line names, verl's and the plugin's.

    Returns:
        The method's parameter to what it takes.

    Raises:
        ValueError: verl's key means nothing to the method, or cannot mean this, or the method's own parameter says
            something else; a line for each names the keys, their values and what to do.
    """
    known, taken, refused = meanings(method), {}, []
    for key in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"):
        source, value = given(key, verl_s, named) or (None, None)
        if source is None:
            continue
        if key not in known:
            message = None if value == VERL_S_DEFAULTS[source] else would_be_ignored(method, source, value)
        else:
            message = refusal(method, known[key], source, value, named)
            parameter, ours = known[key].parameter, known[key].value
            if message is None and not same_bound(ours(value), method.parameters[parameter]):
                taken[parameter] = Taken(ours(value), source, value)
        if message is not None and message not in refused:
            refused.append(message)
    if refused:
        raise ValueError("\n".join(refused))
    return taken


def same_bound(ours: float, current: float | None) -> bool:
    """Whether verl's value, as ours, says what the method has already: no ratio is at or below 0, as with null."""
    return ours <= 0 if current is None else math.isclose(ours, current, rel_tol=1e-9)


def would_be_ignored(method: Method, source: str, value: Any) -> str:
    """What to say of one of verl's keys that means nothing to a method."""
    what = "dual clip" if source == "clip_ratio_c" else "fixed bound"
    return (
        f"{ACTOR}.{source}={value} with {NODE}.method={method.name}, which has no {what} and would ignore it: remove "
        f"{ACTOR}.{source}. `clipx methods {method.name}` lists what it takes."
    )


def refusal(method: Method, meaning: Meaning, source: str, value: Any, named: Collection[str]) -> str | None:
    """What to say of a value of verl's that cannot become the method's parameter; None where it can, or is it already.

    Args:
        method: the method.
        meaning: what verl's key is to it.
        source: verl's key.
        value: what it says.
        named: as for `taken_over`.
    """
    said, key = f"{ACTOR}.{source}={value}", f"{NODE}.{meaning.parameter}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{said}: must be a number."
    field = next(field for field in dataclasses.fields(method) if field.name == meaning.parameter)
    ours, current = meaning.value(value), getattr(method, meaning.parameter)
    if same_bound(ours, current):
        return None
    would_be = f"{said} would be {key}={ours:g}"
    if meaning.value is below_one and ours <= 0:
        return f"{would_be}, which bounds no ratio: remove it, or set {key}=null as well."
    try:
        field.metadata["allowed"].convert(ours)
    except (ValueError, TypeError, OverflowError):
        return f"{would_be}, which must be {field.metadata['allowed'].description}: change it."
    if value < meaning.narrowest:
        return (
            f"{would_be}: a width under {meaning.narrowest:g} is one for the ratio of a sequence, and {method.name} "
            f"bounds that of a token. Remove it, or set {key}={ours:g} beside it if you mean it."
        )
    if value > meaning.widest:
        return (
            f"{would_be}: a width over {meaning.widest:g} is one for the ratio of a token, and {method.name} bounds "
            f"that of a sequence, which hardly leaves 1. Set {ACTOR}.{source} to a width such as 4e-4, remove it for "
            f"the group's bound, or set {key}={ours:g} beside it if you mean it."
        )
    if current != field.default or key in named:
        current = "null" if current is None else f"{current:g}"
        return f"{would_be}, but its group or the command line says {key}={current}: remove one of the two."
    return None
