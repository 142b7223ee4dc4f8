"""Fills rayjob.yaml in for one run and prints it as JSON for `kubectl create -f -`."""

import argparse
import json
import re
from pathlib import Path

import yaml

TEMPLATE = Path(__file__).with_name("rayjob.yaml")
# KubeRay's limit: it appends suffixes to make the names of pods and services.
LONGEST_NAME = 47


# By which Kueue finds a job's queue.
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def render(
    *,
    name: str,
    image: str,
    nodes: int,
    gpus: int,
    claim: str,
    runs: str,
    data: str,
    mounts: str,
    cpus: str,
    memory: str,
    shared_memory: str,
    node_selector: str,
    tolerations: str,
    queue: str,
    retries: int,
    payload: str,
) -> dict:
    """The RayJob of one run.

    Args:
        name: of the job, in lower case letters, digits and hyphens.
        image: of every node.
        nodes: number of nodes, at least 1.
        gpus: of each node, at least 1.
        claim, runs, data: a PersistentVolumeClaim that all nodes can write to, and its folders.
        mounts: further claims, `claim:/path` each, separated by spaces.
        cpus, memory, shared_memory: of each node, as quantities of Kubernetes.
        node_selector: labels, `key=value` each, separated by spaces.
        tolerations: a list in YAML.
        queue: of Kueue's; empty for none.
        retries: new attempts after a failed one.
        payload: [VARIABLE=value …] RECIPE [override …], quoted as in a shell.

    Raises:
        ValueError: a name that Kubernetes refuses, no node, or a mount, a label or tolerations of another form.
    """
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > LONGEST_NAME:
        raise ValueError(
            f"JOB_NAME={name!r}: lower case letters, digits and hyphens, at most {LONGEST_NAME}, starting with a letter"
        )
    if nodes < 1 or gpus < 1:
        raise ValueError(f"NNODES={nodes}, NGPUS_PER_NODE={gpus}: each must be at least 1")
    labels, claims = pairs("NODE_SELECTOR", node_selector, "="), pairs("MOUNTS", mounts, ":")
    try:
        tolerated = yaml.safe_load(tolerations)
    except yaml.YAMLError:
        tolerated = None
    if not isinstance(tolerated, list) or not all(isinstance(one, dict) for one in tolerated):
        raise ValueError(f"TOLERATIONS={tolerations}: must be a list such as [{{key: gpu, operator: Exists}}]")
    # Through JSON, so that head and workers have each their own copy of the template.
    job = json.loads(json.dumps(yaml.safe_load(TEMPLATE.read_text())))
    job["metadata"]["name"] = name
    job["metadata"] |= {"labels": {QUEUE_LABEL: queue}} if queue else {}
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
        container["resources"]["requests"] |= {"cpu": cpus, "memory": memory}
        folders = {"runs": runs, "data": data}
        for mount in container["volumeMounts"]:
            if "subPath" in mount:
                mount["subPath"] = folders[mount["subPath"]]
        for volume in pod["volumes"]:
            if "persistentVolumeClaim" in volume:
                volume["persistentVolumeClaim"]["claimName"] = claim
            else:
                volume["emptyDir"]["sizeLimit"] = shared_memory
        for number, (other, path) in enumerate(claims):
            pod["volumes"].append({"name": f"mount-{number}", "persistentVolumeClaim": {"claimName": other}})
            container["volumeMounts"].append({"name": f"mount-{number}", "mountPath": path})
        pod |= {"nodeSelector": dict(labels)} if labels else {}
        pod |= {"tolerations": tolerated} if tolerated else {}
    return job


def pairs(variable: str, text: str, sign: str) -> list[tuple[str, str]]:
    """The pairs of a variable: words with a sign between two parts."""
    for word in text.split():
        if not all(word.partition(sign)):
            raise ValueError(f"{variable}={text}: {word!r} must be two parts with {sign!r} between them")
    return [(word.partition(sign)[0], word.partition(sign)[2]) for word in text.split()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    words = ("name", "image", "claim", "runs", "data", "mounts", "cpus", "memory", "shared-memory", "node-selector")
    for option in (f"--{word}" for word in (*words, "tolerations", "queue", "payload")):
        parser.add_argument(option, required=True)
    for option in ("--nodes", "--gpus", "--retries"):
        parser.add_argument(option, required=True, type=int)
    try:
        print(json.dumps(render(**vars(parser.parse_args())), indent=2))
    except ValueError as error:
        parser.error(str(error))
