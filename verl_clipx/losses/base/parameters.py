"""Fields of dataclasses whose metadata says what they mean and which values they take, and their validation."""

import dataclasses
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

from verl_clipx.losses.base.refusal import ABSENT, Refusal, did_you_mean

# The node of a run's configuration that has the plugin's parameters.
NODE = "clipx"

FLOAT32_LARGEST = 3.4028234663852886e38


@dataclasses.dataclass(frozen=True)
class Allowed:
    """The values that a parameter takes.

    Args:
        description: the end of the sentence "must be ...".
        convert: returns the value in its proper type, or raises ValueError/TypeError if it is not allowed.
        ends: the smallest and the largest number that is allowed; None if it is not a number.
        reason: why a number's ends are those of float32; empty if the parameter has its own, or if it is not a number.
        choices: the words that are allowed; empty if it is not a choice.
        usual: the range outside which a number that is allowed deserves a remark; None if it has none.
    """

    description: str
    convert: Callable[[Any], Any]
    ends: tuple[float, float] | None = None
    reason: str = ""
    choices: tuple[str, ...] = ()
    null: bool = False
    usual: tuple[float, float] | None = None


def number(
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    reason: str = "",
    usual: tuple[float, float] | None = None,
) -> Allowed:
    """A number in a range. Integers are accepted and become floats; booleans and text are refused.

    What lies outside the range cannot be meant, and is refused. What is only unusual is remarked on.

    Args:
        above, at_least: the lower end, which lies outside the range (above) or inside it (at_least).
        reason: why the parameter has no end of its own, if one is missing; its range then ends with float32.
        usual: the range outside which the line that a run prints calls a value unusual.

    Raises:
        TypeError: an end and the reason are both missing. Every value of a range must be computable in float32.
    """
    lower = at_least if above is None else above
    complete = lower is not None and at_most is not None
    if complete == bool(reason) or (above is not None and at_least is not None):
        raise TypeError("number() needs a lower and an upper end, or a reason why one is missing")
    lowest = next_float32(above) if above is not None else -FLOAT32_LARGEST if at_least is None else at_least
    highest = FLOAT32_LARGEST if at_most is None else at_most

    def convert(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        if not lowest <= value <= highest:
            raise ValueError
        return float(value)

    limits = [
        f"{words} {shown(end)}"
        for words, end in (("above", above), ("at least", at_least), ("at most", at_most))
        if end is not None
    ]
    description = "; ".join(part for part in (" and ".join(limits), reason) if part)
    return Allowed(f"a number ({description})", convert, (lowest, highest), reason, usual=usual)


def integer(*, at_least: int | None = None, at_most: int | None = None, reason: str = "") -> Allowed:
    """A whole number in a range that includes its ends, as for `number`. Booleans and fractions are refused."""
    within = number(at_least=at_least, at_most=at_most, reason=reason)

    def convert(value: Any) -> int:
        if within.convert(value) != int(value):
            raise ValueError
        return int(value)

    return dataclasses.replace(
        within, description=within.description.replace("a number", "a whole number", 1), convert=convert
    )


def next_float32(number: float) -> float:
    """The smallest float32 above a number of at least 0 that float32 can hold."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    return struct.unpack("<f", struct.pack("<I", bits + 1))[0]


def shown(number: float) -> str:
    """A number as a person writes it: 1e6, not 1e+06."""
    return f"{number:g}".replace("e+0", "e").replace("e-0", "e-")


def choice(*values: str) -> Allowed:
    """One of the given words."""
    return dataclasses.replace(only("one of " + ", ".join(values), lambda value: value in values), choices=values)


def boolean() -> Allowed:
    """True or false. 0 and 1 are refused."""
    return only("true or false", lambda value: isinstance(value, bool))


def only(description: str, fits: Callable[[Any], bool]) -> Allowed:
    """The values that fit, unchanged; the description ends the sentence "must be ..."."""

    def convert(value: Any) -> Any:
        if not fits(value):
            raise ValueError
        return value

    return Allowed(description, convert)


def optional(allowed: Allowed) -> Allowed:
    """The values that `allowed` accepts, or null."""
    return dataclasses.replace(
        allowed,
        description=f"{allowed.description}, or null",
        convert=lambda value: None if value is None else allowed.convert(value),
        null=True,
    )


class Conversion(NamedTuple):
    """The conversion of a number of verl's into a parameter's."""

    convert: Callable[[float], float]
    formula: str


UNCHANGED = Conversion(lambda x: x, "x")
# Rounded, so that 1 - 0.2 is exactly 0.8.
BELOW_ONE = Conversion(lambda x: round(1 - x, 12), "1 − x")
ABOVE_ONE = Conversion(lambda x: round(1 + x, 12), "1 + x")
# From a width on the log-ratio.
BELOW_ZERO = Conversion(lambda x: math.exp(-x), "exp(−x)")
ABOVE_ZERO = Conversion(math.exp, "exp(x)")


class VerlKey(NamedTuple):
    """The keys of verl's own losses from which a parameter takes its value, if the user has set one of them.

    Args:
        names: the keys, by their names below actor_rollout_ref.actor. If several are set, they must agree.
        conversion: how the parameter's number follows from verl's.
        fallback: the key that counts if none of `names` is set; None if there is no such key.
        usual_because: why a value outside the parameter's usual range is refused; empty if it is not refused.
    """

    names: tuple[str, ...]
    conversion: Conversion = UNCHANGED
    fallback: str | None = None
    usual_because: str = ""


# How a parameter limits the gradient weight: as a lower or upper bound on what `Method.bounded` returns, or as a limit
# beside the bounds. Another word names what it shapes, such as "penalty". A guard acts on extreme numbers alone.
LOW = "low"
HIGH = "high"
BESIDE = "beside"
GUARD = "guard"

LOWER_WIDTH = VerlKey(("clip_ratio_low",), BELOW_ONE, "clip_ratio")
UPPER_WIDTH = VerlKey(("clip_ratio_high",), ABOVE_ONE, "clip_ratio")


def parameter(
    default: Any, allowed: Allowed, meaning: str, source: str = "", verl: VerlKey | None = None, *, role: str = ""
) -> Any:
    """A dataclass field with its meaning and its allowed values.

    Args:
        default: the value when the user gives none.
        allowed: which values it takes.
        meaning: one line, shown by `clipx methods`.
        source: where the default comes from: paper, script (its authors' release) or choice (this project's); empty if
            nothing outside this project says what it should be.
        verl: the key of verl's that it takes over, or None.
        role: how it limits the gradient weight: `LOW`, `HIGH`, `BESIDE`, `GUARD` or a noun; empty if it does not.
    """
    metadata = {"allowed": allowed, "meaning": meaning, "source": source, "verl": verl, "role": role}
    return dataclasses.field(default=default, metadata=metadata)


def validate(config: Any, node: str) -> None:
    """Converts and checks every parameter of a frozen dataclass in place.

    Args:
        node: the configuration node that the fields are under, for the message.

    Raises:
        Refusal: a value is not allowed; names key, value and what is allowed.
    """
    for field in dataclasses.fields(config):
        allowed = field.metadata.get("allowed")
        if allowed is None:
            continue
        value = getattr(config, field.name)
        try:
            converted = allowed.convert(value)
        except (ValueError, TypeError, OverflowError):
            hint = slip(field.name, value)
            raise Refusal(f"{node}.{field.name}", value, f"must be {allowed.description}", hint) from None
        object.__setattr__(config, field.name, converted)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters under a `node` of the configuration, which are converted and checked when they are built."""

    node: ClassVar[str]

    def __post_init__(self) -> None:
        validate(self, self.node)


def slip(name: str, value: Any) -> str:
    """Says what to write for a width where a bound is wanted; empty if the refused value is another mistake."""
    if name != "clip_high" or not isinstance(value, float) or not 0 < value < 1:
        return ""
    return f"Bounds are ratios: write {1 + value:.6g} for {100 * value:.6g} % above 1."


def reject_unknown(given: Iterable[str], known: Iterable[str], node: str, owner: str) -> None:
    """Raises a Refusal for the first key that is not known; it names the nearest that is.

    Args:
        given: the keys that the user wrote, perhaps with their values.
        node: the configuration node that the keys are under.
        owner: what the parameters belong to, for the message.
    """
    known = sorted(known)
    for key in given:
        if key not in known:
            hint = did_you_mean(key, known, f"{node}.").strip()
            value = given[key] if isinstance(given, Mapping) else ABSENT
            raise Refusal(f"{node}.{key}", value, f"is not a parameter of {owner}", hint or LISTED)


LISTED = "`clipx methods NAME` lists a method's parameters."
