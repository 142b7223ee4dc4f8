"""Fields of dataclasses whose metadata says what they mean and which values they take, and their validation."""

import dataclasses
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

from verl_clipx.losses.base.refusal import NO_VALUE, Refusal, did_you_mean

# The node of a run's configuration that has the plugin's parameters.
NODE = "clipx"

# The largest number that float32 holds.
FLOAT32_LARGEST = 3.4028234663852886e38


@dataclasses.dataclass(frozen=True)
class Allowed:
    """The values that a parameter takes.

    Args:
        description: the end of the sentence "must be ...".
        convert: returns the value in its proper type, or raises ValueError or TypeError if it is not allowed.
        ends: the smallest and the largest number that is allowed; None if the parameter is not a number.
        reason: why a number's ends are those of float32; empty if it has ends of its own, or is not a number.
        choices: the words that are allowed; empty if the parameter is not a choice.
        null: whether null is allowed.
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
    """Allow a number in a range. Integers are accepted and become floats; booleans and text are refused.

    What lies outside the range cannot be meant, and is refused. What is only unusual is remarked on.

    Args:
        above: the lower end, if it lies outside the range; at least 0.
        at_least: the lower end, if it lies inside the range.
        at_most: the upper end, which lies inside the range.
        reason: why the parameter has no lower or no upper end of its own; the range then ends with float32. Empty if it
            has both.
        usual: the range outside which the line that a run prints calls a value unusual.

    Raises:
        TypeError: an end and the reason are both missing, or there are two lower ends, or a reason too many. Every
            value of a range must be computable in float32.
    """
    has_lower_end = above is not None or at_least is not None
    has_both_ends = has_lower_end and at_most is not None
    has_two_lower_ends = above is not None and at_least is not None
    if has_both_ends == bool(reason) or has_two_lower_ends:
        raise TypeError("number() needs a lower and an upper end, or a reason why one is missing")
    lowest = -FLOAT32_LARGEST
    if above is not None:
        lowest = next_float32(above)
    if at_least is not None:
        lowest = at_least
    highest = FLOAT32_LARGEST if at_most is None else at_most

    def convert(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        if not lowest <= value <= highest:
            raise ValueError
        return float(value)

    limits = []
    for words, end in (("above", above), ("at least", at_least), ("at most", at_most)):
        if end is not None:
            limits.append(f"{words} {shown(end)}")
    description = "; ".join(part for part in (" and ".join(limits), reason) if part)
    return Allowed(
        description=f"a number ({description})",
        convert=convert,
        ends=(lowest, highest),
        reason=reason,
        usual=usual,
    )


def integer(*, at_least: int | None = None, at_most: int | None = None, reason: str = "") -> Allowed:
    """Allow a whole number in a range that includes its ends, as for `number`. Booleans and fractions are refused."""
    of_numbers = number(at_least=at_least, at_most=at_most, reason=reason)

    def convert(value: Any) -> int:
        if of_numbers.convert(value) != int(value):
            raise ValueError
        return int(value)

    description = of_numbers.description.replace("a number", "a whole number", 1)
    return dataclasses.replace(of_numbers, description=description, convert=convert)


def next_float32(number: float) -> float:
    """Return the smallest float32 above a number, which must be at least 0 and one that float32 holds exactly."""
    # The bits of neighbouring numbers of the same sign, read as whole numbers, differ by 1.
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    return struct.unpack("<f", struct.pack("<I", bits + 1))[0]


def shown(number: float) -> str:
    """Return a number as a person writes it: 1e6, not 1e+06."""
    return f"{number:g}".replace("e+0", "e").replace("e-0", "e-")


def choice(*values: str) -> Allowed:
    """Allow one of the given words."""
    allowed = only("one of " + ", ".join(values), lambda value: value in values)
    return dataclasses.replace(allowed, choices=values)


def boolean() -> Allowed:
    """Allow true or false. 0 and 1 are refused."""
    return only("true or false", lambda value: isinstance(value, bool))


def only(description: str, fits: Callable[[Any], bool]) -> Allowed:
    """Allow the values that fit, which stay unchanged.

    Args:
        description: the end of the sentence "must be ...".
        fits: whether a value is allowed.
    """

    def convert(value: Any) -> Any:
        if not fits(value):
            raise ValueError
        return value

    return Allowed(description=description, convert=convert)


def optional(allowed: Allowed) -> Allowed:
    """Allow null too."""
    return dataclasses.replace(
        allowed,
        description=f"{allowed.description}, or null",
        convert=lambda value: None if value is None else allowed.convert(value),
        null=True,
    )


class Conversion(NamedTuple):
    """The conversion of a number of verl's into a parameter's.

    Args:
        convert: from verl's number to the parameter's.
        formula: the same as a text, in x, for pages and messages.
    """

    convert: Callable[[float], float]
    formula: str


UNCHANGED = Conversion(lambda x: x, "x")
# From a width to a bound on the ratio, rounded so that 1 - 0.2 is exactly 0.8.
BELOW_ONE = Conversion(lambda x: round(1 - x, 12), "1 − x")
ABOVE_ONE = Conversion(lambda x: round(1 + x, 12), "1 + x")
# From a width on the log-ratio to a bound on the ratio.
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

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names, and that of the fallback if there is one."""
        if self.fallback is None:
            return self.names
        return (*self.names, self.fallback)


# How a parameter limits the gradient weight: as a lower or upper bound on what `Method.bounded` returns, or as a limit
# beside the bounds. Another word names what it shapes, such as "penalty". A guard acts on extreme numbers alone.
LOW = "low"
HIGH = "high"
BESIDE = "beside"
GUARD = "guard"

# verl's keys for the bounds on a ratio, which are widths below and above 1.
LOWER_WIDTH = VerlKey(("clip_ratio_low",), conversion=BELOW_ONE, fallback="clip_ratio")
UPPER_WIDTH = VerlKey(("clip_ratio_high",), conversion=ABOVE_ONE, fallback="clip_ratio")


def parameter(
    default: Any, allowed: Allowed, meaning: str, source: str = "", verl: VerlKey | None = None, *, role: str = ""
) -> Any:
    """Return a dataclass field with its meaning and its allowed values.

    Args:
        default: the value when the user gives none.
        allowed: which values it takes.
        meaning: one line, shown by `clipx methods`.
        source: where the default comes from: paper, script (its authors' release) or choice (this project's); empty if
            nothing outside this project says what it should be.
        verl: the key of verl's that it takes over; None: there is no such key.
        role: how it limits the gradient weight: `LOW`, `HIGH`, `BESIDE`, `GUARD` or a noun; empty if it does not.
    """
    metadata = {"allowed": allowed, "meaning": meaning, "source": source, "verl": verl, "role": role}
    return dataclasses.field(default=default, metadata=metadata)


def validate(config: Any, node: str) -> None:
    """Check and convert every parameter of a frozen dataclass in place.

    Args:
        config: the instance. Fields that `parameter` did not make stay as they are.
        node: the full key of the configuration node that the fields are under, for the message.

    Raises:
        Refusal: a value is not allowed. The message names key, value and what is allowed.
    """
    for field in dataclasses.fields(config):
        allowed = field.metadata.get("allowed")
        if allowed is None:
            continue
        value = getattr(config, field.name)
        try:
            converted = allowed.convert(value)
        except (ValueError, TypeError, OverflowError):
            hint = explain_width(field.name, value)
            raise Refusal(f"{node}.{field.name}", value, f"must be {allowed.description}", hint) from None
        # The dataclass is frozen, so a plain assignment would raise an error.
        object.__setattr__(config, field.name, converted)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters under one node of the configuration, which are converted and checked when they are built."""

    # The full key of that node, such as clipx.mask.
    node_key: ClassVar[str]

    def __post_init__(self) -> None:
        validate(self, self.node_key)


def explain_width(name: str, value: Any) -> str:
    """Return what to write if a refused value is a width, where a bound is wanted; else an empty text.

    Args:
        name: the parameter's name.
        value: the value that was refused.
    """
    if name != "clip_high" or not isinstance(value, float) or not 0 < value < 1:
        return ""
    return f"Bounds are ratios: write {1 + value:.6g} for {100 * value:.6g} % above 1."


def reject_unknown(given: Iterable[str], known: Iterable[str], node: str, owner: str) -> None:
    """Raise a Refusal for the first key that is not known. The message names the nearest key that is.

    Args:
        given: the keys that the user wrote; if it is a mapping, the message also has the key's value.
        known: the keys that there are.
        node: the full key of the configuration node that the keys are under.
        owner: what the parameters belong to, for the message.
    """
    known = sorted(known)
    for key in given:
        if key not in known:
            hint = did_you_mean(key, known, f"{node}.").strip()
            value = given[key] if isinstance(given, Mapping) else NO_VALUE
            raise Refusal(f"{node}.{key}", value, f"is not a parameter of {owner}", hint or LISTED)


# The advice of `reject_unknown` where no known key is near.
LISTED = "`clipx methods NAME` lists a method's parameters."
