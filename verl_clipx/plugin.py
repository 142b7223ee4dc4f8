"""The entry point in verl's plugin group. Every process that imports verl imports it.

It must be cheap, so each part is registered only when verl itself imports the module concerned. It must also fail
loudly. Because verl swallows a plugin's exception, a failure is printed here and raised again when verl needs the
losses.
"""

import functools
import sys
import traceback
from types import ModuleType

from wrapt import when_imported

CORE_ALGOS = "verl.trainer.ppo.core_algos"
ENGINE_WORKERS = "verl.workers.engine_workers"
DEVICE = "verl.utils.device"
MAIN_PPO = "verl.trainer.main_ppo"
TRACKING = "verl.utils.tracking"
METRIC_UTILS = "verl.trainer.ppo.metric_utils"
TRAINERS = ("verl.trainer.ppo.v1.trainer_base", "verl.trainer.ppo.ray_trainer")
REWARD = "verl.trainer.ppo.reward"
SINGLE_TURN_AGENT_LOOP = "verl.experimental.agent_loop.single_turn_agent_loop"


def _register_losses(core_algos: ModuleType) -> None:
    from verl_clipx.base.method import WHEN_REGISTERED
    from verl_clipx.worker.registry import register_loss, register_losses

    register_losses(core_algos)
    # A method that a user's module adds later is registered too.
    WHEN_REGISTERED.append(functools.partial(register_loss, core_algos))


def _install_worker(engine_workers: ModuleType) -> None:
    from verl_clipx import cpu
    from verl_clipx.worker.registry import install_worker, replace_worker

    if cpu.is_active():
        from verl_clipx.cpu.process_group import with_gloo

        replace_worker(engine_workers, with_gloo(engine_workers.TrainingWorker))
    install_worker(engine_workers)


def _register_agent_loop(_: ModuleType) -> None:
    # Importing the agent loop's module registers it with verl.
    import verl_clipx.seeded.agent_loop  # noqa: F401


def _keep_the_log_and_hold_receipt_and_health(tracking: ModuleType) -> None:
    from verl_clipx.diagnostics import health, run_start
    from verl_clipx.driver import receipt

    run_start.install(tracking)
    receipt.install(tracking)
    health.install_limits(tracking)


def _log_health(metric_utils: ModuleType) -> None:
    from verl_clipx.diagnostics import health

    health.install(metric_utils)


def _keep_validations_whole_and_count_verdicts(trainers: ModuleType) -> None:
    from verl_clipx.diagnostics import health, validation_files

    validation_files.install(trainers)
    health.install_verdicts(trainers)


def _watch_the_reward(reward: ModuleType) -> None:
    from verl_clipx.diagnostics import reward_guard

    reward_guard.install(reward)


def _decide_at_the_start(device: ModuleType) -> None:
    detect = device.auto_set_device

    # Each of verl's entry modules calls this first, with its configuration. Nothing else calls it.
    @functools.wraps(detect)
    def auto_set_device(config) -> None:
        from verl_clipx.driver.start import start_entry

        detect(config)
        start_entry(config)

    device.auto_set_device = auto_set_device


def _decide_before_ray(main_ppo: ModuleType) -> None:
    run = main_ppo.run_ppo

    @functools.wraps(run)
    def run_ppo(config, *arguments, **named) -> None:
        from verl_clipx.common.run_lock import release
        from verl_clipx.driver.start import start_run

        start_run(config)
        try:
            run(config, *arguments, **named)
        finally:
            release()

    main_ppo.run_ppo = run_ppo


def _register_resolvers(omegaconf: ModuleType) -> None:
    from verl_clipx.cpu.switch import check_platform

    def options(*, _root_):
        from verl_clipx.driver.support import READ

        # A node and not a dictionary, because verl resolves its configuration in place, which needs OmegaConf's types.
        return omegaconf.OmegaConf.create({key: omegaconf.OmegaConf.select(_root_, key) for key in READ})

    omegaconf.OmegaConf.register_new_resolver("clipx_platform", check_platform, replace=True)
    omegaconf.OmegaConf.register_new_resolver("clipx_options", options, replace=True)


def install() -> None:
    """Registers the CPU platform and the hooks that register the rest."""
    from verl_clipx import cpu

    when_imported(CORE_ALGOS)(_loud(_register_losses))
    when_imported(ENGINE_WORKERS)(_loud(_install_worker))
    when_imported(DEVICE)(_loud(_decide_at_the_start))
    when_imported(MAIN_PPO)(_loud(_decide_before_ray))
    when_imported(SINGLE_TURN_AGENT_LOOP)(_loud(_register_agent_loop))
    when_imported(TRACKING)(_loud(_keep_the_log_and_hold_receipt_and_health))
    when_imported(METRIC_UTILS)(_loud(_log_health))
    when_imported(REWARD)(_loud(_watch_the_reward))
    for trainers in TRAINERS:
        when_imported(trainers)(_loud(_keep_validations_whole_and_count_verdicts))
    when_imported("omegaconf")(_loud(_register_resolvers))
    cpu.register()


def _loud(hook):
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


def _raise_when_losses_are_needed(error: Exception) -> None:
    def raise_again(_: ModuleType) -> None:
        raise RuntimeError("verl_clipx failed while verl was imported; its traceback is above.") from error

    when_imported(CORE_ALGOS)(raise_again)


try:
    install()
except Exception as error:
    _report()
    _raise_when_losses_are_needed(error)
    raise
