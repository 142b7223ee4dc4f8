"""Gloo for verl's training workers.

verl builds the backend string ``cpu:gloo,<device>:<backend>``, which on the CPU names the same device twice, and torch
rejects that. verl keeps a process group that already exists, so the group is created first.
"""

import os
import tempfile


def with_gloo(worker_class: type) -> type:
    """Return a subclass of a verl TrainingWorker that initialises gloo before the worker's own constructor runs."""

    class GlooTrainingWorker(worker_class):
        def __init__(self, *args, **kwargs):
            from verl.utils.distributed import initialize_global_process_group_ray

            on_one_node = os.environ.get("RAY_LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
            if on_one_node and "DIST_INIT_METHOD" not in os.environ:
                os.environ["DIST_INIT_METHOD"] = meeting_file()
            initialize_global_process_group_ray(backend="gloo")
            super().__init__(*args, **kwargs)

    # Ray shows the name in the worker's output.
    name = f"Gloo{worker_class.__name__}"
    GlooTrainingWorker.__name__ = name
    GlooTrainingWorker.__qualname__ = name
    GlooTrainingWorker.__doc__ = worker_class.__doc__
    return GlooTrainingWorker


def meeting_file() -> str:
    """Return a file through which the ranks of one node find each other, for verl's DIST_INIT_METHOD.

    verl has them meet at a port that it looked up and released many seconds before the first rank listens there. If
    other runs share the machine, another process may have taken the port by then.
    """
    import ray

    context = ray.get_runtime_context()
    # What no other group of workers has in common.
    parts = (context.get_node_id(), context.get_job_id(), os.environ["WG_PREFIX"], os.environ["MASTER_PORT"])
    return f"file://{tempfile.gettempdir()}/verl_clipx-{'-'.join(parts)}"
