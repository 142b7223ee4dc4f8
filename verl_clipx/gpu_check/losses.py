"""Checks the losses in one process, with torch only, without Ray or verl.

From the same tokens, each method's loss is computed in float32, uncompiled and compiled, and uncompiled in float64.
"""

import time
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from verl_clipx.base.tokens import Inputs
from verl_clipx.gpu_check.report import Measured, Result, tried
from verl_clipx.loss.compiled import TokenFunctions
from verl_clipx.loss.loss import per_token_loss
from verl_clipx.methods import BUILT_IN, METHODS, Method

# Tolerance for the same arithmetic in another order, in float32.
SAME = 1e-5
# Tolerance between float32 and float64.
ROUNDING = 1e-4
CALLS = 10
# After this time no further loss is started, because the command promises to take less than ten minutes.
SECONDS = 540
SIZES = {"cpu": (16, 96), "cuda": (64, 4096)}


def loss_results(device: str) -> Iterator[Result]:
    """Check the loss of every method; yields each result as soon as it is known."""
    begun = time.monotonic()
    for name in BUILT_IN:
        if time.monotonic() - begun > SECONDS:
            yield Result(f"loss of {name}", "skip", "not run, because nine minutes had passed")
            continue
        yield tried(f"loss of {name}", lambda name=name: loss_check(METHODS[name](), device))


def loss_check(method: Method, device: str) -> Measured:
    """Check a method's loss.

    The compiled, the uncompiled and the float64 results must agree, and values that are not finite must not get lost.
    Time, memory and kernels are measured too.
    """
    functions = {name: TokenFunctions(method, None, compiled=name == "compiled") for name in ("eager", "compiled")}
    inputs = example(method, device, torch.float32)
    exact = gradient(functions["eager"], converted(inputs, torch.float64))
    found = {name: gradient(one, inputs) for name, one in functions.items()}
    numbers = {
        "compiled_from_eager": difference(found["compiled"], found["eager"]),
        "eager_from_float64": difference(found["eager"], exact),
        "compiled_from_float64": difference(found["compiled"], exact),
    }
    kept = all(keeps_not_finite(one, inputs) for one in functions.values())
    for name, one in functions.items():
        numbers |= {f"{key}_{name}": value for key, value in costs(one, inputs).items()}
    compiled = functions["compiled"].compiled
    # Written so that a NaN does not pass.
    passed = numbers["compiled_from_eager"] <= SAME and numbers["eager_from_float64"] <= ROUNDING
    passed = passed and numbers["compiled_from_float64"] <= ROUNDING and kept and compiled
    told = ", ".join(f"{key.replace('_', ' ')} {value:.2g}" for key, value in numbers.items())
    told += "" if kept else "; a value that is not finite was lost"
    told += "" if compiled else "; the compiler failed, so the loss stayed uncompiled"
    return Measured(passed, told, numbers)


def example(method: Method, device: str, dtype: torch.dtype) -> Inputs:
    """Return random tokens with ratios within the bounds and outside them, as many as `SIZES` has for the device."""
    generator, size = torch.Generator().manual_seed(0), SIZES[device]
    old = -4 * torch.rand(size, generator=generator)
    advantages = torch.randn(size[0], 1, generator=generator).expand(size).contiguous()
    optional = {
        "rollout_log_prob": old + 0.01,
        "entropy": torch.rand(size, generator=generator),
        "group": torch.arange(size[0]) // 2,
    }
    new = old + 0.3 * torch.randn(size, generator=generator)
    mask = torch.rand(size, generator=generator) > 0.1
    inputs = Inputs(new, old, advantages, mask, **{name: optional[name] for name in method.asks_for})
    return converted(Inputs(*(None if one is None else one.to(device) for one in inputs)), dtype)


def converted(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Return the same tokens with their floating-point numbers in another dtype."""
    return Inputs(*(one.to(dtype) if one is not None and one.is_floating_point() else one for one in inputs))


def gradient(functions: TokenFunctions, inputs: Inputs) -> Tensor:
    """Return value and gradient of every token's loss, (2, sequences, length)."""
    log_prob = inputs.log_prob.clone().requires_grad_(True)
    loss = functions.loss(inputs, functions.method.decide(functions.statistics(inputs)))
    value = per_token_loss(log_prob, loss.value, loss.weighted)
    value.sum().backward()
    return torch.stack((value.detach(), log_prob.grad))


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, relative to the norm of the expected tensor."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def keeps_not_finite(functions: TokenFunctions, inputs: Inputs) -> bool:
    """Return whether a value that is not finite, in any input, makes its token's loss and gradient not finite."""
    place = tuple(inputs.mask.nonzero()[0])
    for name in ("log_prob", "old_log_prob", "advantages", *functions.method.asks_for):
        for value in (float("nan"), float("inf"), float("-inf")):
            wrong = getattr(inputs, name).clone()
            # The group of a prompt is an integer, and so always finite.
            if wrong.is_floating_point():
                wrong[place] = value
                if gradient(functions, inputs._replace(**{name: wrong}))[(slice(None), *place)].isfinite().any():
                    return False
    return True


def costs(functions: TokenFunctions, inputs: Inputs) -> dict[str, float]:
    """Return a call's milliseconds; on a GPU also its peak memory beyond the inputs, in MiB, and its kernels."""
    on_gpu = inputs.mask.is_cuda
    gradient(functions, inputs)
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    started = time.perf_counter()
    for _ in range(CALLS):
        gradient(functions, inputs)
    if on_gpu:
        torch.cuda.synchronize()
    found = {"milliseconds": 1000 * (time.perf_counter() - started) / CALLS}
    if on_gpu:
        found["mebibytes"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        found["kernels"] = counted_kernels(lambda: gradient(functions, inputs))
    return found


def counted_syncs(call: Callable[[], object]) -> int:
    """Count how often a call makes the host wait for the GPU, according to torch's own debug mode."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in heard)


def counted_kernels(call: Callable[[], object]) -> int:
    """Count the kernels that a call launches, without memory copies and fills."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.count for event in events if not event.key.startswith(("Memcpy", "Memset")))
