"""The losses' GPU code, compiled without a GPU and never run: launches, thread blocks, buffers. Not covered: what
the code computes, nor how long it takes: both need a GPU (tests/gpu).
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from verl_clipx.base.tokens import PART
from verl_clipx.methods import BUILT_IN, METHODS

ROOT = Path(__file__).parents[1]
TRITON = Path(os.environ.get("TRITON_FOLDER") or Path(sys.prefix) / "triton")

MOST_LAUNCHES = {"loss": 3, "statistics": 4, "second statistics": 4}
# A sum over whole sequences comes first.
BY_SEQUENCE = {name for name in BUILT_IN if METHODS[name].by_sequence}
# What the sums of these begin with, such as BAPO's two tables, are launches of their own: docs/dev/measurements.md.
WITH_TABLES, MOST_WITH_TABLES = {"bapo", "kl_cov"}, 7

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.system() != "Linux", reason="Triton has packages for Linux only"),
]


def counted(architecture: int, *methods: str) -> list[dict]:
    """What benchmarks/gpu_code.py prints."""
    assert TRITON.is_dir(), f"no Triton in {TRITON}: bash scripts/setup_triton.sh"
    command = [sys.executable, "benchmarks/gpu_code.py", *methods, "--json", "--architecture", str(architecture)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{TRITON}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def as_it_should_be(row: dict) -> bool:
    """Whether a graph keeps the budgets."""
    method, part, tokens = row["method"], row["part"], row["sequences"] * row["length"]
    blocks = min(132, row["sequences"] if method in BY_SEQUENCE else tokens // 4096)
    return (
        not row["fallbacks"]
        # KL-Cov keeps each token's bucket, and CPPO its divergence, which it reads 26 times for a quantile.
        and row["buffers"] <= ((method, part) in (("kl_cov", "second statistics"), ("cppo", "loss")))
        and row["blocks"] >= blocks
        and row["launches"] <= (MOST_WITH_TABLES if part != "loss" and method in WITH_TABLES else MOST_LAUNCHES[part])
    )


def test_three_graphs():
    rows = counted(90, "acpo", "grpo")
    assert len({(row["method"], row["part"]) for row in rows}) == 3 and len(rows) == 9
    assert [row for row in rows if not as_it_should_be(row)] == []
    losses = [row for row in rows if row["part"] == "loss"]
    # Each input read once, each output written once; no thread block adds up more than a part of a sequence.
    assert all(row["traffic"] <= 1.1 for row in losses)
    assert all(row["blocks"] >= min(row["sequences"] * row["length"] // PART, 128) for row in losses)


@pytest.mark.matrix
@pytest.mark.parametrize("architecture", [80, 90])
def test_every_graph(architecture):
    rows = counted(architecture, *BUILT_IN)
    assert {row["method"] for row in rows} == set(BUILT_IN)
    assert [row for row in rows if not as_it_should_be(row)] == []
