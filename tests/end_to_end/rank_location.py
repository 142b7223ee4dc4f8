"""For VERL_USE_EXTERNAL_MODULES, so that verl imports it in all its processes: a training rank writes down where it is.

RANK_LOCATIONS: the folder; a file rank_<RANK>.json for each rank, with Ray's node id, the node's address and the
process id as that process itself sees them.
"""

import json
import os
from pathlib import Path

import ray

# verl sets RANK for its training workers only.
if "RANK" in os.environ:
    location = {
        "node_id": ray.get_runtime_context().get_node_id(),
        "address": ray.util.get_node_ip_address(),
        "pid": os.getpid(),
        "world_size": int(os.environ["WORLD_SIZE"]),
    }
    path = Path(os.environ["RANK_LOCATIONS"], f"rank_{os.environ['RANK']}.json")
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(location))
    os.replace(partial, path)
