"""A user's own loss: decorator, configuration, contract, command line.

Covers: the way from a module that no entry point knows to verl's registry and config; parameters; bounds of other
methods; the contract catching broken losses. Not covered: a training run with one (tests/end_to_end).
"""

import subprocess
import sys

import pytest
import torch

from verl_clipx import METHODS, check_loss, register_loss
from verl_clipx.training.contract import check_method

from . import example_losses
from .conftest import BUILT_IN
from .test_policy_loss import call

MODULE = example_losses.__name__


def test_a_function_becomes_a_loss_with_its_own_parameters(actor, tensors):
    config = actor("+clipx=custom", f"clipx.function={MODULE}:soft", "+clipx.temperature=3", "+clipx.clip_high=1.4")
    assert config.policy_loss.clipx.temperature == 3.0
    assert config.policy_loss.clipx.clip_high == 1.4
    _, gradient, metrics = call("clipx_custom", config, tensors)
    mask = tensors["response_mask"]
    ratio = (tensors["log_prob"] - tensors["old_log_prob"]).exp()
    weight = ratio * torch.sigmoid((1.4 - ratio) * 3) * torch.sigmoid((ratio - 0.8) * 3)
    expected = torch.where(mask, -weight * tensors["advantages"] / mask.sum(), 0)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
    assert "clipx/gradient_mass/HP" in metrics


def test_it_is_in_verl_s_registry_under_its_own_name(actor, tensors):
    call("clipx_tests_soft", actor("+clipx=custom", f"clipx.function={MODULE}:soft"), tensors)


def test_its_bounds_can_come_from_another_method_s_controller(actor, tensors):
    config = actor("+clipx=custom", f"clipx.function={MODULE}:gppo_within_acpo", "+clipx.alpha=1")
    _, _, metrics = call("clipx_custom", config, tensors)
    assert metrics["clipx/epsilon/bin_0"] > 0.2


@pytest.mark.parametrize("function", [example_losses.soft, example_losses.gppo_within_acpo])
def test_the_contract_passes_on_sound_losses(function):
    check_loss(function)


@pytest.mark.parametrize("method", BUILT_IN)
def test_the_contract_passes_on_every_built_in_loss(method):
    assert [failure for _, failure in check_method(METHODS[method]) if failure] == []


@pytest.mark.parametrize(
    ("function", "broken"),
    [
        (example_losses.reads_the_batch, "padding matters"),
        (example_losses.nan, "not finite"),
        (example_losses.first_sequence, "order of the sequences"),
        (example_losses.writes, "has shape"),
    ],
)
def test_the_contract_catches_a_broken_loss(function, broken):
    with pytest.raises(AssertionError, match=broken):
        check_loss(function)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"clipx.function={MODULE}:undecorated"], "is not decorated with @verl_clipx.register_loss"),
        ([f"clipx.function={MODULE}:missing"], "has no attribute 'missing'"),
        ([f"clipx.function={MODULE}:soft", "+clipx.warmth=1"], r"clipx\.warmth is not a parameter of tests_soft"),
        ([f"clipx.function={MODULE}:soft", "+clipx.temperature=hot"], r"clipx\.temperature='hot': must be a number"),
    ],
)
def test_mistakes_are_named_in_the_driver(actor, overrides, message):
    with pytest.raises(Exception, match=message):
        actor("+clipx=custom", *overrides)


def test_a_taken_name_is_refused():
    with pytest.raises(ValueError, match=r"losses\.grpo:gradient_weight.*needs another one"):

        @register_loss("grpo")
        def mine(ratio, advantages, bounds):
            return ratio


def test_a_parameter_needs_a_default():
    with pytest.raises(ValueError, match="must be keyword-only with a default"):

        @register_loss("tests_without_default")
        def mine(ratio, advantages, bounds, strength):
            return ratio


def test_the_command_line_runs_the_contract(tmp_path):
    (tmp_path / "my_losses.py").write_text(
        "from verl_clipx import register_loss\n\n\n"
        "@register_loss('mine')\n"
        "def mine(ratio, advantages, bounds):\n"
        "    return ratio.clamp(bounds.low, bounds.high)\n\n\n"
        "@register_loss('broken')\n"
        "def broken(ratio, advantages, bounds):\n"
        "    return ratio * ratio.sum()\n"
    )
    command = [sys.executable, "-m", "verl_clipx.cli", "check-loss"]
    sound = subprocess.run([*command, "my_losses:mine"], cwd=tmp_path, capture_output=True, text=True)
    assert sound.returncode == 0, sound.stdout + sound.stderr
    broken = subprocess.run([*command, "my_losses:broken"], cwd=tmp_path, capture_output=True, text=True)
    assert broken.returncode == 1
    assert "failed" in broken.stdout
