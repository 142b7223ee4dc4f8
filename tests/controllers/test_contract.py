"""What every controller promises: additive statistics, no host sync, a fixed metric key set.

Covers random splits into micro-batches by rows, and by single tokens. Runs the methods on the meta device, where
reading any value raises, as it would stall an accelerator. Does not cover collectives or the worker that adds the
vectors.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from verl_clipx.controllers.acpo import AcpoController
from verl_clipx.controllers.bapo import BapoController
from verl_clipx.controllers.fixed import FixedBounds

CONTROLLERS = {
    "fixed": FixedBounds(0.8, 1.28),
    "acpo": AcpoController(),
    "acpo_reference": AcpoController(epsilon_min=0.0, epsilon_max=3.0, bin_on="current", variance_epsilon=1e-8),
    "bapo": BapoController(),
    "bapo_rollout": BapoController(weight="rollout", counted="gradient", contribution="net"),
    "bapo_reference": BapoController(
        contribution="ratio", target=0.5, weight="none", first="lower", last_step="clipped"
    ),
}
every_controller = pytest.mark.parametrize("controller", CONTROLLERS.values(), ids=CONTROLLERS)


def _tokens(seed, sequences=6, length=10, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    normal = lambda: torch.randn(sequences, length, dtype=torch.float64, generator=generator)  # noqa: E731
    old_log_prob = -normal().abs()
    log_prob = old_log_prob + 0.7 * normal()
    return {
        "ratio": (log_prob - old_log_prob).exp().to(dtype),
        "advantages": normal().to(dtype),
        "mask": normal() > -0.5,
        "log_prob": log_prob.to(dtype),
        "old_log_prob": old_log_prob.to(dtype),
        "rollout_log_prob": (old_log_prob + 0.01 * normal()).to(dtype),
    }


@every_controller
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(seed=st.integers(0, 10_000), parts=st.integers(2, 6))
@settings(max_examples=25, deadline=None)
def test_statistics_add_up_over_any_split(controller, dtype, seed, parts):
    tokens = _tokens(seed, dtype=dtype)
    whole = controller.statistics(**tokens)
    part_of = torch.randint(0, parts, tokens["mask"].shape, generator=torch.Generator().manual_seed(seed))
    by_token = sum(
        controller.statistics(**{**tokens, "mask": tokens["mask"] & (part_of == part)}) for part in range(parts)
    )
    rows = part_of[:, 0]
    by_row = sum(
        controller.statistics(**{key: tensor[rows == part] for key, tensor in tokens.items()}) for part in range(parts)
    )
    # Sums of deviations have both signs, so their rounding is relative to the size of their terms: of order 1.
    for split in (by_token, by_row):
        assert_close(split, whole, rtol=1e-12, atol=1e-12)
        assert_close(controller.decide(split), controller.decide(whole), rtol=1e-10, atol=1e-12)


@every_controller
def test_values_outside_the_mask_do_not_count(controller):
    tokens = _tokens(0)
    expected = controller.statistics(**tokens)
    outside = ~tokens["mask"]
    junk = {"ratio": 1e18, "advantages": -1e3, "log_prob": 1e4, "old_log_prob": 1e4, "rollout_log_prob": 1e4}
    filled = {key: torch.where(outside, junk[key], tokens[key]) for key in junk}
    assert torch.equal(controller.statistics(**filled, mask=tokens["mask"]), expected)


@every_controller
def test_vectors_have_the_promised_shape_and_dtype(controller):
    tokens = _tokens(0, dtype=torch.float32)
    statistics = controller.statistics(**tokens)
    decision = controller.decide(statistics)
    assert statistics.shape == (controller.statistics_size,)
    assert statistics.dtype == decision.dtype == torch.float64
    log_probs = {key: tokens[key] for key in ("log_prob", "old_log_prob")}
    for bound in controller.token_bounds(decision, dtype=torch.float32, **log_probs):
        assert torch.as_tensor(bound).broadcast_to(6, 10).dtype == torch.float32


@every_controller
def test_metrics_have_fixed_keys_without_letters_that_verl_reduces_by(controller):
    keys = []
    for mask in (_tokens(0)["mask"], torch.zeros(6, 10, dtype=torch.bool)):
        statistics = controller.statistics(**{**_tokens(0), "mask": mask})
        metrics = controller.metrics(statistics, controller.decide(statistics))
        keys.append(list(metrics))
        for value in metrics.values():
            assert (value.shape, value.dtype) == ((), torch.float64)
            assert value.isfinite()
    assert keys[0] == keys[1]
    assert not [key for key in keys[0] if "max" in key or "min" in key]


@every_controller
def test_no_method_reads_a_value_on_the_host(controller):
    tokens = {key: tensor.to("meta") for key, tensor in _tokens(0).items()}
    with pytest.raises(RuntimeError):
        bool(tokens["ratio"].sum() > 0)
    statistics = controller.statistics(**tokens)
    decision = controller.decide(statistics)
    controller.token_bounds(
        decision, log_prob=tokens["log_prob"], old_log_prob=tokens["old_log_prob"], dtype=torch.float64
    )
    metrics = controller.metrics(statistics, decision)
    assert {value.device.type for value in (statistics, decision, *metrics.values())} == {"meta"}


def test_nothing_of_size_tokens_times_candidates_is_allocated():
    sizes = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            sizes.extend(
                output.numel() for output in torch.utils._pytree.tree_leaves(result) if torch.is_tensor(output)
            )
            return result

    tokens = _tokens(0, sequences=4, length=500)
    with Recorder():
        BapoController().decide(BapoController().statistics(**tokens))
    assert max(sizes) == 4 * 500
