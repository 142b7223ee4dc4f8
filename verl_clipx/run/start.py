"""Resolves and announces a run in the driver when it starts, before Ray does.

A run starts when one of verl's entry modules calls verl.utils.device.auto_set_device with its configuration, or when a
notebook calls verl.trainer.main_ppo.run_ppo. Composing a configuration is not a start, and neither is
`clipx explain`.
"""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_clipx.common.verl_version import untested_verl
from verl_clipx.losses.base.method import NODE
from verl_clipx.run.keys import DEVICE, NOT_IN_VERL, POLICY_LOSS, RAY_ADDRESS
from verl_clipx.run.resolve import Resolved, as_node, resolve
from verl_clipx.run.run_files import lock_path, own_log_path
from verl_clipx.run.run_lock import take_lock

RAY_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")

# Whether an entry module of verl's has started a run in this process for which run_ppo has not been called yet.
_waits_for_run_ppo = False


def start(config: DictConfig) -> None:
    """Decide what a run trains, print it in one line, and stop a run that cannot be what its configuration says.

    Args:
        config: verl's whole configuration. `resolve_into_config` writes the result into it.

    Raises:
        ValueError: as for `resolve_into_config`.
        RuntimeError: as for `require_accelerator` and `hold_log`.
        OSError: as for `hold_log`.
    """
    global _waits_for_run_ppo
    _waits_for_run_ppo = True
    resolved = resolve_into_config(config, **said_by_command_line())
    if resolved is None:
        return
    address = OmegaConf.select(config, RAY_ADDRESS)
    require_accelerator(address, OmegaConf.select(config, DEVICE))
    hold_log(config)
    print(resolved.record.line, flush=True)
    untested = untested_verl()
    if untested is not None:
        print(f"{NODE}: {untested}", flush=True)


def start_unless_started(config: DictConfig) -> None:
    """Call `start` on behalf of run_ppo, unless verl's entry module has called it already. Raises what `start` raises.

    Each further call of run_ppo is a new start: a notebook or a user's own main may call it more than once, and may
    change the configuration in between.
    """
    global _waits_for_run_ppo
    is_started = HydraConfig.initialized() and is_resolved(config) and _waits_for_run_ppo
    if not is_started:
        start(config)
    _waits_for_run_ppo = False


def is_resolved(config: DictConfig) -> bool:
    """Return whether `resolve_into_config` has written its result into a configuration."""
    policy_loss = OmegaConf.select(config, POLICY_LOSS)
    if policy_loss is None or "run" not in policy_loss:
        return False
    return not OmegaConf.is_interpolation(policy_loss, "run")


def said_by_command_line() -> dict[str, Any]:
    """Return the arguments of `resolve` that only the command line of a hydra.main says; empty without a hydra.main."""
    if not HydraConfig.initialized():
        return {}
    hydra = HydraConfig.get()
    return {"named": named_keys(hydra.overrides.task), "group": hydra.runtime.choices.get(NODE)}


def named_keys(overrides: Collection[str]) -> dict[str, str]:
    """Return the full keys that a command line's overrides name, each with the text of its value.

    For `+clipx.alpha=2` that is the key clipx.alpha with the text 2.
    """
    text_by_key = {}
    for override in overrides:
        key, _, text = override.lstrip("+~").partition("=")
        text_by_key[key] = text
    return text_by_key


def resolve_into_config(
    config: DictConfig, *, named: Collection[str] = (), group: str | None = None
) -> Resolved | None:
    """Resolve a run and write the result into its configuration.

    Before that, the node `run` of the actor's policy_loss is a placeholder, the interpolation `${clipx_run:}`.

    Args:
        config: verl's whole configuration; nothing is written into it where the plugin has no part in the run.
        named: the full keys that the command line names, as for `resolve`.
        group: the group that the command line chose, as for `resolve`.

    Returns:
        What was resolved; None if the plugin has no part in the run.

    Raises:
        ValueError: the run cannot be what its configuration says, as `resolve` finds.
    """
    resolved = resolve(config, named=named, group=group)
    if resolved is None:
        return None
    with open_dict(config):
        policy_loss = OmegaConf.select(config, POLICY_LOSS)
        policy_loss.run = as_node(resolved.run)
        clipx_node = policy_loss[NODE]
        # The workers build the method from this node, so it must have the values that were taken over.
        for parameter, taken in resolved.run.record.loss.taken.items():
            clipx_node[parameter] = taken["value"]
        # The folder may follow from keys that the workers do not know.
        if resolved.clipx.trace is not None:
            clipx_node.trace.folder = resolved.clipx.trace.folder
        # verl would refuse keys that its policy_loss does not have.
        for key in NOT_IN_VERL:
            policy_loss.pop(key, None)
    return resolved


def hold_log(config: DictConfig) -> None:
    """Make this run the only one that writes its log, until it ends: until run_ppo returns, or this process ends.

    Where the file system cannot lock files, a line says so and the run goes on. A run without a log holds nothing.

    Raises:
        RuntimeError: another run writes this log (`run_lock.FolderInUse`).
        OSError: its folder cannot be written to.
    """
    log = own_log_path(config)
    if log is None:
        return
    path = lock_path(log.absolute())
    try:
        can_lock = take_lock(path)
    except OSError as error:
        advice = f"the run keeps its log there. Choose another folder, or {NODE}.log=false"
        raise type(error)(error.errno, f"{error.strerror}; {advice}", str(path)) from None
    if not can_lock:
        advice = "make sure that no other run writes there"
        print(f"{NODE}: {path.parent}: this file system cannot lock files, so {advice}", flush=True)


def require_accelerator(ray_address: str | None, device: str | None = None) -> None:
    """Raise a RuntimeError if this process would start its own Ray cluster on a machine without an accelerator.

    A driver without a GPU is normal if it joins a cluster. Therefore nothing is raised if a cluster is named, runs, or
    is joined already.

    Args:
        ray_address: the address of a cluster in the configuration; None if it has none.
        device: trainer.device; None if it is not set.

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
    names_cluster = bool(ray_address or os.environ.get("RAY_ADDRESS"))
    joins_cluster = names_cluster or ray.is_initialized() or RAY_CURRENT_CLUSTER.exists()
    if joins_cluster or get_platform().is_available():
        return
    raise RuntimeError(
        "There is no GPU here and no Ray cluster to join. To run on the CPU, set VERL_PLATFORM and add +hardware=cpu:\n"
        "    VERL_PLATFORM=cpu python -m verl.trainer.main_ppo +hardware=cpu …\n"
        "To join a cluster, set RAY_ADDRESS or +ray_kwargs.ray_init.address."
    )
