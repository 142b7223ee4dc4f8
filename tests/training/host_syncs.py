"""Counts the points where the host waits for the device, on any device.

A dispatch mode would miss `.tolist()`, `.cpu()` and `.numpy()`, so the Tensor methods themselves are wrapped. Indexing
with a boolean mask counts as well, since it has to know how many elements are true.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

METHODS = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "masked_select",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
)


class Counter:
    """How many host syncs happened, and through which methods."""

    def __init__(self):
        self.calls: list[str] = []

    @property
    def count(self) -> int:
        return len(self.calls)


@contextmanager
def counted_host_syncs() -> Iterator[Counter]:
    """Counts every outermost host sync in the block."""
    counter = Counter()
    originals = {name: getattr(torch.Tensor, name) for name in METHODS}
    getitem = torch.Tensor.__getitem__
    inside = False

    def wrapped(name, original):
        def method(self, *args, **kwargs):
            nonlocal inside
            if inside:
                return original(self, *args, **kwargs)
            counter.calls.append(name)
            inside = True
            try:
                return original(self, *args, **kwargs)
            finally:
                inside = False

        return method

    def indexed(self, index):
        parts = index if isinstance(index, tuple) else (index,)
        if not inside and any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts):
            counter.calls.append("boolean index")
        return getitem(self, index)

    try:
        for name, original in originals.items():
            setattr(torch.Tensor, name, wrapped(name, original))
        torch.Tensor.__getitem__ = indexed
        yield counter
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)
        torch.Tensor.__getitem__ = getitem
