"""The checks that run on the ranks: each compares an update under one of verl's options with the expected update.

Each check gets a bench and returns what it measured; an exception also counts as a failure. `CHECKS` lists them in
order, with the conditions that prevent a check from running.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_clipx.gpu_check.engine import ACTOR, ENGINE, MODEL, ROLLOUT, Bench, attention, loss_call, precision
from verl_clipx.gpu_check.losses import ROUNDING, SAME, counted_kernels, counted_syncs, difference, example
from verl_clipx.gpu_check.machine import Machine
from verl_clipx.gpu_check.memory import memory
from verl_clipx.gpu_check.report import Measured
from verl_clipx.methods import METHODS
from verl_clipx.worker.planner import TOLERATED_IN_HALF
from verl_clipx.worker.step import MicroBatch, in_micro_batch
from verl_clipx.worker.traced_columns import Part
from verl_clipx.worker.tracer import TracedRows

GRPO = ("+clipx=grpo",)
PACKING = f"{MODEL}.use_remove_padding=True"
HALF = precision("bf16")
# The options that runs on GPUs use.
FLASH = (PACKING, attention("flash_attention_2"), *HALF)
# With one sequence at a time, each rank holds half of its tokens; in a packed micro-batch few sequences would be split.
SHARING = (f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1")
FUSED = (f"{MODEL}.use_fused_kernels=True", f"{MODEL}.fused_kernel_options.impl_backend=torch")

# Tolerance between an update in bfloat16, with 8 significant bits, and the float64 one. On a CPU it is 0.02; it is 0.9
# if two ranks share sequences under torch's attention, which verl does not support: each attends only to its own part.
ROUNDING_HALF = 0.1
# Tolerance for bounds, relative to the largest of them: what training itself tolerates.
BOUNDS = 0.01
# Maximum number of host syncs in a loss call with all its metrics.
SYNCS = 1
# Traced rows of a micro-batch.
TRACED = [1, 4]


def relative_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the norm of the difference of two gradients, relative to the norm of the expected one.

    Args:
        found, expected: gradients by weight name; weights that `expected` lacks do not count.
    """
    differences = [found[name].double() - value for name, value in expected.items()]
    return norm(differences) / norm(expected.values())


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm over all elements of all tensors."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def against_float64(bench: Bench, *overrides: str, tolerance: float, tied: bool = False) -> Measured:
    """Compare GRPO's update under overrides with the float64 update."""
    sample = bench.sample(tied=tied)
    update = bench.update(*GRPO, *overrides, tied=tied)
    found = compared(
        relative_difference(update.change, sample.gradients),
        abs(update.loss - sample.loss) / sample.loss_scale,
        tolerance,
        "float64 without verl",
    )
    numbers = {**found.numbers, "receipt_difference": update.receipt}
    return Measured(found.passed, f"{found.found}; receipt: {update.receipt:.1e}", numbers)


def compared(gradient: float, loss: float, tolerance: float, reference: str) -> Measured:
    """Return the verdict on relative differences of gradient and loss."""
    return Measured(
        # Written so that a NaN does not pass.
        gradient <= tolerance and loss <= tolerance,
        f"gradient {gradient:.1e} and loss {loss:.1e} from {reference}, at most {tolerance:g}",
        {"gradient_difference": gradient, "loss_difference": loss, "tolerance": tolerance},
    )


def vanilla_and_grpo(bench: Bench) -> Measured:
    """Compare verl's vanilla loss with our GRPO, whose bounds are the same by default."""
    vanilla, grpo, sample = bench.update(), bench.update(*GRPO), bench.sample()
    found = compared(
        relative_difference(grpo.change, vanilla.change),
        abs(grpo.loss - vanilla.loss) / sample.loss_scale,
        SAME,
        "verl's vanilla",
    )
    return Measured(
        found.passed and sample.clipped > 0,
        f"{found.found}; {sample.clipped:.0%} of the tokens are clipped",
        {**found.numbers, "clipped": sample.clipped},
    )


def under(*overrides: str, tolerance: float = ROUNDING, tied: bool = False) -> Callable[[Bench], Measured]:
    """Return a check that runs `against_float64` under overrides."""
    return lambda bench: against_float64(bench, *overrides, tolerance=tolerance, tied=tied)


def offload(bench: Bench) -> Measured:
    """Compare parameters and optimizer state on the host between updates with a run that keeps them on the device."""
    offloading = (f"{ENGINE}.param_offload=True", f"{ENGINE}.optimizer_offload=True")
    resident, found = bench.update(*GRPO, updates=2), bench.update(*GRPO, *offloading, updates=2)
    moved = relative_difference(found.change, resident.change)
    there = ", ".join(sorted(found.state_on))
    return Measured(
        moved <= SAME and found.state_on == {"cpu"},
        f"two updates {moved:.1e} from those without, at most {SAME:g}; state afterwards on: {there}",
        {"change_difference": moved, "tolerance": SAME},
    )


def bounds_in_bfloat16(bench: Bench) -> Measured:
    """Compare ACPO's bounds from the extra pass with those from the tokens as they were trained on."""
    # The weights do not move, so both see the same ones; the first update's bounds need no pass.
    still = ("+clipx=acpo", f"{ACTOR}.optim.lr=0", *HALF)
    observed = bench.update(*still, "clipx.scope=mini_batch", updates=2).bounds["update_1"]
    trained = bench.update(*still, "clipx.scope=lagged", updates=2).bounds["update_1"]
    largest = float(trained.abs().max())
    apart = float((observed - trained).abs().max()) / largest
    return Measured(
        apart <= BOUNDS,
        f"observed and training pass {apart:.1e} apart, at most {BOUNDS:g}; largest bound {largest:.3f}",
        {"bounds_difference": apart, "largest": largest, "tolerance": BOUNDS},
    )


def packings_in_bfloat16(bench: Bench) -> Measured:
    """Compare ACPO's bounds at ratio 1 with those of a training pass with another packing, in bfloat16."""
    tokens = (f"{ACTOR}.ppo_max_token_len_per_gpu=64", f"{ROLLOUT}.log_prob_max_token_len_per_gpu=256")
    packed = (PACKING, f"{ACTOR}.use_dynamic_bsz=True", f"{ROLLOUT}.log_prob_use_dynamic_bsz=True", *tokens)
    found = bench.update("+clipx=acpo", *HALF, *packed, recomputed=True)
    apart = math.inf if found.closed_form_difference is None else found.closed_form_difference
    return Measured(
        apart <= TOLERATED_IN_HALF,
        f"closed form and training pass {apart:.1e} of epsilon apart, at most {TOLERATED_IN_HALF:g}",
        {"closed_form_difference": apart, "tolerance": TOLERATED_IN_HALF},
    )


def example_tokens(device: str) -> dict[str, Tensor]:
    """Return the micro-batch of `losses.example`, keyed by the names of verl's policy-loss signature."""
    inputs = example(METHODS["grpo"](), device, torch.float32)
    tokens = {name: getattr(inputs, name) for name in ("old_log_prob", "log_prob", "advantages")}
    return {**tokens, "response_mask": inputs.mask}


def compiled(bench: Bench) -> Measured:
    """Compare ACPO's compiled loss with the uncompiled one, including its statistics, on the first rank."""
    device = bench.machine.device
    actors = [bench.actor("+clipx=acpo", f"clipx.compile={value}") for value in ("false", "true")]
    if bench.rank:
        return Measured(True, "not compared here")
    (loss, gradient), (loss_compiled, gradient_compiled) = (
        loss_call(actor, example_tokens(device))() for actor in actors
    )
    found = compared(
        difference(gradient_compiled, gradient),
        float((loss_compiled - loss).abs() / loss.abs()),
        SAME,
        "the uncompiled loss",
    )
    # If the compiler fails, a warning says so and the loss stays uncompiled.
    if not actors[1].policy_loss.clipx.functions(device).compiled:
        return Measured(False, "the compiler failed, so the loss stayed uncompiled; the log of a run says why")
    return found


def syncs_and_kernels(bench: Bench) -> Measured:
    """Count host syncs and kernels of verl's vanilla and of ACPO's loss, and check that traced values arrive."""
    losses = {
        "vanilla": (),
        "uncompiled": ("+clipx=acpo", "clipx.compile=false"),
        "compiled": ("+clipx=acpo", "clipx.compile=true"),
        "traced": ("+clipx=acpo", "clipx.compile=true", "+clipx/trace=prompts"),
    }
    numbers = {}
    tokens, parts = example_tokens(bench.machine.device), []
    for name, overrides in losses.items():
        call = loss_call(bench.actor(*overrides), tokens)
        if name == "traced":
            call = traced(call, parts)
        # The first call compiles.
        call()
        numbers[f"syncs_{name}"], numbers[f"kernels_{name}"] = counted_syncs(call), counted_kernels(call)
    passed = all(numbers[f"syncs_{name}"] <= SYNCS for name in ("compiled", "uncompiled", "traced"))
    passed &= arrived(parts[-1], tokens)
    found = ", ".join(f"{name} {numbers[f'syncs_{name}']} and {numbers[f'kernels_{name}']}" for name in losses)
    return Measured(
        passed and numbers["kernels_compiled"] < numbers["kernels_uncompiled"],
        f"host syncs and kernels: {found}; at most {SYNCS} sync, compiled fewer kernels than uncompiled",
        numbers,
    )


def traced(call: Callable[[], object], parts: list[Part]) -> Callable[[], object]:
    """Wrap a loss call as a training worker makes it for a micro-batch whose rows TRACED are traced."""

    def with_traces() -> object:
        with in_micro_batch(MicroBatch(traced=TracedRows(TRACED, [], parts, None))):
            return call()

    return with_traces


def arrived(part: Part, tokens: dict[str, Tensor]) -> bool:
    """Return whether the log-probabilities of the rows TRACED reached the host unchanged."""
    found = torch.from_numpy(part.values.numpy())[:, part.names.index("log_prob")]
    return torch.equal(found, torch.where(tokens["response_mask"], tokens["log_prob"], 0.0)[TRACED].cpu())


def needs_gpu(machine: Machine) -> str | None:
    """Say why a check that needs a GPU cannot run."""
    return "it counts what a GPU does" if machine.device == "cpu" else None


def needs_flash_attention(machine: Machine) -> str | None:
    """Say why a check that needs flash attention cannot run."""
    if machine.device == "cpu":
        return "flash attention runs only on GPUs"
    return None if machine.flash_attention else "flash-attn is not installed"


def needs_two_with_flash_attention(machine: Machine) -> str | None:
    """Say why two ranks cannot share a sequence."""
    if machine.ranks < 2:
        return "it needs two GPUs: --gpus 2"
    return needs_flash_attention(machine)


def needs_fsdp1(machine: Machine) -> str | None:
    """Say why FSDP1 cannot run."""
    return "FSDP1 cannot start from CPU parameters" if machine.device == "cpu" else None


@dataclass(frozen=True)
class Check:
    """A check on the ranks.

    Args:
        run: what each rank does; the first rank's result counts.
        why_not: why it cannot run on a machine, or None if it can.
    """

    name: str
    run: Callable[[Bench], Measured]
    why_not: Callable[[Machine], str | None] = lambda machine: None


CHECKS = (
    Check("vanilla and grpo", vanilla_and_grpo),
    Check("FSDP2", under()),
    Check("FSDP1", under(f"{ACTOR}.strategy=fsdp"), needs_fsdp1),
    Check("packing", under(PACKING)),
    Check("bfloat16", under(*HALF, tolerance=ROUNDING_HALF)),
    Check("flash attention", under(*FLASH, tolerance=ROUNDING_HALF), needs_flash_attention),
    Check("Ulysses 2", under(*FLASH, *SHARING, tolerance=ROUNDING_HALF), needs_two_with_flash_attention),
    Check("offload", offload),
    # FSDP2 shards an untied output embedding, which verl 0.9.1's fused forward pass cannot use.
    Check("fused kernels", under(*FUSED, tied=True)),
    Check("bounds in bfloat16", bounds_in_bfloat16),
    Check("packings in bfloat16", packings_in_bfloat16),
    Check("compiled", compiled),
    Check("syncs and kernels", syncs_and_kernels, needs_gpu),
    Check("memory", memory, needs_flash_attention),
)
