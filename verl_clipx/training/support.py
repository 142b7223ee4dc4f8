"""What of verl the plugin serves: every option with the test that runs it, or why it is only read, or refused.

This is the one place that says so: the driver refuses by it, `clipx doctor` and README's table are made from it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from verl_clipx.training.config import Observe, Settings

ACTOR = "actor_rollout_ref.actor"
BYPASS = "algorithm.rollout_correction.bypass_mode"
ROLLOUT_IS = "algorithm.rollout_correction.rollout_is"
ROLLOUT_RS = "algorithm.rollout_correction.rollout_rs"
USE_V1 = "trainer.use_v1"
STRATEGY = f"{ACTOR}.strategy"
ROUTER_REPLAY = f"{ACTOR}.veomni.router_replay.mode"
DYNAMIC_CONTEXT = f"{ACTOR}.megatron.dynamic_context_parallel"
# Keys of an engine's sequence parallelism, each with the key of its attention.
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
SEQUENCE_PARALLEL = {
    f"{ACTOR}.ulysses_sequence_parallel_size": ATTENTION,
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": ATTENTION,
    f"{ACTOR}.veomni.ulysses_parallel_size": f"{ACTOR}.veomni.attn_implementation",
}

# Keys of the run's configuration that refusals depend on.
READ = (
    *(BYPASS, ROLLOUT_IS, ROLLOUT_RS, USE_V1, STRATEGY, ROUTER_REPLAY, DYNAMIC_CONTEXT),
    *dict.fromkeys([*SEQUENCE_PARALLEL, *SEQUENCE_PARALLEL.values()]),
)

Options = Mapping[str, Any]
Refusal = Callable[[Options, Settings | Observe], str | None]


def has_sequence_parallel_attention(name: str | None) -> bool:
    """Whether verl makes an attention work on a slice of each sequence.

    Args:
        name: transformers' or VeOmni's name of it; None: verl's default, flash_attention_2.
    """
    # verl replaces the kernel call beneath flash attention (models/transformers/monkey_patch.py), VeOmni its own.
    return name is None or name.startswith(("flash_attention", "veomni_flash_attention"))


WRONG_ATTENTION = (
    "each rank would attend to its own slice of a sequence and train on wrong log-probabilities, because verl patches "
    "flash attention alone"
)


def attention_on_a_slice(options: Options, _: Settings | Observe) -> str | None:
    """Sequence parallelism with an attention that does not know of it."""
    for key, attention in SEQUENCE_PARALLEL.items():
        size, name = options.get(key), options.get(attention)
        if size and size > 1 and not has_sequence_parallel_attention(name):
            return (
                f"{key}={size} with {attention}={name}: {WRONG_ATTENTION}. Set {attention}=flash_attention_2 (on a CPU "
                f"there is none), or {key}=1."
            )
    return None


def correction_in_bypass_mode(options: Options, node: Settings | Observe) -> str | None:
    """verl's rollout correction where only verl's own loss applies it."""
    if isinstance(node, Observe) or not options.get(BYPASS):
        return None
    for key in (ROLLOUT_IS, ROLLOUT_RS):
        if options.get(key) is not None:
            return (
                f"{key}={options[key]} with {BYPASS}=True: verl applies it in its own bypass loss alone, so that it "
                f"would be ignored under clipx.method={node.method.name}, whose ratio is to the sampler already. Set "
                f"{key}=null, or {BYPASS}=False."
            )
    return None


def bypass_in_the_older_trainer(options: Options, node: Settings | Observe) -> str | None:
    """Bypass mode where the trainer names another loss."""
    if isinstance(node, Observe) or not options.get(BYPASS) or options.get(USE_V1) is not False:
        return None
    return (
        f"{BYPASS}=True with {USE_V1}=False: verl's older trainer then replaces loss_mode=clipx_{node.method.name} by "
        f"its own bypass loss. Use the v1 trainer ({USE_V1}=True), or set {BYPASS}=False."
    )


def recorded_routes(options: Options, node: Settings | Observe) -> str | None:
    """A router that VeOmni would let choose anew in the pass without gradient."""
    if options.get(STRATEGY) != "veomni" or options.get(ROUTER_REPLAY) != "R2":
        return None
    if isinstance(node, Observe) or not node.observes:
        return None
    return (
        f"{ROUTER_REPLAY}=R2 with clipx.method={node.method.name}: the pass without gradient over the mini-batch would "
        f"route by itself, and observe other probabilities than the update trains on. Set {ROUTER_REPLAY}=R3 or "
        "disabled, or do without that pass (clipx.scope=lagged or micro_batch, clipx.select.over=sequence)."
    )


def dynamic_context(options: Options, _: Settings | Observe) -> str | None:
    """Megatron's dynamic context parallelism, under which no group of ranks shares a mini-batch."""
    if options.get(STRATEGY) != "megatron" or not options.get(DYNAMIC_CONTEXT):
        return None
    return (
        f"{DYNAMIC_CONTEXT}=True: verl then gives each rank a data-parallel group of its own, so that statistics and "
        f"metrics would be one rank's. Set {DYNAMIC_CONTEXT}=False; a fixed context_parallel_size is served."
    )


REFUSALS: tuple[Refusal, ...] = (
    attention_on_a_slice,
    correction_in_bypass_mode,
    bypass_in_the_older_trainer,
    recorded_routes,
    dynamic_context,
)


def refuse_unserved(options: Options, node: Settings | Observe) -> None:
    """Raises if a run needs what the plugin cannot serve.

    Args:
        options: the keys of `READ` with their values; those that the run lacks may be missing.
        node: the clipx node.

    Raises:
        ValueError: names the keys, their values and what to do.
    """
    for refusal in REFUSALS:
        message = refusal(options, node)
        if message is not None:
            raise ValueError(message)
