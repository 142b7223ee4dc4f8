"""Fixtures shared with the tests of the veRL-facing code."""

from tests.training.conftest import composed

__all__ = ["composed"]
