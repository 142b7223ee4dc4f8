"""`clipx gpu-check --losses` on a CPU, where neither verl nor Ray can be imported.

Covers: one method's checks; what loses a value that is not finite, in each input; one GPU; the time limit. Not covered:
a GPU.
"""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.gpu_check import losses, report
from verl_clipx.gpu_check.report import Measured
from verl_clipx.loss.compiled import TokenFunctions
from verl_clipx.methods import BUILT_IN, METHODS

# Of all, half a minute each to compile: one whose bounds come from statistics.
NAME = "acpo"

PROGRAM = """
import sys
sys.modules["verl"] = sys.modules["ray"] = None
from verl_clipx.cli import main
from verl_clipx.gpu_check import losses
losses.BUILT_IN = (sys.argv[2],)
sys.argv = ["clipx", "gpu-check", "--losses", "--device", "cpu", "--out", sys.argv[1]]
main()
"""


@pytest.mark.slow
def test_the_losses_are_checked_without_verl_and_ray(tmp_path):
    file = tmp_path / "found.json"
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(file), NAME], capture_output=True, text=True)
    found = {one["name"]: one for one in json.loads(file.read_text())["checks"]} if file.exists() else {}
    assert set(found) == {f"loss of {NAME}"}, done.stderr[-2000:]
    assert all(one["numbers"]["milliseconds_compiled"] > 0 for one in found.values())
    failed = {name: one["found"] for name, one in found.items() if one["outcome"] != "pass"}
    assert failed == {} and done.returncode == 0


class Losing(TokenFunctions):
    """A loss that takes an input's values that are not finite for 0, and spoils the last token in their place."""

    def __init__(self, method, name):
        super().__init__(method, None, compiled=False)
        self.lost = name

    def loss(self, inputs, decision):
        values = getattr(inputs, self.lost)
        found = super().loss(inputs._replace(**{self.lost: values.nan_to_num(0, 0, 0)}), decision)
        if not values.isfinite().all():
            found.weighted[-1, -1] = torch.nan
        return found


@pytest.mark.parametrize("lost", [None, "log_prob", "old_log_prob", "advantages", "rollout_log_prob"])
def test_a_value_that_is_lost_in_any_input_is_found(lost):
    method = METHODS["m2po"]()
    functions = TokenFunctions(method, None, compiled=False) if lost is None else Losing(method, lost)
    inputs = losses.example(method, "cpu", torch.float32)
    assert losses.keeps_not_finite(functions, inputs) == (lost is None)


@pytest.mark.parametrize("name", BUILT_IN)
def test_no_loss_loses_one_uncompiled(name):
    method = METHODS[name]()
    functions = TokenFunctions(method, None, compiled=False)
    assert losses.keeps_not_finite(functions, losses.example(method, "cpu", torch.float32))


@pytest.fixture
def quick(monkeypatch):
    """Checks that take no time, but 200 s on the clock."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)

    def loss_check(method, device):
        clock.now += 200
        return Measured(True, "close")

    for module in (losses, report):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(losses, "loss_check", loss_check)


def test_one_gpu_is_enough(quick, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    done = CliRunner().invoke(app, ["gpu-check", "--losses"])
    assert done.exit_code == 0 and "1 x cuda" in done.output and f"pass: loss of {BUILT_IN[0]}, 200 s" in done.output


def test_after_nine_minutes_no_further_loss_is_begun(quick):
    done = CliRunner().invoke(app, ["gpu-check", "--losses", "--device", "cpu"], env={"COLUMNS": "160"})
    assert done.exit_code == 0
    assert f"3 passed, 0 failed, {len(BUILT_IN) - 3} skipped: nothing is known about skipped checks" in done.output
    assert f"skip: loss of {BUILT_IN[3]}, 0 s: not run, because nine minutes had passed" in done.output
