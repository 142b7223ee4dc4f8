"""The entry point in verl's plugin group, and the only module that hooks anything into verl.

Every process that imports verl imports this module, so it must be cheap: each hook waits until verl itself imports the
module that is hooked. It must also fail loudly. verl swallows an exception of a plugin, so a failure is printed here,
and an error is raised when verl imports its losses. In a run without a clipx node no hook acts (`HOOKS`).
"""

import functools
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from wrapt import when_imported, wrap_function_wrapper

# Set by `clipx explain` (verl_clipx/run/explain.py).
EXPLAIN = "CLIPX_EXPLAIN"
CORE_ALGOS = "verl.trainer.ppo.core_algos"


def _register_losses(core_algos: ModuleType) -> None:
    from verl_clipx.losses.base.method import WHEN_REGISTERED
    from verl_clipx.training.worker.registry import register_loss, register_losses

    register_losses(core_algos)
    # A method that a user's module adds to METHODS later is registered with verl at that moment.
    WHEN_REGISTERED.append(functools.partial(register_loss, core_algos))


def _install_worker(engine_workers: ModuleType) -> None:
    from verl_clipx.training import cpu
    from verl_clipx.training.worker.registry import install_worker, replace_worker

    if cpu.is_active():
        from verl_clipx.training.cpu.process_group import with_gloo

        replace_worker(engine_workers, with_gloo(engine_workers.TrainingWorker))
    install_worker(engine_workers)


def _register_agent_loop(build: Callable, worker: Any, positional: tuple, named: dict[str, Any]) -> None:
    build(*positional, **named)
    from verl_clipx.training.seeded import AGENT_LOOP

    if worker.rollout_config.agent.default_agent_loop == AGENT_LOOP:
        # Importing the agent loop's module registers it with verl.
        import verl_clipx.training.seeded.agent_loop  # noqa: F401


def _register_resolvers(omegaconf: ModuleType) -> None:
    from verl_clipx.training.cpu import check_platform

    def run(*, _root_):
        from verl_clipx.run.resolve import handover_node

        return handover_node(_root_)

    omegaconf.OmegaConf.register_new_resolver("clipx_platform", check_platform, replace=True)
    omegaconf.OmegaConf.register_new_resolver("clipx_run", run, replace=True)


def _wrap(name: str, wrapper: Callable) -> Callable[[ModuleType], None]:
    # The hook that wraps a function or a method of a module.
    def hook(module: ModuleType) -> None:
        wrap_function_wrapper(module, name, wrapper)

    return hook


def _imported(module: str, name: str) -> Callable:
    # A wrapper that is a function of the package, whose module is imported only when the wrapped function is called.
    def wrapper(*arguments: Any) -> Any:
        return getattr(import_module(f"verl_clipx.{module}"), name)(*arguments)

    return wrapper


def _start(detect: Callable, _: None, positional: tuple, named: dict[str, Any]) -> None:
    detect(*positional, **named)
    _answer_if_explained(*positional, **named)
    from verl_clipx.run.start import start
    from verl_clipx.training.worker.registry import refuse_another_loss

    refuse_another_loss(*positional, **named)
    start(*positional, **named)


def _start_before_ray(run: Callable, _: None, positional: tuple, named: dict[str, Any]) -> None:
    config = positional[0] if positional else named["config"]
    _answer_if_explained(config)
    from verl_clipx.run.run_lock import release
    from verl_clipx.run.start import start_unless_started

    start_unless_started(config)
    try:
        run(*positional, **named)
    finally:
        release()


def _answer_if_explained(config: Any) -> None:
    if EXPLAIN in os.environ:
        from verl_clipx.run.explaining import answer_and_end

        answer_and_end(config)


# Each hook with the module whose import installs it.
HOOKS = (
    # The losses and the resolvers. They are names in registries, and do nothing until a configuration uses one.
    (CORE_ALGOS, _register_losses),
    ("omegaconf", _register_resolvers),
    # The training worker: each of its methods is verl's unless the loss's configuration has a clipx node. Under
    # VERL_PLATFORM=cpu it also starts gloo.
    ("verl.workers.engine_workers", _install_worker),
    # The driver, before Ray starts. Without a clipx node these hooks only read the configuration, and refuse misspelt
    # keys that were meant for the plugin. auto_set_device is what each of verl's entry modules calls first, with its
    # configuration; nothing else calls it.
    ("verl.utils.device", _wrap("auto_set_device", _start)),
    ("verl.trainer.main_ppo", _wrap("run_ppo", _start_before_ray)),
    # A worker of agent loops. The hook adds an agent loop that only +clipx/rollout=seeded chooses.
    ("verl.experimental.agent_loop.agent_loop", _wrap("AgentLoopWorker.__init__", _register_agent_loop)),
    # The trainer's process. Without a clipx node these hooks call verl's function and return what it returns.
    ("verl.utils.metric", _wrap("reduce_metrics", _imported("training.trainer.hooks", "take_worker_messages"))),
    ("verl.utils.tracking", _wrap("Tracking.__init__", _imported("training.trainer.hooks", "open_logs"))),
    # Every trainer imports compute_data_metrics from this module by name. The hook replaces the function as soon as the
    # module is imported, so that each trainer gets the wrapped one.
    ("verl.trainer.ppo.metric_utils", _wrap("compute_data_metrics", _imported("training.trainer.hooks", "add_health"))),
    (
        "verl.trainer.ppo.v1.trainer_base",
        _wrap("PPOTrainer._compute_metrics", _imported("training.trainer.hooks", "add_verdicts")),
    ),
)

# Further hooks, only while `clipx explain` runs a command. With them nothing is written, and Ray does not start.
EXPLAINING = (
    ("hydra.main", _wrap("_run_hydra", _imported("run.explaining", "run_hydra"))),
    # A main of the user's own may start Ray before verl has its configuration. So ray.init does nothing, and the
    # process ends where Ray is first used.
    ("ray", _wrap("init", _imported("run.explaining", "skip_ray_init"))),
    ("ray._private.auto_init_hook", _wrap("auto_init_ray", _imported("run.explaining", "end_where_ray_is_used"))),
)


def install() -> None:
    """Register the hooks and, under VERL_PLATFORM=cpu, the CPU as a platform of verl's.

    Do nothing if the installed verl lacks what the hooks need (`unsuitable_verl`). With such a verl, a configuration
    that asks for a group of this plugin is refused by hydra_plugins/verl_clipx/groups_source.py.

    Raises:
        Exception: the first error of a hook whose module was imported already. The other hooks are registered.
    """
    from verl_clipx.common.verl_version import unsuitable_verl
    from verl_clipx.training import cpu

    if unsuitable_verl():
        return
    hooks = [*HOOKS]
    if EXPLAIN in os.environ:
        hooks += EXPLAINING
    failures = []
    for module, hook in hooks:
        try:
            when_imported(module)(_loud(hook))
        except Exception as error:
            # The module is imported already, and its hook has failed. The other hooks, which refuse what cannot be
            # trained, are registered all the same.
            failures.append(error)
    if cpu.is_active():
        cpu.register()
    if failures:
        raise failures[0]


def _loud(hook: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def run(module: ModuleType) -> None:
        try:
            hook(module)
        except Exception:
            _report()
            raise

    return run


def _report() -> None:
    print("verl_clipx could not be set up; `clipx doctor` says more.", file=sys.stderr)
    traceback.print_exc()


try:
    install()
except Exception as error:
    _report()
    # Python deletes `error` at the end of this block, and the function below needs it later.
    cause = error

    @when_imported(CORE_ALGOS)
    def _raise_again(_: ModuleType) -> None:
        raise RuntimeError("verl_clipx failed while verl was imported; its traceback is above.") from cause

    raise
