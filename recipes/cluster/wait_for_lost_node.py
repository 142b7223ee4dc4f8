"""Waits until the Ray cluster RAY_ADDRESS loses one of the nodes that it has now, and prints the addresses of those."""

import os
import time

import ray


def wait_for_lost_node(address: str, poll: float = 2.0) -> list[str]:
    """Addresses of the nodes that were there at the first look and are not any more.

    Args:
        address: of the head, host:port.
        poll: seconds between looks.
    """
    ray.init(address, log_to_driver=False, logging_level="ERROR")
    before = _living_nodes()
    while not (lost := before.keys() - _living_nodes().keys()):
        time.sleep(poll)
    return sorted(before[node] for node in lost)


def _living_nodes() -> dict[str, str]:
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


if __name__ == "__main__":
    print("lost:", *wait_for_lost_node(os.environ.get("RAY_ADDRESS", "auto")), flush=True)
