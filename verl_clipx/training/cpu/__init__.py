"""Runs verl without an accelerator: platform, FSDP2 engine over gloo, rollout and checkpoint engine.

Everything here is added through verl's public registries and is active only if ``VERL_PLATFORM=cpu``.
"""

import importlib.util
import os
from functools import partial
from importlib import import_module
from types import ModuleType

from verl_clipx.common.extras import FOR_CPU, needs_tool

# From a module of verl's to our module, in this package, that registers an engine with it.
OURS = {"verl.workers.engine.fsdp.transformer_impl": "engine", "verl.checkpoint_engine.base": "checkpoint_engine"}

_registered = False


def is_active() -> bool:
    """Return whether this process was told to run verl on the CPU (environment variable ``VERL_PLATFORM=cpu``)."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def check_platform(name: str) -> str:
    """Return the name that ``${clipx_platform:cpu}`` stands for in a configuration, if verl will run on it.

    Args:
        name: of the platform, such as "cpu".

    Raises:
        ValueError: the environment variable ``VERL_PLATFORM`` is unset or names another platform, or a package is
            missing; the message says how to select or install it.
    """
    chosen = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if chosen == name:
        missing = [module for module in FOR_CPU if importlib.util.find_spec(module) is None]
        if missing:
            raise ValueError(needs_tool(f"+hardware={name}", missing[0]))
        return name
    setting = f"VERL_PLATFORM={chosen}" if chosen else "no VERL_PLATFORM"
    raise ValueError(
        f"+hardware={name} also needs the environment variable VERL_PLATFORM={name} (found {setting}), because verl "
        f"chooses its platform before it reads the configuration: run "
        f"VERL_PLATFORM={name} python -m verl.trainer.main_ppo +hardware={name} …"
    )


def register() -> None:
    """Register the platform, the engines and the rollout named ``cpu`` with verl. Idempotent.

    For processes that are told to run verl on the CPU (`is_active`). It imports no engine and no rollout: these wait
    until verl imports its own.
    """
    global _registered
    if _registered:
        return
    _registered = True

    from wrapt import when_imported

    from verl_clipx.training.cpu import platform

    platform.register()
    when_imported("verl.workers.rollout.base")(_register_adapter)
    when_imported("verl.workers.rollout.replica")(_register_replica)
    for module, own_module in OURS.items():
        when_imported(module)(partial(_register_engine, own_module))


def _register_engine(own_module: str, _: ModuleType) -> None:
    """Register an engine of ours, once the module of verl's with its registry is imported."""
    import_module(f"verl_clipx.training.cpu.{own_module}").register()


def _register_adapter(module: ModuleType) -> None:
    """Register the workers' side of the rollout with verl.workers.rollout.base."""
    module._ROLLOUT_REGISTRY[("cpu", "async")] = "verl_clipx.training.cpu.rollout.adapter.CPUServerAdapter"


def _register_replica(module: ModuleType) -> None:
    """Register the server's side of the rollout with verl.workers.rollout.replica."""
    module.RolloutReplicaRegistry.register(
        "cpu", lambda: import_module("verl_clipx.training.cpu.rollout.replica").CPUReplica
    )
