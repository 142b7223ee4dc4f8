"""Every method's loss on the device: compiled, uncompiled and in float64; host waits and kernels of a call. Not
covered: how long compiling takes.
"""

import warnings

import pytest
import torch
from worker_update import DEVICE

from tests.gpu.conftest import needs_gpu
from tests.gpu.test_updates import ROUNDING, SAME
from verl_clipx.losses.applying.compiled import TokenFunctions
from verl_clipx.losses.applying.loss import per_token_loss
from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.losses.methods import BUILT_IN, METHODS
from verl_clipx.training.worker.step import MicroBatch, in_micro_batch
from verl_clipx.training.worker.traced_columns import HostCopy
from verl_clipx.training.worker.tracer import trace_method

SIZE = (64, 4096) if DEVICE == "cuda" else (16, 96)
# On a CPU, where compiling takes half a minute each, one whose bounds come from statistics.
COMPILED = BUILT_IN if DEVICE == "cuda" else ("acpo",)
# Traced rows of a micro-batch.
TRACED = [1, 4]


def example(method, dtype=torch.float32):
    """Random tokens with ratios within the bounds and outside them."""
    generator = torch.Generator().manual_seed(0)
    old = -4 * torch.rand(SIZE, generator=generator)
    advantages = torch.randn(SIZE[0], 1, generator=generator).expand(SIZE).contiguous()
    optional = {
        "rollout_log_prob": old + 0.01,
        "entropy": torch.rand(SIZE, generator=generator),
        "group": torch.arange(SIZE[0]) // 2,
    }
    new = old + 0.3 * torch.randn(SIZE, generator=generator)
    mask = torch.rand(SIZE, generator=generator) > 0.1
    tokens = Inputs(new, old, advantages, mask, **{name: optional[name] for name in method.asks_for})
    moved = (None if value is None else value.to(DEVICE) for value in tokens)
    return Inputs(*(value.to(dtype) if value is not None and value.is_floating_point() else value for value in moved))


def gradient(functions, inputs):
    """Value and gradient of every token's loss, (2, sequences, length)."""
    log_prob = inputs.log_prob.clone().requires_grad_(True)
    loss = functions.loss(inputs, functions.method.decide(functions.statistics(inputs)))
    value = per_token_loss(log_prob, loss.value, loss.weighted)
    value.sum().backward()
    return torch.stack((value.detach(), log_prob.grad))


def difference(value, expected):
    """The norm of the difference, relative to that of the expected tensor."""
    return float((value.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_loss_is_that_of_float64_and_keeps_what_is_not_finite(name):
    check(name, compiled=False)


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_loss_is_too(name):
    functions = check(name, compiled=True)
    # Where the compiler fails, the loss stays uncompiled with a warning.
    assert functions.compiled
    inputs = example(METHODS[name]())
    eager = TokenFunctions(METHODS[name](), None, compiled=False)
    assert difference(gradient(functions, inputs), gradient(eager, inputs)) <= SAME


def check(name, *, compiled):
    """Compares a loss with float64, puts values that are not finite into each input, and returns its functions."""
    method = METHODS[name]()
    functions = TokenFunctions(method, None, compiled=compiled)
    exact = gradient(TokenFunctions(method, None, compiled=False), example(method, torch.float64))
    inputs = example(method)
    assert difference(gradient(functions, inputs), exact) <= ROUNDING
    place = tuple(inputs.mask.nonzero()[0])
    for field in ("log_prob", "old_log_prob", "advantages", *method.asks_for):
        # The group of a prompt is an integer, and so always finite.
        for value in (float("nan"), float("inf"), float("-inf")) if field != "group" else ():
            wrong = getattr(inputs, field).clone()
            wrong[place] = value
            spoilt = gradient(functions, inputs._replace(**{field: wrong}))[(slice(None), *place)]
            assert not spoilt.isfinite().any(), (field, value)
    return functions


def loss_call(bench, *overrides, parts=None):
    """A function that runs the loss which verl calls, forward and backward, with its metrics and perhaps traced."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.utils.config import omega_conf_to_dataclass

    actor = omega_conf_to_dataclass(bench.configuration(*overrides).actor_rollout_ref.actor)
    function = get_policy_loss_fn(actor.policy_loss.loss_mode)
    inputs = example(METHODS["grpo"]())

    def call():
        log_prob = inputs.log_prob.clone().requires_grad_(True)
        tokens = dict(old_log_prob=inputs.old_log_prob, advantages=inputs.advantages, response_mask=inputs.mask)
        with in_micro_batch(MicroBatch()) as micro_batch:
            loss, _ = function(log_prob=log_prob, **tokens, loss_agg_mode="token-mean", config=actor)
        if parts is not None:
            parts.append(HostCopy(trace_method(micro_batch.applied, TRACED)["log_prob"]))
        loss.backward()

    return call, inputs


def counted_syncs(call):
    """How often a call makes the host wait for the GPU, by torch's own debug mode."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in heard)


def counted_kernels(call):
    """How many kernels a call launches, without memory copies and fills."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.count for event in events if not event.key.startswith(("Memcpy", "Memset")))


@needs_gpu
def test_a_call_waits_at_most_once_and_compiled_it_launches_fewer_kernels(bench):
    kernels = {}
    for compiled in ("false", "true"):
        call, _ = loss_call(bench, "+clipx=acpo", f"clipx.compile={compiled}")
        # The first call compiles.
        call()
        assert counted_syncs(call) <= 1
        kernels[compiled] = counted_kernels(call)
    assert kernels["true"] < kernels["false"]


def test_traced_values_arrive_and_cost_no_wait(bench):
    parts = []
    call, inputs = loss_call(bench, "+clipx=acpo", "clipx.compile=false", "+clipx/trace=prompts", parts=parts)
    call()
    if DEVICE == "cuda":
        assert counted_syncs(call) <= 1
    values = torch.from_numpy(parts[-1].numpy())
    assert torch.equal(values, torch.where(inputs.mask, inputs.log_prob, 0.0)[TRACED].cpu())
