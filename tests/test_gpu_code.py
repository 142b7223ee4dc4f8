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
METHODS_WITH_TABLES = {"bapo", "kl_cov"}
MOST_LAUNCHES_WITH_TABLES = 7

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.system() != "Linux", reason="Triton has packages for Linux only"),
]


def count_launches(architecture: int, *methods: str) -> list[dict]:
    """What benchmarks/gpu_code.py prints."""
    assert TRITON.is_dir(), f"no Triton in {TRITON}: pip install --no-deps --target {TRITON} triton==3.7.1"
    command = [sys.executable, "benchmarks/gpu_code.py", *methods, "--json", "--architecture", str(architecture)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{TRITON}", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def is_within_budgets(row: dict) -> bool:
    """Whether a graph keeps the budgets."""
    method, part = row["method"], row["part"]
    # KL-Cov keeps each token's bucket, and CPPO its divergence, which it reads 26 times for a quantile.
    most_buffers = 1 if (method, part) in (("kl_cov", "second statistics"), ("cppo", "loss")) else 0
    if part != "loss" and method in METHODS_WITH_TABLES:
        most_launches = MOST_LAUNCHES_WITH_TABLES
    else:
        most_launches = MOST_LAUNCHES[part]
    return not row["fallbacks"] and row["buffers"] <= most_buffers and row["launches"] <= most_launches


def test_the_graphs_of_acpo_and_grpo_are_within_their_budgets():
    rows = count_launches(90, "acpo", "grpo")
    assert [(row["method"], row["part"]) for row in rows] == [
        ("acpo", "statistics"),
        ("acpo", "loss"),
        ("grpo", "loss"),
    ]
    assert [row for row in rows if not is_within_budgets(row)] == []


@pytest.mark.matrix
@pytest.mark.parametrize("architecture", [80, 90])
def test_every_graph_is_within_its_budgets(architecture):
    rows = count_launches(architecture, *BUILT_IN)
    assert {row["method"] for row in rows} == set(BUILT_IN)
    assert [row for row in rows if not is_within_budgets(row)] == []
