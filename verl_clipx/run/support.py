"""Which of verl's options the plugin supports: each one is run by a test, untested, or refused.

This is the only list of them. The driver refuses options by it, and `clipx doctor` and the table of docs/support.md are
made from it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from verl_clipx.base.method import NODE, Method
from verl_clipx.run.clip_keys import ACTOR
from verl_clipx.run.config import Observe, Settings
from verl_clipx.run.listing import OBSERVE

BYPASS = "algorithm.rollout_correction.bypass_mode"
ROLLOUT_IS = "algorithm.rollout_correction.rollout_is"
ROLLOUT_RS = "algorithm.rollout_correction.rollout_rs"
# The keys that go with verl's weights, and with its rejection.
WITH_ROLLOUT_IS = (f"{ROLLOUT_IS}_threshold", f"{ROLLOUT_IS}_batch_normalize")
WITH_ROLLOUT_RS = (f"{ROLLOUT_RS}_threshold",)
# Each of these keys can switch torch.compile off.
TORCH_COMPILE = (f"{ACTOR}.use_torch_compile", f"{ACTOR}.fsdp_config.use_torch_compile")
LOSS_TYPE = "algorithm.rollout_correction.loss_type"
DISTILLATION = "distillation.enabled"
DISTILLATION_LOSS = "distillation.distillation_loss.loss_mode"
DISTILLATION_COEFFICIENT = "distillation.distillation_loss.distillation_loss_coef"
TASK_REWARDS = "distillation.distillation_loss.use_task_rewards"
ROLLOUT = "actor_rollout_ref.rollout"
ENGINE_NAME = f"{ROLLOUT}.name"
TEMPERATURE = f"{ROLLOUT}.temperature"
LOG_PROB_MODE = f"{ROLLOUT}.logprobs_mode"
# verl's vLLM server gives this key precedence over its own arguments.
LOG_PROB_MODE_OF_VLLM = f"{ROLLOUT}.engine_kwargs.vllm.logprobs_mode"
# From each key that truncates sampling to a test whether a value truncates, and the value that does not.
TRUNCATING: dict[str, tuple[Callable[[float], bool], float]] = {
    f"{ROLLOUT}.top_p": (lambda value: value < 1, 1),
    f"{ROLLOUT}.top_k": (lambda value: value > 0, -1),
    f"{ROLLOUT}.min_p": (lambda value: value > 0, 0),
}
STRATEGY = f"{ACTOR}.strategy"
ESTIMATOR = "algorithm.adv_estimator"
USE_V1 = "trainer.use_v1"
QAT = f"{ACTOR}.qat.enable"
MTP = "actor_rollout_ref.model.mtp.enable"
PREFIX_GROUPER = f"{ACTOR}.use_prefix_grouper"
GROUP_FILTERING = "algorithm.filter_groups.enable"
ROUTER_REPLAY = f"{ACTOR}.veomni.router_replay.mode"
DYNAMIC_CONTEXT = f"{ACTOR}.megatron.dynamic_context_parallel"
FUSED_KERNELS = "actor_rollout_ref.model.use_fused_kernels"
MODEL_PATH = "actor_rollout_ref.model.path"
# The keys of the models' attention, and from each key of sequence parallelism to the key of that model's attention.
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

# The keys of the run's configuration that refusals, the receipt or the announced line depend on.
READ = (
    *(ESTIMATOR, USE_V1, QAT, MTP, PREFIX_GROUPER, GROUP_FILTERING),
    *(*TORCH_COMPILE, *WITH_ROLLOUT_IS, *WITH_ROLLOUT_RS),
    *(BYPASS, ROLLOUT_IS, ROLLOUT_RS, LOSS_TYPE, STRATEGY, ROUTER_REPLAY, DYNAMIC_CONTEXT, FUSED_KERNELS, MODEL_PATH),
    *(DISTILLATION, DISTILLATION_LOSS, DISTILLATION_COEFFICIENT, TASK_REWARDS),
    *(ENGINE_NAME, TEMPERATURE, LOG_PROB_MODE, LOG_PROB_MODE_OF_VLLM, *TRUNCATING),
    *dict.fromkeys([*SEQUENCE_PARALLEL, *SEQUENCE_PARALLEL.values()]),
)

Options = Mapping[str, Any]
Refusal = Callable[[Options, Settings | Observe], str | None]


def has_sequence_parallel_attention(name: str | None) -> bool:
    """Whether an attention works under verl's sequence parallelism, with a slice of each sequence on every rank.

    Args:
        name: the attention's name in transformers or VeOmni; None: verl's default, flash_attention_2.
    """
    # verl replaces the kernel call in flash attention (models/transformers/monkey_patch.py), VeOmni that in its own.
    return name is None or name.startswith(("flash_attention", "veomni_flash_attention"))


WRONG_ATTENTION = (
    "each rank would attend to its own slice of a sequence and train on wrong log-probabilities, because verl patches "
    "only flash attention"
)


def attention_on_a_slice(options: Options, _: Settings | Observe) -> str | None:
    """Sequence parallelism with an attention that does not support it."""
    from verl.plugin.platform import get_platform

    for key, attention in SEQUENCE_PARALLEL.items():
        size, name = options.get(key), options.get(attention)
        if attention == CRITIC_ATTENTION and get_platform().device_name != "cpu":
            # verl's critic ignores this key and takes flash attention (utils/model.py), which a CPU does not have.
            continue
        if size and size > 1 and not has_sequence_parallel_attention(name):
            return (
                f"{key}={size} with {attention}={name}: {WRONG_ATTENTION}. Set {attention}=flash_attention_2 (on a CPU "
                f"there is none), or {key}=1."
            )
    return None


def weights_in_bypass_mode(options: Options, node: Settings | Observe) -> str | None:
    """verl's weights in bypass mode, where the ratio is already relative to the rollout policy."""
    weights = options.get(ROLLOUT_IS)
    if isinstance(node, Observe) or not options.get(BYPASS) or weights is None:
        return None
    return (
        f"{ROLLOUT_IS}={weights} with {BYPASS}=True: the ratio of the method {node.method.name} is already relative "
        "to the policy that sampled, and the weights would correct for that policy a second time. verl does not give "
        f"them to its own PPO loss either. Set {ROLLOUT_IS}=null, or {BYPASS}=False."
    )


def corrected_twice(options: Options, node: Settings | Observe) -> str | None:
    """verl's weights for a method whose ratio is already relative to the rollout policy."""
    weights = options.get(ROLLOUT_IS)
    if isinstance(node, Observe) or weights is None or getattr(node.method, "behaviour", None) != "rollout":
        return None
    return (
        f"{ROLLOUT_IS}={weights} with clipx.behaviour=rollout: the ratio of the method {node.method.name} is already "
        "relative to the policy that sampled, and verl's weights would correct for that policy a second time. Set "
        f"{ROLLOUT_IS}=null, or clipx.behaviour=old."
    )


def other_bypass_loss(options: Options, node: Settings | Observe) -> str | None:
    """The key that chooses a variant of verl's own bypass loss, which no other loss reads."""
    loss_type = options.get(LOSS_TYPE)
    if isinstance(node, Observe) or loss_type in (None, "ppo_clip"):
        return None
    return (
        f"{LOSS_TYPE}={loss_type} under the method {node.method.name}: only verl's own bypass loss reads it, so it "
        f"would be ignored. Set {LOSS_TYPE}=ppo_clip, or remove +{NODE}=… to train verl's loss."
    )


def distilled_without_task_rewards(options: Options, node: Settings | Observe) -> str | None:
    """verl's distillation if it replaces the policy loss."""
    if not options.get(DISTILLATION) or options.get(TASK_REWARDS, True):
        return None
    method, would = (
        (f"+{NODE}={OBSERVE}", "would describe a loss that is not trained")
        if isinstance(node, Observe)
        else (f"the method {node.method.name}", "would train nothing")
    )
    return (
        f"{TASK_REWARDS}={options[TASK_REWARDS]} with {DISTILLATION}=True: verl then sets the policy loss to 0 and "
        f"trains only its distillation loss, so that {method} {would}. Set {TASK_REWARDS}=True, which "
        f"adds the distillation loss to the policy loss, or remove the +{NODE} group."
    )


def distillation_term(options: Options) -> str | None:
    """What verl adds to the policy loss under distillation with task rewards, in words; None without distillation."""
    if not options.get(DISTILLATION):
        return None
    loss, coefficient = options.get(DISTILLATION_LOSS), options.get(DISTILLATION_COEFFICIENT)
    return f"verl's distillation loss {loss} is added to it with coefficient {coefficient}"


class Mismatch(NamedTuple):
    """Why the rollout's log-probabilities are not what the trainer computes for the same weights.

    Attributes:
        keys: the keys that are the reason, with their values.
        effect: what this does to ratios to the rollout policy.
        remedy: what to set.
    """

    keys: str
    effect: str
    remedy: str


def log_prob_mismatch(options: Options) -> Mismatch | None:
    """Why the rollout's log-probabilities belong to another distribution than the trainer's; None if they do not.

    The trainer divides the logits by the temperature and takes the softmax over the whole vocabulary. vLLM and the
    server of +hardware=cpu return what logprobs_mode says. verl does not pass this key to other servers.
    """
    engine, temperature = options.get(ENGINE_NAME), options.get(TEMPERATURE)
    truncating = {
        key: value
        for key, (truncates, _) in TRUNCATING.items()
        if isinstance(value := options.get(key), int | float) and truncates(value)
    }
    sampling = ", ".join(f"{key}={value}" for key, value in truncating.items())
    from_all = ", ".join(f"{key}={TRUNCATING[key][1]}" for key in truncating)
    off = "over the tokens that truncation keeps, and the trainer's are over the whole vocabulary"
    if engine not in ("vllm", "cpu"):
        unknown = (
            f"depending on the version of {engine or 'the rollout server'}, its log-probabilities are {off}: every "
            "ratio is then off by the probability that is kept"
        )
        return Mismatch(sampling, unknown, f"Set {from_all}") if truncating else None
    key = LOG_PROB_MODE_OF_VLLM if engine == "vllm" and options.get(LOG_PROB_MODE_OF_VLLM) else LOG_PROB_MODE
    mode = options.get(key)
    if mode == "processed_logprobs":
        effect = f"{engine}'s log-probabilities are {off}, so that every ratio is off by the probability that is kept"
        remedy = f"Set {from_all}" + f", or {key}=raw_logprobs" * (temperature == 1)
        return Mismatch(f"{sampling}, {key}={mode}", effect, remedy) if truncating else None
    # null means vLLM's own default, raw_logprobs.
    if mode not in (None, "raw_logprobs"):
        effect = f"{engine} returns logits in place of log-probabilities"
        return Mismatch(f"{key}={mode}", effect, f"Set {key}=processed_logprobs")
    effect = f"{engine}'s log-probabilities are at temperature 1, the trainer's at {temperature}"
    remedy = f"Set {key}=processed_logprobs" + f" and {from_all}" * bool(truncating)
    return Mismatch(f"{key}={mode}, {TEMPERATURE}={temperature}", effect, remedy) if temperature != 1 else None


def recorded_routes(options: Options, node: Settings | Observe) -> str | None:
    """VeOmni's router replay R2, under which the extra pass would choose its own routes."""
    if options.get(STRATEGY) != "veomni" or options.get(ROUTER_REPLAY) != "R2":
        return None
    rejects = options.get(BYPASS) and options.get(ROLLOUT_RS) is not None
    if isinstance(node, Observe) or not (node.needs_extra_pass or (rejects and node.select is not None)):
        return None
    return (
        f"{ROUTER_REPLAY}=R2 under the method {node.method.name}: the extra pass over the mini-batch would "
        f"choose its own routes and see other probabilities than the update trains on. Set {ROUTER_REPLAY}=R3 or "
        "disabled, or do without that pass (clipx.scope=lagged or micro_batch, clipx.select.over=sequence)."
    )


def dynamic_context(options: Options, _: Settings | Observe) -> str | None:
    """Megatron's dynamic context parallelism, under which no group of ranks shares a mini-batch."""
    if options.get(STRATEGY) != "megatron" or not options.get(DYNAMIC_CONTEXT):
        return None
    return (
        f"{DYNAMIC_CONTEXT}=True: verl then gives each rank its own data-parallel group, so statistics and metrics "
        f"would be those of one rank. Set {DYNAMIC_CONTEXT}=False; a fixed context_parallel_size is supported."
    )


def fused_kernels_of_a_wrapped_head(options: Options, _: Settings | Observe) -> str | None:
    """verl's fused kernels under FSDP2 for a model whose output embedding, which they read, is sharded separately."""
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


def model_config(path: str | None) -> Any:
    """A model's configuration in transformers; None if it is not on this machine."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError):
        return None


def has_tied_embeddings(path: str | None) -> bool | None:
    """Whether a model's input and output embeddings are tied; None if its configuration is not on this machine."""
    config = model_config(path)
    return None if config is None else config.get_text_config().tie_word_embeddings


def takes_images(path: str | None) -> bool:
    """Whether a model takes more than text; False if its configuration is not on this machine."""
    config = model_config(path)
    return config is not None and config.get_text_config() is not config


def asking_for_rollout_log_probs(method: Method) -> str:
    """The key, with its value, that makes a method need the rollout's log-probabilities; empty if none does."""
    if "rollout_log_prob" not in method.asks_for:
        return ""
    asking = [f"{NODE}.{key}={value}" for key, value in method.parameters.items() if value == "rollout"]
    return (asking or [f"{NODE}.method={method.name}"])[0]


def ratio_to_the_rollout_policy(options: Options, node: Settings | Observe) -> str | None:
    """The key, with its value, that puts a ratio to the rollout policy into the objective; None if none does."""
    if isinstance(node, Settings) and (asking := asking_for_rollout_log_probs(node.method)):
        return asking
    keys = [f"{key}={value}" for key in (BYPASS, ROLLOUT_IS, ROLLOUT_RS) if (value := options.get(key))]
    return keys[0] if keys else None


def mismatch_in_the_objective(options: Options, node: Settings | Observe) -> str | None:
    """Biased ratios to the rollout policy, if the plugin would train on them."""
    mismatch, asking = log_prob_mismatch(options), ratio_to_the_rollout_policy(options, node)
    if isinstance(node, Observe) or mismatch is None or asking is None:
        return None
    return f"{mismatch.keys} with {asking}: {mismatch.effect}. {mismatch.remedy}."


def mismatch_remark(options: Options, node: Settings | Observe) -> str | None:
    """What the announced line says about biased ratios to the rollout policy; None if they are not biased."""
    mismatch = log_prob_mismatch(options)
    if mismatch is None:
        return None
    which = "" if ratio_to_the_rollout_policy(options, node) else ", which only metrics use,"
    return f"ratios to the rollout policy{which} are biased by {mismatch.keys}: {mismatch.effect}"


@dataclass(frozen=True)
class Row:
    """What is known about one of verl's options.

    Args:
        option: its name.
        key: how it is switched on; keys under `ACTOR` are written without that prefix.
        tested: whether a test runs it on the CPU.
        remark: why no test runs it, why it is refused, or other remarks.
        refusal: the function with which the driver refuses it, or None.
        on: how to recognise a run that has it: from keys of `READ` to the value that they have, or to a function that
            tells whether a value fits.
    """

    option: str
    key: str
    tested: bool = False
    remark: str = ""
    refusal: Refusal | None = None
    on: Mapping[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """One of "refused", "run" (by a test on the CPU) and "untested"."""
        if self.refusal is not None:
            return "refused"
        return "run" if self.tested else "untested"

    def is_on(self, options: Options) -> bool:
        """Whether a run has this option; False if `on` is empty."""
        found = ((options.get(key), value) for key, value in self.on.items())
        return bool(self.on) and all(value(of) if callable(value) else of == value for of, value in found)


ROWS = (
    Row("FSDP2", "strategy=fsdp2", True, "on 1, 2 and 4 ranks over gloo", on={STRATEGY: "fsdp2"}),
    Row("FSDP1", "strategy=fsdp", remark="can't start from parameters on a CPU"),
    Row("Megatron", "model_engine=megatron", remark="needs GPUs; a rank of the last pipeline stage keeps the state"),
    Row(
        "Megatron, dynamic context parallelism",
        "megatron.dynamic_context_parallel=True",
        remark="because each rank would be its own data-parallel group",
        refusal=dynamic_context,
    ),
    Row(
        "Megatron, router replay R2 or R3",
        "megatron.router_replay.mode=R3",
        remark="needs GPUs; the extra pass replays the routes that the samples bring",
    ),
    Row("MindSpeed", "model_engine=megatron trainer.device=npu", remark="needs an NPU, on which it is verl's Megatron"),
    Row("VeOmni", "model_engine=veomni", remark="needs GPUs"),
    Row("VeOmni, router replay R3", "veomni.router_replay.mode=R3", remark="needs GPUs"),
    Row("TorchTitan", "model_engine=torchtitan", remark="needs GPUs"),
    Row(
        "FSDP-Turbo",
        "strategy=fsdp_turbo",
        remark="needs GPUs; shares sequences among ranks by itself, with eager attention",
    ),
    Row("Automodel", "strategy=automodel", remark="needs GPUs; verl 0.9.1 has no configuration of it for the actor"),
    Row("QAT", "qat.enable=True", remark="needs GPUs", on={QAT: True}),
    Row("multi-token prediction", f"{MTP}=True", remark="the engine adds a loss of its own", on={MTP: True}),
    Row(
        "PrefixGrouper",
        "use_prefix_grouper=True",
        remark="needs its own package and flash attention",
        on={PREFIX_GROUPER: True},
    ),
    Row(
        "images and videos",
        "data.image_key=images",
        remark="no model in the tests accepts them",
        on={MODEL_PATH: takes_images},
    ),
    Row("vLLM", f"{ENGINE_NAME}=vllm", True, "vLLM's build for CPUs", on={ENGINE_NAME: "vllm"}),
    Row(
        "the CPU's rollout",
        f"{ENGINE_NAME}=cpu",
        True,
        "this project's server, chosen by +hardware=cpu",
        on={ENGINE_NAME: "cpu"},
    ),
    Row("SGLang", f"{ENGINE_NAME}=sglang", remark="needs GPUs"),
    Row(
        "VeOmni, router replay R2",
        "veomni.router_replay.mode=R2",
        remark="if the method needs the extra pass, which would choose routes of its own",
        refusal=recorded_routes,
    ),
    Row(
        "packing", "actor_rollout_ref.model.use_remove_padding=True", True, "with sdpa; also through Ray, and with vLLM"
    ),
    Row("dynamic batch sizes", "use_dynamic_bsz=True", True, "also through Ray, and with vLLM"),
    Row(
        "Ulysses, flash attention",
        "ulysses_sequence_parallel_size=2",
        True,
        "on 2 and 4 ranks, with the kernel's formula in torch, because the kernel needs GPUs; also through Ray",
    ),
    Row(
        "Ulysses, sdpa or eager attention",
        "ulysses_sequence_parallel_size=2",
        remark=f"{WRONG_ATTENTION}; this includes every CPU, and the worker checks the model's own attention",
        refusal=attention_on_a_slice,
    ),
    Row(
        "gradient checkpointing",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        True,
        "also through Ray, and with vLLM",
    ),
    Row(
        "offload",
        "fsdp_config.param_offload=True, fsdp_config.optimizer_offload=True",
        True,
        "also through Ray, and with vLLM",
    ),
    Row("hybrid sharding", "fsdp_config.fsdp_size=2", True, "on 4 ranks; also through Ray"),
    Row(
        "chunked entropy",
        "fsdp_config.entropy_from_logits_with_chunking=True",
        True,
        "with packing; also through Ray, and with vLLM",
    ),
    Row("LoRA", "actor_rollout_ref.model.lora_rank=4", True, "the training only; the rollout needs GPUs"),
    Row(
        "LoRA, merged for the rollout",
        "actor_rollout_ref.model.lora.merge=True",
        True,
        "the training without Ray, too; verl rounds merged weights to bfloat16",
    ),
    Row(
        "fused kernels",
        f"{FUSED_KERNELS}=True",
        True,
        "with torch's back end and tied embeddings; also through Ray",
    ),
    Row(
        "fused kernels under FSDP2, untied embeddings",
        f"{FUSED_KERNELS}=True",
        remark=f"{WRAPPED_HEAD}; the driver refuses it if it can read the model's configuration",
        refusal=fused_kernels_of_a_wrapped_head,
    ),
    Row("bfloat16", "fsdp_config.mixed_precision.param_dtype=bf16", True, "also through Ray"),
    Row("KL loss", "use_kl_loss=True", True),
    Row("several epochs", "ppo_epochs=2", True),
    Row(
        "rollout correction",
        "algorithm.rollout_correction.rollout_is=token",
        True,
        "both weights and rejection",
    ),
    Row(
        "rollout correction of M2PO's ratio to the rollout policy",
        f"clipx.behaviour=rollout {ROLLOUT_IS}=token",
        remark="because the ratio would be corrected twice",
        refusal=corrected_twice,
    ),
    Row("bypass mode", f"{BYPASS}=True", True, "in the v1 trainer's colocate_async mode"),
    Row(
        "bypass mode, v0 trainer",
        f"{BYPASS}=True trainer.use_v1=False",
        remark="verl names its own loss only in the driver, after the workers were built, so the composed loss trains",
        on={BYPASS: True, USE_V1: False},
    ),
    Row(
        "weights in bypass mode",
        f"{BYPASS}=True {ROLLOUT_IS}=token",
        remark="because they would correct a second time; verl withholds them from its own PPO loss there",
        refusal=weights_in_bypass_mode,
    ),
    Row(
        "rejection in bypass mode",
        f"{BYPASS}=True {ROLLOUT_RS}=seq_mean_k3",
        True,
        "rejects by the current weights, as verl's own bypass loss does",
    ),
    Row(
        "REINFORCE as verl's own bypass loss",
        f"{LOSS_TYPE}=reinforce",
        remark="because no other loss reads this key",
        refusal=other_bypass_loss,
    ),
    Row(
        "truncated sampling under ratios to the rollout policy",
        f"{ROLLOUT}.top_p=0.9 {BYPASS}=True",
        remark="also with top_k or min_p, and under rollout correction or clipx.behaviour=rollout, because the ratios "
        "would be off by the probability that truncation keeps",
        refusal=mismatch_in_the_objective,
    ),
    Row(
        "distillation beside task rewards",
        f"{DISTILLATION}=True",
        remark="verl's distillation loss is added to the method's",
        on={DISTILLATION: True},
    ),
    Row(
        "distillation without task rewards",
        f"{DISTILLATION}=True {TASK_REWARDS}=False",
        remark="because verl then trains only its distillation loss",
        refusal=distilled_without_task_rewards,
    ),
    Row("v1 trainer, sync", "trainer.v1.trainer_mode=sync", True),
    Row("v1 trainer, colocate_async", "trainer.v1.trainer_mode=colocate_async", True),
    Row("v1 trainer, separate_async", "trainer.v1.trainer_mode=separate_async", True, "weights are sent over gloo"),
    Row("v0 trainer", "trainer.use_v1=False", True),
    Row("one_step_off_policy", "verl.experimental.one_step_off_policy", True, "weights are sent over gloo"),
    Row(
        "fully_async_policy",
        "verl.experimental.fully_async_policy",
        True,
        "weights are sent over gloo; also with old_log_probs of restored weights",
    ),
    Row(
        "verl's Tinker worker",
        "verl.workers.engine_workers_tinker",
        True,
        "with fixed bounds; scope=mini_batch and lagged, selection and Lopti stop at the first loss",
    ),
    Row("GRPO's advantages", f"{ESTIMATOR}=grpo", True, on={ESTIMATOR: "grpo"}),
    Row(
        "RLOO, REINFORCE++, GAE with a critic",
        f"{ESTIMATOR}=rloo",
        True,
        on={ESTIMATOR: ("rloo", "reinforce_plus_plus", "gae").__contains__},
    ),
    Row(
        "optimal token baseline",
        f"{ESTIMATOR}=optimal_token_baseline",
        remark="its advantages differ within a sequence, as methods allow",
    ),
    Row(
        "group filtering",
        f"{GROUP_FILTERING}=True",
        remark="the worker gets batches that are filled up again",
        on={GROUP_FILTERING: True},
    ),
    Row("several turns with tools", "actor_rollout_ref.rollout.multi_turn.enable=True", True),
)

# For each of these keys, every run has one value, which a test has run or not.
ONE_OF = (STRATEGY, ENGINE_NAME, ESTIMATOR)


def untested(options: Options) -> list[str]:
    """What no test has run of a run's options: names of options, and keys with values that no tested row has.

    Args:
        options: the keys of `READ` with their values.
    """
    run = [row for row in ROWS if row.state == "run"]
    others = [
        f"{key}={options.get(key)}" for key in ONE_OF if not any(row.is_on(options) for row in run if key in row.on)
    ]
    return others + [row.option for row in ROWS if row.state == "untested" and row.is_on(options)]


REFUSALS: tuple[Refusal, ...] = tuple(row.refusal for row in ROWS if row.refusal is not None)


def support_table() -> str:
    """The table of options in docs/support.md, one row per option."""
    state_in_words = {"run": "run on the CPU", "untested": "untested", "refused": "refused"}
    rows = ["| option | switched on by | state | |", "|---|---|---|---|"]
    rows += [
        f"| {row.option} | `{row.key}` | {state_in_words[row.state]} | {row.remark} |".replace("  ", " ")
        for row in ROWS
    ]
    return "\n".join(rows)


def refuse_unserved(options: Options, node: Settings | Observe) -> None:
    """Raises if a run has an option that the plugin cannot support.

    Args:
        options: the keys of `READ` with their values; keys that the run lacks may be missing.

    Raises:
        ValueError: names the keys, their values and what to do.
    """
    for refusal in REFUSALS:
        message = refusal(options, node)
        if message is not None:
            raise ValueError(message)
