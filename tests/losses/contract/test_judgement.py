"""The contract's judgement of losses as users write them: wrong ones are refused, each by the checks of its own fault,
and right ones that look unusual pass. They were written before it was known which of them pass. Not covered: that each
check can fail (test_contract.py), the built-in methods (tests/losses/methods/test_properties.py).
"""

import dataclasses
import itertools

import pytest
import torch
from torch import float64, where

from tests.example_losses import WithinSpread
from verl_clipx import of_rollout_batch
from verl_clipx.losses.contract import contract
from verl_clipx.losses.contract.runner import check_method, first_line
from verl_clipx.losses.methods import Bounds, FixedBounds, Method

CALL_NUMBERS = itertools.count(1)


def make_method(gradient_weight, base=Method, **attributes):
    """Return a method whose gradient weight is a function of the tokens and the bounds."""

    def gradient_weight_of_method(self, t, bounds):
        return gradient_weight(t, bounds)

    return type("Loss", (base,), {"gradient_weight": gradient_weight_of_method, **attributes})()


def make_method_without_clamp(gradient_weight):
    """Return a method whose log-ratio is not clamped before it becomes the ratio."""
    return dataclasses.replace(make_method(gradient_weight), log_ratio_clamp=None)


def change_within_spread(**attributes):
    """Return WithinSpread, which clips by the root mean square of the log-ratio, with some attributes replaced."""
    return type("Loss", (WithinSpread,), attributes)()


# Statistics and decisions of methods that decide their bounds from the mini-batch.


def count_and_squares(t, add):
    """Return the number of tokens and the sum of the log-ratio's squares, added up by a function."""
    log_ratio = where(t.mask, t.log_ratio, 0.0)
    return torch.stack([add(t.mask.to(log_ratio.dtype)), add(log_ratio * log_ratio)])


def add_first_thousand(values):
    return values.flatten()[:1024].double().sum()


def count_sum_and_squares(self, t):
    """Return the number of tokens, and the sums of the log-ratio and of its squares, float64."""
    log_ratio = where(t.mask, t.log_ratio, 0.0).to(float64)
    return torch.stack([t.mask.sum(dtype=float64), log_ratio.sum(), (log_ratio * log_ratio).sum()])


def count_and_sum(self, t):
    return count_sum_and_squares(self, t)[:2]


def standard_deviation(statistics, *, subtracted_from_n=0, smallest_variance=None):
    """Return the log-ratio's standard deviation from its number, its sum and its squares, (1,)."""
    n, total, squares = statistics.unbind()
    variance = (squares - total * total / n.clamp(min=1)) / (n - subtracted_from_n)
    if smallest_variance is not None:
        variance = variance.clamp(min=smallest_variance)
    return variance.sqrt()[None]


def decide_by_count_sum_and_squares(decide):
    """Return WithinSpread with a decision that is a function of the number, the sum and the squares."""
    return change_within_spread(
        statistics_size=3,
        statistics=count_sum_and_squares,
        decide=lambda self, statistics: decide(statistics),
    )


def count_and_largest(self, t):
    largest = where(t.mask, t.log_ratio.abs(), 0.0).amax()
    return torch.stack([t.mask.sum(), largest]).double()


def count_by_quarter(self, t):
    """Return a histogram of the size of the log-ratio, in bins of a quarter of a nat, (8,), float64."""
    quarter = (t.log_ratio.abs() * 4).floor().clamp(max=7)
    return torch.stack([(t.mask & (quarter == k)).sum(dtype=float64) for k in range(8)])


def ninetieth_percentile(self, histogram):
    """Return the lower end of the bin of `count_by_quarter` that has the 90th percentile, (1,)."""
    bins_below = (histogram.cumsum(0) < 0.9 * histogram.sum()).sum(dtype=float64)
    return (bins_below / 4)[None]


def squares_about_the_mean(self, t, first_statistics):
    count, total = first_statistics
    mean = total / count.clamp(min=1)
    return where(t.mask, (t.log_ratio.to(float64) - mean) ** 2, 0.0).sum()[None]


def root_of_second_stage(self, statistics):
    count, _, squares_about_mean = statistics
    return (squares_about_mean / count.clamp(min=1)).sqrt()[None]


def count_and_squares_of_sequences(self, t):
    sequences = t.mask.any(-1).sum(dtype=float64)
    squares = t.sequence_mean(t.log_ratio.to(float64)).square().sum()
    return torch.stack([sequences, squares])


def bound_by_sum(value, decide, weight):
    """Return a method with one decision, which its weight reads as the upper bound.

    Args:
        value: a token's, a function of the tokens.
        decide: a function of the number of tokens and the sum of the values.
        weight: a function of the tokens and the decision.
    """

    def count_and_sum_of_values(self, t):
        values = where(t.mask, value(t).to(float64), 0.0)
        return torch.stack([t.mask, values]).sum((1, 2))

    return change_within_spread(
        statistics=count_and_sum_of_values,
        decide=lambda self, statistics: decide(*statistics)[None],
        bounds=lambda self, t, decision: Bounds(0.0, decision.to(t.ratio.dtype)),
        gradient_weight=lambda self, t, bounds: weight(t, bounds.high),
    )


def summarise_spreads(summary):
    """Return WithinSpread with a metric that is a function of the spreads of a rollout batch's updates."""
    declared = of_rollout_batch("spread_moved", "how far the spread moved", "nats")
    return change_within_spread(
        logs=(*WithinSpread.logs, declared),
        over_updates=lambda self, metrics: {"spread_moved": summary(metrics["spread"])},
    )


def last_over_first_or_infinite(spreads):
    if not spreads[0]:
        return float("inf")
    return spreads[-1] / spreads[0]


# Gradient weights of more than an expression.


def format_a_value(t):
    """Return the ratio, after a message that reads its largest value."""
    str(t.ratio.max())
    return t.ratio


def product_over_sequence(t):
    return t.log_ratio.sum(-1, keepdim=True).exp().expand_as(t.ratio)


def running_mean(t):
    position = torch.ones_like(t.ratio).cumsum(1)
    return (t.ratio * t.mask).cumsum(1) / position


def negative_just_above_the_bound(t, bounds):
    is_just_above = (t.ratio > bounds.high) & (t.ratio < 1.002 * bounds.high)
    return where(is_just_above, -t.ratio, t.ratio)


def divide_by_size_of_group(t):
    # By counting, since comparing each sequence with each takes four seconds a call of the contract's many sequences.
    in_order = t.group.sort().values
    first = torch.searchsorted(in_order, t.group, right=False)
    end = torch.searchsorted(in_order, t.group, right=True)
    return t.ratio / (end - first)[:, None]


def divide_by_mean_of_two_sequences(t):
    in_pairs = t.ratio.view(-1, 2, t.ratio.shape[1])
    return (in_pairs / in_pairs.mean(1, keepdim=True)).view_as(t.ratio)


def halve_without_padding(t):
    has_no_padding = t.mask.all(-1, keepdim=True).to(t.ratio.dtype)
    return t.ratio * (1 - 0.5 * has_no_padding)


def share_in_the_sequence(t):
    return t.log_ratio.masked_fill(~t.mask, -torch.inf).softmax(-1) * t.mask.sum(-1, keepdim=True)


def sampler_ratio(t):
    return (t.old_log_prob - t.rollout_log_prob).exp()


def negative_between(low, high, value):
    """Return a method whose weight is negative where a token's value is between two numbers."""

    def gradient_weight(t, _):
        is_between = (value(t) > low) & (value(t) < high)
        return where(is_between, -t.ratio, t.ratio)

    # With by_batch, the contract does not ask for the same weight at other sizes of the advantages.
    return make_method(gradient_weight, by_batch=True)


# Bands of a token's quantity, between the values that the contract's mini-batches have: the quantity, the lower ends of
# its bands, and what each upper end is, divided by the lower one.
BANDS = (
    ("-log_prob", lambda t: -t.log_prob, (0.002, 0.05, 0.6, 1.0, 3.0, 12.0), 1.3),
    ("probability", lambda t: t.log_prob.exp(), (0.2, 0.45, 0.7), 1.2),
    ("-old_log_prob", lambda t: -t.old_log_prob, (0.02, 0.7, 4.0), 1.3),
    ("size of A", lambda t: t.advantages.abs(), (0.005, 5.0, 200.0), 1.5),
)


def make_methods_negative_in_bands():
    methods = {}
    for quantity, value, lower_ends, upper_over_lower in BANDS:
        for low in lower_ends:
            high = low * upper_over_lower
            methods[f"negative where the {quantity} is from {low:g} to {high:g}"] = negative_between(low, high, value)
    return methods


# Wrong losses by name, under the checks that refuse them: all of these checks, and no others.
WRONG = {
    (contract.finite_for_every_finite_input,): {
        "the product over a sequence overflows": make_method(
            lambda t, _: product_over_sequence(t),
            by_sequence=True,
        ),
        "the sampler's ratio overflows": make_method(
            lambda t, _: t.ratio * sampler_ratio(t),
            asks_for=("rollout_log_prob",),
        ),
        "float32 rounds what p is clamped to": make_method(
            lambda t, _: t.ratio / (1 - t.log_prob.exp().clamp(max=1 - 1e-8))
        ),
        "both probabilities underflow": make_method(
            lambda t, _: 2 * t.ratio * t.log_prob.exp() / (t.log_prob.exp() + t.old_log_prob.exp())
        ),
        "the variance is below 0 by rounding": decide_by_count_sum_and_squares(standard_deviation),
        "divided by n - 1": decide_by_count_sum_and_squares(
            lambda statistics: standard_deviation(statistics, subtracted_from_n=1, smallest_variance=0.0)
        ),
        "a metric is NaN without tokens": change_within_spread(
            metrics=lambda self, statistics, decision: {"spread": statistics[1] / statistics[0]}
        ),
        "a square without the clamp, at a large A": make_method_without_clamp(lambda t, _: t.ratio**2),
        "half precision inside": make_method(lambda t, _: (t.ratio.half() ** 2).to(t.ratio.dtype)),
        "the logarithm of |A| as the value": make_method(
            lambda t, _: t.ratio,
            loss_value=lambda self, t, bounds, weight: -weight * t.advantages.abs().log(),
        ),
    },
    (contract.statistics_are_the_same_each_time, contract.statistics_add_up_over_any_split): {
        "statistics in the ratio's dtype": change_within_spread(
            statistics=lambda self, t: count_and_squares(t, torch.sum)
        ),
    },
    (contract.statistics_add_up_over_any_split,): {
        "statistics added up in the ratio's dtype": change_within_spread(
            statistics=lambda self, t: count_and_squares(t, torch.sum).double()
        ),
        "the largest ratio as a statistic": change_within_spread(statistics=count_and_largest),
    },
    (contract.one_weight_per_token,): {
        "F is float64 by the bounds": change_within_spread(
            bounds=lambda self, t, decision: Bounds((-decision).exp(), decision.exp()),
            gradient_weight=lambda self, t, bounds: t.ratio.clamp(bounds.low, bounds.high),
        ),
        "squeezed": make_method(lambda t, _: torch.stack([t.ratio, 1 / t.ratio]).amin(0).squeeze()),
    },
    (contract.the_loss_can_be_computed,): {
        "F is a condition": make_method(lambda t, bounds: t.ratio < bounds.high, base=FixedBounds),
        "sequences in pairs": make_method(lambda t, _: divide_by_mean_of_two_sequences(t)),
        "a summary that needs two updates": summarise_spreads(lambda spreads: spreads[1] - spreads[0]),
        "a summary divided by a first update's spread": summarise_spreads(lambda spreads: spreads[-1] / spreads[0]),
    },
    (contract.weight_is_positive_at_ratio_1,): {
        "zero for unlikely tokens": make_method(lambda t, _: where(t.log_prob > -15, t.ratio, 0.0)),
        "only above and below ratio 1": make_method(lambda t, _: where((t.ratio > 1) | (t.ratio < 1), t.ratio, 0.0)),
    },
    (contract.weight_is_nowhere_negative,): {
        "negative for unlikely tokens": make_method(lambda t, _: t.ratio * (1 + t.log_prob / 40)),
        "negative in a band beside the bound": make_method(negative_just_above_the_bound, base=FixedBounds),
        "negative where -log_prob is from 40 to 52": negative_between(40, 52, lambda t: -t.log_prob),
        "negative beyond the clamp": make_method_without_clamp(lambda t, _: where(t.log_ratio > 25, -1.0, t.ratio)),
        "the logarithm of the ratio": make_method(lambda t, _: 1 + t.log_ratio),
    },
    (contract.weight_is_positive_at_ratio_1, contract.weight_is_nowhere_negative): {
        **make_methods_negative_in_bands(),
        "negative where the entropy is high": make_method(
            lambda t, _: t.ratio * (1 - t.entropy / 6),
            asks_for=("entropy",),
        ),
    },
    (contract.weight_does_not_depend_on_the_size_of_advantages,): {
        "the size of A at large ratios": make_method(
            lambda t, _: where(t.ratio > 4, t.ratio / (1 + t.advantages.abs()), t.ratio)
        ),
        "divided by the spread of A": bound_by_sum(
            lambda t: t.advantages.double() ** 2,
            decide=lambda n, squares: (squares / n.clamp(min=1)).sqrt(),
            weight=lambda t, spread: t.ratio / (0.1 + spread),
        ),
    },
    (contract.weight_does_not_depend_on_the_micro_batch,): {
        "whether any A is 0": make_method(lambda t, _: t.ratio * (1 + ((t.advantages == 0) & t.mask).any())),
        "an undeclared running mean": make_method(lambda t, _: running_mean(t)),
    },
    (contract.padding_does_not_matter, contract.weight_does_not_depend_on_the_micro_batch): {
        "the group's other sequences": make_method(lambda t, _: divide_by_size_of_group(t), asks_for=("group",)),
        "a quantile of the micro-batch": make_method(
            lambda t, _: where(t.ratio <= t.ratio.flatten().quantile(0.9), t.ratio, t.ratio / 2)
        ),
    },
    (contract.no_value_is_read_on_the_host,): {
        "a message reads a value": make_method(lambda t, _: format_a_value(t)),
        "assigned by the mask": make_method(lambda t, _: t.ratio.masked_scatter(t.mask, t.ratio[t.mask])),
    },
    (contract.weight_is_the_same_at_each_call,): {
        "a warm-up that counts its calls": make_method(lambda t, _: t.ratio * min(1.0, next(CALL_NUMBERS) / 30)),
        "another one without autograd": make_method(lambda t, _: t.ratio * (1.0 if torch.is_grad_enabled() else 0.5)),
    },
    (contract.padding_does_not_matter,): {
        "another one where the longest response is long": make_method(
            lambda t, _: t.ratio * (2.0 if t.ratio.shape[1] > 512 else 1.0)
        ),
        "a response that fills the micro-batch's width": make_method(
            lambda t, _: halve_without_padding(t),
            by_sequence=True,
        ),
    },
    (contract.statistics_are_the_same_each_time,): {
        "statistics of other sums without autograd": change_within_spread(
            statistics=lambda self, t: WithinSpread.statistics(self, t) * (1 + torch.is_grad_enabled())
        ),
        "sums of both signs that are said to have one": change_within_spread(
            never_negative=slice(None),
            statistics=count_and_sum,
            decide=lambda self, statistics: (statistics[1].abs() / statistics[0].clamp(min=1))[None],
        ),
        "a decision in float32": change_within_spread(
            decide=lambda self, statistics: WithinSpread.decide(self, statistics).float()
        ),
        "a decision that is one number": change_within_spread(
            decide=lambda self, statistics: WithinSpread.decide(self, statistics)[0],
            metrics=lambda self, statistics, decision: {"spread": decision},
        ),
    },
    (contract.padding_does_not_matter, contract.statistics_add_up_over_any_split): {
        "statistics of the first thousand tokens": change_within_spread(
            statistics=lambda self, t: count_and_squares(t, add_first_thousand)
        ),
    },
    (contract.order_of_sequences_does_not_matter, contract.weight_does_not_depend_on_the_micro_batch): {
        "a running sum over sequences": make_method(lambda t, _: t.ratio / (1 + (t.ratio * t.mask).cumsum(0))),
    },
    (contract.order_of_sequences_does_not_matter,): {
        "the number of a group": make_method(
            lambda t, _: t.ratio * (1 + 0.1 * (t.group % 2)[:, None]).to(t.ratio.dtype),
            asks_for=("group",),
        ),
        "the number of a group in statistics": change_within_spread(
            asks_for=("group",),
            statistics=lambda self, t: torch.stack([t.mask, t.mask * (t.group > 5)[:, None]]).sum((1, 2)).double(),
        ),
    },
    (contract.metrics_keep_their_keys,): {
        "a summary that is infinite": summarise_spreads(last_over_first_or_infinite),
    },
    (contract.compiled_loss_is_the_same,): {
        "compiled it is another": make_method(lambda t, _: t.ratio * (2.0 if torch.compiler.is_compiling() else 1.0)),
    },
}

RIGHT = {
    "entropy's share": make_method(
        lambda t, _: t.ratio * t.entropy / (1 + t.entropy),
        asks_for=("entropy",),
    ),
    "entropy below that of the vocabulary": make_method(
        lambda t, _: t.ratio * (1 - t.entropy / 12),
        asks_for=("entropy",),
    ),
    "NaN for a sequence without tokens": make_method(
        lambda t, _: t.ratio * where(t.mask, t.ratio, 0.0).sum(-1, keepdim=True) / t.mask.sum(-1, keepdim=True) / 1e3,
        by_sequence=True,
    ),
    "infinite outside the mask": make_method(lambda t, _: t.ratio / t.mask),
    "divided by the batch's mean |A|": make_method(
        lambda t, _: t.ratio * t.mask.sum() / (1e-3 + t.advantages.abs().sum()),
        by_batch=True,
    ),
    "the sign of A by an epsilon": make_method(
        lambda t, _: t.ratio * (1 + 0.1 * t.advantages / (t.advantages.abs() + 1e-6))
    ),
    "the sampler's ratio, capped": make_method(
        lambda t, _: t.ratio * sampler_ratio(t).clamp(max=2),
        asks_for=("rollout_log_prob",),
    ),
    "a mask by the difference of probabilities": make_method(
        lambda t, _: where((t.log_prob.exp() - t.old_log_prob.exp()).abs() < 0.2, t.ratio, 0.0)
    ),
    "unlikely tokens weigh more": make_method(lambda t, _: t.ratio * (1 - t.log_prob.exp()) ** 0.5),
    "the inverse ratio, capped": make_method(lambda t, _: (1 / t.ratio).clamp(max=4)),
    "the mean ratio of a sequence": make_method(
        lambda t, _: t.sequence_mean(t.log_ratio).exp().clamp(0.9, 1.1).expand_as(t.ratio),
        by_sequence=True,
    ),
    "numbers made on the CPU": make_method(
        lambda t, _: torch.minimum(t.ratio, where(t.advantages > 0, 1.28, 1.2)) * torch.tensor(0.5)
    ),
    "without the clamp, with its own": make_method_without_clamp(lambda t, _: t.free_ratio.clamp(max=1e4)),
    "a mean over sequences": change_within_spread(statistics=count_and_squares_of_sequences),
    "less for each further token": make_method(
        lambda t, _: t.ratio * 0.99 ** torch.arange(t.ratio.shape[1], device=t.ratio.device).to(t.ratio.dtype)
    ),
    "less for the tokens before it": make_method(
        lambda t, _: t.ratio / t.mask.to(t.ratio.dtype).cumsum(-1).clamp(min=1) ** 0.1,
        by_sequence=True,
    ),
    "a token's share in its sequence": make_method(lambda t, _: share_in_the_sequence(t), by_sequence=True),
    "only where the sampler is near": make_method(
        lambda t, _: t.ratio * ((t.old_log_prob - t.rollout_log_prob).abs() < 0.7),
        asks_for=("rollout_log_prob",),
    ),
    "a tail that underflows": make_method(lambda t, _: torch.special.erfc(t.log_ratio)),
    "the share of tokens with A above 0": bound_by_sum(
        lambda t: t.advantages > 0,
        decide=lambda n, positive: positive / n.clamp(min=1),
        weight=lambda t, share: t.ratio.clamp(max=1.1 + share),
    ),
    "a histogram's quantile": change_within_spread(
        statistics_size=8,
        never_negative=slice(None),
        statistics=count_by_quarter,
        decide=ninetieth_percentile,
    ),
    "a second stage about the first's mean": change_within_spread(
        second_statistics_size=1,
        statistics=count_and_sum,
        second_statistics=squares_about_the_mean,
        decide=root_of_second_stage,
    ),
    "a summary of each number of updates": summarise_spreads(lambda spreads: spreads[-1] - spreads[0]),
}


def run_contract(method, monkeypatch, *, compiled_checks=()):
    """Return the reasons of the checks that refuse a method, by their names; of those that compile, only these run."""
    monkeypatch.setattr(contract, "COMPILED_CHECKS", compiled_checks)
    reasons = {}
    for name, outcome, reason in check_method(method):
        if outcome == "failed":
            reasons[name] = reason
    return reasons


def wrong_losses():
    parameters = []
    for checks, methods in WRONG.items():
        # A compilation takes seconds.
        marks = [pytest.mark.slow] if contract.compiled_loss_is_the_same in checks else []
        for name, method in methods.items():
            parameters.append(pytest.param(checks, method, id=name, marks=marks))
    return parameters


@pytest.mark.parametrize(("checks", "method"), wrong_losses())
def test_a_wrong_loss_is_refused_by_the_checks_of_its_own_fault(checks, method, monkeypatch, compile_by):
    compile_by("eager")
    compiled_checks = [check for check in checks if check in contract.COMPILED_CHECKS]
    reasons = run_contract(method, monkeypatch, compiled_checks=compiled_checks)
    assert list(reasons) == [first_line(check) for check in checks], reasons


@pytest.mark.parametrize("method", RIGHT.values(), ids=RIGHT)
def test_a_right_loss_is_approved(method, monkeypatch):
    assert run_contract(method, monkeypatch) == {}
