"""CPPO by hand, and its quantile beside numpy's. tests/training/worker/test_golden.py has the numbers of both releases.
Not covered: the paper's top-K divergences, which need more than the sampled token; which policy the old one is.
"""

import numpy as np
import pytest
import torch

from tests.golden.settings import Setup
from verl_clipx.losses.methods.cppo import Cppo, quantile

from .hand_rows import HandRow, make_test_of_rows, tokens_from_to

PUBLISHED = {
    "cppo": dict(threshold=0.15, weight_last=0.8, budget=0.02, budget_factor=2.0, length=None, weight_high=None),
    "cppo_reference": dict(
        threshold=0.15, weight_last=0.8, budget=0.02, budget_factor=5.0, weight_high=20.0, length=8192
    ),
}
GOLDEN = {
    "verl6731_cppo": Setup(
        "cppo_reference",
        dict(
            threshold="clip_ratio",
            weight_last="cppo_w_min",
            budget="cppo_delta_b",
            budget_factor="max_mult",
            length="padded_length",
            weight_high="clip_ratio_c",
        ),
    ),
    "unirl_cppo": Setup("cppo", dict(threshold="delta", weight_last="w_min", budget="delta_b")),
}
VARIANTS = ({"weight_high": 20.0, "length": 7}, {"threshold": 0}, {"budget": 0, "weight_last": 1.0})
# Nothing is spent: a threshold alone.
WITHOUT_PREFIX = dict(budget=1.0, budget_factor=1.0)

test_by_hand = make_test_of_rows(
    {
        # 0.8 of 0.1 at the end is below 0.09; at the start it is not.
        "the same change early and late": HandRow(
            method=Cppo(threshold=0.09, **WITHOUT_PREFIX),
            **tokens_from_to((0.5, 0.6), (0.5, 0.5), (0.5, 0.6), advantages=1.0),
            weight=(0.0, 1.0, 1.2),
        ),
        # The prefix of changes of 0.3 has used up what 0.5 allows.
        "a prefix that has moved": HandRow(
            method=Cppo(threshold=0.5, weight_last=1.0, budget=0.001, budget_factor=1.0),
            **tokens_from_to((0.5, 0.8), (0.5, 0.8), (0.5, 0.8), (0.5, 0.55), advantages=1.0),
            weight=(1.6, 0.0, 0.0, 0.0),
        ),
        "what moves back is kept": HandRow(
            method=Cppo(threshold=0.01, budget=0.0),
            **tokens_from_to((0.5, 0.1), (0.1, 0.5), advantages=(1.0, -1.0)),
            weight=(0.2, 5.0),
        ),
        # Its weight is the first's: 0.1 is above 0.09, and 0.8 of it would not be.
        "a response of one token": HandRow(
            method=Cppo(threshold=0.09, **WITHOUT_PREFIX), **tokens_from_to((0.5, 0.6), advantages=1.0), weight=(0.0,)
        ),
        # The first leaves a room of 0.12 + 0.02 - 0.119, and the second, which spends the budget, as much.
        "just within what the prefix left, and just beyond": HandRow(
            method=Cppo(threshold=0.12, weight_last=1.0, budget=0.02, budget_factor=1.0),
            **tokens_from_to((0.5, 0.619), (0.5, 0.52), (0.5, 0.522), advantages=1.0),
            weight=(1.238, 1.04, 0.0),
        ),
        "for either sign": HandRow(
            method=Cppo(threshold=0.12, weight_last=1.0, budget=0.02, budget_factor=1.0),
            **tokens_from_to((0.5, 0.381), (0.5, 0.48), (0.5, 0.478), advantages=-1.0),
            weight=(0.762, 0.96, 0.0),
        ),
        "the cap": HandRow(
            method=Cppo(weight_high=3.0), **tokens_from_to((0.01, 0.1), (0.01, 0.01), advantages=1.0), weight=(3.0, 1.0)
        ),
    }
)


def test_the_quantile_is_numpys():
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(40, 23, generator=generator, dtype=torch.float64) ** 3
    values[::4] = (values[::4] * 4).round() / 4
    mask = torch.arange(23) < torch.arange(40)[:, None]
    quantiles = quantile(torch.where(mask, values, 0.0), mask, 0.9)[:, 0]
    for sequence, is_inside, quantile_of_sequence in zip(values, mask, quantiles, strict=True):
        expected = float(np.quantile(sequence[is_inside].numpy(), 0.9)) if is_inside.any() else 0.0
        assert float(quantile_of_sequence) == pytest.approx(expected, abs=1e-12)
