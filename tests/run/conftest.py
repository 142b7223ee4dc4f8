"""Fixtures shared with the other tests of what speaks to verl."""

from tests.composition import actor, composed, tensors

__all__ = ["actor", "composed", "tensors"]
