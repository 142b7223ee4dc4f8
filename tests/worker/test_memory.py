"""Peak memory of every method's uncompiled loss, forward and backward, against verl's vanilla, by torch's own record.

Not covered: compiled losses (docs/dev/measurements.md), other options, accelerators.
"""

from functools import cache

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.composition import built_once
from tests.golden.runs import registered_loss
from verl_clipx.methods import BUILT_IN
from verl_clipx.worker.step import MicroBatch, in_micro_batch

# Wide enough that what is kept of a sequence weighs nothing.
SIZE = 16, 2048


@cache
def peak(*overrides: str) -> int:
    """Most bytes that a loss and its backward pass hold at a time."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(SIZE, generator=generator) * 4
    inputs = {
        "old_log_prob": old,
        "log_prob": old + 0.3 * torch.randn(SIZE, generator=generator),
        "advantages": torch.randn(SIZE[0], 1, generator=generator).expand(SIZE).contiguous(),
    }
    lengths = torch.randint(SIZE[1] // 4, SIZE[1] + 1, (SIZE[0], 1), generator=generator)
    inputs["response_mask"] = torch.arange(SIZE[1]) < lengths
    config = built_once(overrides)
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded,
        in_micro_batch(MicroBatch(rollout_log_prob=old)),
    ):
        registered_loss(config, inputs)
    held = most = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        held += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, held)
    return most


@pytest.mark.parametrize("method", BUILT_IN)
def test_no_loss_takes_more_memory_than_vanilla(method):
    calculated, vanilla = "actor_rollout_ref.rollout.calculate_log_probs=true", peak()
    # BAPO keeps the place of each token among its candidates, CTPO each token's own bounds.
    most = {"bapo": 1.05, "ctpo": 1.2}.get(method, 1) * vanilla
    assert 0.5 * vanilla < peak(f"+clipx={method}", calculated, "clipx.compile=false") <= most
