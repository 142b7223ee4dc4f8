"""Fills rayjob.yaml in for one run and prints it as JSON for `kubectl create -f -`."""

import argparse
import json
import re
from pathlib import Path

import yaml

TEMPLATE = Path(__file__).with_name("rayjob.yaml")
# KubeRay's limit: it appends suffixes to make the names of pods and services.
LONGEST_NAME = 47


def render(*, name: str, image: str, nodes: int, gpus: int, claim: str, retries: int, payload: str) -> dict:
    """The RayJob of one run.

    Args:
        name: of the job, in lower case letters, digits and hyphens.
        image: of every node.
        nodes: number of nodes, at least 1.
        gpus: of each node, at least 1.
        claim: a PersistentVolumeClaim that all nodes can write to.
        retries: new attempts after a failed one.
        payload: [VARIABLE=value …] RECIPE [override …], quoted as in a shell.

    Raises:
        ValueError: a name that Kubernetes refuses, or no node.
    """
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > LONGEST_NAME:
        raise ValueError(
            f"JOB_NAME={name!r}: lower case letters, digits and hyphens, at most {LONGEST_NAME}, starting with a letter"
        )
    if nodes < 1 or gpus < 1:
        raise ValueError(f"NNODES={nodes}, NGPUS_PER_NODE={gpus}: each must be at least 1")
    # Through JSON, so that head and workers have each their own copy of the template.
    job = json.loads(json.dumps(yaml.safe_load(TEMPLATE.read_text())))
    job["metadata"]["name"] = name
    job["spec"]["backoffLimit"] = retries
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    workers["replicas"] = workers["minReplicas"] = workers["maxReplicas"] = nodes - 1
    if nodes == 1:
        del cluster["workerGroupSpecs"]
    values = {"CLIPX_PAYLOAD": payload, "NNODES": str(nodes), "NGPUS_PER_NODE": str(gpus)}
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        container["image"] = image
        for entry in container["env"]:
            entry["value"] = values.get(entry["name"], entry["value"])
        for amounts in container["resources"].values():
            amounts["nvidia.com/gpu"] = str(gpus)
        for volume in pod["volumes"]:
            if "persistentVolumeClaim" in volume:
                volume["persistentVolumeClaim"]["claimName"] = claim
    return job


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for option in ("--name", "--image", "--claim", "--payload"):
        parser.add_argument(option, required=True)
    for option in ("--nodes", "--gpus", "--retries"):
        parser.add_argument(option, required=True, type=int)
    try:
        print(json.dumps(render(**vars(parser.parse_args())), indent=2))
    except ValueError as error:
        parser.error(str(error))
