"""What every method keeps: the contract that users run on a loss of their own, values that are not finite and the
working precision, of every group, of settings that only a method's test has and of methods that hold a target; of each
formula once, through verl's registry. Not covered: the worker's calls (tests/claims/test_groups.py), compiled losses
(tests/loss/test_compiled.py), micro-batches (tests/worker), ranks (tests/end_to_end).
"""

import math

import pytest
import torch
from torch.testing import assert_close

from tests.composition import built_once
from tests.golden.runs import per_token, registered_loss
from verl_clipx.check import contract
from verl_clipx.check.contract import SPOILED, example, gradient, spoiled
from verl_clipx.check.runner import check_method
from verl_clipx.methods import BUILT_IN
from verl_clipx.methods import METHODS as CLASSES
from verl_clipx.modifiers.hold import width_of
from verl_clipx.run.config import Settings, build
from verl_clipx.run.groups import group_names, group_settings

from .against_verl import ragged
from .facts import fact

NODES = {group: build(**node) for group in group_names() if "method" in (node := group_settings(group))}
METHODS = {group: node.method for group, node in NODES.items() if isinstance(node, Settings)}
# Settings that no group has.
VARIANTS = {f"{of}, {how}": CLASSES[of](**how) for of in BUILT_IN for how in fact(of, "VARIANTS", ())}
HOLDING = {
    f"{name} that holds a target": build(name, hold={"value": 0.1}).method
    for name in BUILT_IN
    if width_of(CLASSES[name]()) is not None
}
CONTRACT = METHODS | VARIANTS | HOLDING


def form(method):
    """What makes another formula: words, and what is null. Numbers make the same one with others."""
    return method.name, *(value if isinstance(value, str) else value is None for value in method.parameters.values())


# A group for each formula; verl's signature leaves out what some ask for.
FORMULAS = {form(method): group for group, method in reversed(METHODS.items()) if not method.asks_for}.values()
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")

every_method = pytest.mark.parametrize("method", CONTRACT.values(), ids=CONTRACT)
every_formula = pytest.mark.parametrize("name", FORMULAS)


def test_every_method_is_in_the_table():
    assert {METHODS[name].name for name in FORMULAS} == set(BUILT_IN)


@every_method
def test_the_contract_is_kept(method, monkeypatch):
    monkeypatch.setattr(contract, "COMPILED_CHECKS", ())
    checks = list(check_method(method))
    assert len(checks) == len(contract.CHECKS) and [found for found in checks if found.outcome == "failed"] == []


@every_method
def test_what_is_not_finite_stays_with_its_token_or_what_is_bounded_with_it(method):
    expected, expected_gradient = gradient(method, example())
    # The token, or its sequence where tokens share a ratio, or the ratios before them, or their weights a mean.
    others = torch.ones_like(expected_gradient, dtype=torch.bool)
    others[SPOILED[0], slice(None) if method.by_sequence else SPOILED[1]] = False
    for case, tensors in spoiled(method, torch.float64):
        # The bounds of a mini-batch, so that the others are what they were.
        result, actual = gradient(method, tensors, expected.statistics)
        for found, before in ((result.value, expected.value), (actual, expected_gradient)):
            assert found[SPOILED].isnan(), case
            assert torch.equal(found[others], before[others]), case


def called(name, batch, mode="token-mean"):
    """The loss, its gradient on log_prob, and the metrics of what verl calls in its registry under a group."""
    return registered_loss(built_once((f"+clipx={name}",)), batch, loss_agg_mode=mode)


def assert_finite(loss, gradient, metrics):
    assert loss.isfinite() and gradient.isfinite().all()
    assert not [key for key, value in metrics.items() if not math.isfinite(value)]


@every_formula
def test_nothing_outside_the_mask_is_read(name):
    batch = ragged(0)
    loss, gradient, metrics = called(name, batch)
    outside = ~batch["response_mask"]
    assert outside.any()
    for garbage in (math.nan, math.inf, -math.inf, 1e30):
        spoilt = {key: of if of.dtype == torch.bool else torch.where(outside, garbage, of) for key, of in batch.items()}
        same_loss, same_gradient, same_metrics = called(name, spoilt)
        assert torch.equal(same_loss, loss) and torch.equal(same_gradient, gradient) and same_metrics == metrics
    assert (gradient[outside] == 0).all()


@every_formula
def test_degenerate_batches_are_finite(name):
    one, empty = (ragged(1) for _ in range(2))
    one["response_mask"] = torch.zeros_like(one["response_mask"])
    one["response_mask"][1, 3] = True
    one["log_prob"][1, 3] = one["old_log_prob"][1, 3]
    empty["response_mask"][2] = False
    size = ragged(1)["advantages"].abs()
    signs = [ragged(1) | {"advantages": advantages} for advantages in (-size, size, torch.zeros_like(size))]
    for batch in (one, empty, *signs):
        # Finite zeros everywhere would not do.
        found = per_token(NODES[name], batch)
        signal = (METHODS[name].gradient(found.tokens, found.bounds, found.weight) != 0) & batch["response_mask"]
        assert signal.any() or not batch["advantages"].any()
        for mode in AGGREGATIONS:
            loss, gradient, metrics = called(name, batch, mode)
            assert_finite(loss, gradient, metrics)
            assert torch.equal(gradient != 0, signal)


@every_formula
def test_no_tokens_at_all_give_finite_metrics(name):
    batch = ragged(2)
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    loss, gradient, metrics = called(name, batch, "token-sum")
    assert_finite(loss, gradient, metrics)
    assert loss == 0 and not gradient.any()
    # verl wants the same keys of every micro-batch of every rank.
    assert metrics.keys() == called(name, ragged(2))[2].keys()


@every_formula
def test_float32_agrees_with_float64(name):
    narrow = ragged(4, dtype=torch.float32)
    wide = {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in narrow.items()}
    assert_close(called(name, narrow)[1].double(), called(name, wide)[1], rtol=2e-5, atol=0)


@every_formula
def test_on_policy_the_gradient_is_the_plain_policy_gradient(name):
    batch = ragged(5)
    batch["log_prob"] = batch["old_log_prob"].clone()
    mask = batch["response_mask"]
    expected = torch.where(mask, -batch["advantages"] / mask.sum(), 0.0)
    found = called(name, batch)[1]
    if fact(METHODS[name].name, "DRAWS", False):
        assert (found == 0).sum() == (expected == 0).sum() + 1
        expected = torch.where(found == 0, 0.0, expected)
    assert_close(found, expected, rtol=1e-12, atol=0)


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_is_computed_in_float32(method, dtype):
    result, gradients = gradient(method, example(dtype))
    assert result.value.dtype == result.weight.dtype == torch.float32
    for bound in result.bounds:
        assert torch.as_tensor(bound).broadcast_to(result.value.shape).dtype == torch.float32
    assert gradients.dtype == dtype
