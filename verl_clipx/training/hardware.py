"""Says early that a run has no accelerator, and which switch runs it on the CPU."""

import os
from pathlib import Path

RAY_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")


def require_accelerator(ray_address: str | None, device: str | None = None) -> None:
    """Raises if this process would start a Ray cluster of its own on a machine without an accelerator.

    A driver without a GPU is normal where it joins a cluster, so nothing is said if one is named, running, or joined.

    Args:
        ray_address: the configuration's ray_kwargs.ray_init.address, or None.
        device: the configuration's trainer.device, or None if unknown.

    Raises:
        RuntimeError: says which switches start the run on the CPU.
    """
    import ray
    from verl.plugin.platform import get_platform

    if get_platform().device_name == "cpu" and device not in (None, "cpu"):
        raise RuntimeError(
            f"VERL_PLATFORM=cpu but trainer.device={device}: add +hardware=cpu, which carries what a CPU run needs, "
            "or unset VERL_PLATFORM."
        )
    if ray.is_initialized() or ray_address or os.environ.get("RAY_ADDRESS") or RAY_CURRENT_CLUSTER.exists():
        return
    if get_platform().is_available():
        return
    raise RuntimeError(
        "No GPU here, and no Ray cluster to join. To run on the CPU, set VERL_PLATFORM=cpu and add +hardware=cpu:\n"
        "    VERL_PLATFORM=cpu python -m verl.trainer.main_ppo +hardware=cpu …\n"
        "To join a cluster, set RAY_ADDRESS or +ray_kwargs.ray_init.address."
    )
