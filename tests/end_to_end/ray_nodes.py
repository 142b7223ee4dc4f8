"""Ray nodes as process trees of one machine, each with a loopback address of its own (Linux has all of 127.0.0.0/8)."""

import os
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

from .runs import REPOSITORY, kill_tree

# Not 127.0.0.1: Ray replaces it by the machine's own address.
HEAD = "127.0.0.2"
NODES = ("127.0.0.3", "127.0.0.4")
SECONDS_TO_JOIN = 120
# Ray gives a starting node 15 s for its agents; on a busy machine it gives up now and then.
ATTEMPTS = 3


@dataclass
class Cluster:
    """Ray nodes that share a secret: a head that only coordinates, and nodes with one worker slot (Ray's GPU) each, so
    that the placement group of one rank fits on each.
    """

    # Ray's session folders and logs. Short, because Ray's sockets in it may not exceed 107 characters.
    folder: Path
    # Of all nodes' processes; whoever connects needs it too.
    environment: dict[str, str]
    # Of the head.
    port: int
    # By address `ray start --block`, the ancestor of all processes of a node; the head first.
    nodes: dict[str, psutil.Popen] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """What a run on the cluster needs in its environment."""
        return {**self.environment, "RAY_ADDRESS": f"{HEAD}:{self.port}"}

    def start(self, *addresses: str) -> None:
        """Starts nodes one after the other and waits until the cluster has exactly its nodes.

        One that was there before is killed first, with all its processes. The very first one becomes the head, which
        has no worker slot.
        """
        for address in addresses:
            if address in self.nodes:
                kill_node(self.nodes[address])
            if self.nodes:
                # As in configs/hardware/cpu.yaml: verl reserves more CPUs than it uses.
                role = [f"--address={HEAD}:{self.port}", "--num-gpus=1", "--num-cpus=64"]
            else:
                role = ["--head", f"--port={self.port}", "--num-gpus=0", "--num-cpus=0"]
                role += ["--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
            ray = [str(Path(__file__).with_name("subreaper.py")), str(Path(sys.executable).with_name("ray"))]
            place = [f"--node-ip-address={address}", f"--temp-dir={self.folder / address}"]
            place += [f"--dashboard-agent-listen-port={free_port()}", "--object-store-memory=200000000"]
            command = [sys.executable, *ray, "start", "--block", "--disable-usage-stats", *place, *role]
            self.nodes[address] = self._start_node(address, command)
        self._wait()

    def _start_node(self, address: str, command: list[str]) -> psutil.Popen:
        log = self.folder / f"{address}.log"
        for _ in range(ATTEMPTS):
            with log.open("wb") as output:
                node = psutil.Popen(command, stdout=output, stderr=output, env=os.environ | self.environment)
            while node.poll() is None:
                if b"Ray runtime started" in log.read_bytes():
                    return node
                time.sleep(0.1)
        raise AssertionError(f"{address} ended in each of {ATTEMPTS} attempts to start\n{self.logs()}")

    def _wait(self) -> None:
        script = str(REPOSITORY / "recipes" / "cluster" / "wait_for_nodes.py")
        command = [sys.executable, script, f"{HEAD}:{self.port}", str(len(self.nodes)), str(SECONDS_TO_JOIN)]
        environment = os.environ | self.environment
        deadline = time.monotonic() + SECONDS_TO_JOIN
        # Ray may count a killed node for a while, so that there are more than the script waits for.
        while True:
            try:
                result = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=2 * SECONDS_TO_JOIN
                )
            except subprocess.TimeoutExpired as error:
                raise AssertionError(f"{error}\n{self.logs()}") from None
            if result.stdout.split()[1:] == sorted(self.nodes):
                return
            assert time.monotonic() < deadline, f"{result.stdout}{result.stderr}\n{self.logs()}"

    def stop(self) -> None:
        """Kills all processes of all nodes; `ray stop` would kill every Ray process of the user."""
        for node in self.nodes.values():
            kill_node(node)

    def processes(self, address: str, name: str) -> list[psutil.Process]:
        """The processes of a node whose program, or whose actor as Ray shows it, has a name that begins so."""
        every = self.nodes[address].children(recursive=True)
        return [process for process in every if Path(_program(process)).name.startswith(name)]

    def users(self) -> list[psutil.Process]:
        """Processes of this machine that have a file in the cluster's folder open, as Ray's have their logs."""
        return [process for process in psutil.process_iter() if _has_open(process, self.folder)]

    def logs(self, lines: int = 30) -> str:
        """The last lines of what the nodes have printed and of their raylets' logs."""
        files = sorted((*self.folder.glob("*.log"), *self.folder.glob("*/session_2*/logs/raylet.*")))
        ends = ["\n".join(file.read_text(errors="replace").splitlines()[-lines:]) for file in files]
        return "\n".join(f"== {file}\n{end}" for file, end in zip(files, ends, strict=True))


@contextmanager
def ray_cluster(**environment: str) -> Iterator[Cluster]:
    """A cluster without nodes, and with further variables for their processes; at the end none of these is left."""
    folder = Path(tempfile.mkdtemp(prefix="nodes-", dir="/tmp"))
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    cluster = Cluster(folder, {**secret, **environment}, free_port())
    try:
        yield cluster
    finally:
        cluster.stop()
        left = cluster.users()
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"outside the trees of the nodes: {left}"


def kill_node(node: psutil.Popen) -> None:
    """Kills all processes of a node."""
    kill_tree(node.pid)
    node.wait()


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def _program(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline()).partition(" ")[0]
    return ""


def _has_open(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.Error, OSError):
        return any(Path(file.path).is_relative_to(folder) for file in process.open_files())
    return False
