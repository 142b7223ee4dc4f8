"""A run over two Ray nodes that loses one of them and goes on, through the real verl, with `-m matrix`. Covers: a
cluster with a secret and a rank on each of two nodes; the raylet of one, with verl's trainer or without, is killed in
the middle of a step; the launchers' while_all_nodes_live.py ends the run and names the node; the same command repeats
the lost step and finishes; `lagged` bounds of a user's own controller. Not covered: a network between the nodes, disks
that they don't share, NCCL, the loss of the head. Needs Linux.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from verl_clipx.analysis.runs.run_log import read_run_log

from .ray_nodes import HEAD, NODES, Cluster, ray_cluster
from .runs import (
    REPOSITORY,
    SECONDS,
    Run,
    environment_with,
    growing_rows,
    growing_run,
    kill_tree,
    launch,
    metrics_of,
    output_of,
    write_documented_method,
)
from .test_resume import MOVING_METRICS, TOLERANCE, check_that_every_step_learns, check_that_it_answers_alike

pytestmark = [pytest.mark.end_to_end, pytest.mark.matrix]

# As Ray shows its actors: verl's trainer, and a rank.
TRAINER = "ray::TaskRunner"
RANK = "ray::WorkerDict"
CASES = ("without the trainer", "with the trainer")
# Steps: the last saved one before the node is lost, the last logged one, and the last of the run.
SAVED = 2
LOGGED = 3
LAST = 4
LATEST = "latest_checkpointed_iteration.txt"
SECONDS_TO_END = 120
END_WHEN_A_NODE_IS_LOST = (sys.executable, str(REPOSITORY / "recipes" / "cluster" / "while_all_nodes_live.py"))
CODE_OF_A_LOST_NODE = 75


def overrides(folder: Path) -> list[str]:
    return [
        *("trainer.nnodes=2", "trainer.n_gpus_per_node=1"),
        # Ray refuses to be told what a cluster has that is there already.
        *(f"ray_kwargs.ray_init.{key}=null" for key in ("num_gpus", "num_cpus", "object_store_memory")),
        # TransferQueue would otherwise place its storage on any node, also on the head, which has no CPUs.
        "+transfer_queue.backend.SimpleStorage.required_node_resource=GPU",
        # The trainer may be on any node.
        f"+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH={metrics_of(folder)}",
        *("+clipx=custom", "clipx.function=spread_clip:SpreadClip"),
        "+clipx.scope=lagged",
        "+clipx/rollout=seeded",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.calculate_entropy=True",
        f"trainer.save_freq={SAVED}",
        f"trainer.test_freq={SAVED}",
        # A run that resumes begins with what the saved one ended with.
        "trainer.val_before_train=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=0",
        "trainer.resume_mode=auto",
    ]


@contextmanager
def running(task, folder: Path, cluster: Cluster) -> Iterator["Running"]:
    """The one command of this module, from its start to its end or that of the block."""
    process = launch(
        task, folder, *overrides(folder), steps=LAST, environment=cluster.variables, before=END_WHEN_A_NODE_IS_LOST
    )
    try:
        yield Running(process, folder, cluster)
    finally:
        kill_tree(process.pid)
        process.wait()


@dataclass(frozen=True)
class Running:
    """A run under way; its methods fail, with the ends of all logs, when a deadline has passed."""

    process: subprocess.Popen
    folder: Path
    cluster: Cluster

    def wait_for_step(self, step: int) -> list[psutil.Process]:
        """Waits until a step is logged, the next one then being under way; returns the ranks, one on each node."""
        deadline = time.monotonic() + SECONDS
        while step not in growing_rows(metrics_of(self.folder)):
            assert self.process.poll() is None, f"exit code {self.process.returncode}{self.ends()}"
            assert time.monotonic() < deadline, f"no step {step} within {SECONDS} s{self.ends()}"
            time.sleep(0.01)
        ranks = [self.cluster.processes(address, RANK) for address in NODES]
        assert [len(ranks_of_node) for ranks_of_node in ranks] == [1, 1], ranks
        return [rank for (rank,) in ranks]

    def wait_for_end(self, seconds: float) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still there after {seconds} s{self.ends()}")

    def ends(self) -> str:
        return f"\n{output_of(self.folder)[-6000:]}\n{self.cluster.logs()}"


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_lost_a_node_goes_on(case, task, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with ray_cluster(**environment_with(write_documented_method(folder))) as cluster:
        cluster.start(HEAD)
        cluster.start(*NODES)
        with running(task, folder, cluster) as run:
            # The search for processes that are left, which ends every cluster here, finds those of the nodes.
            assert {*run.wait_for_step(LOGGED)} <= {*cluster.users()}
            (trainer,) = [address for address in NODES if cluster.processes(address, TRAINER)]
            (lost,) = {trainer} if case == "with the trainer" else set(NODES) - {trainer}
            (raylet,) = cluster.processes(lost, "raylet")
            raylet.kill()
            exit_code = run.wait_for_end(SECONDS_TO_END)
        # What the second run is to write must not be there from the first.
        kept = folder / "killed"
        kept.mkdir()
        for path in (metrics_of(folder), folder / "run.log"):
            shutil.move(path, kept)
        killed = growing_run(kept)
        saved = (folder / "checkpoints" / LATEST).read_text()

        cluster.start(lost)
        with running(task, folder, cluster) as run:
            run.wait_for_step(SAVED)
            code = run.wait_for_end(SECONDS)
            assert code == 0, f"exit code {code}{run.ends()}"
        resumed = Run(read_run_log(metrics_of(folder)), output_of(folder), folder)

    assert exit_code == CODE_OF_A_LOST_NODE and f"lost: {lost}\n" in killed.output
    assert list(killed.log.index) == list(range(LOGGED + 1)) and saved == str(SAVED)
    check_resumed(killed, resumed)


def check_resumed(killed: Run, resumed: Run) -> None:
    """The same command went on from the checkpoint to the end, and repeated the step that was lost."""
    assert list(resumed.log.index) == list(range(SAVED, LAST + 1))
    assert (resumed.folder / "checkpoints" / LATEST).read_text() == str(LAST)
    # Two updates a step: the state counts on from where the file ended.
    assert [resumed.state(step)["step"] for step in (SAVED, LAST)] == [2 * SAVED, 2 * LAST]
    names = ["actor/clipx/spread", *MOVING_METRICS, "critic/rewards/mean", "response_length/mean"]
    difference = (killed.log.loc[LOGGED, names] - resumed.log.loc[LOGGED, names]).abs()
    assert (difference < TOLERANCE).all(), difference
    check_that_every_step_learns(killed, LOGGED)
    check_that_it_answers_alike(killed, resumed, SAVED)
