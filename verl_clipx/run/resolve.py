"""Resolves a run once from the composed configuration: its loss and what it takes over, or why it is refused.

`run: ${clipx_run:}` in the actor's policy loss stands for the result. The driver's hooks force it, with the names that
the command line has; in a main of the user's own, a notebook or verl's Tinker worker the first read does, without them.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from verl_clipx.common.files import EMPTY
from verl_clipx.common.secrets import redact
from verl_clipx.losses.base.method import NODE
from verl_clipx.losses.base.refusal import ABSENT, Refusal, did_you_mean, refuse
from verl_clipx.losses.configs_folder import configs_folder
from verl_clipx.losses.groups import swap_by
from verl_clipx.losses.methods import METHODS
from verl_clipx.run.config import NODES, Observe, Settings
from verl_clipx.run.description import Description, describe
from verl_clipx.run.handover import Handover
from verl_clipx.run.identity import identity_of
from verl_clipx.run.keys import (
    LOSS_MODE,
    OF_THE_PLUGIN,
    POLICY_LOSS,
    Leaves,
    read,
    refuse_misplaced_keys,
    refuse_values,
    value_at,
)
from verl_clipx.run.record import RunRecord, fields_of
from verl_clipx.run.run_files import log_path, own_log_path, traces_path
from verl_clipx.run.schedule import schedule_of
from verl_clipx.run.support import untested
from verl_clipx.run.takeover import Takeover, take_clip_keys_over


class Resolved(NamedTuple):
    """The loss that a run trains, what its workers get of the run besides, and both in words."""

    clipx: Settings | Observe
    run: Handover
    description: Description

    @property
    def record(self) -> RunRecord:
        """Returns the run's record as far as it is known before the run starts."""
        return self.run.record


def resolve(config: DictConfig, *, named: Mapping[str, Any] = EMPTY, group: str | None = None) -> Resolved | None:
    """Resolves a run.

    Args:
        config: verl's whole configuration.
        named: full keys that the command line names, with the text there.
        group: the group that +clipx= names, or None if unknown.

    Returns:
        None if the plugin has no part in the run.

    Raises:
        Refusal: the run cannot be what its configuration says, or verl would stop later; names all reasons.
    """
    node = OmegaConf.select(config, POLICY_LOSS)
    if node is None:
        return None
    refuse(misspelt(config))
    if NODE not in node:
        refuse([without_group(node.loss_mode)])
        return None
    refuse(replaced(config, node))
    refuse(missing_values(node[NODE]))
    settings = instantiated(node[NODE])
    if not isinstance(settings, Settings | Observe):
        raise missing_method(settings)
    before = taken_before(node)
    beside_log = settings.trace is not None and settings.trace.folder is None
    folder = str(traces_path(own_log_path(config) or log_path(config)).absolute()) if beside_log else None
    values = read(config)
    takeover = Takeover(taken={}, unused={}, refused=[])
    if settings.trains:
        takeover = take_clip_keys_over(settings.method, values, named)
    refuse(
        [
            *refuse_values(values, settings),
            *refuse_misplaced_keys(config),
            *without_effect(settings, named),
            *takeover.refused,
        ]
    )
    record = fields_of(Leaves(config))
    record = dataclasses.replace(
        record,
        loss=dataclasses.replace(record.loss, group=group, taken=before | takeover.taken, unused=takeover.unused),
        schedule=schedule_of(values, settings),
        untested=tuple(untested(values)),
    )
    complete = Handover(record, folder).complete(settings)
    description = describe(node.loss_mode, complete, record)
    record = dataclasses.replace(record, line=redact(description.line), identity=identity_of(complete))
    return Resolved(complete, Handover(record, folder), description)


def as_node(run: Handover) -> DictConfig:
    """Returns what the workers get as a node of the configuration, which verl resolves in place and they build."""
    return OmegaConf.create(target_node(run))


def target_node(value: Any) -> dict[str, Any]:
    """Returns a dataclass as the node that Hydra builds it from, without the fields that say nothing."""
    node: dict[str, Any] = {"_target_": f"{type(value).__module__}.{type(value).__name__}"}
    for place in dataclasses.fields(value):
        content = getattr(value, place.name)
        if dataclasses.is_dataclass(content):
            node[place.name] = target_node(content)
        elif content is not None and content not in ({}, ()):
            node[place.name] = content
    return node


def handover_node(config: DictConfig) -> DictConfig | None:
    """Returns the value of `${clipx_run:}` in a configuration that no driver has resolved; raises as `resolve`."""
    resolved = resolve(config)
    return None if resolved is None else as_node(resolved.run)


def replaced(config: DictConfig, node: DictConfig) -> Iterator[Refusal]:
    """Refuses what the user has written over the nodes that the plugin keeps in verl's, perhaps in vain."""
    for key in OF_THE_PLUGIN:
        name = key.rpartition(".")[2]
        if OmegaConf.is_interpolation(node, name) or name not in node:
            continue
        # Resolved before, as in a notebook, it is what a target builds; the clipx node alone, a copy of the run's.
        is_built = OmegaConf.is_config(node[name]) and "_target_" in node[name]
        is_copy = name != NODE or not OmegaConf.is_interpolation(node, "run") or node[name] == config.get(NODE)
        if not (is_built and is_copy):
            reason = "the plugin fills it from the run's other keys"
            yield Refusal(key, ABSENT, reason, "Remove what you set there, and set the key that it comes from.")


def without_effect(settings: Settings | Observe, named: Mapping[str, Any]) -> Iterator[Refusal]:
    """Refuses parameters of the clipx node that the user has set and that another one leaves without effect."""
    if isinstance(settings, Observe):
        return
    reason = f"{NODE}.hold solves for the bounds"
    for name in settings.method.solved_parameters:
        if f"{NODE}.{name}" in named:
            yield Refusal(f"{NODE}.{name}", getattr(settings.method, name), reason, "Remove one of the two.")


def taken_before(node: DictConfig) -> dict[str, dict[str, Any]]:
    """Returns what an earlier start of the configuration took over and wrote into its clipx node, unless changed."""
    if OmegaConf.is_interpolation(node, "run") or not node.get("run"):
        return {}
    before = value_at(OmegaConf.to_container(node.run), "record.loss.taken") or {}
    return {name: source for name, source in before.items() if node[NODE].get(name) == source["value"]}


def instantiated(node: Any) -> Any:
    """Builds a node's `_target_`. If the target raises a ValueError, that error is raised instead of Hydra's."""
    try:
        return instantiate(node, _convert_="partial")
    except Exception as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        raise


def missing_values(node: DictConfig) -> Iterator[Refusal]:
    """Refuses keys of a clipx node that its group leaves open."""
    for key in node:
        if OmegaConf.is_missing(node, key):
            yield Refusal(f"{NODE}.{key}", ABSENT, "its group leaves the value open", f"Set {NODE}.{key}=….")


def missing_method(node: Any) -> Refusal:
    """The refusal of a clipx node, or of a part of one, without a method."""
    given = [f"+{NODE}/{name}" for name in NODES if node and node.get(name) is not None]
    what = f"without a method, {', '.join(given)} would be added to nothing" if given else "there is no method"
    return Refusal(NODE, ABSENT, what, f"Choose one by its group, for example {swap_by('grpo')}.")


def misspelt(config: DictConfig) -> Iterator[Refusal]:
    """Refuses keys that were meant for the plugin but that Hydra took for new ones, as clipx/shapping, clipex=acpo."""
    folder = configs_folder() / NODE
    groups = {f"{NODE}/{path.name}" for path in folder.iterdir() if path.is_dir()}
    for key, value in config.items_ex(resolve=False):
        if key.startswith(f"{NODE}/"):
            yield Refusal(f"+{key}", value, f"there is no group {key}", did_you_mean(key, groups, "+").strip())
        near = key != NODE and did_you_mean(key, [NODE])
        if near and isinstance(value, str) and (folder / f"{value}.yaml").is_file():
            yield Refusal(f"+{key}", value, f"nothing reads a key {key}", f"Did you mean {swap_by(value)}?")
    if config.get(NODE) is not None and NODE not in OmegaConf.select(config, POLICY_LOSS):
        given = next(iter(config[NODE])) if isinstance(config[NODE], DictConfig) and config[NODE] else ""
        reason = "without a method nothing would read it"
        advice = f"Choose one by its group, as {swap_by('grpo')}."
        yield Refusal(f"{NODE}{given and '.'}{given}", ABSENT, reason, advice)


def without_group(loss_mode: Any) -> Refusal | None:
    """The refusal of a loss of the plugin's without its group, because its statistics would not be exact."""
    name = str(loss_mode).removeprefix("clipx_")
    if name == str(loss_mode):
        return None
    group = name if name in METHODS and METHODS[name].__module__.startswith("verl_clipx.") else "custom"
    swap = f"+{NODE}=custom {NODE}.function=package.module:name" if group == "custom" else swap_by(group)
    defaults = "with default parameters and, if its bounds adapt, with statistics of a micro-batch"
    reason = f"without its group it would train {defaults}"
    return Refusal(LOSS_MODE, loss_mode, reason, f"Replace it by the group: {swap}.")
