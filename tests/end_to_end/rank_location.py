"""For VERL_USE_EXTERNAL_MODULES: a training rank writes down where it is, as it sees itself, in the folder
RANK_LOCATIONS."""

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
