"""The ranks' processes: what they find is collected, and one that ends takes no other check with it.

Covers, with a stand-in for the ranks' program: results in order; an error of one rank while the other waits; a rank
that dies without a word; one that answers never; the rest of the checks in ranks that are started anew; nothing is
left running. Not covered: the program itself (tests/end_to_end/test_gpu_check.py).
"""

import sys
from pathlib import Path

import psutil
import pytest

from verl_clipx.gpu_check import ranks
from verl_clipx.gpu_check.machine import Machine

# A check's name says what the ranks do in it.
STAND_IN = """
import json, os, sys, time
from pathlib import Path

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
print("started", rank, flush=True)

def leave(name, found):
    partial = folder / f"{name}.{rank}.partial"
    partial.write_text(json.dumps(found))
    partial.rename(folder / f"{name}.{rank}.json")

for name in json.loads((folder / "task.json").read_text())["names"]:
    if rank == "0" and "good" not in name:
        time.sleep(1000)
    if name == "hang":
        time.sleep(1000)
    if name == "die":
        print("killed by something", flush=True)
        os._exit(7)
    if name == "error":
        leave(name, {"error": "rank 1: ValueError: no"})
        os._exit(1)
    if rank == "0":
        leave(name, {"passed": name != "good but wrong", "found": name, "numbers": {"n": 1.0}})
    # The program's barrier.
    while not (folder / f"{name}.0.json").exists():
        time.sleep(0.01)
"""


@pytest.fixture
def found(monkeypatch, tmp_path):
    """The results of checks on two stand-in ranks, by name."""
    (tmp_path / "rank.py").write_text(STAND_IN)
    monkeypatch.setattr(ranks, "PROGRAM", (sys.executable, str(tmp_path / "rank.py")))

    def run(*names, seconds=30.0):
        return list(ranks.results_on_ranks(Machine("cpu", 2), Path("unused"), names, seconds=seconds))

    return run


def test_results_come_in_order_and_a_wrong_measurement_fails_alone(found):
    results = found("good 1", "good but wrong", "good 2")
    assert [(one.name, one.outcome) for one in results] == [
        ("good 1", "pass"),
        ("good but wrong", "fail"),
        ("good 2", "pass"),
    ]
    assert results[0].numbers == {"n": 1.0} and results[0].log == ()


@pytest.mark.parametrize(
    ("name", "said"), [("error", "rank 1: ValueError: no"), ("die", "a rank ended with exit code 7")]
)
def test_a_rank_that_ends_fails_its_check_and_no_other(found, name, said):
    first, broken, last = found("good 1", name, "good 2")
    assert (first.outcome, broken.outcome, last.outcome) == ("pass", "fail", "pass")
    assert broken.found == said
    assert any("started 1" in line for line in broken.log)


@pytest.mark.slow
def test_a_rank_that_never_answers_fails_its_check_and_is_ended(found):
    broken, last = found("hang", "good 1", seconds=1.0)
    assert broken.outcome == "fail" and broken.found == "no answer within 1 s" and last.outcome == "pass"
    left = [child for child in psutil.Process().children(recursive=True) if "rank.py" in " ".join(child.cmdline())]
    assert left == []
