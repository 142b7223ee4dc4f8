"""What every method promises, with the settings of every group.

Covers the contract that users run on a loss of their own, uncompiled, and beyond it: the sign of what reweighted
advantages are multiplied by; random splits by rows and by tokens, the
working precision, a batch without tokens, the size of what is allocated, and that the meta device, where reading a
value raises, is never left. Does not cover the compiled losses (tests/loss/test_compiled.py), the contract's own power
(tests/check/test_contract.py), nor the worker that adds the statistics of ranks.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl_clipx.base.tokens import Inputs
from verl_clipx.check.contract import CHECKS, evaluate, example, gradient, inputs_of
from verl_clipx.common.configs_folder import configs_folder
from verl_clipx.loss.loss import token_loss, token_statistics
from verl_clipx.methods.bapo import Bapo
from verl_clipx.modifiers import AdvantageReweighting
from verl_clipx.run.config import Settings, build
from verl_clipx.run.groups import group_settings

GROUPS = {path.stem: group_settings(path.stem) for path in sorted((configs_folder() / "clipx").glob("*.yaml"))}
NODES = {group: build(**node) for group, node in GROUPS.items() if "method" in node}
METHODS = {group: node.method for group, node in NODES.items() if isinstance(node, Settings)}
METHODS["bapo_rollout"] = Bapo(weight="rollout", counted="gradient", contribution="net")
SHAPED_BY = ("old", "current")
ADAPTIVE = {name: method for name, method in METHODS.items() if method.statistics_size}

every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
every_adaptive_method = pytest.mark.parametrize("method", ADAPTIVE.values(), ids=ADAPTIVE)


@pytest.mark.slow
@every_method
def test_the_contract_passes(method):
    for check in CHECKS:
        check(method)


@every_method
def test_the_weight_of_reweighted_advantages_is_positive_at_ratio_1_too(method):
    # DRO's F depends on the size of A, and is 1 at ratio 1 all the same.
    assert not method.unconstrained_weight or method.name == "dro"
    tensors = example()
    tensors["log_prob"] = tensors["rollout_log_prob"] = tensors["old_log_prob"]
    for shaping in (AdvantageReweighting(alpha=alpha, probability=of) for alpha in (0.3, 1.0) for of in SHAPED_BY):
        result = evaluate(method, shaping=shaping, **inputs_of(method, tensors))
        # F times the reweighted advantage has the sign of the advantage itself.
        signs = (result.weight * result.tokens.advantages).sign()
        assert torch.equal(signs, torch.where(tensors["mask"], tensors["advantages"].sign(), 0))


@pytest.mark.slow
@every_adaptive_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(seed=st.integers(0, 10_000), parts=st.integers(2, 6))
@settings(max_examples=25, deadline=None)
def test_statistics_add_up_over_any_split(method, dtype, seed, parts):
    tensors = inputs_of(method, example(dtype, seed))
    part_of = torch.randint(0, parts, tensors["mask"].shape, generator=torch.Generator().manual_seed(seed))
    whole, by_token, by_row = token_statistics(method, None, Inputs(**tensors)), 0, 0
    for part in range(parts):
        by_token = by_token + token_statistics(method, None, Inputs(**tensors, counted=part_of == part))
        rows = {name: tensor[part_of[:, 0] == part] for name, tensor in tensors.items()}
        by_row = by_row + token_statistics(method, None, Inputs(**rows))
    # BAPO adds whole numbers of a unit that differs between the parts, every other method floating-point numbers.
    # Both are relative to the size of the terms, which is of order 1, and sums of both signs can be smaller.
    tolerance = 1e-8 if isinstance(method, Bapo) else 1e-12
    for split in (by_token, by_row):
        assert_close(split, whole, rtol=tolerance, atol=tolerance)
        assert_close(method.decide(split), method.decide(whole), rtol=100 * tolerance, atol=tolerance)


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_is_computed_in_float32(method, dtype):
    result, gradients = gradient(method, example(dtype))
    assert result.loss.dtype == result.weight.dtype == torch.float32
    for bound in result.bounds:
        assert torch.as_tensor(bound).broadcast_to(result.loss.shape).dtype == torch.float32
    assert gradients.dtype == dtype


@every_method
def test_without_tokens_the_metrics_are_numbers(method):
    tensors = inputs_of(method, example())
    statistics = token_statistics(method, None, Inputs(**{**tensors, "mask": tensors["mask"] & False}))
    for value in method.metrics(statistics, method.decide(statistics)).values():
        assert value.dtype == torch.float64
        assert value.isfinite().all()


@every_method
def test_everything_stays_on_the_device(method):
    inputs = Inputs(**{name: tensor.to("meta") for name, tensor in inputs_of(method, example()).items()})
    statistics = token_statistics(method, None, inputs)
    decision = method.decide(statistics)
    found = (statistics, decision, *method.metrics(statistics, decision).values())
    found += token_loss(method, None, inputs, decision)
    assert {value.device.type for value in found} == {"meta"}


class Recorder(TorchDispatchMode):
    """Notes the size of every tensor that is made."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.sizes.extend(output.numel() for output in tree_leaves(result) if isinstance(output, torch.Tensor))
        return result


@every_method
def test_nothing_of_size_tokens_times_candidates_is_allocated(method):
    tensors = inputs_of(method, example())
    tensors = {name: tensor.repeat(20, *(10,) * (tensor.ndim - 1)) for name, tensor in tensors.items()}
    with Recorder() as recorder:
        inputs = Inputs(**tensors)
        token_loss(method, None, inputs, method.decide(token_statistics(method, None, inputs)))
    # Two numbers a token at most: BAPO's weights and values are counted at once.
    assert tensors["mask"].numel() <= max(recorder.sizes) <= 2 * tensors["mask"].numel()
