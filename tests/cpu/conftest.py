"""Fixtures shared with the tests of the veRL-facing code."""

from tests.composition import composed

__all__ = ["composed"]
