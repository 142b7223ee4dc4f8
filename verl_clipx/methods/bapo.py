"""BAPO (Eq. 8, Algorithm 1): GRPO's clip, its bounds moved until positive tokens contribute enough to the loss."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, float64, where

from verl_clipx.methods.grpo import ClippedSurrogate
from verl_clipx.methods.method import NODE, Bounds, not_above
from verl_clipx.parameters import choice, number, parameter
from verl_clipx.tokens import Tokens

# Of a step: (stop - start) / step is a whole number up to rounding when the steps reach stop, as (0.9 - 0.6) / 0.02.
GRID_TOLERANCE = 1e-9

# Decimal places that candidates are rounded to, so that 0.6 + 15 * 0.02 is 0.9 and not the float just below it.
GRID_DECIMALS = 12

# A token's contribution is counted in whole numbers of 2^-36 of the largest that any token of the micro-batch can have:
# sums of whole numbers don't depend on their order, and 2^27 such tokens fit into 64 bits.
UNITS = 2.0**36


@dataclass(frozen=True, kw_only=True)
class Bapo(ClippedSurrogate, name="bapo", source="BAPO, Eq. 8 and Algorithm 1"):
    """Bounds searched until positive tokens contribute enough.

    P and N are the contributions of tokens with positive and negative advantage. With w the token's weight:
    P(c_high) sums w A min(r, c_high) and N(c_low) sums w |A| max(r, c_low) under counted="surrogate"; they sum w A r
    over r <= c_high and w |A| r over r >= c_low under counted="gradient".

    The search moves the bound named by `first` from its start towards its stop, the other one at its start, and ends at
    the first candidate that satisfies the criterion; if none does, it leaves that bound at the last candidate and moves
    the other. It is satisfied wherever N is 0. Under counted="surrogate" raising c_low raises N and cannot help ("net"
    with a target above 1 aside): c_low ends at its start or its last candidate.

    Source: "net" is Eq. 8 as printed, "share" its prose and Fig. 4; "ratio", weight "none", first "lower" and last_step
    "clipped" are the authors' released code.
    """

    target: float = parameter(
        0.4,
        number(at_least=0, at_most=1e6),
        "the contribution of positive tokens that the search aims at; at most 1 for contribution=share",
    )
    contribution: str = parameter(
        "share",
        choice("share", "net", "ratio"),
        "of positive (P) and negative (N) tokens: share P/(P+N), net P/|P-N| (Eq. 8 as printed), ratio P/N (release)",
    )
    counted: str = parameter(
        "surrogate",
        choice("surrogate", "gradient"),
        "surrogate: every token counts with its clipped value (paper); gradient: only tokens with a live gradient",
    )
    weight: str = parameter(
        "old",
        choice("old", "rollout", "none"),
        "the probability that weighs a token's contribution: the old policy's, the rollout's, or none (release)",
    )
    first: str = parameter("upper", choice("upper", "lower"), "the bound that moves first (paper: upper)")
    last_step: str = parameter(
        "full", choice("full", "clipped"), "a last step that would leave the range: not taken, or clipped to its end"
    )
    lower_start: float = parameter(0.6, number(at_least=0, at_most=1), "where the lower bound starts")
    lower_stop: float = parameter(0.9, number(at_least=0, at_most=1), "how far the lower bound may rise")
    lower_step: float = parameter(0.02, number(at_least=1e-3, at_most=1), "step of the lower bound")
    upper_start: float = parameter(1.2, number(at_least=1, at_most=100), "where the upper bound starts")
    upper_stop: float = parameter(3.0, number(at_least=1, at_most=100), "how far the upper bound may rise")
    upper_step: float = parameter(0.05, number(at_least=1e-3, at_most=100), "step of the upper bound")
    epsilon: float = parameter(
        1e-8, number(at_least=0, at_most=1e3), "added to N in contribution=ratio (release: 1e-8)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.contribution == "share" and self.target > 1:
            raise ValueError(
                f"{NODE}.target={self.target:g} with {NODE}.contribution=share: a share is at most 1. Take a target "
                f"of at most 1, or {NODE}.contribution=ratio or net."
            )
        for side in ("lower", "upper"):
            not_above(self, f"{side}_start", f"{side}_stop")
            start, stop = getattr(self, f"{side}_start"), getattr(self, f"{side}_stop")
            step = getattr(self, f"{side}_step")
            if (stop - start) / step > 10_000:
                raise ValueError(f"{NODE}.{side}_step={step:g}: more than 10000 candidates; take a larger step.")

    @property
    def asks_for(self) -> tuple[str, ...]:
        return ("rollout_log_prob",) if self.weight == "rollout" else ()

    @property
    def statistics_size(self) -> int:
        # n candidates make n + 1 intervals, and each holds two sums.
        return 2 * (self._count("upper") + 1) + 2 * (self._count("lower") + 1)

    def statistics(self, t: Tokens) -> Tensor:
        """Sums of w |A| and of w |A| r between neighbouring candidates: of positive tokens between upper candidates,
        then of negative tokens between lower ones; P and N at every candidate follow by cumulative sums."""
        A, r = t.advantages, t.ratio
        # Candidates in the ratio's own dtype: rounded differently, a ratio equal to one would fall beside it.
        upper, lower = (self._candidates(side, r.device).to(r.dtype) for side in ("upper", "lower"))
        magnitude = where(t.mask, A.abs().to(float64) * self._token_weight(t), 0.0)

        # A positive token is left alone up to and including c_high, a negative one from c_low on.
        position = ((r - self.upper_start) / self.upper_step).ceil()
        under_upper = corrected(position, r, upper, lambda value, edge: value > edge)
        position = ((r - self.lower_start) / self.lower_step).floor() + 1
        over_lower = corrected(position, r, lower, lambda value, edge: value >= edge)
        # One axis for both signs: the intervals between lower candidates follow those between upper ones.
        interval = where(A < 0, over_lower + len(upper) + 1, under_upper).flatten()

        # Above the last candidate a positive token's value is not needed, and a negative one's may be of any size.
        value = magnitude * r
        counted = where(r <= where(A < 0, lower[-1], upper[-1]), value, 0.0)
        largest = magnitude.amax() * max(self.upper_stop, 1.0)
        unit = largest.clamp(min=1e-200).log2().ceil().exp2() / UNITS
        intervals = len(upper) + len(lower) + 2
        sums = torch.zeros(2 * intervals, dtype=torch.int64, device=r.device).scatter_add(
            0,
            torch.cat([interval, interval + intervals]),
            (torch.cat([magnitude.flatten(), counted.flatten()]) / unit).round().to(torch.int64),
        )
        weights, values = (sums * unit).view(2, intervals)
        beyond = where((A < 0) & (r > lower[-1]), value, 0.0).sum()
        values = torch.cat([values[:-1], (values[-1] + beyond)[None]])
        first = len(upper) + 1
        return torch.cat([weights[:first], values[:first], weights[first:], values[first:]])

    def decide(self, statistics: Tensor) -> Tensor:
        """c_low, c_high, and P / (P + N) at the starts and at the bounds found, 0 where P + N is 0."""
        upper, lower = (self._candidates(side, statistics.device) for side in ("upper", "lower"))
        positive, negative = self._contributions(statistics, upper, lower)
        if self.first == "upper":
            upper_index = first_true(self._satisfied(positive, negative[:1]))
            lower_index = first_true(self._satisfied(positive.gather(0, upper_index), negative))
        else:
            lower_index = first_true(self._satisfied(positive[:1], negative))
            upper_index = first_true(self._satisfied(positive, negative.gather(0, lower_index)))
        before, after = (positive[:1], negative[:1]), (positive.gather(0, upper_index), negative.gather(0, lower_index))
        return torch.cat([lower.gather(0, lower_index), upper.gather(0, upper_index), share(*before), share(*after)])

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        c_low, c_high, _, _ = decision.to(t.ratio.dtype).unbind()
        return Bounds(c_low, c_high)

    def metrics(self, statistics: Tensor, decision: Tensor) -> dict[str, Tensor]:
        names = ("c_low", "c_high", "positive_share_before", "positive_share_after")
        return dict(zip(names, decision.unbind(), strict=True))

    def _token_weight(self, t: Tokens) -> Tensor | float:
        if self.weight == "none":
            return 1.0
        log_prob = t.old_log_prob if self.weight == "old" else t.rollout_log_prob
        return log_prob.to(float64).exp()

    def _count(self, side: str) -> int:
        """Number of candidates of a bound; 1 (only its start) where it has no room."""
        start, stop, step = (getattr(self, f"{side}_{part}") for part in ("start", "stop", "step"))
        steps = (stop - start) / step
        whole = math.floor(steps + GRID_TOLERANCE)
        return whole + 1 if self.last_step == "full" or steps - whole <= GRID_TOLERANCE else whole + 2

    def _candidates(self, side: str, device: torch.device | str = "cpu") -> Tensor:
        """The bounds that a search visits, ascending: start + k * step for whole k, so that no rounding accumulates."""
        start, stop, step = (getattr(self, f"{side}_{part}") for part in ("start", "stop", "step"))
        # Made on the device: copying a list to an accelerator would wait for it.
        multiples = torch.arange(self._count(side), dtype=float64, device=device)
        return (multiples * step + start).round(decimals=GRID_DECIMALS).clamp(start, stop)

    def _contributions(self, statistics: Tensor, upper: Tensor, lower: Tensor) -> tuple[Tensor, Tensor]:
        """P at every upper candidate and N at every lower one."""
        positive, negative = statistics.split([2 * (len(upper) + 1), 2 * (len(lower) + 1)])
        positive_weight, positive_value = positive.view(2, -1)
        negative_weight, negative_value = negative.view(2, -1)
        # Of tokens that the candidate leaves alone: at or below an upper one, at or above a lower one.
        positives, negatives = positive_value.cumsum(0)[:-1], sum_from(negative_value)[1:]
        if self.counted == "surrogate":
            positives = positives + upper * sum_from(positive_weight)[1:]
            negatives = negatives + lower * negative_weight.cumsum(0)[:-1]
        return positives, negatives

    def _satisfied(self, positive: Tensor, negative: Tensor) -> Tensor:
        if self.contribution == "share":
            denominator = positive + negative
        elif self.contribution == "net":
            denominator = (positive - negative).abs()
        else:
            denominator = negative + self.epsilon
        # 0/0 is NaN and compares as false; it needs P = 0, where only N = 0 satisfies.
        return (positive / denominator >= self.target) | (negative <= 0)


def corrected(
    position: Tensor, values: Tensor, candidates: Tensor, passes: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """How many candidates each value passes: torch.bucketize, which takes ten times as long on a CPU.

    Args:
        position: that number by the arithmetic of the regular grid, at most one off, (sequences, length).
        values: (sequences, length).
        candidates: ascending, in the values' dtype.
        passes: (value, candidate) -> bool.

    Returns:
        int64 in [0, len(candidates)], (sequences, length).
    """
    last = len(candidates)
    guess = position.to(torch.int64).clamp(0, last)
    end = torch.full_like(candidates[:1], torch.inf)
    edges = torch.cat([-end, candidates, end])
    number = guess - (~passes(values, edges[guess])).to(torch.int64) + passes(values, edges[guess + 1]).to(torch.int64)
    # A ratio that is no number passes none.
    return number.clamp(0, last)


def sum_from(values: Tensor) -> Tensor:
    """Sums of each entry and all after it; not total minus cumulative sum, which would leave rounding errors for 0."""
    return values.flip(0).cumsum(0).flip(0)


def first_true(satisfied: Tensor) -> Tensor:
    """Index, (1,), of the first True, or the last index if there is none."""
    unsatisfied_before = (~satisfied).to(torch.int64).cumprod(0).sum(0, keepdim=True)
    return unsatisfied_before.clamp(max=len(satisfied) - 1)


def share(positive: Tensor, negative: Tensor) -> Tensor:
    """P / (P + N); 0 where both are 0."""
    total = positive + negative
    return where(total > 0, positive / where(total > 0, total, 1.0), 0.0)
