"""The ``torch.<device>`` namespace that verl asks a platform for: ``torch.cpu`` plus what it lacks.

verl calls the functions of ``torch.cuda`` through ``get_torch_device()``. Memory figures are the process's own
(resident set), so verl's ``perf/max_memory_*`` metrics keep a meaning.
"""

import resource
import sys

import psutil
import torch
from torch.cpu import (  # noqa: F401  (verl calls them by this module's name)
    Stream,
    current_stream,
    device_count,
    is_available,
    set_device,
    stream,
    synchronize,
)

manual_seed = torch.manual_seed
manual_seed_all = torch.manual_seed


def current_device() -> str:
    """``"cpu"``: what ``tensor.to(current_device())`` needs. There is no index."""
    return "cpu"


def get_device_name(device: object = None) -> str:
    """``"CPU"``, the key of verl's table of peak FLOPS."""
    return "CPU"


def get_rng_state(device: object = None) -> torch.Tensor:
    """State of torch's CPU generator (uint8 vector)."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: object = None) -> None:
    """Restore torch's CPU generator from `get_rng_state`."""
    torch.set_rng_state(state)


def empty_cache() -> None:
    """Nothing to free: torch's CPU allocator keeps no cache."""


def ipc_collect() -> None:
    """Nothing to collect: there are no device IPC handles."""


def set_per_process_memory_fraction(fraction: float, device: object = None) -> None:
    """No effect: host memory is not partitioned."""


def memory_allocated(device: object = None) -> int:
    """Resident set of this process, in bytes."""
    return psutil.Process().memory_info().rss


def max_memory_allocated(device: object = None) -> int:
    """Largest resident set this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def mem_get_info(device: object = None) -> tuple[int, int]:
    """Available and total host memory, in bytes."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total
