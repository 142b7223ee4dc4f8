"""The tool that kills runs: which processes it kills, when, what it compares and records; with `-m matrix` a chain.

Covers: the kind of each process by its command line, the plan, moments of an earlier start, that a difference in any
part is found, the counts of several calls; one chain through the real verl. Not covered: the 40 kills, which
docs/reliability.md has.
"""

import json
import os
import shlex
import shutil
import subprocess
import time
from collections import Counter
from contextlib import suppress

import psutil
import pytest
import torch

from tests.common.test_traces import columns
from verl_clipx.common.traces import Shard, write_shard

from . import kill_runs
from .kill_runs import KILLS, MOMENTS, VICTIMS, End, Kill

# What the driver has started, by the names that Ray and verl give their processes.
NAMES = ["ray::TaskRunnerV1.run", "ray::WorkerDict", "ray::CPUServer", "ray::IDLE", "python -m verl.trainer.main_ppo"]
# A launcher whose command line holds the driver's, as that of `clipx watch` does.
TREE = f"""
for name in {shlex.join(NAMES)}; do
    bash -c "exec -a '$name' sleep 60" &
done
wait
"""


def all_have_their_names(launcher: int) -> bool:
    # A process between fork and exec has its parent's command line, or an empty one.
    with suppress(psutil.Error):
        children = psutil.Process(launcher).children()
        return sorted(" ".join(child.cmdline()[:1]) for child in children) == sorted(NAMES)
    return False


@pytest.fixture
def launcher():
    words = ["bash", "-c", TREE, "verl_clipx.cli watch -- python -m verl.trainer.main_ppo"]
    with subprocess.Popen(words, start_new_session=True) as process:
        deadline = time.monotonic() + 60
        while not all_have_their_names(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        yield process
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()


def test_each_kind_of_process_is_found_and_no_other(launcher):
    found = {kind: kill_runs.victims(launcher.pid, kind) for kind in VICTIMS}
    assert [process.pid for process in found["launcher"]] == [launcher.pid]
    assert [len(found[kind]) for kind in VICTIMS] == [1] * 5
    assert len({process.pid for processes in found.values() for process in processes}) == 5


def test_every_process_is_killed_at_every_moment_equally_often():
    planned = Counter(pair for chain in range(4) for pair in kill_runs.plan(0, chain))
    assert set(planned) == {(victim, moment) for victim in VICTIMS for moment in MOMENTS}
    assert {*planned.values()} == {2} and planned.total() == 4 * KILLS
    assert kill_runs.plan(0, 1) != kill_runs.plan(1, 1)


@pytest.mark.parametrize("moment", ["save", "trace"])
def test_what_an_earlier_start_wrote_is_no_moment(tmp_path, moment):
    name = {"save": "checkpoints/global_step_2/actor/model.pt", "trace": "traces/step_00000002_update_0000.parquet"}
    path = tmp_path / name[moment]
    path.parent.mkdir(parents=True)
    path.touch()
    os.utime(path, (1000, 1000))
    assert not kill_runs.has_come(tmp_path, moment, 2, 1001)
    assert not kill_runs.has_come(tmp_path, moment, 3, 999)
    assert kill_runs.has_come(tmp_path, moment, 2, 999)


@pytest.fixture
def finished(tmp_path):
    """The files of a finished run."""
    folder, saved = tmp_path / "run", tmp_path / "run" / "checkpoints" / f"global_step_{kill_runs.STEPS}"
    (saved / "actor").mkdir(parents=True)
    values = {"actor/entropy": 0.5, "timing_s/gen": 1.0}
    lines = [json.dumps({"step": step, "data": values}) for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    write_shard(folder / "traces", Shard(1, 0, 0), {**columns(4), "group": [7, 7, 5, 5]})
    (folder / "validation").mkdir()
    (folder / "validation" / "1.jsonl").write_text('{"output": "right", "uid": "a"}\n{"output": "wrong", "uid": "b"}\n')
    torch.save({"layer": torch.ones(3)}, saved / "actor" / "model_world_size_1_rank_0.pt")
    (saved / "actor" / "clipx_state.json").write_text(json.dumps({"statistics": {"update_0": [1.0, 2.0]}}))
    return folder


def rewritten(old, new):
    return lambda path: path.write_text(path.read_text().replace(old, new))


CHECKPOINT = f"checkpoints/global_step_{kill_runs.STEPS}/actor"
CHANGES = {
    "actor/entropy": ("metrics.jsonl", rewritten("0.5", "0.5001")),
    "traces: Shard(step=1, update=0, rank=0)": (
        "traces",
        lambda path: write_shard(path, Shard(1, 0, 0), {**columns(4), "group": [7, 7, 7, 5]}),
    ),
    "validation: 1.jsonl": ("validation/1.jsonl", rewritten("right", "left")),
    "checkpoint: model_world_size_1_rank_0.pt/layer": (
        f"{CHECKPOINT}/model_world_size_1_rank_0.pt",
        lambda path: torch.save({"layer": torch.tensor([1, 1, 1.001])}, path),
    ),
    "checkpoint: state of the bounds/statistics/update_0/1": (
        f"{CHECKPOINT}/clipx_state.json",
        rewritten("2.0", "2.001"),
    ),
    "validation: 2.jsonl": ("validation/2.jsonl", lambda path: path.write_text("{}")),
}


@pytest.mark.parametrize("part", CHANGES)
def test_a_difference_in_any_part_is_found(finished, tmp_path, part):
    other = shutil.copytree(finished, tmp_path / "other")
    # What differs between any two runs: times, and the random names of groups and prompts.
    rewritten('"timing_s/gen": 1.0', '"timing_s/gen": 2.0')(other / "metrics.jsonl")
    write_shard(other / "traces", Shard(1, 0, 0), {**columns(4), "group": [3, 3, 9, 9]})
    (other / "validation" / "1.jsonl").write_text('{"output": "wrong", "uid": "c"}\n{"output": "right", "uid": "d"}\n')
    assert kill_runs.different(kill_runs.parts_of(finished), kill_runs.parts_of(other)) == []
    name, change = CHANGES[part]
    change(other / name)
    assert kill_runs.different(kill_runs.parts_of(finished), kill_runs.parts_of(other)) == [part]


def test_kills_of_several_calls_add_up_and_those_that_nothing_was_compared_after_do_not_count(tmp_path):
    record = tmp_path / "kills.jsonl"
    for seed, chain in ((0, 0), (0, 0), (0, 1), (1, 0)):
        kill_runs.append(record, Kill(seed, chain, "worker", "save", 3, 1, 2.5, int(seed)))
    for seed, found in ((0, []), (1, ["actor/entropy"])):
        kill_runs.append(record, End(seed, 0, 100, found))
    told = kill_runs.summary(*kill_runs.read_record(record))
    assert told == "3 kills in 2 chains; 200 parts compared, 1 differ; 1 runs hung\nworker 3\nsave 3"


@pytest.mark.end_to_end
@pytest.mark.matrix
def test_a_killed_run_ends_as_one_that_was_not(tmp_path, monkeypatch):
    monkeypatch.setattr(kill_runs, "STEPS", 4)
    assert kill_runs.main([str(tmp_path), "--kills", "1"]) == 0
    kills, (end,) = kill_runs.read_record(tmp_path / "kills.jsonl")
    assert len(kills) == 1 and end.compared > 300 and end.different == []
