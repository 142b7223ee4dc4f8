"""What checks run on."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from verl_clipx.common.command_line import installed_version

# What the rows of the sample divide over.
RANKS = (1, 2, 4)


@dataclass(frozen=True)
class Machine:
    """What checks run on.

    Args:
        device: cuda, or cpu with gloo in NCCL's place.
        ranks: processes that train together, a GPU each.
    """

    device: str
    ranks: int
    flash_attention: bool = False
    vllm: bool = False

    def __post_init__(self) -> None:
        if self.device not in ("cuda", "cpu"):
            raise ValueError(f"--device {self.device}: must be cuda or cpu")
        if self.ranks not in RANKS:
            raise ValueError(f"--gpus {self.ranks}: must be one of {', '.join(map(str, RANKS))}")


def this_machine(device: str, ranks: int) -> Machine:
    """This machine, as far as checks are to use it."""
    import torch

    machine = Machine(device, ranks, *(importlib.util.find_spec(name) is not None for name in ("flash_attn", "vllm")))
    there = torch.cuda.device_count()
    if device == "cuda" and there < ranks:
        raise ValueError(f"--gpus {ranks}: torch sees {there} GPUs here. Lower it, or run what a CPU can: --device cpu")
    return machine


def described(machine: Machine) -> dict[str, object]:
    """What a report says of the machine."""
    import torch

    packages = {name: installed_version(name) for name in ("torch", "verl", "transformers", "vllm", "flash-attn")}
    names = [torch.cuda.get_device_name(index) for index in range(machine.ranks)] if machine.device == "cuda" else []
    return {"device": machine.device, "ranks": machine.ranks, "gpus": names, "packages": packages}


def sample_folder(folder: Path, tied: bool) -> Path:
    """Where the checks' model and its sample lie, in the folder of a run of checks."""
    return folder / ("tied" if tied else "policy")
