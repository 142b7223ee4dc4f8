"""What the bounds remember between optimizer steps, and its file in the actor's folder of a checkpoint."""

import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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


class WaitingStatistics(NamedTuple):
    """Statistics of the latest taken step that are not yet summed over the ranks.

    Args:
        position: the name of the update within its rollout batch, as `RolloutBatch.position` returns it.
        of_this_rank: this rank's part of the statistics, float64.
    """

    position: str
    of_this_rank: Tensor


@dataclass
class ControllerState:
    """What lasts from one optimizer step to the next.

    Args:
        step: the number of optimizer steps that were taken; skipped steps do not count.
        statistics: under `scope=lagged`, from an update's position within its rollout batch to the statistics of the
            latest step taken there, summed over the ranks, float64.
        waiting: the latest taken step's statistics, until the next step or the next checkpoint sums them over the
            ranks; None if none wait. The sum is saved in a checkpoint, and what waits is not.
    """

    step: int = 0
    statistics: dict[str, Tensor] = field(default_factory=dict)
    waiting: WaitingStatistics | None = None

    def knows(self, position: str) -> bool:
        """Return whether there are statistics of an update at a position, or will be after the next all-reduce."""
        if position in self.statistics:
            return True
        return self.waiting is not None and self.waiting.position == position

    def keep_waiting(self, statistics: Tensor | None) -> None:
        """Keep the statistics that waited, at the position of their update.

        Args:
            statistics: their sum over all ranks, float64; None: none waited, and nothing is kept.
        """
        if statistics is None:
            return
        self.statistics[self.waiting.position] = statistics
        self.waiting = None

    def end_step(self, step: OptimizerStep, position: str) -> None:
        """Count a step that the optimizer took, and keep its statistics until they are summed over the ranks.

        A skipped step changes nothing.

        Args:
            step: the step, with the statistics of each of this rank's micro-batches.
            position: the name of the update within its rollout batch, as `RolloutBatch.position` returns it.
        """
        if not step.taken:
            return
        self.step += 1
        # None unless the scope is lagged, and empty if this rank computed no loss.
        if step.collected:
            self.waiting = WaitingStatistics(position, of_this_rank=sum(step.collected))


def describe_owner(method: Method) -> dict[str, Any]:
    """Describe the method and the parameters that a state belongs to. A state with another description is not used."""
    return {"method": method.name, "statistics_size": method.statistics_size, **method.parameters}


def write_state(folder: Path, state: ControllerState, method: Method) -> Path:
    """Write the state of a method's bounds into the actor's folder of a checkpoint; return the file's path.

    The file is complete or absent, also if the process is killed meanwhile.
    """
    content = {
        "format": FORMAT,
        "belongs_to": describe_owner(method),
        "step": state.step,
        # Python writes the shortest text that reads back as the same float64.
        "statistics": {position: vector.tolist() for position, vector in state.statistics.items()},
    }
    remove_partials(folder, f"{FILE}*")
    write_text(folder / FILE, json.dumps(content))
    return folder / FILE


def read_state(folder: Path, method: Method) -> ControllerState:
    """Read the state that `write_state` wrote into a folder.

    Raises:
        UnusableState: there is none, it is damaged, or it belongs to another method or other parameters.
    """
    path = folder / FILE
    belongs_to = describe_owner(method)
    try:
        content = read_json(path)
        file_format = content["format"]
        owner = content["belongs_to"]
        step = content["step"]
        statistics = content["statistics"]
    except FileNotFoundError:
        raise UnusableState(f"{path} does not exist: the checkpoint was not written by a run of this plugin") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, str(error)) from error
    if file_format != FORMAT:
        raise UnusableState(f"{path} has format {file_format!r}, this version reads {FORMAT}")
    if owner != belongs_to:
        owned = owner if isinstance(owner, dict) else {}
        different = sorted(key for key in {*owned, *belongs_to} if owned.get(key) != belongs_to.get(key))
        changes = ", ".join(f"{key}: {owned.get(key)!r} then, {belongs_to.get(key)!r} now" for key in different)
        raise UnusableState(f"{path} belongs to other parameters ({changes})")
    if type(step) is not int or step < 0:
        raise _damaged(path, f"step {step!r}")
    if not isinstance(statistics, dict):
        raise _damaged(path, f"statistics {statistics!s:.60}")
    vectors = {position: _read_vector(path, position, values, method) for position, values in statistics.items()}
    return ControllerState(step=step, statistics=vectors)


def state_rank(engine: Any, device: Any) -> int:
    """Return the rank that keeps the state: in the first data-parallel group, the rank that has the model's outputs.

    With pipeline stages it is a rank of the last stage, which sees the tokens. Every rank has to call this.
    """
    keeps_state = engine.is_mp_src_rank_with_outputs() and engine.get_data_parallel_rank() == 0
    own_rank = torch.distributed.get_rank() if keeps_state else -1
    rank = torch.tensor(own_rank, device=device)
    torch.distributed.all_reduce(rank, op=torch.distributed.ReduceOp.MAX)
    return int(rank)


def restored_state(folder: Path, settings: Settings, source: int, device: Any) -> ControllerState:
    """Return the state in the actor's folder of a checkpoint, which one rank reads and sends to the others.

    Every rank has to call this.

    Args:
        folder: the actor's folder inside the checkpoint.
        settings: those of the run that is resumed.
        source: the rank that reads.
        device: where the statistics will be.

    Returns:
        The checkpoint's state; an empty one, after a warning, if that is unusable and the bounds can start without it.

    Raises:
        RuntimeError: the state is unusable, the bounds need one, and clipx.missing_state is not "fresh".
    """
    sent: list[ControllerState | UnusableState | None] = [None]
    if torch.distributed.get_rank() == source:
        try:
            sent = [read_state(folder, settings.method)]
        except UnusableState as error:
            # Sent like a state, so that all ranks go on, or stop, together.
            sent = [error]
    torch.distributed.broadcast_object_list(sent, src=source)
    (received,) = sent
    if isinstance(received, ControllerState):
        received.statistics = {key: vector.to(device) for key, vector in received.statistics.items()}
        return received
    needs_state = settings.adaptive and settings.scope != "micro_batch"
    if settings.missing_state == "fresh" or not needs_state:
        logger.warning("clipx: the bounds start afresh: %s", received)
        return ControllerState()
    raise RuntimeError(f"{received}. To start the bounds afresh, set clipx.missing_state=fresh.")


def _damaged(path: Path, reason: str) -> UnusableState:
    """Return the error about a file that is no state; `reason` says what in it is wrong."""
    return UnusableState(f"{path} is cut short or not a state of this plugin ({reason})")


def _read_vector(path: Path, position: str, values: Any, method: Method) -> Tensor:
    """Return the statistics of an update at a position, float64.

    Raises:
        UnusableState: the values cannot be the method's statistics.
    """
    size = method.statistics_size
    is_vector = isinstance(values, list) and len(values) == size and all(map(_is_finite, values))
    if not is_vector:
        raise _damaged(path, f"statistics of {position} must be {size} finite numbers, not {values!s:.60}")
    vector = torch.tensor(values, dtype=torch.float64)
    if (vector[method.never_negative] < 0).any():
        raise _damaged(path, f"statistics of {position} have counts below 0")
    return vector


def _is_finite(value: Any) -> bool:
    """Return whether a value is a number, and no boolean, that a finite float64 can hold."""
    return type(value) in (int, float) and -sys.float_info.max <= value <= sys.float_info.max
