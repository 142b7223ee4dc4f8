"""Holm's correction: by hand, and properties."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verl_clipx.common.statistics.comparison import holm


def test_by_hand():
    # In order 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1: 0.04, 0.06, 0.06, 0.04, of which the last is kept up at 0.06.
    assert np.allclose(holm([0.04, 0.01, 0.03, 0.02]), [0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03] and holm([]) == [] and holm([None, 0.03, None, 0.01]) == [None, 0.03, None, 0.02]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_no_value_gets_smaller_and_the_order_stays(p_values):
    adjusted = holm(p_values)
    for one, other in zip(p_values, adjusted, strict=True):
        assert one <= other <= 1.0
    order = np.argsort(p_values, kind="stable")
    assert (np.diff(np.array(adjusted)[order]) >= 0).all()
    assert adjusted[order[0]] == min(1.0, p_values[order[0]] * len(p_values))


def test_it_rejects_falsely_in_at_most_a_twentieth_of_families():
    generator = np.random.default_rng(0)
    families = generator.random((4000, 6))
    assert np.mean([min(holm(family)) < 0.05 for family in families]) < 0.06
    assert np.mean([family.min() < 0.05 for family in families]) > 0.2
