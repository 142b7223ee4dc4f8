"""The verdicts of `clipx gpu-check`'s checks, and what keeps a check from running.

Covers, with a stand-in for the bench that updates: a gradient or loss beyond the tolerance, or one that is not a
number, fails; clipping has to act; reasons of skips by machine; the divergence of a rollout; the expected loss and
gradient by hand; the plan's bytes without process and server; the run with vLLM composes. Not covered: updates
(tests/end_to_end/test_gpu_check.py), and all that needs a GPU: syncs, kernels, memory, flash attention, vLLM.
"""

import dataclasses
import math
import warnings

import pandas
import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from tests.claims.configuration import actor_of, merged
from verl_clipx.gpu_check import checks, memory, rollout
from verl_clipx.gpu_check.engine import Update, composed, loss_call
from verl_clipx.gpu_check.machine import Machine
from verl_clipx.gpu_check.sample import Row, Sample, expected, save_model
from verl_clipx.reproduction.models import shape_of

CPU = Machine("cpu", 2)
GPUS = Machine("cuda", 2, flash_attention=True, vllm=True)

SAMPLE = Sample((), loss=0.5, loss_scale=2.0, gradients={"a": torch.tensor([3.0, 4.0])}, clipped=0.3)


class Bench:
    """Gives updates as they come, whatever is asked for."""

    def __init__(self, *updates, clipped=0.3):
        self.updates, self.clipped = list(updates), clipped

    def sample(self, *, tied=False):
        return dataclasses.replace(SAMPLE, clipped=self.clipped)

    def update(self, *overrides, updates=1, tied=False):
        return self.updates.pop(0)


def updated(*gradient, loss=0.5, state_on=("cpu",), bounds=()):
    change = {"a": torch.tensor(gradient), "not among the expected": torch.ones(2)}
    return Update(loss, change, {"update_1": torch.tensor(bounds)}, 1e-7, None, frozenset(state_on), 0)


RIGHT = updated(3.0, 4.0)


@pytest.mark.parametrize(
    ("found", "passed"),
    [
        (RIGHT, True),
        # Relative differences of 0.9e-4 and 1.1e-4: the norm is 5, the tolerance 1e-4.
        (updated(3.0, 4.00045), True),
        (updated(3.0, 4.00055), False),
        (updated(math.nan, 4.0), False),
        # Relative to the loss's scale of 2.
        (updated(3.0, 4.0, loss=0.50018), True),
        (updated(3.0, 4.0, loss=0.50022), False),
        (updated(3.0, 4.0, loss=math.nan), False),
    ],
)
@pytest.mark.parametrize("check", ["FSDP2", "FSDP1", "packing", "fused kernels"])
def test_an_update_off_the_expected_one_fails(check, found, passed):
    (run,) = (one.run for one in checks.CHECKS if one.name == check)
    assert run(Bench(found)).passed is passed


def test_the_difference_is_the_norms():
    assert checks.relative_difference(updated(3.0, 4.5).change, SAMPLE.gradients) == pytest.approx(0.1)


def test_vanilla_and_grpo_have_to_agree_where_tokens_are_clipped():
    assert checks.vanilla_and_grpo(Bench(RIGHT, RIGHT)).passed
    assert not checks.vanilla_and_grpo(Bench(RIGHT, updated(3.0, 4.001))).passed
    assert not checks.vanilla_and_grpo(Bench(RIGHT, RIGHT, clipped=0.0)).passed


@pytest.mark.parametrize(
    ("found", "passed"),
    [(RIGHT, True), (updated(3.0, 4.001), False), (updated(3.0, 4.0, state_on=("cpu", "cuda")), False)],
)
def test_offloading_changes_nothing_and_leaves_nothing_on_the_device(found, passed):
    assert checks.offload(Bench(RIGHT, found)).passed is passed


@pytest.mark.parametrize(("observed", "passed"), [([0.2, 0.4], True), ([0.2, 0.4039], True), ([0.2, 0.41], False)])
def test_bounds_further_apart_than_training_tolerates_fail(observed, passed):
    both = updated(bounds=observed), updated(bounds=[0.2, 0.4])
    assert checks.bounds_in_bfloat16(Bench(*both)).passed is passed


@pytest.mark.parametrize(
    ("divergences", "passed"),
    [([1e-3, -1e-3, 2e-2], True), ([1e-3, 3e-2, 1e-3], False), ([1e-3, math.nan, 1e-3], False), ([1e-3, 1e-3], False)],
)
def test_a_rollout_that_diverges_or_ends_early_fails(divergences, passed):
    assert rollout.agreement(divergences).passed is passed


def skipped(machine):
    """The reasons, by check."""
    reasons = {check.name: check.why_not(machine) for check in checks.CHECKS}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def test_what_keeps_a_check_from_running():
    assert skipped(GPUS) == {}
    assert set(skipped(CPU)) == {"FSDP1", "flash attention", "Ulysses 2", "syncs and kernels", "memory"}
    assert skipped(dataclasses.replace(GPUS, ranks=1)) == {"Ulysses 2": "it needs two GPUs: --gpus 2"}
    without = skipped(dataclasses.replace(GPUS, flash_attention=False))
    assert without == dict.fromkeys(("flash attention", "Ulysses 2", "memory"), "flash-attn is not installed")
    assert rollout.why_not(GPUS) is None
    assert rollout.why_not(dataclasses.replace(GPUS, vllm=False)) == "vLLM is not installed"
    assert "test_vllm.py" in rollout.why_not(CPU)


def test_the_expected_update_is_ppos_by_hand():
    class Uniform(torch.nn.Module):
        """Two tokens, of which token 0 has logit `bias` and token 1 has 0."""

        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, ids):
            logits = torch.stack([self.bias, self.bias * 0]).expand(*ids.shape, 2)
            return type("Output", (), {"logits": logits})

    # Every token has probability 1/2, d log p(0) / d bias = 1/2 and d log p(1) / d bias = -1/2.
    half = math.log(0.5)

    def row(log_ratios, advantage, mask):
        response = len(log_ratios)
        old = torch.tensor([half - one for one in log_ratios])
        return Row(torch.zeros(1 + response, dtype=torch.int64), 1, old, torch.tensor(mask), advantage)

    two, five = math.log(2), math.log(5)
    # A = 1: ratio 1 keeps its gradient -1/2, ratio 2 is clipped to 1.2, ratio 1/2 has -1/4; the fourth is masked.
    # A = -1: ratio 1 has 1/2, ratio 1/2 is clipped to 0.8, ratio 5 to the dual clip's 3.
    rows = (row([0.0, two, -two, 0.0], 1.0, [1, 1, 1, 0]), row([0.0, -two, five], -1.0, [1, 1, 1]))
    sample = expected(Uniform(), rows)
    assert sample.loss == pytest.approx((-1 - 1.2 - 0.5 + 1 + 0.8 + 3) / 6)
    assert sample.loss_scale == pytest.approx((1 + 1.2 + 0.5 + 1 + 0.8 + 3) / 6)
    assert float(sample.gradients["bias"]) == pytest.approx((-0.5 - 0.25 + 0.5) / 6)
    assert sample.clipped == pytest.approx(3 / 6)


@pytest.mark.slow
def test_the_plans_bytes_are_those_of_the_tensors(tmp_path):
    save_model(tmp_path, tied=False)
    planned = memory.planned_bytes(composed(GPUS, tmp_path, memory.overrides(GPUS)), 80e9)
    parameters = shape_of(str(tmp_path)).parameters
    # AdamW's step: parameters, gradients, two states and one more tensor, float32, over two GPUs.
    assert planned > 5 * 4 * parameters / 2
    # No process or server, which take gigabytes.
    assert planned < 1e9


@pytest.mark.parametrize(
    ("measured", "passed"), [(49, False), (51, True), (109, True), (111, False), (math.nan, False)]
)
def test_a_peak_far_from_the_plan_fails(measured, passed):
    assert memory.verdict(measured, 100).passed is passed


def test_every_sync_of_a_call_is_counted(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def call():
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    assert checks.counted_syncs(call) == 3
    assert modes == ["warn", "default"]


def test_traced_rows_arrive_and_others_would_not_pass():
    tokens, parts = checks.example_tokens("cpu"), []
    checks.traced(loss_call(actor_of(merged(["+clipx=acpo"])), tokens), parts)()
    assert checks.arrived(parts[0], tokens)
    tokens["log_prob"][checks.TRACED[1], 0] += 1
    tokens["response_mask"][checks.TRACED[1], 0] = True
    assert not checks.arrived(parts[0], tokens)


def test_the_run_with_vllm_composes_with_a_reward_that_varies(tmp_path):
    rollout.write_prompts(tmp_path / "prompts.parquet")
    assert len(pandas.read_parquet(tmp_path / "prompts.parquet")) >= rollout.PROMPTS * rollout.STEPS
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", rollout.overrides(GPUS, tmp_path, tmp_path))
    OmegaConf.resolve(config.actor_rollout_ref.rollout)
    assert config.actor_rollout_ref.rollout.name == "vllm"
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "clipx_acpo"
    assert {rollout.length_parity("", text, "") for text in ("a", "ab")} == {0.0, 1.0}
