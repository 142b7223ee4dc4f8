"""Gloo comes before the worker's constructor; ranks of one node need no port. Not covered: two ranks (end-to-end)."""

import os
from types import SimpleNamespace

import pytest
import torch.distributed
from verl.utils import distributed

from verl_clipx.training.cpu.process_group import with_gloo


class Worker:
    """A worker."""

    def __init__(self, config):
        # As verl's own: must find the group and leave it alone; its own backend string would raise here.
        distributed.initialize_global_process_group_ray(backend="cpu:gloo,cpu:gloo")
        self.backend = torch.distributed.get_backend()
        self.config = config


@pytest.fixture
def one_rank(monkeypatch, tmp_path):
    """The variables that verl sets for the only rank of a worker group, and a folder for temporary files."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "RAY_LOCAL_WORLD_SIZE": "1", "WG_PREFIX": "group"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "no port")
    # Restored afterwards, whatever the worker sets.
    monkeypatch.setenv("DIST_INIT_METHOD", "")
    monkeypatch.delenv("DIST_INIT_METHOD")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    context = SimpleNamespace(get_node_id=lambda: "node", get_job_id=lambda: "job")
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    yield tmp_path
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_the_group_exists_when_the_workers_constructor_runs(one_rank):
    worker = with_gloo(Worker)(config=3)
    assert (worker.backend, worker.config) == ("gloo", 3)
    assert isinstance(worker, Worker)
    assert type(worker).__name__ == "GlooWorker" and type(worker).__doc__ == "A worker."
    assert os.environ["DIST_INIT_METHOD"] == f"file://{one_rank}/verl_clipx-node-job-group-no port"


def test_over_several_nodes_verls_port_is_kept(one_rank, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="no port"):
        with_gloo(Worker)(config=3)
    assert "DIST_INIT_METHOD" not in os.environ
