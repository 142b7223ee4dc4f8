"""Gloo for verl's training workers.

verl builds the backend string ``cpu:gloo,<device>:<backend>``, which on the CPU names the same device twice, and torch
refuses that. It leaves a process group alone that already exists, so the group is made first.
"""


def with_gloo(worker_class: type) -> type:
    """A subclass of a verl TrainingWorker that initialises gloo before the worker's own constructor runs.

    Args:
        worker_class: ``verl.workers.engine_workers.TrainingWorker`` or a subclass of it.

    Returns:
        The subclass, to be set as ``ActorRolloutRefWorker.actor_worker_cls`` or ``ref_worker_cls``.
    """

    class GlooTrainingWorker(worker_class):
        def __init__(self, *args, **kwargs):
            from verl.utils.distributed import initialize_global_process_group_ray

            initialize_global_process_group_ray(backend="gloo")
            super().__init__(*args, **kwargs)

    GlooTrainingWorker.__name__ = GlooTrainingWorker.__qualname__ = f"Gloo{worker_class.__name__}"
    GlooTrainingWorker.__doc__ = worker_class.__doc__
    return GlooTrainingWorker
