"""The platform and its device module, what is added to verl and must not cost, the check behind hardware=cpu.
Not covered: Ray's placement of workers (end-to-end runs); the worker class, which the plugin sets.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import verl
from verl.plugin.platform import platform_manager
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class

from verl_clipx import plugin
from verl_clipx.training import cpu
from verl_clipx.training.cpu import device, platform
from verl_clipx.training.cpu.rollout.adapter import CPUServerAdapter
from verl_clipx.training.cpu.rollout.replica import CPUReplica

# Only CUDA transports and profilers call these, which no CPU run reaches.
CUDA_ONLY = {"Event"}


def test_the_cpus_platform_is_never_chosen_by_detection(monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(platform_manager.PlatformRegistry, "_platforms", {"cpu": platform.PlatformCPU})
    # verl's answer where nothing was detected.
    assert platform_manager._detect_platform_name() == "nvidia"


def test_every_device_function_that_verl_calls_exists():
    source = "\n".join(path.read_text() for path in Path(verl.__file__).parent.rglob("*.py"))
    called = set(re.findall(r"get_torch_device\(\)\.(\w+)", source))
    assert {"empty_cache", "max_memory_allocated"} <= called
    assert [name for name in sorted(called - CUDA_ONLY) if not hasattr(device, name)] == []
    assert platform.PlatformCPU().communication_backend_name() == "gloo"


def test_memory_is_the_processs_own_random_state_can_be_restored_and_worker_slots_are_rays_gpu_resource():
    block = torch.ones(8 << 20)
    assert block.nbytes < device.memory_allocated() <= device.max_memory_allocated() * 1.01
    available, total = device.mem_get_info()
    assert 0 < available < total
    state = device.get_rng_state()
    numbers = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), numbers)
    assert platform.PlatformCPU().ray_resource_options(0.5) == {"num_gpus": 0.5}


def test_verl_finds_the_rollout_under_its_name():
    cpu.register()
    cpu.register()
    assert get_rollout_class("cpu", "async") is CPUServerAdapter
    assert get_rollout_replica_class("cpu") is CPUReplica


@pytest.mark.parametrize(("variable", "is_added"), [("", False), ("nvidia", False), ("cpu", True), (" CPU ", True)])
def test_the_plugin_adds_the_platform_to_verl_only_where_it_was_asked_for(monkeypatch, variable, is_added):
    hooked_modules = []
    platforms = {}

    def when_imported(name):
        hooked_modules.append(name)
        return lambda hook: hook

    monkeypatch.setenv("VERL_PLATFORM", variable)
    monkeypatch.setattr("wrapt.when_imported", when_imported)
    monkeypatch.setattr("verl_clipx.plugin.when_imported", when_imported)
    monkeypatch.setattr(platform_manager.PlatformRegistry, "_platforms", platforms)
    monkeypatch.setattr(cpu, "_registered", False)
    plugin.install()
    for module in (
        "verl.workers.engine.fsdp.transformer_impl",
        "verl.workers.rollout.base",
        "verl.workers.rollout.replica",
        "verl.checkpoint_engine.base",
    ):
        assert (module in hooked_modules) == is_added, module
    assert list(platforms) == (["cpu"] if is_added else [])
    # The rest of the plugin is hooked anyway.
    assert "verl.workers.engine_workers" in hooked_modules


def test_importing_the_package_imports_neither_torch_nor_verl():
    code = (
        "import sys, verl_clipx.training.cpu; print(sorted({'torch', 'verl', 'ray', 'transformers'} & "
        "set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_environment_variable_chooses_it_and_registering_imports_no_engine_and_no_rollout():
    code = (
        "import verl, sys, verl_clipx.training.cpu as cpu; cpu.register()\n"
        "print([name for name in sys.modules if name.startswith('verl.workers') or 'training.cpu.rollout' in name])\n"
        "from verl.utils.device import get_device_name, get_device_id; print(get_device_name(), get_device_id())"
    )
    environment = os.environ | {"VERL_PLATFORM": "cpu"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert result.stdout.strip().splitlines()[-2:] == ["[]", "cpu cpu"], result.stderr


def test_the_right_variable_passes_and_another_one_says_what_to_run(monkeypatch):
    for value in ("cpu", " CPU "):
        monkeypatch.setenv("VERL_PLATFORM", value)
        assert cpu.check_platform("cpu") == "cpu" and cpu.is_active()
    for value, description in (("", "no VERL_PLATFORM"), ("nvidia", "VERL_PLATFORM=nvidia")):
        monkeypatch.setenv("VERL_PLATFORM", value)
        with pytest.raises(
            ValueError, match=rf"found {description}.*VERL_PLATFORM=cpu python -m verl\.trainer\.main_ppo"
        ):
            cpu.check_platform("cpu")
        assert not cpu.is_active()
