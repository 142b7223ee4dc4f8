"""verl's files of validations, written whole before the step that made them is logged.

verl writes them line by line in a thread: a run that was killed left a part of one, and a checkpoint of its step, from
which a resumed run doesn't validate again.
"""

import inspect
import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from wrapt import wrap_function_wrapper

# In verl's modules of trainers.
TRAINERS = ("PPOTrainer", "RayPPOTrainer")


def install(trainers: ModuleType) -> None:
    """Wraps how the trainers in one of verl's modules write samples down."""
    for name in TRAINERS:
        if hasattr(getattr(trainers, name, None), "_write_generations"):
            wrap_function_wrapper(trainers, f"{name}._write_generations", _whole_or_not_at_all)
            wrap_function_wrapper(trainers, f"{name}._dump_generations", _waiting)


def _whole_or_not_at_all(wrapped: Any, _: Any, positional: tuple, named: dict[str, Any]) -> None:
    """`_write_generations` into a folder beside, from which the file then moves."""
    call = inspect.signature(wrapped).bind(*positional, **named)
    folder, name = Path(call.arguments["dump_path"]), f"{call.arguments['global_steps']}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", suffix=".partial", dir=folder) as beside:
        call.arguments["dump_path"] = beside
        wrapped(*call.args, **call.kwargs)
        os.replace(Path(beside) / name, folder / name)


def _waiting(wrapped: Any, trainer: Any, positional: tuple, named: dict[str, Any]) -> None:
    """`_dump_generations`; for a validation it waits for the thread."""
    call = inspect.signature(wrapped).bind(*positional, **named)
    wrapped(*positional, **named)
    if call.arguments["dump_path"] == trainer.config.trainer.get("validation_data_dir"):
        for future in trainer._dump_futures:
            future.result()
