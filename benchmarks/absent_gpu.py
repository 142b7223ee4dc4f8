"""A GPU that isn't there, so that torch's CPU build makes a GPU's code: import it before anything else that is torch's.

Tensors are FakeTensorMode's, on the device "cuda"; Dynamo, AOTAutograd, Inductor and Triton are the real ones. What is
replaced here asks for a GPU's properties, or enters its device guard, which a CPU build lacks.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo.device_interface
import torch._inductor.runtime.triton_helpers
import torch.cuda.random
import triton
from torch import Tensor
from torch._inductor.fx_passes import fuse_attention, joint_graph, misc_patterns, pad_mm
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

# Streaming multiprocessors, by architecture: of an A100 and of an H100.
MULTIPROCESSORS = {80: 108, 90: 132}

SHARED_MEMORY = 166_912


def pretend(architecture: int) -> None:
    """Has torch and Triton find one GPU."""
    major, minor = divmod(architecture, 10)
    properties = SimpleNamespace(
        name=f"sm_{architecture}",
        major=major,
        minor=minor,
        multi_processor_count=MULTIPROCESSORS[architecture],
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=80 << 30,
        L2_cache_size=40 << 20,
        shared_memory_per_block=49_152,
        shared_memory_per_block_optin=SHARED_MEMORY,
        shared_memory_per_multiprocessor=167_936,
        gcnArchName="",
    )
    target = GPUTarget("cuda", architecture, 32)
    pretend_device(properties)
    pretend_driver(target)
    keep_off_the_device_guard()
    leave_out_what_runs()


def pretend_device(properties: SimpleNamespace) -> None:
    """What torch asks of a CUDA device."""
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._cuda_getCurrentRawStream = always(0)
    torch.version.cuda = "13.0"
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": (properties.major, properties.minor),
        "synchronize": None,
        "set_device": None,
        "_lazy_init": None,
        "_exchange_device": -1,
        "_maybe_exchange_device": -1,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, always(answer))
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = always(torch.empty(0, dtype=torch.uint8))
        module.set_rng_state = always(None)
    interface = torch._dynamo.device_interface.CudaInterface
    for name in ("device_count", "current_device", "get_device_properties", "synchronize"):
        setattr(interface, name, staticmethod(always(answers[name])))
    interface.get_raw_stream = staticmethod(always(0))
    interface.is_bf16_supported = staticmethod(always(True))
    for name in ("current_device", "get_device_properties"):
        setattr(interface.Worker, name, staticmethod(always(answers[name])))
    fake_tensor.FakeTensorMode.avoid_device_init = property(always(True))
    fake_tensor.init_gpu_context = always(None)


def pretend_driver(target: GPUTarget) -> None:
    """What Triton asks of its driver."""
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=always(target),
            get_current_device=always(0),
            get_current_stream=always(0),
            get_device_interface=always(torch.cuda),
            is_active=always(True),
            utils=SimpleNamespace(get_device_properties=always({"max_shared_mem": SHARED_MEMORY})),
        )
    )
    torch._inductor.runtime.triton_helpers.set_driver_to_gpu = always(None)


def keep_off_the_device_guard() -> None:
    """~x and x[…], whose own bindings enter it, as the operators that these bindings call."""
    torch.Tensor.__invert__ = lambda self: torch.bitwise_not(self)
    torch.Tensor.__getitem__ = indexed


def indexed(values: Tensor, index: Any) -> Tensor:
    """values[index], by operators."""
    dim = 0
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, slice):
            if part != slice(None):
                values = torch.ops.aten.slice.Tensor(values, dim, part.start, part.stop, part.step or 1)
        elif isinstance(part, Tensor):
            values = torch.ops.aten.index.Tensor(values, [None] * dim + [part])
        elif part is None:
            values = values.unsqueeze(dim)
        else:
            values, dim = torch.ops.aten.select.int(values, dim, part), dim - 1
        dim += 1
    return values


def leave_out_what_runs() -> None:
    """The two passes of Inductor that run something on the device."""
    # Patterns of attention, padded products and permutations, none of which occurs here.
    fuse_attention._sfdp_init = misc_patterns._misc_patterns_init = pad_mm._pad_mm_init = always(None)
    folder = joint_graph.UniformValueConstantFolder
    folder.__init__, folder.run = on_cpu(folder.__init__), on_cpu(folder.run)


class ConstantsOnCpu(TorchDispatchMode):
    """Makes tensors on the CPU, whatever device they are asked for."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = dict(keywords or {})
        if keywords.get("device") is not None:
            keywords["device"] = torch.device("cpu")
        return function(*arguments, **keywords)


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with `ConstantsOnCpu`."""

    @functools.wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        with ConstantsOnCpu():
            return function(*arguments, **keywords)

    return run


def always(answer: Any) -> Callable[..., Any]:
    """A function that returns this whatever it is given."""
    return lambda *arguments, **keywords: answer
