"""Peak memory of the losses uncompiled, against verl's vanilla, by torch's own record of allocations.

Covers: the forward and backward pass of every method with its defaults, statistics behind its bounds taken from the
same tokens. Not covered: compiled losses (docs/dev/measurements.md), other options, accelerators.
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from verl.trainer.ppo.core_algos import get_policy_loss_fn

from tests.claims.configuration import actor_of, merged
from verl_clipx.methods import BUILT_IN
from verl_clipx.worker.step import MicroBatch, in_micro_batch

# Wide enough that what is kept of a sequence weighs nothing.
SIZE = 16, 2048


def peak(name: str, config) -> int:
    """Most bytes that a loss and its backward pass hold at a time."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(SIZE, generator=generator) * 4
    log_prob = (old + 0.3 * torch.randn(SIZE, generator=generator)).requires_grad_()
    advantages = torch.randn(SIZE[0], 1, generator=generator).expand(SIZE).contiguous()
    mask = torch.arange(SIZE[1]) < torch.randint(SIZE[1] // 4, SIZE[1] + 1, (SIZE[0], 1), generator=generator)
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded,
        in_micro_batch(MicroBatch(rollout_log_prob=old)),
    ):
        loss, _ = get_policy_loss_fn(name)(
            old_log_prob=old,
            log_prob=log_prob,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode="token-mean",
            config=config,
            rollout_is_weights=None,
        )
        loss.backward()
    held = most = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        held += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, held)
    return most


@pytest.fixture(scope="module")
def vanilla() -> int:
    """verl's own."""
    return peak("vanilla", actor_of(merged([])))


@pytest.mark.parametrize("method", BUILT_IN)
def test_no_loss_takes_more_memory_than_vanilla(method, vanilla):
    values = {"actor_rollout_ref.rollout.calculate_log_probs": True, "clipx.compile": False}
    config = actor_of(merged([f"+clipx={method}"], values))
    # BAPO keeps the place of each token among its candidates, CTPO each token's own bounds.
    most = {"bapo": 1.05, "ctpo": 1.2}.get(method, 1) * vanilla
    assert 0.5 * vanilla < peak(f"clipx_{method}", config) <= most
