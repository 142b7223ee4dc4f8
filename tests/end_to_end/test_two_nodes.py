"""A run over two Ray nodes that loses one of them and goes on, through the real verl.

Covers, only with `-m matrix`: a head and two nodes, each with an address, a raylet, workers and a rollout server of its
own, form one cluster with a secret; the two ranks are on different nodes; the raylet of one is killed in the middle of
a step: of the one without verl's trainer, where verl by itself may wait for what the node held, or of the trainer's.
The launchers' while_all_nodes_live.py ends the run and names the node. The node starts again, and the same command goes
on from the checkpoint, repeats the step after it with the same numbers, bounds and greedy answers, and finishes; no
process is left; `lagged` bounds, of a user's own controller, move at update 2 of 2. Not covered: a network between the
nodes, disks that they don't share, NCCL, the loss of the head, other numbers of nodes. Needs Linux.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from verl_clipx.loss.user_method import load_method
from verl_clipx.runs.run_log import read_run_log

from .process_tree import kill_tree
from .ray_nodes import HEAD, NODES, ON_TWO_NODES, REPOSITORY, Cluster, ray_cluster
from .runs import (
    SECONDS,
    Run,
    finding,
    growing_rows,
    growing_run,
    launch,
    loading,
    metrics_of,
    output_of,
    state_in,
    write_documented_method,
)

pytestmark = [pytest.mark.end_to_end, pytest.mark.matrix]

TRAINER = "TaskRunner"
CASES = ("without the trainer", "with the trainer")
SAVED, LOGGED, LAST = 2, 3, 4
LATEST = "latest_checkpointed_iteration.txt"
SECONDS_TO_END = 120
GUARD = (sys.executable, str(REPOSITORY / "recipes" / "cluster" / "while_all_nodes_live.py"))
LOST_NODE = 75
TOLERANCE = 1e-5
MOVING = ("actor/ppo_kl", "actor/kl_loss", "actor/entropy", "actor/grad_norm")


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a run were: what each found out about itself; Ray's id and the processes of each node, by its
    address."""

    ranks: list[dict]
    node_ids: dict[str, str]
    processes: dict[str, set[int]]


@dataclass(frozen=True)
class Rehearsal:
    """What was seen of a run that lost a node, and of the same command afterwards, in one folder.

    Args:
        lost: address of the node.
        before, after: where the two runs were.
        users: processes that had a file in the cluster's folder open during the first run.
        killed: the first run, its log and output moved elsewhere.
        saved: the latest checkpoint when it ended.
    """

    folder: Path
    lost: str
    before: Placement
    after: Placement
    users: set[int]
    killed: Run
    exit_code: int
    saved: str
    resumed: Run


def overrides(folder: Path) -> list[str]:
    return [
        *ON_TWO_NODES,
        # The trainer may be on any node.
        f"+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH={metrics_of(folder)}",
        *("+clipx=custom", "clipx.function=spread_clip:SpreadClip"),
        *("+clipx.scope=lagged", "+clipx.lagged_average=0.5"),
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
    process = launch(task, folder, *overrides(folder), steps=LAST, environment=cluster.variables, before=GUARD)
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

    def wait_for_ranks(self) -> None:
        """Returns when both ranks have written down where they are, before the first step."""
        self._wait_for("ranks", lambda: all((self.folder / f"rank_{rank}.json").exists() for rank in (0, 1)))

    def wait_for_step(self, step: int) -> None:
        """Returns as soon as the step is logged, so that the next one is under way."""
        self._wait_for(f"step {step}", lambda: step in growing_rows(metrics_of(self.folder)))

    def _wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert self.process.poll() is None, f"exit code {self.process.returncode}{self.ends()}"
            assert time.monotonic() < deadline, f"no {what} within {SECONDS} s{self.ends()}"
            time.sleep(0.01)

    def wait_for_end(self, seconds: float) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still there after {seconds} s{self.ends()}")

    def ends(self) -> str:
        return f"\n{output_of(self.folder)[-6000:]}\n{self.cluster.logs()}"


def placement(cluster: Cluster, folder: Path) -> Placement:
    return Placement(
        [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1)],
        {address: cluster.nodes[address].node_id() for address in NODES},
        {address: {process.pid for process in cluster.nodes[address].processes()} for address in NODES},
    )


@pytest.fixture(scope="module", params=CASES)
def rehearsal(request, task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_nodes")
    where = finding(write_documented_method(folder))
    environment = loading("rank_location") | where | {"RANK_LOCATIONS": str(folder)}
    with ray_cluster(**environment) as cluster:
        cluster.start(HEAD)
        cluster.start(*NODES)
        with running(task, folder, cluster) as run:
            run.wait_for_ranks()
            before, users = placement(cluster, folder), {user.pid for user in cluster.users()}
            (trainer,) = [address for address in NODES if cluster.nodes[address].runs(TRAINER)]
            (lost,) = {trainer} if request.param == "with the trainer" else set(NODES) - {trainer}
            run.wait_for_step(LOGGED)
            cluster.nodes[lost].raylet().kill()
            exit_code = run.wait_for_end(SECONDS_TO_END)
        # What the second run is to write must not be there from the first.
        kept = folder / "killed"
        kept.mkdir()
        for path in (metrics_of(folder), folder / "run.log", *folder.glob("rank_*.json")):
            shutil.move(path, kept)
        killed = growing_run(kept)
        saved = (folder / "checkpoints" / LATEST).read_text()

        cluster.start(lost)
        with running(task, folder, cluster) as run:
            run.wait_for_ranks()
            after = placement(cluster, folder)
            code = run.wait_for_end(SECONDS)
            assert code == 0, f"exit code {code}{run.ends()}"
        resumed = Run(read_run_log(metrics_of(folder)), output_of(folder), folder)
    return Rehearsal(folder, lost, before, after, users, killed, exit_code, saved, resumed)


def test_the_ranks_are_on_different_nodes(rehearsal):
    for placement in (rehearsal.before, rehearsal.after):
        assert len(set(placement.node_ids.values())) == 2
        assert [rank["address"] for rank in placement.ranks] == list(NODES)
        for rank in placement.ranks:
            assert rank["world_size"] == 2
            assert rank["node_id"] == placement.node_ids[rank["address"]]
            assert rank["pid"] in placement.processes[rank["address"]]


def test_the_lost_node_is_a_new_one_afterwards(rehearsal):
    for address in NODES:
        same = rehearsal.before.node_ids[address] == rehearsal.after.node_ids[address]
        assert same == (address != rehearsal.lost)
    assert rehearsal.before.processes[rehearsal.lost].isdisjoint(rehearsal.after.processes[rehearsal.lost])


def test_a_lost_node_ends_the_run_and_is_named(rehearsal):
    assert rehearsal.exit_code == LOST_NODE
    assert f"lost: {rehearsal.lost}\n" in rehearsal.killed.output
    assert list(rehearsal.killed.log.index) == list(range(LOGGED + 1))
    assert rehearsal.saved == str(SAVED)


def test_the_same_command_goes_on_from_the_checkpoint_to_the_end(rehearsal):
    assert list(rehearsal.resumed.log.index) == list(range(SAVED, LAST + 1))
    assert (rehearsal.folder / "checkpoints" / LATEST).read_text() == str(LAST)
    # Two updates a step: the state counts on from where the file ended.
    assert [state_in(rehearsal.folder, step)["step"] for step in (SAVED, LAST)] == [2 * SAVED, 2 * LAST]


def test_the_step_after_the_checkpoint_is_the_one_that_was_lost(rehearsal):
    lost, repeated = rehearsal.killed.log.loc[LOGGED], rehearsal.resumed.log.loc[LOGGED]
    names = ["actor/clipx/spread", *MOVING, "critic/rewards/mean", "response_length/mean"]
    difference = (lost[names] - repeated[names]).abs()
    assert (difference < TOLERANCE).all(), difference


def test_every_step_learns_and_has_its_own_metrics(rehearsal):
    # Otherwise equality would mean little.
    table = rehearsal.killed.log.loc[range(1, LOGGED + 1), list(MOVING)]
    assert table.nunique().min() == LOGGED
    assert (table.abs() > 10 * TOLERANCE).all(axis=None), table


def test_the_resumed_policy_answers_as_the_saved_one_did(rehearsal):
    killed, resumed = rehearsal.killed.log, rehearsal.resumed.log
    (validated,) = [name for name in killed if name.startswith("val-core/")]
    # Greedy validation.
    assert resumed.loc[SAVED, validated] == pytest.approx(killed.loc[SAVED, validated], abs=1e-9)


def test_lagged_bounds_move_at_the_second_update(rehearsal):
    spread = rehearsal.killed.log["actor/clipx/spread"]
    # No history in the first rollout batch, then the second update's own statistics of the rollout batches before.
    assert spread[1] == pytest.approx(0, abs=1e-9)
    assert spread[2] > 1e-3 and spread[3] > 1e-3
    statistics = state_in(rehearsal.folder, SAVED)["statistics"]
    assert sorted(statistics) == ["update_0", "update_1"]
    # Sums of squared log-ratios: at the first update the ratio is 1.
    assert statistics["update_0"][2] < 1e-6 < statistics["update_1"][2]


def test_its_bounds_are_those_of_the_state_in_the_checkpoint(rehearsal, monkeypatch):
    monkeypatch.syspath_prepend(rehearsal.folder)
    method, statistics = load_method("spread_clip:SpreadClip")(), state_in(rehearsal.folder, SAVED)["statistics"]
    positions = ("update_0", "update_1")
    decisions = [method.decide(torch.tensor(statistics[name], dtype=torch.float64)) for name in positions]
    found = rehearsal.resumed.log.loc[SAVED + 1, "actor/clipx/spread"]
    assert found == pytest.approx(sum(float(decision) for decision in decisions) / 2, rel=1e-9)


def test_the_search_for_processes_that_are_left_finds_those_of_the_nodes(rehearsal):
    assert {rank["pid"] for rank in rehearsal.before.ranks} < rehearsal.users
