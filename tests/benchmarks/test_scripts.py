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

RUN_SCRIPT = """
import os, runpy, sys
os.environ["CLIPX_DATA"] = {data!r}
sys.path.append("benchmarks")
sys.argv = {arguments!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
BUILD_DATA = """
import sys
lengths = ["--option", "min_length=10", "--option", "max_length=14"]
sys.argv = ["clipx", "papers", "data", "build", "reversal", "--out", {folder!r}, *lengths]
from verl_clipx.cli import main
main()
"""


@pytest.fixture(scope="module")
def data(run_fresh, tmp_path_factory) -> Path:
    """A folder for CLIPX_DATA, with the task's data and a policy, as the page's commands have them."""
    folder = tmp_path_factory.mktemp("data")
    build = run_fresh(BUILD_DATA.format(folder=str(folder / "reversal")), ROOT)
    assert build.returncode == 0, build.stderr
    shutil.copytree(ROOT / "docs/results/evidence_policy", folder / "policies/reversal")
    return folder


@pytest.fixture(scope="module")
def run_script(run_fresh, data):
    """A function that runs a script with arguments and returns what it prints."""

    def run(name: str, *arguments: str | Path) -> str:
        words = [f"benchmarks/{name}.py", *map(str, arguments)]
        script = run_fresh(RUN_SCRIPT.format(data=str(data), arguments=words), ROOT)
        assert script.returncode == 0, script.stdout + script.stderr
        return script.stdout

    return run


def test_evidence_trains_a_batch_of_a_protocols_run(run_script, tmp_path):
    # table_fill's run is in bypass mode.
    run = "tuning/old/grpo-0.0001-seed901"
    output = run_script("evidence", "--protocol", "default", "--only", run, "--runs", tmp_path, "--rehearse")
    assert f"{run}: rehearsed in " in output
    assert [*tmp_path.iterdir()] == []


def test_table_fill_keeps_a_run(run_script, data, tmp_path):
    one_run = ("--row", "GRPO, 4 updates", "--seed", "1", "--steps", "1")
    run_script("table_fill", "reversal", "--runs", tmp_path, "--data", data, *one_run)
    run = RunFolder(tmp_path / "reversal/grpo_4-seed1.jsonl.gz")
    assert [*run.metrics] == [1]
    assert run.record_content["steps"] == 1
    assert run.metrics[1]["actor/grad_norm"] > 0


def test_known_faults_plants_a_fault_between_two_batches(run_script, tmp_path):
    run_script("known_faults", tmp_path, "--name", "no_reward", "--steps", "2")
    run = RunFolder(tmp_path / "no_reward-seed31.jsonl.gz")
    assert run.record_content["since"] == 2
    first_reward, second_reward = (step["critic/score/mean"] for step in run.metrics.values())
    assert first_reward > 0
    assert second_reward == 0


# Four trainings; tests/analysis/certify holds each question on made-up runs.
@pytest.mark.matrix
def test_certify_faults_makes_two_arms_and_finds_what_was_planted(run_script, tmp_path):
    for arm in ("grpo_4", "another_reward"):
        run_script("certify_faults", tmp_path, "--only", f"{arm}-seed1", "--steps", "1")
    names = ("--name", "grpo_4", "--name", "another_reward", "--name", "sampler_float32")
    output = run_script("certify_faults", tmp_path, *names, "--seed", "1", "--steps", "1")
    assert "| the reward's file was changed between the arms | one reward | failed: " in output
    table, _, recomputed = output.partition("\nsampler_float32\n")
    assert table.count("\n| ") == 1
    assert recomputed.startswith("- ")
    # Each as other tools read it, and the sampler's from the process that the script started.
    for name in ("grpo_4", "another_reward", "sampler_float32"):
        assert "step:1 - " in (tmp_path / f"{name}-seed1/verl.log").read_text()
    assert json.loads((tmp_path / "grpo_4-seed1/metrics.jsonl").read_text().splitlines()[0])["step"] == 1


def test_loss_measures_a_loss_with_its_own_statistics(run_script, tmp_path):
    smallest = ("--shape", "2x64", "--repeats", "1", "--form", "eager")
    output = run_script("loss", "acpo", *smallest, "--json", tmp_path / "figures.json")
    assert "| clipx_acpo, eager | " in output
    (shape,) = read_json(tmp_path / "figures.json")["shapes"].values()
    assert [*shape["rows"]] == ["vanilla", "clipx_acpo, eager", "clipx_acpo, eager, own statistics"]
    for row in shape["rows"].values():
        assert row["seconds"][0] > 0
        assert row["megabytes"] > 0


def test_update_actor_measures_a_scope_by_verls_worker(run_script, tmp_path):
    smallest = ("--width", "64", "--layers", "1", "--sequences", "4", "--response", "8", "--updates", "2")
    variants = ("--variant", "acpo, lagged", "--variant", "acpo, mini_batch, larger extra pass")
    run_script("update_actor", *smallest, *variants, "--repeats", "1", "--json", tmp_path / "figures.json")
    (update,) = read_json(tmp_path / "figures.json")["updates"].values()
    assert [*update] == ["vanilla", "acpo, lagged", "acpo, mini_batch, larger extra pass"]
    assert all(row["of_vanilla"] > 0 for row in update.values())
