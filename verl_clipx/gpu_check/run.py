"""Runs all checks, one after the other."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from verl_clipx.gpu_check import rollout
from verl_clipx.gpu_check.checks import CHECKS
from verl_clipx.gpu_check.machine import Machine, sample_folder
from verl_clipx.gpu_check.ranks import results_on_ranks
from verl_clipx.gpu_check.report import Result, tried
from verl_clipx.gpu_check.sample import make_sample

VLLM = "vLLM rollout"


def results(machine: Machine) -> Iterator[Result]:
    """Run every check that this machine can run; checks that it cannot run come first, as skipped."""
    reasons = {check.name: check.why_not(machine) for check in CHECKS} | {VLLM: rollout.why_not(machine)}
    for name, reason in reasons.items():
        if reason is not None:
            yield Result(name, "skip", reason)
    with tempfile.TemporaryDirectory(prefix="clipx-gpu-check-") as name:
        folder = Path(name)
        for tied in (False, True):
            make_sample(sample_folder(folder, tied), tied=tied)
        yield from results_on_ranks(machine, folder, [check.name for check in CHECKS if reasons[check.name] is None])
        if reasons[VLLM] is None:
            yield tried(VLLM, lambda: rollout.vllm_rollout(machine, sample_folder(folder, False), folder))
