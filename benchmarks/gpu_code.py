"""Counts what the compiler emits of the losses for a GPU, without one: docs/dev/measurements.md.

Run: pip install --no-deps --target .venv/triton triton==3.7.1    (in the environment it would change what torch does)
     PYTHONPATH=.venv/triton python benchmarks/gpu_code.py    (every method; some minutes)
     PYTHONPATH=.venv/triton python benchmarks/gpu_code.py --architecture 80    (for an A100 instead of an H100)

Each method's graphs are compiled as a training worker does before its first step, by `TokenFunctions.prepare`, with
Dynamo and Inductor, for tensors that only have a shape. Counted is in the code that Inductor emits around its kernels;
nothing runs. Thread blocks and bytes were counted at commit 15fde0a8, registers and float64 instructions at 9b49becd.
"""

import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any
from unittest.mock import patch

import torch
import torch._inductor.config
import torch.cuda.random
import triton
import typer
from shared import table
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes import fuse_attention, joint_graph, misc_patterns, pad_mm
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

from verl_clipx.losses.applying.compiled import EXAMPLE_LENGTH, EXAMPLE_SEQUENCES, TokenFunctions
from verl_clipx.losses.methods import METHODS
from verl_clipx.losses.modifiers import AdvantageReweighting, FutureInfluence

# What may follow a method's name and a plus.
SHAPINGS = {"": None, "advantage_reweighting": AdvantageReweighting(), "fipo": FutureInfluence()}
# Streaming multiprocessors, by architecture: of an A100 and of an H100.
MULTIPROCESSORS = {80: 108, 90: 132}


def always(answer: Any) -> Callable[..., Any]:
    """Returns a function that returns this whatever it is given."""
    return lambda *arguments, **keywords: answer


def pretend(architecture: int) -> None:
    """Has torch's CPU build answer what its compiler asks of a GPU, and keeps it from what would run there."""
    properties = SimpleNamespace(
        name=f"sm_{architecture}",
        major=architecture // 10,
        multi_processor_count=MULTIPROCESSORS[architecture],
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block=49_152,
        shared_memory_per_block_optin=166_912,
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": divmod(architecture, 10),
        "_exchange_device": -1,
        "_maybe_exchange_device": -1,
    }
    target = GPUTarget("cuda", architecture, 32)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=always(target)))
    for place in (torch.cuda, CudaInterface, CudaInterface.Worker):
        for name, answer in answers.items():
            setattr(place, name, staticmethod(always(answer)))
    for place in (torch.cuda, torch.cuda.random):
        place.get_rng_state, place.set_rng_state = always(torch.empty(0, dtype=torch.uint8)), always(None)
    FakeTensorMode.avoid_device_init = property(always(True))
    torch._subclasses.fake_tensor.init_gpu_context = always(None)
    # Two operators whose own bindings need a CUDA build.
    Tensor.__invert__, Tensor.__getitem__ = lambda values: torch.bitwise_not(values), indexed
    # Patterns of attention, padded products and permutations, none of which occurs here, are tried on the device.
    fuse_attention._sfdp_init = misc_patterns._misc_patterns_init = pad_mm._pad_mm_init = always(None)
    folder = joint_graph.UniformValueConstantFolder
    folder.__init__, folder.run = on_cpu(folder.__init__), on_cpu(folder.run)


def indexed(values: Tensor, index: Any) -> Tensor:
    """Returns values[index], by operators."""
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


class ConstantsOnCpu(TorchDispatchMode):
    """Makes tensors on the CPU, whatever device they are asked for."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        device = {"device": torch.device("cpu")} if (keywords or {}).get("device") is not None else {}
        return function(*arguments, **{**(keywords or {}), **device})


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with `ConstantsOnCpu`."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        with ConstantsOnCpu():
            return function(*arguments, **keywords)

    return run


def codes_of(name: str) -> dict[str, str]:
    """Returns the code around the kernels of a method's graphs, by what they compute."""
    codes, compile = [], torch.compile

    def emit(graph: GraphLowering) -> SimpleNamespace:
        codes.append(graph.codegen()[0].value)
        return SimpleNamespace(call=None, __file__="")

    def keep_and_run_uncompiled(module: Any, examples: list[Any], options: dict[str, Any] | None = None) -> Any:
        with patch.object(GraphLowering, "compile_to_module", emit):
            compile_fx(module, examples, config_patches=options)
        return module.forward

    def compile_for_gpu(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return compile(function, backend=keep_and_run_uncompiled, **options)

    torch._dynamo.reset()
    of_method, _, of_shaping = name.partition("+")
    with FakeTensorMode(allow_non_fake_inputs=True), patch.object(torch, "compile", compile_for_gpu):
        functions = TokenFunctions(METHODS[of_method](), SHAPINGS[of_shaping], compiled=True)
        functions.prepare("cuda", counted=False)
    if not functions.compiled:
        sys.exit(f"{name}: the compiler failed.")
    method = functions.method
    sizes = {"statistics": method.statistics_size, "second statistics": method.second_statistics_size, "loss": 1}
    return dict(zip((part for part, size in sizes.items() if size), codes, strict=True))


def counted(code: str) -> dict[str, Any]:
    """Returns a graph's launches, the operators of torch's own that it calls, and the buffers of a number a token.

    Inputs and outputs are no buffers.
    """
    call = code[code.index("def call(") :]
    rows, columns = re.search(r"\((s\d+), (s\d+)\), \(\2, 1\)", call).groups()
    sizes = dict.fromkeys(re.findall(r"\bs\d+\b", call), 1) | {rows: EXAMPLE_SEQUENCES, columns: EXAMPLE_LENGTH}
    returned = re.findall(r"\w+", call[call.rindex("return (") :])
    buffers = re.findall(r"(buf\d+) = empty_strided_cuda\((\(.*?\)), \(", call)
    large = [name for name, size in buffers if math.prod(eval(size, sizes)) >= EXAMPLE_SEQUENCES * EXAMPLE_LENGTH]
    fallbacks = re.findall(r"((?:aten|torch\.ops|extern_kernels)\.[\w.]+)\(", call)
    return {"launches": call.count(".run("), "fallbacks": fallbacks, "buffers": len({*large} - {*returned})}


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Such as acpo or grpo+fipo; all methods by default.")
    ] = None,
    architecture: Annotated[int, typer.Option(help=f"One of {', '.join(map(str, MULTIPROCESSORS))}.")] = 90,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what the compiler emits for a GPU: a row a graph."""
    logging.basicConfig()
    # Nothing is launched, so the check for an accelerator has to look elsewhere.
    os.environ.setdefault("RAY_ADDRESS", "127.0.0.1:6379")
    torch._inductor.config.force_disable_caches = True
    pretend(architecture)
    rows = []
    for name in names or METHODS:
        rows += [{"method": name, "part": part, **counted(code)} for part, code in codes_of(name).items()]
        print(name, rows[-1], file=sys.stderr)
    print(json.dumps(rows) if as_json else table([*rows[0]], [row.values() for row in rows]))


if __name__ == "__main__":
    typer.run(main)
