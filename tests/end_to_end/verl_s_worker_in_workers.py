"""For VERL_USE_EXTERNAL_MODULES: verl's own training worker stays where the plugin would put its own."""

from verl_clipx.worker import registry

registry.install_worker = lambda engine_workers: None
