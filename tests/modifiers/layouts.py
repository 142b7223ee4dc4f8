"""Random token layouts for property tests, with not-a-number outside the mask."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor


class Layout(NamedTuple):
    """values: (sequences, length), NaN outside the mask; mask: bool."""

    values: Tensor
    mask: Tensor


@st.composite
def layouts(draw, values, *, sequences=4, length=9):
    """Layouts of any mask, empty rows and holes included.

    Few distinct values on purpose: ties are what a selection gets wrong.
    """
    rows, columns = draw(st.integers(1, sequences)), draw(st.integers(1, length))
    size = rows * columns
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size))).view(rows, columns)
    drawn = torch.tensor(draw(st.lists(values, min_size=size, max_size=size)), dtype=torch.float64).view(rows, columns)
    return Layout(drawn.masked_fill(~mask, torch.nan), mask)
