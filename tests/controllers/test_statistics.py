"""Bucket sums by hand and against a plain loop. Does not cover the controllers that use them."""

import torch
from torch.testing import assert_close

from verl_clipx.controllers.statistics import bucket_sums


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
