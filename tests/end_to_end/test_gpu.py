"""tests/gpu on gloo ranks, with nothing but the device another: what a CPU can run of it passes.

Covers: one rank, and two with `-m matrix`, where FSDP2 shards (test_invariance.py has sharding in every run).
Not covered: what needs a GPU (FSDP1, flash attention, Ulysses, host waits, kernels) and vLLM: no GPU has run them.
"""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDS_A_GPU = 5


@pytest.mark.end_to_end
@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.matrix)])
def test_what_a_cpu_can_run_passes(ranks):
    command = ["torchrun", "--nproc-per-node", ranks, "--local-ranks-filter", "0", "-m", "pytest", "tests/gpu", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    counts = re.findall(r"^(\d+) passed, (\d+) skipped", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and len(counts) == 1, done.stdout[-3000:] + done.stderr[-3000:]
    assert int(counts[0][0]) >= 20 and int(counts[0][1]) == NEEDS_A_GPU
