"""The losses' GPU code, counted without a GPU: compiled, never run. docs/dev/measurements.md has the table.

Run: bash scripts/setup_triton.sh    (Triton beside the environment: installed in it, it would change what torch does)
     PYTHONPATH=.venv/triton python benchmarks/gpu_code.py    (every method; some minutes)
     PYTHONPATH=.venv/triton python benchmarks/gpu_code.py --architecture 80    (for an A100 instead of an H100)

Each method's graphs are compiled as a training worker does before its first step, by `TokenFunctions.prepare`, with
Dynamo, Inductor, Triton and its ptxas, for tensors that only have a shape. What Inductor emits is then called with such
tensors of a micro-batch's shape, so that its launches, their thread blocks and buffers are counted, not guessed.
Registers and float64 instructions were counted with ptxas and nvdisasm at commit 9b49becd.
"""

import dataclasses
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import torch._inductor.config
import triton
import typer
from absent_gpu import MULTIPROCESSORS, pretend
from shared import table
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.triton_heuristics import GridExpr
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from verl_clipx.loss.compiled import EXAMPLE_LENGTH, EXAMPLE_SEQUENCES, TokenFunctions
from verl_clipx.methods import METHODS
from verl_clipx.modifiers import AdvantageReweighting, FutureInfluence

# What may follow a method's name and a plus.
SHAPINGS = {"": None, "advantage_reweighting": AdvantageReweighting(), "fipo": FutureInfluence()}

SHAPES = ((64, 4096), (8, 16384), (256, 1024))


@dataclass
class Kernel:
    """A kernel of Triton's, and each launch's arguments."""

    name: str
    source: str
    launches: list[tuple[Any, ...]] = field(default_factory=list)

    def run(self, *arguments: Any, stream: int) -> None:
        """What Inductor's wrapper calls to launch it."""
        self.launches.append(arguments)

    @property
    def tuner(self) -> Any:
        """Inductor's, with the configurations that it would try."""
        return getattr(PyCodeCache.load(self.source), self.name)


@dataclass
class Graph:
    """What Inductor made of a function.

    Args:
        examples: the graph's inputs, of the example's sizes.
    """

    run: Callable[..., Any]
    examples: list[Any]
    wrapper: str
    kernels: dict[str, Kernel]


@dataclass(frozen=True)
class Row:
    """What a graph does with a micro-batch of one shape.

    Args:
        method, part: the loss or the statistics of which method.
        sequences, length: the micro-batch.
        fallbacks: operators that run as kernels of torch's own, by name.
        buffers: of a number a token or more that are neither inputs nor outputs.
        traffic: bytes read and written, over those of reading each input and writing each output once.
        blocks: of threads, the least of a kernel that touches every token.
    """

    architecture: int
    method: str
    part: str
    sequences: int
    length: int
    launches: int
    fallbacks: list[str]
    buffers: int
    traffic: float
    blocks: int


class Compiler:
    """torch.compile's backend that keeps what Inductor emits, and runs the graph as it is."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.allocated: list[Tensor] = []
        self._kernels: dict[str, Kernel] = {}
        self._wrapper = ""
        lower = GraphLowering.codegen

        def codegen(graph: GraphLowering) -> Any:
            emitted = lower(graph)
            self._wrapper = emitted[0].value
            return emitted

        def kernel(_: AsyncCompile, name: str, source: str, device_str: str = "cuda") -> Kernel:
            return self._kernels.setdefault(name, Kernel(name, source))

        GraphLowering.codegen, AsyncCompile.triton = codegen, kernel
        torch._C._dynamo.guards._empty_strided_cuda = self._allocate
        torch._C._dynamo.guards.copy_if_misaligned = lambda tensor: tensor
        torch._inductor.config.force_disable_caches = True
        torch._inductor.config.compile_threads = 1

    def __call__(
        self, module: torch.fx.GraphModule, examples: list[Any], options: dict[str, Any] | None = None
    ) -> Callable[..., Any]:
        self._kernels = {}
        run = compile_fx(module, examples, config_patches=options)
        self.graphs.append(Graph(run, examples, self._wrapper, self._kernels))
        return module.forward

    def _allocate(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.allocated.append(torch.empty_strided(size, stride, dtype=dtype, device="meta"))
        return self.allocated[-1]


def graphs_of(name: str, compiler: Compiler) -> dict[str, Graph]:
    """A method's graphs, by what they compute."""
    torch._dynamo.reset()
    compiler.graphs = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        of_method, _, of_shaping = name.partition("+")
        functions = TokenFunctions(METHODS[of_method](), SHAPINGS[of_shaping], compiled=True)
        functions.prepare("cuda", counted=False)
    if not functions.compiled:
        sys.exit(f"{name}: the compiler failed.")
    method = functions.method
    sizes = {"statistics": method.statistics_size, "second statistics": method.second_statistics_size, "loss": 1}
    parts = [part for part, size in sizes.items() if size]
    return dict(zip(parts, compiler.graphs, strict=True))


def of_shape(example: Any, sequences: int, length: int) -> Any:
    """A graph's input, of other sizes."""
    sizes = {EXAMPLE_SEQUENCES: sequences, EXAMPLE_LENGTH: length}
    if not isinstance(example, Tensor):
        return sizes.get(int(example), int(example))
    if example.device.type == "cpu":
        return torch.ones(example.shape, dtype=example.dtype)
    size = [sizes.get(int(one), int(one)) for one in example.shape]
    return torch.empty(size, dtype=example.dtype, device="meta")


def grids_of(kernel: Kernel, architecture: int) -> list[Callable[[dict[str, int]], int]]:
    """From a launch's sizes to its thread blocks, in each configuration that Inductor would try; each is compiled."""
    tuner, grids = kernel.tuner, []
    for config in tuner.configs:
        meta = tuner._create_compile_meta(config)
        source = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
        target = GPUTarget("cuda", architecture, 32)
        triton.compile(source, target=target, options=tuner._create_compile_options(config, meta))
        grid = GridExpr.from_meta(tuner.inductor_meta, config)
        grids.append(lambda sizes, grid=grid: math.prod(grid.eval_slow(sizes)))
    return grids


def accesses(kernel: Kernel, parameter: str) -> int:
    """How often each element behind a pointer is read or written: once for each load and store in the source."""
    return len(re.findall(rf"tl\.(?:load|store|atomic_add)\({parameter} ", kernel.source))


def counted(graph: Graph, compiler: Compiler, grids: dict[str, list], sequences: int, length: int) -> dict:
    """A row's numbers."""
    tokens = sequences * length
    compiler.allocated = []
    for kernel in graph.kernels.values():
        kernel.launches = []
    inputs = [of_shape(example, sequences, length) for example in graph.examples]
    with torch.no_grad():
        outputs = [one for one in graph.run(*inputs) if isinstance(one, Tensor)]
    floor = sum(one.nbytes for one in [*inputs, *outputs] if isinstance(one, Tensor))
    kept = {one.untyped_storage()._cdata for one in outputs}
    large = [one for one in compiler.allocated if one.numel() >= tokens]
    launches = traffic = 0
    blocks = []
    for kernel in graph.kernels.values():
        names = list(kernel.tuner.triton_meta["signature"])
        for arguments in kernel.launches:
            given = dict(zip(names, arguments, strict=False))
            launches += 1
            tensors = {name: one for name, one in given.items() if isinstance(one, Tensor)}
            traffic += sum(one.nbytes * accesses(kernel, name) for name, one in tensors.items())
            if any(one.numel() >= tokens for one in tensors.values()):
                sizes = {name: one for name, one in given.items() if name.endswith("numel")}
                blocks.append(min(grid(sizes) for grid in grids[kernel.name]))
    call = graph.wrapper[graph.wrapper.index("def call") :]
    return {
        "launches": launches,
        "fallbacks": re.findall(r"((?:aten|torch\.ops|extern_kernels)\.[\w.]+)\(", call),
        "buffers": sum(one.untyped_storage()._cdata not in kept for one in large),
        "traffic": round(traffic / floor, 3),
        "blocks": min(blocks),
    }


def rows_of(architecture: int, names: list[str]) -> list[Row]:
    """Every method's graphs with a micro-batch of each of `SHAPES`."""
    pretend(architecture)
    compiler, compile = Compiler(), torch.compile
    torch.compile = lambda function, **options: compile(function, backend=compiler, **options)
    rows = []
    for name in names:
        for part, graph in graphs_of(name, compiler).items():
            grids = {kernel: grids_of(one, architecture) for kernel, one in graph.kernels.items()}
            for shape in SHAPES:
                rows.append(Row(architecture, name, part, *shape, **counted(graph, compiler, grids, *shape)))
            print(f"{name}, {part}: {rows[-1]}", file=sys.stderr)
    return rows


def table_of(rows: list[Row]) -> str:
    """A line a row, in Markdown."""
    values = [{**dataclasses.asdict(row), "fallbacks": ", ".join(row.fallbacks) or "none"} for row in rows]
    return table([one.name for one in dataclasses.fields(Row)], [row.values() for row in values])


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Such as acpo or grpo+fipo; all methods by default.")
    ] = None,
    architecture: Annotated[int, typer.Option(help=f"One of {', '.join(map(str, MULTIPROCESSORS))}.")] = 90,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what the compiler emits for a GPU: a row a graph and shape of a micro-batch."""
    logging.basicConfig()
    # Nothing is launched, so the check for an accelerator has to look elsewhere.
    os.environ.setdefault("RAY_ADDRESS", "127.0.0.1:6379")
    rows = rows_of(architecture, names or list(METHODS))
    print(json.dumps([dataclasses.asdict(row) for row in rows]) if as_json else table_of(rows))


if __name__ == "__main__":
    typer.run(main)
