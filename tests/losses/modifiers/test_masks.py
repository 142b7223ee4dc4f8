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


def load_golden_inputs(dtype=torch.float64):
    tensors = {name: torch.from_numpy(GOLDEN[name]) for name in FIELDS}
    for name in FIELDS:
        if name != "mask":
            tensors[name] = tensors[name].to(dtype)
    return Inputs(**tensors)


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("trl_opsm_0.1", OffPolicySequenceMask(delta=0.1)),
        ("trl_opsm_0", OffPolicySequenceMask(delta=0)),
        ("skyrl_token", IcePop()),
    ],
)
def test_leaves_the_tokens_that_the_peer_leaves(name, mask):
    assert torch.equal(apply_mask_rule(mask, load_golden_inputs()), torch.from_numpy(GOLDEN[name]))


def test_bounds_and_thresholds_belong_to_the_tokens_that_stay():
    ratio = torch.tensor([[0.5, 5.0, 0.49, 5.1]], dtype=torch.float64)
    inputs = Inputs(
        log_prob=torch.zeros_like(ratio),
        old_log_prob=ratio.log(),
        advantages=-torch.ones_like(ratio),
        mask=torch.ones_like(ratio, dtype=torch.bool),
        rollout_log_prob=torch.zeros_like(ratio),
    )
    assert apply_mask_rule(IcePop(), inputs).tolist() == [[True, True, False, False]]
    assert apply_mask_rule(IcePop(low=None), inputs).tolist() == [[True, True, True, False]]
    assert apply_mask_rule(None, inputs).all()
    # A mean log-ratio of the sampler to the current policy of exactly 0.5.
    inputs = inputs._replace(rollout_log_prob=torch.full_like(ratio, 0.5))
    assert apply_mask_rule(OffPolicySequenceMask(delta=0.5), inputs).all()
    assert not apply_mask_rule(OffPolicySequenceMask(delta=0.49), inputs).any()


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.rule)
@pytest.mark.parametrize("field", [name for name in FIELDS if name != "mask"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_token_that_is_not_finite_stays_and_junk_outside_changes_nothing(mask, field, value):
    inputs = load_golden_inputs()
    tensor = getattr(inputs, field)
    with_junk_outside = torch.where(inputs.mask, tensor, value)
    remaining = apply_mask_rule(mask, inputs._replace(**{field: with_junk_outside}))
    assert torch.equal(remaining, apply_mask_rule(mask, inputs))
    with_value_inside = tensor.clone()
    with_value_inside[:, 0] = value
    remaining = apply_mask_rule(mask, inputs._replace(**{field: with_value_inside}))
    assert torch.equal(remaining[:, 0], inputs.mask[:, 0])
    assert not (remaining & ~inputs.mask).any()


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.rule)
def test_a_token_whose_entropy_is_not_finite_stays(mask):
    inputs = load_golden_inputs()
    dropped = inputs.mask & ~apply_mask_rule(mask, inputs)
    assert dropped.any()
    finite_entropy = torch.zeros_like(inputs.log_prob)
    remaining = apply_mask_rule(mask, inputs._replace(entropy=finite_entropy))
    assert torch.equal(remaining, inputs.mask & ~dropped)
    nan_where_dropped = torch.where(dropped, torch.nan, finite_entropy)
    remaining = apply_mask_rule(mask, inputs._replace(entropy=nan_where_dropped))
    assert torch.equal(remaining, inputs.mask)


@pytest.mark.parametrize(
    ("mask_class", "parameters", "key", "value"),
    [
        # No threshold is chosen for the user.
        pytest.param(OffPolicySequenceMask, {}, "clipx.mask.delta", None, id="no delta"),
        pytest.param(IcePop, {"low": 2.0}, "clipx.mask.low", 2.0, id="a lower bound above 1"),
        pytest.param(IcePop, {"high": 0.5}, "clipx.mask.high", 0.5, id="an upper bound below 1"),
    ],
)
def test_a_value_that_it_cannot_have_is_refused(mask_class, parameters, key, value):
    with pytest.raises(Refusal) as raised:
        mask_class(**parameters)
    assert raised.value.key == key
    assert raised.value.value == value
