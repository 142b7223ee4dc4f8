"""What an estimate relies on besides the run: GPU data sheets, and numbers that the run does not determine."""

from dataclasses import dataclass, field

GIB = 2**30


@dataclass(frozen=True)
class GPU:
    """A GPU model, according to its data sheet.

    Args:
        memory: bytes that a process can use.
        flops: dense bfloat16 operations per second.
        bandwidth: memory bandwidth in bytes per second.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float


A100 = GPU("A100-SXM4-80GB", 79.1 * GIB, 312e12, 2.04e12)
H100 = GPU("H100-SXM5-80GB", 79.1 * GIB, 989e12, 3.35e12)
# By the first part of a Hydra group's name, as in +hardware=a100x8.
GPUS = {"a100": A100, "h100": H100}


def _assumption(default: float, meaning: str) -> float:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Assumptions:
    """Every number that neither the configuration nor the model determines. None was measured on a GPU."""

    process_gib: float = _assumption(
        1.5, "GiB on each GPU for the training process: CUDA context, NCCL, library workspaces"
    )
    server_gib: float = _assumption(
        2.5, "GiB on each GPU for the rollout server beyond its share, awake or asleep: CUDA context, NCCL, CUDA graphs"
    )
    allocator_share: float = _assumption(0.05, "share of the GPU's memory that fragmentation makes unusable")
    gathered_layers: int = _assumption(
        3, "layers that FSDP holds whole at a time: the one in use, the next, and one arriving"
    )
    compute_utilisation: float = _assumption(
        0.35, "share of the data sheet's operations a second in training and prefill"
    )
    bandwidth_utilisation: float = _assumption(0.5, "share of the data sheet's memory bandwidth while decoding")
    decode_step_seconds: float = _assumption(0.006, "seconds that a decoding step takes in addition to reading memory")
    mean_prompt_share: float = _assumption(0.5, "mean prompt, as a share of data.max_prompt_length")
    mean_response_share: float = _assumption(
        0.5, "mean response, as a share of data.max_response_length; one response of a batch reaches the limit"
    )
    other_share: float = _assumption(
        0.15, "share added to a step's time: rewards, weight transfer, offload, the driver; validation is not counted"
    )
