"""A signal to a recipe or launcher reaches what it has started, which is a stand-in that notes the signal and ends.

Covers: every recipe, the launchers by SSH and Slurm, the quick start; SIGHUP (a terminal is closed), SIGINT, SIGTERM;
SIGKILL to the launchers by SSH and Slurm, the quick start and while_all_nodes_live.py.
Not covered: verl itself, what while_all_nodes_live.py does with a signal (test_while_all_nodes_live.py), SSH and Slurm
themselves.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from .shell import RECIPES, ROOT, Machine
from .test_slurm import SBATCH, SCONTROL
from .test_slurm import SCRIPT as SLURM
from .test_ssh import PYTHON, SSH
from .test_ssh import SCRIPT as SSH_SCRIPT

RECIPE = "recipes/acpo/run_qwen2.5_3b_fsdp.sh"
SCRIPTS = sorted(path for path in RECIPES.glob("*/run_*.sh") if path.parent.name != "cluster")
QUICKSTART = ROOT / "scripts" / "quickstart.sh"
SIGNALS = ("SIGHUP", "SIGINT", "SIGTERM")

# Notes its number and that of the signal that ends it, in files; ends by itself after a minute.
TRAINING = f"""exec {sys.executable} -S -E -c '
import os, signal, sys, time
home = os.environ["HOME"]
def end(number, _):
    with open(home + "/ended", "a") as file:
        file.write(signal.Signals(number).name)
    sys.exit(128 + number)
for name in ("SIGHUP", "SIGINT", "SIGTERM"):
    signal.signal(getattr(signal, name), end)
with open(home + "/part", "w") as file:
    file.write(str(os.getpid()))
os.rename(home + "/part", home + "/running")
time.sleep(60)
'"""


class Started:
    """A script that runs until its stand-in for a training does.

    Args:
        machine: whose home the stand-in writes to.
        script, words, variables: as for `Machine.run`.
    """

    def __init__(self, machine, script, *words, **variables):
        self.home = machine.commands.parent
        environment = machine.environment(**{"PREFLIGHT": "0", **variables})
        self.process = subprocess.Popen(
            ["bash", str(script), *words],
            cwd=ROOT,
            env=environment,
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

    def kill(self):
        """Kills the script alone, which can end nothing then, and waits for the training's end: what it noted."""
        try:
            self.process.kill()
            self.process.wait(timeout=30)
            with suppress(psutil.NoSuchProcess):
                self.training.wait(timeout=30)
            return (self.home / "ended").read_text()
        finally:
            with suppress(psutil.NoSuchProcess):
                self.training.kill()
            self.process.stdout.close()

    def send(self, name):
        """Sends a signal to the script alone, and waits for its end: exit code, and the signals that were noted."""
        try:
            self.process.send_signal(signal.Signals[name])
            self.process.wait(timeout=30)
            with suppress(psutil.NoSuchProcess):
                assert not self.training.is_running(), "the training goes on"
            return self.process.returncode, (self.home / "ended").read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.stdout.close()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path / "machine", python3=TRAINING)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_recipe_is_verl_in_the_end(machine, tmp_path, script):
    assert Started(machine, script, RUN_FOLDER=str(tmp_path / "run")).send("SIGTERM") == (143, "SIGTERM")


@pytest.mark.parametrize("name", SIGNALS)
def test_each_signal_reaches_verl(machine, tmp_path, name):
    code, noted = Started(machine, ROOT / RECIPE, RUN_FOLDER=str(tmp_path / "run")).send(name)
    assert (code, noted) == (128 + signal.Signals[name], name)


@pytest.fixture
def by_ssh(tmp_path):
    """A run that ssh.sh has started, in the folder `workdir`."""
    training = PYTHON.replace("*) exit 9 ;;", f"-m) {TRAINING} ;;")
    hosts = Machine(tmp_path / "machine", ssh=SSH, hostname="echo 10.0.0.1", python3=training)
    workdir = tmp_path / "workdir"
    workdir.mkdir()
    for folder in ("recipes", "configs"):
        (workdir / folder).symlink_to(ROOT / folder)
    words = ["PREFLIGHT=0", f"RUN_FOLDER={tmp_path / 'run'}", RECIPE]
    return Started(hosts, SSH_SCRIPT, "run", *words, HOSTS="node1 node2", WORKDIR=str(workdir))


@pytest.mark.parametrize("name", [*SIGNALS, "SIGKILL"])
def test_a_run_by_ssh_ends_on_its_host(by_ssh, tmp_path, name):
    if name == "SIGKILL":
        assert by_ssh.kill() == "SIGTERM"
    else:
        assert by_ssh.send(name) == (143, "SIGTERM")
    assert list((tmp_path / "workdir" / "runs").iterdir()) == []


@pytest.mark.parametrize("name", SIGNALS)
def test_a_slurm_job_ends_its_step_and_stays_ended(tmp_path, name):
    srun = f'[[ $* != *"hostname -I"* ]] || {{ echo 10.0.0.7; exit; }}\n{TRAINING}'
    cluster = Machine(tmp_path / "machine", sbatch=SBATCH, scontrol=SCONTROL, srun=srun)
    # A later start: a first one is not put back into the queue anyway.
    started = Started(cluster, cluster.commands / "sbatch", str(SLURM), RECIPE, SLURM_RESTART_COUNT="1")
    assert started.send(name) == (143, "SIGTERM")
    assert not any(call[:2] == ["scontrol", "requeue"] for call in cluster.calls)


@pytest.mark.parametrize(("name", "stage"), [("SIGHUP", "policy"), ("SIGINT", "training"), ("SIGTERM", "training")])
def test_the_quick_start_ends_what_it_runs(tmp_path, name, stage):
    python = f"[[ $* != *.policy* ]] || {TRAINING}" if stage == "policy" else "echo policy"
    machine = Machine(tmp_path / "venv", python=python, clipx="", python3=TRAINING)
    started = Started(machine, QUICKSTART, VENV=str(tmp_path / "venv"), RUNS=str(tmp_path / "runs"))
    assert started.send(name) == (128 + signal.Signals[name], "SIGTERM")
    assert [call for call in machine.calls if call[1:2] == ["report"]] == []


@pytest.mark.parametrize("stage", ["policy", "training"])
def test_a_killed_quick_start_leaves_no_training(tmp_path, stage):
    python = f"[[ $* != *.policy* ]] || {TRAINING}" if stage == "policy" else "echo policy"
    machine = Machine(tmp_path / "venv", python=python, clipx="", python3=TRAINING)
    assert Started(machine, QUICKSTART, VENV=str(tmp_path / "venv"), RUNS=str(tmp_path / "runs")).kill() == "SIGTERM"


def test_a_killed_slurm_job_leaves_no_step(tmp_path):
    srun = f'[[ $* != *"hostname -I"* ]] || {{ echo 10.0.0.7; exit; }}\n{TRAINING}'
    cluster = Machine(tmp_path / "machine", sbatch=SBATCH, scontrol=SCONTROL, srun=srun)
    assert Started(cluster, cluster.commands / "sbatch", str(SLURM), RECIPE).kill() == "SIGTERM"


# A recipe under the guard against lost nodes.
GUARD = f"""
import runpy, sys
guard = runpy.run_path({str(RECIPES / "cluster" / "while_all_nodes_live.py")!r})
guard["run"](["training"], [sys.executable, "-c", "import time; time.sleep(60)"])
"""


def test_a_killed_guard_leaves_no_training(tmp_path):
    machine = Machine(tmp_path / "machine", training=TRAINING)
    script = tmp_path / "launch.sh"
    (tmp_path / "launch.py").write_text(GUARD)
    script.write_text(f"exec {sys.executable} {tmp_path / 'launch.py'}")
    assert Started(machine, script, PYTHONPATH=str(ROOT)).kill() == "SIGTERM"
