"""The process of a check: what it may do although its original has used torch's compiler.

How its early end is reported, is held by tests/losses/applying/test_user_method.py.
"""

import os
import time

import pytest
import torch

from verl_clipx.losses.contract.child import in_child

pytestmark = pytest.mark.slow


def compile_sum() -> tuple[float, float]:
    """Compiles a function that no cache has; returns its value at three zeros, and the expected one."""
    # Another constant in every call, so that the compiler has work to do.
    addend = time.time_ns() % 1_000_000 / 1_000
    torch._dynamo.reset()
    compiled = torch.compile(lambda values: values.sin().add(addend).sum())
    return float(compiled(torch.zeros(3, dtype=torch.float64))), 3 * addend


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
# The failure is a wait without an end, for threads of the original.
@pytest.mark.timeout(120)
def test_a_check_compiles_after_its_original_did():
    result, expected = compile_sum()
    assert result == pytest.approx(expected)

    def check():
        yield compile_sum()

    ((result, expected),) = in_child(check)
    assert result == pytest.approx(expected)
