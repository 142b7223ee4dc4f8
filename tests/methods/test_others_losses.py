"""Losses of other projects that a method here is under some settings, as docs/swap.md lists them.

Covers, through composed configurations and the registered loss: GPG and verl's bypass_pg_is as topr, beside verl's own
functions, and LUSPO as gspo by hand. Not covered: BandPO, whose bands docs/swap.md describes by algebra.
"""

import torch
from torch.testing import assert_close

from tests.composition import built_once
from tests.golden.runs import registered_loss

from .against_verl import ACTOR, AGGREGATIONS, assert_same_as_verl, ragged

BYPASS = ("algorithm.rollout_correction.bypass_mode=true", "actor_rollout_ref.rollout.calculate_log_probs=true")
# verl's preset RolloutCorrectionConfig.bypass_pg_is(1.5), where verl's trainer writes it.
PRESET = {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_threshold": 1.5}


def test_gpg_is_topr_with_a_weight_of_1_for_negative_samples():
    ours, verls = ("+clipx=topr", "clipx.negative_low=1"), (f"{ACTOR}.policy_loss.loss_mode=gpg",)
    for mode in AGGREGATIONS:
        assert_same_as_verl(ours, verls, ragged(0), mode, ())


def test_luspo_is_gspo_summed_over_each_sequences_tokens():
    batch = ragged(1, spread=0.3, sequences=16)
    ours = (
        *("+clipx=gspo", "clipx.clip_low=0.9", "clipx.clip_high=1.1"),
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum",
    )
    batch["advantages"] = batch["advantages"][:, :1].expand(-1, 12).clone()
    loss, gradient, _ = registered_loss(built_once(ours), batch)
    log_prob, mask = batch["log_prob"].clone().requires_grad_(True), batch["response_mask"]
    # GSPO's objective of a sequence, times its length, over the sequences that have a token.
    lengths = mask.sum(-1)
    s = (torch.where(mask, log_prob - batch["old_log_prob"], 0.0).sum(-1) / lengths.clamp(min=1)).exp()
    A = batch["advantages"][:, 0]
    expected = -(lengths * torch.minimum(s * A, s.clamp(0.9, 1.1) * A)).sum() / (lengths > 0).sum()
    expected.backward()
    assert_close(loss, expected.detach())
    assert_close(gradient, log_prob.grad)
    assert gradient.any() and not gradient.any(-1).all()


def test_verls_bypass_pg_is_is_topr_with_both_signs_truncated_above():
    cut = ("clipx.positive_low=0", "clipx.positive_high=1.5", "clipx.negative_high=1.5")
    preset = ",".join(f"{key}:{value}" for key, value in PRESET.items())
    verls = (f"{ACTOR}.policy_loss.loss_mode=bypass_mode", f"+{ACTOR}.policy_loss.rollout_correction={{{preset}}}")
    for mode in AGGREGATIONS:
        assert_same_as_verl(("+clipx=topr", *cut, *BYPASS), verls, ragged(2), mode, ())
