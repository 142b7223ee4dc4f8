"""The entry point in verl's plugin group, and the one place that says what is hooked into verl, and when it acts.

Every process that imports verl imports it. It must be cheap, so each hook waits until verl itself imports the module
concerned. It must also fail loudly: because verl swallows a plugin's exception, a failure is printed here and raised
again when verl needs the losses. In a run without a clipx node nothing of it acts (`HOOKS`).
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
    # A method that a user's module adds later is registered too.
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
    return lambda module: wrap_function_wrapper(module, name, wrapper)


def _imported(module: str, name: str) -> Callable:
    # A function of the package, whose module is imported when it is called.
    return lambda *given: getattr(import_module(f"verl_clipx.{module}"), name)(*given)


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


# By the module of verl's whose import installs it.
HOOKS = (
    # Names in a registry, which do nothing until a configuration says one of them.
    (CORE_ALGOS, _register_losses),
    ("omegaconf", _register_resolvers),
    # The training worker: each of its methods is verl's unless the loss's configuration has a clipx node. Under
    # VERL_PLATFORM=cpu it also starts gloo.
    ("verl.workers.engine_workers", _install_worker),
    # The driver, before Ray. Without a clipx node they only read, and refuse misspelt keys that were meant for it. Each
    # of verl's entry modules calls auto_set_device first, with its configuration; nothing else calls it.
    ("verl.utils.device", _wrap("auto_set_device", _start)),
    ("verl.trainer.main_ppo", _wrap("run_ppo", _start_before_ray)),
    # A worker of agent loops: +clipx/rollout=seeded names one of ours. With any other the call is verl's.
    ("verl.experimental.agent_loop.agent_loop", _wrap("AgentLoopWorker.__init__", _register_agent_loop)),
    # The trainer's process. Without a clipx node they call verl's function and return what it returns.
    ("verl.utils.metric", _wrap("reduce_metrics", _imported("training.trainer.hooks", "take_worker_messages"))),
    ("verl.utils.tracking", _wrap("Tracking.__init__", _imported("training.trainer.hooks", "open_logs"))),
    # Every trainer imports this function by name, which it does once this module is there.
    ("verl.trainer.ppo.metric_utils", _wrap("compute_data_metrics", _imported("training.trainer.hooks", "add_health"))),
    (
        "verl.trainer.ppo.v1.trainer_base",
        _wrap("PPOTrainer._compute_metrics", _imported("training.trainer.hooks", "add_verdicts")),
    ),
)

# Beside them, while a command is explained: nothing is written, and Ray does not start.
EXPLAINING = (
    ("hydra.main", _wrap("_run_hydra", _imported("run.explaining", "run_hydra"))),
    # A main of the user's own may start Ray before verl has its configuration; only what uses Ray ends there.
    ("ray", _wrap("init", _imported("run.explaining", "skip_ray_init"))),
    ("ray._private.auto_init_hook", _wrap("auto_init_ray", _imported("run.explaining", "end_where_ray_is_used"))),
)


def install() -> None:
    """Register the hooks, and under VERL_PLATFORM=cpu the CPU; nothing beside a verl that lacks what they need.

    There a configuration that asks for a group of this plugin is refused (hydra_plugins/verl_clipx/groups_source.py).
    """
    from verl_clipx.common.verl_version import unsuitable_verl
    from verl_clipx.training import cpu

    if unsuitable_verl():
        return
    failures = []
    for module, hook in (*HOOKS, *(EXPLAINING if EXPLAIN in os.environ else ())):
        try:
            when_imported(module)(_loud(hook))
        except Exception as error:
            # Of a module that is imported already. The others, which refuse what cannot be trained, stay.
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
    # The block's own name of it is gone when verl needs the losses.
    cause = error

    @when_imported(CORE_ALGOS)
    def _raise_again(_: ModuleType) -> None:
        raise RuntimeError("verl_clipx failed while verl was imported; its traceback is above.") from cause

    raise
