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
    pairs = 2000
    events_of_first = generator.binomial(3000, 0.02, pairs)
    events_of_second = generator.binomial(1000, 0.02, pairs)
    told_apart = 0
    for first, second in zip(events_of_first, events_of_second, strict=True):
        if chance_of_as_many(first, 3000, second, 1000) < 0.05:
            told_apart += 1
    assert 0.02 < told_apart / pairs < 0.06
