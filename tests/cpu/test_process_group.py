"""Gloo comes before the worker's constructor. Not covered: two ranks (end-to-end runs)."""

import torch.distributed
from verl.utils import distributed

from verl_clipx.cpu.process_group import with_gloo


def test_the_group_exists_when_the_worker_s_constructor_runs(monkeypatch, tmp_path):
    class Worker:
        """A worker."""

        def __init__(self, config):
            # As verl's own: must find the group and leave it alone; its own backend string would raise here.
            distributed.initialize_global_process_group_ray(backend="cpu:gloo,cpu:gloo")
            self.backend, self.config = torch.distributed.get_backend(), config

    monkeypatch.setenv("DIST_INIT_METHOD", f"file://{tmp_path}/store")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    try:
        worker = with_gloo(Worker)(config=3)
    finally:
        torch.distributed.destroy_process_group()
    assert (worker.backend, worker.config) == ("gloo", 3)
    assert isinstance(worker, Worker)
    assert type(worker).__name__ == "GlooWorker" and type(worker).__doc__ == "A worker."
