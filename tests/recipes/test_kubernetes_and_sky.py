"""KubeRay's RayJob and the SkyPilot task: their schemas, what a run fills in, that the payload arrives as it was given,
and the task's run section with a stand-in for SkyPilot's own Ray template.

A schema is the subset that the file uses (checked once against the whole of KubeRay 1.7's and SkyPilot 0.14's). Not
covered: Kubernetes, KubeRay, SkyPilot, clouds.
"""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from .shell import RECIPES, ROOT, Machine, checkout, overrides_of

SCRIPT = RECIPES / "cluster" / "kuberay.sh"
RECIPE = "recipes/acpo/run_qwen2.5_7b_fsdp.sh"
TASK = yaml.safe_load((RECIPES / "cluster" / "sky.yaml").read_text())


def validate(instance, kind):
    """Checks it against the part of a kind's schema that its file uses."""
    jsonschema.validate(instance, json.loads(Path(__file__).with_name("schemas").joinpath(f"{kind}.json").read_text()))


@pytest.fixture
def cluster(tmp_path):
    return Machine(tmp_path / "machine", kubectl='cat >"$HOME/created"')


def create_job(cluster, *words, **variables):
    """Runs the launcher and returns the RayJob that it has kubectl create, which must be valid."""
    result = cluster.run(SCRIPT, *words, **variables)
    assert result.returncode == 0, result.stderr
    job = json.loads((cluster.commands.parent / "created").read_text())
    validate(job, "rayjob")
    return job


def container_of(group):
    (container,) = group["template"]["spec"]["containers"]
    return container


def environment_of(group):
    return {entry["name"]: entry["value"] for entry in container_of(group)["env"]}


def test_the_file_as_it_stands_is_a_valid_job():
    validate(yaml.safe_load((RECIPES / "cluster" / "rayjob.yaml").read_text()), "rayjob")


def test_a_run_on_four_nodes_is_a_head_and_three_workers(cluster):
    variables = {"NNODES": "4", "NGPUS_PER_NODE": "4", "IMAGE": "mine:1", "CLAIM": "disk"}
    variables |= {"JOB_NAME": "dapo", "RETRIES": "3", "NAMESPACE": "research"}
    job = create_job(cluster, "METHOD=dapo", RECIPE, **variables)
    assert cluster.calls[-1] == ["kubectl", "--namespace", "research", "create", "-f", "-"]
    spec = job["spec"]["rayClusterSpec"]
    (workers,) = spec["workerGroupSpecs"]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (3, 3, 3)
    assert (job["metadata"]["name"], job["spec"]["backoffLimit"]) == ("dapo", 3)
    for group in (spec["headGroupSpec"], workers):
        container, environment = container_of(group), environment_of(group)
        assert container["image"] == "mine:1"
        assert all(amounts["nvidia.com/gpu"] == "4" for amounts in container["resources"].values())
        assert environment["NNODES"] == environment["NGPUS_PER_NODE"] == "4"
        claims = [volume.get("persistentVolumeClaim") for volume in group["template"]["spec"]["volumes"]]
        assert [claim["claimName"] for claim in claims if claim] == ["disk"]
        # Run folders are on the claim: they are below the repository, which the entry point names.
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        repository = job["spec"]["entrypoint"].split()[1].removesuffix("/recipes/cluster/run_payload.sh")
        assert mounts[f"{repository}/runs"] == mounts[f"{repository}/data"] == "shared"
        assert mounts["/dev/shm"] == "shared-memory"
        assert repository in (ROOT / "docker" / "Dockerfile.gpu").read_text()


def test_what_belongs_to_a_cluster_is_given_by_variables(cluster):
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    variables = {"CPUS": "30", "MEMORY": "200Gi", "SHARED_MEMORY": "64Gi", "QUEUE": "research", "CLAIM": "disk"}
    variables |= {"NODE_SELECTOR": "gpu=h100 zone.io/name=a", "TOLERATIONS": json.dumps(tolerations)}
    variables |= {"MOUNTS": "models:/models sets:/sets", "RUNS_IN_CLAIM": "me/runs", "DATA_IN_CLAIM": "sets"}
    job = create_job(cluster, RECIPE, NNODES="2", **variables)
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "research"}
    spec = job["spec"]["rayClusterSpec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod, container = group["template"]["spec"], container_of(group)
        assert container["resources"]["requests"] == {"cpu": "30", "memory": "200Gi", "nvidia.com/gpu": "8"}
        assert pod["nodeSelector"] == {"gpu": "h100", "zone.io/name": "a"} and pod["tolerations"] == tolerations
        claims = {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"]
            for volume in pod["volumes"]
            if len(volume) == 2 and "persistentVolumeClaim" in volume
        }
        mounts = {
            mount["mountPath"]: (claims.get(mount["name"]), mount.get("subPath")) for mount in container["volumeMounts"]
        }
        root = container["workingDir"]
        assert mounts[f"{root}/runs"] == ("disk", "me/runs") and mounts[f"{root}/data"] == ("disk", "sets")
        assert mounts["/models"] == ("models", None) and mounts["/sets"] == ("sets", None)
        (memory,) = [volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume]
        assert memory["sizeLimit"] == "64Gi"


def test_without_them_the_job_asks_for_no_queue_label_or_taint(cluster):
    job = create_job(cluster, RECIPE)
    assert "labels" not in job["metadata"]
    assert (
        not {"nodeSelector", "tolerations"} & job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"].keys()
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NODE_SELECTOR", "h100"),
        ("MOUNTS", "models"),
        ("TOLERATIONS", "gpu"),
        ("TOLERATIONS", "[a, b]"),
        ("TOLERATIONS", "["),
    ],
)
def test_a_value_of_another_form_is_refused(cluster, variable, value):
    result = cluster.run(SCRIPT, RECIPE, **{variable: value})
    assert result.returncode != 0 and not cluster.record.exists()
    assert f"{variable}={value}" in result.stderr


def test_a_dry_run_creates_nothing(cluster):
    result = cluster.run(SCRIPT, RECIPE, DRY_RUN="1")
    job = json.loads(result.stdout)
    validate(job, "rayjob")
    assert not cluster.record.exists() and "workerGroupSpecs" not in job["spec"]["rayClusterSpec"]


def test_the_recipe_on_the_head_gets_the_words_that_were_given(cluster):
    words = ["METHOD=dapo", "DRY_RUN=1", RECIPE, "data.val_files=[a b,c]", "clipx.note='it\"s'"]
    words += [r"trainer.x=back\slash", "trainer.y=ü", "trainer.z=a\nb"]
    job = create_job(cluster, *words, NNODES="3")
    environment = environment_of(job["spec"]["rayClusterSpec"]["headGroupSpec"])
    environment.pop("HF_HOME")
    on_the_head = cluster.run(RECIPES / "cluster" / "run_payload.sh", **environment)
    assert on_the_head.returncode == 0, on_the_head.stderr
    here = cluster.run(ROOT / RECIPE, *words[3:], METHOD="dapo", DRY_RUN="1", NNODES="3", NGPUS_PER_NODE="8")
    # Not the lines: bash writes one word in several ways, by the locale.
    assert overrides_of(on_the_head.stdout) == overrides_of(here.stdout)
    assert overrides_of(here.stdout)[-5:] == words[3:]


def test_the_task_is_valid_and_the_bucket_must_be_given():
    validate(TASK, "sky")
    # SkyPilot asks for an environment variable that is null.
    assert TASK["envs"]["BUCKET"] is None
    assert TASK["file_mounts"]["/bucket"]["source"] == "${BUCKET}"
    assert (ROOT / TASK["envs"]["CLIPX_PAYLOAD"].split()[-1]).is_file()
    assert (ROOT / TASK["setup"].split()[1]).is_file()


@pytest.mark.parametrize("section", ["setup", "run"])
def test_shellcheck_accepts_the_scripts_in_it(section):
    command = [Path(sys.executable).with_name("shellcheck"), "--shell=bash", "-"]
    result = subprocess.run(command, input=TASK[section], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout


def test_the_head_trains_into_the_bucket_and_the_others_only_join(tmp_path):
    machine = Machine(tmp_path / "machine", start_cluster="")
    template = machine.commands.parent / "sky_templates" / "ray"
    template.mkdir(parents=True)
    (machine.commands / "start_cluster").rename(template / "start_cluster")
    script = tmp_path / "run.sh"
    script.write_text(TASK["run"].replace("/bucket", str(tmp_path / "bucket")))
    payload = "METHOD=dapo DRY_RUN=1 recipes/acpo/run_qwen2.5_7b_fsdp.sh 'data.val_files=[a b,c]'"
    variables = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "CLIPX_PAYLOAD": payload}
    head, other = (
        machine.run(script, cwd=checkout(tmp_path / f"node{rank}"), SKYPILOT_NODE_RANK=str(rank), **variables)
        for rank in (0, 1)
    )
    assert head.returncode == other.returncode == 0, head.stderr + other.stderr
    assert machine.calls == [["start_cluster"]] * 2 and other.stdout == ""
    assert "trainer.nnodes=2" in head.stdout and "trainer.n_gpus_per_node=8" in head.stdout
    assert f"hydra.run.dir={tmp_path}/bucket/runs/acpo/orz_7b_dapo_near-seed1" in head.stdout
    assert f"CLIPX_DATA={tmp_path}/bucket/data " in head.stdout
