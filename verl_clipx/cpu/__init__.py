"""verl on a machine without an accelerator: platform, FSDP2 engine over gloo, rollout, checkpoint engine.

Everything here enters verl through its public registries. Nothing is active unless ``VERL_PLATFORM=cpu``.
"""

import os

_registered = False


def is_active() -> bool:
    """Whether this process was told to run verl on the CPU (environment variable ``VERL_PLATFORM=cpu``)."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def register() -> None:
    """Make verl know the platform, the engines and the rollout named ``cpu``. Idempotent.

    Called in every process that imports verl, so it must cost nothing on a machine with an accelerator: the
    platform and the rollout are names in a registry, and the engines, whose modules import torch, wait for post-import
    hooks and are only installed under ``VERL_PLATFORM=cpu``.
    """
    global _registered
    if _registered:
        return
    _registered = True

    from wrapt import when_imported

    from verl_clipx.cpu import platform

    platform.register()
    when_imported("verl.workers.rollout.base")(_register_adapter)
    when_imported("verl.workers.rollout.replica")(_register_replica)
    if is_active():
        when_imported("verl.workers.engine.fsdp.transformer_impl")(_register_engine)
        when_imported("verl.checkpoint_engine.base")(_register_checkpoint_engine)


def _register_engine(_module) -> None:
    from verl_clipx.cpu import engine

    engine.register()


def _register_checkpoint_engine(_module) -> None:
    from verl_clipx.cpu import checkpoint_engine

    checkpoint_engine.register()


def _register_adapter(module) -> None:
    module._ROLLOUT_REGISTRY[("cpu", "async")] = "verl_clipx.cpu.rollout.adapter.CPUServerAdapter"


def _register_replica(module) -> None:
    module.RolloutReplicaRegistry.register("cpu", _load_replica)


def _load_replica() -> type:
    from verl_clipx.cpu.rollout.replica import CPUReplica

    return CPUReplica
