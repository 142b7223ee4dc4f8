"""Checks an environment: what is installed, whether the plugin works, and what to do if something does not."""

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from verl_clipx.common.extras import FOR_CPU, OF_TRAINING, TOOLS, needs_tool, pip_command
from verl_clipx.common.verl_version import installed_version, unsuitable_verl, untested_verl, verl_version
from verl_clipx.run.keys import LOSS_MODE

Level = Literal["ok", "warning", "error"]

PYTHON_RANGE = SpecifierSet(">=3.10,<3.13")

TESTED_HERE = "verl-clipx's own tests run on a CPU with"
TESTED_BY_VERL = "verl tests its GPU environment with this"
INSTALL_THIS = "in a clone of verl-clipx: pip install --no-deps ."


class Combination(NamedTuple):
    """Versions of packages that were tested together.

    Args:
        tested_by: who tested them, as the beginning of an advice. A colon and a package with its versions follow.
        versions: from a package's name for pip to its tested versions.
    """

    tested_by: str
    versions: dict[str, str]


# From the kind of machine to the combination that was tested on it.
COMBINATIONS = {
    "cpu": Combination(
        tested_by=TESTED_HERE,
        versions={"torch": "==2.13.0", "transformers": ">=5.9,<5.11"},
    ),
    "gpu": Combination(
        tested_by=TESTED_BY_VERL,
        versions={"torch": "==2.11.0", "vllm": "==0.24.0", "transformers": "==5.9.0", "flash-attn": "==2.8.3"},
    ),
}
# Further packages that every run needs, with the versions that verl 0.9 or this package requires.
REQUIRED_VERSIONS = {
    "ray": ">=2.41.0",
    "TransferQueue": ">=0.1.10,<0.2",
    "tensordict": "!=0.9.0,<=0.10.0,>=0.8.0",
    "hydra-core": ">=1.3.2",
}
NEEDED_BY_EVERY_RUN = ("torch", "transformers", *REQUIRED_VERSIONS)
ANY_VERSION = SpecifierSet()

GPU_CHECKS = "To check losses and updates on GPUs, in a checkout: bash scripts/gpu.sh"

# The doctor knows only this environment, not those of a job's processes on other machines.
IN_A_JOB = (
    "To see it in a running job: the driver's output has a line that begins with 'clipx: clipx_', and then 'receipt: ' "
    "from the workers; with Ray's jobs, ray job logs ID | grep -a -e 'clipx: clipx_' -e 'receipt: '"
)

# The most characters of a group's ok findings that the short report shows.
WIDTH = 100

# Seconds after which an interpreter that checks the registration is ended.
PATIENCE = 300

# The beginning of both programs below: a function that returns lines about what is registered with verl.
LIST_REGISTERED = """
def list_registered():
    import verl
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    import verl.workers.engine_workers as workers
    losses = sorted(name for name in POLICY_LOSS_REGISTRY if name.startswith("clipx_"))
    worker = workers.ActorRolloutRefWorker.actor_worker_cls
    bases = [f"{base.__module__}.{base.__qualname__}" for base in worker.__mro__]
    return ["LOSSES " + " ".join(losses), "WORKER " + " ".join(bases)]
"""

TRAINING_WORKER = "verl_clipx.training.worker.training_worker.ClipxTraining"

# Prints what is registered in a Ray worker.
CHECK_IN_RAY = f"""{LIST_REGISTERED}
import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
for line in ray.get(ray.remote(lambda: list_registered()).remote()):
    print(line)
"""

# Prints what is registered in the interpreter that runs it, and what a composed configuration has.
CHECK_HERE = f"""{LIST_REGISTERED}
for line in list_registered():
    print(line)

from hydra import compose, initialize_config_module
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", ["+clipx=acpo", "clipx.alpha=2"])
print("COMPOSED", config.{LOSS_MODE}, config.clipx.alpha)
"""


@dataclass(frozen=True)
class DoctorFinding:
    """One line of the report.

    Args:
        level: "ok", "warning" (may matter) or "error" (runs will fail).
        subject: what was checked.
        result: what was found.
        advice: what to do about it; empty for "ok".
    """

    level: Level
    subject: str
    result: str
    advice: str = ""


def format_group(group: str, findings: list[DoctorFinding], *, verbose: bool) -> Iterator[tuple[Level, str]]:
    """Yield the level and the text of each line of a group of findings.

    All ok findings share one line, or have a line each if `verbose`. Each other finding has a line of its own.
    """
    ok_findings = [finding for finding in findings if finding.level == "ok"]
    if verbose:
        for finding in ok_findings:
            yield "ok", f"{finding.subject}: {finding.result}"
    elif ok_findings:
        texts = []
        for finding in ok_findings:
            # A group with a single kind of check, such as "Hydra groups", has the name of that check.
            is_named_by_group = finding.subject == group
            texts.append(finding.result if is_named_by_group else f"{finding.subject} {finding.result}")
        summary = textwrap.shorten(", ".join(texts), WIDTH, placeholder=" …")
        yield "ok", f"{group}: {summary}"
    for finding in findings:
        if finding.level != "ok":
            yield finding.level, f"{finding.subject}: {finding.result}; {finding.advice}"


def check_versions(has_gpu: bool) -> list[DoctorFinding]:
    """Check Python, verl, and the versions of the packages that a run may need.

    A package in a version that was not tested, or that verl excludes, is a warning. A missing package is a warning too,
    unless every run needs it: then it is an error.

    Args:
        has_gpu: whether packages are compared with the combination that verl tests on GPUs. Otherwise they are compared
            with the one that this project tests on a CPU.
    """
    findings = [check_python(), check_verl()]
    machine = "gpu" if has_gpu else "cpu"
    combination = COMBINATIONS[machine]
    for distribution, tested in combination.versions.items():
        advice = f"{combination.tested_by}: {distribution}{tested}"
        if installed_version(distribution) is None:
            # Quoted, because a shell would take > for a redirection.
            requirement = shlex.quote(distribution + tested)
            advice = f"{pip_command([requirement])}; {advice}"
        level = level_if_unsuitable(distribution)
        findings.append(check_distribution(distribution, SpecifierSet(tested), level, advice))
    for distribution, required in REQUIRED_VERSIONS.items():
        level = level_if_unsuitable(distribution)
        findings.append(check_distribution(distribution, SpecifierSet(required), level))
    findings.append(check_distribution("verl-clipx", ANY_VERSION, "error", INSTALL_THIS))
    return findings


def level_if_unsuitable(distribution: str) -> Level:
    """Return the level of the finding about a package that is missing or has another version than the tested ones."""
    is_missing = installed_version(distribution) is None
    if is_missing and distribution in NEEDED_BY_EVERY_RUN:
        return "error"
    return "warning"


def check_python() -> DoctorFinding:
    """Check whether this project supports the version of Python."""
    version = ".".join(map(str, sys.version_info[:3]))
    if version in PYTHON_RANGE:
        return DoctorFinding("ok", "Python", version)
    return DoctorFinding("error", "Python", version, f"use Python {PYTHON_RANGE}")


def check_verl() -> DoctorFinding:
    """Check whether the plugin extends the installed verl, and whether the plugin's tests ran on that version."""
    version = verl_version() or "not installed"
    unsuitable = unsuitable_verl()
    if unsuitable is not None:
        return DoctorFinding("error", "verl", version, unsuitable)
    untested = untested_verl()
    if untested is not None:
        return DoctorFinding("warning", "verl", version, untested)
    return DoctorFinding("ok", "verl", version)


def check_distribution(distribution: str, suitable: SpecifierSet, level: Level, advice: str = "") -> DoctorFinding:
    """Check whether a package is installed in a suitable version.

    Args:
        distribution: the package's name for pip.
        suitable: the suitable versions.
        level: the level of the finding if the package is missing or has another version.
        advice: what to do then. Empty: pip's command that installs a suitable version.
    """
    version = installed_version(distribution)
    if version is not None and suitable.contains(Version(version).public, prereleases=True):
        return DoctorFinding("ok", distribution, version)
    return DoctorFinding(
        level, distribution, version or "not installed", advice or f"pip install '{distribution}{suitable}'"
    )


def run_python(code: str, seconds: int) -> tuple[str, str]:
    """Run code in a fresh interpreter outside the checkout, as a Ray worker or a user's launch would.

    Args:
        code: a Python program.
        seconds: after how many seconds the interpreter is ended.

    Returns:
        The standard output; and what went wrong, which is empty only if the exit code is 0: the last lines of the
        standard error and, if these lines do not say it, how the interpreter ended.
    """
    with tempfile.TemporaryDirectory() as elsewhere:
        try:
            process = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds, cwd=elsewhere
            )
        except subprocess.TimeoutExpired:
            return "", f"no answer within {seconds} s"
    if process.returncode == 0:
        return process.stdout, ""
    last_lines = process.stderr.strip().splitlines()[-3:]
    # A process that a signal ends has no traceback, and what it printed before is not the cause.
    if process.returncode < 0 or not last_lines:
        last_lines.append(describe_exit(process.returncode))
    return process.stdout, "\n".join(last_lines)


def describe_exit(code: int) -> str:
    """Return how a Python process ended, by its exit code.

    Args:
        code: not 0. A negative one is that of a signal.
    """
    if code > 0:
        return f"Python ended with exit code {code} and printed no error"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return f"Python was ended by signal {name}"


def check_packages(subject: str, needed: Mapping[str, str], level: Level, advice: str = "") -> DoctorFinding:
    """Check whether modules can be imported.

    Args:
        subject: what the finding is about.
        needed: from the name of a module to the distribution that contains it.
        level: of the finding if a module is missing.
        advice: stands before pip's command.
    """
    missing = [distribution for module, distribution in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        return DoctorFinding(level, subject, f"no {', '.join(missing)}", f"{advice}{pip_command(missing)}")
    return DoctorFinding("ok", subject, ", ".join(needed.values()))


def check_extras(has_gpu: bool) -> list[DoctorFinding]:
    """Check the packages that every run needs, those of the commands, and without a GPU those of CPU runs."""
    only_commands = {module: name for module, name in TOOLS.items() if module not in OF_TRAINING}
    advice = "training needs them only for the rewards of mathematics. To use those and all commands: "
    findings = [
        check_packages("packages of training", OF_TRAINING, "error"),
        check_packages("tools", only_commands, "warning", advice),
    ]
    if not has_gpu:
        findings.append(check_packages("packages of CPU runs", FOR_CPU, "error"))
    return findings


def check_registration(where: str, output: str, error: str) -> list[DoctorFinding]:
    """Check whether the losses and the training worker are registered in an interpreter.

    Args:
        where: names the interpreter, such as "in a Ray worker".
        output, error: what `run_python` returned for `CHECK_HERE` or `CHECK_IN_RAY`.
    """
    lines = dict(line.split(" ", 1) for line in output.splitlines() if line.startswith(("LOSSES ", "WORKER ")))
    losses = lines.get("LOSSES", "").split()
    # The training worker's class and those that it derives from.
    worker_classes = lines.get("WORKER", "").split()
    chosen_plugins = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if not losses:
        advice = error or (
            f"verl did not load the clipx plugin. VERL_USE_EXTERNAL_PLUGINS is {chosen_plugins!r}; it must be auto or "
            f"contain clipx, and verl-clipx must be installed in this environment; {INSTALL_THIS}"
        )
        return [DoctorFinding("error", f"losses {where}", "not registered", advice)]
    registered = DoctorFinding("ok", f"losses {where}", f"{len(losses)} registered: {', '.join(losses)}")
    if TRAINING_WORKER in worker_classes:
        return [registered, DoctorFinding("ok", f"training worker {where}", TRAINING_WORKER)]
    advice = (
        "another plugin has replaced ActorRolloutRefWorker.actor_worker_cls, so metrics would not be exact; remove it"
    )
    worker = worker_classes[0] if worker_classes else "none"
    return [registered, DoctorFinding("error", f"training worker {where}", worker, advice)]


def check_hydra(output: str, error: str) -> DoctorFinding:
    """Check whether verl's own configuration finds the plugin's groups.

    Args:
        output, error: what `run_python` returned for `CHECK_HERE`.
    """
    if "COMPOSED clipx_acpo 2" in output:
        return DoctorFinding("ok", "Hydra groups", "+clipx=acpo composes with verl's ppo_trainer")
    return DoctorFinding(
        "error", "Hydra groups", "+clipx=acpo does not compose", error or output or "reinstall verl-clipx"
    )


def count_gpus() -> int:
    """Return the number of GPUs that torch sees; 0 without torch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


def check_accelerators() -> list[DoctorFinding]:
    """Report the build of torch and the GPUs."""
    if importlib.util.find_spec("torch") is None:
        return [DoctorFinding("error", "torch build", "not installed", needs_tool("every run", "torch"))]
    import torch

    findings = [DoctorFinding("ok", "torch build", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")]
    gpu_count = count_gpus()
    for number in range(gpu_count):
        gpu = torch.cuda.get_device_properties(number)
        findings.append(DoctorFinding("ok", f"GPU {number}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"))
    if gpu_count == 0:
        advice = "without a GPU, runs need VERL_PLATFORM=cpu and +hardware=cpu; on a GPU machine, a torch for its CUDA"
        findings.append(DoctorFinding("warning", "GPUs", "none", advice))
    return findings


def examine_environment(*, ray: bool) -> Iterator[tuple[str, list[DoctorFinding]]]:
    """Run all checks; yield each group's name and findings as soon as they are known, so that progress can be shown.

    If the plugin does not extend the installed verl, the checks of registration and composition are left out, because
    they could only fail.

    Args:
        ray: whether to check inside a Ray worker too, which starts a small cluster.
    """
    has_gpu = count_gpus() > 0
    yield "versions", [*check_versions(has_gpu), *check_extras(has_gpu)]
    yield "accelerators", check_accelerators()
    if unsuitable_verl():
        return
    output, error = run_python(CHECK_HERE, PATIENCE)
    yield "Hydra groups", [check_hydra(output, error)]
    yield "losses in a fresh interpreter", check_registration("in a fresh interpreter", output, error)
    if ray:
        output, error = run_python(CHECK_IN_RAY, PATIENCE)
        yield "losses in a Ray worker", check_registration("in a Ray worker", output, error)
