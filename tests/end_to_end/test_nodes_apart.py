"""A driver that has the plugin, and Ray's worker that has not: it fails as it gets the run's configuration. A driver
without the plugin, whatever its workers have, stops before it starts Ray (tests/claims/test_swap_form.py). Not covered:
several machines; a worker with another version of the package (tests/training/worker/test_receipt_sources.py).
"""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.end_to_end, pytest.mark.matrix]

# As verl's ActorRolloutRefWorker does, with what the driver has composed.
BUILD_ACTOR_IN_A_TASK = """
import sys
import ray
from omegaconf import OmegaConf
from hydra import compose, initialize_config_module

with initialize_config_module("verl.trainer.config", version_base=None):
    swap = ["+clipx=acpo", "clipx.scope=mini_batch"]
    config = compose("ppo_trainer", [*swap, "actor_rollout_ref.actor.use_dynamic_bsz=True"])
actor = OmegaConf.to_container(config.actor_rollout_ref.actor, resolve=True)
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=eval(sys.argv[1]))

@ray.remote
def build(actor):
    import importlib.util
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass
    seen = importlib.util.find_spec("verl_clipx") is not None
    try:
        return seen, type(omega_conf_to_dataclass(OmegaConf.create(actor)).policy_loss).__name__
    except Exception as error:
        return seen, repr(error)

try:
    print(ray.get(build.remote(actor), timeout=200))
except ray.exceptions.RayError as error:
    print(("fails", str(error).splitlines()[-1]))
"""


def test_a_worker_without_the_plugin_fails_as_it_gets_its_configuration(folder_without_plugin, tmp_path):
    without = {"py_executable": f"{sys.executable} -S", "env_vars": {"PYTHONPATH": str(folder_without_plugin)}}
    for environment, expected in (
        ({}, "(True, 'ClipxPolicyLossConfig')"),
        (without, """('fails', "ModuleNotFoundError: No module named 'verl_clipx'")"""),
    ):
        command = [sys.executable, "-c", BUILD_ACTOR_IN_A_TASK, repr(environment)]
        result = subprocess.run(command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] == expected
