"""Plans the updates on a rollout batch: passes, updates, the tokens behind the bounds, extra passes.

A run's schedule is made once, when its configuration is resolved, and the record keeps it. The worker's planner, the
line, `clipx explain`, the receipt, replay, the page and the papers' presets read it. Importing this is cheap.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_clipx.run import keys
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.run.trainer import trainer_of

if TYPE_CHECKING:
    from verl_clipx.run.config import Observe, Settings

# The names of Lopti's passes over a rollout batch, by `clipx.update.order`.
PASSES = {"low_first": ("low", "high"), "high_first": ("high", "low"), "low_only": ("low",)}


def position(update: int, name: str | None = None) -> str:
    """Return the name of an update within its rollout batch, such as update_0 or low/update_0.

    Args:
        update: the number of the update, from 0.
        name: the name of Lopti's pass; None without Lopti.
    """
    return f"{name}/update_{update}" if name else f"update_{update}"


@dataclass(frozen=True)
class Schedule:
    """The optimizer updates on each rollout batch of a run.

    Args:
        updates: the number of updates in one pass over a rollout batch as the worker gets it; None if unknown.
        batches_a_step: how many rollout batches, as the worker gets them, make one logged step and one weight version.
        passes: the names of Lopti's passes in their order; empty without Lopti, with which there is a single pass.
        starts_at_ratio_one: whether old_log_probs are of the weights that the first update starts from.
        bounds: the tokens that bounds are decided from.
        bounds_of_first: the tokens that the bounds of the first update on a rollout batch are decided from.
        bounds_without_past: the tokens that bounds are decided from under scope=lagged, as long as the same update of
            an earlier rollout batch is not known.
        selects_by_pass: whether each update needs the extra pass because of its entropy selection.
        counts: the numbers of tokens that the ranks add up before an update: "counted" if the loss counts fewer tokens
            than verl, and "selected" if only a selection of the tokens is trained.
        second_stage: whether the statistics behind the bounds have a second stage, which the ranks add up apart.
    """

    updates: int | None = None
    batches_a_step: int = 1
    passes: tuple[str, ...] = ()
    starts_at_ratio_one: bool = False
    bounds: DecidedFrom = DecidedFrom.MICRO_BATCH
    bounds_of_first: DecidedFrom = DecidedFrom.MICRO_BATCH
    bounds_without_past: DecidedFrom = DecidedFrom.MICRO_BATCH
    selects_by_pass: bool = False
    counts: tuple[str, ...] = ()
    second_stage: bool = False

    def __post_init__(self) -> None:
        # A node of a configuration has lists and texts in place of tuples and `DecidedFrom`.
        for name in ("passes", "counts"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("bounds", "bounds_of_first", "bounds_without_past"):
            object.__setattr__(self, name, DecidedFrom(getattr(self, name)))

    @property
    def updates_on_batch(self) -> int | None:
        """Return the number of updates of all passes over a rollout batch as the worker gets it; None if unknown."""
        return self.updates and self.updates * max(len(self.passes), 1)

    @property
    def updates_a_step(self) -> int | None:
        """Return the number of updates of a logged step; None if unknown."""
        return self.updates_on_batch and self.updates_on_batch * self.batches_a_step

    @property
    def only_at_ratio_one(self) -> bool:
        """Return whether each rollout batch gets a single update, which starts at ratio 1."""
        return self.starts_at_ratio_one and self.updates == 1 and len(self.passes) < 2

    def decided_from(self, update: str, *, past: bool = False) -> DecidedFrom:
        """Return the tokens that an update's bounds are decided from.

        Args:
            update: the update's name within its rollout batch, by `position`.
            past: whether the same update of an earlier rollout batch is known.
        """
        if self.bounds is DecidedFrom.LAGGED and not past:
            return self.bounds_without_past
        return self.bounds_of_first if update == position(0) else self.bounds

    def makes_extra_pass(self, update: str, *, past: bool = False) -> bool:
        """Return whether an update is preceded by a pass without gradient over its mini-batch.

        The arguments are those of `decided_from`.
        """
        return self.selects_by_pass or self.decided_from(update, past=past) is DecidedFrom.MINI_BATCH

    @property
    def extra_passes(self) -> str:
        """Return in words which of the updates that the configuration gives have an extra pass; empty if none has."""
        first_pass = self.passes[0] if self.passes else None
        if self.makes_extra_pass(position(0, first_pass), past=True):
            return "before each update"
        if self.bounds is DecidedFrom.LAGGED and self.makes_extra_pass(position(0)):
            return "before each update of the first rollout batch"
        return ""

    @property
    def may_need_extra_pass(self) -> bool:
        """Return whether an update may have an extra pass: verl may make more updates than the configuration gives."""
        of_bounds = (self.bounds, self.bounds_of_first, self.bounds_without_past)
        return self.selects_by_pass or DecidedFrom.MINI_BATCH in of_bounds


def schedule_of(values: keys.Values, settings: "Settings | Observe | None" = None) -> Schedule:
    """Make the schedule of a run.

    Args:
        values: the keys of `keys.READ` with their values.
        settings: the run's clipx node, built; None if only what verl's keys determine is wanted.
    """
    trainer = trainer_of(values)
    # The v1 trainer cuts a rollout batch into parts and calls the worker once for each.
    parts = 1
    if trainer.is_v1:
        parts = values.get(keys.SYNC_STEP) or 1
    counts: tuple[str, ...] = ()
    # Outside bypass mode verl rejects tokens before the updates. verl's own number of tokens still includes them.
    if values.get(keys.ROLLOUT_RS) is not None and not values.get(keys.BYPASS):
        counts = ("counted",)
    schedule = Schedule(
        updates=updates_of(values, parts),
        batches_a_step=parts * (values.get(keys.STEPS_A_VERSION) or 1),
        starts_at_ratio_one=trainer.recomputes_old,
        counts=counts,
    )
    if settings is None or not settings.trains:
        return schedule
    return with_settings(schedule, settings, values)


def updates_of(values: keys.Values, parts: int) -> int | None:
    """Return the number of optimizer updates of one pass over a part of a rollout batch; None if unknown.

    Args:
        values: the keys of `keys.READ` with their values.
        parts: how many parts the trainer divides a rollout batch into.
    """
    epochs = values.get(keys.EPOCHS) or 1
    at_once = values.get(keys.MINI_BATCHES_AT_ONCE)
    if at_once:
        return at_once * epochs
    prompts = values.get(keys.ROLLOUT_PROMPTS)
    mini_batch = values.get(keys.MINI_BATCH)
    for number in (prompts, mini_batch, epochs):
        if not isinstance(number, int) or number <= 0:
            return None
    return math.ceil(prompts / parts / mini_batch) * epochs


def with_settings(schedule: Schedule, settings: "Settings", values: keys.Values) -> Schedule:
    """Return a schedule with those fields that the clipx node determines.

    Args:
        schedule: the schedule as verl's keys alone determine it.
        settings: the run's clipx node, built.
        values: the keys of `keys.READ` with their values.
    """
    passes: tuple[str, ...] = ()
    counts = schedule.counts
    if settings.update is not None:
        passes = PASSES[settings.update.order]
        # Each pass of Lopti trains a part of the tokens.
        counts = ("counted",)
    select = settings.select
    rejects_in_loss = bool(values.get(keys.BYPASS)) and values.get(keys.ROLLOUT_RS) is not None
    # A selection over the mini-batch needs a pass for its threshold. A selection within each sequence needs one for the
    # number of tokens that it keeps, if the loss rejects some of them by the current weights.
    selects_by_pass = select is not None and (select.over == "mini_batch" or rejects_in_loss)
    if select is not None and not selects_by_pass:
        counts = (*counts, "selected")
    return dataclasses.replace(
        schedule,
        passes=passes,
        **bounds_fields(schedule, settings, trains_all_in_one_pass=not passes),
        selects_by_pass=selects_by_pass,
        counts=counts,
        second_stage=settings.method.second_statistics_size > 0,
    )


def bounds_fields(schedule: Schedule, settings: "Settings", *, trains_all_in_one_pass: bool) -> dict[str, DecidedFrom]:
    """Return those fields of `Schedule` that say from which tokens bounds are decided.

    Args:
        schedule: the schedule as verl's keys alone determine it.
        settings: the run's clipx node, built.
        trains_all_in_one_pass: whether there is a single pass over a rollout batch, as without Lopti.

    Returns:
        The fields by name. A field that keeps its default, the tokens of each micro-batch, is left out.
    """
    # Fixed bounds keep the default too, although they depend on no token.
    if not settings.adaptive or settings.scope == "micro_batch":
        return {}
    # `asks_for` names the tensors that the method reads beside the log-probabilities. Where it reads the entropy of the
    # current policy, ratio 1 alone does not give its statistics: entropy takes a forward pass.
    at_ratio_one = DecidedFrom.RATIO_ONE
    if "entropy" in settings.method.asks_for:
        at_ratio_one = DecidedFrom.MINI_BATCH
    if settings.scope == "lagged":
        return {
            "bounds": DecidedFrom.LAGGED,
            "bounds_of_first": DecidedFrom.LAGGED,
            "bounds_without_past": at_ratio_one,
        }
    # A single update that starts at ratio 1 needs no extra pass. If the selection makes one anyway, it is used.
    starts_at_ratio_one = trains_all_in_one_pass and schedule.only_at_ratio_one
    bounds_of_first = DecidedFrom.MINI_BATCH
    if starts_at_ratio_one and not settings.selects_over_mini_batch:
        bounds_of_first = at_ratio_one
    return {"bounds": DecidedFrom.MINI_BATCH, "bounds_of_first": bounds_of_first}


def counted_schedule(values: keys.Values, order: str | None) -> Schedule:
    """Return a schedule with only those fields that follow from verl's keys and from Lopti's order.

    Args:
        values: the keys of `keys.READ` with their values.
        order: Lopti's order, `clipx.update.order`; None without Lopti.
    """
    return dataclasses.replace(schedule_of(values), passes=PASSES.get(order, ()))


def recorded_schedule(configuration: Mapping[str, Any]) -> Schedule:
    """Return the schedule of a run from its recorded configuration.

    The record of an older version, or of a run without the plugin, has no schedule. Then the numbers follow from the
    other keys, as `counted_schedule` returns them.

    Args:
        configuration: the recorded configuration's leaves by dotted key.
    """
    field_names = {field.name for field in dataclasses.fields(Schedule)}
    # The second is where older versions had it.
    for node in (f"{keys.FACTS}.record.schedule", f"{keys.FACTS}.schedule"):
        recorded = {name: value for name, value in keys.below(configuration, node).items() if name in field_names}
        if recorded:
            return Schedule(**recorded)
    default = "low_first" if "clipx.update.eta" in configuration else None
    return counted_schedule(keys.read(configuration), configuration.get("clipx.update.order", default))
