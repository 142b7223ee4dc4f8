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
from verl_clipx.losses.methods import BUILT_IN, METHODS
from verl_clipx.losses.modifiers.hold import width_of
from verl_clipx.run.config import Settings, build

from .against_verl import ragged
from .facts import fact


def build_groups():
    """Return the method of each group that chooses one, by the group's name."""
    methods = {}
    for group in group_names():
        values = group_settings(group)
        if "method" not in values:
            continue
        settings = build(**values)
        if isinstance(settings, Settings):
            methods[group] = settings.method
    return methods


METHODS_OF_GROUPS = build_groups()


def list_every_method():
    """Return the methods of all groups, of settings that only a method's test has, and those that hold a target."""
    parameters = [pytest.param(method, id=group) for group, method in METHODS_OF_GROUPS.items()]
    for name in BUILT_IN:
        for variant in fact(name, "VARIANTS", ()):
            parameters.append(pytest.param(METHODS[name](**variant), id=f"{name}, {variant}"))
    for name in BUILT_IN:
        if width_of(METHODS[name]()) is None:
            continue
        # What solves for the width is one piece of code: a bound on the ratio, one on a sequence's and one on a
        # probability stand for all.
        marks = [] if name in ("grpo", "gspo", "dppo") else [pytest.mark.matrix]
        method = build(name, hold={"value": 0.1}).method
        parameters.append(pytest.param(method, id=f"{name} that holds a target", marks=marks))
    return parameters


every_method = pytest.mark.parametrize("method", list_every_method())


def find_formula(method):
    """Return what makes a formula: the method, words, and what is null. With other numbers it stays the same."""
    values = method.parameters.values()
    return method.name, *(value if isinstance(value, str) else value is None for value in values)


def list_groups_by_formula():
    """Return a group for each formula, without those that ask for what verl's signature leaves out."""
    groups = {}
    for group, method in METHODS_OF_GROUPS.items():
        if not method.asks_for:
            groups.setdefault(find_formula(method), group)
    return [*groups.values()]


GROUPS_BY_FORMULA = list_groups_by_formula()


def test_every_method_has_a_group_for_its_formula():
    assert {METHODS_OF_GROUPS[group].name for group in GROUPS_BY_FORMULA} == set(BUILT_IN)


@every_method
def test_the_contract_is_kept(method, monkeypatch):
    monkeypatch.setattr(contract, "COMPILED_CHECKS", ())
    verdicts = list(check_method(method))
    assert len(verdicts) == len(contract.CHECKS)
    assert [verdict for verdict in verdicts if verdict.outcome == "failed"] == []


@every_method
def test_what_is_not_finite_stays_with_its_token_or_what_is_bounded_with_it(method):
    expected, expected_gradient = apply_and_differentiate(method, example())
    sequence, token = SPOILED
    # The token, or its sequence where tokens share a ratio, or the ratios before them, or their weights a mean.
    is_other = torch.ones_like(expected_gradient, dtype=torch.bool)
    if method.by_sequence:
        is_other[sequence] = False
    else:
        is_other[sequence, token] = False
    for case, tensors in spoiled(method, torch.float64):
        # The bounds of a mini-batch, so that the others are what they were.
        result, gradient = apply_and_differentiate(method, tensors, expected.statistics)
        assert result.value[SPOILED].isnan(), case
        assert gradient[SPOILED].isnan(), case
        assert torch.equal(result.value[is_other], expected.value[is_other]), case
        assert torch.equal(gradient[is_other], expected_gradient[is_other]), case


@pytest.mark.parametrize("group", GROUPS_BY_FORMULA)
def test_on_policy_the_gradient_is_the_plain_policy_gradient(group):
    batch = ragged(5)
    batch["log_prob"] = batch["old_log_prob"].clone()
    mask = batch["response_mask"]
    expected = torch.where(mask, -batch["advantages"] / mask.sum(), 0.0)
    _, gradient, _ = registered_loss(built_once((f"+clipx={group}",)), batch)
    if fact(METHODS_OF_GROUPS[group].name, "DRAWS_TOKENS", False):
        # The one token that it draws has none.
        assert (gradient == 0).sum() == (expected == 0).sum() + 1
        expected = torch.where(gradient == 0, 0.0, expected)
    assert_close(gradient, expected, rtol=1e-12, atol=0)
