"""The SkyPilot task: its schema, and its run section with a stand-in for SkyPilot's own Ray template.

The schema is the subset of SkyPilot's that the file uses (checked once against SkyPilot 0.14's). Not covered:
SkyPilot, clouds.
"""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from .shell import RECIPES, ROOT, Machine, checkout

TASK = yaml.safe_load((RECIPES / "cluster" / "sky.yaml").read_text())
SCHEMA = json.loads(Path(__file__).with_name("schemas").joinpath("sky.json").read_text())


def test_the_task_is_valid_and_the_bucket_must_be_given():
    jsonschema.validate(TASK, SCHEMA)
    # SkyPilot asks for an environment variable that is null.
    assert TASK["envs"]["BUCKET"] is None
    assert TASK["file_mounts"]["/bucket"]["source"] == "${BUCKET}"
    assert (ROOT / TASK["envs"]["CLIPX_PAYLOAD"].split()[-1]).is_file()
    assert (ROOT / TASK["setup"].split()[1]).is_file()


@pytest.mark.parametrize("section", ["setup", "run"])
def test_shellcheck_accepts_the_scripts_in_it(section):
    command = [Path(sys.executable).with_name("shellcheck"), "--shell=bash", "-"]
    done = subprocess.run(command, input=TASK[section], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_head_trains_into_the_bucket_and_the_others_only_join(tmp_path):
    machine = Machine(tmp_path / "machine", start_cluster="")
    template = machine.commands.parent / "sky_templates" / "ray"
    template.mkdir(parents=True)
    (machine.commands / "start_cluster").rename(template / "start_cluster")
    script = tmp_path / "run.sh"
    script.write_text(TASK["run"].replace("/bucket", str(tmp_path / "bucket")))
    payload = "METHOD=dapo DRY_RUN=1 recipes/acpo/run_qwen2.5_7b_fsdp.sh 'data.val_files=[a b,c]'"
    given = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "CLIPX_PAYLOAD": payload}
    head, other = (
        machine.run(script, cwd=checkout(tmp_path / f"node{rank}"), SKYPILOT_NODE_RANK=str(rank), **given)
        for rank in (0, 1)
    )
    assert head.returncode == other.returncode == 0, head.stderr + other.stderr
    assert machine.calls == [["start_cluster"]] * 2 and other.stdout == ""
    assert "trainer.nnodes=2" in head.stdout and "trainer.n_gpus_per_node=8" in head.stdout
    assert f"hydra.run.dir={tmp_path}/bucket/runs/acpo/orz_7b_dapo_near-seed1" in head.stdout
    assert f"CLIPX_DATA={tmp_path}/bucket/data " in head.stdout
