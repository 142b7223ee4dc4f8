"""DCPO (arXiv 2509.02333): GRPO's clip with bounds that are wider where the old probability is smaller."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_clipx.losses.base.method import Bounds, dual_clip_parameter, limit_parameter
from verl_clipx.losses.base.parameters import number, parameter
from verl_clipx.losses.base.tokens import Tokens
from verl_clipx.losses.methods.grpo import ClippedSurrogate


@dataclass(frozen=True, kw_only=True)
class Dcpo(ClippedSurrogate, name="dcpo", source="DCPO (arXiv 2509.02333), Eq. 4"):
    """Bounds from the old probability: wide for rare tokens, narrow for likely ones.

    With q, the token's probability under the old policy, the ratio is clipped to

        [1/2 + 1/2 sqrt(max(1 - 4 epsilon_low / q, 0)), 1/2 + 1/2 sqrt(1 + 4 epsilon_high / q)]

    which is where |(r - 1) r q| is at most epsilon. The upper bound is at most `largest_ratio`, and the lower bound is
    between 1/2 and 1. Tokens with A < 0 have no upper bound except the dual clip.

    Source: the paper's dynamic-adaptive clipping, without its advantages and its average over tokens.
    """

    formula = ("(1 + √(1 - 4 · {epsilon_low} / q)) / 2", "(1 + √(1 + 4 · {epsilon_high} / q)) / 2")
    symbols = "q the token's old probability, the root of a negative number taken to be 0"

    dual_clip: float | None = dual_clip_parameter(10.0, "paper")

    epsilon_low: float = parameter(0.16, number(at_least=0, at_most=1), "how wide the lower bound is", "paper")
    epsilon_high: float = parameter(0.2, number(at_least=0, at_most=1), "how wide the upper bound is", "paper")
    largest_ratio: float | None = limit_parameter(10.0, "the upper bound is at most this; null: no limit", "paper")

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        # At least the smallest number of this precision, because epsilon 0 and a probability of 0 would give 0 / 0.
        q = t.old_log_prob.exp().clamp(min=torch.finfo(t.ratio.dtype).tiny)
        low = 0.5 + 0.5 * (1 - 4 * self.epsilon_low / q).clamp(min=0).sqrt()
        high = 0.5 + 0.5 * (1 + 4 * self.epsilon_high / q).sqrt()
        largest = math.inf if self.largest_ratio is None else self.largest_ratio
        return Bounds(low, high.clamp(max=largest))
