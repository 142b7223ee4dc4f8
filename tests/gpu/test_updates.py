"""An update by verl's worker under the options that runs on GPUs use, against PPO's formula in float64. Covers: verl's
vanilla and GRPO; FSDP2, FSDP1, packing, bfloat16, flash attention, two ranks that share sequences, offloading, fused
kernels; ACPO's bounds in bfloat16. Two ranks that make the same mistake fail too. Not covered: other models, more than
one node, Megatron.
"""

import math

import pytest
import torch

from tests.gpu.conftest import ACTOR, ENGINE, MODEL, attention, needs_flash_attention, needs_two, precision

GRPO = "+clipx=grpo"
PACKING = f"{MODEL}.use_remove_padding=True"
BFLOAT16 = precision("bf16")
FLASH_ATTENTION = (PACKING, attention("flash_attention_2"), *BFLOAT16)
# With one sequence at a time, each rank holds half of its tokens; in a packed micro-batch few sequences would be split.
ULYSSES = (f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1")
FUSED_KERNELS = (f"{MODEL}.use_fused_kernels=True", f"{MODEL}.fused_kernel_options.impl_backend=torch")

# Tolerance for the same arithmetic in another order.
SAME = 1e-5
# For float32 against float64.
ROUNDING = 1e-4
# For bfloat16, which has 8 significant bits, against float64. A CPU differs by 0.02; torch's attention where two ranks
# share sequences, by 0.9.
ROUNDING_BFLOAT16 = 0.1


def relative_difference(change, expected):
    """Return the norm of two gradients' difference, relative to that of the expected one; its weights alone count."""
    difference = torch.cat([(change[name].double() - value.double()).flatten() for name, value in expected.items()])
    return float(difference.norm() / torch.cat([value.double().flatten() for value in expected.values()]).norm())


def assert_is_expected(bench, update, tolerance, *, tied=False):
    """Assert that an update is the sample's; a NaN fails too. Under Ulysses some ranks get no loss."""
    sample = bench.samples[tied]
    assert relative_difference(update.change, sample.gradients) <= tolerance
    if not math.isnan(update.loss) or bench.rank == 0:
        assert abs(update.loss - sample.loss) / sample.loss_scale <= tolerance
        assert update.receipt <= tolerance


def test_grpo_is_verls_vanilla_where_tokens_are_clipped(bench):
    vanilla = bench.update()
    grpo = bench.update(GRPO)
    assert bench.samples[False].clipped > 0.1
    assert relative_difference(grpo.change, vanilla.change) <= SAME
    assert abs(grpo.loss - vanilla.loss) <= SAME


def make_case(overrides, tolerance, *, id, marks=()):
    """Return a case that runs the option of its name."""
    return pytest.param(overrides, tolerance, id=id, marks=[*marks, pytest.mark.runs(id)])


@pytest.mark.parametrize(
    ("overrides", "tolerance"),
    [
        make_case((), ROUNDING, id="FSDP2"),
        make_case((f"{ACTOR}.strategy=fsdp",), ROUNDING, id="FSDP1"),
        make_case((PACKING,), ROUNDING, id="packing"),
        make_case(BFLOAT16, ROUNDING_BFLOAT16, id="bfloat16"),
        make_case(FLASH_ATTENTION, ROUNDING_BFLOAT16, id="flash attention", marks=[needs_flash_attention]),
        make_case(
            (*FLASH_ATTENTION, *ULYSSES),
            ROUNDING_BFLOAT16,
            id="Ulysses with flash attention",
            marks=[needs_flash_attention, needs_two],
        ),
    ],
)
def test_an_update_is_that_of_float64(bench, overrides, tolerance):
    assert_is_expected(bench, bench.update(GRPO, *overrides), tolerance)


@pytest.mark.runs("fused kernels")
def test_fused_kernels(bench):
    # FSDP2 shards an untied output embedding, which verl 0.9.1's fused forward pass cannot use.
    assert_is_expected(bench, bench.update(GRPO, *FUSED_KERNELS, tied=True), ROUNDING, tied=True)


def test_another_bound_would_be_seen(bench):
    other = bench.update(GRPO, "clipx.clip_high=2")
    assert relative_difference(other.change, bench.samples[False].gradients) > ROUNDING_BFLOAT16


@pytest.mark.runs("offload")
def test_offloading_changes_nothing_and_leaves_nothing_on_the_device(bench):
    offloading = (f"{ENGINE}.param_offload=True", f"{ENGINE}.optimizer_offload=True")
    resident = bench.update(GRPO, updates=2)
    offloaded = bench.update(GRPO, *offloading, updates=2)
    assert relative_difference(offloaded.change, resident.change) <= SAME
    assert offloaded.state_on == {"cpu"}


def test_acpos_bounds_in_bfloat16_are_those_of_the_training_pass(bench):
    # The weights do not move, so the extra pass and the training pass see the same ones.
    overrides = ("+clipx=acpo", f"{ACTOR}.optim.lr=0", *BFLOAT16)
    from_extra_pass = bench.update(*overrides, "clipx.scope=mini_batch", updates=2).bounds["update_1"]
    from_training_pass = bench.update(*overrides, "clipx.scope=lagged", updates=2).bounds["update_1"]
    largest = from_training_pass.abs().max()
    # Above epsilon_base, which every bin has whose ratio does not vary.
    assert largest > 0.3
    assert (from_extra_pass - from_training_pass).abs().max() <= 0.01 * largest
