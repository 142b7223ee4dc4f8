"""A cluster's nodes: waiting for them, and ending a run whose cluster has lost one, with real processes and a stand-in
for Ray. Not covered: Ray (tests/end_to_end/test_two_nodes.py).
"""

import importlib.util
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml

from .shell import RECIPES

SCRIPT = RECIPES / "cluster" / "while_all_nodes_live.py"
spec = importlib.util.spec_from_file_location("while_all_nodes_live", SCRIPT)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

wait_for_nodes = runpy.run_path(str(RECIPES / "cluster" / "wait_for_nodes.py"))["wait_for_nodes"]

NEVER_ENDS = ["sleep", "600"]


def test_the_launchers_know_the_exit_code():
    assert f"\nLOST_NODE={module.LOST_NODE}\n" in (RECIPES / "cluster" / "payload.sh").read_text()
    task = yaml.safe_load((RECIPES / "cluster" / "sky.yaml").read_text())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [module.LOST_NODE]


def python(code):
    return [sys.executable, "-c", code]


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_where_no_node_is_lost_the_exit_code_is_the_commands(monkeypatch):
    monkeypatch.setattr(module, "SECONDS_TO_NOTICE", 0.2)
    for command, code in (("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", 137)):
        assert module.run(["sh", "-c", command], NEVER_ENDS) == code


@pytest.mark.slow
def test_a_lost_node_ends_the_command_and_what_it_started(tmp_path):
    child = tmp_path / "child"
    command = ["sh", "-c", f"sleep 600 & echo $! >{child}; wait"]
    watch = ["sh", "-c", f"until [ -s {child} ]; do sleep 0.05; done"]
    assert module.run(command, watch) == 75
    assert not is_alive(int(child.read_text()))


def test_what_ignores_the_first_signal_is_killed(tmp_path):
    ready = tmp_path / "ready"
    stubborn = "import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    process = subprocess.Popen(python(f"{stubborn} pathlib.Path({str(ready)!r}).touch(); time.sleep(600)"))
    wait_until(ready.exists)
    module.end_trees(process, seconds=0.3)
    assert not is_alive(process.pid)


@pytest.mark.slow
def test_a_command_may_fail_of_a_lost_node_before_ray_notices():
    assert module.run(["sh", "-c", "exit 1"], ["sleep", "0.5"]) == 75
    # A run that has finished has finished.
    assert module.run(["true"], ["sleep", "1"]) == 0


def test_without_a_watcher_the_command_goes_on(capfd):
    assert module.run(["sh", "-c", "sleep 1; exit 4"], ["sh", "-c", "exit 9"]) == 4
    assert "nothing watches for lost nodes any more, because the watcher ended with 9" in capfd.readouterr().err


@pytest.fixture
def cluster(tmp_path):
    """Variables under which the script sees two living nodes; the file that says so."""
    shutil.copy(Path(__file__).with_name("stand_ins") / "ray.py", tmp_path)
    nodes = tmp_path / "nodes"
    nodes.write_text("a b")
    variables = {"PYTHONPATH": str(tmp_path), "RAY_ADDRESS": "head:6379", "NODES": str(nodes)}
    return {**os.environ, **variables}, nodes


@pytest.mark.slow
@pytest.mark.parametrize("event", ["a node is lost", "SIGHUP", "SIGINT", "SIGTERM"])
def test_a_lost_node_or_a_signal_ends_the_script_and_all_it_started(cluster, tmp_path, event):
    variables, nodes = cluster
    started = tmp_path / "started"
    command = python(f"open({str(started)!r}, 'w').write('x'); import time; time.sleep(600)")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    script = subprocess.Popen([sys.executable, str(SCRIPT), *command], env=variables, **pipes)
    wait_until(lambda: started.exists() and started.read_text())
    children = psutil.Process(script.pid).children()
    assert len(children) == 2
    if event == "a node is lost":
        wait_until(nodes.with_name("nodes_seen").exists)
        nodes.write_text("a")
        output, error = script.communicate(timeout=30)
        assert (script.returncode, output) == (75, "lost: b\n")
        assert "a node was lost, so the run is ended" in error
    else:
        script.send_signal(signal.Signals[event])
        script.communicate(timeout=30)
        assert script.returncode == 128 + signal.Signals[event]
    assert not any(is_alive(child.pid) for child in children)


def list_nodes(*addresses, dead=""):
    """Nodes as Ray lists them."""
    return [{"NodeManagerAddress": address, "Alive": address not in dead} for address in addresses]


def let_ray_answer(monkeypatch, *answers):
    """Lets Ray list these nodes, one list after the other; returns the addresses that were joined."""
    remaining_answers = iter(answers)
    joined_addresses = []
    ray = SimpleNamespace(
        init=lambda address, **_: joined_addresses.append(address), nodes=lambda: next(remaining_answers)
    )
    monkeypatch.setitem(wait_for_nodes.__globals__, "ray", ray)
    return joined_addresses


def test_it_waits_until_enough_nodes_are_alive(monkeypatch):
    answers = [list_nodes("b"), list_nodes("b", "a", dead="a"), list_nodes("b", "a")]
    joined_addresses = let_ray_answer(monkeypatch, *answers)
    assert wait_for_nodes("b:6379", 2, seconds=30, poll=0) == ["a", "b"] and joined_addresses == ["b:6379"]


def test_at_the_deadline_it_names_the_nodes_that_came(monkeypatch):
    let_ray_answer(monkeypatch, list_nodes("a", "b", "c", dead="b"))
    with pytest.raises(TimeoutError, match=r"2 of 3 nodes joined a:6379 within 0 s: a, c"):
        wait_for_nodes("a:6379", 3, seconds=0)
