"""The comparison processes: verdicts, deadlines, deaths, threads, forks, and that no process is left behind.

Not covered: Ray itself; its workers are processes that run the reward in threads and may be killed, which is tested.
"""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from verl_clipx.papers.tasks.math import pool as pool_module
from verl_clipx.papers.tasks.math.pool import WorkerPool, shared_pool
from verl_clipx.papers.tasks.math.worker import MEMORY_BYTES

# Answers one pair by its text, and misbehaves on demand.
FAKE = """
import json, os, signal, sys, time
print("ready", flush=True)
for line in sys.stdin:
    ((gold, answer),), both_ways = json.loads(line)
    if answer == "hang":
        time.sleep(1000)
    if answer == "die":
        os._exit(3)
    if answer == "out of time":
        os.kill(os.getpid(), signal.SIGPROF)
    if answer == "slow":
        time.sleep(0.05)
    print(int(gold == answer), flush=True)
"""

# Passes the guards, and an unknown function leaves no value to refute it by: sympy simplifies it for minutes.
SHORT, LONG = "f(x)+1", "f(x)+(x+1)^{999}-(x+2)^{998}"


def compare(pool, gold, answer, both_ways=False):
    return pool.compare([(gold, answer)], both_ways)


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pids, seconds=60.0):
    end = time.monotonic() + seconds
    while not all(map(is_gone, pids)):
        assert time.monotonic() < end, f"still there: {pids}"
        time.sleep(0.05)


@pytest.fixture
def fake(tmp_path):
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    pool = WorkerPool(size=2, deadline=1.0, script=script)
    yield pool
    pids = pool.process_ids()
    pool.close()
    wait_until_gone(pids)


@pytest.fixture
def real():
    pool = WorkerPool(size=1)
    yield pool
    pool.close()


def test_math_verify_decides(real):
    assert compare(real, r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}") is True
    assert compare(real, r"\sqrt{2}", r"\sqrt{3}") is False
    assert compare(real, "6", "2x=6") is True
    assert compare(real, "6", "2x=6", both_ways=True) is False  # math-verify is not symmetric
    assert compare(real, "not math {{{", "\\") is None
    assert real.compare([(r"\sqrt{2}", r"\sqrt{3}"), (r"\sqrt{3}", r"3^{1/2}")]) is True
    assert real.compare([(r"\sqrt{2}+", r"\sqrt{3}"), (r"\sqrt{2}", r"\sqrt{3}")]) is None
    assert len(real.process_ids()) == 1


@pytest.mark.slow
def test_a_question_ends_by_its_processor_time_whatever_it_holds(real):
    assert compare(real, "1", "1") is True
    (before,) = real.process_ids()
    started = time.monotonic()
    assert real.compare([(f"{SHORT}+{index}", LONG) for index in range(8)], both_ways=True) is None
    assert time.monotonic() - started < pool_module.DEADLINE_SECONDS + 1
    assert compare(real, "1", "1") is True
    assert real.process_ids() != [before]
    assert is_gone(before)


@pytest.mark.slow
def test_memory_is_bounded(real):
    compare(real, "1", "1")
    (pid,) = real.process_ids()
    assert psutil.Process(pid).rlimit(psutil.RLIMIT_AS) == (MEMORY_BYTES, MEMORY_BYTES)
    # Some 10**11 digits, past the guards: out of memory or out of time, never equal, and the next comparison works.
    assert compare(real, "1", "(((9^{999})^{999})^{999})^{99}") in (None, False)
    assert compare(real, "1", "1") is True


@pytest.mark.slow
def test_a_hung_process_is_killed_and_replaced_while_others_go_on(fake):
    verdicts = {}
    hung = threading.Thread(target=lambda: verdicts.update(hung=compare(fake, "a", "hang")))
    hung.start()
    verdicts["others"] = [compare(fake, "a", answer) for answer in ("a", "b") * 20]
    assert hung.is_alive()  # forty answers came before the deadline of the hung one
    hung.join()
    assert verdicts == {"hung": None, "others": [True, False] * 20}
    assert compare(fake, "a", "a") is True


@pytest.mark.slow
def test_no_zombie_after_deadlines(fake):
    for answer in ("hang", "out of time", "die"):
        assert compare(fake, "a", answer) is None
    assert not [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]
    assert compare(fake, "a", "a") is True


def test_a_process_that_died_while_idle_costs_no_verdict(fake):
    assert compare(fake, "a", "a") is True
    for pid in fake.process_ids():
        os.kill(pid, signal.SIGKILL)
    wait_until_gone(fake.process_ids())
    assert compare(fake, "a", "a") is True


@pytest.mark.slow
def test_a_stopped_process_does_not_hold_a_comparison(fake):
    assert compare(fake, "a", "a") is True
    os.kill(fake.process_ids()[0], signal.SIGSTOP)
    assert compare(fake, "a", "a") is None
    assert compare(fake, "a", "a") is True


@pytest.mark.slow
def test_never_more_processes_than_its_size_and_none_before_the_first_comparison(fake):
    assert fake.process_ids() == []
    with ThreadPoolExecutor(16) as threads:
        answers = ["a" if index % 3 else "slow" for index in range(200)]
        assert list(threads.map(lambda answer: compare(fake, "a", answer), answers)) == [a == "a" for a in answers]
    assert len(fake.process_ids()) == 2


@pytest.mark.slow
def test_from_asyncio_the_way_verl_calls_it(fake):
    async def score_all():
        loop = asyncio.get_running_loop()
        answers = ["a", "b", "hang", "die"] * 2
        return await asyncio.gather(
            *(loop.run_in_executor(None, compare, fake, "a", answer) for answer in answers),
        )

    assert asyncio.run(score_all()) == [True, False, None, None] * 2


def test_an_interrupted_comparison_does_not_leave_its_answer_to_the_next(fake, monkeypatch):
    assert compare(fake, "a", "a") is True
    read_line = pool_module._Worker.read_line

    def interrupt(worker, seconds):
        monkeypatch.setattr(pool_module._Worker, "read_line", read_line)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool_module._Worker, "read_line", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compare(fake, "a", "a")
    assert compare(fake, "a", "b") is False
    assert compare(fake, "a", "a") is True


def test_a_pool_that_cannot_start_says_how_to_find_out_why(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit(1)")
    pool = WorkerPool(size=1, script=script)
    for _ in range(2):  # the slot is free again
        with pytest.raises(RuntimeError, match=r"broken\.py.*math-verify"):
            compare(pool, "a", "a")
    assert pool.process_ids() == []


def test_a_closed_pool_gives_no_verdict(fake):
    assert compare(fake, "a", "a") is True
    pids = fake.process_ids()
    fake.close()
    wait_until_gone(pids)
    assert compare(fake, "a", "a") is None


def test_size_is_checked():
    with pytest.raises(ValueError, match="size=0"):
        WorkerPool(size=0)


def _compare_in_child(connection):
    verdict = compare(shared_pool(), r"\sqrt{4}", "2")
    connection.send((verdict, shared_pool().process_ids()))
    connection.recv()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_daemonic_child_has_processes_of_its_own(method):
    assert compare(shared_pool(), r"\sqrt{9}", "3") is True
    ours = shared_pool().process_ids()
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    child = context.Process(target=_compare_in_child, args=(there,), daemon=True)
    child.start()
    verdict, theirs = here.recv()
    assert verdict is True
    assert theirs and not set(theirs) & set(ours)
    child.kill()
    child.join()
    wait_until_gone(theirs)
    assert shared_pool().process_ids() == ours
    assert compare(shared_pool(), r"\sqrt{16}", "4") is True


def test_a_forked_child_that_lives_on_does_not_keep_our_processes_alive(tmp_path):
    # The grandchild sleeps; its parent is killed; the parent's comparison process has to end although a fork of the
    # parent still runs.
    run = _run_parent(
        """
        pids = pool.process_ids()
        if os.fork() == 0:
            time.sleep(1000)
        """
    )
    run.kill()
    run.wait()
    wait_until_gone(run.comparison_pids)
    for process in run.forks:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["return", "sys.exit(3)", "os._exit(3)", "os.kill(os.getpid(), 9)", "raise ValueError"])
def test_no_process_outlives_its_parent(end):
    run = _run_parent("", end=end)
    run.wait(60)
    wait_until_gone(run.comparison_pids)


@pytest.mark.slow
def test_a_busy_process_does_not_outlive_a_killed_parent():
    run = _run_parent(
        f"""
        threading.Thread(target=pool.compare, args=([({SHORT!r}, {LONG!r})],), daemon=True).start()
        time.sleep(0.5)
        """
    )
    run.kill()
    run.wait()
    wait_until_gone(run.comparison_pids)


def _run_parent(body, end="time.sleep(1000)"):
    """Start a Python process whose shared pool has one comparison process; return it once `body` has run."""
    code = (
        textwrap.dedent(
            """
            import os, sys, threading, time
            from verl_clipx.papers.tasks.math.pool import shared_pool

            def main():
                pool = shared_pool()
                assert pool.compare([("1", "1")]) is True
            BODY
                print(*pool.process_ids(), flush=True)
                END

            main()
            """
        )
        .replace("BODY", textwrap.indent(textwrap.dedent(body), "    "))
        .replace("END", end)
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    run.comparison_pids = [int(pid) for pid in run.stdout.readline().split()]
    assert run.comparison_pids
    children = psutil.Process(run.pid).children() if psutil.pid_exists(run.pid) and not is_gone(run.pid) else []
    run.forks = [child for child in children if child.pid not in run.comparison_pids]
    return run
