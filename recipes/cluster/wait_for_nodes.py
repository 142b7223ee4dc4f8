"""Waits until a Ray cluster has all its nodes: wait_for_nodes.py ADDRESS NODES SECONDS. Exit code 1 if it never has."""

import sys
import time

import ray


def wait_for_nodes(address: str, nodes: int, seconds: float, poll: float = 2.0) -> list[str]:
    """Addresses of the living nodes, once there are enough.

    Args:
        address: of the head, host:port.
        nodes: how many there must be.
        seconds: deadline.
        poll: seconds between looks.

    Raises:
        TimeoutError: fewer nodes at the deadline; names those that are there.
    """
    ray.init(address, log_to_driver=False, logging_level="ERROR")
    deadline = time.monotonic() + seconds
    while True:
        alive = sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
        if len(alive) >= nodes:
            return alive
        if time.monotonic() >= deadline:
            raise TimeoutError(
                f"{len(alive)} of {nodes} nodes joined {address} within {seconds:g} s: {', '.join(alive)}; "
                "look at the missing hosts' /tmp/ray/session_latest/logs and at firewalls between them"
            )
        time.sleep(poll)


if __name__ == "__main__":
    try:
        print("nodes:", *wait_for_nodes(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
    except TimeoutError as error:
        sys.exit(str(error))
