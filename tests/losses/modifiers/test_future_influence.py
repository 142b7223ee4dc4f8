"""FIPO's weights: by hand, as ms-swift's, with equal weights for any division into sequences; no gradient through them.
golden/fipo.npz has the numbers of ms-swift 4.6's own function on these tensors, made once. Does not cover a training
(tests/end_to_end) or which methods take it (tests/losses/methods).
"""

from pathlib import Path

import numpy
import pytest
import torch
from torch.testing import assert_close

from verl_clipx.losses.base.tokens import Inputs, prepare_tokens
from verl_clipx.losses.modifiers.future_influence import FutureInfluence

GOLDEN = numpy.load(Path(__file__).with_name("golden") / "fipo.npz")


def make_tokens(log_ratios, advantages, mask=None):
    """Return tokens with these log-ratios, (sequences, length), in float64."""
    log_prob = torch.tensor(log_ratios, dtype=torch.float64)
    inputs = Inputs(
        log_prob=log_prob,
        old_log_prob=torch.zeros_like(log_prob),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        mask=torch.ones_like(log_prob, dtype=torch.bool) if mask is None else torch.tensor(mask),
    )
    return prepare_tokens(inputs, None)


def test_by_hand():
    # gamma = 1/2. Sums: 0.1 + 0.2/2 + 0.4/4 = 0.3; 0.2 + 0.4/2 = 0.4; 0.4.
    weights = FutureInfluence(half_life=1.0, high=None).advantages(make_tokens([[0.1, 0.2, 0.4]], [[1.0, 1.0, -1.0]]))
    assert_close(weights, torch.tensor([[0.3, 0.4, 0.4]], dtype=torch.float64).exp() * torch.tensor([1.0, 1.0, -1.0]))
    # Sums 0.525, -0.95, 0.1 within [1, 1.2]; a ratio of e^1.5 = 4.48 with A < 0 is limited to 1.
    t = make_tokens([[1.0, -1.0, 0.1], [1.5, 0.0, 0.0]], [[1.0] * 3, [-1.0] * 3])
    expected = torch.tensor([[1.2, 1.0, 1.105170918075647], [-1.0, -1.0, -1.0]], dtype=torch.float64)
    assert_close(FutureInfluence(half_life=1.0).advantages(t), expected)


def test_tokens_outside_the_mask_and_of_other_sequences_have_no_influence():
    mask = [[True, True, False], [True, True, False]]
    advantages = [[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]]
    with_zeros_outside = [[0.1, 0.3, 0.0], [0.2, 0.1, 0.0]]
    with_junk_outside = [[0.1, 0.3, 5.0], [0.2, 0.1, float("nan")]]
    shaped = FutureInfluence().advantages(make_tokens(with_junk_outside, advantages, mask))
    assert_close(shaped, FutureInfluence().advantages(make_tokens(with_zeros_outside, advantages, mask)))
    first_alone = FutureInfluence().advantages(make_tokens(with_zeros_outside[:1], advantages[:1], mask[:1]))
    assert torch.equal(shaped[:1], first_alone)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("default", {}),
        ("both_sides", {"low": 0.8}),
        ("unbounded", {"low": None, "high": None, "safe_ratio": None}),
        ("counted_1.5", {"counted_ratio": 1.5}),
    ],
)
def test_weights_are_those_of_ms_swift(name, parameters):
    inputs = Inputs(
        log_prob=torch.from_numpy(GOLDEN["log_prob"]).requires_grad_(),
        old_log_prob=torch.from_numpy(GOLDEN["old_log_prob"]),
        advantages=torch.from_numpy(GOLDEN["advantages"]),
        mask=torch.from_numpy(GOLDEN["mask"]),
    )
    shaped = FutureInfluence(**parameters).advantages(prepare_tokens(inputs, None))
    assert not shaped.requires_grad
    expected = torch.from_numpy(GOLDEN[name]) * inputs.advantages
    assert_close(shaped, expected, rtol=1e-12, atol=1e-14)
