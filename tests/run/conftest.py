"""A fixture shared with the other tests of what speaks to verl."""

from tests.composition import composed

__all__ = ["composed"]
