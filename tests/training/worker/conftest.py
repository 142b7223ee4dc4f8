"""Fixtures of the tests of what speaks to verl."""

import pytest

from tests.composition import actor, composed, tensors
from verl_clipx.training.worker import receipt

__all__ = ["actor", "composed", "few_probes", "tensors"]


@pytest.fixture
def few_probes(monkeypatch):
    """The receipt makes a few of its probes: enough for any other loss, but not for each number moved a little."""
    monkeypatch.setattr(receipt, "PROBES", 12)
