"""The machine that checks run on."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from verl_clipx.common.command_line import installed_version

# The sample's rows divide evenly over these numbers of ranks.
RANKS = (1, 2, 4)


@dataclass(frozen=True)
class Machine:
    """The machine that checks run on.

    Args:
        device: "cuda", or "cpu" with gloo instead of NCCL.
        ranks: number of processes that train together, each with one GPU.

    Raises:
        ValueError: the device or the number of ranks is not supported; the message names the option.
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
    """Describe this machine to the checks.

    Raises:
        ValueError: see `Machine`; also if there are fewer GPUs than ranks.
    """
    import torch

    machine = Machine(device, ranks, *(importlib.util.find_spec(name) is not None for name in ("flash_attn", "vllm")))
    there = torch.cuda.device_count()
    if device == "cuda" and there < ranks:
        raise ValueError(
            f"--gpus {ranks}: torch sees {there} GPUs here. Lower it, or run the checks that need no GPU: --device cpu"
        )
    return machine


def described(machine: Machine) -> dict[str, object]:
    """Return what a report says about the machine."""
    import torch

    packages = {name: installed_version(name) for name in ("torch", "verl", "transformers", "vllm", "flash-attn")}
    names = [torch.cuda.get_device_name(index) for index in range(machine.ranks)] if machine.device == "cuda" else []
    return {"device": machine.device, "ranks": machine.ranks, "gpus": names, "packages": packages}


def sample_folder(folder: Path, tied: bool) -> Path:
    """Return the folder of the checks' model and its sample.

    Args:
        folder: the folder of a run of checks.
    """
    return folder / ("tied" if tied else "policy")
