"""The data and the policy of the end-to-end runs: small, made here, the same for all of them."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from tests.countdown_files import write_countdown
from verl_clipx.papers.tasks.countdown.generator import CountdownConfig, generate_problems
from verl_clipx.papers.tasks.countdown.policy import fit_policy
from verl_clipx.papers.tasks.tiny_policy.warm_start import WarmStartConfig

# After fewer steps so few answers are right that a batch without any, and so without a gradient, comes up in CI.
WARM_START_STEPS = 350


@dataclass(frozen=True)
class Task:
    """What a run reads: train and test Parquet files and the policy's folder."""

    train: Path
    test: Path
    policy: Path


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> Task:
    """A Countdown set and a policy after a short warm start, made once for all test processes."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "task"
    config = CountdownConfig()
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            write_countdown(folder, 256, 32)
        policy = fit_policy(
            generate_problems(config, 2000, 0, "train"),
            config.operators,
            mistakes=0.5,
            config=WarmStartConfig(steps=WARM_START_STEPS),
            cache=folder / "policies",
            num_threads=1,
        )
    return Task(folder / "train.parquet", folder / "test.parquet", policy)
