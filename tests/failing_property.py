"""A property that doesn't hold and prints what it draws, for test_repeatable_examples.py; nothing else collects it."""

from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(0, 1000), max_size=30))
def test_numbers_are_few(numbers):
    print("drawn", numbers)
    assert sum(numbers) < 2000
