"""Ray nodes as process trees of one machine, each with a loopback address of its own (Linux has all of 127.0.0.0/8)."""

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from .process_tree import kill_tree

REPOSITORY = Path(__file__).parents[2]
# Not 127.0.0.1: Ray replaces it by the machine's own address.
HEAD = "127.0.0.2"
SECONDS_TO_JOIN = 120


@dataclass(frozen=True)
class Node:
    """A running `ray start --block`.

    Args:
        address: of the node.
        process: ancestor of all its processes, also of those whose raylet was killed.
    """

    address: str
    process: subprocess.Popen

    def processes(self) -> list[psutil.Process]:
        """All processes of the node that run now."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def raylet(self) -> psutil.Process:
        """The node's raylet."""
        (found,) = [process for process in self.processes() if process.name() == "raylet"]
        return found

    def node_id(self) -> str:
        """Ray's id of the node, as its raylet was told."""
        return re.search(r"--node_id=(\w+)", " ".join(self.raylet().cmdline())).group(1)


@dataclass
class Cluster:
    """Ray nodes that share a secret, with one worker slot (Ray's GPU) each: a placement group of one rank fits on each.

    Args:
        folder: Ray's session folders and logs. Short, because Ray's sockets in it may not exceed 107 characters.
        environment: of all nodes' processes; whoever connects needs it too.
        port: of the head.
        nodes: by address; the head first.
    """

    folder: Path
    environment: dict[str, str]
    port: int
    nodes: dict[str, Node] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """What RAY_ADDRESS has to be."""
        return f"{HEAD}:{self.port}"

    def start(self, *addresses: str) -> None:
        """Starts nodes and waits until the cluster has all that it should; the first one ever is the head.

        Raises:
            AssertionError: it does not have them in time.
        """
        for address in addresses:
            role = [f"--address={self.address}"] if self.nodes else ["--head", f"--port={self.port}"]
            if not self.nodes:
                role += ["--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
            command = [
                *(sys.executable, str(Path(__file__).with_name("subreaper.py"))),
                *(str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats", *role),
                f"--node-ip-address={address}",
                f"--temp-dir={self.folder / address}",
                f"--dashboard-agent-listen-port={free_port()}",
                # As in configs/hardware/cpu.yaml: verl reserves more CPUs than it uses.
                *("--num-gpus=1", "--num-cpus=64", "--object-store-memory=200000000"),
            ]
            with (self.folder / f"{address}.log").open("ab") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **self.environment})
            self.nodes[address] = Node(address, process)
            self._wait()

    def _wait(self) -> None:
        script = REPOSITORY / "recipes" / "cluster" / "wait_for_nodes.py"
        command = [sys.executable, str(script), self.address, str(len(self.nodes)), str(SECONDS_TO_JOIN)]
        environment = {**os.environ, **self.environment}
        try:
            # Ray itself waits for the head; after that the script has a deadline of its own.
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * SECONDS_TO_JOIN)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None
        assert done.returncode == 0, f"{done.stderr}\n{self.logs()}"

    def stop(self) -> None:
        """Kills all processes of all nodes; `ray stop` would kill every Ray process of the user.

        Raises:
            TimeoutError: some are still there.
        """
        for node in self.nodes.values():
            kill_tree(node.process.pid)
            node.process.wait()

    def left(self) -> list[psutil.Process]:
        """Processes that have a file in the cluster's folder open, as all of Ray's have."""
        return [process for process in psutil.process_iter() if _has_open(process, self.folder)]

    def logs(self, lines: int = 30) -> str:
        """The last lines of what the nodes have printed and of their raylets' logs."""
        files = sorted((*self.folder.glob("*.log"), *self.folder.glob("*/session_2*/logs/raylet.*")))
        ends = ["\n".join(file.read_text(errors="replace").splitlines()[-lines:]) for file in files]
        return "\n".join(f"== {file}\n{end}" for file, end in zip(files, ends, strict=True))


@contextmanager
def ray_cluster(**environment: str) -> Iterator[Cluster]:
    """A cluster without nodes; at the end all its processes are killed and its folder is removed.

    Args:
        environment: further variables of all nodes' processes.

    Raises:
        AssertionError: at the end, if a process is left.
    """
    folder = Path(tempfile.mkdtemp(prefix="nodes-", dir="/tmp"))
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    cluster = Cluster(folder, {**secret, **environment}, free_port())
    try:
        yield cluster
    finally:
        cluster.stop()
        left = cluster.left()
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"outside the trees of the nodes: {left}"


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def seconds_until(condition, deadline: float, poll: float = 0.01) -> float | None:
    """Waits for a condition; returns the seconds that it took, None if it did not come true within the deadline."""
    start = time.monotonic()
    while time.monotonic() - start < deadline:
        if condition():
            return time.monotonic() - start
        time.sleep(poll)
    return None


def _has_open(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.Error, OSError):
        return any(Path(file.path).is_relative_to(folder) for file in process.open_files())
    return False
