"""What the bounds remember between optimizer steps, and its file beside the actor's checkpoint."""

import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_clipx.common.files import read_json, remove_partials, write_text
from verl_clipx.losses.methods import Method
from verl_clipx.run.config import Settings
from verl_clipx.training.worker.step import OptimizerStep

logger = logging.getLogger(__name__)

FILE = "clipx_state.json"
FORMAT = 2


class UnusableState(Exception):
    """The state file is missing, damaged or belongs to another run's parameters; the message says which and where."""


@dataclass
class ControllerState:
    """What lasts from one optimizer step to the next.

    Args:
        step: the number of optimizer steps that were taken; skipped steps do not count.
        statistics: under `scope=lagged`, from an update's position within its rollout batch to the statistics of the
            latest step taken there, float64.
        waiting: the latest taken step's position and this rank's part of its statistics, until the next all-reduce sums
            it over the ranks; not saved.
    """

    step: int = 0
    statistics: dict[str, Tensor] = field(default_factory=dict)
    waiting: tuple[str, Tensor] | None = None

    def knows(self, position: str) -> bool:
        """Returns whether there are statistics of an update at a position."""
        return position in self.statistics or (self.waiting is not None and self.waiting[0] == position)

    def remember(self, statistics: Tensor | None) -> None:
        """Keeps what waited, summed over all ranks."""
        if statistics is not None:
            position, _ = self.waiting
            self.waiting = None
            self.statistics[position] = statistics

    def end(self, step: OptimizerStep, position: str) -> None:
        """Ends a step. If the optimizer took it, statistics that it collected wait for the next step's all-reduce."""
        if step.taken:
            self.step += 1
            if step.collected:
                self.waiting = position, sum(step.collected)


def description(method: Method) -> dict[str, Any]:
    """Describes a method and its parameters, to which a state belongs; one with another description is not used."""
    return {"method": method.name, "statistics_size": method.statistics_size, **method.parameters}


def write_state(folder: Path, state: ControllerState, method: Method) -> Path:
    """Writes the state of a method's bounds into the actor's checkpoint folder, or nothing; returns the file's path."""
    content = {
        "format": FORMAT,
        "belongs_to": description(method),
        "step": state.step,
        # Python writes the shortest text that reads back as the same float64.
        "statistics": {position: vector.tolist() for position, vector in state.statistics.items()},
    }
    remove_partials(folder, f"{FILE}*")
    write_text(folder / FILE, json.dumps(content))
    return folder / FILE


def read_state(folder: Path, method: Method) -> ControllerState:
    """Reads a state that `write_state` wrote and that belongs to a method with its parameters; raises UnusableState."""
    path = folder / FILE
    belongs_to = description(method)
    try:
        content = read_json(path)
        form = content["format"]
        owner = content["belongs_to"]
        step = content["step"]
        statistics = content["statistics"]
    except FileNotFoundError:
        raise UnusableState(f"{path} does not exist: the checkpoint was not written by a run of this plugin") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, str(error)) from error
    if form != FORMAT:
        raise UnusableState(f"{path} has format {form!r}, this version reads {FORMAT}")
    if owner != belongs_to:
        theirs = owner if isinstance(owner, dict) else {}
        different = sorted(key for key in {*theirs, *belongs_to} if theirs.get(key) != belongs_to.get(key))
        changes = ", ".join(f"{key}: {theirs.get(key)!r} then, {belongs_to.get(key)!r} now" for key in different)
        raise UnusableState(f"{path} belongs to other parameters ({changes})")
    if type(step) is not int or step < 0:
        raise _damaged(path, f"step {step!r}")
    if not isinstance(statistics, dict):
        raise _damaged(path, f"statistics {statistics!s:.60}")
    return ControllerState(step, {key: _vector(path, key, values, method) for key, values in statistics.items()})


def state_rank(engine: Any, device: Any) -> int:
    """Returns the rank that keeps the state: the one of the first data-parallel rank that has the model's outputs.

    With pipeline stages it is a rank of the last one, which sees tokens. Every rank has to call this.
    """
    keeps_state = engine.is_mp_src_rank_with_outputs() and engine.get_data_parallel_rank() == 0
    own_rank = torch.distributed.get_rank() if keeps_state else -1
    rank = torch.tensor(own_rank, device=device)
    torch.distributed.all_reduce(rank, op=torch.distributed.ReduceOp.MAX)
    return int(rank)


def restored_state(folder: Path, settings: Settings, source: int, device: Any) -> ControllerState:
    """Returns the state in a checkpoint's actor folder, which one rank reads and sends to the others.

    Args:
        folder: the actor's, inside the checkpoint.
        settings: those of the run that goes on.
        source: the rank that reads; every rank has to call this.
        device: where the statistics will be.

    Raises:
        RuntimeError: the state is unusable, the bounds need one, and clipx.missing_state is not "fresh".
    """
    sent: list[Any] = [None]
    if torch.distributed.get_rank() == source:
        try:
            sent = [read_state(folder, settings.method)]
        except UnusableState as error:
            sent = [error]
    torch.distributed.broadcast_object_list(sent, src=source)
    (state,) = sent
    if isinstance(state, ControllerState):
        state.statistics = {key: vector.to(device) for key, vector in state.statistics.items()}
        return state
    if settings.missing_state == "fresh" or not settings.adaptive or settings.scope == "micro_batch":
        logger.warning("clipx: the bounds start afresh: %s", state)
        return ControllerState()
    raise RuntimeError(f"{state}. To start the bounds afresh, set clipx.missing_state=fresh.")


def _damaged(path: Path, what: str) -> UnusableState:
    return UnusableState(f"{path} is cut short or not a state of this plugin ({what})")


def _vector(path: Path, position: str, values: Any, method: Method) -> Tensor:
    """Returns the statistics of an update at a position, float64; raises UnusableState if they cannot be a method's."""
    size = method.statistics_size
    if not (isinstance(values, list) and len(values) == size and all(map(_is_finite, values))):
        raise _damaged(path, f"statistics of {position} must be {size} finite numbers, not {values!s:.60}")
    vector = torch.tensor(values, dtype=torch.float64)
    if (vector[method.never_negative] < 0).any():
        raise _damaged(path, f"statistics of {position} have counts below 0")
    return vector


def _is_finite(value: Any) -> bool:
    # A whole number too large for a float does not count as finite.
    return type(value) in (int, float) and -sys.float_info.max <= value <= sys.float_info.max
