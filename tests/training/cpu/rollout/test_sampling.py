"""Sampling mathematics: truncation, inversion, log-probabilities, random streams. Not covered: the model and batching
(test_generator).
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from verl_clipx.training.cpu.rollout.sampling import derive_seed, draw_uniforms, invert_distribution, sample, truncate

LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]]))


def test_each_row_is_truncated_by_its_own_settings():
    # From top_k and top_p to the tokens that are left.
    expected = {
        # The fourth and fifth are equally likely.
        (4, 1.0): {0, 1, 2, 3, 4},
        (0, 0.6): {0, 1},
        # Of the two that top-k leaves, the first already has 2/3.
        (2, 0.6): {0},
        (2, 0.7): {0, 1},
        (1, 1.0): {0},
        (3, 1.0): {0, 1, 2},
        (9, 1.0): {0, 1, 2, 3, 4},
        (0, 1e-6): {0},
        (0, 0.49): {0},
        (0, 0.51): {0, 1},
        (0, 0.74): {0, 1},
        (0, 0.76): {0, 1, 2},
    }
    rows = LOGITS.expand(len(expected), -1).contiguous()
    top_k = torch.tensor([top_k for top_k, _ in expected])
    top_p = torch.tensor([top_p for _, top_p in expected])
    truncated = truncate(rows, top_k, top_p)
    for settings, row in zip(expected, truncated, strict=True):
        assert set(row.isfinite().nonzero().flatten().tolist()) == expected[settings], settings
    assert torch.equal(truncated[truncated.isfinite()], rows[truncated.isfinite()])
    # At p = 1 rounding takes none away.
    assert truncate(torch.tensor([[0.0, -30.0]]), torch.tensor([0]), torch.tensor([1.0])).isfinite().all()


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 1), (0.2499, 1), (0.2501, 2), (0.7499, 2), (0.7501, 4), (1 - 2**-53, 4)]
)
def test_inversion_draws_by_hand_and_never_the_impossible(uniform, token):
    log_probs = torch.log(torch.tensor([[0.0, 0.25, 0.5, 0.0, 0.25, 0.0]]))
    assert invert_distribution(log_probs, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


@dataclass(frozen=True, kw_only=True)
class SampleByHand:
    """A token that must be sampled from `LOGITS` under some settings, and its probability."""

    temperature: float
    top_k: int
    top_p: float
    uniform: float
    mode: str
    token: int
    probability: float


SAMPLES = {
    # sqrt(0.25) / (sqrt(0.5) + sqrt(0.25)).
    "of the distribution sampled from, tempered and cut": SampleByHand(
        temperature=2.0,
        top_k=2,
        top_p=1.0,
        uniform=0.99,
        mode="processed_logprobs",
        token=1,
        probability=0.5 / (math.sqrt(0.5) + 0.5),
    ),
    "raw ones ignore temperature and truncation": SampleByHand(
        temperature=2.0,
        top_k=2,
        top_p=1.0,
        uniform=0.99,
        mode="raw_logprobs",
        token=1,
        probability=0.25,
    ),
    "greedy rows take the most likely token, at temperature 1": SampleByHand(
        temperature=0.0,
        top_k=3,
        top_p=0.5,
        uniform=0.999,
        mode="processed_logprobs",
        token=0,
        probability=0.5,
    ),
}


@pytest.mark.parametrize("case", SAMPLES.values(), ids=SAMPLES)
def test_log_probs_by_hand(case):
    tokens, log_probs = sample(
        LOGITS,
        torch.tensor([case.temperature]),
        torch.tensor([case.top_k]),
        torch.tensor([case.top_p]),
        torch.tensor([case.uniform], dtype=torch.float64),
        case.mode,
    )
    assert tokens.tolist() == [case.token]
    assert log_probs.item() == pytest.approx(math.log(case.probability), abs=1e-6)


def test_random_numbers_are_addressed_by_position():
    whole = draw_uniforms(123, 0, 50)
    assert np.array_equal(whole[17:], draw_uniforms(123, 17, 33))
    assert not np.array_equal(whole, draw_uniforms(124, 0, 50))
    assert ((whole >= 0) & (whole < 1)).all()


def test_seeds_are_the_same_everywhere_and_differ_by_every_part():
    # First 16 bytes of the SHA-256 of "'arrival'\x1f42\x1f0\x1f1", little-endian: a change would change every run.
    assert derive_seed("arrival", 42, 0, 1) == 188788298037751031393230765666006687244
    assert derive_seed("a", 1, 2) != derive_seed("a", 12)
    assert derive_seed("a", 1) != derive_seed("a", "1")
