"""What the driver decides when a run of verl starts, before Ray does: which loss, with which bounds, on what machine.

A run starts when one of verl's entry modules calls verl.utils.device.auto_set_device with its configuration, or when a
notebook calls verl.trainer.main_ppo.run_ppo. Composing a configuration is not a start, and neither is `clipx explain`.
"""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_clipx.base.method import NODE
from verl_clipx.common.configs_folder import configs_folder
from verl_clipx.common.run_files import lock_path, log_path, own_log_path, traces_path
from verl_clipx.common.run_lock import hold
from verl_clipx.common.suggestions import did_you_mean
from verl_clipx.methods import METHODS
from verl_clipx.run.announcement import announcement
from verl_clipx.run.clip_keys import (
    ACTOR,
    DRO_BETA,
    MISPLACED,
    VERL_DEFAULTS,
    Taken,
    ignored_keys,
    sources,
    taken_over,
)
from verl_clipx.run.config import Observe, Settings
from verl_clipx.run.hydra_nodes import another_loss, missing_method
from verl_clipx.run.runnable import facts_set_by_hand, what_stops
from verl_clipx.run.user_keys import keys_set_by_user

NAMES = ("project_name", "experiment_name")

RAY_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")


class Decision(NamedTuple):
    """What a run will train.

    Attributes:
        line: the line that the run prints.
        taken: from the method's parameters to what they take over from verl's clip keys.
    """

    line: str
    taken: dict[str, Taken]


# The lines that an entry module's start has printed. The run_ppo that the module calls next is the same start.
_printed: list[str] = []


def start_entry(config: DictConfig) -> None:
    """Calls `start` for one of verl's entry modules; raises as it does."""
    _printed[:] = start(config)


def start_run(config: DictConfig) -> None:
    """Calls `start` for run_ppo, which entry modules call, and notebooks directly; raises as it does."""
    start(config, printed=_printed)
    _printed.clear()


def start(config: DictConfig, *, printed: Collection[str] = ()) -> list[str]:
    """Decides what a run trains, prints it in one line, and stops a run that cannot be what its configuration says.

    Args:
        config: verl's whole configuration. What a method takes over from verl's clip keys is written into it.
        printed: lines that are not printed again.

    Returns:
        The line, if the plugin has a part in the run; otherwise an empty list.

    Raises:
        ValueError: as `decide`.
        RuntimeError: as `require_accelerator` and `hold_log`.
        OSError: as `hold_log`.
    """
    hydra = HydraConfig.get() if HydraConfig.initialized() else None
    decision = decide(
        config,
        named=keys_set_by_user(),
        group=hydra.runtime.choices.get(NODE) if hydra else None,
    )
    if decision is None:
        return []
    address = OmegaConf.select(config, "ray_kwargs.ray_init.address")
    require_accelerator(address, OmegaConf.select(config, "trainer.device"))
    hold_log(config)
    if decision.line not in printed:
        print(decision.line, flush=True)
    return [decision.line]


def hold_log(config: DictConfig) -> None:
    """Makes this run the only one that writes its log, while this process lives.

    Args:
        config: as for `start`.

    Raises:
        RuntimeError: another run writes it (`run_lock.FolderInUse`).
        OSError: its folder cannot be written to.
    """
    log = own_log_path(config)
    if log is None:
        return
    path = lock_path(log.absolute())
    try:
        has_locks = hold(path)
    except OSError as error:
        raise type(error)(
            error.errno,
            f"{error.strerror}; the run keeps its log there. Choose another folder, or {NODE}.log=false",
            str(path),
        ) from None
    if not has_locks:
        print(f"{NODE}: {path.parent} has no locks: see to it that no other run writes there", flush=True)


def decide(config: DictConfig, *, named: Collection[str] = (), group: str | None = None) -> Decision | None:
    """Decides which loss a configuration trains.

    Args:
        config: as for `start`.
        named: full keys that the command line or a file of the user's names.
        group: the group that +clipx= names, or None if unknown.

    Returns:
        The decision; None if the plugin has no part in the run.

    Raises:
        ValueError: a loss_mode of the plugin's is without its group or contradicts it; a clip key of verl's means
            nothing to the method or stands where nobody reads it; the run lacks what a method needs; a key is misspelt;
            there is no method; a fact about the run was set by hand; or verl would stop later.
    """
    node = OmegaConf.select(config, f"{ACTOR}.policy_loss")
    if node is None:
        return None
    refuse_misspelt(config)
    if NODE not in node:
        refuse_without_group(node.loss_mode)
        return None
    settings, taken = instantiated(node[NODE]), {}
    if not isinstance(settings, Settings | Observe):
        raise ValueError(missing_method(settings))
    refused = [*facts_set_by_hand(config, named), *what_stops(config, settings)]
    if isinstance(settings, Settings):
        refused.append(another_loss(node.loss_mode, settings))
        actor = OmegaConf.select(config, ACTOR)
        verl_values = {key: actor.get(key, default) for key, default in VERL_DEFAULTS.items()}
        verl_values |= {f"policy_loss.{key}": node[key] for key in MISPLACED if key in node}
        verl_values[DRO_BETA] = OmegaConf.select(actor, DRO_BETA)
        refused += ignored_keys(settings.method, node, group=group)
        try:
            taken = taken_over(settings.method, verl_values, named, group=group)
        except ValueError as error:
            refused.append(str(error))
    if any(refused):
        raise ValueError("\n".join(filter(None, refused)))
    with open_dict(config):
        if settings.trace is not None and settings.trace.folder is None:
            log = own_log_path(config)
            if log is None:
                log = log_path(*(OmegaConf.select(config, f"trainer.{key}") for key in NAMES))
            node[NODE].trace.folder = str(traces_path(log).absolute())
        node[NODE].update({parameter: of.value for parameter, of in taken.items()})
        if isinstance(settings, Settings):
            # verl's PolicyLossConfig has no such keys, and the method has taken their values over.
            for key in MISPLACED:
                node.pop(key, None)
        # A second start finds nothing left to take over, so what the first one took is kept.
        node.run.group, node.run.taken = group, {**(node.run.get("taken") or {}), **sources(taken)}
    return Decision(announcement(instantiated(node)), taken)


def refuse_misspelt(config: DictConfig) -> None:
    """Raises for keys that were meant for the plugin but that Hydra took for new keys, which nobody reads.

    Raises:
        ValueError: a key such as clipx/shapping, which is not a group; a key such as clipex whose value is a group of
            the plugin's; or a node clipx without a method's group.
    """
    folder = configs_folder() / NODE
    groups = {f"{NODE}/{path.name}" for path in folder.iterdir() if path.is_dir()}
    for key, value in config.items_ex(resolve=False):
        if key.startswith(f"{NODE}/"):
            known = ", ".join(sorted(groups))
            raise ValueError(
                f"+{key}={value}: there is no group {key}.{did_you_mean(key, groups, '+')} The groups are {known}."
            )
        near = key != NODE and did_you_mean(key, [NODE])
        if near and isinstance(value, str) and (folder / f"{value}.yaml").is_file():
            raise ValueError(f"+{key}={value}: nobody reads a key {key}. Did you mean +{NODE}={value}?")
    if config.get(NODE) is not None and NODE not in OmegaConf.select(config, f"{ACTOR}.policy_loss"):
        given = next(iter(config[NODE])) if isinstance(config[NODE], DictConfig) and config[NODE] else ""
        raise ValueError(
            f"{NODE}{given and '.'}{given} without a method: nothing would read it. Choose a method by its group, for "
            f"example +{NODE}=grpo."
        )


def instantiated(node: Any) -> Any:
    """What a node's `_target_` builds. If the target raises a ValueError, that error is raised instead of Hydra's."""
    try:
        return instantiate(node, _convert_="partial")
    except Exception as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        raise


def refuse_without_group(loss_mode: Any) -> None:
    """Raises ValueError for a loss of the plugin's without its group, because its statistics would not be exact."""
    name = str(loss_mode).removeprefix("clipx_")
    if name == str(loss_mode):
        return
    group = name if name in METHODS and METHODS[name].__module__.startswith("verl_clipx.") else "custom"
    function = f" {NODE}.function=package.module:name" if group == "custom" else ""
    raise ValueError(
        f"{ACTOR}.policy_loss.loss_mode={loss_mode} without its group: it would train with default parameters and, "
        f"if its bounds adapt, with statistics of a micro-batch. Replace it by the group: +{NODE}={group}{function}."
    )


def require_accelerator(ray_address: str | None, device: str | None = None) -> None:
    """Raises if this process would start its own Ray cluster on a machine without an accelerator.

    A driver without a GPU is normal if it joins a cluster. Therefore nothing is raised if a cluster is named, runs, or
    is joined already.

    Args:
        ray_address: the configuration's ray_kwargs.ray_init.address, or None.
        device: the configuration's trainer.device, or None if unknown.

    Raises:
        RuntimeError: there is no accelerator, or VERL_PLATFORM contradicts trainer.device; says how to run on the CPU.
    """
    import ray
    from verl.plugin.platform import get_platform

    if get_platform().device_name == "cpu" and device not in (None, "cpu"):
        raise RuntimeError(
            f"VERL_PLATFORM=cpu but trainer.device={device}: add +hardware=cpu, which contains the settings of a "
            "CPU run, or unset VERL_PLATFORM."
        )
    if ray.is_initialized() or ray_address or os.environ.get("RAY_ADDRESS") or RAY_CURRENT_CLUSTER.exists():
        return
    if get_platform().is_available():
        return
    raise RuntimeError(
        "There is no GPU here and no Ray cluster to join. To run on the CPU, set VERL_PLATFORM and add +hardware=cpu:\n"
        "    VERL_PLATFORM=cpu python -m verl.trainer.main_ppo +hardware=cpu …\n"
        "To join a cluster, set RAY_ADDRESS or +ray_kwargs.ray_init.address."
    )
