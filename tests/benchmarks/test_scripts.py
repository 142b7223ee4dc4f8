"""Each script of benchmarks/ that a page tells readers to run makes its smallest run: a batch or two of a training, a
tiny loss, a tiny update. Covers evidence.py, table_fill.py, known_faults.py, certify_faults.py, loss.py and
update_actor.py with worker_update.py. Others are covered elsewhere: diagnosis.py in
tests/analysis/diagnose/test_rules.py, evidence_table.py in test_evidence.py, gpu.py in test_gpu_command.py, gpu_code.py
in tests/test_gpu_code.py. Not covered: what a whole run gives; compiled losses (tests/losses/applying).
"""

import json
import shutil
from pathlib import Path

import pytest

from verl_clipx.analysis.runs.folder import RunFolder
from verl_clipx.common.files import read_json

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.end_to_end

SCRIPT = """
import os, runpy, sys
os.environ["CLIPX_DATA"] = {data!r}
sys.path.append("benchmarks")
sys.argv = {words!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
BUILD = """
import sys
lengths = ["--option", "min_length=10", "--option", "max_length=14"]
sys.argv = ["clipx", "papers", "data", "build", "reversal", "--out", {folder!r}, *lengths]
from verl_clipx.cli import main
main()
"""


@pytest.fixture(scope="module")
def start(run_fresh, tmp_path_factory):
    """Starts a script with the data and a policy in CLIPX_DATA, as the page's commands have them."""
    data = tmp_path_factory.mktemp("data")
    built = run_fresh(BUILD.format(folder=str(data / "reversal")), ROOT)
    assert built.returncode == 0, built.stderr
    shutil.copytree(ROOT / "docs/results/evidence_policy", data / "policies/reversal")

    def start(name: str, *words: str | Path):
        given = [f"benchmarks/{name}.py", *map(str, words)]
        done = run_fresh(SCRIPT.format(data=str(data), words=given), ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    start.data = data
    return start


def test_evidence_trains_a_batch_of_a_protocols_run(start, tmp_path):
    # table_fill's run is in bypass mode.
    run = "tuning/old/grpo-0.0001-seed901"
    done = start("evidence", "--protocol", "default", "--only", run, "--runs", tmp_path, "--rehearse")
    assert f"{run}: rehearsed in " in done.stdout
    assert [*tmp_path.iterdir()] == []


def test_table_fill_keeps_a_run(start, tmp_path):
    row = ("--row", "GRPO, 4 updates", "--seed", "1")
    start("table_fill", "reversal", "--runs", tmp_path, "--data", start.data, *row, "--steps", "1")
    run = RunFolder(tmp_path / "reversal/grpo_4-seed1.jsonl.gz")
    assert [*run.metrics] == [1] and run.record_content["steps"] == 1
    assert run.metrics[1]["actor/grad_norm"] > 0


def test_known_faults_plants_a_fault_between_two_batches(start, tmp_path):
    start("known_faults", tmp_path, "--name", "no_reward", "--steps", "2")
    run = RunFolder(tmp_path / "no_reward-seed31.jsonl.gz")
    rewards = [step["critic/score/mean"] for step in run.metrics.values()]
    assert run.record_content["since"] == 2 and rewards[0] > 0 == rewards[1]


# Four trainings; tests/analysis/certify holds each question on made-up runs.
@pytest.mark.matrix
def test_certify_faults_makes_two_arms_and_finds_what_was_planted(start, tmp_path):
    smallest = ("--seed", "1", "--steps", "1")
    for arm in ("grpo_4", "another_reward"):
        start("certify_faults", tmp_path, "--only", f"{arm}-seed1", "--steps", "1")
    names = [word for name in ("grpo_4", "another_reward", "sampler_float32") for word in ("--name", name)]
    printed = start("certify_faults", tmp_path, *names, *smallest).stdout
    assert "| the reward's file was changed between the arms | one reward | failed: " in printed
    table, _, recomputed = printed.partition("\nsampler_float32\n")
    assert table.count("\n| ") == 1 and recomputed.startswith("- ")
    # Each as other tools read it, and the sampler's from the process that the script started.
    for name in ("grpo_4", "another_reward", "sampler_float32"):
        assert "step:1 - " in (tmp_path / f"{name}-seed1/verl.log").read_text()
    assert json.loads((tmp_path / "grpo_4-seed1/metrics.jsonl").read_text().splitlines()[0])["step"] == 1


def test_loss_measures_a_loss_with_its_own_statistics(start, tmp_path):
    smallest = ("--shape", "2x64", "--repeats", "1", "--form", "eager")
    printed = start("loss", "acpo", *smallest, "--json", tmp_path / "figures.json").stdout
    (shape,) = read_json(tmp_path / "figures.json")["shapes"].values()
    assert [*shape["rows"]] == ["vanilla", "clipx_acpo, eager", "clipx_acpo, eager, own statistics"]
    assert all(row["seconds"][0] > 0 and row["megabytes"] > 0 for row in shape["rows"].values())
    assert "| clipx_acpo, eager | " in printed


def test_update_actor_measures_a_scope_by_verls_worker(start, tmp_path):
    size = ("--width", "64", "--layers", "1", "--sequences", "4", "--response", "8", "--updates", "2")
    variants = ("--variant", "acpo, lagged", "--variant", "acpo, mini_batch, larger extra pass")
    start("update_actor", *size, *variants, "--repeats", "1", "--json", tmp_path / "figures.json")
    (update,) = read_json(tmp_path / "figures.json")["updates"].values()
    assert [*update] == ["vanilla", "acpo, lagged", "acpo, mini_batch, larger extra pass"]
    assert all(row["of_vanilla"] > 0 for row in update.values())
