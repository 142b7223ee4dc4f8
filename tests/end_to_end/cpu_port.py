"""For VERL_USE_EXTERNAL_MODULES beside VERL_USE_EXTERNAL_PLUGINS=none: verl on the CPU, and nothing else of the plugin.

It has what +hardware=cpu and +clipx/rollout=seeded name: platform, engine, rollout, gloo, a resolver, an agent loop.
"""

from importlib import import_module

from wrapt import when_imported

from verl_clipx.training import cpu
from verl_clipx.training.cpu.process_group import with_gloo
from verl_clipx.training.worker.registry import replace_worker

cpu.register()
when_imported("verl.workers.engine_workers")(lambda module: replace_worker(module, with_gloo(module.TrainingWorker)))
when_imported("verl.experimental.agent_loop.single_turn_agent_loop")(
    lambda _: import_module("verl_clipx.training.seeded.agent_loop")
)
when_imported("omegaconf")(
    lambda module: module.OmegaConf.register_new_resolver("clipx_platform", cpu.check_platform, replace=True)
)
