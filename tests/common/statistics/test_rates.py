"""The exact comparison of two rates, by hand and against a simulation."""

import numpy
import pytest

from verl_clipx.common.statistics.rates import chance_of_as_many


def test_the_probability_by_hand():
    # Three events in all, each in the first half of the trials with probability 1/2.
    assert chance_of_as_many(3, 100, 0, 100) == pytest.approx(1 / 8)
    assert chance_of_as_many(2, 100, 1, 100) == pytest.approx(4 / 8)
    # Of two events both are in three quarters of the trials.
    assert chance_of_as_many(2, 300, 0, 100) == pytest.approx(9 / 16)
    assert chance_of_as_many(0, 100, 5, 100) == chance_of_as_many(0, 0, 5, 100) == 1.0


def test_equal_rates_are_rarely_told_apart():
    generator = numpy.random.default_rng(0)
    first, second = generator.binomial(3000, 0.02, 2000), generator.binomial(1000, 0.02, 2000)
    found = [chance_of_as_many(one, 3000, other, 1000) < 0.05 for one, other in zip(first, second, strict=True)]
    assert 0.02 < numpy.mean(found) < 0.06
