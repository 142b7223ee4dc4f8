"""What the bounds remember between optimizer steps, and its file beside the actor's checkpoint."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_clipx.files import replacing
from verl_clipx.methods import Method

FILE = "clipx_state.json"
FORMAT = 2

# Formats that are read. 1 named the class of the bounds, and of the parameters only those.
READABLE = (1, 2)


class UnusableState(Exception):
    """The state file is missing, cut short or somebody else's; the message says which and where."""


@dataclass
class ControllerState:
    """What lasts from one optimizer step to the next.

    Args:
        step: optimizer steps that were taken (skipped ones don't count).
        statistics: position of an update within its rollout batch to the statistics of its latest taken step (or their
            exponential average), float64.
    """

    step: int = 0
    statistics: dict[str, Tensor] = field(default_factory=dict)


def description(method: Method) -> dict[str, Any]:
    """What a state belongs to: a state of other parameters does not fit."""
    return {"method": method.name, **method.parameters}


def write_state(folder: Path, state: ControllerState, belongs_to: dict[str, Any]) -> Path:
    """Writes the state, whole or not at all.

    Args:
        folder: the actor's checkpoint folder; made if missing.
        state: the state.
        belongs_to: from `description`.

    Returns:
        The file.
    """
    content = {
        "format": FORMAT,
        "belongs_to": belongs_to,
        "step": state.step,
        # Python prints the shortest text that reads back as the same float64.
        "statistics": {position: vector.tolist() for position, vector in state.statistics.items()},
    }
    with replacing(folder / FILE) as partial:
        partial.write_text(json.dumps(content))
    return folder / FILE


def read_state(folder: Path, belongs_to: dict[str, Any]) -> ControllerState:
    """Reads a state that `write_state` wrote.

    Args:
        folder: the actor's checkpoint folder.
        belongs_to: from `description`, of the run that resumes.

    Raises:
        UnusableState: the file is missing, cut short, of another format, or belongs to other parameters.
    """
    path = folder / FILE
    try:
        content = json.loads(path.read_text())
        form, owner, step, statistics = (content[key] for key in ("format", "belongs_to", "step", "statistics"))
        vectors = {key: torch.tensor(vector, dtype=torch.float64) for key, vector in statistics.items()}
        state = ControllerState(int(step), vectors)
    except FileNotFoundError:
        raise UnusableState(f"{path} does not exist: the checkpoint was not written by a run of this plugin") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnusableState(f"{path} is cut short or not a state of this plugin ({error})") from error
    if form not in READABLE:
        raise UnusableState(f"{path} has format {form!r}, this version reads {' and '.join(map(str, READABLE))}")
    theirs = owner if isinstance(owner, dict) else {}
    if form == 1:
        theirs = {key: value for key, value in theirs.items() if key != "controller"}
        belongs_to = {key: value for key, value in belongs_to.items() if key in theirs or key == "method"}
    if theirs != belongs_to:
        different = sorted(key for key in {*theirs, *belongs_to} if theirs.get(key) != belongs_to.get(key))
        changes = ", ".join(f"{key}: {theirs.get(key)!r} then, {belongs_to.get(key)!r} now" for key in different)
        raise UnusableState(f"{path} belongs to other parameters ({changes})")
    return state
