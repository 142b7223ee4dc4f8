"""The contract's judgement: losses as a user would get them wrong, each refused for its own fault, and right ones that
look unusual. They were written before it was known which of them pass. Not covered: that each check can fail
(test_contract.py), the built-in methods (tests/losses/methods/test_properties.py).
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

CALLS = itertools.count(1)
COMPILED = "compiled it is another"


def loss(weight, of=Method, **attributes):
    """A method of that gradient weight, a function of the tokens and the bounds."""
    return type("Loss", (of,), {"gradient_weight": lambda self, t, bounds: weight(t, bounds), **attributes})()


def within_spread(**methods):
    return type("Loss", (WithinSpread,), methods)()


def moments(t, add):
    x = where(t.mask, t.log_ratio, 0.0)
    return torch.stack([add(t.mask.to(x.dtype)), add(x * x)])


def deviation(statistics, freedom=0, least=None):
    """Of the log-ratio, of its number, its sum and its squares; clamped to `least` before the root."""
    n, total, squares = statistics.unbind()
    variance = (squares - total * total / n.clamp(min=1)) / (n - freedom)
    return (variance if least is None else variance.clamp(min=least)).sqrt()[None]


def three_sums(self, t):
    x = where(t.mask, t.log_ratio, 0.0).to(float64)
    return torch.stack([t.mask.sum(dtype=float64), x.sum(), (x * x).sum()])


def spread(decide):
    return within_spread(statistics_size=3, statistics=three_sums, decide=lambda self, statistics: decide(statistics))


def saying(t):
    str(t.ratio.max())
    return t.ratio


def product(t):
    return t.log_ratio.sum(-1, keepdim=True).exp().expand_as(t.ratio)


def running_mean(t):
    place = torch.ones_like(t.ratio).cumsum(1)
    return (t.ratio * t.mask).cumsum(1) / place


def band(t, bounds):
    return where((t.ratio > bounds.high) & (t.ratio < 1.002 * bounds.high), -t.ratio, t.ratio)


def between(low, high, value):
    """A weight that is negative where a token's value is between two numbers, both of no mini-batch's fixed ones."""
    return loss(lambda t, _: where((value(t) > low) & (value(t) < high), -t.ratio, t.ratio), by_batch=True)


def group_mates(t):
    # By counting, since comparing each sequence with each takes four seconds a call of the contract's many sequences.
    ordered = t.group.sort().values
    first, last = (torch.searchsorted(ordered, t.group, right=right) for right in (False, True))
    return (last - first)[:, None]


def bounded_by(statistic, decide, weight):
    """Of the number of tokens and the sum of a statistic: the one decision, and a weight that reads it as a bound."""
    return within_spread(
        statistics=lambda self, t: torch.stack([t.mask, where(t.mask, statistic(t).to(float64), 0.0)]).sum((1, 2)),
        decide=lambda self, statistics: decide(*statistics)[None],
        bounds=lambda self, t, decision: Bounds(0.0, decision.to(t.ratio.dtype)),
        gradient_weight=lambda self, t, bounds: weight(t, bounds.high),
    )


def over_updates(summary):
    logs = (*WithinSpread.logs, of_rollout_batch("spread_moved", "how far the spread moved", "nats"))
    return within_spread(logs=logs, over_updates=lambda self, metrics: {"spread_moved": summary(metrics["spread"])})


def pairs(t):
    two = t.ratio.view(-1, 2, t.ratio.shape[1])
    return (two / two.mean(1, keepdim=True)).view_as(t.ratio)


def fills_the_window(t):
    return t.ratio * (1 - 0.5 * t.mask.all(-1, keepdim=True).to(t.ratio.dtype))


def share_in_the_sequence(t):
    return t.log_ratio.masked_fill(~t.mask, -torch.inf).softmax(-1) * t.mask.sum(-1, keepdim=True)


def quarters(self, t):
    quarter = (t.log_ratio.abs() * 4).floor().clamp(max=7)
    return torch.stack([(t.mask & (quarter == k)).sum(dtype=float64) for k in range(8)])


FINITE, ONE = contract.finite_for_every_finite_input, contract.one_weight_per_token
POSITIVE, NEGATIVE = contract.weight_is_positive_at_ratio_1, contract.weight_is_nowhere_negative
OTHERS, SIZE = (
    contract.weight_does_not_depend_on_the_micro_batch,
    contract.weight_does_not_depend_on_the_size_of_advantages,
)

# Between the values that the mini-batches have in turn: the lower end, the upper one divided by it, and of what.
BANDS = [
    *((low, 1.3, "-log_prob", lambda t: -t.log_prob) for low in (0.002, 0.05, 0.6, 1.0, 3.0, 12.0)),
    *((low, 1.2, "probability", lambda t: t.log_prob.exp()) for low in (0.2, 0.45, 0.7)),
    *((low, 1.3, "-old_log_prob", lambda t: -t.old_log_prob) for low in (0.02, 0.7, 4.0)),
    *((low, 1.5, "size of A", lambda t: t.advantages.abs()) for low in (0.005, 5.0, 200.0)),
]

# By the check that refuses them, or the checks.
WRONG = {
    FINITE: {
        "the product over a sequence overflows": loss(lambda t, _: product(t), by_sequence=True),
        "the sampler's ratio overflows": loss(
            lambda t, _: t.ratio * (t.old_log_prob - t.rollout_log_prob).exp(), asks_for=("rollout_log_prob",)
        ),
        "float32 rounds what p is clamped to": loss(lambda t, _: t.ratio / (1 - t.log_prob.exp().clamp(max=1 - 1e-8))),
        "both probabilities underflow": loss(
            lambda t, _: 2 * t.ratio * t.log_prob.exp() / (t.log_prob.exp() + t.old_log_prob.exp())
        ),
        "the variance is below 0 by rounding": spread(deviation),
        "divided by n - 1": spread(lambda statistics: deviation(statistics, 1, 0.0)),
        "a metric is NaN without tokens": within_spread(
            metrics=lambda self, statistics, decision: {"spread": statistics[1] / statistics[0]}
        ),
        "a square without the clamp, at a large A": dataclasses.replace(
            loss(lambda t, _: t.ratio**2), log_ratio_clamp=None
        ),
        "half precision inside": loss(lambda t, _: (t.ratio.half() ** 2).to(t.ratio.dtype)),
        "the logarithm of |A| as the value": loss(
            lambda t, _: t.ratio, loss_value=lambda self, t, bounds, weight: -weight * t.advantages.abs().log()
        ),
    },
    (contract.statistics_are_the_same_each_time, contract.statistics_add_up_over_any_split): {
        "statistics in the ratio's dtype": within_spread(statistics=lambda self, t: moments(t, torch.sum)),
    },
    contract.statistics_add_up_over_any_split: {
        "statistics added up in the ratio's dtype": within_spread(
            statistics=lambda self, t: moments(t, torch.sum).double()
        ),
        "the largest ratio as a statistic": within_spread(
            statistics=lambda self, t: torch.stack(
                [t.mask.sum(), where(t.mask, t.log_ratio.abs(), 0.0).amax()]
            ).double()
        ),
    },
    ONE: {
        "F is float64 by the bounds": within_spread(
            bounds=lambda self, t, decision: Bounds((-decision).exp(), decision.exp()),
            gradient_weight=lambda self, t, bounds: t.ratio.clamp(bounds.low, bounds.high),
        ),
        "squeezed": loss(lambda t, _: torch.stack([t.ratio, 1 / t.ratio]).amin(0).squeeze()),
    },
    contract.the_loss_can_be_computed: {
        "F is a condition": loss(lambda t, bounds: t.ratio < bounds.high, FixedBounds),
        "sequences in pairs": loss(lambda t, _: pairs(t)),
        "a summary that needs two updates": over_updates(lambda of: of[1] - of[0]),
        "a summary divided by a first update's spread": over_updates(lambda of: of[-1] / of[0]),
    },
    POSITIVE: {
        "zero for unlikely tokens": loss(lambda t, _: where(t.log_prob > -15, t.ratio, 0.0)),
        "only above and below ratio 1": loss(lambda t, _: where((t.ratio > 1) | (t.ratio < 1), t.ratio, 0.0)),
    },
    NEGATIVE: {
        "negative for unlikely tokens": loss(lambda t, _: t.ratio * (1 + t.log_prob / 40)),
        "negative in a band beside the bound": loss(band, FixedBounds),
        "negative where -log_prob is from 40 to 52": between(40, 52, lambda t: -t.log_prob),
        "negative beyond the clamp": dataclasses.replace(
            loss(lambda t, _: where(t.log_ratio > 25, -1.0, t.ratio)), log_ratio_clamp=None
        ),
        "the logarithm of the ratio": loss(lambda t, _: 1 + t.log_ratio),
    },
    (POSITIVE, NEGATIVE): {
        **{
            f"negative where the {what} is from {low:g} to {low * width:g}": between(low, low * width, value)
            for low, width, what, value in BANDS
        },
        "negative where the entropy is high": loss(lambda t, _: t.ratio * (1 - t.entropy / 6), asks_for=("entropy",)),
    },
    SIZE: {
        "the size of A at large ratios": loss(
            lambda t, _: where(t.ratio > 4, t.ratio / (1 + t.advantages.abs()), t.ratio)
        ),
        "divided by the spread of A": bounded_by(
            lambda t: t.advantages.double() ** 2,
            lambda n, squares: (squares / n.clamp(min=1)).sqrt(),
            lambda t, spread: t.ratio / (0.1 + spread),
        ),
    },
    OTHERS: {
        "whether any A is 0": loss(lambda t, _: t.ratio * (1 + ((t.advantages == 0) & t.mask).any())),
        "an undeclared running mean": loss(lambda t, _: running_mean(t)),
    },
    (contract.padding_does_not_matter, OTHERS): {
        "the group's other sequences": loss(lambda t, _: t.ratio / group_mates(t), asks_for=("group",)),
        "a quantile of the micro-batch": loss(
            lambda t, _: where(t.ratio <= t.ratio.flatten().quantile(0.9), t.ratio, t.ratio / 2)
        ),
    },
    contract.no_value_is_read_on_the_host: {
        "a message reads a value": loss(lambda t, _: saying(t)),
        "assigned by the mask": loss(lambda t, _: t.ratio.masked_scatter(t.mask, t.ratio[t.mask])),
    },
    contract.weight_is_the_same_at_each_call: {
        "a warm-up that counts its calls": loss(lambda t, _: t.ratio * min(1.0, next(CALLS) / 30)),
        "another one without autograd": loss(lambda t, _: t.ratio * (1.0 if torch.is_grad_enabled() else 0.5)),
    },
    contract.padding_does_not_matter: {
        "another one where the longest response is long": loss(
            lambda t, _: t.ratio * (2.0 if t.ratio.shape[1] > 512 else 1.0)
        ),
        "a response that fills the micro-batch's width": loss(lambda t, _: fills_the_window(t), by_sequence=True),
    },
    contract.statistics_are_the_same_each_time: {
        "statistics of other sums without autograd": within_spread(
            statistics=lambda self, t: WithinSpread.statistics(self, t) * (1 + torch.is_grad_enabled())
        ),
        "sums of both signs that are said to have one": within_spread(
            never_negative=slice(None),
            statistics=lambda self, t: three_sums(self, t)[:2],
            decide=lambda self, statistics: (statistics[1].abs() / statistics[0].clamp(min=1))[None],
        ),
        "a decision in float32": within_spread(
            decide=lambda self, statistics: WithinSpread.decide(self, statistics).float()
        ),
        "a decision that is one number": within_spread(
            decide=lambda self, statistics: WithinSpread.decide(self, statistics)[0],
            metrics=lambda self, statistics, decision: {"spread": decision},
        ),
    },
    (contract.padding_does_not_matter, contract.statistics_add_up_over_any_split): {
        "statistics of the first thousand tokens": within_spread(
            statistics=lambda self, t: moments(t, lambda of: of.flatten()[:1024].double().sum())
        ),
    },
    (contract.order_of_sequences_does_not_matter, OTHERS): {
        "a running sum over sequences": loss(lambda t, _: t.ratio / (1 + (t.ratio * t.mask).cumsum(0))),
    },
    contract.order_of_sequences_does_not_matter: {
        "the number of a group": loss(
            lambda t, _: t.ratio * (1 + 0.1 * (t.group % 2)[:, None]).to(t.ratio.dtype), asks_for=("group",)
        ),
        "the number of a group in statistics": within_spread(
            asks_for=("group",),
            statistics=lambda self, t: torch.stack([t.mask, t.mask * (t.group > 5)[:, None]]).sum((1, 2)).double(),
        ),
    },
    contract.metrics_keep_their_keys: {
        "a summary that is infinite": over_updates(lambda of: of[-1] / of[0] if of[0] else float("inf")),
    },
    contract.compiled_it_is_the_same: {
        COMPILED: loss(lambda t, _: t.ratio * (2.0 if torch.compiler.is_compiling() else 1.0)),
    },
}

RIGHT = {
    "entropy's share": loss(lambda t, _: t.ratio * t.entropy / (1 + t.entropy), asks_for=("entropy",)),
    "entropy below that of the vocabulary": loss(lambda t, _: t.ratio * (1 - t.entropy / 12), asks_for=("entropy",)),
    "NaN for a sequence without tokens": loss(
        lambda t, _: t.ratio * where(t.mask, t.ratio, 0.0).sum(-1, keepdim=True) / t.mask.sum(-1, keepdim=True) / 1e3,
        by_sequence=True,
    ),
    "infinite outside the mask": loss(lambda t, _: t.ratio / t.mask),
    "divided by the batch's mean |A|": loss(
        lambda t, _: t.ratio * t.mask.sum() / (1e-3 + t.advantages.abs().sum()), by_batch=True
    ),
    "the sign of A by an epsilon": loss(lambda t, _: t.ratio * (1 + 0.1 * t.advantages / (t.advantages.abs() + 1e-6))),
    "the sampler's ratio, capped": loss(
        lambda t, _: t.ratio * (t.old_log_prob - t.rollout_log_prob).exp().clamp(max=2),
        asks_for=("rollout_log_prob",),
    ),
    "a mask by the difference of probabilities": loss(
        lambda t, _: where((t.log_prob.exp() - t.old_log_prob.exp()).abs() < 0.2, t.ratio, 0.0)
    ),
    "unlikely tokens weigh more": loss(lambda t, _: t.ratio * (1 - t.log_prob.exp()) ** 0.5),
    "the inverse ratio, capped": loss(lambda t, _: (1 / t.ratio).clamp(max=4)),
    "the mean ratio of a sequence": loss(
        lambda t, _: t.sequence_mean(t.log_ratio).exp().clamp(0.9, 1.1).expand_as(t.ratio), by_sequence=True
    ),
    "numbers made on the CPU": loss(
        lambda t, _: torch.minimum(t.ratio, where(t.advantages > 0, 1.28, 1.2)) * torch.tensor(0.5)
    ),
    "without the clamp, with its own": dataclasses.replace(
        loss(lambda t, _: t.free_ratio.clamp(max=1e4)), log_ratio_clamp=None
    ),
    "a mean over sequences": within_spread(
        statistics=lambda self, t: torch.stack(
            [
                (t.mask.any(-1)).sum(dtype=float64),
                t.sequence_mean(t.log_ratio.to(float64)).square().sum(),
            ]
        )
    ),
    "less for each further token": loss(
        lambda t, _: t.ratio * 0.99 ** torch.arange(t.ratio.shape[1], device=t.ratio.device).to(t.ratio.dtype)
    ),
    "less for the tokens before it": loss(
        lambda t, _: t.ratio / t.mask.to(t.ratio.dtype).cumsum(-1).clamp(min=1) ** 0.1, by_sequence=True
    ),
    "a token's share in its sequence": loss(lambda t, _: share_in_the_sequence(t), by_sequence=True),
    "only where the sampler is near": loss(
        lambda t, _: t.ratio * ((t.old_log_prob - t.rollout_log_prob).abs() < 0.7), asks_for=("rollout_log_prob",)
    ),
    "a tail that underflows": loss(lambda t, _: torch.special.erfc(t.log_ratio)),
    "the share of tokens with A above 0": bounded_by(
        lambda t: t.advantages > 0,
        lambda n, positive: positive / n.clamp(min=1),
        lambda t, share: t.ratio.clamp(max=1.1 + share),
    ),
    "a histogram's quantile": within_spread(
        statistics_size=8,
        never_negative=slice(None),
        statistics=quarters,
        decide=lambda self, of: ((of.cumsum(0) < 0.9 * of.sum()).sum(dtype=float64) / 4)[None],
    ),
    "a second stage about the first's mean": within_spread(
        second_statistics_size=1,
        statistics=lambda self, t: three_sums(self, t)[:2],
        second_statistics=lambda self, t, first: where(
            t.mask, (t.log_ratio.to(float64) - first[1] / first[0].clamp(min=1)) ** 2, 0.0
        ).sum()[None],
        decide=lambda self, of: (of[2] / of[0].clamp(min=1)).sqrt()[None],
    ),
    "a summary of each number of updates": over_updates(lambda of: of[-1] - of[0]),
}


def outcomes(method, monkeypatch, compiled=()):
    monkeypatch.setattr(contract, "COMPILED_CHECKS", compiled)
    return {name: why for name, outcome, why in check_method(method) if outcome == "failed"}


CASES = [(name, checks, method) for checks, methods in WRONG.items() for name, method in methods.items()]


@pytest.mark.parametrize(
    ("checks", "method"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name == COMPILED)) for name, *case in CASES],
)
def test_a_wrong_loss_is_refused_for_its_own_faults(checks, method, monkeypatch, compile_by):
    compile_by("eager")
    checks = checks if isinstance(checks, tuple) else (checks,)
    found = outcomes(method, monkeypatch, [check for check in checks if check in contract.COMPILED_CHECKS])
    assert list(found) == [first_line(check) for check in checks], found


@pytest.mark.parametrize("method", RIGHT.values(), ids=RIGHT)
def test_a_right_loss_is_approved(method, monkeypatch):
    assert outcomes(method, monkeypatch) == {}
