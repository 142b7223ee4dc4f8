"""Checks of an environment: what is installed, whether the plugin works, and what to do if something does not."""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from verl_clipx.common.extras import FOR_CPU, TOOLS, needs_tool, pip_command
from verl_clipx.common.verl_version import installed_version, unsuitable_verl, untested_verl, verl_version
from verl_clipx.run.keys import LOSS_MODE

Level = Literal["ok", "warning", "error"]

PYTHON_RANGE = SpecifierSet(">=3.10,<3.13")

TESTED_HERE = "verl-clipx's own tests run on a CPU with"
TESTED_BY_VERL = "verl tests its GPU environment with this"
INSTALL_THIS = "from a clone of it: pip install --no-deps ."
# By extra: who tested which versions together.
COMBINATIONS = {
    "cpu": (TESTED_HERE, {"torch": "==2.13.0", "transformers": ">=5.9,<5.11"}),
    "gpu": (
        TESTED_BY_VERL,
        {"torch": "==2.11.0", "vllm": "==0.24.0", "transformers": "==5.9.0", "flash-attn": "==2.8.3"},
    ),
}
GPU_CHECKS = "To check losses and updates on GPUs, in a checkout: bash scripts/gpu.sh"

# Here it is known what this environment has, and not what the processes of a job on other machines have.
IN_A_JOB = (
    "To see it in a running job: the driver's output has a line that begins with 'clipx: clipx_', and then 'receipt: ' "
    "from the workers; with Ray's jobs, ray job logs ID | grep -a -e 'clipx: clipx_' -e 'receipt: '"
)

# How many letters of what is fine in a group the short report shows.
WIDTH = 100

REGISTERED = """
def registered():
    import verl
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    import verl.workers.engine_workers as workers
    bases = workers.ActorRolloutRefWorker.actor_worker_cls.__mro__
    yield "LOSSES", *sorted(name for name in POLICY_LOSS_REGISTRY if name.startswith("clipx_"))
    yield "WORKER", *(f"{base.__module__}.{base.__qualname__}" for base in bases)
"""

TRAINING_WORKER = "verl_clipx.training.worker.training_worker.ClipxTraining"

IN_RAY = """
import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
for words in ray.get(ray.remote(lambda: [*registered()]).remote()):
    print(*words)
"""

HERE = f"""
for words in registered():
    print(*words)

from hydra import compose, initialize_config_module
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", ["+clipx=acpo", "clipx.alpha=2"])
print("COMPOSED", config.{LOSS_MODE}, config.clipx.alpha)
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was checked, what was found, and what to do about it.

    Args:
        level: "ok", "warning" (may matter) or "error" (runs will fail).
    """

    level: Level
    subject: str
    found: str
    advice: str = ""


def lines_of(group: str, findings: list[Finding], *, verbose: bool) -> Iterator[tuple[Level, str]]:
    """Yields a group's lines: one for all that is fine (each, if `verbose`), and one for each other finding."""
    fine = [part for part in findings if part.level == "ok"]
    lines = [f"{part.subject}: {part.found}" for part in fine]
    if fine and not verbose:
        # A check that is a group by itself has its name.
        whole = ", ".join(part.found if part.subject == group else f"{part.subject} {part.found}" for part in fine)
        lines = [f"{group}: {textwrap.shorten(whole, WIDTH, placeholder=' …')}"]
    yield from (("ok", line) for line in lines)
    for part in findings:
        if part.level != "ok":
            yield part.level, f"{part.subject}: {part.found}; {part.advice}"


def check_versions(has_gpu: bool) -> list[Finding]:
    """Checks the versions of Python, of verl, and of the combination that verl (GPU) or this project (CPU) tests."""
    python = ".".join(map(str, sys.version_info[:3]))
    findings = [
        Finding("ok", "Python", python)
        if python in PYTHON_RANGE
        else Finding("error", "Python", python, f"use Python {PYTHON_RANGE}"),
        check_verl(),
    ]
    extra = "gpu" if has_gpu else "cpu"
    by_whom, combination = COMBINATIONS[extra]
    for distribution, tested in combination.items():
        install = "" if installed_version(distribution) else f"{pip_command([repr(distribution + tested)])}; "
        advice = f"{install}{by_whom}: {distribution}{tested}"
        findings.append(in_range(distribution, SpecifierSet(tested), "warning", advice))
    for distribution in ("ray", "TransferQueue", "tensordict", "hydra-core"):
        findings.append(in_range(distribution, SpecifierSet(), "error"))
    return [*findings, in_range("verl-clipx", SpecifierSet(), "error", INSTALL_THIS)]


def check_verl() -> Finding:
    """Checks whether the plugin extends the verl that is here, and whether its tests ran on it."""
    version = verl_version() or "not installed"
    unsuitable = unsuitable_verl()
    if unsuitable is not None:
        return Finding("error", "verl", version, unsuitable)
    untested = untested_verl()
    if untested is not None:
        return Finding("warning", "verl", version, untested)
    return Finding("ok", "verl", version)


def in_range(distribution: str, tested: SpecifierSet, level: Level, advice: str = "") -> Finding:
    """Checks whether a distribution is installed in a tested version; without `advice` it is pip's command."""
    version = installed_version(distribution)
    if version is not None and tested.contains(Version(version).public, prereleases=True):
        return Finding("ok", distribution, version)
    return Finding(level, distribution, version or "not installed", advice or f"pip install '{distribution}{tested}'")


def run_python(code: str, seconds: int) -> tuple[str, str]:
    """Runs code in a fresh interpreter outside the checkout, as a Ray worker or a user's launch would.

    Returns:
        Standard output, and what went wrong: the last lines of standard error, and how the interpreter ended where
        these lines don't tell it. Empty only if the exit code is 0.
    """
    with tempfile.TemporaryDirectory() as elsewhere:
        try:
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds, cwd=elsewhere
            )
        except subprocess.TimeoutExpired:
            return "", f"no answer within {seconds} s"
    if done.returncode == 0:
        return done.stdout, ""
    last_lines = done.stderr.strip().splitlines()[-3:]
    # A process that a signal ends has no traceback, and what it printed before is not the cause.
    if done.returncode < 0 or not last_lines:
        last_lines.append(describe_exit(done.returncode))
    return done.stdout, "\n".join(last_lines)


def describe_exit(code: int) -> str:
    """Returns how a Python process ended, by its exit code other than 0; a negative one is that of a signal."""
    if code > 0:
        return f"Python ended with exit code {code} and printed no error"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return f"Python was ended by signal {name}"


def check_packages(subject: str, needed: Mapping[str, str], level: Level, advice: str = "") -> Finding:
    """Checks whether modules can be imported, by a mapping from each to the distribution that has it."""
    missing = [distribution for module, distribution in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        return Finding(level, subject, f"no {', '.join(missing)}", f"{advice}{pip_command(missing)}")
    return Finding("ok", subject, ", ".join(needed.values()))


def check_extras(has_gpu: bool) -> list[Finding]:
    """Checks the packages that only the tools around the losses need, and those of runs without a GPU."""
    advice = "training needs them only for rewards of mathematics; for the other commands: "
    tools = check_packages("tools", TOOLS, "warning", advice)
    if has_gpu:
        return [tools]
    return [tools, check_packages("packages of CPU runs", FOR_CPU, "error")]


def check_registration(where: str, output: str, error: str) -> list[Finding]:
    """Checks, by what `run_python` returns of `REGISTERED`, whether losses and training worker are registered there."""
    lines = dict(line.split(" ", 1) for line in output.splitlines() if line.startswith(("LOSSES ", "WORKER ")))
    losses = lines.get("LOSSES", "").split()
    worker = lines.get("WORKER", "").split()
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if not losses:
        advice = error or (
            f"verl did not load the clipx plugin. VERL_USE_EXTERNAL_PLUGINS is {policy!r}; it must be auto or contain "
            f"clipx, and verl-clipx must be installed in this environment, {INSTALL_THIS}"
        )
        return [Finding("error", f"losses {where}", "not registered", advice)]
    registered = Finding("ok", f"losses {where}", f"{len(losses)} registered: {', '.join(losses)}")
    if TRAINING_WORKER in worker:
        return [registered, Finding("ok", f"training worker {where}", TRAINING_WORKER)]
    advice = (
        "another plugin has replaced ActorRolloutRefWorker.actor_worker_cls, so metrics would not be exact; remove it"
    )
    return [registered, Finding("error", f"training worker {where}", worker[0] if worker else "none", advice)]


def check_hydra(output: str, error: str) -> Finding:
    """Checks, by what `run_python` returns of `HERE`, whether verl's own configuration finds the plugin's groups."""
    if "COMPOSED clipx_acpo 2" in output:
        return Finding("ok", "Hydra groups", "+clipx=acpo composes with verl's ppo_trainer")
    return Finding("error", "Hydra groups", "+clipx=acpo does not compose", error or output or "reinstall verl-clipx")


def check_accelerators() -> list[Finding]:
    """Reports the torch build and the GPUs."""
    if importlib.util.find_spec("torch") is None:
        return [Finding("error", "torch build", "not installed", needs_tool("every run", "torch"))]
    import torch

    build = Finding("ok", "torch build", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    advice = "without a GPU, runs need VERL_PLATFORM=cpu and +hardware=cpu; on a GPU machine, a torch for its CUDA"
    return [build] + (
        [Finding("ok", f"GPU {k}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB") for k, gpu in enumerate(gpus)]
        or [Finding("warning", "GPUs", "none", advice)]
    )


def examine(*, ray: bool) -> Iterator[tuple[str, list[Finding]]]:
    """Runs the checks; yields each group's name and findings at once, so that progress can be shown.

    Beside a verl that the plugin does not extend, nothing is registered or composed: that one error is the answer.
    """
    accelerators = check_accelerators()
    has_gpu = any(finding.subject.startswith("GPU ") for finding in accelerators)
    yield "versions", [*check_versions(has_gpu), *check_extras(has_gpu)]
    yield "accelerators", accelerators
    if unsuitable_verl():
        return
    fresh = run_python(REGISTERED + HERE, 300)
    yield "Hydra groups", [check_hydra(*fresh)]
    yield "losses in a fresh interpreter", check_registration("in a fresh interpreter", *fresh)
    if ray:
        yield "losses in a Ray worker", check_registration("in a Ray worker", *run_python(REGISTERED + IN_RAY, 300))
