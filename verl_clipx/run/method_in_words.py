"""A clipx node in words, for the line and `clipx explain`: limits, bounds, settings and whose they are, risk, cost."""

import dataclasses
from typing import Any

from verl_clipx.base.method import NODE, Method
from verl_clipx.base.parameters import BESIDE, GUARD, HIGH, LOW
from verl_clipx.base.refusal import written
from verl_clipx.run.config import Settings
from verl_clipx.run.facts import RunFacts
from verl_clipx.run.groups import group_names, group_settings
from verl_clipx.run.keys import ACTOR
from verl_clipx.run.support import read_costs

# Those that change how a loss is computed or watched, and not what is trained.
NOT_TRAINED = ("compile", "receipt", "log", "health", "missing_state")


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


def cost(settings: Settings, run: RunFacts) -> str:
    """Returns what the loss costs beyond verl's own."""
    schedule = run.schedule
    extra = [f"one extra forward pass {schedule.extra_passes}"] if schedule.extra_passes else []
    passes = extra + ["a second pass of each update (Lopti)"] * (len(schedule.passes) == 2)
    of_scope = extra and settings.adaptive and settings.scope == "mini_batch" and not schedule.selects_by_pass
    can_lag = not schedule.second_stage and "entropy" not in settings.method.asks_for
    costs = read_costs()
    made = {"the extra pass": "mini_batch"} if schedule.extra_passes == "before each update" else {}
    made |= {f"{NODE}.scope=lagged": "lagged"} if settings.adaptive and settings.scope == "lagged" else {}
    made |= {"Lopti": "lopti"} if len(schedule.passes) == 2 else {}
    more = [f"{costs['update_of_vanilla'][key] - 1:.0%} for {what}" for what, key in made.items()]
    share = f"; measured {costs['where']}, of an update's time: {', '.join(more)} ({costs['source']})" if more else ""
    lag = f"; {NODE}.scope=lagged needs none" * bool(of_scope and can_lag)
    return f"{' and '.join(passes) or 'no extra pass'}{lag}{share.replace('%', ' %')}"


def risk(settings: Settings, run: RunFacts) -> str | None:
    """Returns from which spread of the ratio on nothing is clipped below; None where that cannot come about."""
    spread = settings.method.unbounded_below_from
    if spread is None or run.schedule.only_at_ratio_one:
        return None
    return (
        f"where σ reaches {spread:.3f}, the lower bound is 0 and nothing is clipped below; σ grows from update to "
        f"update of a rollout batch. {NODE}.epsilon_max below 1 keeps a lower bound; the run logs epsilon_highest"
    )


def mask_in_words(settings: Settings, to: str) -> str | None:
    """Returns what a mask takes out, and by which ratio; None without one. `to`: the policy that the clip's is to."""
    mask = settings.mask
    if mask is None:
        return None
    parameters = ", ".join(f"{field.name} {shown(getattr(mask, field.name))}" for field in dataclasses.fields(mask))
    says = (type(mask).__doc__ or " ").split("\n")[0].rstrip(".")
    compared = "policy of old_log_probs" if mask.of_old_policy else "current policy"
    return (
        f"{mask.rule} ({parameters}) {says[0].lower()}{says[1:]}; it compares the {compared} with the one that "
        f"sampled. The clip acts on what is left, by the ratio {to}"
    )


def of_receipt(settings: Settings, run: RunFacts) -> str:
    """Returns what happens if the gradient of the first rollout batch is not the announced one."""
    if settings.receipt == "off":
        return "off: nothing checks that this loss is what the run trains"
    if settings.receipt == "warn":
        return "warns if the first rollout batch trains another loss"
    always = "stops the run if the first rollout batch trains another loss"
    if settings.receipt == "stop" or not run.untested:
        return always
    return f"{always}; its checks of the engine, which no test has run, only warn"


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
