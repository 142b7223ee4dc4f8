"""A product of parameters of which the default selection runs some cases, and scripts/test.sh --all every one."""

import itertools
from collections.abc import Callable, Iterable

import pytest

MATRIX = (pytest.mark.slow, pytest.mark.matrix)


def product(*parameters: Iterable, keep: Callable[..., bool]) -> list:
    """Every combination; those that `keep` is false of run under --all only."""
    return [
        pytest.param(*case, marks=() if keep(*case) else MATRIX) for case in itertools.product(*map(list, parameters))
    ]
