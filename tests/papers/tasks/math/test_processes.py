"""The comparison processes: verdicts, limits, deaths, threads, forks, and that none is left behind.

Not covered: Ray itself; its workers are processes that run the reward in threads and may be killed, which is tested.
"""

import logging
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from verl_clipx.papers.tasks.math import processes
from verl_clipx.papers.tasks.math.processes import MEMORY_BYTES, compare

# They pass the guards, and an unknown function leaves no value to refute them by: sympy simplifies each for minutes.
# A question is one, however many right answers it has.
ENDLESS = tuple((f"f(x)+{number}", "f(x)+(x+1)^{999}-(x+2)^{998}") for number in range(1, 17))
EQUAL = ((r"\sqrt{4}", "2"),)
# Seconds, in the place of five.
SHORT_LIMIT = 2


def is_alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def list_workers():
    """Return the processes that compare."""
    alive = [child for child in psutil.Process().children() if is_alive(child)]
    return [child for child in alive if "spawn_main" in str(child.cmdline())]


def wait_until_gone(waited_for, seconds=60.0):
    """Wait without reaping: pebble itself must see that its processes have ended."""
    deadline = time.monotonic() + seconds
    while any(is_alive(process) for process in waited_for):
        assert time.monotonic() < deadline, waited_for
        time.sleep(0.05)


def test_math_verify_decides():
    assert compare((("6", "2+4=6"),), False) is True
    assert compare((("6", "2+4=6"),), True) is False  # math-verify is not symmetric
    assert compare((("6", "2x=6"),), False) is False
    assert compare((("not math {{{", "\\"),), False) is None
    assert compare(((r"\sqrt{2}", r"\sqrt{3}"), (r"\sqrt{3}", r"3^{1/2}")), False) is True
    assert compare(((r"\sqrt{2}+", r"\sqrt{3}"), (r"\sqrt{2}", r"\sqrt{3}")), False) is None
    assert 1 <= len(list_workers()) <= processes.PROCESSES


@pytest.fixture
def short_limit(monkeypatch):
    assert processes.SECONDS == 5
    monkeypatch.setattr(processes, "SECONDS", SHORT_LIMIT)


def test_a_script_that_guards_nothing_runs_once(tmp_path):
    """Neither does it need `if __name__ == "__main__":`, nor is it run in the processes."""
    script = tmp_path / "score.py"
    script.write_text(
        "from verl_clipx.papers.tasks.math.reward import compute_score\n"
        "print('starts', flush=True)\n"
        "print(compute_score('math500', r'\\boxed{x+1}', '1+x')['score'])\n"
    )
    for command in ([script.name], ["-m", "score"]):
        result = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert result.stdout.split() == ["starts", "1.0"], result.stderr


@pytest.mark.slow
def test_an_endless_comparison_ends_alone(short_limit):
    """Its process is killed; others go on meanwhile, and what they wait is not counted against them."""
    assert compare(EQUAL, False) is True
    workers_before = list_workers()
    started = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        endless = threads.submit(compare, ENDLESS, False)
        quick = [threads.submit(compare, ((f"x+{index}", f"{index}+x"),), False) for index in range(20)]
        assert [comparison.result() for comparison in quick] == [True] * 20
        assert endless.result() is None
        assert SHORT_LIMIT < time.monotonic() - started < SHORT_LIMIT + 3
    assert compare(EQUAL, False) is True
    assert set(list_workers()) != set(workers_before)


@pytest.mark.slow
def test_memory_is_bounded():
    compare(EQUAL, False)
    for worker in list_workers():
        assert worker.rlimit(psutil.RLIMIT_AS)[0] < worker.memory_info().vms + 2 * MEMORY_BYTES
    # Some 10**11 digits, past the guards: out of memory or out of time, never equal, and the next comparison works.
    assert compare((("1", "(((9^{999})^{999})^{999})^{99}"),), False) in (None, False)
    assert compare(EQUAL, False) is True


@pytest.mark.slow
def test_processes_that_died_or_stopped_hold_nothing_up(short_limit):
    assert compare(EQUAL, False) is True
    idle = list_workers()
    for worker in idle:
        worker.kill()
    wait_until_gone(idle)
    assert compare(EQUAL, False) is True  # it costs no verdict
    # The kernel's timer cannot end a busy process that is stopped, pebble can.
    verdicts = []
    busy = threading.Thread(target=lambda: verdicts.append(compare(ENDLESS, False)))
    busy.start()
    time.sleep(0.5)
    for worker in list_workers():
        worker.suspend()
    busy.join(SHORT_LIMIT + 20)
    assert verdicts == [None]
    for worker in list_workers():
        worker.resume()
    assert [compare(EQUAL, False) for _ in range(5)] == [True] * 5


def test_an_error_in_a_comparison_is_no_verdict_and_its_caller_keeps_its_logging(monkeypatch):
    from verl_clipx.papers.tasks.math import comparison

    monkeypatch.setattr(comparison, "verify", lambda *_, **__: 1 / 0)
    assert comparison.judge((("x", "x+y"), ("x^2", "x^y")), False) is None
    assert logging.root.manager.disable == 0


def test_processes_that_cannot_start_are_reported(monkeypatch):
    monkeypatch.setattr(processes, "_pools", {})
    monkeypatch.setattr(processes, "_prepare", os.abort)
    with pytest.raises(RuntimeError, match="math-verify"):
        compare(EQUAL, False)


def _compare_in_child(connection):
    connection.send((compare(EQUAL, False), [worker.pid for worker in list_workers()]))
    connection.recv()


@pytest.mark.slow
def test_a_fork_has_processes_of_its_own():
    assert compare(EQUAL, False) is True
    pids_of_parent = {worker.pid for worker in list_workers()}
    end_of_parent, end_of_child = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_compare_in_child, args=(end_of_child,))
    child.start()
    verdict, pids_of_child = end_of_parent.recv()
    assert verdict is True
    assert not pids_of_parent & set(pids_of_child)
    child.kill()
    child.join()
    assert compare(EQUAL, False) is True


@pytest.mark.slow
@pytest.mark.parametrize("end", ["raise ValueError", "os.kill(os.getpid(), 9)"])
def test_no_process_outlives_its_parent(end):
    """Of two processes one is busy and one idle when the parent ends by itself, or cannot end them."""
    code = f"""
    import os, sys, threading, time
    import psutil
    from verl_clipx.papers.tasks.math import processes

    def main():
        processes.SECONDS = {SHORT_LIMIT}
        assert processes.compare((("1", "1"),), False) is True
        threading.Thread(target=processes.compare, args=({ENDLESS!r}, False), daemon=True).start()
        time.sleep(0.5)
        print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
        {end}

    if __name__ == "__main__":
        main()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) >= 2
    parent.wait(60)
    # The kernel's limit; the comparison itself would take a minute.
    wait_until_gone([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], seconds=SHORT_LIMIT + 15)
