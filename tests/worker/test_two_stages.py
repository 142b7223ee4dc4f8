"""Statistics in two stages, planned over any division of a mini-batch: the second stage is about the first one's total.

Not covered: real ranks and engines (tests/end_to_end/test_invariance.py).
"""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from tests.jagged import micro_batch
from tests.worker.updates import ROWS, SPLITS, WHOLE, extra_passes
from verl_clipx.base.tokens import Inputs
from verl_clipx.check.contract import example
from verl_clipx.loss.loss import token_statistics
from verl_clipx.worker.plan import plan_step
from verl_clipx.worker.state import ControllerState
from verl_clipx.worker.step import RolloutBatch

METHODS = {"clip_cov": ("clipx.share=0.2", "clipx.covariance_low=0.1"), "kl_cov": ("clipx.share=0.2",)}


@pytest.mark.parametrize("method", METHODS)
def test_a_step_decides_from_the_whole_mini_batch_by_two_all_reduces(actor, method):
    policy_loss, batch, sums = actor(f"+clipx={method}", *METHODS[method]).policy_loss, example(), []
    for split in (WHOLE, *SPLITS.values()):
        sums.clear()
        step = plan_step(
            policy_loss,
            ControllerState(),
            RolloutBatch(),
            micro_batch(batch, ROWS)[0],
            extra_pass=partial(extra_passes, policy_loss, batch, split),
            all_reduce=lambda vector: sums.append(vector) or vector,
        )
        inputs = Inputs(**{name: batch[name] for name in ("log_prob", "old_log_prob", "advantages", "mask")})
        whole = token_statistics(policy_loss.clipx.method, None, inputs)
        assert_close(step.statistics, whole, rtol=1e-12, atol=1e-12)
        assert torch.equal(step.decision, policy_loss.clipx.method.decide(step.statistics)) and len(sums) == 2
