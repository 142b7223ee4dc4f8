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

from .shell import RECIPES, ROOT, Machine

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
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run(
        [shellcheck, "--shell=bash", "-"], input=TASK[section], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture
def node(tmp_path):
    machine = Machine(tmp_path / "machine", start_cluster="")
    template = machine.commands.parent / "sky_templates" / "ray"
    template.mkdir(parents=True)
    (machine.commands / "start_cluster").rename(template / "start_cluster")
    workdir = tmp_path / "workdir"
    workdir.mkdir()
    for folder in ("recipes", "configs"):
        (workdir / folder).symlink_to(ROOT / folder)
    script = tmp_path / "run.sh"
    script.write_text(TASK["run"].replace("/bucket", str(tmp_path / "bucket")))

    def run(rank):
        return machine.run(
            script,
            cwd=workdir,
            SKYPILOT_NODE_RANK=str(rank),
            SKYPILOT_NUM_NODES="2",
            SKYPILOT_NUM_GPUS_PER_NODE="8",
            CLIPX_PAYLOAD="METHOD=dapo DRY_RUN=1 recipes/acpo/run_qwen2.5_7b_fsdp.sh 'data.val_files=[a b,c]'",
        )

    return machine, run


def test_the_head_trains_into_the_bucket(node, tmp_path):
    machine, run = node
    done = run(0)
    assert done.returncode == 0, done.stderr
    assert machine.calls == [["start_cluster"]]
    assert "trainer.nnodes=2" in done.stdout and "trainer.n_gpus_per_node=8" in done.stdout
    assert f"hydra.run.dir={tmp_path}/bucket/runs/acpo/orz_7b_dapo_near-seed1" in done.stdout
    assert f"CLIPX_DATA={tmp_path}/bucket/data " in done.stdout


def test_the_others_only_join(node):
    machine, run = node
    done = run(1)
    assert done.returncode == 0, done.stderr
    assert machine.calls == [["start_cluster"]] and done.stdout == ""
