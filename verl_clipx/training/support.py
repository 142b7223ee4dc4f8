"""What of verl the plugin serves: every option with the test that runs it, or why it is only read, or refused.

This is the one place that says so: the driver refuses by it, `clipx doctor` and the table of docs/support.md are made
from it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_clipx.training.config import Observe, Settings

ACTOR = "actor_rollout_ref.actor"
BYPASS = "algorithm.rollout_correction.bypass_mode"
ROLLOUT_IS = "algorithm.rollout_correction.rollout_is"
ROLLOUT_RS = "algorithm.rollout_correction.rollout_rs"
# Of verl's weights and of its rejection: the keys that go with each.
WITH_ROLLOUT_IS = (f"{ROLLOUT_IS}_threshold", f"{ROLLOUT_IS}_batch_normalize")
WITH_ROLLOUT_RS = (f"{ROLLOUT_RS}_threshold",)
TEMPERATURE = "actor_rollout_ref.rollout.temperature"
# Either switches torch.compile off.
TORCH_COMPILE = (f"{ACTOR}.use_torch_compile", f"{ACTOR}.fsdp_config.use_torch_compile")
STRATEGY = f"{ACTOR}.strategy"
ROUTER_REPLAY = f"{ACTOR}.veomni.router_replay.mode"
DYNAMIC_CONTEXT = f"{ACTOR}.megatron.dynamic_context_parallel"
FUSED_KERNELS = "actor_rollout_ref.model.use_fused_kernels"
MODEL_PATH = "actor_rollout_ref.model.path"
# Keys of every model's sequence parallelism, each with the key of its attention.
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
REFERENCE, CRITIC_ATTENTION = "actor_rollout_ref.ref", "critic.model.override_config.attn_implementation"
SEQUENCE_PARALLEL = {
    f"{ACTOR}.ulysses_sequence_parallel_size": ATTENTION,
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": ATTENTION,
    f"{REFERENCE}.ulysses_sequence_parallel_size": ATTENTION,
    f"{REFERENCE}.fsdp_config.ulysses_sequence_parallel_size": ATTENTION,
    "critic.ulysses_sequence_parallel_size": CRITIC_ATTENTION,
    "critic.fsdp.ulysses_sequence_parallel_size": CRITIC_ATTENTION,
    **{f"{model}.veomni.ulysses_parallel_size": f"{model}.veomni.attn_implementation" for model in (ACTOR, REFERENCE)},
}

# Keys of the run's configuration that refusals depend on, or what the run says of itself.
READ = (
    *(TEMPERATURE, *TORCH_COMPILE, *WITH_ROLLOUT_IS, *WITH_ROLLOUT_RS),
    *(BYPASS, ROLLOUT_IS, ROLLOUT_RS, STRATEGY, ROUTER_REPLAY, DYNAMIC_CONTEXT, FUSED_KERNELS, MODEL_PATH),
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
    from verl.plugin.platform import get_platform

    for key, attention in SEQUENCE_PARALLEL.items():
        size, name = options.get(key), options.get(attention)
        if attention == CRITIC_ATTENTION and get_platform().device_name != "cpu":
            # Whatever the key says, verl's critic takes flash attention (utils/model.py), which a CPU does not have.
            continue
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


def corrected_twice(options: Options, node: Settings | Observe) -> str | None:
    """verl's weights from the rollout policy to the old one, on a ratio that starts at the rollout policy already."""
    weights = options.get(ROLLOUT_IS)
    if isinstance(node, Observe) or weights is None or getattr(node.method, "behaviour", None) != "rollout":
        return None
    return (
        f"{ROLLOUT_IS}={weights} with clipx.behaviour=rollout: the ratio of clipx.method={node.method.name} is to the "
        "policy that sampled, and verl's weights would correct for that policy a second time. Set "
        f"{ROLLOUT_IS}=null, or clipx.behaviour=old."
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


def fused_kernels_of_a_wrapped_head(options: Options, _: Settings | Observe) -> str | None:
    """verl's fused kernels where FSDP2 keeps the output embedding, which they read, in parts of its own."""
    path = options.get(MODEL_PATH)
    if options.get(STRATEGY) != "fsdp2" or not options.get(FUSED_KERNELS) or has_tied_embeddings(path) is not False:
        return None
    return (
        f"{FUSED_KERNELS}=True with {STRATEGY}=fsdp2, {MODEL_PATH}={path}: {WRAPPED_HEAD}. Set {FUSED_KERNELS}=False."
    )


WRAPPED_HEAD = (
    "the model's output embedding is not its input embedding, so FSDP2 shards it by itself, and verl 0.9.1's fused "
    "forward pass multiplies with a part of it: torch stops with mixed Tensor and DTensor"
)


def has_tied_embeddings(path: str | None) -> bool | None:
    """Whether a model's input and output embedding are one; None where its configuration is not on this machine."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True).get_text_config().tie_word_embeddings
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class Row:
    """What is known of one of verl's options.

    Args:
        option: its name.
        key: how it is switched on; where that is a key of `ACTOR`, from there on.
        test: the file of the tests that run it on the CPU; None if none does.
        remark: why no test runs it, why it is refused, or what else is to be known.
        refusal: what the driver refuses it by, or None.
    """

    option: str
    key: str
    test: str | None = None
    remark: str = ""
    refusal: Refusal | None = None

    @property
    def state(self) -> str:
        """refused, run (in a test on the CPU) or read (in verl's code alone)."""
        if self.refusal is not None:
            return "refused"
        return "run" if self.test else "read"


RANKS = "tests/end_to_end/test_invariance.py"
ENGINE = "tests/end_to_end/test_engine.py"
TRAINING = "tests/end_to_end/test_training.py"
GPU_CHECK = "tests/end_to_end/test_gpu_check.py"
TRAINERS = "tests/end_to_end/test_trainers.py"
OPTIONS = "tests/end_to_end/test_options.py"
VLLM = "tests/end_to_end/test_vllm.py"
# Bounds, gradients and log-probabilities in the engine without Ray, and a run with it.
BOTH = f"the same through Ray: {OPTIONS}"
BESIDE_VLLM = f"the same through Ray, beside vLLM: {VLLM}"

ROWS = (
    Row("FSDP2", "strategy=fsdp2", RANKS, "1, 2 and 4 ranks over gloo"),
    Row("FSDP1", "strategy=fsdp", remark="cannot start from a CPU's parameters"),
    Row("Megatron", "model_engine=megatron", remark="needs GPUs; a rank of the last pipeline stage keeps the state"),
    Row(
        "Megatron, dynamic context parallelism",
        "megatron.dynamic_context_parallel=True",
        remark="each rank is its own data-parallel group",
        refusal=dynamic_context,
    ),
    Row("VeOmni", "model_engine=veomni", remark="needs GPUs"),
    Row(
        "VeOmni, router replay R2",
        "veomni.router_replay.mode=R2",
        remark="where a pass without gradient observes: it would route by itself",
        refusal=recorded_routes,
    ),
    Row("packing", "actor_rollout_ref.model.use_remove_padding=True", RANKS, f"sdpa; {BESIDE_VLLM}"),
    Row("dynamic batch sizes", "use_dynamic_bsz=True", RANKS, BESIDE_VLLM),
    Row(
        "Ulysses, flash attention",
        "ulysses_sequence_parallel_size=2",
        RANKS,
        f"2 and 4 ranks; in place of the kernel, which needs GPUs, its formula in torch; {BOTH}",
    ),
    Row(
        "Ulysses, sdpa or eager attention",
        "ulysses_sequence_parallel_size=2",
        remark=f"{WRONG_ATTENTION}; so on every CPU, and in the worker by the model's own attention",
        refusal=attention_on_a_slice,
    ),
    Row("gradient checkpointing", "actor_rollout_ref.model.enable_gradient_checkpointing=True", RANKS, BESIDE_VLLM),
    Row("offload", "fsdp_config.param_offload=True, fsdp_config.optimizer_offload=True", RANKS, BESIDE_VLLM),
    Row("hybrid sharding", "fsdp_config.fsdp_size=2", RANKS, f"4 ranks; {BOTH}"),
    Row("chunked entropy", "fsdp_config.entropy_from_logits_with_chunking=True", RANKS, f"packed; {BESIDE_VLLM}"),
    Row("LoRA", "actor_rollout_ref.model.lora_rank=4", RANKS, "its training; its rollout needs GPUs"),
    Row(
        "LoRA, merged for the rollout",
        "actor_rollout_ref.model.lora.merge=True",
        OPTIONS,
        f"its training: {RANKS}; verl rounds merged weights to bfloat16",
    ),
    Row(
        "fused kernels",
        f"{FUSED_KERNELS}=True",
        GPU_CHECK,
        f"torch's back end, tied embeddings; {BOTH}",
    ),
    Row(
        "fused kernels under FSDP2, untied embeddings",
        f"{FUSED_KERNELS}=True",
        remark=f"{WRAPPED_HEAD}: {ENGINE}; in the driver where the model's configuration lies there",
        refusal=fused_kernels_of_a_wrapped_head,
    ),
    Row("bfloat16", "fsdp_config.mixed_precision.param_dtype=bf16", GPU_CHECK, BOTH),
    Row("KL loss", "use_kl_loss=True", TRAINING),
    Row("several epochs", "ppo_epochs=2", TRAINERS),
    Row(
        "rollout correction",
        "algorithm.rollout_correction.rollout_is=token",
        TRAINERS,
        "weights and rejection; the weights in the loss: tests/training/test_policy_loss.py",
    ),
    Row(
        "rollout correction of M2PO's ratio to the rollout policy",
        f"clipx.behaviour=rollout {ROLLOUT_IS}=token",
        remark="it would be corrected twice",
        refusal=corrected_twice,
    ),
    Row("bypass mode", f"{BYPASS}=True", TRAINING, "v1 trainer, colocate_async"),
    Row(
        "bypass mode, v0 trainer",
        f"{BYPASS}=True trainer.use_v1=False",
        remark="verl names its own loss in the driver only, after the workers were built, so the composed one trains: "
        "tests/training/test_verl_contract.py",
    ),
    Row(
        "rollout correction in bypass mode",
        f"{BYPASS}=True {ROLLOUT_IS}=token",
        remark="verl applies it in its own bypass loss alone",
        refusal=correction_in_bypass_mode,
    ),
    Row("distillation", "distillation.enabled=True", remark="its loss alone: tests/training/test_worker.py"),
    Row("v1 trainer, sync", "trainer.v1.trainer_mode=sync", TRAINING),
    Row("v1 trainer, colocate_async", "trainer.v1.trainer_mode=colocate_async", TRAINING),
    Row("v1 trainer, separate_async", "trainer.v1.trainer_mode=separate_async", TRAINERS, "weights sent over gloo"),
    Row("v0 trainer", "trainer.use_v1=False", TRAINERS),
    Row("one_step_off_policy", "verl.experimental.one_step_off_policy", TRAINERS, "weights sent over gloo"),
    Row(
        "fully_async_policy",
        "verl.experimental.fully_async_policy",
        TRAINERS,
        f"weights sent over gloo; old_log_probs of restored weights: {ENGINE}",
    ),
    Row(
        "verl's Tinker worker",
        "verl.workers.engine_workers_tinker",
        ENGINE,
        "fixed bounds; scope=mini_batch and lagged, selection and Lopti stop at the first loss",
    ),
    Row("GRPO's advantages", "algorithm.adv_estimator=grpo", TRAINING),
    Row("RLOO, REINFORCE++, GAE with a critic", "algorithm.adv_estimator=rloo", TRAINERS),
    Row("several turns with tools", "actor_rollout_ref.rollout.multi_turn.enable=True", TRAINERS),
)

REFUSALS: tuple[Refusal, ...] = tuple(row.refusal for row in ROWS if row.refusal is not None)


def support_table() -> str:
    """The table of options in docs/support.md, a row an option."""
    said = {"run": "run on the CPU: [{0}](../{0})", "read": "by reading", "refused": "refused"}
    rows = ["| option | switched on by | state | |", "|---|---|---|---|"]
    rows += [
        f"| {row.option} | `{row.key}` | {said[row.state].format(row.test)} | {row.remark} |".replace("  ", " ")
        for row in ROWS
    ]
    return "\n".join(rows)


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
