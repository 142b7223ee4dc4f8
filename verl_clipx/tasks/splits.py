"""Training and test problems of generated data sets: a problem's split follows from the problem alone."""

import hashlib
from typing import Literal

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")

TEST_SHARE = 0.1


def split_of_key(key: object) -> Split:
    """Return the split of the problems with a key: a hash of it puts a tenth into "test".

    No two runs, seeds or stages can put one problem in both.

    Args:
        key: what makes two problems the same; of values whose `repr` is the same in every process.
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") < TEST_SHARE * 2**64 else "train"
