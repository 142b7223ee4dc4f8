"""tests/gpu on gloo ranks, with nothing but the device another: what a CPU can run of it passes. Covers: on one rank
the losses, verl's vanilla, an update under FSDP2, and another bound; with `-m matrix` all, on two ranks, compiled
(test_invariance.py has the engine's options and sharding in every run, tests/loss the compiler). Not covered: what
needs a GPU (FSDP1, flash attention, Ulysses, host waits, kernels) and vLLM (scripts/gpu.sh).
"""

import re
import subprocess

import pytest

from .runs import REPOSITORY

# In every run of the tests.
CHOSEN = "losses and not compiled_loss or vanilla or FSDP2 or another_bound"


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("ranks", "chosen", "needing_a_gpu"), [("1", CHOSEN, 1), pytest.param("2", "", 5, marks=pytest.mark.matrix)]
)
def test_what_a_cpu_can_run_passes(ranks, chosen, needing_a_gpu):
    command = ["torchrun", "--nproc-per-node", ranks, "--local-ranks-filter", "0"]
    command += ["-m", "pytest", "tests/gpu", "-q", "-k", chosen]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=300)
    counts = re.findall(r"^(\d+) passed, (\d+) skipped", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and len(counts) == 1, done.stdout[-3000:] + done.stderr[-3000:]
    assert int(counts[0][0]) >= 20 and int(counts[0][1]) == needing_a_gpu
