"""The losses' GPU code, compiled without a GPU and never run: launches, torch's own operators, buffers. Not covered:
what the code computes and how long it takes, which need a GPU (tests/gpu); that Triton compiles its kernels.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from verl_clipx.losses.methods import BUILT_IN

ROOT = Path(__file__).parents[1]
TRITON = Path(os.environ.get("TRITON_FOLDER") or Path(sys.prefix) / "triton")

MOST_LAUNCHES = {"loss": 3, "statistics": 4, "second statistics": 4}
# What the sums of these begin with, such as BAPO's two tables, are launches of their own: docs/dev/measurements.md.
WITH_TABLES, MOST_WITH_TABLES = {"bapo", "kl_cov"}, 7

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.system() != "Linux", reason="Triton has packages for Linux only"),
]


def counted(architecture: int, *methods: str) -> list[dict]:
    """What benchmarks/gpu_code.py prints."""
    assert TRITON.is_dir(), f"no Triton in {TRITON}: pip install --no-deps --target {TRITON} triton==3.7.1"
    command = [sys.executable, "benchmarks/gpu_code.py", *methods, "--json", "--architecture", str(architecture)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{TRITON}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def as_it_should_be(row: dict) -> bool:
    """Whether a graph keeps the budgets."""
    method, part = row["method"], row["part"]
    return (
        not row["fallbacks"]
        # KL-Cov keeps each token's bucket, and CPPO its divergence, which it reads 26 times for a quantile.
        and row["buffers"] <= ((method, part) in (("kl_cov", "second statistics"), ("cppo", "loss")))
        and row["launches"] <= (MOST_WITH_TABLES if part != "loss" and method in WITH_TABLES else MOST_LAUNCHES[part])
    )


def test_three_graphs():
    rows = counted(90, "acpo", "grpo")
    assert [(row["method"], row["part"]) for row in rows] == [
        ("acpo", "statistics"),
        ("acpo", "loss"),
        ("grpo", "loss"),
    ]
    assert [row for row in rows if not as_it_should_be(row)] == []


@pytest.mark.matrix
@pytest.mark.parametrize("architecture", [80, 90])
def test_every_graph(architecture):
    rows = counted(architecture, *BUILT_IN)
    assert {row["method"] for row in rows} == set(BUILT_IN)
    assert [row for row in rows if not as_it_should_be(row)] == []
