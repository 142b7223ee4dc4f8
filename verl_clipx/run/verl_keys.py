"""What becomes of each key of verl's configuration under a method of the plugin: one row a key, or a subtree.

Every key that verl's losses, aggregation, distillation and rollout correction read has its own row
(scripts/verl_loss_keys.py finds these keys in verl's source). A node that contains such keys has no row as a whole, so
that a key that a new verl adds to it has no row, and a test names it.

What a clip key of verl's means to a method stands in the method's class (`parameter(…, verl=)`).
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf

from verl_clipx.base.method import NODE, Method
from verl_clipx.base.parameters import VerlKey
from verl_clipx.base.refusal import Refusal, written
from verl_clipx.run.config import Observe, Settings
from verl_clipx.run.groups import OBSERVE

ACTOR, ROLLOUT, REFERENCE = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
POLICY_LOSS = f"{ACTOR}.policy_loss"
FACTS = f"{POLICY_LOSS}.run"
# What the plugin puts into verl's node, and what its groups write there (configs/clipx/base.yaml).
OF_THE_PLUGIN = {FACTS: "${clipx_run:}", f"{POLICY_LOSS}.{NODE}": f"${{{NODE}}}"}
LOSS_MODE = f"{POLICY_LOSS}.loss_mode"
POLICY_LOSS_CORRECTION = f"{POLICY_LOSS}.rollout_correction"
LOSS_AGG_MODE, LOSS_SCALE_FACTOR = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"
BYPASS = "algorithm.rollout_correction.bypass_mode"
ROLLOUT_IS = "algorithm.rollout_correction.rollout_is"
ROLLOUT_RS = "algorithm.rollout_correction.rollout_rs"
LOSS_TYPE = "algorithm.rollout_correction.loss_type"
# The keys that go with verl's weights, and with its rejection.
WITH_ROLLOUT_IS = (f"{ROLLOUT_IS}_threshold", f"{ROLLOUT_IS}_batch_normalize")
WITH_ROLLOUT_RS = (f"{ROLLOUT_RS}_threshold",)
CALCULATE_LOG_PROBS = f"{ROLLOUT}.calculate_log_probs"
# Each of these keys can switch torch.compile off.
TORCH_COMPILE = (f"{ACTOR}.use_torch_compile", f"{ACTOR}.fsdp_config.use_torch_compile")
DISTILLATION, OF_DISTILLATION = "distillation.enabled", "distillation.distillation_loss"
DISTILLATION_LOSS = f"{OF_DISTILLATION}.loss_mode"
DISTILLATION_COEFFICIENT = f"{OF_DISTILLATION}.distillation_loss_coef"
TASK_REWARDS = f"{OF_DISTILLATION}.use_task_rewards"
ENGINE_NAME, TEMPERATURE, LOG_PROB_MODE = (f"{ROLLOUT}.{key}" for key in ("name", "temperature", "logprobs_mode"))
# verl's vLLM server gives this key precedence over its own arguments.
LOG_PROB_MODE_OF_VLLM = f"{ROLLOUT}.engine_kwargs.vllm.logprobs_mode"
# From each key that truncates sampling to a test whether a value truncates, and the value that does not.
TRUNCATING: dict[str, tuple[Callable[[float], bool], float]] = {
    f"{ROLLOUT}.top_p": (lambda value: value < 1, 1),
    f"{ROLLOUT}.top_k": (lambda value: value > 0, -1),
    f"{ROLLOUT}.min_p": (lambda value: value > 0, 0),
}
STRATEGY, ESTIMATOR, USE_V1 = f"{ACTOR}.strategy", "algorithm.adv_estimator", "trainer.use_v1"
TRAINER_MODE, WARMUP = "trainer.v1.trainer_mode", "trainer.critic_warmup"
QAT, PREFIX_GROUPER = f"{ACTOR}.qat.enable", f"{ACTOR}.use_prefix_grouper"
MTP, GROUP_FILTERING = "actor_rollout_ref.model.mtp.enable", "algorithm.filter_groups.enable"
ROUTER_REPLAY = f"{ACTOR}.veomni.router_replay.mode"
DYNAMIC_CONTEXT = f"{ACTOR}.megatron.dynamic_context_parallel"
FUSED_KERNELS, MODEL_PATH = "actor_rollout_ref.model.use_fused_kernels", "actor_rollout_ref.model.path"
EPOCHS, MINI_BATCH, ROLLOUT_PROMPTS = f"{ACTOR}.ppo_epochs", f"{ACTOR}.ppo_mini_batch_size", "data.train_batch_size"
RESPONSES = f"{ROLLOUT}.n"
# A share of so many sequences moves in steps of 0.2 %.
FEWEST_SEQUENCES = 512
# Of verl's experimental trainers, which do not read trainer.v1.
ROLLOUT_NODES, MINI_BATCHES_AT_ONCE = "rollout.nnodes", "async_training.require_batches"
STEPS_A_VERSION = "async_training.trigger_parameter_sync_step"
# Of the mode that trainer.v1.trainer_mode names.
SYNC_STEP = "trainer.v1.*.parameter_sync_step"
# The keys of the models' attention, and from each key of sequence parallelism to the key of that model's attention.
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
CRITIC_ATTENTION = "critic.model.override_config.attn_implementation"
SEQUENCE_PARALLEL = {
    f"{ACTOR}.ulysses_sequence_parallel_size": ATTENTION,
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": ATTENTION,
    f"{REFERENCE}.ulysses_sequence_parallel_size": ATTENTION,
    f"{REFERENCE}.fsdp_config.ulysses_sequence_parallel_size": ATTENTION,
    "critic.ulysses_sequence_parallel_size": CRITIC_ATTENTION,
    "critic.fsdp.ulysses_sequence_parallel_size": CRITIC_ATTENTION,
    **{f"{model}.veomni.ulysses_parallel_size": f"{model}.veomni.attn_implementation" for model in (ACTOR, REFERENCE)},
}

Values = Mapping[str, Any]
Test = Callable[[Values, Settings | Observe], Refusal | None]

# What may become of a key.
READ_BY_VERL, TAKEN, REFUSED, IRRELEVANT = "read by verl as always", "taken over or not used", "refused", "irrelevant"
NOT_READ = object()


class Row(NamedTuple):
    """What becomes of a key, and of all keys below it.

    Attributes:
        key: the full key.
        fate: one of the four above. A key that verl reads may have values that are refused.
        reader: what reads it, or why it does not matter.
        default: its value where the configuration lacks it; `NOT_READ` if the plugin does not look at it.
        refusal: returns why a run with its value is refused, or None. Its docstring says when, for docs/support.md.
    """

    key: str
    fate: str
    reader: str
    default: Any = NOT_READ
    refusal: Test | None = None


# --- When a key is refused -------------------------------------------------------------------------------------------


REFUSALS: dict[str, Test] = {}


def refuses(key: str) -> Callable[[Test], Test]:
    """Puts a test on a key's row."""

    def put(test: Test) -> Test:
        REFUSALS[key] = test
        return test

    return put


def chosen(node: Settings | Observe) -> str:
    """How a node is called in a message."""
    return f"+{NODE}={OBSERVE}" if isinstance(node, Observe) else f"the method {node.method.name}"


def another_loss(loss_mode: str, settings: Settings) -> Refusal | None:
    """The refusal if loss_mode names another loss than the clipx node does; None if they agree."""
    name = settings.method.name
    if loss_mode in ("clipx_custom", f"clipx_{name}"):
        return None
    return Refusal(
        LOSS_MODE,
        loss_mode,
        f"contradicts {NODE}.method={name}: verl would train the loss that it names",
        f"Choose the method only by its group (+{NODE}={name}), or keep verl's loss with +{NODE}={OBSERVE}.",
    )


@refuses(LOSS_MODE)
def other_loss(values: Values, node: Settings | Observe) -> Refusal | None:
    """other than the group's own; under observe, other than verl's"""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    loss_mode = str(values[LOSS_MODE])
    if isinstance(node, Settings):
        return another_loss(loss_mode, node)
    if loss_mode.startswith(f"{NODE}_"):
        return Refusal(
            LOSS_MODE,
            loss_mode,
            f"+{NODE}={OBSERVE} is for verl's own losses; the plugin's have these metrics anyway",
            f"Choose the method by its group (+{NODE}={loss_mode[6:]}), or observe one of verl's (loss_mode=vanilla).",
        )
    known = sorted(name for name in POLICY_LOSS_REGISTRY if not name.startswith(f"{NODE}_"))
    if loss_mode in known:
        return None
    advice = f"Set it to one of {', '.join(known)}, or name the module that registers it in VERL_USE_EXTERNAL_MODULES."
    return Refusal(LOSS_MODE, loss_mode, "verl has no such loss to observe", advice)


@refuses(POLICY_LOSS_CORRECTION)
def misplaced_correction(values: Values, node: Settings | Observe) -> Refusal | None:
    """which only verl's bypass loss reads"""
    correction = values[POLICY_LOSS_CORRECTION] or {}
    if isinstance(node, Observe) or not correction:
        return None
    key, value = next(iter(correction.items()))
    reason = f"only verl's own loss bypass_mode reads it there, and {chosen(node)} would ignore it"
    advice = "Set a run's corrections under algorithm.rollout_correction."
    return Refusal(f"{POLICY_LOSS_CORRECTION}.{key}", value, reason, advice)


def padded_length(loss_agg_mode: str, loss_scale_factor: Any) -> Refusal | None:
    """The refusal if verl would divide a sum over a sequence by a length that depends on the micro-batch."""
    if loss_agg_mode != "seq-mean-token-sum-norm" or loss_scale_factor is not None:
        return None
    return Refusal(
        LOSS_AGG_MODE,
        loss_agg_mode,
        f"with {LOSS_SCALE_FACTOR}=null verl would divide by the padded length of each micro-batch",
        f"Set {LOSS_SCALE_FACTOR} to a constant, for example ${{data.max_response_length}}.",
    )


@refuses(LOSS_AGG_MODE)
def no_constant_length(values: Values, node: Settings | Observe) -> Refusal | None:
    """seq-mean-token-sum-norm without loss_scale_factor: verl would divide by a padded length"""
    return None if isinstance(node, Observe) else padded_length(values[LOSS_AGG_MODE], values[LOSS_SCALE_FACTOR])


@refuses(EPOCHS)
def no_update(values: Values, node: Settings | Observe) -> Refusal | None:
    """below 1: no update would be made"""
    epochs = values[EPOCHS]
    if epochs is None or (isinstance(epochs, int) and epochs >= 1):
        return None
    return Refusal(EPOCHS, epochs, "no update would be made", "Set it to a whole number of at least 1.")


@refuses(MINI_BATCH)
def too_few_sequences(values: Values, node: Settings | Observe) -> Refusal | None:
    """times rollout.n, below 512 where the bounds on a sequence's ratio hold a target"""
    prompts, samples = values[MINI_BATCH], values[RESPONSES]
    holds = isinstance(node, Settings) and node.hold is not None and node.method.by_sequence
    if not holds or None in (prompts, samples) or prompts * samples >= FEWEST_SEQUENCES:
        return None
    reason = (
        f"with {RESPONSES}={samples} a mini-batch has {prompts * samples} sequences, too few for {NODE}.hold: the "
        "share that is clipped would move in steps that are too coarse"
    )
    return Refusal(MINI_BATCH, prompts, reason, f"Have at least {FEWEST_SEQUENCES}, or leave out +{NODE}/hold.")


@refuses(CALCULATE_LOG_PROBS)
def no_log_probs(values: Values, node: Settings | Observe) -> Refusal | None:
    """False where a correction, bypass mode or the method needs them"""
    returned = values[CALCULATE_LOG_PROBS]
    asking = [f"{key}={value}" for key in (BYPASS, ROLLOUT_IS, ROLLOUT_RS) if (value := values[key])]
    by_method = asking_for_rollout_log_probs(node) if isinstance(node, Settings) else ""
    if returned or (returned is None and not by_method) or not (asking or by_method):
        return None
    reason = f"{', '.join(filter(None, [by_method, *asking]))} needs the rollout's log-probabilities"
    switch = f" or do without {(by_method or asking[0]).partition('=')[0]}"
    return Refusal(CALCULATE_LOG_PROBS, returned, reason, f"Set it to True,{switch}.")


def asking_for_rollout_log_probs(node: Settings) -> str:
    """The key, with its value, that makes a run need the rollout's log-probabilities; empty if none does."""
    method = node.method
    if "rollout_log_prob" not in method.asks_for:
        return "" if node.mask is None else f"{NODE}.mask.rule={node.mask.rule}"
    asking = [f"{NODE}.{key}={value}" for key, value in method.parameters.items() if value == "rollout"]
    return (asking or [f"{NODE}.method={method.name}"])[0]


@refuses(WITH_ROLLOUT_IS[0])
def weights_verl_refuses(values: Values, node: Settings | Observe) -> Refusal | None:
    """and rollout_is, if verl's own code refuses them, as it would at the first batch"""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    return refused_by_verl(compute_rollout_correction_weights, values, ROLLOUT_IS, WITH_ROLLOUT_IS[0])


@refuses(ROLLOUT_RS)
def rejection_verl_refuses(values: Values, node: Settings | Observe) -> Refusal | None:
    """likewise, with its threshold"""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    return refused_by_verl(compute_rollout_rejection_mask, values, ROLLOUT_RS, WITH_ROLLOUT_RS[0])


def refused_by_verl(correct: Callable, values: Values, key: str, threshold: str) -> Refusal | None:
    """verl's own objection, tried on two sequences; a run would meet it only with the first batch."""
    if values[key] is None:
        return None
    arguments = {name.rpartition(".")[2]: values[name] for name in (key, threshold)}
    try:
        correct(torch.zeros(2, 2), torch.ones(2, 2), **arguments)
    except (ValueError, TypeError) as error:
        reason = f"with {threshold}={written(values[threshold])} verl's rollout correction refuses it: {error}"
        return Refusal(key, values[key], reason.rstrip("."), f"Change it, or set {key}=null.")
    return None


@refuses(ROLLOUT_IS)
def weights_count_twice(values: Values, node: Settings | Observe) -> Refusal | None:
    """in bypass mode and with a method whose ratio is to the sampler: it would correct twice"""
    if isinstance(node, Observe) or values[ROLLOUT_IS] is None:
        return None
    if values[BYPASS]:
        because, other = f"{BYPASS}=True", f"{BYPASS}=False"
    elif node.method.ratio_to_sampler:
        by_behaviour = "behaviour" in node.method.parameters
        because = f"{NODE}.behaviour=rollout" if by_behaviour else chosen(node)
        other = f"{NODE}.behaviour=old" if by_behaviour else "choose another method"
    else:
        return None
    reason = (
        f"with {because} the ratio of {chosen(node)} is already relative to the policy that sampled, and the weights "
        "would correct for that policy a second time"
    )
    return Refusal(ROLLOUT_IS, values[ROLLOUT_IS], reason, f"Set {ROLLOUT_IS}=null, or {other}.")


@refuses(BYPASS)
def mask_without_effect(values: Values, node: Settings | Observe) -> Refusal | None:
    """True beside a mask that compares the old policy with the sampler: they are the same then"""
    mask = node.mask if isinstance(node, Settings) else None
    if not values[BYPASS] or mask is None or not mask.of_old_policy:
        return None
    reason = (
        f"the old log-probabilities are then the sampler's own, so that {NODE}.mask.rule={mask.rule}, which compares "
        "the two, would never take anything out"
    )
    return Refusal(BYPASS, True, reason, f"Set {BYPASS}=False, or leave out +{NODE}/mask={mask.rule}.")


@refuses(LOSS_TYPE)
def other_bypass_loss(values: Values, node: Settings | Observe) -> Refusal | None:
    """other than ppo_clip, which only verl's bypass loss reads"""
    loss_type = values[LOSS_TYPE]
    if isinstance(node, Observe) or loss_type in (None, "ppo_clip"):
        return None
    reason = f"only verl's own bypass loss reads it, and {chosen(node)} would ignore it"
    return Refusal(LOSS_TYPE, loss_type, reason, f"Set {LOSS_TYPE}=ppo_clip, or leave out +{NODE} to train verl's.")


@refuses(TASK_REWARDS)
def no_task_rewards(values: Values, node: Settings | Observe) -> Refusal | None:
    """False under distillation: verl would train no policy loss"""
    rewards = values[TASK_REWARDS]
    if not values[DISTILLATION] or rewards:
        return None
    effect = "would describe a loss that is not trained" if isinstance(node, Observe) else "would train nothing"
    reason = f"with {DISTILLATION}=True verl trains only its distillation loss, so that {chosen(node)} {effect}"
    advice = f"Set {TASK_REWARDS}=True, which adds the distillation loss to the policy loss, or leave out +{NODE}."
    return Refusal(TASK_REWARDS, rewards, reason, advice)


def distillation_term(values: Values) -> str | None:
    """What verl adds to the policy loss under distillation with task rewards, in words; None without distillation."""
    if not values.get(DISTILLATION):
        return None
    loss, coefficient = values.get(DISTILLATION_LOSS), values.get(DISTILLATION_COEFFICIENT)
    return f"verl's distillation loss {loss} is added to it with coefficient {coefficient}"


class Mismatch(NamedTuple):
    """By which keys and values the rollout's log-probabilities are not the trainer's for the same weights."""

    settings: dict[str, Any]
    effect: str
    remedy: str

    def __str__(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.settings.items())


def log_prob_mismatch(values: Values) -> Mismatch | None:
    """Why the rollout's log-probabilities belong to another distribution than the trainer's; None if they do not.

    The trainer divides the logits by the temperature and takes the softmax over the whole vocabulary. vLLM and the
    server of +hardware=cpu return what logprobs_mode says. verl does not pass this key to other servers.
    """
    engine, temperature = values.get(ENGINE_NAME), values.get(TEMPERATURE)
    truncating = {
        key: value
        for key, (truncates, _) in TRUNCATING.items()
        if isinstance(value := values.get(key), int | float) and truncates(value)
    }
    from_all = ", ".join(f"{key}={TRUNCATING[key][1]}" for key in truncating)
    off = "over the tokens that truncation keeps, and the trainer's are over the whole vocabulary"
    if engine not in ("vllm", "cpu"):
        effect = (
            f"depending on the version of {engine or 'the rollout server'}, its log-probabilities are {off}: every "
            "ratio is then off by the probability that is kept"
        )
        return Mismatch(truncating, effect, f"Set {from_all}") if truncating else None
    key = LOG_PROB_MODE_OF_VLLM if engine == "vllm" and values.get(LOG_PROB_MODE_OF_VLLM) else LOG_PROB_MODE
    mode = values.get(key)
    if mode == "processed_logprobs":
        effect = f"{engine}'s log-probabilities are {off}, so that every ratio is off by the probability that is kept"
        remedy = f"Set {from_all}" + f", or {key}=raw_logprobs" * (temperature == 1)
        return Mismatch({**truncating, key: mode}, effect, remedy) if truncating else None
    # null means vLLM's own default, raw_logprobs.
    if mode not in (None, "raw_logprobs"):
        effect = f"{engine} returns logits in place of log-probabilities"
        return Mismatch({key: mode}, effect, f"Set {key}=processed_logprobs")
    if temperature == 1:
        return None
    effect = f"{engine}'s log-probabilities are at temperature 1, the trainer's at {temperature}"
    remedy = f"Set {key}=processed_logprobs" + f" and {from_all}" * bool(truncating)
    return Mismatch({key: mode, TEMPERATURE: temperature}, effect, remedy)


def ratio_to_the_rollout_policy(values: Values, node: Settings | Observe) -> str | None:
    """The key, with its value, that puts a ratio to the rollout policy into the objective; None if none does."""
    if isinstance(node, Settings) and (asking := asking_for_rollout_log_probs(node)):
        return asking
    keys = [f"{key}={value}" for key in (BYPASS, ROLLOUT_IS, ROLLOUT_RS) if (value := values.get(key))]
    return keys[0] if keys else None


@refuses(f"{ROLLOUT}.top_p")
def ratios_are_off(values: Values, node: Settings | Observe) -> Refusal | None:
    """top_k or min_p that truncates, where a ratio to the sampler enters the loss: it would be off"""
    mismatch, asking = log_prob_mismatch(values), ratio_to_the_rollout_policy(values, node)
    if isinstance(node, Observe) or mismatch is None or asking is None:
        return None
    (key, value), *others = mismatch.settings.items()
    beside = ", ".join([asking, *(f"{other}={written(of)}" for other, of in others)])
    return Refusal(key, value, f"with {beside}: {mismatch.effect}", f"{mismatch.remedy}.")


WRONG_ATTENTION = (
    "each rank would attend to its own slice of a sequence and train on wrong log-probabilities, because verl patches "
    "only flash attention"
)


def has_sequence_parallel_attention(name: str | None) -> bool:
    """Whether an attention, by its name, works with a slice of each sequence; None is verl's flash_attention_2."""
    # verl replaces the kernel call in flash attention (models/transformers/monkey_patch.py), VeOmni that in its own.
    return name is None or name.startswith(("flash_attention", "veomni_flash_attention"))


@refuses(f"{ACTOR}.ulysses_sequence_parallel_size")
def attention_on_a_slice(values: Values, node: Settings | Observe) -> Refusal | None:
    """above 1, in any of its places, with sdpa or eager attention: each rank would attend to its own slice"""
    from verl.plugin.platform import get_platform

    for key, attention in SEQUENCE_PARALLEL.items():
        size, name = values[key], values[attention]
        if attention == CRITIC_ATTENTION and get_platform().device_name != "cpu":
            # verl's critic ignores this key and takes flash attention (utils/model.py), which a CPU does not have.
            continue
        if size and size > 1 and not has_sequence_parallel_attention(name):
            advice = f"Set {attention}=flash_attention_2 (on a CPU there is none), or {key}=1."
            return Refusal(key, size, f"with {attention}={name}: {WRONG_ATTENTION}", advice)
    return None


@refuses(ROUTER_REPLAY)
def recorded_routes(values: Values, node: Settings | Observe) -> Refusal | None:
    """R2, if the method needs the extra pass: it would choose routes of its own"""
    if isinstance(node, Observe) or values[STRATEGY] != "veomni" or values[ROUTER_REPLAY] != "R2":
        return None
    rejects = values[BYPASS] and values[ROLLOUT_RS] is not None
    if not (node.needs_extra_pass or (rejects and node.select is not None)):
        return None
    return Refusal(
        ROUTER_REPLAY,
        "R2",
        f"under {chosen(node)} the extra pass over the mini-batch would choose its own routes and see other "
        "probabilities than the update trains on",
        "Set it to R3 or disabled, or do without that pass (clipx.scope=lagged or micro_batch, "
        "clipx.select.over=sequence).",
    )


@refuses(DYNAMIC_CONTEXT)
def dynamic_context(values: Values, node: Settings | Observe) -> Refusal | None:
    """True: each rank would be its own data-parallel group"""
    if values[STRATEGY] != "megatron" or not values[DYNAMIC_CONTEXT]:
        return None
    reason = (
        "verl then gives each rank its own data-parallel group, so statistics and metrics would be those of one rank"
    )
    advice = f"Set {DYNAMIC_CONTEXT}=False; a fixed context_parallel_size is supported."
    return Refusal(DYNAMIC_CONTEXT, True, reason, advice)


@refuses(FUSED_KERNELS)
def sharded_head(values: Values, node: Settings | Observe) -> Refusal | None:
    """under FSDP2 with untied embeddings, if the model's configuration is here: torch would stop"""
    path = values[MODEL_PATH]
    config = model_config(path) if values[STRATEGY] == "fsdp2" and values[FUSED_KERNELS] else None
    if config is None or config.get_text_config().tie_word_embeddings:
        return None
    reason = (
        f"with {STRATEGY}=fsdp2 and {MODEL_PATH}={path}, whose output embedding is not its input embedding, FSDP2 "
        "shards it by itself, and verl 0.9.1's fused forward pass multiplies with a part of it"
    )
    return Refusal(FUSED_KERNELS, True, reason, f"Set {FUSED_KERNELS}=False.")


def model_config(path: str | None) -> Any:
    """A model's configuration in transformers; None if it is not on this machine."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError):
        return None


# --- The table -------------------------------------------------------------------------------------------------------

# What reads a key.
LOSSES, BYPASS_LOSS, CORRECTION = "verl's own losses", "verl's bypass loss", "verl's rollout correction"
AGGREGATION = "verl's aggregation, which the line names"
BESIDE = "verl's ppo_loss, which adds it to the method's loss"
SAMPLES = "what makes the samples and their advantages, which is the same for every loss"
ENGINE = "the engine that computes log-probabilities and gradients"
SCHEDULE = "the trainer; the line names the number of updates"
SERVER = "the server that samples"

# Keys of verl's own losses, under the actor, with verl's defaults. dro_beta has none in verl, whose dro stops without.
CLIP_KEYS: dict[str, Any] = {
    "clip_ratio": 0.2,
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.2,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "policy_loss.dro_beta": None,
    "policy_loss.tau_pos": None,
    "policy_loss.tau_neg": None,
    "policy_loss.clip_cov_ratio": 0.0002,
    "policy_loss.clip_cov_lb": 1.0,
    "policy_loss.clip_cov_ub": 5.0,
    "policy_loss.kl_cov_ratio": 0.0002,
    "policy_loss.ppo_kl_coef": 0.1,
}

# verl's SAPO reads the actor's temperatures, but its scripts write them under policy_loss, where verl has no such keys.
NOT_IN_VERL = ("tau_pos", "tau_neg")

# The keys that the plugin reads, with their values where the configuration lacks them.
DEFAULTS: dict[str, Any] = {
    **{f"{ACTOR}.{key}": value for key, value in CLIP_KEYS.items()},
    **{LOSS_MODE: "vanilla", LOSS_AGG_MODE: "token-mean", EPOCHS: 1, TASK_REWARDS: True},
    **dict.fromkeys(
        (
            *(POLICY_LOSS_CORRECTION, LOSS_SCALE_FACTOR, STRATEGY, BYPASS, LOSS_TYPE, ROLLOUT_IS, ROLLOUT_RS),
            *(*WITH_ROLLOUT_IS, *WITH_ROLLOUT_RS, DISTILLATION, DISTILLATION_LOSS, DISTILLATION_COEFFICIENT),
            *(MINI_BATCH, ROLLOUT_PROMPTS, USE_V1, WARMUP, STEPS_A_VERSION, ROLLOUT_NODES, MINI_BATCHES_AT_ONCE),
            *(TRAINER_MODE, *TORCH_COMPILE, MODEL_PATH, FUSED_KERNELS, QAT, MTP, PREFIX_GROUPER, ROUTER_REPLAY),
            *(DYNAMIC_CONTEXT, *SEQUENCE_PARALLEL, *SEQUENCE_PARALLEL.values(), ESTIMATOR, GROUP_FILTERING, RESPONSES),
            *(ENGINE_NAME, TEMPERATURE, LOG_PROB_MODE, LOG_PROB_MODE_OF_VLLM, *TRUNCATING, CALCULATE_LOG_PROBS),
        )
    ),
}


def rows(fate: str, reader: str, *keys: str, below: str = "") -> tuple[Row, ...]:
    """A row for each key; `below` is the node that the keys are in."""
    full = (f"{below}.{key}" if below else key for key in keys)
    return tuple(Row(key, fate, reader, DEFAULTS.get(key, NOT_READ), REFUSALS.get(key)) for key in full)


# The keys that verl's losses read, and those beside them.
ON_THE_PATH = (
    *rows(TAKEN, LOSSES, *CLIP_KEYS, below=ACTOR),
    *rows(REFUSED, LOSSES, LOSS_MODE),
    *rows(REFUSED, BYPASS_LOSS, POLICY_LOSS_CORRECTION),
    *rows(READ_BY_VERL, AGGREGATION, LOSS_AGG_MODE, LOSS_SCALE_FACTOR),
    *rows(READ_BY_VERL, BESIDE, "entropy_coeff", "use_kl_loss", "kl_loss_coef", "kl_loss_type", below=ACTOR),
    *rows(READ_BY_VERL, ENGINE, STRATEGY),
    *rows(IRRELEVANT, "verl, which fills it in", f"{ACTOR}.global_batch_info", f"{OF_DISTILLATION}.global_batch_info"),
    *rows(READ_BY_VERL, CORRECTION, BYPASS, ROLLOUT_IS, *WITH_ROLLOUT_IS, ROLLOUT_RS, *WITH_ROLLOUT_RS),
    *rows(REFUSED, BYPASS_LOSS, LOSS_TYPE),
    *rows(READ_BY_VERL, SAMPLES, "gamma", "norm_adv_by_std_in_grpo", "kl_ctrl", below="algorithm"),
    *rows(READ_BY_VERL, SAMPLES, "gdpo_reward_keys", "gdpo_reward_weights", below="algorithm"),
    *rows(REFUSED, "verl's distillation", TASK_REWARDS),
    *rows(READ_BY_VERL, BESIDE, DISTILLATION, DISTILLATION_LOSS, DISTILLATION_COEFFICIENT),
    *rows(
        *(READ_BY_VERL, BESIDE, "topk", "loss_max_clamp", "log_prob_min_clamp", "use_policy_gradient"),
        *("policy_loss_mode", "clip_ratio", "clip_ratio_low", "clip_ratio_high"),
        *("use_chunked_topk", "chunked_topk_chunk_size"),
        below=OF_DISTILLATION,
    ),
    *rows(READ_BY_VERL, "the critic's own loss", "critic", "critic.loss_agg_mode", "critic.loss_scale_factor"),
)

# Keys elsewhere that the plugin looks at.
ELSEWHERE = (
    *rows(READ_BY_VERL, SCHEDULE, EPOCHS, MINI_BATCH, RESPONSES, ROLLOUT_PROMPTS, USE_V1, WARMUP, STEPS_A_VERSION),
    *rows(READ_BY_VERL, SCHEDULE, ROLLOUT_NODES, MINI_BATCHES_AT_ONCE, TRAINER_MODE),
    *rows(READ_BY_VERL, "clipx.compile=auto too, which then compiles nothing", *TORCH_COMPILE),
    *rows(READ_BY_VERL, ENGINE, MODEL_PATH, FUSED_KERNELS, QAT, MTP, PREFIX_GROUPER, ROUTER_REPLAY, DYNAMIC_CONTEXT),
    *rows(READ_BY_VERL, ENGINE, *dict.fromkeys([*SEQUENCE_PARALLEL, *SEQUENCE_PARALLEL.values()])),
    *rows(READ_BY_VERL, SERVER, ENGINE_NAME, TEMPERATURE, LOG_PROB_MODE, LOG_PROB_MODE_OF_VLLM),
    *rows(READ_BY_VERL, SERVER, *TRUNCATING, CALCULATE_LOG_PROBS),
    *rows(READ_BY_VERL, SAMPLES, ESTIMATOR, GROUP_FILTERING),
)

ROWS = (*ON_THE_PATH, *ELSEWHERE)
READ = tuple(row.key for row in ROWS if row.default is not NOT_READ)


def row_of(key: str) -> Row | None:
    """The row of a key: its own, or that of the smallest subtree around it. None if there is no such row."""
    holding = [row for row in ROWS if f"{key}.".startswith(f"{row.key}.")]
    return max(holding, key=lambda row: len(row.key), default=None)


# --- What becomes of a configuration's keys --------------------------------------------------------------------------


def read(config: DictConfig) -> dict[str, Any]:
    """The keys of `READ` with their values in verl's configuration, and `SYNC_STEP`."""
    values = {row.key: _value(config, row.key, row.default) for row in ROWS if row.default is not NOT_READ}
    mode = values[TRAINER_MODE] or "sync"
    return values | {SYNC_STEP: _value(config, f"trainer.v1.{mode}.parameter_sync_step", 1)}


def _value(config: DictConfig, key: str, default: Any) -> Any:
    value = OmegaConf.select(config, key, default=default)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def refusals(values: Values, node: Settings | Observe) -> Iterator[Refusal]:
    """Why a run cannot be what its configuration says, as far as verl's keys by themselves show it."""
    for row in ROWS:
        if row.refusal is not None and (refusal := row.refusal(values, node)) is not None:
            yield refusal


# Keys in such a node belong to the code that verl passes them on to.
PASSED_ON = ("kwargs", "override")
NAMES_ON_THE_PATH = {
    row.key.rpartition(".")[2]: row.key
    for row in reversed(ON_THE_PATH)
    if row.reader in (LOSSES, AGGREGATION, BESIDE) and row.key.startswith(f"{ACTOR}.")
}


def misplaced(config: DictConfig) -> Iterator[Refusal]:
    """Keys of the policy loss, by their names, at places where nothing reads them."""
    for key in paths(OmegaConf.to_container(config, resolve=False)):
        node, _, name = key.rpartition(".")
        if (
            name not in NAMES_ON_THE_PATH
            or any(row.key == key for row in ROWS)
            or key.startswith((f"{NODE}.", *OF_THE_PLUGIN))
        ):
            continue
        if not any(part in node for part in PASSED_ON):
            value = OmegaConf.select(config, key, throw_on_resolution_failure=False)
            advice = f"Set {NAMES_ON_THE_PATH[name]}, which verl reads, or remove {key}."
            yield Refusal(key, value, "nothing reads it there", advice)


def paths(node: dict[str, Any], before: str = "") -> dict[str, Any]:
    """The full key of every value and of every node in a nested configuration, each with what it holds."""
    full = {}
    for key, value in node.items():
        full[f"{before}{key}"] = value
        if isinstance(value, dict):
            full |= paths(value, f"{before}{key}.")
    return full


class ClipKeys(NamedTuple):
    """What becomes of verl's clip keys under a method; `taken` and `unused` are as in `facts.RunFacts`."""

    taken: dict[str, dict[str, Any]]
    unused: dict[str, Any]
    refused: list[Refusal]


def clip_keys(method: Method, values: Values, named: Collection[str] = ()) -> ClipKeys:
    """What becomes of verl's clip keys under a method.

    Args:
        method: with the parameters of its group and of the user's overrides. A parameter that still has its default
            takes verl's value over.
        values: from `read`.
        named: full keys that the command line or a file of the user's names, verl's and the plugin's. Such a key counts
            even if it repeats verl's default.
    """
    taken, refused, known, replaced = {}, [], set(), set()
    for field in dataclasses.fields(method):
        verl = verl_key(type(method), field.name)
        if verl is None:
            continue
        if field.name in method.replaced:
            replaced |= {*verl.names, verl.instead}
            continue
        known |= {*verl.names, verl.instead}
        sources = [name for name in verl.names if is_set(name, verl, values, named)]
        if not sources and verl.instead and is_set(verl.instead, verl, values, named):
            sources = [verl.instead]
        for index, name in enumerate(sources):
            value = values[f"{ACTOR}.{name}"]
            if index and value != (first := values[f"{ACTOR}.{sources[0]}"]):
                reason = f"contradicts {ACTOR}.{sources[0]}={written(first)}"
                refused.append(Refusal(f"{ACTOR}.{name}", value, reason, "Remove one of the two."))
                continue
            became = becomes(method, field, verl, name, value, named)
            if isinstance(became, Refusal):
                refused.append(became)
            elif not is_same_bound(became, getattr(method, field.name)):
                taken.setdefault(field.name, {"key": name, "given": value, "value": became})
    unused = {
        f"{ACTOR}.{key}": value
        for key, default in CLIP_KEYS.items()
        if key not in known
        and (value := values[f"{ACTOR}.{key}"]) is not None
        and (value != default or (key in replaced and f"{ACTOR}.{key}" in named))
    }
    return ClipKeys(taken, unused, refused)


def verl_key(method: type[Method], parameter: str) -> VerlKey | None:
    """The key of verl's that a parameter takes over, by its class or by a base that has the same parameter."""
    for base in method.__mro__:
        field = getattr(base, "__dataclass_fields__", {}).get(parameter)
        if field is not None and (key := field.metadata.get("verl")) is not None:
            return key
    return None


def is_set(name: str, verl: VerlKey, values: Values, named: Collection[str]) -> bool:
    """Whether a key of verl's has been set; null leaves widths and keys without a default to others."""
    value, default = values[f"{ACTOR}.{name}"], CLIP_KEYS[name]
    if value is None and (verl.instead is not None or default is None):
        return False
    return value != default or f"{ACTOR}.{name}" in named


def becomes(
    method: Method, field: dataclasses.Field, verl: VerlKey, name: str, given: Any, named: Collection[str]
) -> float | Refusal | None:
    """A parameter's value from that of verl's key `name` below the actor, or why it cannot have it."""
    full, own, current = f"{ACTOR}.{name}", f"{NODE}.{field.name}", getattr(method, field.name)
    if given is not None and (isinstance(given, bool) or not isinstance(given, int | float)):
        return Refusal(full, given, "must be a number")
    value = None if given is None else verl.conversion.convert(given)
    if is_same_bound(value, current):
        return value
    would_be, kept = f"would be {own}={_short(value)}", f"{own}={_short(current)}"
    allowed = field.metadata["allowed"]
    try:
        allowed.convert(value)
    except (ValueError, TypeError, OverflowError):
        change = f"For {given:g} %, write {given / 100:g}" if verl.instead and given and given > 1 else "Change it"
        return Refusal(
            full, given, f"{would_be}, which must be {allowed.description}", f"{change}, or remove it to keep {kept}."
        )
    if current != field.default or own in named:
        reason = f"{would_be}, but its group or the command line says {kept}"
        return Refusal(full, given, reason, "Remove one of the two.")
    if verl.usual_because and value is not None and not allowed.usual[0] <= value <= allowed.usual[1]:
        advice = f"Remove it to keep {kept}, or also set {own}={_short(value)} if you mean it."
        return Refusal(full, given, f"{would_be}: {verl.usual_because}", advice)
    return value


def is_same_bound(value: float | None, current: float | None) -> bool:
    """Whether a parameter has a value already. A bound of 0 or less equals null, because ratios are above 0."""
    if value is None:
        return current is None
    return value <= 0 if current is None else math.isclose(value, current, rel_tol=1e-9)


def _short(value: float | None) -> str:
    return "null" if value is None else f"{value:g}"
