"""Registers the losses and the training worker with verl."""

import functools
from types import ModuleType
from typing import Any

from verl_clipx.losses.base.method import qualified_name
from verl_clipx.losses.methods import METHODS
from verl_clipx.run.keys import LOSS_MODE, value_at


def register_losses(core_algos: ModuleType) -> None:
    """Register every method as `clipx_<name>` in verl.trainer.ppo.core_algos; idempotent."""
    for name in (*METHODS, "custom"):
        register_loss(core_algos, name)


def register_loss(core_algos: ModuleType, name: str) -> None:
    """Register one method as `clipx_<name>`; idempotent.

    Args:
        core_algos: the module verl.trainer.ppo.core_algos.
        name: the method's, or "custom".

    Raises:
        RuntimeError: another package has registered a loss of that name.
    """
    from verl_clipx.training.worker.policy_loss import policy_loss

    registered = f"clipx_{name}"
    existing = core_algos.POLICY_LOSS_REGISTRY.get(registered)
    refuse_another(registered, existing)
    core_algos.register_policy_loss(registered)(functools.partial(policy_loss, name))


def refuse_another(name: str, existing: Any) -> None:
    """Raise RuntimeError if another package has taken a name of the plugin's.

    Args:
        name: of the loss in verl's registry.
        existing: the function that is registered under it; None if there is none.
    """
    if existing is not None and not is_ours(existing):
        other = qualified_name(getattr(existing, "func", existing))
        raise RuntimeError(
            f"verl's policy loss {name!r} is already {other}; verl_clipx cannot register its own under that name. "
            "Uninstall or rename the other one."
        )


def refuse_another_loss(config: Any) -> None:
    """Raise RuntimeError if the run's loss has a name of the plugin's, but another package has replaced it.

    Args:
        config: verl's whole configuration.
    """
    name = value_at(config, LOSS_MODE)
    if name.startswith("clipx_"):
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

        refuse_another(name, POLICY_LOSS_REGISTRY.get(name))


def is_ours(function: Any) -> bool:
    """Return whether a registered function is the plugin's, from this import of the plugin or an earlier one."""
    # The plugin registers partials. It compares names, because an earlier import has left another function object.
    wrapped = getattr(function, "func", function)
    return getattr(wrapped, "__module__", "") == "verl_clipx.training.worker.policy_loss"


def install_worker(engine_workers: ModuleType) -> None:
    """Replace the TrainingWorker of verl.workers.engine_workers by the plugin's; idempotent.

    Modules that import the worker from now on get the plugin's. If another package has replaced verl's already, the
    plugin's derives from that one, and without a clipx node each of its methods returns what the other's returns.
    """
    from verl_clipx.training.worker.training_worker import ClipxTraining

    current = engine_workers.ActorRolloutRefWorker.actor_worker_cls
    if issubclass(current, ClipxTraining):
        return
    # It has verl's name, by which Ray refers to the class when it sends it to workers.
    names = {"__module__": engine_workers.__name__, "__qualname__": "TrainingWorker", "__doc__": ClipxTraining.__doc__}
    replace_worker(engine_workers, type("TrainingWorker", (ClipxTraining, current), names))


def replace_worker(engine_workers: ModuleType, worker: type) -> None:
    """Bind every name under which verl's module of workers holds its TrainingWorker to a subclass of it."""
    engine_workers.TrainingWorker = worker
    engine_workers.ActorRolloutRefWorker.actor_worker_cls = worker
    engine_workers.ActorRolloutRefWorker.ref_worker_cls = worker
