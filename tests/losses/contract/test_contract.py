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


def change_within_spread(**attributes):
    """Return WithinSpread, a sound method, with some attributes replaced."""
    return type("Broken", (WithinSpread,), attributes)()


def change_weight(formula):
    """Return WithinSpread with a weight that is a function of tokens and bounds."""
    return change_within_spread(gradient_weight=lambda self, t, bounds: formula(t, bounds))


def change_statistics(formula):
    """Return WithinSpread with statistics that are a function of tokens and of its own statistics."""
    return change_within_spread(statistics=lambda self, t: formula(t, WithinSpread.statistics(self, t)))


def add_second_statistics(formula):
    """Return WithinSpread with a second stage, which its decision does not read."""
    return change_within_spread(
        second_statistics_size=1,
        second_statistics=lambda self, t, first: formula(t, first),
        decide=lambda self, statistics: WithinSpread.decide(self, statistics[:2]),
    )


def change_metrics(formula):
    """Return WithinSpread with metrics that are a function of statistics and decision."""
    return change_within_spread(metrics=lambda self, statistics, decision: formula(statistics, decision))


def write_before_weight(write):
    """Return WithinSpread with the ratio as its weight, after it wrote to its tokens or bounds."""

    def write_and_return_the_ratio(t, bounds):
        write(t, bounds)
        return t.ratio

    return change_weight(write_and_return_the_ratio)


def fail(message):
    raise RuntimeError(message)


def divide_by_sum_of_ratios(**attributes):
    """Return WithinSpread with a weight divided by the ratios of its micro-batch, and with some attributes replaced."""

    def gradient_weight(self, t, bounds):
        return t.ratio / (1 + torch.where(t.mask, t.ratio, 0.0).sum())

    return change_within_spread(gradient_weight=gradient_weight, **attributes)


def count_prompts(self, t):
    # A prompt whose responses are split over micro-batches counts twice.
    has_same_prompt = t.group[:, None] == t.group
    return torch.stack([t.mask.sum(), (1 / has_same_prompt.sum(0)).sum()]).double()


def read_or_go_on(read):
    """Read a value on the host, and go on without it where that fails, as on tensors without values; return 1."""
    with contextlib.suppress(Exception):
        read()
    return 1.0


CALL_NUMBERS = itertools.count()

KEEPS_EARLIER_BATCHES = "is another one after other mini-batches, so it keeps something of them. Make what it needs"


def use_first_batch(remember, use):
    """Return a method whose weight keeps something of the first mini-batch that it sees, and uses it in all others."""
    memory = []

    def formula(t, _):
        if not memory:
            memory.append(remember(t))
        return use(t, memory[0])

    return change_weight(formula)


def mean_ratio(t):
    return torch.where(t.mask, t.ratio, 0.0).double().sum().item() / max(int(t.mask.sum()), 1)


def divide_by_running_mean():
    """Return a method whose weight is divided by the mean ratio of the mini-batches so far, which forgets slowly."""
    memory = {"mean": 1.0, "last": None}

    def formula(t, _):
        if memory["last"] is None or not torch.equal(t.ratio, memory["last"]):
            memory.update(mean=0.9 * memory["mean"] + 0.1 * mean_ratio(t), last=t.ratio.clone())
        return t.ratio / memory["mean"]

    return change_weight(formula)


METHODS_THAT_BREAK_A_CHECK = {
    contract.earlier_batches_do_not_matter: [
        (use_first_batch(mean_ratio, lambda t, mean: t.ratio / mean), KEEPS_EARLIER_BATCHES),
        (use_first_batch(lambda t: float(t.advantages[0, 0]), lambda t, A: t.ratio * (2 + A)), KEEPS_EARLIER_BATCHES),
        (
            use_first_batch(lambda t: t.ratio.amax().item(), lambda t, high: t.ratio.clamp(max=high)),
            KEEPS_EARLIER_BATCHES,
        ),
        (divide_by_running_mean(), KEEPS_EARLIER_BATCHES),
    ],
    contract.the_loss_can_be_computed: [(change_weight(lambda t, _: t.ratio[:, 1.5]), "only integers")],
    contract.one_weight_per_token: [
        (change_weight(lambda t, _: t.ratio.mean(-1, keepdim=True)), r"has shape \(6, 1\)"),
    ],
    contract.weight_is_positive_at_ratio_1: [
        # PPO's loss in the place of the weight is in tests/losses/applying/test_user_method.py.
        (change_weight(lambda t, _: t.ratio * (t.advantages > 0)), r"F is 0 at ratio 1 for a token with A = -[0-9.]+"),
    ],
    contract.weight_is_nowhere_negative: [
        (
            change_weight(lambda t, _: torch.where((t.ratio - 1).abs() > 0.01, -t.ratio, t.ratio)),
            r"F is -[01]\.\d+ at ratio (1\.01|0\.98)\d* for a token with A = [-+0-9.e]+, below 0\. Return the gradient",
        ),
    ],
    contract.weight_does_not_depend_on_the_size_of_advantages: [
        (
            change_weight(lambda t, _: t.ratio * t.advantages.abs()),
            r"when A is multiplied by 0\.25\. Return the gradient",
        ),
    ],
    contract.weight_is_the_same_at_each_call: [
        (
            change_weight(lambda t, _: t.ratio * (next(CALL_NUMBERS) < 900)),
            r"F goes from [0-9.]+ to 0 at call \d{3}\.",
        ),
    ],
    contract.gradient_is_weight_times_advantage: [
        (change_weight(lambda t, _: torch.rand_like(t.ratio)), "differs from minus what `gradient` returns")
    ],
    contract.finite_for_every_finite_input: [
        (
            change_weight(lambda t, _: torch.where(t.ratio > 10, 0 * t.ratio.exp(), t.ratio)),
            r"F is nan for torch\.float64 inputs where log_prob - old_log_prob is 6\.5\d* \(the ratio is 7[12]\d\) and "
            r"A = [-+0-9.e]+, log_prob = -[0-9.]+\. Clamp what goes into an exponential",
        ),
        (
            change_within_spread(loss_value=lambda self, t, bounds, weight: t.free_ratio**3),
            r"the loss is inf for torch\.float64 inputs where log_prob - old_log_prob is 10000 \(the ratio is 4\.85e\+0"
            r"8\) .* t\.ratio is clamped unless log_ratio_clamp is null",
        ),
        # bfloat16 rounds a log-probability of -10000 to -9984, which no wider dtype does. F is float32 there.
        (
            change_weight(lambda t, _: torch.where(t.log_prob == -9984, torch.inf, t.ratio)),
            r"F is inf for torch\.bfloat16 inputs",
        ),
    ],
    contract.order_of_sequences_does_not_matter: [
        (change_weight(lambda t, _: t.ratio * t.ratio[0, 0]), "order of the seq")
    ],
    contract.padding_does_not_matter: [
        (
            change_statistics(lambda t, sums: sums + torch.tensor([t.ratio.numel(), 0.0]).double()),
            "statistics count padding",
        ),
    ],
    contract.weight_does_not_depend_on_the_micro_batch: [
        (
            change_weight(lambda t, _: t.ratio / t.ratio.mean()),
            r"F of a token goes from .* Use statistics, .* by_batch=T",
        ),
        (divide_by_sum_of_ratios(by_sequence=True), "other sequences of its micro-batch"),
        (
            change_weight(lambda t, _: t.ratio / t.sequence_mean(t.ratio)),
            "other tokens of its sequence .* by_sequence=True",
        ),
    ],
    contract.inputs_stay_unchanged: [
        (write_before_weight(lambda t, _: t.mask.fill_(True)), "mask was written to by gradient_weight"),
        (
            write_before_weight(lambda t, _: t.ratio.clamp_(0.8, 1.2)),
            r"ratio was written to .* Write ratio\.clamp\(…\) instead of",
        ),
        # Too wide to act on any usual ratio, and a write that no version counts.
        (write_before_weight(lambda t, _: t.ratio.clamp_(1e-30, 1e30)), "ratio was written to"),
        (write_before_weight(lambda t, _: t.ratio.data.clamp_(max=1e3)), "ratio was written to"),
        (write_before_weight(lambda t, bounds: bounds.high.fill_(9.0)), "high was written to"),
        (change_statistics(lambda t, sums: (t.log_ratio.abs_(), sums)[1]), "log_ratio was written to by statistics"),
        (
            change_within_spread(decide=lambda self, statistics: statistics.clamp_(min=1)[:1]),
            "statistics was written to by decide",
        ),
        (change_metrics(lambda sums, decision: {"spread": decision.mul_(2)[0]}), "decision was written to by metrics"),
        (add_second_statistics(lambda t, first: first.mul_(2)[:1]), "first was written to by second_statistics"),
    ],
    contract.statistics_are_the_same_each_time: [
        (change_statistics(lambda t, sums: sums + torch.rand(2)), "the statistics of the same tokens differ"),
        (
            add_second_statistics(lambda t, first: first),
            r"the statistics have shape \(4,\), but the class declares \(3,\)",
        ),
    ],
    contract.statistics_add_up_over_any_split: [
        (change_statistics(lambda t, sums: sums / sums[0].clamp(min=1)), "do not add up"),
        (change_within_spread(asks_for=("group",), statistics=count_prompts), "do not add up"),
        (add_second_statistics(lambda t, first: t.mask.sum().double().sqrt()[None]), "do not add up"),
    ],
    contract.tokens_outside_the_statistics_mask_do_not_count: [
        (
            change_statistics(lambda t, sums: torch.stack([sums[0], t.log_ratio.square().sum()])),
            "count tokens outside t.mask",
        ),
    ],
    contract.metrics_keep_their_keys: [
        (
            change_metrics(lambda sums, decision: {"spread": decision[0]} if sums[0] > 0 else {}),
            "the keys depend on the data",
        ),
        (
            change_metrics(lambda sums, decision: {} if sums[0] > 0 and sums[1] == 0 else {"spread": decision[0]}),
            r"the keys depend on the data.*: \[\] if every ratio is 1, \['spread'\] for other ratios, \['spread'\] w",
        ),
        (
            change_metrics(lambda sums, decision: {"width": decision[0]}),
            r"returns 'width', which it does not declare: add",
        ),
        (change_within_spread(logs=(of_decision("ratio_mean", "", ""),)), "'ratio_mean': another metric"),
        (
            change_within_spread(over_updates=lambda self, metrics: {"last": 1.0}),
            "returns 'last', which logs does not",
        ),
    ],
}


@pytest.mark.parametrize(
    ("check", "method", "message"),
    [
        pytest.param(check, *case, id=check.__name__)
        for check, cases in METHODS_THAT_BREAK_A_CHECK.items()
        for case in cases
    ],
)
def test_a_check_finds_a_method_that_breaks_it(check, method, message):
    with pytest.raises(Exception, match=message):
        check(method)


# Methods that read a tensor's value on the host.
HOST_READS = {
    "a condition": change_weight(lambda t, _: t.ratio if t.ratio.sum() > 0 else -t.ratio),
    "a decision's number": change_within_spread(decide=lambda self, sums: torch.tensor([sums[0].item()])),
    "a boolean index": change_statistics(lambda t, sums: torch.stack([sums[0], t.ratio[t.mask].double().sum()])),
    "item": change_weight(lambda t, _: t.ratio * read_or_go_on(lambda: t.ratio.mean().item())),
    "float": change_weight(lambda t, _: t.ratio * read_or_go_on(lambda: float(t.ratio.sum()))),
    "bool": change_weight(lambda t, _: t.ratio * read_or_go_on(lambda: bool((t.ratio > 5).any()))),
    "the length of a selection": change_weight(lambda t, _: t.ratio * read_or_go_on(lambda: len(t.ratio[t.mask]))),
    "tolist in decide": change_within_spread(decide=lambda self, sums: sums * read_or_go_on(sums.tolist)),
    "item in metrics": change_metrics(lambda sums, decision: {"spread": decision[0] * read_or_go_on(decision[0].item)}),
    "on CUDA alone": change_weight(lambda t, _: t.ratio * (t.ratio.mean().item() if t.ratio.is_cuda else 1.0)),
    "not on a CPU": change_weight(
        lambda t, _: t.ratio * (1.0 if t.ratio.is_cpu or t.ratio.is_meta else t.ratio.mean().item())
    ),
    "on a device of type cuda": change_weight(
        lambda t, _: t.ratio * (t.ratio.mean().item() if t.ratio.device.type == "cuda" else 1.0)
    ),
    "a copy to the host and back": change_weight(
        lambda t, _: t.ratio.cpu().to(t.ratio.device) if t.mask.is_cuda else t.ratio
    ),
    "in micro-batches of many tokens": change_weight(
        lambda t, _: t.ratio * (t.ratio.mean().item() if t.ratio.numel() > 4096 else 1.0)
    ),
    "in micro-batches of long sequences": change_weight(
        lambda t, _: t.ratio * (t.ratio.mean().item() if t.ratio.shape[1] > 100_000 else 1.0)
    ),
    "in micro-batches of many sequences": change_weight(
        lambda t, _: t.ratio * (t.ratio.mean().item() if t.ratio.shape[0] > 2_000 else 1.0)
    ),
    "in statistics of many tokens on CUDA": change_statistics(
        lambda t, sums: sums * (sums[0].item() if t.mask.is_cuda and t.mask.numel() > 1e7 else 1)
    ),
}

# Methods that wait for everything on the device.
SYNCHRONIZATIONS = {
    "of CUDA": change_weight(
        lambda t, _: t.ratio * read_or_go_on(torch.cuda.synchronize) if t.ratio.is_cuda else t.ratio
    ),
    "of any accelerator": change_weight(
        lambda t, _: t.ratio * read_or_go_on(torch.accelerator.synchronize) if t.ratio.is_cuda else t.ratio
    ),
}

# Methods that copy a tensor from the host's memory, on an accelerator alone or everywhere.
HOST_COPIES = {
    "a number to cuda": change_weight(
        lambda t, _: t.ratio * (torch.tensor(1.0).to("cuda") if t.ratio.is_cuda else 1.0)
    ),
    "a tensor to the ratio's device": change_weight(
        lambda t, _: t.ratio * (torch.ones(9).to(t.ratio) if t.ratio.is_cuda else 1.0)
    ),
    "cuda()": change_weight(lambda t, _: t.ratio * (torch.ones(1).cuda() if t.ratio.is_cuda else 1.0)),
    "new_tensor": change_weight(lambda t, _: t.ratio * (t.ratio.new_tensor([1.0]) if t.ratio.is_cuda else 1.0)),
    "torch.tensor": change_weight(lambda t, _: t.ratio * torch.tensor([1.0], device=t.ratio.device)),
    "torch.as_tensor": change_weight(lambda t, _: t.ratio * torch.as_tensor([1.0], device=t.ratio.device)),
    "copy_": change_weight(lambda t, _: torch.empty_like(t.ratio).copy_(torch.ones(1)) * t.ratio),
}


@pytest.mark.parametrize("method", HOST_READS.values(), ids=HOST_READS)
def test_a_value_read_on_the_host_is_found_with_the_remedy(method):
    message = (
        r"^a tensor's value is read on the host.* write torch\.where\(condition, a, b\) instead of `if`"
        r".* PyTorch said: "
    )
    with pytest.raises(Exception, match=message):
        contract.no_value_is_read_on_the_host(method)


def test_a_value_read_by_a_message_is_found_with_the_cause():
    method = change_weight(lambda t, _: t.ratio * read_or_go_on(lambda: print(t.ratio)))
    message = r"^a tensor's value is read on the host.* The check saw: a message contains a tensor"
    with pytest.raises(Exception, match=message):
        contract.no_value_is_read_on_the_host(method)


@pytest.mark.parametrize("method", SYNCHRONIZATIONS.values(), ids=SYNCHRONIZATIONS)
def test_a_synchronization_is_found_with_the_remedy_and_the_cause(method):
    message = (
        r"^the loss waits for everything .* Remove the call that waits\. "
        r"The check saw: torch\.cuda\.synchronize"
    )
    with pytest.raises(Exception, match=message):
        contract.no_value_is_read_on_the_host(method)


@pytest.mark.parametrize("method", HOST_COPIES.values(), ids=HOST_COPIES)
def test_a_copy_from_the_host_is_found_with_its_cost(method):
    message = (
        r"^a tensor is made on another device than the ratio's, or copied there\. "
        r".* The check saw: a copy from the host's memory waits"
    )
    with pytest.raises(Exception, match=message):
        contract.no_value_is_read_on_the_host(method)


def test_a_tensor_made_on_the_host_is_found_with_the_remedy():
    method = change_weight(lambda t, _: t.ratio + torch.zeros(9))
    with pytest.raises(Exception, match=r"Make it there, for example with torch\.zeros_like"):
        contract.no_value_is_read_on_the_host(method)


def test_another_mistake_on_an_accelerator_gets_no_advice_about_the_host():
    method = change_weight(lambda t, _: t.ratio if t.ratio.device.type == "cpu" else fail("metadata is missing"))
    with pytest.raises(Exception, match=r"^metadata"):
        contract.no_value_is_read_on_the_host(method)


# From a check that no method can break to a function of the plugin, a faulty one in its place, and what the check says.
FAULTS_OF_THE_PLUGIN = {
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
    [
        pytest.param(check, id=check.__name__, marks=[pytest.mark.slow] if check in COMPILED_CHECKS else [])
        for check in FAULTS_OF_THE_PLUGIN
    ],
)
def test_a_check_finds_a_fault_of_the_plugins_own(check, monkeypatch):
    name, fault, message = FAULTS_OF_THE_PLUGIN[check]
    monkeypatch.setattr(f"verl_clipx.{name}", fault)
    token_functions.cache_clear()
    with pytest.raises(AssertionError, match=message):
        check(find_method(example_losses.soft)())


WEIGHTS_WITHOUT_THE_RATIO = {
    "1": change_weight(lambda t, _: torch.ones_like(t.ratio)),
    "of A": change_weight(lambda t, _: torch.where(t.advantages > 0, 1.0, 0.5).to(t.ratio.dtype)),
    "of the old probability": change_weight(lambda t, _: 1 - t.old_log_prob.exp()),
    "of the current probability": change_weight(lambda t, _: 1 - t.log_prob.exp()),
}
WEIGHTS_WITH_THE_RATIO = {
    "the ratio": change_weight(lambda t, _: t.ratio),
    "a clamped ratio": change_weight(lambda t, _: t.ratio.clamp(0.99, 1.01)),
    "a drop far out": change_weight(lambda t, _: torch.where(t.ratio > 5, 0.5, 1.0).to(t.ratio.dtype)),
    "a sequence's ratio": change_weight(lambda t, _: t.sequence_mean(t.log_ratio).exp().expand_as(t.ratio)),
    "of the probabilities' difference": change_weight(
        lambda t, _: 1 / (1 + (t.probabilities[0] - t.probabilities[1]).abs())
    ),
}


@pytest.mark.parametrize("method", WEIGHTS_WITHOUT_THE_RATIO.values(), ids=WEIGHTS_WITHOUT_THE_RATIO)
def test_a_weight_that_is_the_same_at_every_ratio_ignores_it(method):
    assert contract.ignores_the_ratio(method)


@pytest.mark.parametrize("method", WEIGHTS_WITH_THE_RATIO.values(), ids=WEIGHTS_WITH_THE_RATIO)
def test_a_weight_that_changes_with_the_ratio_does_not_ignore_it(method):
    assert not contract.ignores_the_ratio(method)


@pytest.mark.parametrize("name", BUILT_IN)
def test_no_built_in_method_ignores_the_ratio(name):
    assert not contract.ignores_the_ratio(METHODS[name]())


@pytest.mark.parametrize(
    ("flag", "skipped_checks"),
    [
        (
            "unconstrained_weight",
            [
                contract.weight_is_positive_at_ratio_1,
                contract.weight_is_nowhere_negative,
                contract.weight_does_not_depend_on_the_size_of_advantages,
            ],
        ),
        (
            "by_batch",
            [
                contract.weight_does_not_depend_on_the_size_of_advantages,
                contract.weight_does_not_depend_on_the_micro_batch,
            ],
        ),
    ],
)
def test_a_rule_that_a_method_lifts_is_skipped_and_not_kept(flag, skipped_checks, monkeypatch):
    monkeypatch.setattr(contract, "COMPILED_CHECKS", ())
    report = check_method(change_within_spread(**{flag: True}))
    reasons = {check: reason for check, outcome, reason in report if outcome == "skipped"}
    assert reasons == {first_line(check): f"{flag}=True" for check in skipped_checks}


def test_without_a_compiler_the_compiled_loss_is_skipped(monkeypatch):
    def fail_to_compile(function):
        raise RuntimeError("no working compiler")

    monkeypatch.setattr("verl_clipx.losses.applying.compiled.compile_copy", fail_to_compile)
    token_functions.cache_clear()
    *eager_verdicts, compiled_verdict = check_method(find_method(example_losses.soft)())
    assert [verdict.outcome for verdict in eager_verdicts] == ["kept"] * len(CHECKS)
    assert compiled_verdict.outcome == "skipped"
    assert "the compiler is missing or failed" in compiled_verdict.why


def test_every_check_is_tried():
    host_check = contract.no_value_is_read_on_the_host
    assert {*METHODS_THAT_BREAK_A_CHECK, host_check, *FAULTS_OF_THE_PLUGIN} == {*CHECKS, *COMPILED_CHECKS}


def test_a_report_says_what_was_checked_and_what_failed():
    report = list(check_method(change_statistics(lambda t, sums: sums + torch.ones_like(sums) * t.ratio.shape[1])))
    # The compiled loss waits for a method that keeps the rest.
    assert len(report) == len(CHECKS)
    reasons = [verdict.why for verdict in report if verdict.outcome == "failed"]
    assert sorted(reasons) == ["the statistics count padding", "the statistics do not add up over a split"]


def test_check_loss_raises_the_reason_with_the_place_of_the_loss():
    with pytest.raises(
        AssertionError, match=r"finite losses and gradients, in .* .*example_losses\.py:\d+: F is nan for"
    ):
        check_loss(example_losses.nan)


def test_a_tensor_that_is_made_on_the_accelerator_is_no_read_or_copy():
    def halve_on_its_device(t, _):
        half = torch.full((), 0.5, device=t.ratio.device)
        return t.ratio * (half.to("cuda") if t.ratio.is_cuda else half)

    contract.no_value_is_read_on_the_host(change_weight(halve_on_its_device))


@pytest.mark.parametrize(
    "factor",
    [
        # It stays on the host, as a number that goes with the call.
        pytest.param(lambda ratio: torch.tensor(0.5), id="a number"),
        pytest.param(lambda ratio: ratio.new_full((), 0.5), id="new_full"),
        pytest.param(lambda ratio: ratio.to(torch.float64).to(ratio.dtype), id="another dtype"),
        pytest.param(lambda ratio: torch.as_tensor(ratio, device=ratio.device), id="the ratio itself"),
        # Nothing waits for it.
        pytest.param(lambda ratio: torch.ones(1).to(ratio.device, non_blocking=True), id="a copy without a wait"),
    ],
)
def test_what_copies_nothing_from_the_host_is_no_wait(factor):
    contract.no_value_is_read_on_the_host(change_weight(lambda t, _: t.ratio * factor(t.ratio)))


def test_what_only_an_accelerator_can_run_is_skipped_and_not_kept():
    method = change_weight(lambda t, _: fail("no driver found") if t.ratio.is_cuda else t.ratio)
    with pytest.raises(contract.NotChecked, match="on an accelerator could not be run without one: no driver found"):
        contract.no_value_is_read_on_the_host(method)


def end_the_process(*_):
    raise SystemExit(0)


@pytest.mark.parametrize("method", [change_weight(end_the_process), change_within_spread(decide=end_the_process)])
def test_a_loss_that_ends_the_process_fails(method):
    *_, last_verdict = check_method(method)
    assert last_verdict.outcome == "failed"
    assert "SystemExit: 0" in last_verdict.why


def test_an_error_in_the_copy_of_the_process_is_named():
    original = os.getpid()

    def fail_in_the_copy(t, _):
        if os.getpid() != original:
            raise OSError("no device here")
        return t.ratio

    with pytest.raises(contract.NotChecked, match=r"in a copy of the process: OSError: no device here"):
        contract.earlier_batches_do_not_matter(change_weight(fail_in_the_copy))


def test_the_line_of_a_loss_that_is_defined_in_a_function_is_named():
    @register_loss("tests_defined_in_a_function")
    def fails(ratio):
        raise ArithmeticError("no weight")

    line = fails.__code__.co_firstlineno + 2
    try:
        *_, last_verdict = check_method(find_method(fails)())
    finally:
        METHODS.pop("tests_defined_in_a_function")
    assert last_verdict.why.startswith(f"{__file__}:{line}: ArithmeticError: no weight")


def test_where_a_copy_of_the_process_gives_no_answer_the_check_is_skipped(monkeypatch):
    monkeypatch.setattr("verl_clipx.losses.contract.fresh.SECONDS", 0.2)

    def answer_too_late(t, _):
        time.sleep(5)

    with pytest.raises(contract.NotChecked, match=r"did not answer within 0\.2 seconds"):
        contract.earlier_batches_do_not_matter(change_weight(answer_too_late))
