"""The contract's power: each check finds a method that breaks it and says what. Not covered: further ways to break it,
and sound losses, which keep it (test_judgement.py); the built-in methods (tests/losses/methods/test_properties.py).
"""

import contextlib
import itertools
import os
import time

import pytest
import torch

from tests import example_losses
from tests.example_losses import WithinSpread
from verl_clipx import check_loss, of_decision, register_loss
from verl_clipx.losses.applying.compiled import token_functions
from verl_clipx.losses.applying.user_method import find_method
from verl_clipx.losses.contract import contract
from verl_clipx.losses.contract.contract import CHECKS, COMPILED_CHECKS
from verl_clipx.losses.contract.runner import check_method, first_line
from verl_clipx.losses.methods import BUILT_IN, METHODS


def broken(**methods):
    """A sound method with some of its methods replaced."""
    return type("Broken", (WithinSpread,), methods)()


def weight(formula):
    return broken(gradient_weight=lambda self, t, bounds: formula(t, bounds))


def statistics(formula):
    return broken(statistics=lambda self, t: formula(t, WithinSpread.statistics(self, t)))


def second(formula):
    """A method with a second stage, which its decision does not read."""
    return broken(
        second_statistics_size=1,
        second_statistics=lambda self, t, first: formula(t, first),
        decide=lambda self, statistics: WithinSpread.decide(self, statistics[:2]),
    )


def metrics(formula):
    return broken(metrics=lambda self, statistics, decision: formula(statistics, decision))


def writes(write):
    """A method whose weight is the ratio, after it wrote to its tokens or bounds."""
    return weight(lambda t, bounds: (write(t, bounds), t.ratio)[1])


def failing(message):
    raise RuntimeError(message)


def added_up(**attributes):
    """A method that divides by the ratios of its micro-batch, with some attributes."""
    total = lambda t: torch.where(t.mask, t.ratio, 0.0).sum()  # noqa: E731
    return broken(gradient_weight=lambda self, t, bounds: t.ratio / (1 + total(t)), **attributes)


def prompts(self, t):
    # One whose responses are split over micro-batches counts twice.
    same = t.group[:, None] == t.group
    return torch.stack([t.mask.sum(), (1 / same.sum(0)).sum()]).double()


def tried(read):
    """Reads a value on the host, and goes on without it where that fails, as on tensors without values."""
    with contextlib.suppress(Exception):
        read()
    return 1.0


def waits():
    torch.cuda.synchronize()


def waits_for_any():
    torch.accelerator.synchronize()


CALLS = itertools.count()

AFTER_OTHERS = "is another one after other mini-batches, so it keeps something of them. Make what it needs"
READ = r"^a tensor's value is read on the host.* write torch\.where\(condition, a, b\) instead of `if`.* PyTorch said: "
PRINTED = r"^a tensor's value is read on the host.* The check saw: a message contains a tensor"
SYNCHRONIZED = r"^the loss waits for everything .* Remove the call that waits\. The check saw: torch\.cuda\.synchronize"
COPIED = (
    r"^a tensor is made on another device than the ratio's, or copied there\. .* The check saw: a copy from the host's "
    "memory waits"
)


def remembering(remember, use):
    """A weight that keeps something of the first mini-batch that it sees, and uses it in all others."""
    memory = []

    def formula(t, _):
        if not memory:
            memory.append(remember(t))
        return use(t, memory[0])

    return weight(formula)


def mean_ratio(t):
    return torch.where(t.mask, t.ratio, 0.0).double().sum().item() / max(int(t.mask.sum()), 1)


def running_mean():
    """A weight that divides by the mean ratio of the mini-batches so far, which forgets slowly."""
    memory = {"mean": 1.0, "last": None}

    def formula(t, _):
        if memory["last"] is None or not torch.equal(t.ratio, memory["last"]):
            memory.update(mean=0.9 * memory["mean"] + 0.1 * mean_ratio(t), last=t.ratio.clone())
        return t.ratio / memory["mean"]

    return weight(formula)


BROKEN = {
    contract.earlier_batches_do_not_matter: [
        (remembering(mean_ratio, lambda t, mean: t.ratio / mean), AFTER_OTHERS),
        (remembering(lambda t: float(t.advantages[0, 0]), lambda t, A: t.ratio * (2 + A)), AFTER_OTHERS),
        (remembering(lambda t: t.ratio.amax().item(), lambda t, high: t.ratio.clamp(max=high)), AFTER_OTHERS),
        (running_mean(), AFTER_OTHERS),
    ],
    contract.the_loss_can_be_computed: [(weight(lambda t, _: t.ratio[:, 1.5]), "only integers")],
    contract.one_weight_per_token: [
        (weight(lambda t, _: t.ratio.mean(-1, keepdim=True)), r"has shape \(6, 1\)"),
    ],
    contract.weight_is_positive_at_ratio_1: [
        # PPO's loss in the place of the weight is in tests/losses/applying/test_user_method.py.
        (weight(lambda t, _: t.ratio * (t.advantages > 0)), r"F is 0 at ratio 1 for a token with A = -[0-9.]+"),
    ],
    contract.weight_is_nowhere_negative: [
        (
            weight(lambda t, _: torch.where((t.ratio - 1).abs() > 0.01, -t.ratio, t.ratio)),
            r"F is -[01]\.\d+ at ratio (1\.01|0\.98)\d* for a token with A = [-+0-9.e]+, below 0\. Return the gradient",
        ),
    ],
    contract.weight_does_not_depend_on_the_size_of_advantages: [
        (weight(lambda t, _: t.ratio * t.advantages.abs()), r"when A is multiplied by 0\.25\. Return the gradient"),
    ],
    contract.weight_is_the_same_at_each_call: [
        (
            weight(lambda t, _: t.ratio * (next(CALLS) < 900)),
            r"F goes from [0-9.]+ to 0 at call \d{3}\.",
        ),
    ],
    contract.gradient_is_weight_times_advantage: [(weight(lambda t, _: torch.rand_like(t.ratio)), "differs from -F")],
    contract.finite_for_every_finite_input: [
        (
            weight(lambda t, _: torch.where(t.ratio > 10, 0 * t.ratio.exp(), t.ratio)),
            r"F is nan for torch\.float64 inputs where log_prob - old_log_prob is 6\.5\d* \(the ratio is 7[12]\d\) and "
            r"A = [-+0-9.e]+, log_prob = -[0-9.]+\. Clamp what goes into an exponential",
        ),
        (
            broken(loss_value=lambda self, t, bounds, weight: t.free_ratio**3),
            r"the loss is inf for torch\.float64 inputs where log_prob - old_log_prob is 10000 \(the ratio is 4\.85e\+0"
            r"8\) .* t\.ratio is clamped unless log_ratio_clamp is null",
        ),
        # bfloat16 rounds a log-probability of -10000 to -9984, which no wider dtype does. F is float32 there.
        (
            weight(lambda t, _: torch.where(t.log_prob == -9984, torch.inf, t.ratio)),
            r"F is inf for torch\.bfloat16 inputs",
        ),
    ],
    contract.order_of_sequences_does_not_matter: [(weight(lambda t, _: t.ratio * t.ratio[0, 0]), "order of the seq")],
    contract.padding_does_not_matter: [
        (statistics(lambda t, sums: sums + torch.tensor([t.ratio.numel(), 0.0]).double()), "statistics count padding"),
    ],
    contract.weight_does_not_depend_on_the_micro_batch: [
        (weight(lambda t, _: t.ratio / t.ratio.mean()), r"F of a token goes from .* Use statistics, .* by_batch=T"),
        (added_up(by_sequence=True), "other sequences of its micro-batch"),
        (weight(lambda t, _: t.ratio / t.sequence_mean(t.ratio)), "other tokens of its sequence .* by_sequence=True"),
    ],
    contract.inputs_stay_unchanged: [
        (writes(lambda t, _: t.mask.fill_(True)), "mask was written to by gradient_weight"),
        (writes(lambda t, _: t.ratio.clamp_(0.8, 1.2)), r"ratio was written to .* Write ratio\.clamp\(…\) instead of"),
        # Too wide to act on any usual ratio, and a write that no version counts.
        (writes(lambda t, _: t.ratio.clamp_(1e-30, 1e30)), "ratio was written to"),
        (writes(lambda t, _: t.ratio.data.clamp_(max=1e3)), "ratio was written to"),
        (writes(lambda t, bounds: bounds.high.fill_(9.0)), "high was written to"),
        (statistics(lambda t, sums: (t.log_ratio.abs_(), sums)[1]), "log_ratio was written to by statistics"),
        (broken(decide=lambda self, statistics: statistics.clamp_(min=1)[:1]), "statistics was written to by decide"),
        (metrics(lambda sums, decision: {"spread": decision.mul_(2)[0]}), "decision was written to by metrics"),
        (second(lambda t, first: first.mul_(2)[:1]), "first was written to by second_statistics"),
    ],
    contract.statistics_are_the_same_each_time: [
        (statistics(lambda t, sums: sums + torch.rand(2)), "the statistics of the same tokens differ"),
        (second(lambda t, first: first), r"the statistics have shape \(4,\), but the class declares \(3,\)"),
    ],
    contract.statistics_add_up_over_any_split: [
        (statistics(lambda t, sums: sums / sums[0].clamp(min=1)), "do not add up"),
        (broken(asks_for=("group",), statistics=prompts), "do not add up"),
        (second(lambda t, first: t.mask.sum().double().sqrt()[None]), "do not add up"),
    ],
    contract.tokens_outside_the_statistics_mask_do_not_count: [
        (statistics(lambda t, sums: torch.stack([sums[0], t.log_ratio.square().sum()])), "count tokens outside t.mask"),
    ],
    contract.metrics_keep_their_keys: [
        (metrics(lambda sums, decision: {"spread": decision[0]} if sums[0] > 0 else {}), "the keys depend on the data"),
        (
            metrics(lambda sums, decision: {} if sums[0] > 0 and sums[1] == 0 else {"spread": decision[0]}),
            r"the keys depend on the data.*: \[\] if every ratio is 1, \['spread'\] for other ratios, \['spread'\] w",
        ),
        (metrics(lambda sums, decision: {"width": decision[0]}), r"returns 'width', which it does not declare: add"),
        (broken(logs=(of_decision("ratio_mean", "", ""),)), "'ratio_mean': another metric"),
        (broken(over_updates=lambda self, metrics: {"last": 1.0}), "returns 'last', which logs does not"),
    ],
    contract.no_value_is_read_on_the_host: [
        (weight(lambda t, _: t.ratio if t.ratio.sum() > 0 else -t.ratio), READ),
        (broken(decide=lambda self, sums: torch.tensor([sums[0].item()])), READ),
        (statistics(lambda t, sums: torch.stack([sums[0], t.ratio[t.mask].double().sum()])), READ),
        (weight(lambda t, _: t.ratio * tried(lambda: t.ratio.mean().item())), READ),
        (weight(lambda t, _: t.ratio * tried(lambda: float(t.ratio.sum()))), READ),
        (weight(lambda t, _: t.ratio * tried(lambda: bool((t.ratio > 5).any()))), READ),
        (weight(lambda t, _: t.ratio * tried(lambda: len(t.ratio[t.mask]))), READ),
        (weight(lambda t, _: t.ratio * tried(lambda: print(t.ratio))), PRINTED),
        (broken(decide=lambda self, sums: sums * tried(sums.tolist)), READ),
        (metrics(lambda sums, decision: {"spread": decision[0] * tried(decision[0].item)}), READ),
        (weight(lambda t, _: t.ratio * (t.ratio.mean().item() if t.ratio.is_cuda else 1.0)), READ),
        (weight(lambda t, _: t.ratio * (1.0 if t.ratio.is_cpu or t.ratio.is_meta else t.ratio.mean().item())), READ),
        (weight(lambda t, _: t.ratio * (t.ratio.mean().item() if t.ratio.device.type == "cuda" else 1.0)), READ),
        (weight(lambda t, _: t.ratio.cpu().to(t.ratio.device) if t.mask.is_cuda else t.ratio), READ),
        (weight(lambda t, _: t.ratio * tried(waits) if t.ratio.is_cuda else t.ratio), SYNCHRONIZED),
        (weight(lambda t, _: t.ratio * tried(waits_for_any) if t.ratio.is_cuda else t.ratio), SYNCHRONIZED),
        # In large batches alone.
        (weight(lambda t, _: t.ratio * (t.ratio.mean().item() if t.ratio.numel() > 4096 else 1.0)), READ),
        (weight(lambda t, _: t.ratio * (t.ratio.mean().item() if t.ratio.shape[1] > 100_000 else 1.0)), READ),
        (weight(lambda t, _: t.ratio * (t.ratio.mean().item() if t.ratio.shape[0] > 2_000 else 1.0)), READ),
        (statistics(lambda t, sums: sums * (sums[0].item() if t.mask.is_cuda and t.mask.numel() > 1e7 else 1)), READ),
        # Copies, on an accelerator alone or everywhere.
        (weight(lambda t, _: t.ratio * (torch.tensor(1.0).to("cuda") if t.ratio.is_cuda else 1.0)), COPIED),
        (weight(lambda t, _: t.ratio * (torch.ones(9).to(t.ratio) if t.ratio.is_cuda else 1.0)), COPIED),
        (weight(lambda t, _: t.ratio * (torch.ones(1).cuda() if t.ratio.is_cuda else 1.0)), COPIED),
        (weight(lambda t, _: t.ratio * (t.ratio.new_tensor([1.0]) if t.ratio.is_cuda else 1.0)), COPIED),
        (weight(lambda t, _: t.ratio * torch.tensor([1.0], device=t.ratio.device)), COPIED),
        (weight(lambda t, _: t.ratio * torch.as_tensor([1.0], device=t.ratio.device)), COPIED),
        (weight(lambda t, _: torch.empty_like(t.ratio).copy_(torch.ones(1)) * t.ratio), COPIED),
        (weight(lambda t, _: t.ratio + torch.zeros(9)), r"Make it there, for example with torch\.zeros_like"),
        # Another mistake gets no such advice.
        (weight(lambda t, _: t.ratio if t.ratio.device.type == "cpu" else failing("metadata is missing")), "^metadata"),
    ],
}


@pytest.mark.parametrize(
    ("check", "method", "message"),
    [pytest.param(check, *case, id=check.__name__) for check, cases in BROKEN.items() for case in cases],
)
def test_a_check_finds_a_method_that_breaks_it(check, method, message):
    with pytest.raises(Exception, match=message):
        check(method)


# What no method can break as long as the plugin keeps its part, and that part.
KEPT_BY_THE_PLUGIN = {
    contract.nothing_outside_the_mask_is_read: (
        "losses.base.tokens.where",
        lambda mask, values, other: values,
        "are read",
    ),
    contract.not_finite_inside_the_mask_reaches_the_gradient: (
        "losses.applying.loss.find_finite_tokens",
        lambda t: torch.ones_like(t.mask),
        "log_prob=inf, statistics its own: the loss is finite",
    ),
    # As good as `find_finite_tokens` uncompiled; to the compiler it is true of every number.
    contract.compiled_loss_is_the_same: (
        "losses.applying.loss.find_finite_tokens",
        lambda t: (t.log_prob - t.old_log_prob + t.advantages) * 0 == 0,
        "compiled, log_prob=inf, statistics its own: the loss is finite",
    ),
}


@pytest.mark.parametrize(
    "check",
    [pytest.param(check, marks=[pytest.mark.slow] * (check in COMPILED_CHECKS)) for check in KEPT_BY_THE_PLUGIN],
    ids=lambda check: check.__name__,
)
def test_a_check_finds_a_fault_of_the_plugins_own(check, monkeypatch):
    name, fault, message = KEPT_BY_THE_PLUGIN[check]
    monkeypatch.setattr(f"verl_clipx.{name}", fault)
    token_functions.cache_clear()
    with pytest.raises(AssertionError, match=message):
        check(find_method(example_losses.soft)())


# Formulas of F, by whether F is the same at every ratio.
FOLLOWING = {
    "1": (lambda t, _: torch.ones_like(t.ratio), False),
    "of A": (lambda t, _: torch.where(t.advantages > 0, 1.0, 0.5).to(t.ratio.dtype), False),
    "of the old probability": (lambda t, _: 1 - t.old_log_prob.exp(), False),
    "of the current probability": (lambda t, _: 1 - t.log_prob.exp(), False),
    "the ratio": (lambda t, _: t.ratio, True),
    "a clamped ratio": (lambda t, _: t.ratio.clamp(0.99, 1.01), True),
    "a drop far out": (lambda t, _: torch.where(t.ratio > 5, 0.5, 1.0).to(t.ratio.dtype), True),
    "a sequence's ratio": (lambda t, _: t.sequence_mean(t.log_ratio).exp().expand_as(t.ratio), True),
    "of the probabilities' difference": (lambda t, _: 1 / (1 + (t.probabilities[0] - t.probabilities[1]).abs()), True),
}


@pytest.mark.parametrize(("formula", "follows"), FOLLOWING.values(), ids=FOLLOWING)
def test_a_weight_that_is_the_same_at_every_ratio_is_told_from_others(formula, follows):
    assert contract.ignores_the_ratio(weight(formula)) != follows


@pytest.mark.parametrize("name", BUILT_IN)
def test_no_built_in_method_ignores_the_ratio(name):
    assert not contract.ignores_the_ratio(METHODS[name]())


SIZE = contract.weight_does_not_depend_on_the_size_of_advantages
LIFTED = {
    "unconstrained_weight": (contract.weight_is_positive_at_ratio_1, contract.weight_is_nowhere_negative, SIZE),
    "by_batch": (SIZE, contract.weight_does_not_depend_on_the_micro_batch),
}


@pytest.mark.parametrize("flag", LIFTED)
def test_a_rule_that_a_method_lifts_is_skipped_and_not_kept(flag, monkeypatch):
    monkeypatch.setattr(contract, "COMPILED_CHECKS", ())
    report = check_method(broken(**{flag: True}))
    found = {check: why for check, outcome, why in report if outcome == "skipped"}
    assert found == dict.fromkeys(map(first_line, LIFTED[flag]), f"{flag}=True")


def test_without_a_compiler_the_compiled_loss_is_skipped(monkeypatch):
    def missing(function):
        raise RuntimeError("no working compiler")

    monkeypatch.setattr("verl_clipx.losses.applying.compiled.compile_copy", missing)
    token_functions.cache_clear()
    *kept, last = check_method(find_method(example_losses.soft)())
    assert {found.outcome for found in kept} == {"kept"} and len(kept) == len(CHECKS)
    assert last.outcome == "skipped" and "the compiler is missing or failed" in last.why


def test_every_check_is_tried():
    assert {*BROKEN, *KEPT_BY_THE_PLUGIN} == {*CHECKS, *COMPILED_CHECKS}


def test_a_report_says_what_was_checked_and_what_failed():
    report = list(check_method(statistics(lambda t, sums: sums + torch.ones_like(sums) * t.ratio.shape[1])))
    # The compiled loss waits for a method that keeps the rest.
    assert len(report) == len(CHECKS)
    assert sorted(found.why for found in report if found.outcome == "failed") == [
        *("the statistics count padding", "the statistics do not add up over a split"),
    ]
    with pytest.raises(
        AssertionError, match=r"finite losses and gradients, in .* .*example_losses\.py:\d+: F is nan for"
    ):
        check_loss(example_losses.nan)


def test_what_is_made_on_an_accelerator_there_is_no_read_of_it():
    def on_its_device(t, _):
        factor = torch.full((), 0.5, device=t.ratio.device)
        return t.ratio * (factor.to("cuda") if t.ratio.is_cuda else factor)

    contract.no_value_is_read_on_the_host(weight(on_its_device))


@pytest.mark.parametrize(
    "factor",
    [
        # It stays on the host, as a number that goes with the call.
        lambda ratio: torch.tensor(0.5),
        lambda ratio: ratio.new_full((), 0.5),
        lambda ratio: ratio.to(torch.float64).to(ratio.dtype),
        lambda ratio: torch.as_tensor(ratio, device=ratio.device),
        # Nothing waits for it.
        lambda ratio: torch.ones(1).to(ratio.device, non_blocking=True),
    ],
)
def test_what_copies_nothing_from_the_host_is_no_wait(factor):
    contract.no_value_is_read_on_the_host(weight(lambda t, _: t.ratio * factor(t.ratio)))


def test_what_only_an_accelerator_can_run_is_skipped_and_not_kept():
    method = weight(lambda t, _: failing("no driver found") if t.ratio.is_cuda else t.ratio)
    with pytest.raises(contract.NotChecked, match="on an accelerator could not be run without one: no driver found"):
        contract.no_value_is_read_on_the_host(method)


def ends_the_process(*_):
    raise SystemExit(0)


@pytest.mark.parametrize("method", [weight(ends_the_process), broken(decide=ends_the_process)])
def test_a_loss_that_ends_the_process_fails(method):
    report = list(check_method(method))
    assert report[-1].outcome == "failed" and "SystemExit: 0" in report[-1].why


def test_an_error_in_the_copy_of_the_process_is_named():
    original = os.getpid()

    def fails_in_the_copy(t, _):
        if os.getpid() != original:
            raise OSError("no device here")
        return t.ratio

    with pytest.raises(contract.NotChecked, match=r"in a copy of the process: OSError: no device here"):
        contract.earlier_batches_do_not_matter(weight(fails_in_the_copy))


def test_the_line_of_a_loss_that_is_defined_in_a_function_is_named():
    @register_loss("tests_defined_in_a_function")
    def fails(ratio):
        raise ArithmeticError("no weight")

    line = fails.__code__.co_firstlineno + 2
    try:
        report = list(check_method(find_method(fails)()))
    finally:
        METHODS.pop("tests_defined_in_a_function")
    assert report[-1].why.startswith(f"{__file__}:{line}: ArithmeticError: no weight")


def test_where_a_copy_of_the_process_gives_no_answer_the_check_is_skipped(monkeypatch):
    monkeypatch.setattr("verl_clipx.losses.contract.fresh.SECONDS", 0.2)

    def never(t, _):
        time.sleep(5)

    with pytest.raises(contract.NotChecked, match=r"did not answer within 0\.2 seconds"):
        contract.earlier_batches_do_not_matter(weight(never))
