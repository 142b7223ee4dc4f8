"""A run over two Ray nodes that loses one of them and goes on, through the real verl.

Covers: two nodes with addresses, raylets, workers and rollout servers of their own form one cluster with a secret; the
ranks are on different nodes; the raylet of one is killed in the middle of a step, and the run ends by itself with an
error; the node starts again, and the same command goes on from the checkpoint, repeats the step after it with the same
numbers, and finishes; no process is left. Not covered: a network between the nodes, disks that they don't share, NCCL,
the loss of the head node, other numbers of nodes. Needs Linux.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pandas
import pytest

from verl_clipx.controllers.acpo import AcpoController

from .process_tree import kill_tree
from .ray_nodes import HEAD, REPOSITORY, ray_cluster, seconds_until
from .runs import SECONDS, launch, metrics_of, output_of, read_run_log, step_is_logged

pytestmark = pytest.mark.end_to_end

OTHER = "127.0.0.3"
SAVED, LOGGED, LAST = 2, 3, 4
SECONDS_TO_FAIL = 180
TOLERANCE = 1e-5


@dataclass
class Rehearsal:
    """What was seen of the two runs.

    Args:
        checkpoints: of both.
        node_ids: Ray's id of each node, by address, while the first run trained.
        processes: process ids of each node, by address, at the same time.
        ranks: what each rank wrote about itself.
        killed: log of the first run; code, seconds and output of its end.
        latest: the checkpoint from which the second one goes on.
        resumed: log of the second run; code and output of its end.
    """

    checkpoints: Path
    node_ids: dict[str, str] = field(default_factory=dict)
    processes: dict[str, set[int]] = field(default_factory=dict)
    ranks: list[dict] = field(default_factory=list)
    killed: pandas.DataFrame | None = None
    killed_code: int | None = None
    killed_after: float | None = None
    killed_output: str = ""
    latest: str = ""
    resumed: pandas.DataFrame | None = None
    resumed_code: int | None = None
    resumed_output: str = ""


def overrides(folder: Path) -> list[str]:
    return [
        *("trainer.nnodes=2", "trainer.n_gpus_per_node=1"),
        # The cluster is there already: Ray refuses to be told again what it has.
        *(f"ray_kwargs.ray_init.{key}=null" for key in ("num_gpus", "num_cpus", "object_store_memory")),
        # The trainer may run on any node.
        f"+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH={metrics_of(folder)}",
        *("+clipx=acpo", "clipx.scope=lagged", "clipx.lagged_average=0.5", "+clipx/rollout=seeded"),
        "actor_rollout_ref.actor.optim.lr=3e-4",
        *(f"trainer.save_freq={SAVED}", "trainer.resume_mode=auto"),
    ]


@pytest.fixture(scope="module")
def rehearsal(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_nodes")
    seen = Rehearsal(folder / "checkpoints")
    environment = {
        "PYTHONPATH": str(REPOSITORY),
        "VERL_USE_EXTERNAL_MODULES": "tests.end_to_end.rank_location",
        "RANK_LOCATIONS": str(folder),
    }
    with ray_cluster(**environment) as cluster:

        def start():
            variables = {**cluster.environment, "RAY_ADDRESS": cluster.address}
            return launch(task, folder, *overrides(folder), steps=LAST, environment=variables)

        def end(process, deadline):
            if (seconds := seconds_until(lambda: process.poll() is not None, deadline, poll=0.1)) is None:
                pytest.fail(f"still there after {deadline} s\n{output_of(folder)[-6000:]}\n{cluster.logs()}")
            return seconds

        def logged(process, step):
            seconds_until(lambda: step_is_logged(step)(folder) or process.poll() is not None, SECONDS)
            assert step_is_logged(step)(folder), f"no step {step}\n{output_of(folder)[-6000:]}\n{cluster.logs()}"

        cluster.start(HEAD, OTHER)
        process = start()
        try:
            logged(process, 1)
            seen.node_ids = {address: node.node_id() for address, node in cluster.nodes.items()}
            for address, node in cluster.nodes.items():
                seen.processes[address] = {found.pid for found in node.processes()}
            seen.ranks = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1)]
            logged(process, LOGGED)
            cluster.nodes[OTHER].raylet().kill()
            seen.killed_after = end(process, SECONDS_TO_FAIL)
            # The second start empties the log of metrics and the output.
            seen.killed, seen.killed_code = read_run_log(metrics_of(folder)), process.returncode
            seen.killed_output = output_of(folder)
            seen.latest = (seen.checkpoints / "latest_checkpointed_iteration.txt").read_text()

            kill_tree(cluster.nodes[OTHER].process.pid)
            cluster.start(OTHER)
            process = start()
            end(process, SECONDS)
            seen.resumed_code, seen.resumed_output = process.returncode, output_of(folder)
            assert seen.resumed_code == 0, f"{seen.resumed_output[-6000:]}\n{cluster.logs()}"
            seen.resumed = read_run_log(metrics_of(folder))
        finally:
            kill_tree(process.pid)
            process.wait()
    return seen


def saved_state(rehearsal, step):
    return json.loads((rehearsal.checkpoints / f"global_step_{step}" / "actor" / "clipx_state.json").read_text())


def test_the_ranks_are_on_different_nodes(rehearsal):
    assert rehearsal.node_ids[HEAD] != rehearsal.node_ids[OTHER]
    assert {rank["address"] for rank in rehearsal.ranks} == {HEAD, OTHER}
    for rank in rehearsal.ranks:
        assert rank["world_size"] == 2
        assert rank["node_id"] == rehearsal.node_ids[rank["address"]]
        assert rank["pid"] in rehearsal.processes[rank["address"]]
    for rank in (0, 1):
        assert (rehearsal.checkpoints / "global_step_2" / "actor" / f"model_world_size_2_rank_{rank}.pt").is_file()


def test_a_lost_node_ends_the_run_with_an_error(rehearsal):
    assert list(rehearsal.killed.index) == list(range(1, LOGGED + 1))
    assert rehearsal.killed_code == 1
    assert "Error" in rehearsal.killed_output.splitlines()[-1] or "Traceback" in rehearsal.killed_output
    assert rehearsal.latest == str(SAVED)


def test_the_same_command_goes_on_from_the_checkpoint(rehearsal):
    assert f"global_step_{SAVED}" in rehearsal.resumed_output
    assert list(rehearsal.resumed.index) == list(range(SAVED + 1, LAST + 1))
    assert (rehearsal.checkpoints / "latest_checkpointed_iteration.txt").read_text() == str(LAST)
    # Two updates a step: the state goes on counting where the file ended.
    assert [saved_state(rehearsal, step)["step"] for step in (SAVED, LAST)] == [2 * SAVED, 2 * LAST]


def test_the_step_after_the_checkpoint_is_the_lost_one(rehearsal):
    names = [name for name in rehearsal.killed if "clipx/epsilon" in name or "clipx/sigma" in name]
    names += ["actor/ppo_kl", "actor/grad_norm", "critic/rewards/mean"]
    difference = (rehearsal.killed.loc[LOGGED, names] - rehearsal.resumed.loc[LOGGED, names]).abs()
    assert (difference < TOLERANCE).all(), difference


def test_its_bounds_are_those_of_the_file(rehearsal):
    import torch

    controller = AcpoController()
    statistics = saved_state(rehearsal, SAVED)["statistics"]
    decisions = [
        controller.decide(torch.tensor(statistics[name], dtype=torch.float64)) for name in ("update_0", "update_1")
    ]
    for index in range(5):
        expected = sum(float(decision[5 + index]) for decision in decisions) / 2
        assert rehearsal.resumed.loc[LOGGED, f"actor/clipx/epsilon/bin_{index}"] == pytest.approx(expected, rel=1e-9)
