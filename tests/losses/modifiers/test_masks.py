"""Masks: which tokens they take out, by hand and as peers' functions; junk outside the mask; values that aren't finite.
golden/masks.npz has what the functions of TRL 1.16 (OPSM) and SkyRL 0.3 leave of these tokens. Not covered: the loss
(tests/training/worker/test_rejection.py), a training (tests/end_to_end).
"""

from pathlib import Path

import numpy
import pytest
import torch

from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.losses.modifiers.masks import IcePop, OffPolicySequenceMask, apply_mask_rule

GOLDEN = numpy.load(Path(__file__).with_name("golden") / "masks.npz")
FIELDS = ("log_prob", "old_log_prob", "advantages", "mask", "rollout_log_prob")
MASKS = [OffPolicySequenceMask(delta=0.1), IcePop()]


def golden_inputs(dtype=torch.float64):
    tensors = {name: torch.from_numpy(GOLDEN[name]) for name in FIELDS}
    return Inputs(**{name: of if of.dtype == torch.bool else of.to(dtype) for name, of in tensors.items()})


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("trl_opsm_0.1", OffPolicySequenceMask(delta=0.1)),
        ("trl_opsm_0", OffPolicySequenceMask(delta=0)),
        ("skyrl_token", IcePop()),
    ],
)
def test_leaves_the_tokens_that_the_peer_leaves(name, mask):
    assert torch.equal(apply_mask_rule(mask, golden_inputs()), torch.from_numpy(GOLDEN[name]))


def test_bounds_and_thresholds_belong_to_the_tokens_that_stay():
    ratio = torch.tensor([[0.5, 5.0, 0.49, 5.1]], dtype=torch.float64)
    zeros, every = torch.zeros_like(ratio), torch.ones_like(ratio, dtype=torch.bool)
    given = Inputs(zeros, ratio.log(), -torch.ones_like(ratio), every, rollout_log_prob=zeros)
    assert apply_mask_rule(IcePop(), given).tolist() == [[True, True, False, False]]
    assert apply_mask_rule(IcePop(low=None), given).tolist() == [[True, True, True, False]]
    assert apply_mask_rule(None, given).all()
    # A mean log-ratio of the sampler to the current policy of exactly 0.5.
    given = given._replace(rollout_log_prob=zeros + 0.5)
    assert apply_mask_rule(OffPolicySequenceMask(delta=0.5), given).all()
    assert not apply_mask_rule(OffPolicySequenceMask(delta=0.49), given).any()


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.rule)
@pytest.mark.parametrize("field", [name for name in FIELDS if name != "mask"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_token_that_is_not_finite_stays_and_junk_outside_changes_nothing(mask, field, value):
    given = golden_inputs()
    before, tensor = apply_mask_rule(mask, given), getattr(given, field)
    outside = given._replace(**{field: torch.where(given.mask, tensor, value)})
    assert torch.equal(apply_mask_rule(mask, outside), before)
    inside = tensor.clone()
    inside[:, 0] = value
    after = apply_mask_rule(mask, given._replace(**{field: inside}))
    assert torch.equal(after[:, 0], given.mask[:, 0])
    assert not (after & ~given.mask).any()


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.rule)
def test_a_token_whose_entropy_is_not_finite_stays(mask):
    given = golden_inputs()
    dropped = given.mask & ~apply_mask_rule(mask, given)
    assert dropped.any()
    entropy = torch.zeros_like(given.log_prob)
    assert torch.equal(apply_mask_rule(mask, given._replace(entropy=entropy)), given.mask & ~dropped)
    spoiled = torch.where(dropped, torch.nan, entropy)
    assert torch.equal(apply_mask_rule(mask, given._replace(entropy=spoiled)), given.mask)


@pytest.mark.parametrize(
    ("build", "key", "value"),
    [
        # No threshold is chosen for the user.
        (OffPolicySequenceMask, "delta", None),
        (lambda: IcePop(low=2.0), "low", 2.0),
        (lambda: IcePop(high=0.5), "high", 0.5),
    ],
)
def test_a_value_that_it_cannot_have_is_refused(build, key, value):
    with pytest.raises(Refusal) as refused:
        build()
    assert (refused.value.key, refused.value.value) == (f"clipx.mask.{key}", value)
