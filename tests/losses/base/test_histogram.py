"""Buckets, their counts and the bucket that reaches a share, by hand. Not covered: the edges
(tests/losses/modifiers).
"""

import pytest
import torch

from verl_clipx.losses.base.histogram import bucket_of, find_bucket_reaching, ratio_or_zero, whole_sums

EDGES = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_bucket_contains_its_upper_edge_and_the_outer_ones_are_open(dtype):
    values = torch.tensor([[-9.0, 1.0, 1.5, 2.0, 4.0, 4.5, 1e30]], dtype=dtype)
    assert bucket_of(values, EDGES).tolist() == [[0, 0, 1, 1, 2, 3, 3]]
    # What is no number gets a valid bucket too.
    bucket = bucket_of(torch.tensor([[3.0, torch.nan, torch.inf], [torch.nan, torch.nan, torch.nan]]), EDGES)
    assert bucket.min() >= 0 and bucket.max() < 4


@pytest.mark.parametrize(
    ("share", "expected_bucket", "expected_count"),
    [(0.2, 1, 2.0), (0.21, 3, 5.0), (0.5, 3, 5.0), (1.0, 4, 10.0)],
)
def test_the_first_bucket_that_reaches_a_share_and_the_count_up_to_it(share, expected_bucket, expected_count):
    counts = torch.tensor([0.0, 2.0, 0.0, 3.0, 5.0, 0.0], dtype=torch.float64)
    bucket, count = find_bucket_reaching(share, counts)
    assert bucket.item() == expected_bucket
    assert count.item() == expected_count
    assert (bucket.dtype, bucket.dim()) == (torch.int64, 0)
    assert (count.dtype, count.dim()) == (torch.float64, 0)


def test_without_tokens_the_first_bucket_reaches_every_share():
    bucket, count = find_bucket_reaching(0.5, torch.zeros(3, dtype=torch.float64))
    assert (bucket.item(), count.item()) == (0, 0.0)


def test_the_count_of_a_huge_mini_batch_is_exact():
    bucket, count = find_bucket_reaching(1.0, torch.tensor([2.0**40, 1.0], dtype=torch.float64))
    assert (bucket.item(), count.item()) == (1, 2.0**40 + 1)


def test_whole_numbers_are_added_exactly_in_any_order():
    bucket = torch.tensor([[0, 2, 2, 2], [2, 2, 0, 0]])
    values = torch.tensor([[5, 2**52 - 3, 1, 1], [1, 1, 0, 0]])
    for order in ([0, 1, 2, 3], [2, 3, 1, 0], [3, 1, 0, 2]):
        assert whole_sums(bucket[:, order], values[:, order], 4).tolist() == [[5, 0, 2**52 - 1, 0], [0, 0, 2, 0]]
    assert whole_sums(bucket, values > 1, 4).tolist() == [[1, 0, 1, 0], [0, 0, 0, 0]]


def test_a_ratio_to_nothing_is_zero():
    assert ratio_or_zero(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([4.0, 0.0, -1.0])).tolist() == [0.25, 0.0, 0.0]
