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
    check_name(name)
    if nodes < 1 or gpus < 1:
        raise ValueError(f"NNODES={nodes}, NGPUS_PER_NODE={gpus}: each must be at least 1")
    labels = dict(pairs("NODE_SELECTOR", node_selector, "="))
    claims = pairs("MOUNTS", mounts, ":")
    tolerated = read_tolerations(tolerations)
    # Through JSON, so that head and workers have each their own copy of the template.
    job = json.loads(json.dumps(yaml.safe_load(TEMPLATE.read_text())))
    job["metadata"]["name"] = name
    if queue:
        job["metadata"]["labels"] = {QUEUE_LABEL: queue}
    job["spec"]["backoffLimit"] = retries
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    workers["replicas"] = workers["minReplicas"] = workers["maxReplicas"] = nodes - 1
    if nodes == 1:
        del cluster["workerGroupSpecs"]
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        container["image"] = image
        set_variables(container, {"CLIPX_PAYLOAD": payload, "NNODES": str(nodes), "NGPUS_PER_NODE": str(gpus)})
        set_resources(container, gpus=gpus, cpus=cpus, memory=memory)
        set_folders(container, {"runs": runs, "data": data})
        set_volumes(pod, claim=claim, shared_memory=shared_memory)
        mount_claims(pod, container, claims)
        if labels:
            pod["nodeSelector"] = dict(labels)
        if tolerated:
            pod["tolerations"] = tolerated
    return job


def check_name(name: str) -> None:
    """Raises ValueError for a job's name that Kubernetes or KubeRay refuses."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > LONGEST_NAME:
        raise ValueError(
            f"JOB_NAME={name!r}: lower case letters, digits and hyphens, at most {LONGEST_NAME}, starting with a letter"
        )


def read_tolerations(text: str) -> list[dict]:
    """Reads the tolerations of the pods; raises ValueError unless they are a list of mappings."""
    try:
        tolerations = yaml.safe_load(text)
    except yaml.YAMLError:
        tolerations = None
    if not isinstance(tolerations, list) or not all(isinstance(toleration, dict) for toleration in tolerations):
        raise ValueError(f"TOLERATIONS={text}: must be a list such as [{{key: gpu, operator: Exists}}]")
    return tolerations


def set_variables(container: dict, values: dict[str, str]) -> None:
    """Gives those of a container's environment variables their values that have one."""
    for entry in container["env"]:
        entry["value"] = values.get(entry["name"], entry["value"])


def set_resources(container: dict, *, gpus: int, cpus: str, memory: str) -> None:
    """Requests what a node must have, and limits its GPUs to as many."""
    for amounts in container["resources"].values():
        amounts["nvidia.com/gpu"] = str(gpus)
    container["resources"]["requests"] |= {"cpu": cpus, "memory": memory}


def set_folders(container: dict, folders: dict[str, str]) -> None:
    """Mounts the folders of the shared claim, which the template calls by these names."""
    for mount in container["volumeMounts"]:
        if "subPath" in mount:
            mount["subPath"] = folders[mount["subPath"]]


def set_volumes(pod: dict, *, claim: str, shared_memory: str) -> None:
    """Names the shared claim, and gives the shared memory its size."""
    for volume in pod["volumes"]:
        if "persistentVolumeClaim" in volume:
            volume["persistentVolumeClaim"]["claimName"] = claim
        else:
            volume["emptyDir"]["sizeLimit"] = shared_memory


def mount_claims(pod: dict, container: dict, claims: list[tuple[str, str]]) -> None:
    """Mounts further claims, each at its path."""
    for number, (claim, path) in enumerate(claims):
        volume = f"mount-{number}"
        pod["volumes"].append({"name": volume, "persistentVolumeClaim": {"claimName": claim}})
        container["volumeMounts"].append({"name": volume, "mountPath": path})


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
