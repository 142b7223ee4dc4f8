"""Sets the environment that verl reads in a worker, for a run's only process; torch and verl are imported later."""

import os
import tempfile


def become_only_rank(platform: str = "cpu") -> None:
    """Makes this process the only rank of a run on a CPU, or on one GPU (cuda). Call this before verl is imported."""
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        # verl reads both, but nothing listens there.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "DIST_INIT_METHOD": f"file://{tempfile.mkdtemp()}/ranks",
        **({"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"} if platform == "cpu" else {}),
    }
