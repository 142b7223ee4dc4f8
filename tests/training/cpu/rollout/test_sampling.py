"""Sampling mathematics: truncation, inversion, log-probabilities, random streams. Not covered: the model and batching
(test_generator).
"""

import math

import numpy as np
import pytest
import torch

from verl_clipx.training.cpu.rollout.sampling import derive_seed, draw_uniforms, invert_distribution, sample, truncate

LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]]))


def test_each_row_is_truncated_by_its_own_settings():
    # The fourth and fifth are equally likely; of the two that top-k leaves, the first already has 2/3.
    settings, expected = zip(
        *(((4, 1.0), {0, 1, 2, 3, 4}), ((0, 0.6), {0, 1}), ((2, 0.6), {0}), ((2, 0.7), {0, 1})),
        *(((1, 1.0), {0}), ((3, 1.0), {0, 1, 2}), ((9, 1.0), {0, 1, 2, 3, 4}), ((0, 1e-6), {0})),
        *(((0, 0.49), {0}), ((0, 0.51), {0, 1}), ((0, 0.74), {0, 1}), ((0, 0.76), {0, 1, 2})),
        strict=True,
    )
    rows = LOGITS.expand(len(settings), -1).contiguous()
    cut = truncate(rows, *map(torch.tensor, zip(*settings, strict=True)))
    assert [set(row.isfinite().nonzero().flatten().tolist()) for row in cut] == [*expected]
    assert torch.equal(cut[cut.isfinite()], rows[cut.isfinite()])
    # At p = 1 rounding takes none away.
    assert truncate(torch.tensor([[0.0, -30.0]]), torch.tensor([0]), torch.tensor([1.0])).isfinite().all()


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 1), (0.2499, 1), (0.2501, 2), (0.7499, 2), (0.7501, 4), (1 - 2**-53, 4)]
)
def test_inversion_draws_by_hand_and_never_the_impossible(uniform, token):
    log_probs = torch.log(torch.tensor([[0.0, 0.25, 0.5, 0.0, 0.25, 0.0]]))
    assert invert_distribution(log_probs, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "uniform", "mode", "token", "probability"),
    [
        # Of the distribution sampled from, tempered and cut: sqrt(0.25) / (sqrt(0.5) + sqrt(0.25)).
        (2.0, 2, 1.0, 0.99, "processed_logprobs", 1, 0.5 / (math.sqrt(0.5) + 0.5)),
        # Raw ones ignore temperature and truncation.
        (2.0, 2, 1.0, 0.99, "raw_logprobs", 1, 0.25),
        # Greedy rows take the most likely token, at temperature 1.
        (0.0, 3, 0.5, 0.999, "processed_logprobs", 0, 0.5),
    ],
)
def test_log_probs_by_hand(temperature, top_k, top_p, uniform, mode, token, probability):
    settings = (torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p]))
    tokens, log_probs = sample(LOGITS, *settings, torch.tensor([uniform], dtype=torch.float64), mode)
    assert tokens.tolist() == [token]
    assert log_probs.item() == pytest.approx(math.log(probability), abs=1e-6)


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
