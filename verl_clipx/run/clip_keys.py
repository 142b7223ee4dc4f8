"""What becomes of the keys of verl's own losses under a method of the plugin: they are taken over, or refused.

verl's scripts set clip_ratio_high and similar keys, which only verl's own losses read. A method of the plugin takes
them over as parameters with the same meaning. If a key has no meaning for the method, the run stops, so that a number
that you wrote down is never ignored.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from verl_clipx.base.method import NODE, FixedBounds, Method
from verl_clipx.methods import BUILT_IN
from verl_clipx.methods.dppo import Dppo
from verl_clipx.methods.dro import Dro
from verl_clipx.methods.gmpo import Gmpo
from verl_clipx.methods.gspo import Gspo
from verl_clipx.methods.sapo import Sapo

ACTOR = "actor_rollout_ref.actor"

# The values in verl's configuration when nobody sets these keys.
VERL_DEFAULTS = {
    "clip_ratio": 0.2,
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.2,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
}

# verl's SAPO reads the actor's temperatures, but its scripts write them under policy_loss, where verl has no such keys.
MISPLACED = ("tau_pos", "tau_neg")

# This key has no default in verl, whose dro stops without it.
DRO_BETA = "policy_loss.dro_beta"

# Keys that a method may take over; clip_ratio stands in for the first two.
MAPPED = (
    *("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg"),
    *(f"policy_loss.{key}" for key in MISPLACED),
    DRO_BETA,
)

WIDTHS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")

# For these keys, null leaves the decision to another key. For every other key, null is a value.
NULL_IS_SILENT = (*WIDTHS, DRO_BETA)

# Keys under policy_loss that one of verl's losses reads and no method of the plugin does: their default, and that loss.
OF_OTHER_LOSSES = {
    "clip_cov_ratio": (0.0002, "clip_cov"),
    "clip_cov_lb": (1.0, "clip_cov"),
    "clip_cov_ub": (5.0, "clip_cov"),
    "kl_cov_ratio": (0.0002, "kl_cov"),
    "ppo_kl_coef": (0.1, "kl_cov"),
}

# GSPO's scripts set widths such as 3e-4 for the ratio of a sequence; other scripts set widths such as 0.2 for the ratio
# of a token. A width that belongs to the other kind of ratio is a mistake.
NARROWEST_ON_TOKENS = WIDEST_ON_SEQUENCES = 0.01


class Meaning(NamedTuple):
    """What one of verl's keys means to a method.

    Attributes:
        parameter: the method's parameter.
        value: converts verl's value to the parameter's.
        narrowest: a smaller value of verl's key is a mistake.
        widest: a larger value of verl's key is a mistake.
    """

    parameter: str
    value: Callable[[float], float]
    narrowest: float = 0.0
    widest: float = math.inf


class Taken(NamedTuple):
    """A value that a method takes over.

    Attributes:
        value: the value of the method's parameter.
        key: verl's key from which it is taken.
        given: the value of that key.
    """

    value: float | None
    key: str
    given: float | None


def as_it_is(value: float) -> float:
    """A threshold, a temperature, the dual clip or the penalty, which is the same number in verl and here."""
    return value


def below_one(width: float) -> float:
    """A lower bound on the ratio from a width; rounded, so that 1 - 0.2 is exactly 0.8."""
    return round(1 - width, 12)


def above_one(width: float) -> float:
    """An upper bound on the ratio from a width."""
    return round(1 + width, 12)


def below_zero(width: float) -> float:
    """A lower bound on the ratio from a width on the log-ratio."""
    return math.exp(-width)


def above_zero(width: float) -> float:
    """An upper bound on the ratio from a width on the log-ratio."""
    return math.exp(width)


def meanings(method: Method) -> dict[str, Meaning]:
    """What the keys in `MAPPED` mean to a method. A key without an entry means nothing to it."""
    if isinstance(method, Dppo):
        # As in verl's own dppo losses.
        return {
            "clip_ratio_low": Meaning("threshold_low", as_it_is),
            "clip_ratio_high": Meaning("threshold_high", as_it_is),
            "clip_ratio_c": Meaning("weight_high", as_it_is),
        }
    if isinstance(method, Sapo):
        positive, negative = (Meaning(parameter, as_it_is) for parameter in ("tau_positive", "tau_negative"))
        return {
            "tau_pos": positive,
            "tau_neg": negative,
            "policy_loss.tau_pos": positive,
            "policy_loss.tau_neg": negative,
        }
    if isinstance(method, Dro):
        return {DRO_BETA: Meaning("beta", as_it_is)}
    if isinstance(method, Gmpo):
        # verl's geo_mean clips the log-ratio.
        return {"clip_ratio_low": Meaning("clip_low", below_zero), "clip_ratio_high": Meaning("clip_high", above_zero)}
    found = {}
    if isinstance(method, FixedBounds):
        narrowest = NARROWEST_ON_TOKENS if type(method).bounded is Method.bounded else 0.0
        widest = WIDEST_ON_SEQUENCES if isinstance(method, Gspo) else math.inf
        found["clip_ratio_low"] = Meaning("clip_low", below_one, narrowest, widest)
        found["clip_ratio_high"] = Meaning("clip_high", above_one, narrowest, widest)
    if "dual_clip" in method.parameters:
        found["clip_ratio_c"] = Meaning("dual_clip", as_it_is)
    return found


def given(key: str, verl_values: Mapping[str, Any], named: Collection[str]) -> tuple[str, Any] | None:
    """The key of verl's that sets a parameter, with its value; None if none does.

    Args:
        key: one of `MAPPED`; clip_ratio may replace the first two.
        verl_values: verl's keys and their values; a missing key sets nothing.
        named: full keys that the command line or a file of the user's names. Such a key counts even if it repeats
            verl's default.
    """
    for source in (key, "clip_ratio") if key in ("clip_ratio_low", "clip_ratio_high") else (key,):
        if source not in verl_values or (verl_values[source] is None and source in NULL_IS_SILENT):
            continue
        if verl_values[source] != default_of(source) or f"{ACTOR}.{source}" in named:
            return source, verl_values[source]
    return None


def default_of(source: str) -> float | None:
    """The value of verl's key when nobody sets it."""
    return None if source == DRO_BETA else VERL_DEFAULTS[source.removeprefix("policy_loss.")]


def taken_over(
    method: Method, verl_values: Mapping[str, Any], named: Collection[str] = (), *, group: str | None = None
) -> dict[str, Taken]:
    """What a method takes over from verl's keys.

    A parameter that still has its default takes verl's value. Applying this again to the result takes over nothing, so
    the driver and the workers agree.

    Args:
        method: the method with the parameters of its group and of the user's overrides.
        verl_values: verl's keys and their values, as for `given`.
        named: full keys that the command line or a file of the user's names, verl's and the plugin's.
        group: the group that +clipx= names, or None if unknown.

    Returns:
        From the method's parameter to what it takes over.

    Raises:
        ValueError: verl's key means nothing to the method, has a value that it cannot have, or contradicts the method's
            own parameter or another of verl's keys. One line for each names the keys, their values and what to do.
    """
    known, taken, refused = meanings(method), {}, []
    said: dict[str, Taken] = {}
    for key in MAPPED:
        source, value = given(key, verl_values, named) or (None, None)
        if source is None:
            continue
        if key not in known:
            message = None if means_nothing_anyway(source, value) else would_be_ignored(method, source, value, group)
        else:
            message = refusal(method, known[key], source, value, named)
            parameter = known[key].parameter
            if message is None:
                ours = Taken(None if value is None else known[key].value(value), source, value)
                earlier = said.setdefault(parameter, ours)
                if earlier.value != ours.value:
                    message = contradiction(earlier, ours)
                elif not same_bound(ours.value, method.parameters[parameter]):
                    taken[parameter] = earlier
        if message is not None and message not in refused:
            refused.append(message)
    if refused:
        raise ValueError("\n".join(refused))
    return taken


def sources(taken: Mapping[str, Taken]) -> dict[str, str]:
    """From each parameter to verl's key and value, as on the command line; the argument is from `taken_over`."""
    return {parameter: f"{of.key}={written(of.given)}" for parameter, of in taken.items()}


def means_nothing_anyway(source: str, value: Any) -> bool:
    """Whether a key that means nothing to a method may be ignored: it has its default, or asks for no dual clip."""
    return value == default_of(source) or (source == "clip_ratio_c" and value is None)


def same_bound(ours: float | None, current: float | None) -> bool:
    """Whether the method has verl's value already. A bound of 0 or less equals null, because ratios are above 0.

    Args:
        ours: verl's value, converted to the method's parameter.
        current: the parameter's value.
    """
    if ours is None:
        return current is None
    return ours <= 0 if current is None else math.isclose(ours, current, rel_tol=1e-9)


def contradiction(one: Taken, other: Taken) -> str:
    """The message for two of verl's keys that set one parameter to different values."""
    return (
        f"{ACTOR}.{other.key}={written(other.given)} but {ACTOR}.{one.key}={written(one.given)}: they contradict each "
        "other. Remove one of the two."
    )


def written(value: Any) -> str:
    """A value as it is written for Hydra."""
    return "null" if value is None else str(value)


def ignored_keys(method: Method, policy_loss: Any, *, group: str | None = None) -> list[str]:
    """One message for each key under policy_loss that is set although only verl's own losses read it.

    Args:
        policy_loss: verl's policy-loss node, or the configuration built from it.
        group: as for `taken_over`.
    """
    chosen = chosen_by(method, group)
    found = [
        of_another_loss(chosen, f"policy_loss.{key}", value, f"verl's own loss {loss}")
        for key, (default, loss) in OF_OTHER_LOSSES.items()
        if (value := policy_loss.get(key, default)) != default
    ]
    return [*found, *(misplaced_correction(chosen, key, value) for key, value in corrections(policy_loss).items())]


def chosen_by(method: Method, group: str | None) -> str:
    """How the command line chose a method."""
    return f"+{NODE}={group or (method.name if method.name in BUILT_IN else 'custom')}"


def of_another_loss(chosen: str, source: str, value: Any, reader: str) -> str:
    """The message for a key that only another loss reads."""
    return (
        f"{ACTOR}.{source}={written(value)} with {chosen}: only {reader} reads it, so it would be "
        f"ignored. Remove {ACTOR}.{source}."
    )


def corrections(policy_loss: Any) -> dict[str, Any]:
    """The keys that are set under policy_loss.rollout_correction, which is empty in verl's configuration."""
    node = policy_loss.get("rollout_correction", None) or {}
    if not dataclasses.is_dataclass(node):
        return dict(node)
    # verl has built this node and filled in its defaults.
    values = {field.name: (getattr(node, field.name), field.default) for field in dataclasses.fields(node)}
    return {key: value for key, (value, default) in values.items() if value != default}


def misplaced_correction(chosen: str, key: str, value: Any) -> str:
    """The message for a key of rollout correction at a place that only verl's bypass loss reads."""
    message = of_another_loss(chosen, f"policy_loss.rollout_correction.{key}", value, "verl's own loss bypass_mode")
    return f"{message} Set a run's corrections under algorithm.rollout_correction."


def would_be_ignored(method: Method, source: str, value: Any, group: str | None) -> str:
    """The message for one of verl's keys that means nothing to a method."""
    what = {"clip_ratio_c": "dual clip", DRO_BETA: "penalty"}.get(source, "fixed bound")
    what = "temperature" if "tau_" in source else what
    own = [f"{NODE}.{parameter}" for parameter in method.instead_of_bounds] if source in WIDTHS else []
    instead = f" To change how far the ratio may go, set {' or '.join(own)}." if own else ""
    return (
        f"{ACTOR}.{source}={written(value)} with {chosen_by(method, group)}, which has no {what} and would ignore it. "
        f"Remove {ACTOR}.{source}.{instead} `clipx methods {method.name}` lists its parameters."
    )


def refusal(method: Method, meaning: Meaning, source: str, value: Any, named: Collection[str]) -> str | None:
    """The message for a value of verl's that cannot become the method's parameter; None if it can, or is the same.

    Args:
        meaning: what verl's key means to the method.
        source: verl's key.
        value: the value of that key.
        named: as for `taken_over`.
    """
    said, key = f"{ACTOR}.{source}={written(value)}", f"{NODE}.{meaning.parameter}"
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        return f"{said}: must be a number."
    field = next(field for field in dataclasses.fields(method) if field.name == meaning.parameter)
    ours, current = None if value is None else meaning.value(value), getattr(method, meaning.parameter)
    if same_bound(ours, current):
        return None
    would_be = f"{said} would be {key}={'null' if ours is None else f'{ours:g}'}"
    if ours is not None and meaning.value is below_one and ours <= 0:
        return f"{would_be}, which is not a bound on any ratio. Remove it, or set {key}=null as well."
    try:
        field.metadata["allowed"].convert(ours)
    except (ValueError, TypeError, OverflowError):
        percent = source in WIDTHS and value > 1
        change = f"For {value:g} %, write {value / 100:g}" if percent else "Change it"
        kept, allowed = "null" if current is None else f"{current:g}", field.metadata["allowed"].description
        return f"{would_be}, which must be {allowed}. {change}, or remove it to keep {key}={kept}."
    if value is not None and value < meaning.narrowest:
        return (
            f"{would_be}: a width under {meaning.narrowest:g} is meant for the ratio of a sequence, but {method.name} "
            f"bounds the ratio of a token. Remove it, or also set {key}={ours:g} if you mean it."
        )
    if value is not None and value > meaning.widest:
        return (
            f"{would_be}: a width over {meaning.widest:g} is meant for the ratio of a token, but {method.name} bounds "
            f"the ratio of a sequence, which stays close to 1. Set {ACTOR}.{source} to a width such as 4e-4, remove it "
            f"to keep the group's bound, or also set {key}={ours:g} if you mean it."
        )
    if current != field.default or key in named:
        current = "null" if current is None else f"{current:g}"
        return f"{would_be}, but its group or the command line says {key}={current}. Remove one of the two."
    return None
