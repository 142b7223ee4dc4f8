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

SEQUENCES, LENGTH = (64, 4096) if DEVICE == "cuda" else (16, 96)
# On a CPU, where compiling takes half a minute each, one whose bounds come from statistics.
COMPILED = BUILT_IN if DEVICE == "cuda" else ("acpo",)
# Rows of a micro-batch.
TRACED_ROWS = [1, 4]


def make_inputs(method, dtype=torch.float32):
    """Return random tokens on the device, with ratios within the bounds and outside them."""
    size = (SEQUENCES, LENGTH)
    generator = torch.Generator().manual_seed(0)
    old = -4 * torch.rand(size, generator=generator)
    advantages = torch.randn(SEQUENCES, 1, generator=generator).expand(size).contiguous()
    optional = {
        "rollout_log_prob": old + 0.01,
        "entropy": torch.rand(size, generator=generator),
        "group": torch.arange(SEQUENCES) // 2,
    }
    tensors = {
        "log_prob": old + 0.3 * torch.randn(size, generator=generator),
        "old_log_prob": old,
        "advantages": advantages,
        "mask": torch.rand(size, generator=generator) > 0.1,
        **{name: optional[name] for name in method.asks_for},
    }
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(DEVICE, dtype) if tensor.is_floating_point() else tensor.to(DEVICE)
    return Inputs(**tensors)


def compute_loss_and_gradient(functions, inputs):
    """Return value and gradient of every token's loss, (2, sequences, length)."""
    log_prob = inputs.log_prob.clone().requires_grad_(True)
    loss = functions.loss(inputs, functions.method.decide(functions.statistics(inputs)))
    value = per_token_loss(log_prob, loss.value, loss.weighted)
    value.sum().backward()
    return torch.stack((value.detach(), log_prob.grad))


def relative_difference(tensor, expected):
    """Return the norm of the difference, relative to that of the expected tensor."""
    return float((tensor.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_loss_is_that_of_float64_and_keeps_what_is_not_finite(name):
    functions = TokenFunctions(METHODS[name](), None, compiled=False)
    assert_is_that_of_float64(functions)
    assert_keeps_what_is_not_finite(functions)


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_loss_is_too(name):
    method = METHODS[name]()
    functions = TokenFunctions(method, None, compiled=True)
    assert_is_that_of_float64(functions)
    assert_keeps_what_is_not_finite(functions)
    # Where the compiler fails, the loss stays uncompiled with a warning.
    assert functions.compiled
    inputs = make_inputs(method)
    eager = TokenFunctions(method, None, compiled=False)
    expected = compute_loss_and_gradient(eager, inputs)
    assert relative_difference(compute_loss_and_gradient(functions, inputs), expected) <= SAME


def assert_is_that_of_float64(functions):
    method = functions.method
    eager = TokenFunctions(method, None, compiled=False)
    expected = compute_loss_and_gradient(eager, make_inputs(method, torch.float64))
    assert relative_difference(compute_loss_and_gradient(functions, make_inputs(method)), expected) <= ROUNDING


def assert_keeps_what_is_not_finite(functions):
    """Put values that are not finite into each input of a token; neither its loss nor its gradient may be finite."""
    method = functions.method
    inputs = make_inputs(method)
    sequence, token = inputs.mask.nonzero()[0].tolist()
    # The group of a prompt is an integer, and so always finite.
    fields = [field for field in ("log_prob", "old_log_prob", "advantages", *method.asks_for) if field != "group"]
    for field in fields:
        for value in (float("nan"), float("inf"), float("-inf")):
            tensor = getattr(inputs, field).clone()
            tensor[sequence, token] = value
            loss_and_gradient = compute_loss_and_gradient(functions, inputs._replace(**{field: tensor}))
            assert not loss_and_gradient[:, sequence, token].isfinite().any(), (field, value)


def make_loss_call(bench, *overrides, traced=None):
    """Return a function that runs the loss which verl calls, forward and backward with its metrics, and its inputs.

    Args:
        traced: a list that gets the traced log-probabilities of each call; None for no trace.
    """
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.utils.config import omega_conf_to_dataclass

    actor = omega_conf_to_dataclass(bench.configuration(*overrides).actor_rollout_ref.actor)
    function = get_policy_loss_fn(actor.policy_loss.loss_mode)
    inputs = make_inputs(METHODS["grpo"]())

    def call():
        log_prob = inputs.log_prob.clone().requires_grad_(True)
        with in_micro_batch(MicroBatch()) as micro_batch:
            loss, _ = function(
                old_log_prob=inputs.old_log_prob,
                log_prob=log_prob,
                advantages=inputs.advantages,
                response_mask=inputs.mask,
                loss_agg_mode="token-mean",
                config=actor,
            )
        if traced is not None:
            traced.append(HostCopy(trace_method(micro_batch.applied, TRACED_ROWS)["log_prob"]))
        loss.backward()

    return call, inputs


def count_syncs(call):
    """Return how often a call makes the host wait for the GPU, by torch's own debug mode."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in issued)


def count_kernels(call):
    """Return how many kernels a call launches, without memory copies and fills."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.count for event in events if not event.key.startswith(("Memcpy", "Memset")))


@needs_gpu
def test_a_call_waits_at_most_once_and_compiled_it_launches_fewer_kernels(bench):
    kernels = {}
    for compiled in ("false", "true"):
        call, _ = make_loss_call(bench, "+clipx=acpo", f"clipx.compile={compiled}")
        # The first call compiles.
        call()
        assert count_syncs(call) <= 1
        kernels[compiled] = count_kernels(call)
    assert kernels["true"] < kernels["false"]


def test_traced_values_arrive_and_cost_no_wait(bench):
    traced = []
    call, inputs = make_loss_call(bench, "+clipx=acpo", "clipx.compile=false", "+clipx/trace=prompts", traced=traced)
    call()
    if DEVICE == "cuda":
        assert count_syncs(call) <= 1
    log_prob = torch.from_numpy(traced[-1].numpy())
    assert torch.equal(log_prob, torch.where(inputs.mask, inputs.log_prob, 0.0)[TRACED_ROWS].cpu())
