"""What every method keeps: the contract that users run on a loss of their own, and that what is not finite stays with
its token, of every group, of settings that only a method's test has and of methods that hold a target; of each formula,
that its gradient at ratio 1 is the plain one, through verl's registry. Not covered: the worker's calls
(tests/claims/test_groups.py), compiled losses (tests/losses/applying/test_compiled.py), micro-batches
(tests/training/worker), ranks (tests/end_to_end).
"""

import pytest
import torch
from torch.testing import assert_close

from tests.composition import built_once
from tests.golden.runs import registered_loss
from verl_clipx.losses.contract import contract
from verl_clipx.losses.contract.contract import SPOILED, apply_and_differentiate, example, spoiled
from verl_clipx.losses.contract.runner import check_method
from verl_clipx.losses.groups import group_names, group_settings
from verl_clipx.losses.methods import BUILT_IN
from verl_clipx.losses.methods import METHODS as CLASSES
from verl_clipx.losses.modifiers.hold import width_of
from verl_clipx.run.config import Settings, build

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

# What solves for the width is one piece of code; a bound on the ratio, a sequence's and a probability's stand for all.
HELD_BY_DEFAULT = {f"{name} that holds a target" for name in ("grpo", "gspo", "dppo")}
every_method = pytest.mark.parametrize(
    "method",
    [
        pytest.param(
            method, id=name, marks=() if name in HELD_BY_DEFAULT or name not in HOLDING else pytest.mark.matrix
        )
        for name, method in CONTRACT.items()
    ],
)


def test_every_method_is_in_the_table():
    assert {METHODS[name].name for name in FORMULAS} == set(BUILT_IN)


@every_method
def test_the_contract_is_kept(method, monkeypatch):
    monkeypatch.setattr(contract, "COMPILED_CHECKS", ())
    checks = list(check_method(method))
    assert len(checks) == len(contract.CHECKS) and [found for found in checks if found.outcome == "failed"] == []


@every_method
def test_what_is_not_finite_stays_with_its_token_or_what_is_bounded_with_it(method):
    expected, expected_gradient = apply_and_differentiate(method, example())
    # The token, or its sequence where tokens share a ratio, or the ratios before them, or their weights a mean.
    others = torch.ones_like(expected_gradient, dtype=torch.bool)
    others[SPOILED[0], slice(None) if method.by_sequence else SPOILED[1]] = False
    for case, tensors in spoiled(method, torch.float64):
        # The bounds of a mini-batch, so that the others are what they were.
        result, actual = apply_and_differentiate(method, tensors, expected.statistics)
        for found, before in ((result.value, expected.value), (actual, expected_gradient)):
            assert found[SPOILED].isnan(), case
            assert torch.equal(found[others], before[others]), case


@pytest.mark.parametrize("name", FORMULAS)
def test_on_policy_the_gradient_is_the_plain_policy_gradient(name):
    batch = ragged(5)
    batch["log_prob"] = batch["old_log_prob"].clone()
    mask = batch["response_mask"]
    expected = torch.where(mask, -batch["advantages"] / mask.sum(), 0.0)
    found = registered_loss(built_once((f"+clipx={name}",)), batch)[1]
    if fact(METHODS[name].name, "DRAWS_TOKENS", False):
        assert (found == 0).sum() == (expected == 0).sum() + 1
        expected = torch.where(found == 0, 0.0, expected)
    assert_close(found, expected, rtol=1e-12, atol=0)
