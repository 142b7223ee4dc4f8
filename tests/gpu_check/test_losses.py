"""`clipx gpu-check --losses` on a CPU, where neither verl nor Ray can be imported. Not covered: a GPU."""

import json
import subprocess
import sys

import pytest

# Of all, half a minute each to compile: one whose bounds come from statistics.
NAME = "acpo"

PROGRAM = """
import sys
sys.modules["verl"] = sys.modules["ray"] = None
from verl_clipx.cli import main
from verl_clipx.gpu_check import losses
losses.BUILT_IN = (sys.argv[2],)
sys.argv = ["clipx", "gpu-check", "--losses", "--device", "cpu", "--gpus", "1", "--json", sys.argv[1]]
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
