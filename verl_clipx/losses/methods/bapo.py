"""BAPO (Eq. 8, Algorithm 1): GRPO's clip, with bounds that move until positive tokens contribute enough to the loss."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, float64, where

from verl_clipx.losses.base.histogram import ratio_or_zero, whole_sums
from verl_clipx.losses.base.method import LARGEST_BOUND, NODE, Bounds, require_not_above
from verl_clipx.losses.base.metric import of_decision, of_rollout_batch
from verl_clipx.losses.base.parameters import choice, number, parameter
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.losses.base.tokens import Tokens, parts
from verl_clipx.losses.methods.grpo import ClippedSurrogate

# A tolerance on (stop - start) / step. If that quotient is a whole number but for rounding, as in (0.9 - 0.6) / 0.02,
# it differs from the whole number by less than this.
GRID_TOLERANCE = 1e-9

# Candidates are multiples of 1 / GRID, so that 0.6 + 15 * 0.02 is 0.9 and not the float just below it.
GRID = 1e12

# The largest number of steps that a bound may take.
MOST_CANDIDATES = 10_000

# A sequence's contributions are rounded to whole numbers of a unit. Its largest contribution, rounded up to a power of
# two, is this many units. Sums of whole numbers don't depend on their order, and the sums of 2^17 tokens fit into the
# 53 bits of a float64.
UNITS_IN_LARGEST = 2.0**36

# If a sequence's largest contribution is smaller than this, its unit is made for this number, so that the unit is above
# 0.
LEAST_LARGEST = 1e-25

LOWER = number(at_least=0, at_most=1)
UPPER = number(at_least=1, at_most=LARGEST_BOUND)


@dataclass(frozen=True, kw_only=True)
class Bapo(ClippedSurrogate, name="bapo", source="BAPO (arXiv 2510.18927), Eq. 8 and Algorithm 1"):
    """Searches for bounds at which positive tokens contribute enough.

    P and N are the contributions of tokens with positive and negative advantage. With w, the token's weight:

        counted="surrogate": P(c_high) = sum of w A min(r, c_high),       N(c_low) = sum of w |A| max(r, c_low)
        counted="gradient":  P(c_high) = sum of w A r over r <= c_high,   N(c_low) = sum of w |A| r over r >= c_low

    The search moves the bound named by `first` from its start towards its stop while the other bound stays at its
    start. It ends at the first candidate that satisfies the criterion. If no candidate does, it leaves this bound at
    its last candidate and moves the other. The criterion is satisfied wherever N is 0. With counted="surrogate",
    raising c_low raises N and cannot help (except for "net" with a target above 1), so c_low ends either at its start
    or at its last candidate.

    Source: "net" is Eq. 8 as printed; "share" is the paper's prose and Fig. 4. "ratio", weight "none", first "lower"
    and last_step "clipped" are the authors' released code.
    """

    logs = (
        of_decision("c_low", "the lower bound found", "ratio", chart="bounds"),
        of_decision("c_high", "the upper bound found", "ratio", chart="bounds"),
        of_rollout_batch("c_low_highest", "the highest lower bound of any of the rollout batch's updates", "ratio"),
        of_rollout_batch("c_high_highest", "the highest upper bound of any of the rollout batch's updates", "ratio"),
        of_rollout_batch(
            "c_low_last", "the lower bound of the rollout batch's last update", "ratio", chart="last bounds"
        ),
        of_rollout_batch(
            "c_high_last", "the upper bound of the rollout batch's last update", "ratio", chart="last bounds"
        ),
        of_decision("positive_share_before", "P/(P+N) at the starting bounds", "fraction", chart="positive share"),
        of_decision("positive_share_after", "P/(P+N) at the bounds found", "fraction", chart="positive share"),
    )

    formula = ("c_low", "c_high")
    symbols = (
        "c_low from {lower_start} to {lower_stop} by {lower_step}, c_high from {upper_start} to {upper_stop} by "
        "{upper_step}, {first} first, until contribution={contribution} is at least {target}"
    )

    target: float = parameter(
        0.4,
        number(at_least=0.01, at_most=10, usual=(0.2, 1)),
        "the contribution of positive tokens that the search aims at; at most 1 for contribution=share",
        "paper",
    )
    contribution: str = parameter(
        "share",
        choice("share", "net", "ratio"),
        "of positive (P) and negative (N) tokens: share P/(P+N), net P/|P-N| (Eq. 8 as printed), ratio P/N (release)",
        "paper",
    )
    counted: str = parameter(
        "surrogate",
        choice("surrogate", "gradient"),
        "surrogate: every token counts with its clipped value (paper); gradient: only tokens that have a gradient",
        "paper",
    )
    weight: str = parameter(
        "old",
        choice("old", "rollout", "none"),
        "the probability that multiplies a token's contribution: the old policy's, the rollout's, or none (release)",
        "paper",
    )
    first: str = parameter("upper", choice("upper", "lower"), "the bound that moves first (paper: upper)", "paper")
    last_step: str = parameter(
        "full",
        choice("full", "clipped"),
        "a last step that would leave the range: full (not taken) or clipped (to its end)",
        "paper",
    )
    lower_start: float = parameter(0.6, LOWER, "where the lower bound starts", "paper")
    lower_stop: float = parameter(0.9, LOWER, "how far the lower bound may rise", "paper")
    lower_step: float = parameter(0.02, number(at_least=1e-3, at_most=1), "step of the lower bound", "paper")
    upper_start: float = parameter(1.2, UPPER, "where the upper bound starts", "paper")
    upper_stop: float = parameter(3.0, UPPER, "how far the upper bound may rise", "paper")
    upper_step: float = parameter(0.05, number(at_least=1e-3, at_most=1), "step of the upper bound", "paper")
    epsilon: float = parameter(
        1e-8, number(at_least=0, at_most=1), "added to N in contribution=ratio (release: 1e-8)", "script", role="guard"
    )

    def __post_init__(self) -> None:
        # Checked before the range of `target`, which is the range for the other contributions.
        if self.contribution == "share" and isinstance(self.target, int | float) and self.target > 1:
            reason = f"with {NODE}.contribution=share it must be a number (at least 0.01 and at most 1)"
            advice = f"Change it, or set {NODE}.contribution=ratio or net."
            raise Refusal(f"{NODE}.target", self.target, reason, advice)
        super().__post_init__()
        for side in ("lower", "upper"):
            require_not_above(self, f"{side}_start", f"{side}_stop")
            start, stop, step = self._range(side)
            bound = f"{NODE}.{side}"
            if (stop - start) / step > MOST_CANDIDATES:
                reason = f"gives more than {MOST_CANDIDATES} candidates"
                raise Refusal(f"{bound}_step", step, reason, "Set a larger step.")
            if stop > start and self._count_candidates(side) == 1:
                reason = (
                    f"is longer than the range from {bound}_start={start:g} to {bound}_stop={stop:g}, so the bound "
                    "could not move"
                )
                advice = f"Set a smaller step or, if the bound is not to move, {bound}_stop={start:g}."
                raise Refusal(f"{bound}_step", step, reason, advice)

    @property
    def asks_for(self) -> tuple[str, ...]:
        return ("rollout_log_prob",) if self.weight == "rollout" else ()

    # All statistics are sums of magnitudes.
    never_negative = slice(None)

    @property
    def statistics_size(self) -> int:
        # n candidates make n + 1 intervals, and each interval has two sums.
        upper_intervals = self._count_candidates("upper") + 1
        lower_intervals = self._count_candidates("lower") + 1
        return 2 * upper_intervals + 2 * lower_intervals

    def statistics(self, t: Tokens) -> Tensor:
        """Sum the contributions of the tokens between neighbouring candidates. `decide` adds these sums up to P and N.

        Returns:
            (statistics_size,), float64, in four blocks: for positive tokens the sums of w |A| and then the sums of
            w |A| r, each by intervals between upper candidates; for negative tokens the same two blocks by intervals
            between lower candidates.
        """
        A = t.advantages
        ratio = t.ratio
        # The candidates are rounded to the ratio's dtype. Otherwise a ratio equal to a candidate would fall beside it.
        upper = self._candidates("upper", ratio.device).to(ratio.dtype)
        lower = self._candidates("lower", ratio.device).to(ratio.dtype)
        upper_intervals = len(upper) + 1
        lower_intervals = len(lower) + 1
        is_negative = A < 0
        # `slot` is each token's index in the result: first the index for its w |A|, then the index for its w |A| r. The
        # name is used again so that the first tensor does not outlive its use. `is_negative` is a factor of 0 or 1
        # here, because torch.where would take twenty times as long on a CPU.
        slot = self._find_interval(is_negative, ratio, upper, lower)
        slot = slot + 2 * upper_intervals * is_negative.to(torch.int32)
        slot = slot.to(torch.int64)
        weight = where(t.mask, A * self._token_weight(t), 0.0)
        sums = magnitude_sums(weight, slot, 2 * upper_intervals, 2 * lower_intervals)
        # Move on by one block: upper_intervals for a positive token, lower_intervals for a negative one.
        slot = slot + (upper_intervals + (lower_intervals - upper_intervals) * is_negative.to(torch.int32))
        # A positive token above the last upper candidate is clipped by every candidate. Its own ratio enters no P, so
        # its value counts as 0.
        value = where((A > 0) & (ratio > upper[-1]), 0.0, weight * ratio)
        return (sums + magnitude_sums(value, slot, 2 * upper_intervals, 2 * lower_intervals)).sum(0)

    def decide(self, statistics: Tensor) -> Tensor:
        """Search for the bounds.

        Args:
            statistics: the sums of `statistics` over all tokens of the update.

        Returns:
            (4,), float64: c_low, c_high, P / (P + N) at the starting bounds, and P / (P + N) at the bounds found. The
            quotient is 0 where P + N is 0.
        """
        upper = self._candidates("upper", statistics.device)
        lower = self._candidates("lower", statistics.device)
        P, N = self._contributions(statistics, upper, lower)
        if self.first == "upper":
            upper_index = first_true(self._satisfies(P, N[:1]))
            lower_index = first_true(self._satisfies(P.gather(0, upper_index), N))
        else:
            lower_index = first_true(self._satisfies(P[:1], N))
            upper_index = first_true(self._satisfies(P, N.gather(0, lower_index)))
        c_low = lower.gather(0, lower_index)
        c_high = upper.gather(0, upper_index)
        P_after = P.gather(0, upper_index)
        N_after = N.gather(0, lower_index)
        share_before = ratio_or_zero(P[:1], P[:1] + N[:1])
        share_after = ratio_or_zero(P_after, P_after + N_after)
        return torch.cat([c_low, c_high, share_before, share_after])

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        c_low, c_high, _, _ = decision.to(t.ratio.dtype).unbind()
        return Bounds(c_low, c_high)

    def metrics(self, statistics: Tensor, decision: Tensor) -> dict[str, Tensor]:
        c_low, c_high, share_before, share_after = decision.unbind()
        return {
            "c_low": c_low,
            "c_high": c_high,
            "positive_share_before": share_before,
            "positive_share_after": share_after,
        }

    def over_updates(self, metrics: dict[str, list[float]]) -> dict[str, float]:
        """Return each bound's highest value in any update and its value in the last one; nothing for one update."""
        if len(metrics["c_low"]) == 1:
            return {}
        return {
            "c_low_highest": max(metrics["c_low"]),
            "c_high_highest": max(metrics["c_high"]),
            "c_low_last": metrics["c_low"][-1],
            "c_high_last": metrics["c_high"][-1],
        }

    def _token_weight(self, t: Tokens) -> Tensor | float:
        """Return w, the factor of each token's contribution: a probability, (sequences, length), or 1 for "none"."""
        if self.weight == "none":
            return 1.0
        if self.weight == "rollout":
            return t.rollout_log_prob.exp()
        return t.old_log_prob.exp()

    def _find_interval(self, is_negative: Tensor, r: Tensor, upper: Tensor, lower: Tensor) -> Tensor:
        """Find the interval of each token's ratio among the candidates of its bound.

        Args:
            is_negative: the tokens whose bound is the lower one, bool, (sequences, length).
            r: the ratio, (sequences, length).
            upper: the upper bound's candidates, ascending, in the ratio's dtype.
            lower: the lower bound's candidates, of the same form.

        Returns:
            int32, (sequences, length): how many candidates each ratio has passed. Interval k lies between the
            candidates k - 1 and k. The first interval has no lower end, and the last one has no upper end. A candidate
            itself belongs to the interval below it if it is an upper bound's, and to the interval above it if it is a
            lower bound's, because a bound does not clip a ratio that equals it.
        """
        # torch.bucketize takes ten times as long on a CPU. All candidates except the last lie on a regular grid, so
        # arithmetic finds the one that is nearest to a ratio, and the ratio has to be compared with that one alone.
        position = where(
            is_negative,
            ((r - self.lower_start) / self.lower_step).clamp(max=len(lower) - 1),
            ((r - self.upper_start) / self.upper_step).clamp(max=len(upper) - 1),
        )
        # The interval of a NaN ratio does not matter, because its token makes the loss NaN. It only has to exist.
        nearest = position.round().to(torch.int32).clamp(min=0)
        del position
        candidates = torch.cat([upper, lower])
        nearest_candidate = candidates[where(is_negative, nearest + len(upper), nearest)]
        # A ratio that has passed the nearest candidate too is one interval further. True counts as 1.
        passed = nearest + where(is_negative, r >= nearest_candidate, r > nearest_candidate)
        # The last step may be shorter than the others. A ratio beyond the last candidate may then be assigned to the
        # candidate before it, and has passed one candidate more.
        is_beyond_last = where(is_negative, r >= lower[-1], r > upper[-1])
        is_nearest_before_last = where(is_negative, nearest < len(lower) - 1, nearest < len(upper) - 1)
        return passed + (is_beyond_last & is_nearest_before_last)

    def _range(self, side: str) -> tuple[float, float, float]:
        """Return the start, the stop and the step of a bound, "lower" or "upper"."""
        if side == "lower":
            return self.lower_start, self.lower_stop, self.lower_step
        return self.upper_start, self.upper_stop, self.upper_step

    def _count_candidates(self, side: str) -> int:
        """Return how many candidates a bound, "lower" or "upper", has. It is 1, for the start, if it cannot move."""
        start, stop, step = self._range(side)
        steps = (stop - start) / step
        whole_steps = math.floor(steps + GRID_TOLERANCE)
        reaches_stop = steps - whole_steps <= GRID_TOLERANCE
        if self.last_step == "clipped" and not reaches_stop:
            # The start, the whole steps, and one shorter step that ends at the stop.
            return whole_steps + 2
        # The start and the whole steps.
        return whole_steps + 1

    def _candidates(self, side: str, device: torch.device | str = "cpu") -> Tensor:
        """Return the values of a bound that the search visits.

        They are start + k * step for k = 0, 1, …, each rounded to a multiple of 1 / GRID and kept between start and
        stop. Adding the step again and again would accumulate rounding errors.

        Args:
            side: "lower" or "upper".
            device: where the tensor is made.

        Returns:
            Ascending, (candidates,), float64.
        """
        start, stop, step = self._range(side)
        # Made on the device: copying a list to an accelerator would wait for it.
        k = torch.arange(self._count_candidates(side), dtype=float64, device=device)
        # Not round(decimals=12), because the compiler's version of it is off in the last bit.
        return ((k * step + start) * GRID).round().div(GRID).clamp(start, stop)

    def _contributions(self, statistics: Tensor, upper: Tensor, lower: Tensor) -> tuple[Tensor, Tensor]:
        """Return P at each upper candidate and N at each lower one, (candidates,), from what `statistics` returns."""
        positive, negative = statistics.split([2 * (len(upper) + 1), 2 * (len(lower) + 1)])
        positive_weight, positive_value = positive.view(2, -1)
        negative_weight, negative_value = negative.view(2, -1)
        # An upper candidate does not clip tokens at or below it, nor a lower one tokens at or above it. These tokens
        # count with their ratio.
        P = positive_value.cumsum(0)[:-1]
        N = suffix_sums(negative_value)[1:]
        if self.counted == "surrogate":
            # Tokens that the candidate clips count with the candidate in place of their ratio.
            P = P + upper * suffix_sums(positive_weight)[1:]
            N = N + lower * negative_weight.cumsum(0)[:-1]
        return P, N

    def _satisfies(self, P: Tensor, N: Tensor) -> Tensor:
        """Return where the contributions P and N of positive and negative tokens satisfy the criterion, bool."""
        if self.contribution == "share":
            denominator = P + N
        elif self.contribution == "net":
            denominator = (P - N).abs()
        else:
            denominator = N + self.epsilon
        # A quotient 0 / 0 is NaN, which is not at least the target. P is 0 then, and the criterion is satisfied only if
        # N is 0 too.
        return (P / denominator >= self.target) | (N <= 0)


def magnitude_sums(values: Tensor, slot: Tensor, positive_slots: int, negative_slots: int) -> Tensor:
    """Return the sums of the values' magnitudes by slot, for each sequence separately.

    The magnitudes are rounded to whole numbers of a unit. Each sign has its own unit: with one unit for both, a large
    value of one sign would make the other sign's sums coarse.

    Args:
        values: contributions, w A or w A r, of either sign and 0 for tokens that do not contribute: (sequences,
            length), float32 or float64.
        slot: the index of the sum that each value enters, int64, (sequences, length). The slots of positive tokens come
            before those of negative ones.
        positive_slots: how many slots positive tokens have.
        negative_slots: how many slots negative tokens have.

    Returns:
        (rows, positive_slots + negative_slots), float64, where the rows are those into which `parts` reshapes the
        sequences.
    """
    values = parts(values)
    slot = parts(slot)
    positive_unit = _unit_for(values.amax(-1, keepdim=True))
    negative_unit = _unit_for(-values.amin(-1, keepdim=True))
    magnitudes_in_units = (values / where(values < 0, negative_unit, positive_unit)).abs().round()
    unit_of_slot = torch.cat(
        [positive_unit.expand(-1, positive_slots), negative_unit.expand(-1, negative_slots)], 1
    ).to(float64)
    return whole_sums(slot, magnitudes_in_units, positive_slots + negative_slots) * unit_of_slot


def _unit_for(largest: Tensor) -> Tensor:
    """Return the unit for magnitudes up to the largest one. It is a power of two, so multiplying by it rounds nothing.

    UNITS_IN_LARGEST units make the largest magnitude, rounded up to a power of two.
    """
    return largest.clamp(min=LEAST_LARGEST).log2().ceil().exp2() / UNITS_IN_LARGEST


def suffix_sums(values: Tensor) -> Tensor:
    """Return, for each entry of a vector, the sum of that entry and all entries after it.

    The total minus a cumulative sum would be the same but for rounding, which would leave a small number where the
    exact sum is 0.
    """
    return values.flip(0).cumsum(0).flip(0)


def first_true(satisfied: Tensor) -> Tensor:
    """Return the index, (1,), of the first True, or the last index if there is none."""
    # The cumulative product is 1 before the first True and 0 from there on, so its sum counts the entries before it.
    entries_before = (~satisfied).to(torch.int64).cumprod(0).sum(0, keepdim=True)
    return entries_before.clamp(max=len(satisfied) - 1)
