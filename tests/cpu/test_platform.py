"""The platform and its device module.

Not covered: that VERL_PLATFORM chooses it (test_registration.py), Ray's placement of workers (end-to-end runs).
"""

import re
from pathlib import Path

import torch
import verl
from verl.plugin.platform import platform_manager

from verl_clipx.cpu import device, platform

# Only CUDA transports and profilers call these, which no CPU run reaches.
CUDA_ONLY = {"Event"}


def test_it_is_never_chosen_by_detection(monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(platform_manager.PlatformRegistry, "_platforms", {"cpu": platform.PlatformCPU})
    # verl's answer where nothing was detected.
    assert platform_manager._detect_platform_name() == "nvidia"


def test_every_device_function_that_verl_calls_exists():
    source = "\n".join(path.read_text() for path in Path(verl.__file__).parent.rglob("*.py"))
    called = set(re.findall(r"get_torch_device\(\)\.(\w+)", source))
    assert {"empty_cache", "max_memory_allocated"} <= called
    assert [name for name in sorted(called - CUDA_ONLY) if not hasattr(device, name)] == []


def test_memory_is_the_processs_own_random_state_can_be_restored_and_worker_slots_are_rays_gpu_resource():
    block = torch.ones(8 << 20)
    assert block.nbytes < device.memory_allocated() <= device.max_memory_allocated() * 1.01
    available, total = device.mem_get_info()
    assert 0 < available < total
    state, first = device.get_rng_state(), torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    assert platform.PlatformCPU().ray_resource_options(0.5) == {"num_gpus": 0.5}
