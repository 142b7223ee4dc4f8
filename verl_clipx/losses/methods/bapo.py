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
UNITS = 2.0**36
LEAST_LARGEST = 1e-25

LOWER, UPPER = number(at_least=0, at_most=1), number(at_least=1, at_most=LARGEST_BOUND)


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
            (start, stop, step), bound = self._range(side), f"{NODE}.{side}"
            if (stop - start) / step > MOST_CANDIDATES:
                reason = f"gives more than {MOST_CANDIDATES} candidates"
                raise Refusal(f"{bound}_step", step, reason, "Set a larger step.")
            if stop > start and self._count(side) == 1:
                way = f"{bound}_start={start:g} to {bound}_stop={stop:g}"
                reason = f"is longer than the way from {way}, so that the bound could not move"
                advice = f"Set a smaller step or, if it shall not move, {bound}_stop={start:g}."
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
        """Sums of w |A| and of w |A| r between neighbouring candidates: of positive tokens between upper candidates,
        then of negative tokens between lower ones; P and N at every candidate follow by cumulative sums."""
        A, r = t.advantages, t.ratio
        # In the ratio's own dtype: rounded differently, a ratio equal to a candidate would fall beside it.
        upper, lower = (self._candidates(side, r.device).to(r.dtype) for side in ("upper", "lower"))
        negative, of_positive, of_negative = A < 0, len(upper) + 1, len(lower) + 1
        weight = where(t.mask, A * self._token_weight(t), 0.0)
        # Sums of weights and then of values, of positive tokens and then of negative ones. torch.where instead of these
        # products takes twenty times as long on a CPU.
        slot = (self._interval(negative, r, upper, lower) + 2 * of_positive * negative.to(torch.int32)).to(torch.int64)
        sums = magnitude_sums(weight, slot, 2 * of_positive, 2 * of_negative)
        slot = slot + (of_positive + (of_negative - of_positive) * negative.to(torch.int32))
        # Above the last candidate a positive token's value is not needed.
        value = where((A > 0) & (r > upper[-1]), 0.0, weight * r)
        return (sums + magnitude_sums(value, slot, 2 * of_positive, 2 * of_negative)).sum(0)

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
        before = ratio_or_zero(positive[:1], positive[:1] + negative[:1])
        P, N = positive.gather(0, upper_index), negative.gather(0, lower_index)
        bounds = lower.gather(0, lower_index), upper.gather(0, upper_index)
        return torch.cat([*bounds, before, ratio_or_zero(P, P + N)])

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
        of_bounds = {name: metrics[name] for name in ("c_low", "c_high")}
        highest = {f"{name}_highest": max(values) for name, values in of_bounds.items()}
        return highest | {f"{name}_last": values[-1] for name, values in of_bounds.items()}

    def _token_weight(self, t: Tokens) -> Tensor | float:
        if self.weight == "none":
            return 1.0
        return (t.old_log_prob if self.weight == "old" else t.rollout_log_prob).exp()

    def _interval(self, negative: Tensor, r: Tensor, upper: Tensor, lower: Tensor) -> Tensor:
        """The interval of each token's ratio among upper or, for negative tokens, lower candidates: int32."""
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
        """Start, stop and step of a bound."""
        return tuple(getattr(self, f"{side}_{part}") for part in ("start", "stop", "step"))

    def _count(self, side: str) -> int:
        """Number of candidates of a bound; 1 (only its start) where it has no room."""
        start, stop, step = self._range(side)
        steps = (stop - start) / step
        whole = math.floor(steps + GRID_TOLERANCE)
        return whole + 1 if self.last_step == "full" or steps - whole <= GRID_TOLERANCE else whole + 2

    def _candidates(self, side: str, device: torch.device | str = "cpu") -> Tensor:
        """The bounds that a search visits, ascending: start + k * step for whole k, so that no rounding accumulates."""
        start, stop, step = self._range(side)
        # Made on the device: copying a list to an accelerator would wait for it.
        multiples = torch.arange(self._count(side), dtype=float64, device=device)
        # Not round(decimals=): the compiler's version of it is off in the last bit.
        return ((multiples * step + start) * GRID).round().div(GRID).clamp(start, stop)

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


def magnitude_sums(values: Tensor, slot: Tensor, positive: int, negative: int) -> Tensor:
    """Each sequence's sums of the values' magnitudes by slot, (sequences, positive + negative), float64.

    They are counted in whole numbers. Each sign has its own unit, because a single large value of the other sign would
    leave little of its sums. On an accelerator, "sequence" is a part of one. The slots of positive tokens come first.
    """
    values = parts(values)
    # The largest magnitude of each sign, rounded up to a power of two, holds UNITS of its units.
    largest = values.amax(-1, keepdim=True), -values.amin(-1, keepdim=True)
    units = [one.clamp(min=LEAST_LARGEST).log2().ceil().exp2() / UNITS for one in largest]
    whole = (values / where(values < 0, units[1], units[0])).abs().round()
    of_slot = torch.cat([units[0].expand(-1, positive), units[1].expand(-1, negative)], 1).to(float64)
    return whole_sums(parts(slot), whole, positive + negative) * of_slot


def sum_from(values: Tensor) -> Tensor:
    """The sum of each entry and all after it. Total minus cumulative sum would leave rounding errors where it is 0."""
    return values.flip(0).cumsum(0).flip(0)


def first_true(satisfied: Tensor) -> Tensor:
    """Index, (1,), of the first True, or the last index if there is none."""
    unsatisfied_before = (~satisfied).to(torch.int64).cumprod(0).sum(0, keepdim=True)
    return unsatisfied_before.clamp(max=len(satisfied) - 1)
