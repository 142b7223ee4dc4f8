"""Resolves a run once from the composed configuration: its loss and what it takes over, or why it is refused.

`run: ${clipx_run:}` in the actor's policy loss stands for the result. The driver's hooks resolve the run, and know
which keys the command line names. In a user's own main, in a notebook and in verl's Tinker worker, the first read of
this node resolves the run, without that knowledge.
"""

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from verl_clipx.common.secrets import redact
from verl_clipx.losses.base.method import NODE
from verl_clipx.losses.base.refusal import NO_VALUE, Refusal, did_you_mean, raise_refusals
from verl_clipx.losses.configs_folder import configs_folder
from verl_clipx.losses.groups import swap_by
from verl_clipx.run.config import NODES, Observe, Settings
from verl_clipx.run.description import Description, describe
from verl_clipx.run.handover import Handover
from verl_clipx.run.identity import identity_of
from verl_clipx.run.keys import (
    CUSTOM,
    LOSS_MODE,
    OF_THE_PLUGIN,
    POLICY_LOSS,
    Leaves,
    group_of_loss,
    read,
    refuse_misplaced_keys,
    refuse_values,
    value_at,
)
from verl_clipx.run.record import RunRecord, fields_of
from verl_clipx.run.run_files import log_path, own_log_path, traces_path
from verl_clipx.run.schedule import schedule_of
from verl_clipx.run.support import untested
from verl_clipx.run.takeover import Takeover, decide_takeover


class Resolved(NamedTuple):
    """A run as it is resolved.

    Attributes:
        clipx: the clipx node, complete: with the values that were taken over from verl's keys.
        run: what the workers get of the run besides the clipx node.
        description: the run in words.
    """

    clipx: Settings | Observe
    run: Handover
    description: Description

    @property
    def record(self) -> RunRecord:
        """Return the run's record as far as it is known before the run starts."""
        return self.run.record


def resolve(config: DictConfig, *, named: Collection[str] = (), group: str | None = None) -> Resolved | None:
    """Decide what a run trains: its loss with the values taken over from verl's keys, its record, and both in words.

    Args:
        config: verl's whole configuration, which is not changed.
        named: the full keys that the command line names.
        group: the group that +clipx= names; None if unknown.

    Returns:
        The run as it is resolved; None if the plugin has no part in it.

    Raises:
        Refusal: the run cannot be what its configuration says, or verl would stop later. The configuration is checked
            in stages, and the error names all reasons of the first stage that has any.
    """
    node = OmegaConf.select(config, POLICY_LOSS)
    if node is None:
        return None
    raise_refusals(find_misspelt_keys(config))
    if NODE not in node:
        # The plugin has no part in the run, unless loss_mode names a loss of its own.
        raise_refusals([refusal_without_group(node.loss_mode)])
        return None
    raise_refusals(find_overwritten_nodes(config, node))
    raise_refusals(find_missing_values(node[NODE]))
    given_settings = build_target(node[NODE])
    if not isinstance(given_settings, Settings | Observe):
        raise refusal_without_method(given_settings)
    values = read(config)
    takeover = Takeover(taken={}, unused={}, refused=[])
    if given_settings.trains:
        takeover = decide_takeover(given_settings.method, values, named)
    raise_refusals(
        [
            *refuse_values(values, given_settings),
            *refuse_misplaced_keys(config),
            *find_parameters_without_effect(given_settings, named),
            *takeover.refused,
        ]
    )
    # An earlier start may have written into this configuration what it took over.
    taken = {**read_earlier_takeover(node), **takeover.taken}
    record = fields_of(Leaves(config))
    record = dataclasses.replace(
        record,
        loss=dataclasses.replace(record.loss, group=group, taken=taken, unused=takeover.unused),
        schedule=schedule_of(values, given_settings),
        untested=tuple(untested(values)),
    )
    handover = Handover(record, folder_of_traces(config, given_settings))
    settings = handover.complete(given_settings)
    description = describe(node.loss_mode, settings, record)
    record = dataclasses.replace(record, line=redact(description.line), identity=identity_of(settings))
    return Resolved(settings, dataclasses.replace(handover, record=record), description)


def folder_of_traces(config: DictConfig, settings: Settings | Observe) -> str | None:
    """Return the folder of traces beside the run's log; None if nothing is traced, or the clipx node names a folder."""
    if settings.trace is None or settings.trace.folder is not None:
        return None
    log = own_log_path(config) or log_path(config)
    return str(traces_path(log).absolute())


def as_node(run: Handover) -> DictConfig:
    """Return what the workers get of a run as a node of the configuration, from which Hydra builds it in a worker."""
    return OmegaConf.create(target_node(run))


def target_node(value: Any) -> dict[str, Any]:
    """Return the node from which Hydra builds a copy of an instance of a dataclass.

    A field is left out if both its value and its default are empty (`is_empty`).
    """
    node: dict[str, Any] = {"_target_": f"{type(value).__module__}.{type(value).__name__}"}
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        if dataclasses.is_dataclass(content):
            node[field.name] = target_node(content)
        elif not (is_empty(content) and is_empty(default_of(field))):
            node[field.name] = content
    return node


def is_empty(value: Any) -> bool:
    """Return whether a value is None, an empty dictionary or an empty tuple."""
    return value is None or value == {} or value == ()


def default_of(field: dataclasses.Field) -> Any:
    """Return a field's default; `dataclasses.MISSING` if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def handover_node(config: DictConfig) -> DictConfig | None:
    """Return the value of `${clipx_run:}` in a configuration that no driver has resolved.

    Returns:
        The node; None if the plugin has no part in the run.

    Raises:
        Refusal: as `resolve`.
    """
    resolved = resolve(config)
    return None if resolved is None else as_node(resolved.run)


def find_overwritten_nodes(config: DictConfig, node: DictConfig) -> Iterator[Refusal]:
    """Yield a refusal for each node of the plugin in verl's policy loss that the user has overwritten."""
    for key in OF_THE_PLUGIN:
        name = key.rpartition(".")[2]
        if OmegaConf.is_interpolation(node, name) or name not in node:
            continue
        # In a notebook an earlier start may have written these nodes into the configuration, with their targets.
        has_target = OmegaConf.is_config(node[name]) and "_target_" in node[name]
        # Before any start, the clipx node in the policy loss must be the same as the one at the top.
        is_foreign = name == NODE and OmegaConf.is_interpolation(node, "run") and node[name] != config.get(NODE)
        if not has_target or is_foreign:
            reason = "the plugin fills it from the run's other keys"
            yield Refusal(key, NO_VALUE, reason, "Remove what you set there, and set the key that it comes from.")


def find_parameters_without_effect(settings: Settings | Observe, named: Collection[str]) -> Iterator[Refusal]:
    """Yield a refusal for each parameter that the command line names and in whose place clipx.hold solves for bounds.

    Args:
        settings: the run's clipx node. `Method.solved_parameters` is empty without clipx.hold, so that nothing is
            refused.
        named: the full keys that the command line names.
    """
    if not settings.trains:
        return
    for name in settings.method.solved_parameters:
        key = f"{NODE}.{name}"
        if key in named:
            yield Refusal(
                key=key,
                value=getattr(settings.method, name),
                reason=f"{NODE}.hold solves for the bounds, so that this parameter has no effect",
                advice=f"Remove it, or leave out +{NODE}/hold.",
            )


def read_earlier_takeover(node: DictConfig) -> dict[str, dict[str, Any]]:
    """Return what an earlier start of this configuration took over, as `Takeover.taken`.

    A value that was changed since then is left out. The result is empty if there was no earlier start.

    Args:
        node: verl's policy_loss node.
    """
    if OmegaConf.is_interpolation(node, "run") or not node.get("run"):
        return {}
    taken = value_at(OmegaConf.to_container(node.run), "record.loss.taken") or {}
    return {name: source for name, source in taken.items() if node[NODE].get(name) == source["value"]}


def build_target(node: Any) -> Any:
    """Build what a node's `_target_` names.

    Raises:
        ValueError: the target raised it. Hydra would raise an error of its own around it.
    """
    try:
        return instantiate(node, _convert_="partial")
    except Exception as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        raise


def find_missing_values(node: DictConfig) -> Iterator[Refusal]:
    """Yield a refusal for each key of a clipx node that its group leaves open."""
    for key in node:
        if OmegaConf.is_missing(node, key):
            yield Refusal(f"{NODE}.{key}", NO_VALUE, "its group leaves the value open", f"Set {NODE}.{key}=….")


def refusal_without_method(node: Any) -> Refusal:
    """Return the refusal of a clipx node that has no method."""
    modifiers = [f"+{NODE}/{name}" for name in NODES if node and node.get(name) is not None]
    reason = "there is no method"
    if modifiers:
        reason = f"without a method, {', '.join(modifiers)} would be added to nothing"
    return Refusal(NODE, NO_VALUE, reason, f"Choose one by its group, for example {swap_by('grpo')}.")


def find_misspelt_keys(config: DictConfig) -> Iterator[Refusal]:
    """Yield a refusal for each key that was meant for the plugin and that Hydra took for a new one."""
    folder = configs_folder() / NODE
    groups = {f"{NODE}/{path.name}" for path in folder.iterdir() if path.is_dir()}
    for key, value in config.items_ex(resolve=False):
        # A modifier, such as +clipx/shapping=….
        if key.startswith(f"{NODE}/"):
            yield Refusal(f"+{key}", value, f"there is no group {key}", did_you_mean(key, groups, "+").strip())
        # The name of the node, such as +clipex=acpo.
        is_near = key != NODE and did_you_mean(key, [NODE]) != ""
        if is_near and isinstance(value, str) and (folder / f"{value}.yaml").is_file():
            yield Refusal(f"+{key}", value, f"nothing reads a key {key}", f"Did you mean {swap_by(value)}?")
    if config.get(NODE) is not None and NODE not in OmegaConf.select(config, POLICY_LOSS):
        key = NODE
        if isinstance(config[NODE], DictConfig) and config[NODE]:
            key = f"{NODE}.{next(iter(config[NODE]))}"
        reason = "without a method nothing would read it"
        advice = f"Choose one by its group, as {swap_by('grpo')}."
        yield Refusal(key, NO_VALUE, reason, advice)


def refusal_without_group(loss_mode: Any) -> Refusal | None:
    """Return the refusal of a loss of the plugin that loss_mode names without the loss's group.

    Without the group its statistics would not be exact.

    Returns:
        The refusal; None if loss_mode names a loss of verl's.
    """
    name = str(loss_mode).removeprefix("clipx_")
    if name == str(loss_mode):
        return None
    group = group_of_loss(name)
    swap = swap_by(group)
    if group == CUSTOM:
        swap = f"+{NODE}={CUSTOM} {NODE}.function=package.module:name"
    defaults = "with default parameters and, if its bounds adapt, with statistics of a micro-batch"
    reason = f"without its group it would train {defaults}"
    return Refusal(LOSS_MODE, loss_mode, reason, f"Replace it by the group: {swap}.")
