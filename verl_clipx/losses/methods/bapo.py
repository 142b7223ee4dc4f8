"""BAPO (Eq. 8, Algorithm 1): GRPO's clip, its bounds moved until positive tokens contribute enough to the loss."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, float64, where

from verl_clipx.losses.base.histogram import ratio_or_zero, whole_sums
from verl_clipx.losses.base.method import LARGEST_BOUND, NODE, Bounds, not_above
from verl_clipx.losses.base.metric import of_decision, of_rollout_batch
from verl_clipx.losses.base.parameters import choice, number, parameter
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.losses.base.tokens import Tokens, parts
from verl_clipx.losses.methods.grpo import ClippedSurrogate

# Of a step: (stop - start) / step is a whole number up to rounding when the steps reach stop, as (0.9 - 0.6) / 0.02.
GRID_TOLERANCE = 1e-9

# Candidates are whole numbers of 1 / GRID, so that 0.6 + 15 * 0.02 is 0.9 and not the float just below it.
GRID = 1e12

MOST_CANDIDATES = 10_000

# A sequence's contributions are counted in whole numbers of 2^-36 of its largest: sums of whole numbers don't depend on
# their order, and those of 2^17 tokens fit into the 53 bits of a float64. A largest of almost 0 has a unit above 0.
UNITS_IN_LARGEST = 2.0**36
LEAST_LARGEST = 1e-25

LOWER = number(at_least=0, at_most=1)
UPPER = number(at_least=1, at_most=LARGEST_BOUND)


@dataclass(frozen=True, kw_only=True)
class Bapo(ClippedSurrogate, name="bapo", source="BAPO (arXiv 2510.18927), Eq. 8 and Algorithm 1"):
    """Bounds searched until positive tokens contribute enough.

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
        "the probability that weighs a token's contribution: the old policy's, the rollout's, or none (release)",
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
        # Before the range, which is that of the other contributions.
        if self.contribution == "share" and isinstance(self.target, int | float) and self.target > 1:
            reason = f"with {NODE}.contribution=share it must be a number (at least 0.01 and at most 1)"
            advice = f"Change it, or set {NODE}.contribution=ratio or net."
            raise Refusal(f"{NODE}.target", self.target, reason, advice)
        super().__post_init__()
        for side in ("lower", "upper"):
            not_above(self, f"{side}_start", f"{side}_stop")
            start, stop, step = self._range(side)
            bound = f"{NODE}.{side}"
            if (stop - start) / step > MOST_CANDIDATES:
                reason = f"gives more than {MOST_CANDIDATES} candidates"
                raise Refusal(f"{bound}_step", step, reason, "Set a larger step.")
            if stop > start and self._count(side) == 1:
                way = f"{bound}_start={start:g} to {bound}_stop={stop:g}"
                reason = f"is longer than the range from {way}, so the bound could not move"
                advice = f"Set a smaller step or, if the bound is not to move, {bound}_stop={start:g}."
                raise Refusal(f"{bound}_step", step, reason, advice)

    @property
    def asks_for(self) -> tuple[str, ...]:
        return ("rollout_log_prob",) if self.weight == "rollout" else ()

    never_negative = slice(None)

    @property
    def statistics_size(self) -> int:
        # n candidates make n + 1 intervals, and each holds two sums.
        return 2 * (self._count("upper") + 1) + 2 * (self._count("lower") + 1)

    def statistics(self, t: Tokens) -> Tensor:
        """Returns sums over the tokens between neighbouring candidates; `decide` adds them up to P and N.

        There are four blocks: the sums of w |A| and then those of w |A| r of positive tokens by intervals between upper
        candidates, and the same two of negative tokens by intervals between lower candidates.
        """
        A = t.advantages
        ratio = t.ratio
        # In the ratio's own dtype: rounded differently, a ratio equal to a candidate would fall beside it.
        upper = self._candidates("upper", ratio.device).to(ratio.dtype)
        lower = self._candidates("lower", ratio.device).to(ratio.dtype)
        upper_intervals = len(upper) + 1
        lower_intervals = len(lower) + 1
        negative = A < 0
        # Names are used again where a tensor is no longer needed, so that it does not outlive its use. Products with
        # 0 or 1 stand where torch.where would take twenty times as long on a CPU.
        slot = self._interval(negative, ratio, upper, lower) + 2 * upper_intervals * negative.to(torch.int32)
        slot = slot.to(torch.int64)
        weight = where(t.mask, A * self._token_weight(t), 0.0)
        sums = magnitude_sums(weight, slot, 2 * upper_intervals, 2 * lower_intervals)
        # A token's value has its slot one block behind that of its weight.
        slot = slot + (upper_intervals + (lower_intervals - upper_intervals) * negative.to(torch.int32))
        # No upper bound leaves a positive token above the last candidate its value, which is therefore not counted.
        value = where((A > 0) & (ratio > upper[-1]), 0.0, weight * ratio)
        return (sums + magnitude_sums(value, slot, 2 * upper_intervals, 2 * lower_intervals)).sum(0)

    def decide(self, statistics: Tensor) -> Tensor:
        """Searches the bounds.

        Returns:
            (4,), float64: c_low, c_high, and P / (P + N) at the starts and at the bounds found, 0 where P + N is 0.
        """
        upper = self._candidates("upper", statistics.device)
        lower = self._candidates("lower", statistics.device)
        positive, negative = self._contributions(statistics, upper, lower)
        if self.first == "upper":
            upper_index = first_true(self._satisfied(positive, negative[:1]))
            lower_index = first_true(self._satisfied(positive.gather(0, upper_index), negative))
        else:
            lower_index = first_true(self._satisfied(positive[:1], negative))
            upper_index = first_true(self._satisfied(positive, negative.gather(0, lower_index)))
        c_low = lower.gather(0, lower_index)
        c_high = upper.gather(0, upper_index)
        P = positive.gather(0, upper_index)
        N = negative.gather(0, lower_index)
        share_before = ratio_or_zero(positive[:1], positive[:1] + negative[:1])
        share_after = ratio_or_zero(P, P + N)
        return torch.cat([c_low, c_high, share_before, share_after])

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        c_low, c_high, _, _ = decision.to(t.ratio.dtype).unbind()
        return Bounds(c_low, c_high)

    def metrics(self, statistics: Tensor, decision: Tensor) -> dict[str, Tensor]:
        names = ("c_low", "c_high", "positive_share_before", "positive_share_after")
        return dict(zip(names, decision.unbind(), strict=True))

    def over_updates(self, metrics: dict[str, list[float]]) -> dict[str, float]:
        """Returns the highest that the search moved each bound to in any update, and the last update's bounds."""
        if len(metrics["c_low"]) == 1:
            return {}
        return {
            "c_low_highest": max(metrics["c_low"]),
            "c_high_highest": max(metrics["c_high"]),
            "c_low_last": metrics["c_low"][-1],
            "c_high_last": metrics["c_high"][-1],
        }

    def _token_weight(self, t: Tokens) -> Tensor | float:
        """Returns w, the probability that weighs each token's contribution."""
        if self.weight == "none":
            return 1.0
        if self.weight == "rollout":
            return t.rollout_log_prob.exp()
        return t.old_log_prob.exp()

    def _interval(self, negative: Tensor, r: Tensor, upper: Tensor, lower: Tensor) -> Tensor:
        """Returns the interval of each token's ratio among upper or, for negative tokens, lower candidates: int32.

        Interval k lies between the candidates k - 1 and k; the first and the last one are open.
        """
        # torch.bucketize takes ten times as long on a CPU. On a regular grid arithmetic finds the nearest candidate,
        # the only one that a ratio has to be compared with, but for the last one, whose step may be shorter.
        nearest = where(
            negative,
            ((r - self.lower_start) / self.lower_step).clamp(max=len(lower) - 1),
            ((r - self.upper_start) / self.upper_step).clamp(max=len(upper) - 1),
        )
        # What is no number becomes the least integer, and passes none.
        nearest = nearest.round().to(torch.int32).clamp(min=0)
        candidate = torch.cat([upper, lower])[where(negative, nearest + len(upper), nearest)]
        # A positive token is left alone up to and including c_high, a negative one from c_low on.
        passed = nearest + where(negative, r >= candidate, r > candidate)
        beyond = where(negative, r >= lower[-1], r > upper[-1])
        return passed + (beyond & where(negative, nearest < len(lower) - 1, nearest < len(upper) - 1))

    def _range(self, side: str) -> tuple[float, float, float]:
        """Returns start, stop and step of a bound, "lower" or "upper"."""
        if side == "lower":
            return self.lower_start, self.lower_stop, self.lower_step
        return self.upper_start, self.upper_stop, self.upper_step

    def _count(self, side: str) -> int:
        """Returns the number of a bound's candidates, which is 1 (only its start) where it has no room."""
        start, stop, step = self._range(side)
        steps = (stop - start) / step
        whole = math.floor(steps + GRID_TOLERANCE)
        reaches_stop = steps - whole <= GRID_TOLERANCE
        if self.last_step == "clipped" and not reaches_stop:
            # One more step, a shorter one, leads to the stop.
            return whole + 2
        return whole + 1

    def _candidates(self, side: str, device: torch.device | str = "cpu") -> Tensor:
        """Returns the bounds that a search visits, ascending.

        They are start + k * step for whole k, so that no rounding accumulates.
        """
        start, stop, step = self._range(side)
        # Made on the device: copying a list to an accelerator would wait for it.
        multiples = torch.arange(self._count(side), dtype=float64, device=device)
        # Not round(decimals=): the compiler's version of it is off in the last bit.
        return ((multiples * step + start) * GRID).round().div(GRID).clamp(start, stop)

    def _contributions(self, statistics: Tensor, upper: Tensor, lower: Tensor) -> tuple[Tensor, Tensor]:
        """Returns P at every upper candidate and N at every lower one."""
        positive, negative = statistics.split([2 * (len(upper) + 1), 2 * (len(lower) + 1)])
        positive_weight, positive_value = positive.view(2, -1)
        negative_weight, negative_value = negative.view(2, -1)
        # Of tokens that the candidate leaves alone: at or below an upper one, at or above a lower one.
        P = positive_value.cumsum(0)[:-1]
        N = sum_from(negative_value)[1:]
        if self.counted == "surrogate":
            # The others count with the candidate as their ratio.
            P = P + upper * sum_from(positive_weight)[1:]
            N = N + lower * negative_weight.cumsum(0)[:-1]
        return P, N

    def _satisfied(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Returns where the criterion is satisfied by contributions P and N of positive and negative tokens."""
        if self.contribution == "share":
            denominator = positive + negative
        elif self.contribution == "net":
            denominator = (positive - negative).abs()
        else:
            denominator = negative + self.epsilon
        # 0/0 is NaN and compares as false; it needs P = 0, where only N = 0 satisfies.
        return (positive / denominator >= self.target) | (negative <= 0)


def magnitude_sums(values: Tensor, slot: Tensor, positive_slots: int, negative_slots: int) -> Tensor:
    """Returns each sequence's sums of the values' magnitudes by slot.

    They are counted in whole numbers of a unit. Each sign has its own unit: with one unit for both, a large value of
    one sign would make the other sign's sums coarse.

    Args:
        values: contributions, w A or w A r, of either sign and 0 for tokens that do not contribute: (sequences,
            length), float32 or float64.
        slot: int64, (sequences, length); the slots of positive tokens come before those of negative ones.
        positive_slots: how many slots positive tokens have.
        negative_slots: how many slots negative tokens have.

    Returns:
        (rows, positive_slots + negative_slots), float64, where rows are what `parts` makes of the sequences.
    """
    values = parts(values)
    slot = parts(slot)
    # The largest magnitude of each sign, rounded up to a power of two, holds UNITS_IN_LARGEST of its units.
    positive_unit = _unit(values.amax(-1, keepdim=True))
    negative_unit = _unit(-values.amin(-1, keepdim=True))
    whole = (values / where(values < 0, negative_unit, positive_unit)).abs().round()
    unit_of_slot = torch.cat(
        [positive_unit.expand(-1, positive_slots), negative_unit.expand(-1, negative_slots)], 1
    ).to(float64)
    return whole_sums(slot, whole, positive_slots + negative_slots) * unit_of_slot


def _unit(largest: Tensor) -> Tensor:
    """Returns the unit in which magnitudes up to the largest one are counted, a power of two."""
    return largest.clamp(min=LEAST_LARGEST).log2().ceil().exp2() / UNITS_IN_LARGEST


def sum_from(values: Tensor) -> Tensor:
    """Returns the sum of each entry and all after it.

    Total minus cumulative sum would leave rounding errors where it is 0.
    """
    return values.flip(0).cumsum(0).flip(0)


def first_true(satisfied: Tensor) -> Tensor:
    """Returns the index, (1,), of the first True, or the last index if there is none."""
    unsatisfied_before = (~satisfied).to(torch.int64).cumprod(0).sum(0, keepdim=True)
    return unsatisfied_before.clamp(max=len(satisfied) - 1)
