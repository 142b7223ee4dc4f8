"""Bucket sums by hand and against a plain loop. Does not cover the controllers that use them."""

import pytest
import torch
from torch.testing import assert_close

from verl_clipx.controllers.bapo import candidate_bounds
from verl_clipx.controllers.statistics import bucket_sums, count_below


def test_sums_by_hand():
    bucket = torch.tensor([[0, 2, 2], [2, 0, 0]])
    sums = bucket_sums(bucket, (torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]), bucket > 0), 4)
    assert sums.dtype == torch.float64
    assert sums.tolist() == [[49.0, 0.0, 14.0, 0.0], [0.0, 0.0, 3.0, 0.0]]


def test_float32_values_are_summed_in_float64():
    # In float32 the sum would stay at 2^24.
    values = torch.ones(1, 1001)
    values[0, 0] = 2.0**24
    assert bucket_sums(torch.zeros(1, 1001, dtype=torch.int64), (values,), 1).item() == 2**24 + 1000


def test_against_a_loop():
    generator = torch.Generator().manual_seed(0)
    bucket = torch.randint(0, 7, (5, 33), generator=generator)
    values = torch.randn(5, 33, dtype=torch.float64, generator=generator)
    expected = [0.0] * 7
    for index, value in zip(bucket.flatten().tolist(), values.flatten().tolist(), strict=True):
        expected[index] += value
    assert_close(bucket_sums(bucket, (values,), 7)[0], torch.tensor(expected, dtype=torch.float64))


def test_no_sequences():
    empty = torch.zeros(0, 3)
    assert bucket_sums(empty.long(), (empty, empty), 2).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("start", "stop", "step", "last_step"),
    [
        (1.2, 3.0, 0.05, "full"),
        (0.6, 0.9, 0.02, "full"),
        (0.6, 0.9, 0.07, "clipped"),
        (0.6, 0.9, 0.2999999, "clipped"),
        (-0.5, 0.5, 0.1, "full"),
        (1.5, 1.5, 0.0, "full"),
        (0.0, 1e-3, 1e-4, "full"),
        (1.2, 1.2001, 1e-8, "full"),
    ],
)
def test_count_below_is_bucketize_at_between_and_beside_candidates(start, stop, step, last_step, dtype):
    candidates = candidate_bounds(start, stop, step, last_step).to(dtype)
    generator = torch.Generator().manual_seed(0)
    values = torch.cat(
        [
            candidates,
            candidates.nextafter(torch.full_like(candidates, torch.inf)),
            candidates.nextafter(torch.full_like(candidates, -torch.inf)),
            torch.tensor([-1e30, 1e30, 0.0, start, stop], dtype=dtype),
            (torch.rand(2000, generator=generator, dtype=torch.float64) * 4 - 0.7).to(dtype),
        ]
    )[None]
    found = count_below(candidates, values, start=start, step=step)
    assert torch.equal(found.long(), torch.bucketize(values, candidates))
