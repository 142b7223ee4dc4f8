"""A method in words, for the line and for `clipx explain`: its limits, its bounds, its settings and whose they are."""

import dataclasses
from typing import Any

from verl_clipx.base.method import NODE, Method
from verl_clipx.base.parameters import BESIDE, GUARD, HIGH, LOW
from verl_clipx.base.refusal import written
from verl_clipx.run.config import Settings
from verl_clipx.run.facts import RunFacts
from verl_clipx.run.groups import group_names, group_settings
from verl_clipx.run.keys import ACTOR

# Those that change how a loss is computed or watched, and not what is trained.
NOT_TRAINED = ("compile", "metrics", "receipt", "log", "health", "missing_state")


def limits_in_words(method: Method) -> tuple[str, str, str]:
    """Returns what limits a method's weight, what of it can act where the ratio is not 1, and what where it is 1."""
    limits = method.limits
    nouns = " and ".join(dict.fromkeys(role for role in limits.values() if role not in (LOW, HIGH, BESIDE)))
    beside = " and ".join(name for name, role in limits.items() if role == BESIDE)
    on = "" if method.bounds_on == "ratio" else f" on the {method.bounds_on.format(**method.parameters)}"
    if {LOW, HIGH} & {*limits.values()}:
        limit, acting = f"fixed bounds{on}", "clipping"
    elif not method.declares_limits:
        limit, acting = "no bounds", "a limit inside the gradient weight"
    elif nouns:
        limit, acting = f"a {nouns} and no bounds", f"the {nouns}"
    elif method.solved_parameters or not roles_of(method):
        limit, acting = f"bounds of its own{on}", "clipping"
    else:
        limit, acting = f"no bounds but {beside}" if beside else "no bounds", beside
    return limit, acting, (f"the {nouns}" if nouns else acting) if method.acts_at_ratio_one else ""


def roles_of(method: Method) -> set[str]:
    """Returns the roles of a method's parameters that stand for bounds or for what is in their place."""
    return {field.metadata.get("role") for field in dataclasses.fields(method)} - {None, "", GUARD, BESIDE}


def bounds_of(method: Method) -> str:
    """Returns a method's bounds and its other limits, by its parameters."""
    values = {name: "∞" if value is None else shown(value) for name, value in method.parameters.items()}
    by_role: dict[str, list[str]] = {}
    for name, role in method.limits.items():
        by_role.setdefault(role, []).append(name)
    low, high = ([values[name] for name in by_role.pop(side, ())] for side in (LOW, HIGH))
    if method.formula:
        bounds = f"{method.bounds_on} {method.formula}".format(**values)
    elif not {LOW, HIGH} & roles_of(method):
        bounds = "bounds of its own" if method.declares_limits and not roles_of(method) else "no bounds"
    else:
        bounds = f"{method.bounds_on} {interval(*low or [None], *high or [None])}"
    beside = [f"{name} {values[name]}" for name in by_role.pop(BESIDE, ())]
    shaped = [f"{role}: {', '.join(f'{name} {values[name]}' for name in names)}" for role, names in by_role.items()]
    return "; ".join([bounds, *shaped, *beside])


def interval(low: Any, high: Any) -> str:
    """Returns two bounds in words; null means none."""
    if low is None:
        return "without bounds" if high is None else f"up to {shown(high)}"
    return f"from {shown(low)}" if high is None else f"{shown(low)} to {shown(high)}"


def settings_of(settings: Settings, run: RunFacts) -> str:
    """Returns a method's parameters, and whose they are: `alpha 3, epsilon_base 0.2, 5 bins: the paper's`."""
    guards = {field.name for field in dataclasses.fields(settings.method) if field.metadata.get("role") == GUARD}
    own = [
        f"{shown(value)} {name}" if isinstance(value, int) else f"{name} {shown(value)}"
        for name, value in settings.method.parameters.items()
        if name not in guards and not isinstance(value, bool | str) and value
    ]
    changed = [
        f"{field.name}={shown(value)} (group: {shown(of_group)})"
        for field, value, of_group in changed_parameters(settings, run)
        if field.name not in (*NOT_TRAINED, *settings.method.solved_parameters)
    ]
    if settings.hold is not None:
        changed.insert(0, f"bounds that hold {settings.method.held_target}")
    group = run.group
    whose = "the released code's" if str(group).endswith("_reference") else "the paper's"
    if group == "custom" or group not in group_names():
        whose = "its group's" if group else "its defaults"
    whose += f" but for {', '.join(changed)}" if changed else ""
    return f"{', '.join(own) or 'no parameters'}: {whose}"


def differences(settings: Settings, run: RunFacts) -> list[str]:
    """Returns the parameters that differ from the group, each with both values and, if verl's key set it, this key."""
    changes = []
    for field, value, of_group in changed_parameters(settings, run):
        name, source = field.name, ""
        if taken := run.taken.get(name):
            source = f"; from {ACTOR}.{taken['key']}={written(taken['given'])}"
        elif name == "compile" and value is False and run.uncompiled_by:
            source = f"; from {run.uncompiled_by}=False"
        elif name in settings.method.solved_parameters:
            source = f"; not used, {NODE}.hold solves for the bounds"
        changes.append(f"{name}={shown(value)} (group: {shown(of_group)}{source}{unusual(field, value)})")
    return changes


def changed_parameters(settings: Settings, run: RunFacts) -> list[tuple[dataclasses.Field, Any, Any]]:
    """Returns the parameters of what is trained that differ from the group: the field, its value, and the group's."""
    name = run.group or settings.method.name
    # A group of the user's own is compared with the defaults.
    group = group_settings(name) if name in group_names() else {}
    return [
        (field, value, of_group)
        for owner in (settings.method, settings)
        for field in dataclasses.fields(owner)
        if field.name not in ("method", "trace", "paper_loss_agg_mode", "hold")
        and (value := getattr(owner, field.name)) != (of_group := group.get(field.name, field.default))
    ]


def unusual(field: dataclasses.Field, value: Any) -> str:
    """Returns a remark on a value outside its usual range, for `differences`; empty if there is nothing to remark."""
    usual = field.metadata["allowed"].usual
    if usual is None or value is None or usual[0] <= value <= usual[1]:
        return ""
    return f"; unusual, mostly {shown(usual[0])} to {shown(usual[1])}"


def shown(value: Any) -> str:
    """Returns a value as it is written on the command line; a modifier's includes its parameters."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if dataclasses.is_dataclass(value):
        fields = (f"{field.name}={shown(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(fields)})"
    return f"{value:g}" if isinstance(value, int | float) else str(value)
