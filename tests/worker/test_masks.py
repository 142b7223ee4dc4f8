"""+clipx/mask through verl's own ppo_loss: gradient, normaliser, bounds and metrics, however the mini-batch is cut.

Not covered: which tokens a mask takes (tests/modifiers/test_masks.py), real engines (tests/end_to_end), verl's
rejection beside a mask.
"""

import pytest
import torch
from torch.testing import assert_close

from tests.worker.updates import SPLITS, WHOLE, loss_function, train
from verl_clipx.base.tokens import Inputs
from verl_clipx.check.contract import example
from verl_clipx.loss.loss import apply
from verl_clipx.modifiers.masks import remaining
from verl_clipx.worker.step import OptimizerStep

LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=true"
MASKS = {
    "opsm": ("+clipx/mask=opsm", "clipx.mask.delta=0.01"),
    "sequence_divergence": ("+clipx/mask=sequence_divergence", "clipx.mask.delta=0.01"),
    "icepop": ("+clipx/mask=icepop", "clipx.mask.low=0.9", "clipx.mask.high=1.1"),
    "outlier_veto": ("+clipx/mask=outlier_veto", "clipx.mask.low=0.7", "clipx.mask.high=1.4"),
}


def sampled_elsewhere():
    """A batch whose sampler differs from the old policy."""
    batch = example()
    noise = torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    sampler = batch["old_log_prob"] + 0.2 * noise
    return batch | {"rollout_log_prob": sampler, "sampler_log_prob": sampler}


@pytest.mark.parametrize("rule", MASKS)
@pytest.mark.parametrize("method", ["grpo", "acpo"])
def test_masked_tokens_have_no_gradient_and_verls_normaliser_stays(actor, method, rule):
    config, batch = actor(f"+clipx={method}", *MASKS[rule], LOG_PROBS), sampled_elsewhere()
    settings = config.policy_loss.clipx
    names = ("log_prob", "old_log_prob", "advantages", "mask", "rollout_log_prob")
    inputs = Inputs(**{name: batch[name] for name in names})
    left = remaining(settings.mask, inputs)
    assert 0 < left.sum() < batch["mask"].sum()
    applied = apply(settings.method, None, inputs._replace(mask=left))
    step = OptimizerStep(statistics=applied.statistics, decision=applied.decision if settings.adaptive else None)
    expected = torch.where(left, -applied.weight * applied.tokens.advantages, 0.0) / batch["mask"].sum()
    for split in (WHOLE, *SPLITS.values()):
        found = train(loss_function(config, step), batch, split)
        assert_close(found.gradient, expected, rtol=1e-6, atol=1e-9)
        gone = batch["mask"] & ~left
        for sign, of_sign in (("negative", batch["advantages"] < 0), ("positive", batch["advantages"] > 0)):
            share = float((gone & of_sign).sum() / batch["mask"].sum())
            assert found.metrics[f"clipx/masked_fraction/{sign}"] == pytest.approx(share)
        whole = batch["mask"].any(-1) & ~left.any(-1)
        counted = [found.metrics[f"clipx/masked_sequences/{sign}"] for sign in ("negative", "positive")]
        assert sum(counted) == pytest.approx(float(whole.sum()))
        ratio = (batch["log_prob"] - batch["old_log_prob"]).exp()[left].mean()
        assert found.metrics["clipx/ratio_mean"] == pytest.approx(float(ratio), rel=1e-6)


def test_the_samplers_log_probabilities_are_needed(actor):
    function = loss_function(actor("+clipx=grpo", *MASKS["opsm"], LOG_PROBS))

    def without(model_output, data):
        del data["rollout_log_probs"]
        return function(model_output, data)

    with pytest.raises(ValueError, match="rollout_log_prob"):
        train(without, example())
