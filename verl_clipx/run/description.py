"""A run in words: its loss, settings, bounds, updates, ratio, averages, what verl adds, cost, files, what stops it.

A run is described once, when it is resolved. The line that driver and workers print, the record and the rows of
`clipx explain` are three ways to print this description.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from verl_clipx.base.method import NODE
from verl_clipx.base.refusal import written
from verl_clipx.modifiers.pull import Pull
from verl_clipx.run.config import Observe, Settings
from verl_clipx.run.explain import NOTHING_STOPS
from verl_clipx.run.facts import RunFacts
from verl_clipx.run.groups import OBSERVE
from verl_clipx.run.keys import (
    ACTOR,
    BYPASS,
    CALCULATE_LOG_PROBS,
    LOSS_AGG_MODE,
    MINI_BATCH,
    RESPONSES,
    ROLLOUT_IS,
    ROLLOUT_RS,
    TEMPERATURE,
    WITH_ROLLOUT_IS,
    WITH_ROLLOUT_RS,
    distillation_term,
    log_prob_mismatch,
    ratio_to_the_rollout_policy,
)
from verl_clipx.run.method_in_words import (
    bounds_of,
    cost,
    differences,
    limits_in_words,
    mask_in_words,
    of_receipt,
    risk,
    settings_of,
    shown,
)

# Which tokens the statistics behind the bounds are of.
SCOPES = {
    "mini_batch": "statistics of all tokens of an update, on all ranks",
    "lagged": "statistics of the same update of the rollout batch before",
    "micro_batch": "statistics of each micro-batch by itself",
}
# Of verl's own losses, the plugin knows only of vanilla what limits it.
IF_IT_CLIPS = "clipping, if this loss clips,"
UNCONSTRAINED = ", unconstrained_weight: F may be 0 or less at ratio 1, or change with the size of A"
# How a paper averages, by the mode that its method's group names.
AVERAGES = {"token-mean": "averages over all tokens", "seq-mean-token-mean": "averages each sequence first"}
# What corrects stale samples, each in one line.
REMEDIES = (
    f"{ROLLOUT_IS}=token {ROLLOUT_IS}_threshold=2 {CALCULATE_LOG_PROBS}=true (truncated weights), or {BYPASS}=true "
    f"{CALCULATE_LOG_PROBS}=true (the ratio is then to the policy that sampled)"
)


WAY_BACK = (
    "without +clipx and the keys under clipx, the same command resumes its checkpoints under verl's own loss, which "
    "reads none of the plugin's files"
)


@dataclass(frozen=True)
class Description:
    """What a run would train, what it would cost and write, and what stops it.

    Args:
        line: the line that the run prints; None if the plugin has no part in it, or it stops.
        taken: from parameters of the method to verl's key and value that they take over.
        unused: from clip keys of verl's that the method does not read to their values.
        tested: from untested options that are a key and its value to the values that tests have run.
        stops: what stops the run, in sentences; the other texts are those of the rows of `text`.
        arguments: the overrides that the trainer was given; None if Hydra did not read them, or for a sweep.
    """

    loss: str
    loss_mode: str | None = None
    of_the_plugin: bool = False
    line: str | None = None
    settings: str | None = None
    bounds: str | None = None
    updates: str | None = None
    ratio: str | None = None
    averages: str | None = None
    of_verl: list[str] = field(default_factory=list)
    taken: dict[str, str] = field(default_factory=dict)
    unused: dict[str, Any] = field(default_factory=dict)
    uncorrected: str | None = None
    cut: str | None = None
    untested: list[str] = field(default_factory=list)
    tested: dict[str, list[str]] = field(default_factory=dict)
    has_run_on: str | None = None
    risk: str | None = None
    mask: str | None = None
    cost: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    traces: str | None = None
    way_back: str | None = None
    receipt: str | None = None
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
        rows = {
            "settings": self.settings,
            "takes over": f"{taken}; remove the key to keep the group's value" if taken else "",
            "does not read": of_verls(self.unused),
            "bounds": self.bounds,
            "risk": self.risk,
            "updates": self.updates,
            "ratio": self.ratio,
            "averages": self.averages,
            "verl adds": ", ".join(self.of_verl),
            "samples": self.uncorrected,
            "mask": self.mask,
            "responses": self.cut,
            "costs": self.cost,
            "writes": ", ".join(f"{where} ({what})" for what, where in self.files.items()),
            "traces": self.traces,
            "way back": self.way_back,
            "receipt": self.receipt,
            "no test has run": ", ".join(
                f"{option} (tests have run {' and '.join(tested)})" if (tested := self.tested.get(option)) else option
                for option in self.untested
            ),
            "has run on": self.has_run_on,
        }
        lines = [self.loss, *(f"  {head}: {text}" for head, text in rows.items() if text)]
        return lines + ([f"stops: {why}" for why in self.stops] or [NOTHING_STOPS])


def describe(loss_mode: str, settings: Settings | Observe, run: RunFacts) -> Description:
    """Describes a run of the plugin's, as far as its settings and facts go without the rest of its configuration."""
    term, mismatch = distillation_term(run.options), log_prob_mismatch(run.options)
    to_sampler = ratio_to_the_rollout_policy(run.options, settings)
    source, added, biased = source_of_old_log_probs(run), corrections(run, settings), None
    if mismatch is not None and run.rollout_log_probs:
        which = "" if to_sampler else ", which only metrics use,"
        biased = f"ratios to the rollout policy{which} are biased by {mismatch}: {mismatch.effect}"
    missing = "not corrected for the samples' staleness and for the rollout engine"
    # A pull to the sampler corrects nothing.
    missing *= run.trains_on_stale_samples and (not to_sampler or to_sampler.startswith(Pull.node))
    # verl stops a run without these keys, and a configuration that nobody starts needs none of them.
    untested = [option for option in run.untested if not option.endswith("=None")]
    unused = {key.removeprefix(f"{ACTOR}."): value for key, value in run.unused.items()}
    common = {
        "averages": averages(run, settings),
        "of_verl": [*added, *filter(None, [term, biased])],
        "uncorrected": f"{missing}. Add {REMEDIES}" if missing else None,
        "untested": untested,
    }
    if not settings.trains:
        to, acting, of_row, at_one = None, IF_IT_CLIPS, "clipping" if loss_mode == "vanilla" else IF_IT_CLIPS, ""
        loss = f"verl's own loss {loss_mode}, observed (+{NODE}={OBSERVE})"
        of_rows = {"loss": f"{loss_mode}, verl's own loss, observed (+{NODE}={OBSERVE})", "cost": "metrics only"}
    else:
        method = settings.method
        limit, acting, at_one = limits_in_words(method)
        of_row, is_to_sampler = acting, run.bypass or method.ratio_to_sampler
        to = f"to the policy {'that sampled' if is_to_sampler else 'of old_log_probs'}"
        name = f"{NODE}_{method.name}" + f" (+{NODE}={run.group})" * bool(run.group)
        scope = f"scope {settings.scope}"
        holds = f"holds {method.held_target}, " if settings.hold is not None else ""
        differing = ", ".join(differences(settings, run)) or "every parameter as in its group"
        loss = f"{name}, {holds}{scope if settings.adaptive else limit}, {differing}"
        loss += UNCONSTRAINED * bool(method.unconstrained_weight)
        of_rows = {
            "loss": f"{name}, {scope}: {SCOPES[settings.scope]}" if settings.adaptive else name,
            "settings": settings_of(settings, run),
            "bounds": bounds_of(method),
            "ratio": f"{to}, which {source}" if to.endswith("old_log_probs") else f"{to}; old_log_probs {source}",
            "taken": {parameter: f"{of['key']}={written(of['given'])}" for parameter, of in run.taken.items()},
            "unused": unused,
            "risk": risk(settings, run),
            "mask": mask_in_words(settings, to),
            "cost": cost(settings, run),
            "way_back": WAY_BACK,
            "receipt": of_receipt(settings, run),
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
        f"{updates(run, acting, at_one)}{traced(settings)}",
    ]
    made = updates(run, of_row, at_one, in_full=True)
    described = Description(loss_mode=loss_mode, of_the_plugin=True, updates=made, **of_rows, **common)
    return dataclasses.replace(described, line="; ".join(filter(None, line)))


def of_verls(unused: dict[str, Any]) -> str:
    """Returns keys of verl's with their values, for a reader."""
    return f"verl's {', '.join(f'{key}={written(value)}' for key, value in unused.items())}" if unused else ""


def averages(run: RunFacts, settings: Settings | Observe) -> str:
    """Returns verl's aggregation mode and, if it differs, the paper's."""
    if not settings.trains:
        # Some of verl's own losses, such as its sapo, average in their own way.
        return f"{run.loss_agg_mode}, if this loss follows it"
    paper = settings.paper_loss_agg_mode
    if paper in (None, run.loss_agg_mode):
        return run.loss_agg_mode
    return f"{run.loss_agg_mode} (the paper {AVERAGES[paper]}; set {LOSS_AGG_MODE}={paper} for that)"


def corrections(run: RunFacts, settings: Settings | Observe) -> list[str]:
    """Returns the corrections of the samples' weights, mask and probabilities."""
    applied, temperature = [], run.options.get(TEMPERATURE)
    for key, others in ((ROLLOUT_IS, WITH_ROLLOUT_IS), (ROLLOUT_RS, WITH_ROLLOUT_RS)):
        # In bypass mode verl's trainers apply neither, and only the plugin's losses reject.
        if run.options.get(key) is not None and not (run.bypass and (not settings.trains or key == ROLLOUT_IS)):
            threshold, *normalised = (run.options.get(other) for other in others)
            over = ", normalised over the batch" if any(normalised) else ""
            by = " by the current weights" * run.bypass
            applied.append(f"{key.rpartition('.')[2]}={run.options[key]}{by} (threshold {shown(threshold)}{over})")
    corrected = [f"rollout correction {', '.join(applied)}"] if applied else []
    return corrected + ([] if temperature in (None, 1) else [f"log-probabilities at temperature {shown(temperature)}"])


def source_of_old_log_probs(run: RunFacts) -> str:
    """Returns where verl's trainer gets old_log_probs from."""
    if run.bypass:
        return "are the rollout's own (bypass_mode)"
    if run.schedule.starts_at_ratio_one:
        return "are recomputed with the weights at the start of a rollout batch's first update"
    if run.mini_batches_at_once or (run.uses_v1 and run.trainer_mode == "separate_async"):
        return "are recomputed with the weights that the rollout last received"
    return "are the trainer's"


def updates(run: RunFacts, acting: str, at_one: str = "", *, in_full: bool = False) -> str:
    """Returns the number of updates per rollout batch, and whether limits can act.

    Args:
        acting, at_one: as of `limits_in_words`.
        in_full: whether the responses of each update, and the steps without any, are named too.
    """
    schedule, mini_batch, responses = run.schedule, run.options.get(MINI_BATCH), run.options.get(RESPONSES)
    size = f" of {mini_batch} prompts x {responses} response{'s' * (responses > 1)}" if mini_batch and responses else ""
    warmup = f"; steps before {run.critic_warmup} update only the critic" * (in_full and run.critic_warmup > 1)
    if schedule.updates is None:
        return f"an unknown number of updates per rollout batch{warmup}"
    number = f"{schedule.updates} update{'s' * (schedule.updates != 1)}{size * in_full} per rollout batch"
    number += " and pass of Lopti" * (len(schedule.passes) == 2)
    if schedule.only_at_ratio_one and not at_one:
        several = f"to make several updates, set {MINI_BATCH} below data.train_batch_size"
        return f"{number}, at ratio 1: {acting or 'clipping'} cannot act ({several}){warmup}"
    can_act = at_one if schedule.only_at_ratio_one else acting
    return f"{number}: {f'{can_act} can act' if can_act else 'nothing clips'}{warmup}"


def traced(settings: Settings | Observe) -> str:
    """Returns what is traced, and to which folder, after a semicolon; empty if nothing is traced."""
    trace = settings.trace
    if trace is None:
        return ""
    batches = "every rollout batch" if trace.every == 1 else f"one of {trace.every} rollout batches"
    return f"; {100 * trace.fraction:g} % of the prompts traced in {batches}, to {trace.folder}"
