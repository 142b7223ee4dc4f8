"""Countdown's difficulty settings: what is refused, and what the message says. Not covered: how hard a setting is."""

import pytest

from verl_clipx.papers.tasks.countdown.config import CountdownConfig


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("min_numbers", 1),
        ("max_numbers", 7),
        ("max_numbers", 2),  # below min_numbers, which is 3
        ("min_value", 0),
        ("max_value", 0),
        ("max_value", "20"),
        ("min_target", -1),
        ("max_target", 0),  # below min_target, which is 1
        ("max_target", 99.0),
        ("operators", ""),
        ("operators", "++"),
        ("operators", "+%"),
        ("operators", None),
    ],
)
def test_bad_value_is_named_with_its_key(key, value):
    with pytest.raises(ValueError, match=rf"^{key}={value!r} ".replace("+", r"\+")):
        CountdownConfig(**{key: value})
