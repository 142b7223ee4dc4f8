"""A run in words: its loss, settings, bounds, updates, ratio, averages, what verl adds, cost, files, what stops it.

A run is described once, when it is resolved. The line that driver and workers print, the record and the rows of
`clipx explain` are three ways to print this description.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_clipx.losses.base.method import NODE, Method
from verl_clipx.losses.base.parameters import BESIDE, GUARD, HIGH, LOW
from verl_clipx.losses.base.refusal import written
from verl_clipx.losses.groups import OBSERVE, SWAP_GUARD, own_settings
from verl_clipx.losses.modifiers.pull import Pull
from verl_clipx.run import keys
from verl_clipx.run.config import Observe, Settings
from verl_clipx.run.explain import NOTHING_STOPS
from verl_clipx.run.record import RunRecord, Terms
from verl_clipx.run.support import read_costs
from verl_clipx.run.trainer import FULLY_ASYNC, SEPARATE

# Which tokens the statistics behind the bounds are of.
SCOPES = {
    "mini_batch": "statistics of all tokens of an update, on all ranks",
    "lagged": "statistics of the same update of the rollout batch before",
    "micro_batch": "statistics of each micro-batch by itself",
}
# Parameters that change how a loss is computed or watched, and not what is trained.
NOT_TRAINED = ("compile", "receipt", "log", "health", "missing_state")
# Of verl's own losses, the plugin knows only of vanilla what limits it.
IF_IT_CLIPS = "clipping, if this loss clips,"
UNCONSTRAINED = ", unconstrained_weight: F may be 0 or less at ratio 1, or change with the size of A"
# How a paper averages, by the mode that its method's group names.
AVERAGES = {"token-mean": "averages over all tokens", "seq-mean-token-mean": "averages each sequence first"}
# What corrects stale samples, each in one line.
REMEDIES = (
    f"{keys.ROLLOUT_IS}=token {keys.ROLLOUT_IS}_threshold=2 {keys.CALCULATE_LOG_PROBS}=true (truncated weights), or "
    f"{keys.BYPASS}=true {keys.CALCULATE_LOG_PROBS}=true (the ratio is then to the policy that sampled)"
)
WAY_BACK = (
    "without +clipx and the keys under clipx, the same command resumes its checkpoints under verl's own loss, which "
    "reads none of the plugin's files"
)


# The rows are the fields, in their order and by their names, but for these, and without these.
HEADS = {"taken": "takes over", "unused": "does not read", "of_verl": "verl adds", "uncorrected": "samples"}
HEADS |= {"cut": "responses", "uncounted": "machines", "cost": "costs", "files": "writes", "way_back": "way back"}
HEADS |= {"extra_pass": "the extra pass", "sequence_weights": "weights"}
HEADS |= {"untested": "no test has run", "has_run_on": "has run on", "without_plugin": "without the plugin"}
WITHOUT_ROW = ("loss", "loss_mode", "of_the_plugin", "line", "tested", "stops", "arguments")


@dataclass(frozen=True)
class Description:
    """The loss that a run would train, its cost, the files that it would write, and the reasons that stop it.

    Args:
        line: the line that the run prints; None if the plugin has no part in it, or it stops.
        taken: from parameters of the method to verl's key and value that they take over.
        unused: from clip keys of verl's that the method does not read to their values.
        tested: from untested options that are a key and its value to the values that tests have run.
        without_plugin: what a verl without the plugin does with the same overrides; None if it was given none.
        stops: what stops the run, in sentences; the other texts are those of the rows of `text`.
        arguments: the overrides that the trainer was given; None if Hydra did not read them, or for a sweep.
    """

    loss: str
    loss_mode: str | None = None
    of_the_plugin: bool = False
    line: str | None = None
    settings: str | None = None
    taken: dict[str, str] = field(default_factory=dict)
    unused: dict[str, Any] = field(default_factory=dict)
    bounds: str | None = None
    risk: str | None = None
    updates: str | None = None
    ratio: str | None = None
    averages: str | None = None
    of_verl: list[str] = field(default_factory=list)
    uncorrected: str | None = None
    sequence_weights: str | None = None
    mask: str | None = None
    cut: str | None = None
    uncounted: str | None = None
    cost: str | None = None
    extra_pass: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    traces: str | None = None
    resumes: str | None = None
    way_back: str | None = None
    receipt: str | None = None
    untested: list[str] = field(default_factory=list)
    has_run_on: str | None = None
    without_plugin: str | None = None
    tested: dict[str, list[str]] = field(default_factory=dict)
    stops: list[str] = field(default_factory=list)
    arguments: list[str] | None = None

    @property
    def text(self) -> list[str]:
        """The description in rows."""
        parameters = {
            source: " and ".join(f"{NODE}.{name}" for name, of in self.taken.items() if of == source)
            for source in self.taken.values()
        }
        taken = ", ".join(f"verl's {source} as {names}" for source, names in parameters.items())
        words = {
            **vars(self),
            "taken": f"{taken}; remove the key to keep the group's value" if taken else "",
            "unused": of_verls(self.unused),
            "of_verl": ", ".join(self.of_verl),
            "files": ", ".join(f"{where} ({what})" for what, where in self.files.items()),
            "untested": ", ".join(
                f"{option} (tests have run {' and '.join(tested)})" if (tested := self.tested.get(option)) else option
                for option in self.untested
            ),
        }
        rows = (
            f"  {HEADS.get(name, name)}: {text}" for name, text in words.items() if text and name not in WITHOUT_ROW
        )
        lines = [self.loss, *rows]
        return lines + ([f"stops: {why}" for why in self.stops] or [NOTHING_STOPS])


def describe(loss_mode: str, settings: Settings | Observe, record: RunRecord) -> Description:
    """Describes a run of the plugin's, as far as its settings and its record go before it starts."""
    term = distillation_in_words(record.terms)
    mismatch = keys.log_prob_mismatch(record.sampling, record.rollout.name)
    to_sampler = keys.ratio_to_the_rollout_policy(record.correction, settings)
    trainer = record.trainer
    group = record.loss.group
    of_group = own_settings(group or loss_mode.removeprefix(f"{NODE}_"))
    source = source_of_old_log_probs(record)
    added = corrections(record, settings)
    biased = None
    if mismatch is not None and record.sampling.returns_log_probs:
        which = "" if to_sampler else ", which only metrics use,"
        biased = f"ratios to the rollout policy{which} are biased by {mismatch}: {mismatch.effect}"
    missing = None
    # A pull to the sampler corrects nothing.
    if trainer.stale and (not to_sampler or to_sampler.startswith(Pull.node)):
        missing = "not corrected for the samples' staleness and for the rollout engine"
    # verl stops a run without these keys, and a configuration that nobody starts needs none of them.
    untested = [option for option in record.untested if not option.endswith("=None")]
    unused = {key.removeprefix(f"{keys.ACTOR}."): value for key, value in record.loss.unused.items()}
    common = {
        "averages": averages(record, settings),
        "of_verl": [*added, *filter(None, [term, biased])],
        "uncorrected": f"{missing}. Add {REMEDIES}" if missing else None,
        "untested": untested,
    }
    if not settings.trains:
        to = None
        acting = IF_IT_CLIPS
        of_row = "clipping" if loss_mode == "vanilla" else IF_IT_CLIPS
        at_one = ""
        loss = f"verl's own loss {loss_mode}, observed (+{NODE}={OBSERVE})"
        of_rows = {"loss": f"{loss_mode}, verl's own loss, observed (+{NODE}={OBSERVE})", "cost": "metrics only"}
    else:
        method = settings.method
        limit, acting, at_one = limits_in_words(method)
        of_row = acting
        is_to_sampler = record.correction.bypass or method.ratio_to_sampler
        to = "to the policy that sampled" if is_to_sampler else "to the policy of old_log_probs"
        name = f"{NODE}_{method.name}"
        if group:
            name += f" (+{NODE}={group})"
        scope = f"scope {settings.scope}"
        holds = f"holds {method.held_target}, " if settings.hold is not None else ""
        differing = differences(settings, record, of_group)
        bounds = scope if settings.adaptive else limit
        parameters = ", ".join(differing.values()) or "every parameter as in its group"
        loss = f"{name}, {holds}{bounds}, {parameters}"
        if method.unconstrained_weight:
            loss += UNCONSTRAINED
        of_rows = {
            "loss": f"{name}, {scope}: {SCOPES[settings.scope]}" if settings.adaptive else name,
            "settings": settings_of(settings, group, differing),
            "bounds": bounds_of(method),
            "ratio": f"{to}, which {source}" if to.endswith("old_log_probs") else f"{to}; old_log_probs {source}",
            "taken": {name: f"{of['key']}={written(of['given'])}" for name, of in record.loss.taken.items()},
            "unused": unused,
            "risk": warn_of_no_lower_bound(settings, record),
            "mask": mask_in_words(settings, to),
            "cost": cost(settings, record),
            "way_back": WAY_BACK,
            "receipt": of_receipt(settings, record),
        }
    line = [
        f"clipx: {loss}",
        unused and f"{of_verls(unused)} not used",
        term,
        f"loss_agg_mode {common['averages']}",
        *added,
        missing,
        biased,
        untested and f"no test has run {', '.join(untested)}",
        to and f"ratio {to}",
        f"old_log_probs {source}",
        f"{updates(record, acting, at_one)}{traced(settings)}",
    ]
    made = updates(record, of_row, at_one, in_full=True)
    described = Description(loss_mode=loss_mode, of_the_plugin=True, updates=made, **of_rows, **common)
    return dataclasses.replace(described, line="; ".join(filter(None, line)))


def without_plugin(overrides: Sequence[str]) -> str | None:
    """Return what a verl without the plugin does with these overrides; None if they choose no group."""
    chosen = next((word for word in overrides if word.startswith(f"+{NODE}=")), None)
    if chosen is None:
        return None
    for word in overrides:
        if word.startswith(f"{NODE}."):
            return f"verl stops at {word.partition('=')[0]}, before Ray starts"
    return (
        f"verl takes {chosen} for a new key, reads it nowhere, and trains its own loss; add {SWAP_GUARD}, at which it "
        "then stops before Ray starts"
    )


def of_verls(unused: dict[str, Any]) -> str:
    """Returns keys of verl's with their values, for a reader."""
    return f"verl's {', '.join(f'{key}={written(value)}' for key, value in unused.items())}" if unused else ""


def distillation_in_words(terms: Terms) -> str | None:
    """Names the term that verl adds to the policy loss under distillation with task rewards; None without it."""
    if not terms.distillation:
        return None
    coefficient = terms.distillation_coefficient
    return f"verl's distillation loss {terms.distillation_kind} is added to it with coefficient {coefficient}"


def averages(record: RunRecord, settings: Settings | Observe) -> str:
    """Returns verl's aggregation mode and, if it differs, the paper's."""
    mode = record.aggregation_mode
    if not settings.trains:
        # Some of verl's own losses, such as its sapo, average in their own way.
        return f"{shown(mode)}, if this loss follows it"
    paper = settings.paper_loss_agg_mode
    if paper in (None, mode):
        return mode
    return f"{shown(mode)} (the paper {AVERAGES[paper]}; set {keys.LOSS_AGG_MODE}={paper} for that)"


def corrections(record: RunRecord, settings: Settings | Observe) -> list[str]:
    """Returns the corrections of the samples' weights, mask and probabilities."""
    correction = record.correction
    temperature = record.sampling.temperature
    applied: list[str] = []
    # In bypass mode verl's trainers apply neither, and only the plugin's losses reject.
    if correction.weights is not None and not correction.bypass:
        over = ", normalised over the batch" if correction.weights_normalised else ""
        applied.append(f"rollout_is={correction.weights} (threshold {shown(correction.weights_threshold)}{over})")
    if correction.rejection is not None and (settings.trains or not correction.bypass):
        by = " by the current weights" if correction.bypass else ""
        applied.append(f"rollout_rs={correction.rejection}{by} (threshold {shown(correction.rejection_threshold)})")
    corrected = [f"rollout correction {', '.join(applied)}"] if applied else []
    return corrected + ([] if temperature in (None, 1) else [f"log-probabilities at temperature {shown(temperature)}"])


def source_of_old_log_probs(record: RunRecord) -> str:
    """Returns where verl's trainer gets old_log_probs from."""
    if record.correction.bypass:
        return "are the rollout's own (bypass_mode)"
    if record.trainer.recomputes_old:
        return "are recomputed with the weights at the start of a rollout batch's first update"
    if record.trainer.kind in (FULLY_ASYNC, SEPARATE):
        return "are recomputed with the weights that the rollout last received"
    return "are the trainer's"


def updates(record: RunRecord, acting: str, at_one: str = "", *, in_full: bool = False) -> str:
    """Returns the number of updates per rollout batch, and whether limits can act.

    Args:
        acting, at_one: as of `limits_in_words`.
        in_full: whether the responses of each update, and the steps without any, are named too.
    """
    schedule = record.schedule
    mini_batch = record.batch.mini_batch
    responses = record.batch.responses
    first = record.length.critic_warmup or 0
    size = ""
    if in_full and mini_batch and responses:
        noun = "response" if responses == 1 else "responses"
        size = f" of {mini_batch} prompts x {responses} {noun}"
    warmup = f"; steps before {first} update only the critic" if in_full and first > 1 else ""
    if schedule.updates is None:
        return f"an unknown number of updates per rollout batch{warmup}"
    noun = "update" if schedule.updates == 1 else "updates"
    number = f"{schedule.updates} {noun}{size} per rollout batch"
    if len(schedule.passes) == 2:
        number += " and pass of Lopti"
    if schedule.only_at_ratio_one and not at_one:
        several = f"to make several updates, set {keys.MINI_BATCH} below data.train_batch_size"
        idle = f"{acting or 'clipping'} has nothing else to act on"
        return f"{number}, at ratio 1 but for rounding: {idle} ({several}){warmup}"
    can_act = at_one if schedule.only_at_ratio_one else acting
    if not can_act:
        return f"{number}: nothing clips{warmup}"
    return f"{number}: {can_act} can act{warmup}"


def traced(settings: Settings | Observe) -> str:
    """Returns what is traced, and to which folder, after a semicolon; empty if nothing is traced."""
    trace = settings.trace
    if trace is None:
        return ""
    batches = "every rollout batch" if trace.every == 1 else f"one of {trace.every} rollout batches"
    return f"; {100 * trace.fraction:g} % of the prompts traced in {batches}, to {trace.folder}"


def limits_in_words(method: Method) -> tuple[str, str, str]:
    """Returns what limits a method's weight, what of it can act where the ratio is not 1, and what where it is 1."""
    limits = method.limits
    roles = {*method.roles.values()}
    nouns = " and ".join(dict.fromkeys(role for role in limits.values() if role not in (LOW, HIGH, BESIDE)))
    beside = " and ".join(name for name, role in limits.items() if role == BESIDE)
    on = "" if method.bounds_on == "ratio" else f" on the {method.bounds_on.format(**method.parameters)}"
    if {LOW, HIGH} & {*limits.values()}:
        limit = f"fixed bounds{on}"
        acting = "clipping"
    elif not method.declares_limits:
        limit = "no bounds"
        acting = "a limit inside the gradient weight"
    elif nouns:
        limit = f"a {nouns} and no bounds"
        acting = f"the {nouns}"
    elif method.solved_parameters or not roles - {BESIDE}:
        limit = f"bounds of its own{on}"
        acting = "clipping"
    else:
        limit = f"no bounds but {beside}" if beside else "no bounds"
        acting = beside
    if not method.acts_at_ratio_one:
        return limit, acting, ""
    if nouns:
        return limit, acting, f"the {nouns}"
    return limit, acting, acting


def bounds_of(method: Method) -> str:
    """Returns a method's bounds and its other limits, by its parameters."""
    values = {name: "∞" if value is None else shown(value) for name, value in method.parameters.items()}
    by_role: dict[str, list[str]] = {}
    for name, role in method.limits.items():
        by_role.setdefault(role, []).append(name)
    low, high = ([values[name] for name in by_role.pop(side, ())] for side in (LOW, HIGH))
    if method.formula:
        low, high, *equations = method.formula
        symbols = "the width that holds {hold}" if method.solved_parameters else method.symbols
        described = [*equations, symbols] if symbols else equations
        bounds = ", ".join([f"{method.bounds_on} {interval(low or None, high)}", *described]).format(**values)
    elif not {LOW, HIGH} & (roles := {*method.roles.values()} - {BESIDE}):
        bounds = "bounds of its own" if method.declares_limits and not roles else "no bounds"
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


def settings_of(settings: Settings, group: str | None, differing: dict[str, str]) -> str:
    """Returns a method's parameters, and whose they are: `alpha 3, epsilon_base 0.2, 5 bins: the paper's`."""
    guards = {field.name for field in dataclasses.fields(settings.method) if field.metadata.get("role") == GUARD}
    own = [
        f"{shown(value)} {name}" if isinstance(value, int) and name.endswith("s") else f"{name} {shown(value)}"
        for name, value in settings.method.parameters.items()
        if name not in guards and not isinstance(value, bool | str) and value
    ]
    not_of_loss = (*NOT_TRAINED, *settings.method.solved_parameters)
    changed = [text for name, text in differing.items() if name not in not_of_loss]
    if settings.hold is not None:
        changed.insert(0, f"bounds that hold {settings.method.held_target}")
    whose = "the released code's" if str(group).endswith("_reference") else "the paper's"
    if group in (None, "custom") or not own_settings(group):
        whose = "its group's" if group else "its defaults"
    whose += f" but for {', '.join(changed)}" if changed else ""
    return f"{', '.join(own) or 'no parameters'}: {whose}"


def cost(settings: Settings, record: RunRecord) -> str:
    """Returns what the loss costs beyond verl's own."""
    schedule = record.schedule
    extra = [f"one extra forward pass {schedule.extra_passes}"] if schedule.extra_passes else []
    passes = list(extra)
    if len(schedule.passes) == 2:
        passes.append("a second pass of each update (Lopti)")
    of_scope = extra and settings.adaptive and settings.scope == "mini_batch" and not schedule.selects_by_pass
    can_lag = not schedule.second_stage and "entropy" not in settings.method.asks_for
    costs = read_costs()
    # What costs time, each with its key in the measured costs.
    made = {}
    if schedule.extra_passes == "before each update":
        made["the extra pass"] = "mini_batch"
    if settings.adaptive and settings.scope == "lagged":
        made[f"{NODE}.scope=lagged"] = "lagged"
    if len(schedule.passes) == 2:
        made["Lopti"] = "lopti"
    more = [f"{costs['update_of_vanilla'][key] - 1:.0%} for {what}" for what, key in made.items()]
    share = f"; measured {costs['where']}, of an update's time: {', '.join(more)} ({costs['source']})" if more else ""
    lag = f"; {NODE}.scope=lagged needs none" if of_scope and can_lag else ""
    return f"{' and '.join(passes) or 'no extra pass'}{lag}{share.replace('%', ' %')}"


def warn_of_no_lower_bound(settings: Settings, record: RunRecord) -> str | None:
    """Warns that above some spread of the ratio the lower bound is 0, so that nothing is clipped from below.

    Returns:
        The warning; None if it cannot happen.
    """
    # Only ACPO has such a spread, so that the sentence may name its parameter and its metric.
    spread = settings.method.unbounded_below_from
    if spread is None or record.schedule.only_at_ratio_one:
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


def of_receipt(settings: Settings, record: RunRecord) -> str:
    """Returns what happens if the gradient of the first rollout batch is not the announced one."""
    if settings.receipt == "off":
        return "off: nothing checks that this loss is what the run trains"
    if settings.receipt == "warn":
        return "warns if the first rollout batch trains another loss"
    always = "stops the run if the first rollout batch trains another loss"
    if settings.receipt == "stop" or not record.untested:
        return always
    return f"{always}; its checks of the engine, which no test has run, only warn"


def differences(settings: Settings, record: RunRecord, of_group: dict[str, Any]) -> dict[str, str]:
    """Returns the parameters that differ from the group, each with both values and, if verl's key set it, this key."""
    values = {**vars(settings), **vars(settings.method)}
    changes = {}
    for parameter in (*dataclasses.fields(settings.method), *dataclasses.fields(settings)):
        name = parameter.name
        value = values[parameter.name]
        source = ""
        before = of_group.get(name, parameter.default)
        if name in ("method", "trace", "paper_loss_agg_mode", "hold") or value == before:
            continue
        if taken := record.loss.taken.get(name):
            source = f"; from {keys.ACTOR}.{taken['key']}={written(taken['given'])}"
        elif name == "compile" and value is False and record.loss.uncompiled_by:
            source = f"; from {record.loss.uncompiled_by}=False"
        elif name in settings.method.solved_parameters:
            source = f"; not used, {NODE}.hold solves for the bounds"
        changes[name] = f"{name}={shown(value)} (group: {shown(before)}{source}{unusual(parameter, value)})"
    return changes


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
