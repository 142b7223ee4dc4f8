"""verl's files of validations, written whole before the step that made them is logged.

verl writes them line by line in a thread. Without this, a killed run could leave a part of one and a checkpoint of the
same step, from which a resumed run does not validate again.
"""

import inspect
import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from wrapt import wrap_function_wrapper

# The trainers' classes in verl's modules.
TRAINERS = ("PPOTrainer", "RayPPOTrainer")


def install(trainers: ModuleType) -> None:
    """Wraps how the trainers in one of verl's modules write their samples to files."""
    for name in TRAINERS:
        if hasattr(getattr(trainers, name, None), "_write_generations"):
            wrap_function_wrapper(trainers, f"{name}._write_generations", _whole_or_not_at_all)
            wrap_function_wrapper(trainers, f"{name}._dump_generations", _waiting)


def _whole_or_not_at_all(wrapped: Any, _: Any, positional: tuple, named: dict[str, Any]) -> None:
    """Runs `_write_generations` in a temporary folder, from which it moves the file to its place."""
    call = inspect.signature(wrapped).bind(*positional, **named)
    folder, name = Path(call.arguments["dump_path"]), f"{call.arguments['global_steps']}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", suffix=".partial", dir=folder) as beside:
        call.arguments["dump_path"] = beside
        wrapped(*call.args, **call.kwargs)
        os.replace(Path(beside) / name, folder / name)


def _waiting(wrapped: Any, trainer: Any, positional: tuple, named: dict[str, Any]) -> None:
    """Runs `_dump_generations`, and for a validation waits for the thread that writes."""
    call = inspect.signature(wrapped).bind(*positional, **named)
    wrapped(*positional, **named)
    if call.arguments["dump_path"] == trainer.config.trainer.get("validation_data_dir"):
        for future in trainer._dump_futures:
            future.result()
