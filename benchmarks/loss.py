"""Time and memory of only the losses, forward and backward, against verl's vanilla: docs/dev/measurements.md.

Run: python benchmarks/loss.py    (64 x 4096 tokens, float32, one thread; on a GPU where there is one)
     python benchmarks/loss.py --shape 8x16384 --shape 256x1024 --bfloat16    (other shapes, in bfloat16)

On the CPU the time is the process's own, which others on the machine cannot stretch by taking turns. Each loss stands
eager and compiled, with its bounds decided before, as a training worker calls it under mini_batch; an adaptive one also
with its statistics taken from the same tokens. `vanilla, observed` is verl's loss under +clipx=observe.
"""

import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import torch._inductor.config
import typer
from shared import actor_config, seconds_of, synchronize, table
from torch.profiler import ProfilerActivity, profile
from verl.trainer.ppo.core_algos import get_policy_loss_fn

from verl_clipx.common.files import write_json
from verl_clipx.losses.base.tokens import OPTIONAL
from verl_clipx.losses.methods import METHODS
from verl_clipx.run.config import OBSERVE
from verl_clipx.training.worker.observe import observe_registered
from verl_clipx.training.worker.policy_loss import settings_for
from verl_clipx.training.worker.step import MicroBatch, OptimizerStep, in_micro_batch, inputs_of

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


def call_of(name: str, config, batch: dict[str, torch.Tensor], micro_batch: MicroBatch | None) -> Callable[[], None]:
    """Returns a call of a loss with its backward pass, as a training worker makes it."""
    log_prob = batch["log_prob"].clone().requires_grad_(True)
    arguments = {**batch, "log_prob": log_prob, "loss_agg_mode": "token-mean", "config": config}
    if name == "vanilla":
        arguments = {key: value for key, value in arguments.items() if key not in OPTIONAL}
    function = get_policy_loss_fn(name)

    def call() -> None:
        log_prob.grad = None
        with in_micro_batch(micro_batch) if micro_batch else nullcontext():
            loss, _ = function(rollout_is_weights=None, **arguments)
            loss.backward()

    return call


def profiled(call: Callable[[], None], device: str) -> tuple[int, float, float]:
    """Returns how many kernels a call launches, their seconds, and its peak extra megabytes.

    On the CPU torch's operators stand for kernels, and the peak is from torch's own record of allocations.
    """
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], profile_memory=not on_gpu) as recorded:
        call()
        synchronize(device)
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    events = [event for event in recorded.events() if event.device_type == kind and not event.is_user_annotation]
    events = [event for event in events if not event.name.startswith(("Memcpy", "Memset", "[memory]"))]
    seconds = sum(event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total for event in events) / 1e6
    held, peak = 0, torch.cuda.max_memory_allocated() - before if on_gpu else 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return len(events), seconds, peak / 1e6


def bandwidth_of(device: str) -> float:
    """Returns the bytes a second, read and written, of a large copy: no loss can be faster."""
    source = torch.empty(2**28 if device == "cuda" else 2**22, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device, calls=10)


def measure(
    configs: dict[str, Any], sequences: int, length: int, *, device: str, dtype: torch.dtype, repeats: int
) -> dict[str, Any]:
    """Measures every loss with a micro-batch of one shape.

    Args:
        configs: by the row's name verl's ActorConfig, vanilla's first.

    Returns:
        The tokens in the mask; `floor`, the seconds in which the device copies what a loss has to read and write once;
        and `rows`, by name what was measured, or `error`, a sentence.
    """
    batch = tensors(sequences, length, device, dtype)
    total = int(batch["response_mask"].sum())
    read = ("log_prob", "old_log_prob", "advantages", "response_mask")
    # The gradient is written.
    traffic = sum(batch[name].nbytes for name in read) + batch["log_prob"].nbytes
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], None]] = {}
    for label, config in configs.items():
        config.global_batch_info.update(dp_size=1, batch_num_tokens=total, global_batch_size=sequences)
        name = label.split(",")[0]
        try:
            known = None if label == "vanilla" or label.endswith(OWN) else decided(name, config, batch)
            call = call_of(name, config, batch, known)
            started = time.perf_counter()
            call()
            synchronize(device)
            rows[label] = {"first_call": time.perf_counter() - started}
            call()
            calls[label] = call
        except Exception as error:
            rows[label] = {"error": f"{type(error).__name__}: {error}"[:300]}
    times: dict[str, list[float]] = {label: [] for label in calls}
    for _ in range(repeats):
        for label, call in calls.items():
            times[label].append(seconds_of(call, device, calls=20 if device == "cuda" else 1))
    for label, call in calls.items():
        profile_of_call = zip(("launches", "kernels", "megabytes"), profiled(call, device), strict=True)
        rows[label] |= {"seconds": times[label], **dict(profile_of_call)}
    return {"tokens": total, "floor": traffic / bandwidth_of(device), "rows": rows}


def table_of(measured: dict[str, Any]) -> str:
    """Returns the table of what `measure` returned, in Markdown."""
    heads = ["loss", "median ms", "range ms", "of vanilla", "kernels", "their ms", "of vanilla", "of the floor"]
    heads += ["peak MB", "of vanilla", "first call s"]
    lines = []
    reference = measured["rows"]["vanilla"]
    for name, row in measured["rows"].items():
        if "error" in row or "error" in reference:
            lines.append([name, "failed", row.get("error", "")])
            continue
        seconds, first = row["seconds"], reference["seconds"]
        median, of_first = statistics.median(seconds), statistics.median(first)
        spread = f"{min(seconds) * 1e3:.1f}-{max(seconds) * 1e3:.1f}"
        cells = [f"{median * 1e3:.3g}", spread, f"{median / of_first:.2f}", row["launches"]]
        cells += [f"{row['kernels'] * 1e3:.3g}", f"{row['kernels'] / reference['kernels']:.2f}"]
        cells += [f"{row['kernels'] / measured['floor']:.2f}", f"{row['megabytes']:.1f}"]
        cells += [f"{row['megabytes'] / reference['megabytes']:.2f}", f"{row['first_call']:.1f}"]
        lines.append([name, *cells])
    return table(heads, lines)


def main(
    shapes: Annotated[list[str] | None, typer.Option("--shape", help="Sequences x tokens, 64x4096 by default.")] = None,
    repeats: Annotated[int, typer.Option(help="Measurements of each loss, interleaved.")] = 7,
    methods: Annotated[list[str] | None, typer.Argument(help="Which ones; all by default.")] = None,
    bfloat16: Annotated[bool, typer.Option("--bfloat16", help="Log-probabilities in it.")] = False,
    chosen: Annotated[list[str] | None, typer.Option("--form", help="eager or compiled; both by default.")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="A file for the figures.")] = None,
) -> None:
    """Print a table a shape: time, kernels and peak memory of each loss, and their ratio to verl's vanilla."""
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
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    configs = {"vanilla": actor_config()}
    observe_registered("vanilla")
    for name in methods or [*METHODS, OBSERVE]:
        for form, compile in FORMS.items():
            if chosen and form not in chosen:
                continue
            if name == OBSERVE:
                configs[OBSERVED] = actor_config("+clipx=observe")
                continue
            label = f"clipx_{name}, {form}"
            needed = ["actor_rollout_ref.rollout.calculate_log_probs=true", f"clipx.compile={compile}"]
            configs[label] = actor_config(f"+clipx={name}", *needed)
            if METHODS[name]().statistics_size:
                configs[label + OWN] = configs[label]
    results = {}
    for shape in shapes or ["64x4096"]:
        sequences, length = map(int, shape.split("x"))
        results[shape] = measure(configs, sequences, length, device=device, dtype=dtype, repeats=repeats)
        heading = f"{device}, {dtype}, {shape}, {results[shape]['tokens']} tokens, torch {torch.__version__}"
        print(f"{heading}, {repeats} repeats\n{table_of(results[shape])}", flush=True)
        if output:
            write_json(output, {"device": device, "dtype": str(dtype), "shapes": results})
    if any("error" in row for result in results.values() for row in result["rows"].values()):
        sys.exit("a loss failed")


if __name__ == "__main__":
    typer.run(main)
