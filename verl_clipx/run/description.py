"""A run in words: its loss, settings, bounds, updates, ratio, averages, what verl adds, cost, files, what stops it.

A run is described once, when it is resolved. The driver and the workers print the description as a line, which the
record keeps, and `clipx explain` prints it in rows.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from verl_clipx.losses.base.method import NODE, Method
from verl_clipx.losses.base.parameters import BESIDE, GUARD, HIGH, LOW
from verl_clipx.losses.base.refusal import format_exactly
from verl_clipx.losses.groups import OBSERVE, SWAP_GUARD, own_settings
from verl_clipx.run import keys
from verl_clipx.run.config import Observe, Settings
from verl_clipx.run.explain import NOTHING_STOPS
from verl_clipx.run.record import RunRecord, Terms
from verl_clipx.run.support import read_costs
from verl_clipx.run.trainer import FULLY_ASYNC, SEPARATE

# By scope, the tokens that the statistics behind the bounds are computed from.
SCOPES = {
    "mini_batch": "statistics of all tokens of an update, on all ranks",
    "lagged": "statistics of the same update of the rollout batch before",
    "micro_batch": "statistics of each micro-batch by itself",
}
# Parameters that change how a loss is computed or watched, and not what is trained.
NOT_TRAINED = ("compile", "receipt", "log", "health", "missing_state")
# What may act on tokens under a loss of verl's other than vanilla. The plugin does not know what limits such a loss.
IF_IT_CLIPS = "clipping, if this loss clips,"
UNCONSTRAINED = ", unconstrained_weight: F may be 0 or less at ratio 1, or change with the size of A"
# How a paper averages over tokens, by the value of verl's loss_agg_mode that does the same.
AVERAGES = {"token-mean": "averages over all tokens", "seq-mean-token-mean": "averages each sequence first"}
# The settings that a user can add to correct for stale samples.
REMEDIES = (
    f"{keys.ROLLOUT_IS}=token {keys.ROLLOUT_IS}_threshold=2 {keys.CALCULATE_LOG_PROBS}=true (truncated weights), or "
    f"{keys.BYPASS}=true {keys.CALCULATE_LOG_PROBS}=true (the ratio is then to the policy that sampled)"
)
WAY_BACK = (
    "without +clipx and the keys under clipx, the same command resumes its checkpoints under verl's own loss, which "
    "reads none of the plugin's files"
)

# The headings of the rows in which fields of `Description` are printed. Other fields have their names as headings.
HEADINGS = {
    "taken": "takes over",
    "unused": "does not read",
    "of_verl": "verl adds",
    "uncorrected": "samples",
    "cut": "responses",
    "uncounted": "machines",
    "cost": "costs",
    "files": "writes",
    "way_back": "way back",
    "extra_pass": "the extra pass",
    "sequence_weights": "weights",
    "untested": "no test has run",
    "has_run_on": "has run on",
    "without_plugin": "without the plugin",
}
# The fields that are not printed as rows.
WITHOUT_ROW = ("loss", "loss_mode", "of_the_plugin", "line", "tested", "stops", "arguments")


@dataclass(frozen=True)
class Description:
    """The loss that a run would train, its cost, the files that it would write, and the reasons that stop it.

    A field that is not named below is the text of a row of `text`, or its parts. None, or an empty field, is no row.

    Args:
        loss: the first line of `text`: the name of the loss, and perhaps a remark.
        loss_mode: verl's name of the loss; None if nothing trains a policy loss.
        of_the_plugin: whether the plugin has a part in the run.
        line: the line that the run prints; None if the plugin has no part in the run, or the run is refused.
        taken: by parameter of the method, the clip key of verl's whose value it took over, as key=value.
        unused: by clip key of verl's, the values of those that are set and that the method does not read.
        untested: the run's options that no test has run, by name or as key=value.
        tested: by untested option, as key=value, the values of this key that tests have run.
        without_plugin: what a verl without the plugin does with the same overrides; None without a group of the
            plugin's, or if the overrides are unknown.
        stops: what stops the run, in sentences.
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
        """Return the description in lines: the loss, a row for each field, and what stops the run."""
        text_by_field = {
            **vars(self),
            "taken": self._describe_taken(),
            "unused": describe_keys(self.unused),
            "of_verl": ", ".join(self.of_verl),
            "files": ", ".join(f"{path} ({content})" for content, path in self.files.items()),
            "untested": ", ".join(self._describe_option(option) for option in self.untested),
        }
        lines = [self.loss]
        for name, text in text_by_field.items():
            if text and name not in WITHOUT_ROW:
                lines.append(f"  {HEADINGS.get(name, name)}: {text}")
        if self.stops:
            lines += [f"stops: {reason}" for reason in self.stops]
        else:
            lines.append(NOTHING_STOPS)
        return lines

    def _describe_taken(self) -> str:
        """Return which keys of verl's became which parameters; empty if none did."""
        if not self.taken:
            return ""
        parameters_by_setting: dict[str, list[str]] = {}
        for parameter, setting in self.taken.items():
            parameters_by_setting.setdefault(setting, []).append(f"{NODE}.{parameter}")
        parts = [f"verl's {setting} as {' and '.join(names)}" for setting, names in parameters_by_setting.items()]
        return f"{', '.join(parts)}; remove the key to keep the group's value"

    def _describe_option(self, option: str) -> str:
        """Return an untested option, with the values that tests have run in place of its own."""
        tested_values = self.tested.get(option)
        if not tested_values:
            return option
        return f"{option} (tests have run {' and '.join(tested_values)})"


class LossInWords(NamedTuple):
    """What a description says of the loss itself: of a method of the plugin, or of a loss of verl's that is observed.

    Attributes:
        in_line: the beginning of the run's line.
        ratio_reference: the policy that the loss's ratio refers to, after "ratio"; None for a loss of verl's, for which
            it is unknown.
        acts_in_line: what can act on tokens whose ratio is not 1, in the words of the line; empty if nothing can.
        acts_in_row: the same in the words of the row "updates".
        acts_at_ratio_one: what can act on tokens whose ratio is 1; empty if nothing can.
        fields: those fields of `Description` that depend on the kind of loss.
    """

    in_line: str
    ratio_reference: str | None
    acts_in_line: str
    acts_in_row: str
    acts_at_ratio_one: str
    fields: dict[str, Any]


def describe(loss_mode: str, settings: Settings | Observe, record: RunRecord) -> Description:
    """Describe a run in which the plugin has a part, from what is known before the run starts.

    `clipx explain` fills in the other fields, which need verl's whole configuration, such as the files and the stops.

    Args:
        loss_mode: verl's name of the loss.
        settings: the clipx node, complete: with the values that were taken over from verl's keys.
        record: the run's record, still without its line.
    """
    unused = {key.removeprefix(f"{keys.ACTOR}."): value for key, value in record.loss.unused.items()}
    if settings.trains:
        loss = describe_method(loss_mode, settings, record, unused)
    else:
        loss = describe_observed_loss(loss_mode)
    averaging = describe_averaging(record, settings)
    corrections = describe_corrections(record, settings)
    distillation = describe_distillation(record.terms)
    uncorrected = describe_uncorrected_samples(record, settings)
    bias = describe_bias_of_ratios(record, settings)
    # An option "key=None" is a key without a value. verl stops a run that lacks it, so there is nothing to warn of.
    untested = [option for option in record.untested if not option.endswith("=None")]
    # None stands for a part that this run does not have.
    line = [
        f"clipx: {loss.in_line}",
        f"{describe_keys(unused)} not used" if unused else None,
        distillation,
        f"loss_agg_mode {averaging}",
        *corrections,
        uncorrected,
        bias,
        f"no test has run {', '.join(untested)}" if untested else None,
        None if loss.ratio_reference is None else f"ratio {loss.ratio_reference}",
        f"old_log_probs {describe_old_log_probs(record)}",
        describe_updates(record, loss.acts_in_line, loss.acts_at_ratio_one),
        describe_trace(settings),
    ]
    return Description(
        loss_mode=loss_mode,
        of_the_plugin=True,
        line="; ".join(part for part in line if part is not None),
        updates=describe_updates(record, loss.acts_in_row, loss.acts_at_ratio_one, in_full=True),
        averages=averaging,
        of_verl=[part for part in (*corrections, distillation, bias) if part is not None],
        uncorrected=None if uncorrected is None else f"{uncorrected}. Add {REMEDIES}",
        untested=untested,
        **loss.fields,
    )


def describe_observed_loss(loss_mode: str) -> LossInWords:
    """Describe a loss of verl's that +clipx=observe leaves as it is."""
    return LossInWords(
        in_line=f"verl's own loss {loss_mode}, observed (+{NODE}={OBSERVE})",
        ratio_reference=None,
        acts_in_line=IF_IT_CLIPS,
        acts_in_row="clipping" if loss_mode == "vanilla" else IF_IT_CLIPS,
        acts_at_ratio_one="",
        fields={
            "loss": f"{loss_mode}, verl's own loss, observed (+{NODE}={OBSERVE})",
            "cost": "metrics only",
        },
    )


def describe_method(loss_mode: str, settings: Settings, record: RunRecord, unused: dict[str, Any]) -> LossInWords:
    """Describe the loss of a run that trains a method of the plugin.

    Args:
        loss_mode, settings, record: as for `describe`.
        unused: the values of the clip keys of verl's that are set and that the method does not read, by the keys' names
            below the actor.
    """
    method = settings.method
    group = record.loss.group
    limits = describe_limits(method)
    name = f"{NODE}_{method.name}"
    if group:
        name += f" (+{NODE}={group})"

    # The line has both values of each parameter that differs from the group. The row "settings" has all parameters.
    group_values = own_settings(group or loss_mode.removeprefix(f"{NODE}_"))
    differences = describe_differences(settings, record, group_values)
    in_line = [name]
    if settings.hold is not None:
        in_line.append(f"holds {method.held_target}")
    in_line.append(f"scope {settings.scope}" if settings.adaptive else limits.limit)
    in_line += differences.values() or ["every parameter as in its group"]
    unconstrained = UNCONSTRAINED if method.unconstrained_weight else ""

    source = describe_old_log_probs(record)
    if record.correction.bypass or method.ratio_to_sampler:
        ratio_reference = "to the policy that sampled"
        ratio = f"{ratio_reference}; old_log_probs {source}"
    else:
        ratio_reference = "to the policy of old_log_probs"
        ratio = f"{ratio_reference}, which {source}"
    taken = {}
    for parameter, verl_key in record.loss.taken.items():
        taken[parameter] = f"{verl_key['key']}={format_exactly(verl_key['given'])}"
    return LossInWords(
        in_line=f"{', '.join(in_line)}{unconstrained}",
        ratio_reference=ratio_reference,
        acts_in_line=limits.acts,
        acts_in_row=limits.acts,
        acts_at_ratio_one=limits.acts_at_ratio_one,
        fields={
            "loss": f"{name}, scope {settings.scope}: {SCOPES[settings.scope]}" if settings.adaptive else name,
            "settings": describe_parameters(settings, group, differences),
            "bounds": describe_bounds(method),
            "ratio": ratio,
            "taken": taken,
            "unused": unused,
            "risk": warn_of_no_lower_bound(settings, record),
            "mask": describe_mask(settings, ratio_reference),
            "cost": describe_cost(settings, record),
            "way_back": WAY_BACK,
            "receipt": describe_receipt(settings, record),
        },
    )


def describe_uncorrected_samples(record: RunRecord, settings: Settings | Observe) -> str | None:
    """Return the remark that nothing corrects for stale samples, nor for the difference of rollout engine and trainer.

    Returns:
        The remark; None if samples cannot be stale, or if the run corrects for the policy that sampled.
    """
    if not record.trainer.stale or keys.corrects_for_sampler(record.correction, settings):
        return None
    return "corrected neither for stale samples nor for the rollout engine"


def describe_bias_of_ratios(record: RunRecord, settings: Settings | Observe) -> str | None:
    """Return the remark that sampling settings bias the ratios to the rollout policy.

    Returns:
        The remark; None if no setting does so, or if the server returns no log-probabilities for such ratios.
    """
    mismatch = keys.find_log_prob_mismatch(record.sampling, record.rollout.name)
    if mismatch is None or not record.sampling.returns_log_probs:
        return None
    # Without such a setting the loss has no ratio to the rollout policy.
    use = "" if keys.find_ratio_to_sampler(record.correction, settings) else ", which only metrics use,"
    return f"ratios to the rollout policy{use} are biased by {mismatch}: {mismatch.effect}"


def describe_without_plugin(overrides: Sequence[str]) -> str | None:
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


def describe_keys(values: dict[str, Any]) -> str:
    """Return keys of verl's, by their names below the actor, with their values; empty if there are none."""
    if not values:
        return ""
    return f"verl's {', '.join(f'{key}={format_exactly(value)}' for key, value in values.items())}"


def describe_distillation(terms: Terms) -> str | None:
    """Return the term that verl adds to the policy loss under distillation with task rewards; None without it."""
    if not terms.distillation:
        return None
    coefficient = terms.distillation_coefficient
    return f"verl's distillation loss {terms.distillation_kind} is added to it with coefficient {coefficient}"


def describe_averaging(record: RunRecord, settings: Settings | Observe) -> str:
    """Return verl's aggregation mode and, if the paper averages in another way, the paper's."""
    mode = record.aggregation_mode
    if not settings.trains:
        # Some of verl's own losses, such as its sapo, average in their own way.
        return f"{format_value(mode)}, if this loss follows it"
    paper = settings.paper_loss_agg_mode
    if paper in (None, mode):
        return mode
    return f"{format_value(mode)} (the paper {AVERAGES[paper]}; set {keys.LOSS_AGG_MODE}={paper} for that)"


def describe_corrections(record: RunRecord, settings: Settings | Observe) -> list[str]:
    """Return a text on verl's rollout correction, if it acts, and one on the temperature, if it is not 1."""
    correction = record.correction
    temperature = record.sampling.temperature
    weights_and_rejection = []
    # In bypass mode verl's trainers do not weigh samples.
    if correction.weights is not None and not correction.bypass:
        normalised = ", normalised over the batch" if correction.weights_normalised else ""
        threshold = format_value(correction.weights_threshold)
        weights_and_rejection.append(f"rollout_is={correction.weights} (threshold {threshold}{normalised})")
    # In bypass mode verl's trainers do not reject samples: a method of the plugin does, and an observed loss does not.
    if correction.rejection is not None and (settings.trains or not correction.bypass):
        by_loss = " in the loss, by the current policy" if correction.bypass else ""
        threshold = format_value(correction.rejection_threshold)
        weights_and_rejection.append(f"rollout_rs={correction.rejection}{by_loss} (threshold {threshold})")
    texts = []
    if weights_and_rejection:
        texts.append(f"rollout correction {', '.join(weights_and_rejection)}")
    if temperature not in (None, 1):
        texts.append(f"log-probabilities at temperature {format_value(temperature)}")
    return texts


def describe_old_log_probs(record: RunRecord) -> str:
    """Return where verl's trainer gets old_log_probs from, as a sentence whose subject, old_log_probs, is left out."""
    if record.correction.bypass:
        return "are the rollout's own (bypass_mode)"
    if record.trainer.recomputes_old:
        return "are recomputed with the weights at the start of a rollout batch's first update"
    if record.trainer.kind in (FULLY_ASYNC, SEPARATE):
        return "are recomputed with the weights that the rollout last received"
    return "are the trainer's"


def describe_updates(record: RunRecord, acts: str, acts_at_ratio_one: str = "", *, in_full: bool = False) -> str:
    """Return the number of updates per rollout batch, and whether limits can act.

    Args:
        record: the record of the run.
        acts: what can act on tokens whose ratio is not 1; empty if nothing can.
        acts_at_ratio_one: what can act on tokens whose ratio is 1; empty if nothing can.
        in_full: whether to add the responses of an update, and the steps that train only the critic.
    """
    schedule = record.schedule
    size = ""
    warmup = ""
    if in_full:
        mini_batch = record.batch.mini_batch
        responses = record.batch.responses
        first_step_of_policy = record.length.critic_warmup or 0
        if mini_batch and responses:
            noun = "response" if responses == 1 else "responses"
            size = f" of {mini_batch} prompts x {responses} {noun}"
        if first_step_of_policy > 1:
            warmup = f"; steps before {first_step_of_policy} update only the critic"
    if schedule.updates is None:
        return f"an unknown number of updates per rollout batch{warmup}"
    noun = "update" if schedule.updates == 1 else "updates"
    number = f"{schedule.updates} {noun}{size} per rollout batch"
    if len(schedule.passes) == 2:
        number += " and pass of Lopti"
    if schedule.only_at_ratio_one and not acts_at_ratio_one:
        advice = f"to make several updates, set {keys.MINI_BATCH} below data.train_batch_size"
        nothing_acts = f"{acts or 'clipping'} has nothing else to act on"
        return f"{number}, at ratio 1 but for rounding: {nothing_acts} ({advice}){warmup}"
    acts_in_run = acts_at_ratio_one if schedule.only_at_ratio_one else acts
    if not acts_in_run:
        return f"{number}: nothing clips{warmup}"
    return f"{number}: {acts_in_run} can act{warmup}"


def describe_trace(settings: Settings | Observe) -> str | None:
    """Return what is traced, and to which folder; None if nothing is traced."""
    trace = settings.trace
    if trace is None:
        return None
    batches = "every rollout batch" if trace.every == 1 else f"one of {trace.every} rollout batches"
    return f"{100 * trace.fraction:g} % of the prompts traced in {batches}, to {trace.folder}"


class WeightLimits(NamedTuple):
    """What limits a method's gradient weight, in words.

    Attributes:
        limit: the kind of limit, such as "fixed bounds" or "a soft gate and no bounds".
        acts: what can act on tokens whose ratio is not 1; empty if nothing can.
        acts_at_ratio_one: what can act on tokens whose ratio to the policy of old_log_probs is 1; empty if nothing can.
    """

    limit: str
    acts: str
    acts_at_ratio_one: str


def describe_limits(method: Method) -> WeightLimits:
    """Return what limits a method's gradient weight: bounds, or else what shapes the weight, or else other limits."""
    roles = method.limits.values()
    # Roles that are not constants are nouns, such as "soft gate". A noun occurs once, however many parameters have it.
    shape = " and ".join(dict.fromkeys(role for role in roles if role not in (LOW, HIGH, BESIDE)))
    other_limits = " and ".join(name for name, role in method.limits.items() if role == BESIDE)
    bounded_quantity = ""
    if method.bounds_on != "ratio":
        bounded_quantity = f" on the {method.bounds_on.format(**method.parameters)}"
    if LOW in roles or HIGH in roles:
        limit = f"fixed bounds{bounded_quantity}"
        acts = "clipping"
    elif not method.declares_limits:
        # Only the code of its weight knows whether there is one.
        limit = "no bounds"
        acts = "a limit inside the gradient weight"
    elif computes_bounds(method):
        limit = f"bounds of its own{bounded_quantity}"
        acts = "clipping"
    elif shape:
        limit = f"a {shape} and no bounds"
        acts = f"the {shape}"
    elif other_limits:
        limit = f"no bounds but {other_limits}"
        acts = other_limits
    else:
        limit = "no bounds"
        acts = ""
    if not method.acts_at_ratio_one:
        acts_at_ratio_one = ""
    elif shape and not method.ratio_to_sampler:
        acts_at_ratio_one = f"the {shape}"
    else:
        # The ratio that is limited is to another policy, or only the code of the weight knows what acts.
        acts_at_ratio_one = acts
    return WeightLimits(limit, acts, acts_at_ratio_one)


def computes_bounds(method: Method) -> bool:
    """Return whether a method computes its bounds from the tokens, and has no parameters for them.

    This is so if clipx.hold holds a target, or if the roles of the method's parameters name neither a bound nor what
    shapes the weight.

    Args:
        method: a method that declares its limits (`Method.declares_limits`).
    """
    return bool(method.solved_parameters) or set(method.roles.values()) <= {BESIDE}


def describe_bounds(method: Method) -> str:
    """Return a method's bounds and its other limits, with the values of its parameters."""
    values = {}
    for name, value in method.parameters.items():
        values[name] = "∞" if value is None else format_value(value)
    names_by_role: dict[str, list[str]] = {}
    for name, role in method.limits.items():
        names_by_role.setdefault(role, []).append(name)
    low = [values[name] for name in names_by_role.pop(LOW, [])]
    high = [values[name] for name in names_by_role.pop(HIGH, [])]
    other_limits = names_by_role.pop(BESIDE, [])
    declares_bounds = LOW in method.roles.values() or HIGH in method.roles.values()
    if method.formula:
        lower, upper, *equations = method.formula
        symbols = method.symbols
        if method.solved_parameters:
            symbols = "the width that holds {hold}"
        if symbols:
            equations.append(symbols)
        text = ", ".join([f"{method.bounds_on} {describe_interval(lower or None, upper)}", *equations])
        parts = [text.format(**values)]
    elif declares_bounds:
        interval = describe_interval(low[0] if low else None, high[0] if high else None)
        parts = [f"{method.bounds_on} {interval}"]
    elif method.declares_limits and computes_bounds(method):
        parts = ["bounds of its own"]
    else:
        parts = ["no bounds"]
    for role, names in names_by_role.items():
        parts.append(f"{role}: {', '.join(f'{name} {values[name]}' for name in names)}")
    parts += [f"{name} {values[name]}" for name in other_limits]
    return "; ".join(parts)


def describe_interval(low: Any, high: Any) -> str:
    """Return the interval between two bounds in words. A bound that is None does not exist."""
    if low is None and high is None:
        return "without bounds"
    if low is None:
        return f"up to {format_value(high)}"
    if high is None:
        return f"from {format_value(low)}"
    return f"{format_value(low)} to {format_value(high)}"


def describe_parameters(settings: Settings, group: str | None, differences: dict[str, str]) -> str:
    """Return a method's parameters and whose values they are, as in `alpha 3, epsilon_base 0.2, 5 bins: the paper's`.

    Args:
        settings: the run's clipx node.
        group: the group that was chosen; None if unknown.
        differences: the parameters that differ from the group, as `describe_differences` returns them.
    """
    method = settings.method
    guards = {field.name for field in dataclasses.fields(method) if field.metadata.get("role") == GUARD}
    parameters = []
    for name, value in method.parameters.items():
        if name in guards or isinstance(value, bool | str) or not value:
            continue
        is_count = isinstance(value, int) and name.endswith("s")
        parameters.append(f"{format_value(value)} {name}" if is_count else f"{name} {format_value(value)}")
    changes = []
    if settings.hold is not None:
        changes.append(f"bounds that hold {method.held_target}")
    for name, text in differences.items():
        if name not in (*NOT_TRAINED, *method.solved_parameters):
            changes.append(text)
    if not group:
        origin = "its defaults"
    elif group == "custom" or not own_settings(group):
        origin = "its group's"
    elif group.endswith("_reference"):
        origin = "the released code's"
    else:
        origin = "the paper's"
    # Such as "the paper's but for alpha=2 (group: 3)".
    if changes:
        origin += f" but for {', '.join(changes)}"
    return f"{', '.join(parameters) or 'no parameters'}: {origin}"


def describe_cost(settings: Settings, record: RunRecord) -> str:
    """Return the passes that the loss adds to those of verl's own loss, and their measured share of an update's time.

    If only clipx.scope=mini_batch makes the extra pass necessary, the text names the scope that needs none.
    """
    schedule = record.schedule
    has_second_pass = len(schedule.passes) == 2
    passes = []
    if schedule.extra_passes:
        passes.append(f"one extra forward pass {schedule.extra_passes}")
    if has_second_pass:
        passes.append("a second pass of each update (Lopti)")
    text = " and ".join(passes) or "no extra pass"

    is_due_to_scope = settings.adaptive and settings.scope == "mini_batch" and not schedule.selects_by_pass
    # `Settings` refuses lagged statistics with a second stage. A method that reads the entropy takes a pass anyway.
    can_lag = not schedule.second_stage and "entropy" not in settings.method.asks_for
    if schedule.extra_passes and is_due_to_scope and can_lag:
        text += f"; {NODE}.scope=lagged needs no extra pass"

    # What costs time, with its key among the measured costs.
    key_by_cause = {}
    if schedule.extra_passes == "before each update":
        key_by_cause["the extra pass"] = "mini_batch"
    if settings.adaptive and settings.scope == "lagged":
        key_by_cause[f"{NODE}.scope=lagged"] = "lagged"
    if has_second_pass:
        key_by_cause["Lopti"] = "lopti"
    if key_by_cause:
        costs = read_costs()
        shares = []
        for cause, key in key_by_cause.items():
            share = costs["update_of_vanilla"][key] - 1
            shares.append(f"{100 * share:.0f} % for {cause}")
        text += f"; measured {costs['where']}, of an update's time: {', '.join(shares)} ({costs['source']})"
    return text


def warn_of_no_lower_bound(settings: Settings, record: RunRecord) -> str | None:
    """Return a warning that from some spread of the ratio on the lower bound is 0, so that nothing is clipped below.

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


def describe_mask(settings: Settings, ratio_reference: str) -> str | None:
    """Return what a mask takes out, and by which ratio; None without a mask.

    Args:
        settings: the run's clipx node.
        ratio_reference: the policy to which the clip's ratio refers, in words that follow "ratio".
    """
    mask = settings.mask
    if mask is None:
        return None
    parameters = [f"{field.name} {format_value(getattr(mask, field.name))}" for field in dataclasses.fields(mask)]
    meaning = (type(mask).__doc__ or " ").split("\n")[0].rstrip(".")
    compared = "policy of old_log_probs" if mask.of_old_policy else "current policy"
    return (
        f"{mask.rule} ({', '.join(parameters)}) {meaning[0].lower()}{meaning[1:]}; it compares the {compared} with the "
        f"one that sampled. The clip acts on what is left, by the ratio {ratio_reference}"
    )


def describe_receipt(settings: Settings, record: RunRecord) -> str:
    """Return what happens if the gradient of the first rollout batch is not the announced one."""
    if settings.receipt == "off":
        return "off: nothing checks that this loss is what the run trains"
    if settings.receipt == "warn":
        return "warns if the first rollout batch trains another loss"
    stops = "stops the run if the first rollout batch trains another loss"
    if settings.receipt == "stop" or not record.untested:
        return stops
    return f"{stops}; its checks of the engine, which no test has run, only warn"


def describe_differences(settings: Settings, record: RunRecord, group_values: dict[str, Any]) -> dict[str, str]:
    """Return the parameters that differ from the group, each with both values and where the run's value comes from.

    Args:
        settings: the run's clipx node.
        record: the record of the run.
        group_values: the values that the group sets. A parameter that it does not set is compared with its default.

    Returns:
        By the parameter's name, `name=value` and in brackets the group's value, the key of verl's that set the
        parameter, if one did, and a remark if the value is unusual.
    """
    values = {**vars(settings), **vars(settings.method)}
    differences = {}
    for parameter in (*dataclasses.fields(settings.method), *dataclasses.fields(settings)):
        name = parameter.name
        value = values[name]
        group_value = group_values.get(name, parameter.default)
        if name in ("method", "trace", "paper_loss_agg_mode", "hold") or value == group_value:
            continue
        value_in_words = format_value(value)
        group_value_in_words = format_value(group_value)
        if value_in_words == group_value_in_words:
            # The two numbers differ only after their sixth digit.
            value_in_words = format_exactly(value)
            group_value_in_words = format_exactly(group_value)
        source = ""
        verl_key = record.loss.taken.get(name)
        if verl_key:
            source = f"; from {keys.ACTOR}.{verl_key['key']}={format_exactly(verl_key['given'])}"
        elif name == "compile" and value is False and record.loss.uncompiled_by:
            source = f"; from {record.loss.uncompiled_by}=False"
        elif name in settings.method.solved_parameters:
            source = f"; not used, {NODE}.hold solves for the bounds"
        remark = remark_on_unusual(parameter, value)
        differences[name] = f"{name}={value_in_words} (group: {group_value_in_words}{source}{remark})"
    return differences


def remark_on_unusual(parameter: dataclasses.Field, value: Any) -> str:
    """Return a remark on a value outside its parameter's usual range; empty if there is nothing to remark."""
    usual = parameter.metadata["allowed"].usual
    if usual is None or value is None or usual[0] <= value <= usual[1]:
        return ""
    return f"; unusual, mostly {format_value(usual[0])} to {format_value(usual[1])}"


def format_value(value: Any) -> str:
    """Return a value as text for a reader.

    None and booleans are written as in YAML: null, true, false. A float has at most six significant digits. A
    dataclass, such as a modifier, is written as the name of its class with its parameters in brackets.

    A value that a reader may copy into a command needs all its digits: use `format_exactly` for it.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if dataclasses.is_dataclass(value):
        fields = [f"{field.name}={format_value(getattr(value, field.name))}" for field in dataclasses.fields(value)]
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
