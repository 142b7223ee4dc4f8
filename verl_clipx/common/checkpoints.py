"""From which of verl's checkpoints a run goes on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_clipx.common.files import read_whole_number
from verl_clipx.common.run_files import checkpoint_step

# verl's file with the step of the last checkpoint; verl writes it once the rest of the checkpoint is there.
LATEST = "latest_checkpointed_iteration.txt"


def resumed_step(trainer: Mapping[str, Any]) -> int:
    """The step of the checkpoint that a run continues from, found as verl finds it; 0 if there is none."""
    mode = trainer.get("resume_mode", "disable")
    if mode == "resume_path":
        return checkpoint_step(trainer.get("resume_from_path"))
    folder = Path(str(trainer.get("default_local_dir")))
    if mode != "auto" or not (folder / LATEST).exists():
        return 0
    step = read_whole_number(folder / LATEST)
    # Without the folder verl trains from scratch.
    return step if (folder / f"global_step_{step}").exists() else 0
