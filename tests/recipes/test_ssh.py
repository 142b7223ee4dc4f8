"""The Ray cluster by SSH, with an ssh that runs the remote command line here and a ray that only records. Covers: who
is head, who joins, that words with spaces arrive whole, the run, stop with a host that is gone. Not covered: SSH, Ray
on several machines.
"""

import re
from itertools import pairwise

import pytest

from .shell import RECIPES, Machine, checkout, overrides_of, stand_in

SCRIPT = RECIPES / "cluster" / "ssh.sh"
RECIPE = "recipes/acpo/run_qwen2.5_3b_fsdp.sh"

RUN_REMOTE_COMMAND_HERE = stand_in("ssh")
# Runs in place of Ray: notes the secret that `ray start` was called with.
NOTE_THE_SECRET = '[[ $1 != start ]] || echo "$RAY_AUTH_MODE $(cat "$RAY_AUTH_TOKEN_PATH")" >>"$HOME/secrets"'
PYTHON_ON_A_HOST = stand_in("python")


@pytest.fixture
def workdir(tmp_path):
    """The repository on the hosts."""
    return checkout(tmp_path / "workdir")


@pytest.fixture
def hosts(tmp_path):
    addresses = 'echo "fe80::1%eth0 10.0.0.1 172.17.0.1"'
    return Machine(
        tmp_path / "machine",
        ssh=RUN_REMOTE_COMMAND_HERE,
        ray=NOTE_THE_SECRET,
        hostname=addresses,
        python3=PYTHON_ON_A_HOST,
    )


def on_hosts(hosts):
    """Host and command, in order, for each remote command."""
    pairs = pairwise(hosts.calls)
    return [(call[3], command) for call, command in pairs if call[0] == "ssh" and command[0] != "ssh"]


def test_start_makes_a_head_lets_the_others_join_with_a_secret_and_waits_for_them(hosts, workdir):
    result = hosts.run(SCRIPT, "start", HOSTS="node1 node2 node3", NGPUS_PER_NODE="8", WORKDIR=str(workdir))
    assert result.returncode == 0, result.stderr
    options = ["--disable-usage-stats", "--num-gpus=8"]
    assert on_hosts(hosts) == [
        ("node1", ["hostname", "-I"]),
        ("node1", ["ray", "start", "--head", "--node-ip-address=10.0.0.1", "--port=6379", *options]),
        ("node2", ["ray", "start", "--address=10.0.0.1:6379", *options]),
        ("node3", ["ray", "start", "--address=10.0.0.1:6379", *options]),
        ("node1", ["python3", "recipes/cluster/wait_for_nodes.py", "10.0.0.1:6379", "3", "300"]),
    ]
    # Printed by the last: it ran in the repository of that host.
    assert result.stdout.strip() == str(workdir.resolve())
    # The hosts share a secret that others cannot read.
    hosts.run(SCRIPT, "start", HOSTS="node1 node2", WORKDIR=str(workdir))
    secrets = (hosts.commands.parent / "secrets").read_text().splitlines()
    first_start, second_start = secrets[:3], secrets[3:]
    assert re.fullmatch("token [0-9a-f]{64}", first_start[0]) and len({*first_start}) == 1
    assert len(second_start) == 2 and len({*second_start}) == 1 and second_start[0] != first_start[0]
    assert (workdir / "runs" / ".ray_auth_token").stat().st_mode & 0o077 == 0
    # The run folders' parent stays as open as any folder.
    (workdir / "ordinary").mkdir()
    assert (workdir / "runs").stat().st_mode == (workdir / "ordinary").stat().st_mode


def test_run_trains_on_the_head_with_all_hosts(hosts, workdir):
    words = ["METHOD=dapo", "DRY_RUN=1", RECIPE, "data.val_files=[a b,c]"]
    result = hosts.run(SCRIPT, "run", *words, HOSTS="node1 node2", HEAD_ADDRESS="10.5.5.5", WORKDIR=str(workdir))
    assert result.returncode == 0, result.stderr
    remote, guard, _ = hosts.calls
    assert guard[:4] == ["python3", "recipes/cluster/while_all_nodes_live.py", "bash", RECIPE]
    assert remote[:4] == ["ssh", "-o", "BatchMode=yes", "node1"]
    assert "RAY_ADDRESS=10.5.5.5:6379" in remote[4]
    assert f"RAY_AUTH_TOKEN_PATH={workdir}/runs/.ray_auth_token" in remote[4]
    assert "+recipe=acpo/countdown_3b_dapo_near" in result.stdout and "trainer.nnodes=2" in result.stdout
    # As %q prints it: one word.
    assert r"data.val_files=\[a\ b\,c\]" in result.stdout


def test_a_host_that_is_gone_stops_a_start_and_is_reported_by_a_stop_that_reaches_the_others(hosts, workdir):
    result = hosts.run(SCRIPT, "start", HOSTS="node1 node2 node3", GONE="node2", WORKDIR=str(workdir))
    assert result.returncode != 0 and "node3" not in {host for host, _ in on_hosts(hosts)}
    hosts.record.unlink()
    result = hosts.run(SCRIPT, "stop", HOSTS="node1 node2 node3", GONE="node2")
    assert result.returncode == 1 and "node2: ray stop failed" in result.stderr
    # The head comes last.
    assert on_hosts(hosts) == [("node3", ["ray", "stop"]), ("node1", ["ray", "stop"])]


def test_an_environment_is_activated_on_each_host(hosts, tmp_path):
    activate = tmp_path / "my environment.sh"
    activate.write_text("echo activated\n")
    result = hosts.run(SCRIPT, "status", HOSTS="node1", ACTIVATE=str(activate))
    assert "activated" in result.stdout
    assert hosts.calls[-1] == ["ray", "status", "--address=10.0.0.1:6379"]


@pytest.mark.parametrize("separator", ["\r\n", ", ", "\n\n  "])
def test_hosts_may_come_from_a_host_file(hosts, workdir, separator):
    names = ["node1", "user@node2", "10.0.0.3"]
    result = hosts.run(SCRIPT, "stop", HOSTS=separator.join(names) + separator, WORKDIR=str(workdir))
    assert result.returncode == 0, result.stderr
    assert [host for host, _ in on_hosts(hosts)] == [*names[1:], names[0]]


@pytest.mark.parametrize("shell", ["sh", "dash", "bash"])
def test_words_arrive_whole_whatever_the_login_shell(hosts, workdir, shell):
    words = [f"trainer.x={value}" for value in ("ü", "a\tb", "it's", "a\\", "$HOME `ls`", "a\nb")]
    variables = {"HOSTS": "node1", "HEAD_ADDRESS": "10.5.5.5", "WORKDIR": str(workdir), "LOGIN_SHELL": shell}
    result = hosts.run(SCRIPT, "run", "DRY_RUN=1", RECIPE, *words, **variables)
    assert result.returncode == 0, result.stderr
    assert overrides_of(result.stdout)[-len(words) :] == words
