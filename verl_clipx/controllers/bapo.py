"""BAPO: bounds moved until tokens with a positive advantage contribute enough to the loss."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from verl_clipx.controllers.statistics import bucket_sums, count_below
from verl_clipx.masking import kept

# Of a step: (stop - start) / step is a whole number up to rounding when the steps reach stop, as (0.9 - 0.6) / 0.02.
GRID_TOLERANCE = 1e-9

# Decimal places that candidates are rounded to, so that 0.6 + 15 * 0.02 is 0.9 and not the float just below it.
GRID_DECIMALS = 12


def candidate_count(start: float, stop: float, step: float, last_step: Literal["full", "clipped"]) -> int:
    """Number of candidate bounds from start to stop; 1 (only start) when there is no step or no room."""
    if step == 0 or start == stop:
        return 1
    steps = (stop - start) / step
    whole = math.floor(steps + GRID_TOLERANCE)
    return whole + 1 if last_step == "full" or steps - whole <= GRID_TOLERANCE else whole + 2


def candidate_bounds(
    start: float, stop: float, step: float, last_step: Literal["full", "clipped"], device: torch.device | str = "cpu"
) -> Tensor:
    """The bounds that a search from start to stop visits, ascending.

    They lie at start + k * step for whole k, so that no rounding error accumulates: 0.6 to 0.9 by 0.02 ends at 0.90.

    Args:
        start, stop: ends of the range, start <= stop.
        step: distance between candidates; 0 for a search that stays at start.
        last_step: when the steps don't reach stop, "full" ends below it and "clipped" appends it.
        device: made there, since copying a list to an accelerator would wait for it.

    Returns:
        (candidate_count(...),), float64.
    """
    multiples = torch.arange(candidate_count(start, stop, step, last_step), dtype=torch.float64, device=device)
    return (multiples * step + start).round(decimals=GRID_DECIMALS).clamp(start, stop)


@dataclass(frozen=True)
class BapoController:
    """The first pair of bounds, in the order of the search, at which positive tokens contribute enough.

    P and N are the contributions of tokens with positive and negative advantage. With w the token's weight:
    P(c_high) sums w A min(ratio, c_high) and N(c_low) sums w |A| max(ratio, c_low) under counted="surrogate"; they sum
    w A ratio over ratio <= c_high and w |A| ratio over ratio >= c_low under counted="gradient".

    The search moves the bound named by `first` from its start towards its stop, the other one at its start, and ends
    at the first candidate that satisfies the criterion; if none does, it leaves that bound at the last candidate and
    moves the other. It is satisfied wherever N is 0.

    See `Controller` for the methods. The statistics are the sums of w |A| and of w |A| ratio between neighbouring
    candidates, first of positive tokens between upper candidates, then of negative tokens between lower ones; P and N
    at every candidate follow by cumulative sums. The decision is [c_low, c_high, share before, share after], where the
    shares are P / (P + N) at the starts and at the bounds found, 0 where P + N is 0.

    Under counted="surrogate" raising c_low raises N and cannot help ("net" with a target above 1 aside): c_low ends at
    its start or its last candidate.

    Attributes:
        target: what the criterion must reach.
        contribution: the criterion: "share" P / (P + N), "net" P / |P - N|, "ratio" P / (N + epsilon).
        counted: what of a token counts, "surrogate" (its clipped value) or "gradient" (its value unless clipped away).
        weight: the token's weight w: its probability under the "old" or the "rollout" policy, or "none" for 1.
        first: which bound moves first, "upper" or "lower".
        last_step: see `candidate_bounds`.
        lower_start, lower_stop, lower_step: range of c_low.
        upper_start, upper_stop, upper_step: range of c_high.
        epsilon: added to N, for contribution="ratio" only.

    Raises:
        ValueError: an unknown choice, a negative step, or a range whose stop is below its start.

    Source: BAPO, Eq. 8 and Alg. 1 ("net" is Eq. 8 as printed, "share" its prose and Fig. 4); "ratio", weight "none",
    first "lower" and last_step "clipped" are the authors' released code.
    """

    target: float = 0.4
    contribution: Literal["share", "net", "ratio"] = "share"
    counted: Literal["surrogate", "gradient"] = "surrogate"
    weight: Literal["old", "rollout", "none"] = "old"
    first: Literal["upper", "lower"] = "upper"
    last_step: Literal["full", "clipped"] = "full"
    lower_start: float = 0.6
    lower_stop: float = 0.9
    lower_step: float = 0.02
    upper_start: float = 1.2
    upper_stop: float = 3.0
    upper_step: float = 0.05
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        for key, allowed in (
            ("contribution", ("share", "net", "ratio")),
            ("counted", ("surrogate", "gradient")),
            ("weight", ("old", "rollout", "none")),
            ("first", ("upper", "lower")),
            ("last_step", ("full", "clipped")),
        ):
            value = getattr(self, key)
            if value not in allowed:
                raise ValueError(f"{key}={value!r}: use one of {', '.join(allowed)}")
        for side in ("lower", "upper"):
            start, stop, step = (getattr(self, f"{side}_{part}") for part in ("start", "stop", "step"))
            if step < 0:
                raise ValueError(f"{side}_step={step}: use 0 or more; the search only moves from start up to stop")
            if stop < start:
                raise ValueError(f"{side}_stop={stop}: use at least {side}_start={start}")

    @property
    def statistics_size(self) -> int:
        # n candidates make n + 1 intervals, and each holds two sums.
        return 2 * (self._upper_count + 1) + 2 * (self._lower_count + 1)

    def statistics(
        self,
        *,
        ratio: Tensor,
        advantages: Tensor,
        mask: Tensor,
        log_prob: Tensor,
        old_log_prob: Tensor,
        rollout_log_prob: Tensor | None = None,
    ) -> Tensor:
        magnitude = kept(advantages.abs().to(torch.float64) * self._weight(old_log_prob, rollout_log_prob), mask)
        # Candidates in the ratio's own dtype: rounded differently, a ratio equal to one would fall beside it.
        upper, lower = self._upper(ratio.device).to(ratio.dtype), self._lower(ratio.device).to(ratio.dtype)
        # A positive token counts as unclipped up to and including c_high, a negative one from c_low on.
        under_upper = count_below(upper, ratio, start=self.upper_start, step=self.upper_step)
        last = self.lower_start + (len(lower) - 1) * self.lower_step
        over_lower = len(lower) - count_below(-lower.flip(0), -ratio, start=-last, step=self.lower_step)
        # One axis for both signs: the intervals between lower candidates follow those between upper ones.
        interval = torch.where(advantages < 0, over_lower + len(upper) + 1, under_upper)
        sums = bucket_sums(interval.to(torch.int64), (magnitude, magnitude * ratio), len(upper) + len(lower) + 2)
        positive, negative = sums.split([len(upper) + 1, len(lower) + 1], dim=1)
        return torch.cat([positive.flatten(), negative.flatten()])

    def decide(self, statistics: Tensor) -> Tensor:
        upper, lower = self._upper(statistics.device), self._lower(statistics.device)
        positive, negative = self._contributions(statistics, upper=upper, lower=lower)
        if self.first == "upper":
            upper_index = _first_satisfied(self._satisfied(positive, negative[:1]))
            lower_index = _first_satisfied(self._satisfied(positive.gather(0, upper_index), negative))
        else:
            lower_index = _first_satisfied(self._satisfied(positive[:1], negative))
            upper_index = _first_satisfied(self._satisfied(positive, negative.gather(0, lower_index)))
        return torch.cat(
            [
                lower.gather(0, lower_index),
                upper.gather(0, upper_index),
                _share(positive[:1], negative[:1]),
                _share(positive.gather(0, upper_index), negative.gather(0, lower_index)),
            ]
        )

    def token_bounds(
        self, decision: Tensor, *, log_prob: Tensor, old_log_prob: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        c_low, c_high, _, _ = decision.to(dtype).unbind()
        return c_low, c_high

    def metrics(self, statistics: Tensor, decision: Tensor) -> dict[str, Tensor]:
        names = ("c_low", "c_high", "positive_share_before", "positive_share_after")
        return dict(zip(names, decision.unbind(), strict=True))

    @property
    def _lower_count(self) -> int:
        return candidate_count(self.lower_start, self.lower_stop, self.lower_step, self.last_step)

    @property
    def _upper_count(self) -> int:
        return candidate_count(self.upper_start, self.upper_stop, self.upper_step, self.last_step)

    def _lower(self, device: torch.device) -> Tensor:
        return candidate_bounds(self.lower_start, self.lower_stop, self.lower_step, self.last_step, device)

    def _upper(self, device: torch.device) -> Tensor:
        return candidate_bounds(self.upper_start, self.upper_stop, self.upper_step, self.last_step, device)

    def _weight(self, old_log_prob: Tensor, rollout_log_prob: Tensor | None) -> Tensor | float:
        if self.weight == "none":
            return 1.0
        if self.weight == "old":
            return old_log_prob.detach().to(torch.float64).exp()
        if rollout_log_prob is None:
            raise ValueError(
                "weight='rollout' needs rollout log-probabilities and there are none: have the rollout return them "
                "(actor_rollout_ref.rollout.calculate_log_probs=True), or use weight='old' or weight='none'"
            )
        return rollout_log_prob.detach().to(torch.float64).exp()

    def _contributions(self, statistics: Tensor, *, upper: Tensor, lower: Tensor) -> tuple[Tensor, Tensor]:
        """P at every upper candidate and N at every lower one."""
        positive, negative = statistics.split([2 * (len(upper) + 1), 2 * (len(lower) + 1)])
        positive_weight, positive_value = positive.view(2, -1)
        negative_weight, negative_value = negative.view(2, -1)
        # Of tokens that the candidate leaves alone: at or below an upper one, at or above a lower one.
        positives = positive_value.cumsum(0)[:-1]
        negatives = _sum_from(negative_value)[1:]
        if self.counted == "surrogate":
            positives = positives + upper * _sum_from(positive_weight)[1:]
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


def _sum_from(values: Tensor) -> Tensor:
    """Sums of each entry and all after it; not total minus cumulative sum, which would leave rounding errors for 0."""
    return values.flip(0).cumsum(0).flip(0)


def _first_satisfied(satisfied: Tensor) -> Tensor:
    """Index, (1,), of the first True, or the last index if there is none."""
    unsatisfied_before = (~satisfied).to(torch.int64).cumprod(0).sum(0, keepdim=True)
    return unsatisfied_before.clamp(max=len(satisfied) - 1)


def _share(positive: Tensor, negative: Tensor) -> Tensor:
    total = positive + negative
    return torch.where(total > 0, positive / torch.where(total > 0, total, 1.0), 0.0)
