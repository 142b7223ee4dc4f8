"""`clipx gpu-check --device cpu`: the checks of GPUs on two gloo ranks, with nothing but the device another.

Covers: the command, its ranks and the real worker and FSDP2 engine: vanilla and GRPO agree; padded, packed, offloaded,
fused and bfloat16 updates are the float64 one; ACPO's bounds in bfloat16; the compiled loss; which checks a CPU skips;
that a check which finds another update fails, and so does one that crashes. Not covered: what needs a GPU
(FSDP1, flash attention, Ulysses, syncs, kernels, memory) and vLLM: no GPU has run them.
"""

import json
import sys

import pytest
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.gpu_check import checks, ranks

pytestmark = pytest.mark.end_to_end

SKIPPED = {"FSDP1", "flash attention", "Ulysses 2", "syncs and kernels", "memory", "vLLM rollout"}

# The ranks' own program with two checks more, after those that stand.
PROGRAM = """
import os, sys
from pathlib import Path
from verl_clipx.gpu_check import checks, rank

def wider_bounds(bench):
    return checks.against_float64(bench, "clipx.clip_high=2", tolerance=checks.ROUNDING_HALF)

def crash(bench):
    raise ValueError("on purpose") if bench.rank else RuntimeError("no less")

checks.CHECKS = (*checks.CHECKS, checks.Check("wider bounds", wider_bounds), checks.Check("crash", crash))
code = rank.main(Path(sys.argv[1]))
os._exit(code)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The command's exit code, output and JSON, by check."""
    folder = tmp_path_factory.mktemp("gpu-check")
    (folder / "rank.py").write_text(PROGRAM)
    broken = (checks.Check(name, None) for name in ("wider bounds", "crash"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ranks, "PROGRAM", (sys.executable, str(folder / "rank.py")))
        patched.setattr("verl_clipx.gpu_check.run.CHECKS", (*checks.CHECKS, *broken))
        words = ["gpu-check", "--device", "cpu", "--out", str(folder / "found.json")]
        done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    document = json.loads((folder / "found.json").read_text())
    return done.exit_code, done.stdout, {one["name"]: one for one in document["checks"]}


def test_what_a_cpu_can_run_passes_and_the_rest_is_skipped_with_its_reason(found):
    _, output, results = found
    runs = {check.name for check in checks.CHECKS} - SKIPPED
    assert {name: results[name]["found"] for name in runs if results[name]["outcome"] != "pass"} == {}
    assert {name for name, one in results.items() if one["outcome"] == "skip"} == SKIPPED
    assert all(results[name]["found"] for name in SKIPPED)
    assert output.splitlines()[-1].startswith(f"{len(runs)} passed, 2 failed, {len(SKIPPED)} skipped")


def test_updates_differ_from_the_expected_ones_by_rounding(found):
    _, _, results = found
    for name in ("FSDP2", "packing", "fused kernels"):
        # Not 0: float32 against float64.
        assert 1e-9 < results[name]["numbers"]["gradient_difference"] < 2e-5, name
        assert 0 <= results[name]["numbers"]["receipt_difference"] < 1e-4, name
    assert 1e-3 < results["bfloat16"]["numbers"]["gradient_difference"] < 0.05
    assert results["vanilla and grpo"]["numbers"]["clipped"] > 0.1
    # Above epsilon_base, which every bin has whose ratio does not vary.
    assert results["bounds in bfloat16"]["numbers"]["largest"] > 0.3


def test_another_update_and_a_crash_fail_and_end_the_command_with_1(found):
    code, output, results = found
    assert code == 1
    assert results["wider bounds"]["outcome"] == results["crash"]["outcome"] == "fail"
    assert results["wider bounds"]["numbers"]["gradient_difference"] > checks.ROUNDING_HALF
    assert "on purpose" in results["crash"]["found"] or "no less" in results["crash"]["found"]
    assert "Traceback" in output
