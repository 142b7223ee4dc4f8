"""The announced line: the loss and its limits, what differs from its group, averages, corrections and updates.

It is made once, when the run is resolved; the workers print the same.
"""

import dataclasses
from typing import Any

from verl_clipx.base.method import NODE, Limit
from verl_clipx.base.refusal import written
from verl_clipx.modifiers.hold import solved_parameters
from verl_clipx.run.config import Observe, Settings
from verl_clipx.run.facts import RunFacts
from verl_clipx.run.groups import OBSERVE, group_names, group_settings
from verl_clipx.run.keys import (
    ACTOR,
    BYPASS,
    CALCULATE_LOG_PROBS,
    LOSS_AGG_MODE,
    MINI_BATCH,
    ROLLOUT_IS,
    ROLLOUT_RS,
    TEMPERATURE,
    WITH_ROLLOUT_IS,
    WITH_ROLLOUT_RS,
    distillation_term,
    log_prob_mismatch,
    ratio_to_the_rollout_policy,
)
from verl_clipx.run.schedule import Schedule


def announcement(policy_loss: Any) -> str:
    """One line that says what a run trains, of a `resolve.Resolved` or of what the workers build in its place."""
    settings, run = policy_loss.clipx, policy_loss.run
    observed, always = isinstance(settings, Observe), ""
    if observed:
        loss, limit = f"verl's own loss {policy_loss.loss_mode}, observed (+clipx={OBSERVE})", VERL_LIMIT
    else:
        loss, limit = describe_loss(settings, run), settings.method.what_limits
        always = settings.method.acts_at_ratio_one
    untested_by = ", ".join(untested_options(run))
    unused = ", ".join(f"{key.removeprefix(f'{ACTOR}.')}={written(value)}" for key, value in run.unused.items())
    parts = [
        f"clipx: {loss}",
        unused and f"verl's {unused} not used",
        distillation_term(run.options),
        averages(run, settings),
        *corrections(run, observed=observed),
        uncorrected(run, settings),
        biased_ratios(run, settings),
        untested_by and f"no test has run {untested_by}",
        ratio_to(run, settings),
        f"old_log_probs {source_of_old_log_probs(run)}",
        updates(run.schedule, limit, always=always),
    ]
    return f"{'; '.join(filter(None, parts))}{traced(settings)}"


def describe_loss(settings: Settings, run: RunFacts) -> str:
    """The method, its group, its scope or limit, and the parameters that differ from the group."""
    method = settings.method
    group = f" (+clipx={run.group})" if run.group else ""
    scope = f"scope {settings.scope}" if settings.adaptive else method.what_limits.described
    if settings.hold is not None:
        scope = f"{method.what_limits.described}, {scope}"
    differing = ", ".join(differences(settings, run)) or "every parameter as in its group"
    return f"clipx_{method.name}{group}, {scope}, {differing}{UNCONSTRAINED if method.unconstrained_weight else ''}"


# The plugin does not know what limits verl's own loss.
VERL_LIMIT = Limit("", "clipping, if this loss clips,")

# Announced after the parameters of a method that sets unconstrained_weight.
UNCONSTRAINED = ", unconstrained_weight: F may be 0 or less at ratio 1, or change with the size of A"

# How a paper averages, by the mode that its method's group names.
AVERAGES = {"token-mean": "averages over all tokens", "seq-mean-token-mean": "averages each sequence first"}


def averages(run: RunFacts, settings: Settings | Observe) -> str:
    """verl's aggregation mode and, if it differs, the paper's."""
    mode = f"loss_agg_mode {run.loss_agg_mode}"
    if isinstance(settings, Observe):
        # Some of verl's own losses, such as its sapo, average in their own way.
        return f"{mode}, if this loss follows it"
    paper = settings.paper_loss_agg_mode
    if paper in (None, run.loss_agg_mode):
        return mode
    return f"{mode} (the paper {AVERAGES[paper]}; set {LOSS_AGG_MODE}={paper} for that)"


def corrections(run: RunFacts, *, observed: bool) -> list[str]:
    """The corrections of the samples' weights, mask and probabilities; `observed` is whether verl's loss is trained."""
    applied, temperature = [], run.options.get(TEMPERATURE)
    for key, others in ((ROLLOUT_IS, WITH_ROLLOUT_IS), (ROLLOUT_RS, WITH_ROLLOUT_RS)):
        # In bypass mode verl's trainers apply neither, and only the plugin's losses reject.
        if run.options.get(key) is not None and not (run.bypass and (observed or key == ROLLOUT_IS)):
            threshold, *normalised = (run.options.get(other) for other in others)
            over = ", normalised over the batch" if any(normalised) else ""
            by = " by the current weights" * run.bypass
            applied.append(f"{key.rpartition('.')[2]}={run.options[key]}{by} (threshold {shown(threshold)}{over})")
    corrected = [f"rollout correction {', '.join(applied)}"] if applied else []
    tempered = [] if temperature in (None, 1) else [f"log-probabilities at temperature {shown(temperature)}"]
    return corrected + tempered


def uncorrected(run: RunFacts, settings: Settings | Observe) -> str:
    """That stale samples are trained on without a correction; empty if they are corrected or not stale."""
    if not run.trains_on_stale_samples or ratio_to_the_rollout_policy(run.options, settings):
        return ""
    return "not corrected for the samples' staleness and for the rollout engine"


# What corrects stale samples, each in one line.
REMEDIES = (
    f"{ROLLOUT_IS}=token {ROLLOUT_IS}_threshold=2 {CALCULATE_LOG_PROBS}=true (truncated weights), or {BYPASS}=true "
    f"{CALCULATE_LOG_PROBS}=true (the ratio is then to the policy that sampled)"
)


def ratio_to(run: RunFacts, settings: Settings | Observe) -> str:
    """The policy that the ratio is to, which is what a clip acts on; empty for verl's own losses."""
    if isinstance(settings, Observe):
        return ""
    to_sampler = run.bypass or settings.method.ratio_to_sampler
    return f"ratio to the policy {'that sampled' if to_sampler else 'of old_log_probs'}"


def biased_ratios(run: RunFacts, settings: Settings | Observe) -> str | None:
    """What biases ratios to the rollout policy, if the rollout returns log-probabilities; None if nothing does."""
    mismatch = log_prob_mismatch(run.options) if run.rollout_log_probs else None
    if mismatch is None:
        return None
    which = "" if ratio_to_the_rollout_policy(run.options, settings) else ", which only metrics use,"
    return f"ratios to the rollout policy{which} are biased by {mismatch}: {mismatch.effect}"


def untested_options(run: RunFacts) -> list[str]:
    """Which of the run's options no test has run."""
    # verl stops a run without these keys, and a configuration that nobody starts needs none of them.
    return [option for option in run.untested if not option.endswith("=None")]


def traced(settings: Settings | Observe) -> str:
    """What is traced, and to which folder, after a semicolon; empty if nothing is traced."""
    trace = settings.trace
    if trace is None:
        return ""
    batches = "every rollout batch" if trace.every == 1 else f"one of {trace.every} rollout batches"
    return f"; {100 * trace.fraction:g} % of the prompts traced in {batches}, to {trace.folder}"


def differences(settings: Settings, run: RunFacts) -> list[str]:
    """The parameters that differ from the group, each with both values and, if one of verl's keys set it, this key."""
    changes = []
    for field, value, of_group in changed_parameters(settings, run):
        name, source = field.name, ""
        if taken := run.taken.get(name):
            source = f"; from {ACTOR}.{taken['key']}={written(taken['given'])}"
        elif name == "compile" and value is False and run.uncompiled_by:
            source = f"; from {run.uncompiled_by}=False"
        elif name in solved_parameters(settings.method):
            source = f"; not used, {NODE}.hold solves for the bounds"
        changes.append(f"{name}={shown(value)} (group: {shown(of_group)}{source}{unusual(field, value)})")
    return changes


def changed_parameters(settings: Settings, run: RunFacts) -> list[tuple[dataclasses.Field, Any, Any]]:
    """The parameters that differ from the group: the field, its value, and the group's."""
    name = run.group or settings.method.name
    # A group of the user's own is compared with the defaults.
    group = group_settings(name) if name in group_names() else {}
    of_group = {field.name: group.get(field.name, field.default) for field, _ in values_of(settings)}
    return [
        (field, value, of_group[field.name]) for field, value in values_of(settings) if value != of_group[field.name]
    ]


def unusual(field: dataclasses.Field, value: Any) -> str:
    """A remark on a value outside its usual range, for `differences`; empty if there is nothing to remark."""
    usual = field.metadata["allowed"].usual
    if usual is None or value is None or usual[0] <= value <= usual[1]:
        return ""
    return f"; unusual, mostly {shown(usual[0])} to {shown(usual[1])}"


def values_of(settings: Settings) -> list[tuple[dataclasses.Field, Any]]:
    """Each parameter of a clipx node that changes what is trained, and its value."""
    return [
        (field, getattr(owner, field.name))
        for owner in (settings.method, settings)
        for field in dataclasses.fields(owner)
        if field.name not in ("method", "trace", "paper_loss_agg_mode", "hold")
    ]


def shown(value: Any) -> str:
    """A value as it is written on the command line; a modifier's includes its parameters."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if dataclasses.is_dataclass(value):
        fields = (f"{field.name}={shown(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(fields)})"
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def source_of_old_log_probs(run: RunFacts) -> str:
    """Where verl's trainer gets old_log_probs from."""
    if run.bypass:
        return "are the rollout's own (bypass_mode)"
    if run.schedule.starts_at_ratio_one:
        return "are recomputed with the weights at the start of a rollout batch's first update"
    if run.mini_batches_at_once or (run.uses_v1 and run.trainer_mode == "separate_async"):
        return "are recomputed with the weights that the rollout last received"
    return "are the trainer's"


def updates(schedule: Schedule, limit: Limit, *, always: str = "", size: str = "") -> str:
    """Returns the number of updates per rollout batch, and whether limits can act.

    Args:
        always: `Method.acts_at_ratio_one`.
        size: what follows the word updates, such as " of 32 prompts".
    """
    if schedule.updates is None:
        return "an unknown number of updates per rollout batch"
    number = f"{schedule.updates} update{'' if schedule.updates == 1 else 's'}{size} per rollout batch"
    number += " and pass of Lopti" * (len(schedule.passes) == 2)
    if schedule.only_at_ratio_one:
        if always:
            return f"{number}: {always} can act"
        several = f"to make several updates, set {MINI_BATCH} below data.train_batch_size"
        return f"{number}, at ratio 1: {limit.acting or 'clipping'} cannot act ({several})"
    return f"{number}: {limit.acting} can act" if limit.acting else f"{number}: nothing clips"
