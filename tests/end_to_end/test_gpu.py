"""tests/gpu on two gloo ranks, with nothing but the device another: what a CPU can run of it passes. Covers, with
`-m matrix`: all, compiled (the rehearsal in tests/benchmarks/test_gpu_command.py has a part in every run,
test_invariance.py the engine's options and sharding, tests/losses/applying the compiler). Not covered: what needs a GPU
(flash attention, Ulysses, host waits, kernels) and vLLM (scripts/gpu.sh).
"""

import re
import subprocess

import pytest

from .runs import REPOSITORY


@pytest.mark.end_to_end
@pytest.mark.matrix
def test_what_a_cpu_can_run_passes():
    command = ["torchrun", "--nproc-per-node", "2", "--local-ranks-filter", "0", "-m", "pytest", "tests/gpu", "-q"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=300)
    counts = re.findall(r"^(\d+) passed, (\d+) skipped", result.stdout, re.MULTILINE)
    assert result.returncode == 0 and len(counts) == 1, result.stdout[-3000:] + result.stderr[-3000:]
    ((passed, skipped),) = counts
    assert int(passed) >= 20 and int(skipped) == 4
