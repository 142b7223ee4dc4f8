"""A signal to a recipe or launcher reaches what it has started, which is a stand-in that notes the signal and ends.
Covers: every recipe, the launchers by SSH and Slurm, the quick start; SIGHUP (a terminal is closed), SIGINT, SIGTERM;
SIGKILL to the launchers by SSH and Slurm, the quick start and while_all_nodes_live.py. Not covered: verl itself, what
while_all_nodes_live.py does with a signal (test_nodes.py), SSH and Slurm themselves.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import psutil
import pytest

from .shell import RECIPES, ROOT, Machine, checkout
from .test_slurm import ANSWER_FOR_SCONTROL, RUN_JOB_HERE
from .test_slurm import SCRIPT as SLURM
from .test_ssh import PYTHON_ON_A_HOST, RUN_REMOTE_COMMAND_HERE
from .test_ssh import SCRIPT as SSH_SCRIPT

RECIPE = "recipes/acpo/run_qwen2.5_3b_fsdp.sh"
SCRIPTS = sorted(path for path in RECIPES.glob("*/run_*.sh") if path.parent.name != "cluster")
QUICKSTART = ROOT / "scripts" / "quickstart.sh"
SIGNALS = ("SIGHUP", "SIGINT", "SIGTERM")

RUN_FAKE_TRAINING = f"exec {sys.executable} -S -E {Path(__file__).with_name('stand_ins') / 'training.py'}"


class StartedScript:
    """A script that runs until its stand-in for a training does, which writes to the machine's home."""

    def __init__(self, machine, script, *words, **variables):
        self.home = machine.commands.parent
        self.process = subprocess.Popen(
            ["bash", str(script), *words],
            cwd=ROOT,
            env=machine.environment(**{"PREFLIGHT": "0", **variables}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        deadline = time.monotonic() + 30
        while not (self.home / "running").exists():
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.training = psutil.Process(int((self.home / "running").read_text()))

    def end(self, name):
        """Sends a signal to the script alone; when it has ended, its exit code and the signals its training noted.

        A script that is killed can end nothing itself, so its training may outlive it for a moment.
        """
        try:
            self.process.send_signal(signal.Signals[name])
            self.process.wait(timeout=30)
            with suppress(psutil.NoSuchProcess):
                if name == "SIGKILL":
                    self.training.wait(timeout=30)
                assert not self.training.is_running(), "the training goes on"
            return self.process.returncode, (self.home / "ended").read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with suppress(psutil.NoSuchProcess):
                self.training.kill()
            self.process.stdout.close()


# Where the script itself is killed: its exit code, and the signal that its training gets.
ENDED_AFTER_A_KILL = (-signal.SIGKILL, "SIGTERM")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path / "machine", python3=RUN_FAKE_TRAINING)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_recipe_is_verl_in_the_end(machine, tmp_path, script):
    assert StartedScript(machine, script, RUN_FOLDER=str(tmp_path / "run")).end("SIGTERM") == (143, "SIGTERM")


@pytest.mark.parametrize("name", SIGNALS)
def test_each_signal_reaches_verl(machine, tmp_path, name):
    code, signals = StartedScript(machine, ROOT / RECIPE, RUN_FOLDER=str(tmp_path / "run")).end(name)
    assert (code, signals) == (128 + signal.Signals[name], name)


@pytest.fixture
def by_ssh(tmp_path):
    """A run that ssh.sh has started, in the folder `workdir`."""
    training = PYTHON_ON_A_HOST.replace("*) exit 9 ;;", f"-m) {RUN_FAKE_TRAINING} ;;")
    hosts = Machine(tmp_path / "machine", ssh=RUN_REMOTE_COMMAND_HERE, hostname="echo 10.0.0.1", python3=training)
    words = ["PREFLIGHT=0", f"RUN_FOLDER={tmp_path / 'run'}", RECIPE]
    workdir = str(checkout(tmp_path / "workdir"))
    return StartedScript(hosts, SSH_SCRIPT, "run", *words, HOSTS="node1 node2", WORKDIR=workdir)


@pytest.mark.parametrize("name", [*SIGNALS, "SIGKILL"])
def test_a_run_by_ssh_ends_on_its_host(by_ssh, tmp_path, name):
    assert by_ssh.end(name) == (ENDED_AFTER_A_KILL if name == "SIGKILL" else (143, "SIGTERM"))
    assert list((tmp_path / "workdir" / "runs").iterdir()) == []


@pytest.mark.parametrize("name", [*SIGNALS, "SIGKILL"])
def test_a_slurm_job_ends_its_step_and_stays_ended(tmp_path, name):
    srun = f'[[ $* != *"hostname -I"* ]] || {{ echo 10.0.0.7; exit; }}\n{RUN_FAKE_TRAINING}'
    cluster = Machine(tmp_path / "machine", sbatch=RUN_JOB_HERE, scontrol=ANSWER_FOR_SCONTROL, srun=srun)
    # A later start: a first one is not put back into the queue anyway.
    started = StartedScript(cluster, cluster.commands / "sbatch", str(SLURM), RECIPE, SLURM_RESTART_COUNT="1")
    assert started.end(name) == (ENDED_AFTER_A_KILL if name == "SIGKILL" else (143, "SIGTERM"))
    assert not any(call[:2] == ["scontrol", "requeue"] for call in cluster.calls)


@pytest.mark.parametrize(
    ("stage", "name"),
    [*product(["policy"], ["SIGHUP", "SIGKILL"]), *product(["training"], ["SIGINT", "SIGTERM", "SIGKILL"])],
)
def test_the_quick_start_ends_what_it_runs(tmp_path, stage, name):
    python = f"[[ $* != *.policy* ]] || {RUN_FAKE_TRAINING}" if stage == "policy" else "echo policy"
    machine = Machine(tmp_path / "venv", python=python, clipx="", python3=RUN_FAKE_TRAINING)
    started = StartedScript(machine, QUICKSTART, VENV=str(tmp_path / "venv"), RUNS=str(tmp_path / "runs"))
    assert started.end(name) == (ENDED_AFTER_A_KILL if name == "SIGKILL" else (128 + signal.Signals[name], "SIGTERM"))
    assert [call for call in machine.calls if call[1:2] == ["report"]] == []


# Runs the stand-in for a training under while_all_nodes_live.py, the guard against lost nodes.
TRAIN_UNDER_THE_GUARD = f"""
import runpy, sys
guard = runpy.run_path({str(RECIPES / "cluster" / "while_all_nodes_live.py")!r})
guard["run"](["training"], [sys.executable, "-c", "import time; time.sleep(60)"])
"""


def test_a_killed_guard_leaves_no_training(tmp_path):
    machine = Machine(tmp_path / "machine", training=RUN_FAKE_TRAINING)
    script = tmp_path / "launch.sh"
    (tmp_path / "launch.py").write_text(TRAIN_UNDER_THE_GUARD)
    script.write_text(f"exec {sys.executable} {tmp_path / 'launch.py'}")
    assert StartedScript(machine, script, PYTHONPATH=str(ROOT)).end("SIGKILL") == ENDED_AFTER_A_KILL
