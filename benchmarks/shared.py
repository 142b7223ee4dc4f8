"""What several of these scripts need: verl's configuration under their overrides, and the time of a call."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch


class CpuEvent:
    """The interface of torch.cuda.Event, with the process's own time."""

    def record(self) -> None:
        self.at = time.process_time()

    def elapsed_time(self, other: "CpuEvent") -> float:
        return (other.at - self.at) * 1e3


def synchronize(device: str) -> None:
    """Waits until a device has done what it was given; a CPU always has."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], Any], device: str, calls: int) -> float:
    """Returns the mean seconds of some calls in a row, by CUDA's events or on a CPU by the process's own time."""
    event = partial(torch.cuda.Event, enable_timing=True) if device == "cuda" else CpuEvent
    start, end = event(), event()
    synchronize(device)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    synchronize(device)
    return start.elapsed_time(end) / calls / 1e3


def table(heads: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table in Markdown."""
    first, *others = (f"| {' | '.join(map(str, line))} |" for line in (heads, *rows))
    return "\n".join([first, f"|{'---|' * len(heads)}", *others])


def actor_config(*overrides: str):
    """verl's ActorConfig under overrides."""
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    needed = [
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return omega_conf_to_dataclass(compose("ppo_trainer", [*needed, *overrides]).actor_rollout_ref.actor)
