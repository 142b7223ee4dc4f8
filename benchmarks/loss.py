"""Time and memory of only the losses, forward and backward, against verl's vanilla: docs/dev/measurements.md.

Run: python benchmarks/loss.py    (64 x 4096 tokens, float32, one thread; on a GPU where there is one, in bfloat16)
     python benchmarks/loss.py --shape 8x16384 --shape 256x1024 --bfloat16    (other shapes; in bfloat16 anywhere)

On the CPU the time is the process's own, which others on the machine cannot stretch by taking turns. Each loss stands
eager and compiled, with its bounds decided before, as a training worker calls it under mini_batch; an adaptive one also
with its statistics taken from the same tokens. `vanilla, observed` is verl's loss under +clipx=observe.
"""

import ctypes
import os
import statistics
import sys
import time
from contextlib import nullcontext
from typing import Annotated, Any

import torch
import torch._inductor.config
import typer
from shared import actor_config
from verl.trainer.ppo.core_algos import get_policy_loss_fn

from verl_clipx.base.tokens import OPTIONAL
from verl_clipx.loss.compiled import TokenFunctions
from verl_clipx.methods import METHODS
from verl_clipx.run.config import OBSERVE
from verl_clipx.worker.observe import observe_registered
from verl_clipx.worker.policy_loss import inputs_of, settings_for
from verl_clipx.worker.step import MicroBatch, OptimizerStep, in_micro_batch

FORMS = {"eager": "false", "compiled": "true"}
OWN = ", own statistics"
OBSERVED = "vanilla, observed"

# Of the C library's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def tensors(sequences: int, length: int, device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Ragged sequences with ratios on both sides of the bounds."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(sequences, length, generator=generator) * 4
    lengths = torch.randint(length // 4, length + 1, (sequences, 1), generator=generator)
    found = {
        "old_log_prob": old.to(dtype),
        "log_prob": (old + 0.3 * torch.randn(sequences, length, generator=generator)).to(dtype),
        "advantages": torch.randn(sequences, 1, generator=generator).expand(-1, length).contiguous(),
        "response_mask": torch.arange(length) < lengths,
        "rollout_log_prob": old.to(dtype),
        "entropy": torch.rand(sequences, length, generator=generator).to(dtype),
        "group": torch.arange(sequences) // 8,
    }
    return {name: tensor.to(device) for name, tensor in found.items()}


def decided(name: str, config, batch: dict[str, torch.Tensor]) -> MicroBatch:
    """A micro-batch whose bounds are known before the loss is called."""
    if name == "vanilla":
        return MicroBatch()
    settings = settings_for(name.removeprefix("clipx_"), config, "token-mean")
    known = MicroBatch(**{key: batch[key] for key in OPTIONAL})
    given = {key: batch[key] for key in ("old_log_prob", "log_prob", "advantages")}
    inputs = inputs_of(settings, known, **given, mask=batch["response_mask"])
    statistics = settings.functions(inputs.mask.device).statistics(inputs)
    known.step = OptimizerStep(statistics=statistics, decision=settings.method.decide(statistics))
    return known


def measure(
    name: str, config, batch: dict[str, torch.Tensor], device: str, micro_batch: MicroBatch | None = None
) -> tuple[float, float]:
    """Seconds and peak extra megabytes of one call with its backward pass."""
    log_prob = batch["log_prob"].clone().requires_grad_(True)
    arguments = {**batch, "log_prob": log_prob, "loss_agg_mode": "token-mean", "config": config}
    if name == "vanilla":
        arguments = {key: value for key, value in arguments.items() if key not in OPTIONAL}
    function = get_policy_loss_fn(name)
    clock = time.process_time
    if device == "cuda":
        clock = time.perf_counter
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with in_micro_batch(micro_batch) if micro_batch else nullcontext():
        started = clock()
        loss, _ = function(rollout_is_weights=None, **arguments)
        loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = clock() - started
    if device == "cuda":
        return seconds, (torch.cuda.max_memory_allocated() - before) / 1e6
    return seconds, float("nan")


def loops_of(name: str) -> int:
    """How many loops torch.compile makes of a method's loss and statistics, by its own count."""
    from torch._inductor import metrics

    metrics.reset()
    TokenFunctions(METHODS[name](), None, compiled=True).prepare("cpu", counted=False)
    return metrics.generated_kernel_count


def peak_on_cpu(name: str, config, batch: dict[str, torch.Tensor], micro_batch: MicroBatch | None) -> float:
    """Peak extra megabytes on the CPU, from torch's own record of allocations."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        measure(name, config, batch, "cpu", micro_batch)
    held = peak = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak / 1e6


def measured(configs: dict[str, Any], sequences: int, length: int, *, device: str, dtype: torch.dtype, repeats: int):
    """Prints the table of one shape of a micro-batch.

    Args:
        configs: by the row's name verl's ActorConfig, vanilla's first.
    """
    batch = tensors(sequences, length, device, dtype)
    total = int(batch["response_mask"].sum())
    for config in configs.values():
        config.global_batch_info.update(dp_size=1, batch_num_tokens=total, global_batch_size=sequences)
    losses = {label: (label.split(",")[0], config, batch) for label, config in configs.items()}
    known = {
        label: None if label == "vanilla" or label.endswith(OWN) else decided(*called)
        for label, called in losses.items()
    }
    times: dict[str, list[float]] = {name: [] for name in losses}
    memory: dict[str, float] = {}
    for repeat in range(repeats + 1):
        for name, called in losses.items():
            seconds, megabytes = measure(*called, device, known[name])
            memory[name] = megabytes
            if repeat:
                times[name].append(seconds)
    if device == "cpu":
        memory = {name: peak_on_cpu(*called, known[name]) for name, called in losses.items()}
    print(f"{device}, {dtype}, {sequences} x {length}, {total} tokens, torch {torch.__version__}, {repeats} repeats")
    print("| loss | median ms | range ms | of vanilla | peak MB | of vanilla |\n|---|---|---|---|---|---|")
    reference = statistics.median(times["vanilla"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        spread = f"{min(seconds) * 1e3:.1f}-{max(seconds) * 1e3:.1f}"
        share, of_memory = median / reference, memory[name] / memory["vanilla"]
        print(
            f"| {name} | {median * 1e3:.1f} | {spread} | {share:.2f} | {memory[name]:.1f} | {of_memory:.2f} |",
            flush=True,
        )


def main(
    shapes: Annotated[list[str] | None, typer.Option("--shape", help="Sequences x tokens, 64x4096 by default.")] = None,
    repeats: Annotated[int, typer.Option(help="Measurements of each loss, interleaved.")] = 7,
    methods: Annotated[list[str] | None, typer.Argument(help="Which ones; all by default.")] = None,
    bfloat16: Annotated[bool, typer.Option("--bfloat16", help="Log-probabilities in it on the CPU, too.")] = False,
) -> None:
    """Print a table a shape: median time, spread and peak memory of each loss, and their ratio to verl's vanilla."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        # Freed memory stays with the process, as with an accelerator's allocator. Otherwise eager times vary by half,
        # with what the process has allocated before.
        keep = ctypes.CDLL("libc.so.6").mallopt
        keep(M_MMAP_THRESHOLD, 1 << 30), keep(M_TRIM_THRESHOLD, (1 << 31) - 1)
    # The compiler's cache may hold code for another number of threads.
    torch._inductor.config.force_disable_caches = True
    # Nothing is launched, so the check for an accelerator has to look elsewhere.
    os.environ.setdefault("RAY_ADDRESS", "127.0.0.1:6379")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if bfloat16 or device == "cuda" else torch.float32
    configs = {"vanilla": actor_config()}
    observe_registered("vanilla")
    for name in methods or [*METHODS, OBSERVE]:
        for form, compile in FORMS.items():
            if name == OBSERVE:
                configs[f"{OBSERVED}, {form}"] = actor_config("+clipx=observe", f"clipx.compile={compile}")
                continue
            label = f"clipx_{name}, {form}"
            needed = ["actor_rollout_ref.rollout.calculate_log_probs=true", f"clipx.compile={compile}"]
            configs[label] = actor_config(f"+clipx={name}", *needed)
            if METHODS[name]().statistics_size:
                configs[label + OWN] = configs[label]
    for shape in shapes or ["64x4096"]:
        sequences, length = map(int, shape.split("x"))
        measured(configs, sequences, length, device=device, dtype=dtype, repeats=repeats)
    for name in (name for name in methods or METHODS if name in METHODS):
        print(f"clipx_{name}: {loops_of(name)} loops in the compiler's record, statistics included")


if __name__ == "__main__":
    typer.run(main)
