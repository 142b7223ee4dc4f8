"""What a micro-batch knows beyond verl's own arguments to a loss.

Covers: prompts numbered alike in every micro-batch; ages in weight versions, and none where the rollout doesn't say;
the rollout's log-probabilities padded; that a method that asks for more gets it in the worker's loss call, in the extra
pass and at ratio 1. Not covered: the numbers that a method makes of them (tests/methods), real rollouts
(tests/end_to_end).
"""

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.jagged import micro_batch
from tests.worker.updates import extra_passes
from verl_clipx.base.tokens import OPTIONAL
from verl_clipx.check.contract import example
from verl_clipx.common.decided_from import DecidedFrom
from verl_clipx.methods import Method
from verl_clipx.run.config import Settings
from verl_clipx.worker.layout import ages, prompt_groups
from verl_clipx.worker.loss_function import with_micro_batch
from verl_clipx.worker.plan import plan_step
from verl_clipx.worker.policy_loss import inputs_of
from verl_clipx.worker.state import ControllerState
from verl_clipx.worker.step import OptimizerStep, RolloutBatch, current_micro_batch, micro_batch_of

ROWS = [0, 1, 2, 3, 4]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsksForAll(Method):
    """Its statistics are sums of what it asks for."""

    asks_for = OPTIONAL
    statistics_size = 3

    def statistics(self, t):
        def total(values):
            return torch.where(t.mask, values, 0.0).sum(dtype=torch.float64)

        return torch.stack([total(t.rollout_log_prob), total(t.entropy), total((t.group % 1000)[:, None])])


SETTINGS = Settings(method=AsksForAll())


def test_a_prompt_has_one_number_in_every_micro_batch():
    whole, part = (prompt_groups(micro_batch(example(), rows)[0]) for rows in (ROWS, [4, 1]))
    # Two rows a prompt.
    assert torch.equal(part, whole[[4, 1]]) and len(whole.unique()) == 3
    assert whole.dtype == torch.int64 and (whole >= 0).all() and whole[0] == whole[1]


def test_age_is_counted_in_weight_versions():
    data = {"extra_fields": [{"max_global_steps": step} for step in (4, 3, 1, 7)]}
    assert ages(data, 5).tolist() == [1, 2, 4, 0]
    assert ages({}, 5) is None
    assert ages({"extra_fields": [{"max_global_steps": 1}, {}]}, 5) is None


def test_the_rollouts_log_probs_are_padded():
    batch = example()
    data, _ = micro_batch(batch, [0, 3], dp_size=1, total=12, sequences=2)
    padded = micro_batch_of(SETTINGS, OptimizerStep(), data).rollout_log_prob
    torch.testing.assert_close(padded[1, :3], batch["old_log_prob"][3, :3])
    assert padded.shape == (2, 9) and not padded[1, 3:].any()
    del data["rollout_log_probs"]
    assert micro_batch_of(SETTINGS, OptimizerStep(), data).rollout_log_prob is None


def test_a_method_gets_what_it_asks_for():
    batch = example()
    data, output = micro_batch(batch, ROWS, entropy=batch["entropy"])
    mask, group = batch["mask"][ROWS], prompt_groups(data) % 1000
    sums = [batch[name][ROWS][mask].sum() for name in ("old_log_prob", "entropy")]
    expected = torch.stack([*sums, (group * mask.sum(1)).sum().double()])

    def loss(model_output, data, dp_group):
        known = current_micro_batch()
        inputs = inputs_of(
            SETTINGS, known, **{name: batch[name][ROWS] for name in ("log_prob", "old_log_prob", "advantages", "mask")}
        )
        torch.testing.assert_close(SETTINGS.functions("cpu").statistics(inputs), expected)
        assert "entropy" not in model_output
        return torch.zeros(()), {}

    with_micro_batch(loss, SETTINGS)(output, data)
    # The current policy's entropy is not known without a forward pass, whatever the ratio is.
    for settings in (SETTINGS, dataclasses.replace(SETTINGS, scope="lagged")):
        policy_loss = SimpleNamespace(clipx=settings, run=SimpleNamespace(makes_one_update=False, options={}))
        over_all = partial(extra_passes, policy_loss, batch, [[ROWS]])
        alone = dict(extra_pass=over_all, all_reduce=lambda vector: vector)
        step = plan_step(policy_loss, ControllerState(), RolloutBatch(), data, **alone)
        torch.testing.assert_close(step.statistics, expected)
        assert step.decided_from is DecidedFrom.MINI_BATCH and step.counted_tokens == 25


@pytest.mark.parametrize("name", OPTIONAL)
def test_what_is_missing_is_named(name):
    known = SimpleNamespace(**dict.fromkeys(OPTIONAL, torch.zeros(1, 1)), counted=None)
    setattr(known, name, None)
    with pytest.raises(ValueError, match=rf"needs {name}: .*pass {name}="):
        inputs_of(SETTINGS, known)
