"""Tokens at ratios that a test chooses, and tables of what a method makes of them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from verl_clipx.losses.applying.loss import compute_statistics
from verl_clipx.losses.base.tokens import Tokens
from verl_clipx.losses.methods import Bounds, Method


def row(*values: float | bool, dtype: torch.dtype | None = torch.float64) -> Tensor:
    """One sequence."""
    return torch.tensor([values], dtype=dtype)


def rows(values: Any, like: Tensor | None = None) -> Tensor:
    """A number for all tokens like others, one sequence, or a tuple of sequences: (sequences, length)."""
    tensor = torch.as_tensor(values, dtype=torch.float64)
    return tensor.expand_as(like) if tensor.ndim == 0 and like is not None else tensor.reshape(-1, tensor.shape[-1])


def tokens_at(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clamp: float | None = 20.0,
    mask: Tensor | None = None,
    old_log_prob: Tensor | None = None,
    **optional: Tensor,
) -> Tokens:
    """Tokens with exactly these ratios, unlike those from log-probabilities, which round: (sequences, length) all."""
    free = ratio.log()
    old = torch.zeros_like(ratio) if old_log_prob is None else old_log_prob
    if clamp is None:
        log_ratio, clamped = free, ratio
    else:
        log_ratio, clamped = free.clamp(-clamp, clamp), ratio.clamp(math.exp(-clamp), math.exp(clamp))
    mask = torch.ones_like(ratio, dtype=torch.bool) if mask is None else mask
    return Tokens(old + free, old, advantages, mask, log_ratio, clamped, ratio, log_ratio == free, **optional)


class Outcome(NamedTuple):
    """A method's bounds, gradient weights and values of the loss."""

    bounds: Bounds
    weight: Tensor
    value: Tensor


def decide(method: Method, t: Tokens) -> Tensor:
    """What a method decides from tokens."""
    return method.decide(compute_statistics(method, t, None))


def apply_method(method: Method, t: Tokens, bounds: Bounds | None = None) -> Outcome:
    """What a method makes of tokens; bounds: None for its own."""
    if bounds is None:
        bounds = method.bounds(t, decide(method, t))
    weight = method.gradient_weight(t, bounds)
    return Outcome(bounds, weight, method.loss_value(t, bounds, weight))


@dataclass(frozen=True)
class HandRow:
    """What a method must make of some tokens, by hand.

    A number stands for all tokens; otherwise there is one sequence, or a tuple of sequences.

    Args:
        method: the method.
        ratio, advantages: of the tokens.
        weight: the gradient weight F that is expected; NaN: any.
        value: of the loss that is expected; None: it is not compared.
        old: probabilities under the old policy.
        mask: true where a token counts; None: everywhere.
        bounds: in place of the method's own.
    """

    method: Method
    ratio: Any
    advantages: Any
    weight: Any
    value: Any = None
    old: Any = 1.0
    mask: Any = None
    bounds: Bounds | None = None

    def check(self) -> None:
        """Compares weight and value with what is expected."""
        ratio = rows(self.ratio)
        t = tokens_at(
            ratio,
            rows(self.advantages, ratio),
            clamp=self.method.log_ratio_clamp,
            mask=None if self.mask is None else rows(self.mask).bool(),
            old_log_prob=rows(self.old, ratio).log(),
        )
        actual = apply_method(self.method, t, self.bounds)
        expected = rows(self.weight, ratio)
        compared = actual.weight.where(~expected.isnan(), torch.nan)
        assert_close(compared, expected, rtol=1e-12, atol=1e-15, equal_nan=True)
        if self.value is not None:
            assert_close(actual.value, rows(self.value, ratio), rtol=1e-12, atol=1e-15)


def make_test_of_rows(table: Mapping[str, HandRow]) -> Callable[[HandRow], None]:
    """Makes a test that runs once for each row of a table; the rows' names are the cases."""

    @pytest.mark.parametrize("row", table.values(), ids=table)
    def test_by_hand(row: HandRow) -> None:
        row.check()

    return test_by_hand


def tokens_from_to(*probabilities: tuple[float, float], advantages: Any) -> dict[str, Any]:
    """Tokens that go from an old to a current probability each, as arguments of `HandRow`."""
    return {
        "ratio": [now / before for before, now in probabilities],
        "advantages": advantages,
        "old": [before for before, _ in probabilities],
    }
