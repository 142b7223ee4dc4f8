"""Counts the points where the host waits for the device, on any device.

A dispatch mode would miss `.tolist()`, `.cpu()` and `.numpy()`, so the Tensor methods themselves are wrapped. Indexing
with a boolean mask counts as well, since it has to know how many elements are true.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch

NAMED_METHODS = ("item", "tolist", "cpu", "numpy", "nonzero", "masked_select")
CONVERSIONS = ("__bool__", "__int__", "__float__", "__index__")


def caller() -> str:
    """The plugin or verl's ppo_loss, whichever is nearer on the stack; otherwise nothing."""
    frame = sys._getframe(2)
    while frame is not None:
        if "verl_clipx" in frame.f_code.co_filename:
            return "verl_clipx"
        if frame.f_code.co_name == "ppo_loss":
            return "verl"
        frame = frame.f_back
    return ""


@dataclass
class Counter:
    """How many host syncs happened, through which methods, and on whose account."""

    calls: list[str] = field(default_factory=list)
    callers: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        self.calls.append(name)
        self.callers.append(caller())

    @property
    def count(self) -> int:
        return len(self.calls)


@contextmanager
def counted_host_syncs() -> Iterator[Counter]:
    """Counts every outermost host sync in the block, of the thread that it is in."""
    counter = Counter()
    getitem = torch.Tensor.__getitem__
    thread = threading.get_ident()
    inside = False

    def count_calls(name, original):
        def method(self, *args, **kwargs):
            nonlocal inside
            if inside or threading.get_ident() != thread:
                return original(self, *args, **kwargs)
            counter.add(name)
            inside = True
            try:
                return original(self, *args, **kwargs)
            finally:
                inside = False

        return method

    def index_and_count(self, index):
        parts = index if isinstance(index, tuple) else (index,)
        by_mask = any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)
        if by_mask and not inside and threading.get_ident() == thread:
            counter.add("boolean index")
        return getitem(self, index)

    counting = {name: count_calls(name, getattr(torch.Tensor, name)) for name in NAMED_METHODS + CONVERSIONS}
    with mock.patch.multiple(torch.Tensor, __getitem__=index_and_count, **counting):
        yield counter
