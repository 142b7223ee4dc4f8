"""The keys of verl's configuration that the plugin knows: a row for each key or subtree, and below it its refusal.

Every key that verl's losses, aggregation, distillation and rollout correction read has its own row
(scripts/verl_loss_keys.py finds these keys in verl's source). A node that contains such keys has no row as a whole, so
that a key that a new verl adds to it has no row, and a test names it.

What a clip key of verl's means to a method stands in the method's class (`parameter(…, verl=)`). `takeover.py` decides
what becomes of it in a run. Importing this is cheap.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from verl_clipx.losses.base.parameters import NODE
from verl_clipx.losses.base.refusal import Refusal, format_exactly
from verl_clipx.losses.groups import OBSERVE, swap_by
from verl_clipx.run.sampling import Correction, Sampling

if TYPE_CHECKING:
    from verl_clipx.losses.base.method import Method
    from verl_clipx.run.config import Observe, Settings

Values = Mapping[str, Any]
# A function that yields the reasons for which a run with these values, and with this clipx node, is refused.
Refuser = Callable[[Values, "Settings | Observe"], Iterator[Refusal]]

# The fates of keys: what may become of a key.
READ_BY_VERL = "read by verl as always"
TAKEN = "taken over or not used"
REFUSED = "refused"
IRRELEVANT = "irrelevant"
# This stands in place of a default if the plugin does not read the key.
NOT_READ = object()

# The readers of keys.
LOSSES = "verl's own losses"
BYPASS_LOSS = "verl's bypass loss"
CORRECTION = "verl's rollout correction"
AGGREGATION = "verl's aggregation, which the line names"
BESIDE = "verl's ppo_loss, which adds it to the method's loss"
SAMPLES = "what makes the samples and their advantages, which is the same for every loss"
ENGINE = "the engine that computes log-probabilities and gradients"
TRAINER = "the trainer"
UPDATES = "the trainer, for the number of updates, which the line names"
SERVER = "the server that samples"


class KeyRow(NamedTuple):
    """What the plugin knows of a key, and of all keys below it.

    Attributes:
        key: the full key.
        fate: `READ_BY_VERL`, `TAKEN`, `REFUSED` or `IRRELEVANT`. Some values of a key that verl reads may be refused.
        reader: in words, what reads the key, or why the key does not matter. `refuse_misplaced_keys` compares it with
            `LOSSES`, `AGGREGATION` and `BESIDE`.
        default: the key's value where the configuration lacks the key; `NOT_READ` if the plugin does not look at it.
        on_path: whether verl reads the key on the way to the loss.
        refusal: the function that yields why a run with the key's value is refused; None if no value is refused.
        refused_when: for which values the key is refused, in the words of docs/support.md; empty without a `refusal`.
    """

    key: str
    fate: str
    reader: str
    default: Any = NOT_READ
    on_path: bool = True
    refusal: Refuser | None = None
    refused_when: str = ""


ROWS: dict[str, KeyRow] = {}


def declare(key: str, fate: str, reader: str, default: Any = NOT_READ, *, on_path: bool = True) -> str:
    """Give a key its row, and return the key. The arguments are the attributes of `KeyRow`.

    Raises:
        ValueError: the key has a row already.
    """
    if key in ROWS:
        raise ValueError(f"{key} has a row already")
    ROWS[key] = KeyRow(key, fate, reader, default, on_path)
    return key


def declare_all(fate: str, reader: str, node: str, *names: str, **arguments: Any) -> tuple[str, ...]:
    """Give several keys of a node their rows, and return the full keys.

    Args:
        fate, reader, arguments: as for `declare`; they are the same for all of these keys.
        node: the full key of the node.
        names: the names of the keys in it.
    """
    return tuple(declare(f"{node}.{name}", fate, reader, **arguments) for name in names)


def refuses(key: str, *, when: str) -> Callable[[Refuser], Refuser]:
    """Store the decorated function as the `refusal` of a key's row.

    Args:
        key: the full key.
        when: for which values the key is refused, and why. scripts/key_tables.py prints it as the key's line in
            docs/support.md.

    Raises:
        ValueError: the row has such a function already.
    """

    def store(refuser: Refuser) -> Refuser:
        if ROWS[key].refusal is not None:
            raise ValueError(f"{key} is refused by {ROWS[key].refusal.__name__} already")
        ROWS[key] = ROWS[key]._replace(refusal=refuser, refused_when=when)
        return refuser

    return store


def name_loss(node: "Settings | Observe") -> str:
    """Return what a message calls the part that the plugin has in a run: its method, or +clipx=observe."""
    return f"the method {node.method.name}" if node.trains else f"+{NODE}={OBSERVE}"


def group_of_loss(name: str) -> str:
    """Return the group that chooses a loss of the plugin: `name` itself, or `custom` for any other name.

    Args:
        name: the loss's name in verl's registry, without clipx_.
    """
    from verl_clipx.losses.methods import METHODS

    is_of_package = name in METHODS and METHODS[name].__module__.startswith("verl_clipx.")
    return name if is_of_package else CUSTOM


# --- The loss --------------------------------------------------------------------------------------------------------

MODEL_ROOT = "actor_rollout_ref"
ACTOR = f"{MODEL_ROOT}.actor"
ROLLOUT = f"{MODEL_ROOT}.rollout"
REFERENCE = f"{MODEL_ROOT}.ref"
MODEL = f"{MODEL_ROOT}.model"
POLICY_LOSS = f"{ACTOR}.policy_loss"
FACTS = f"{POLICY_LOSS}.run"
# The nodes that the plugin keeps in verl's (configs/clipx/base.yaml).
OF_THE_PLUGIN = (FACTS, f"{POLICY_LOSS}.{NODE}")

# Keys of verl's own losses, under the actor, with verl's defaults. verl gives dro_beta no default, and its loss dro
# stops where it is not set.
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
for _name, _default in CLIP_KEYS.items():
    declare(f"{ACTOR}.{_name}", TAKEN, LOSSES, _default)

# verl's SAPO reads the actor's temperatures, but its scripts write them under policy_loss, where verl has no such keys.
NOT_IN_VERL = ("tau_pos", "tau_neg")

LOSS_MODE = declare(f"{POLICY_LOSS}.loss_mode", REFUSED, LOSSES, "vanilla")
# The group of a loss of the user's own.
CUSTOM = "custom"
# A loss of verl after 0.9, which acts on logits, and its own keys.
LOCAL = "local"
declare_all(IRRELEVANT, "verl's LOCAL alone, whose loss_mode is refused", POLICY_LOSS, "local_eta", "local_topk")


@refuses(
    LOSS_MODE,
    when=(
        "any value other than the group's own; under observe, a loss of the plugin, verl's loss on logits (local), and "
        "a name that is not registered with verl"
    ),
)
def refuse_loss_mode(values: Values, node: "Settings | Observe") -> Iterator[Refusal]:
    """Yield a refusal if loss_mode names another loss than the method, or one that the plugin cannot observe."""
    loss_mode = str(values[LOSS_MODE])
    if node.trains:
        yield from refuse_contradicting_loss_mode(loss_mode, node)
    else:
        yield from refuse_unobservable_loss(loss_mode)


def refuse_contradicting_loss_mode(loss_mode: str, settings: "Settings") -> Iterator[Refusal]:
    """Yield a refusal if loss_mode names another loss than the one that the clipx node chooses."""
    name = settings.method.name
    if loss_mode in (f"{NODE}_{CUSTOM}", f"{NODE}_{name}"):
        return
    group = group_of_loss(name)
    chosen = f"{NODE}.function, a loss named {name}" if group == CUSTOM else f"{NODE}.method={name}"
    yield Refusal(
        key=LOSS_MODE,
        value=loss_mode,
        reason=f"contradicts {chosen}: verl would train the loss that it names",
        advice=f"Remove loss_mode, which +{NODE}={group} sets by itself, or keep verl's loss with {swap_by(OBSERVE)}.",
    )


def refuse_unobservable_loss(loss_mode: str) -> Iterator[Refusal]:
    """Yield a refusal if +clipx=observe cannot observe the loss that loss_mode names."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    prefix = f"{NODE}_"
    observable_losses = sorted(name for name in POLICY_LOSS_REGISTRY if not name.startswith(prefix))
    if loss_mode.startswith(prefix):
        group = group_of_loss(loss_mode.removeprefix(prefix))
        reason = f"+{NODE}={OBSERVE} is for verl's own losses; a loss of the plugin logs its metrics by itself"
        advice = (
            f"Train it with +{NODE}={group}, which sets loss_mode by itself, or observe a loss of verl's (vanilla)."
        )
    elif loss_mode == LOCAL:
        reason = f"verl's LOCAL is a loss on logits, which +{NODE}={OBSERVE} does not see"
        advice = f"Leave out +{NODE}={OBSERVE}, or observe another loss (vanilla)."
    elif loss_mode not in observable_losses:
        reason = "verl has no such loss to observe"
        advice = (
            f"Set it to one of {', '.join(observable_losses)}, or name the module that registers it in "
            "VERL_USE_EXTERNAL_MODULES."
        )
    else:
        return
    yield Refusal(LOSS_MODE, loss_mode, reason, advice)


POLICY_LOSS_CORRECTION = declare(f"{POLICY_LOSS}.rollout_correction", REFUSED, BYPASS_LOSS, None)


@refuses(POLICY_LOSS_CORRECTION, when="any setting, with a method of the plugin: only verl's own bypass loss reads it")
def refuse_misplaced_correction(values: Values, node: "Settings | Observe") -> Iterator[Refusal]:
    """Yield a refusal if a correction is set in the policy loss, where a method of the plugin would ignore it."""
    correction = values[POLICY_LOSS_CORRECTION] or {}
    if node.trains and correction:
        key, value = next(iter(correction.items()))
        reason = f"only verl's own loss bypass_mode reads it there, and {name_loss(node)} would ignore it"
        advice = "Set a run's corrections under algorithm.rollout_correction."
        yield Refusal(f"{POLICY_LOSS_CORRECTION}.{key}", value, reason, advice)


LOSS_AGG_MODE = declare(f"{ACTOR}.loss_agg_mode", READ_BY_VERL, AGGREGATION, "token-mean")
LOSS_SCALE_FACTOR = declare(f"{ACTOR}.loss_scale_factor", READ_BY_VERL, AGGREGATION, None)


def refuse_padded_length(loss_agg_mode: str, loss_scale_factor: Any) -> Iterator[Refusal]:
    """Yield a refusal if verl would divide a sum over a sequence by a length that depends on the micro-batch."""
    if loss_agg_mode == "seq-mean-token-sum-norm" and loss_scale_factor is None:
        reason = f"with {LOSS_SCALE_FACTOR}=null verl would divide by the padded length of each micro-batch"
        advice = f"Set {LOSS_SCALE_FACTOR} to a constant, for example ${{data.max_response_length}}."
        yield Refusal(LOSS_AGG_MODE, loss_agg_mode, reason, advice)


@refuses(
    LOSS_AGG_MODE,
    when=(
        "seq-mean-token-sum-norm without loss_scale_factor, with a method of the plugin: verl would divide by a padded "
        "length"
    ),
)
def refuse_inconstant_length(values: Values, node: "Settings | Observe") -> Iterator[Refusal]:
    """Yield a refusal if a method's loss would depend on the length to which a micro-batch is padded."""
    if node.trains:
        yield from refuse_padded_length(values[LOSS_AGG_MODE], values[LOSS_SCALE_FACTOR])


declare_all(READ_BY_VERL, BESIDE, ACTOR, "entropy_coeff", "use_kl_loss", "kl_loss_coef", "kl_loss_type")
STRATEGY = declare(f"{ACTOR}.strategy", READ_BY_VERL, ENGINE, None)
declare_all(IRRELEVANT, "verl, which fills it in", ACTOR, "global_batch_info")
declare_all(IRRELEVANT, "verl, which fills it in", "distillation.distillation_loss", "global_batch_info")

# --- Rollout correction ----------------------------------------------------------------------------------------------

CORRECTION_NODE = "algorithm.rollout_correction"
BYPASS = declare(f"{CORRECTION_NODE}.bypass_mode", READ_BY_VERL, CORRECTION, None)
ROLLOUT_IS = declare(f"{CORRECTION_NODE}.rollout_is", READ_BY_VERL, CORRECTION, None)
IS_THRESHOLD = declare(f"{CORRECTION_NODE}.rollout_is_threshold", READ_BY_VERL, CORRECTION, None)
IS_NORMALIZE = declare(f"{CORRECTION_NODE}.rollout_is_batch_normalize", READ_BY_VERL, CORRECTION, None)
ROLLOUT_RS = declare(f"{CORRECTION_NODE}.rollout_rs", READ_BY_VERL, CORRECTION, None)
RS_THRESHOLD = declare(f"{CORRECTION_NODE}.rollout_rs_threshold", READ_BY_VERL, CORRECTION, None)
LOSS_TYPE = declare(f"{CORRECTION_NODE}.loss_type", REFUSED, BYPASS_LOSS, None)
# A key of verl after 0.9.
CENTERING = declare(f"{CORRECTION_NODE}.score_centering", REFUSED, BYPASS_LOSS, None)


def correction_of(values: Values) -> Correction:
    """Return verl's rollout correction as a configuration has it."""
    return Correction(
        bypass=values.get(BYPASS),
        weights=values.get(ROLLOUT_IS),
        weights_threshold=values.get(IS_THRESHOLD),
        weights_normalised=values.get(IS_NORMALIZE),
        rejection=values.get(ROLLOUT_RS),
        rejection_threshold=values.get(RS_THRESHOLD),
    )


@refuses(
    ROLLOUT_IS,
    when=(
        "any value, with a method of the plugin in bypass mode or one whose ratio is taken against the sampler: it "
        "would correct twice"
    ),
)
def refuse_counting_weights_twice(values: Values, node: "Settings | Observe") -> Iterator[Refusal]:
    """Yield a refusal if verl's weights would correct for the sampler, to which the method's ratio already refers."""
    if not node.trains or values[ROLLOUT_IS] is None or not (values[BYPASS] or node.method.ratio_to_sampler):
        return
    if values[BYPASS]:
        because = f"{BYPASS}=True"
        other = f"{BYPASS}=False"
    elif "behaviour" in node.method.parameters:
        because = f"{NODE}.behaviour=rollout"
        other = f"{NODE}.behaviour=old"
    else:
        because = name_loss(node)
        other = "choose another method"
    reason = (
        f"with {because} the ratio of {name_loss(node)} is already relative to the policy that sampled, and the "
        "weights would correct for that policy a second time"
    )
    yield Refusal(ROLLOUT_IS, values[ROLLOUT_IS], reason, f"Set {ROLLOUT_IS}=null, or {other}.")


@refuses(
    BYPASS,
    when="True together with a mask that compares the old policy with the sampler: in bypass mode they are the same",
)
def refuse_mask_without_effect(values: Values, node: "Settings | Observe") -> Iterator[Refusal]:
    """Yield a refusal if bypass mode makes two policies the same that the mask compares."""
    mask = node.mask if node.trains else None
    if values[BYPASS] and mask is not None and mask.of_old_policy:
        reason = (
            f"the old log-probabilities are then the sampler's own, so that {NODE}.mask.rule={mask.rule}, which "
            "compares the two, would never take anything out"
        )
        yield Refusal(BYPASS, True, reason, f"Set {BYPASS}=False, or leave out +{NODE}/mask={mask.rule}.")


@refuses(
    IS_THRESHOLD,
    when="a value of this key or of rollout_is with which verl's own code would stop at the first batch",
)
def refuse_weights_with_verl(values: Values, node: "Settings | Observe") -> Iterator[Refusal]:
    """Yield a refusal if verl's own code refuses the kind of weights or their threshold."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    yield from refuse_with_verl(compute_rollout_correction_weights, values, ROLLOUT_IS, IS_THRESHOLD)


@refuses(ROLLOUT_RS, when="a value of this or of its threshold that verl's own code refuses")
def refuse_rejection_with_verl(values: Values, node: "Settings | Observe") -> Iterator[Refusal]:
    """Yield a refusal if verl's own code refuses the kind of rejection or its threshold."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    yield from refuse_with_verl(compute_rollout_rejection_mask, values, ROLLOUT_RS, RS_THRESHOLD)


def refuse_with_verl(correct: Callable, values: Values, key: str, threshold: str) -> Iterator[Refusal]:
    """Yield a refusal if verl's own function of a correction raises an error.

    The function is called with two made-up sequences. In a run it would raise the error at the first batch.

    Args:
        correct: verl's function.
        values: the values of verl's keys, from `read`.
        key: the key that switches the correction on.
        threshold: the key with the correction's threshold.
    """
    import torch

    if values[key] is None:
        return
    arguments = {name.rpartition(".")[2]: values[name] for name in (key, threshold)}
    try:
        correct(torch.zeros(2, 2), torch.ones(2, 2), **arguments)
    except (ValueError, TypeError) as error:
        reason = f"with {threshold}={format_exactly(values[threshold])} verl's rollout correction refuses it: {error}"
        yield Refusal(key, values[key], reason.rstrip("."), f"Change it, or set {key}=null.")


@refuses(
    LOSS_TYPE,
    when="a value other than ppo_clip and null, with a method of the plugin: only verl's own bypass loss reads it",
)
def refuse_other_bypass_loss(values: Values, node: "Settings | Observe") -> Iterator[Refusal]:
    """Yield a refusal if a loss is chosen for bypass mode, where a method of the plugin takes its place."""
    loss_type = values[LOSS_TYPE]
    if node.trains and loss_type not in (None, "ppo_clip"):
        reason = f"only verl's own bypass loss reads it, and {name_loss(node)} would ignore it"
        advice = f"Set {LOSS_TYPE}=ppo_clip, or leave out +{NODE} to train verl's own loss."
        yield Refusal(LOSS_TYPE, loss_type, reason, advice)


@refuses(
    CENTERING,
    when=(
        "True: with a method, verl would train a loss of its own in its place; under observe, that loss also acts on "
        "logits, which the plugin does not see"
    ),
)
def refuse_other_loss_for_centering(values: Values, node: "Settings | Observe") -> Iterator[Refusal]:
    """Yield a refusal of score centering.

    verl would train its own loss in place of a method, and +clipx=observe would see only a part of that loss.
    """
    if not values[CENTERING]:
        return
    if node.trains:
        reason = f"verl then trains its own loss instead of {name_loss(node)}"
    else:
        # The sampled token is nearly always among them, so its gradient does not come from its log-probability alone.
        reason = (
            "verl's loss then also acts on the logits of the most probable tokens, of which "
            f"{name_loss(node)} sees none, so that it would show only a part of what happens to a token"
        )
    yield Refusal(CENTERING, True, reason, f"Set {CENTERING}=False, or leave out +{NODE} to train verl's own loss.")


declare_all(READ_BY_VERL, SAMPLES, "algorithm", "gamma", "norm_adv_by_std_in_grpo", "kl_ctrl")
declare_all(READ_BY_VERL, SAMPLES, "algorithm", "gdpo_reward_keys", "gdpo_reward_weights")

# --- Distillation ----------------------------------------------------------------------------------------------------

OF_DISTILLATION = "distillation.distillation_loss"
TASK_REWARDS = declare(f"{OF_DISTILLATION}.use_task_rewards", REFUSED, "verl's distillation", True)
DISTILLATION = declare("distillation.enabled", READ_BY_VERL, BESIDE, None)
DISTILLATION_LOSS = declare(f"{OF_DISTILLATION}.loss_mode", READ_BY_VERL, BESIDE, None)
DISTILLATION_COEFFICIENT = declare(f"{OF_DISTILLATION}.distillation_loss_coef", READ_BY_VERL, BESIDE, None)
declare_all(
    READ_BY_VERL,
    BESIDE,
    OF_DISTILLATION,
    "topk",
    "loss_max_clamp",
    "log_prob_min_clamp",
    "use_policy_gradient",
    "policy_loss_mode",
    "clip_ratio",
    "clip_ratio_low",
    "clip_ratio_high",
    "use_chunked_topk",
    "chunked_topk_chunk_size",
)


@refuses(TASK_REWARDS, when="False under distillation: verl would train no policy loss")
def refuse_no_task_rewards(values: Values, node: "Settings | Observe") -> Iterator[Refusal]:
    """Yield a refusal if verl would train its distillation loss alone."""
    if values[DISTILLATION] and not values[TASK_REWARDS]:
        effect = "would train nothing" if node.trains else "would describe a loss that is not trained"
        reason = f"with {DISTILLATION}=True verl trains only its distillation loss, so that {name_loss(node)} {effect}"
        advice = f"Set {TASK_REWARDS}=True, which adds the distillation loss to the policy loss, or leave out +{NODE}."
        yield Refusal(TASK_REWARDS, values[TASK_REWARDS], reason, advice)


CRITIC = declare("critic", READ_BY_VERL, "the critic's own loss")
declare_all(READ_BY_VERL, "the critic's own loss", CRITIC, "loss_agg_mode", "loss_scale_factor")

# --- The trainer: keys beside the path to the loss from here on ------------------------------------------------------


def declare_beside(key: str, reader: str, default: Any = None) -> str:
    """Give a key that verl reads, though not on the way to the loss, its row, and return the key.

    Args:
        key: the full key.
        reader: as in `KeyRow`.
        default: as in `KeyRow`. The plugin reads the key with every configuration unless this is `NOT_READ`.
    """
    return declare(key, READ_BY_VERL, reader, default, on_path=False)


EPOCHS = declare_beside(f"{ACTOR}.ppo_epochs", UPDATES, 1)


@refuses(EPOCHS, when="a value other than null and whole numbers of at least 1: no update would be made")
def refuse_no_update(values: Values, node: "Settings | Observe") -> Iterator[Refusal]:
    """Yield a refusal if the number of epochs over a rollout batch is no whole number of at least 1."""
    epochs = values[EPOCHS]
    if epochs is not None and (not isinstance(epochs, int) or epochs < 1):
        yield Refusal(EPOCHS, epochs, "no update would be made", "Set it to a whole number of at least 1.")


MINI_BATCH = declare_beside(f"{ACTOR}.ppo_mini_batch_size", UPDATES)
RESPONSES = declare_beside(f"{ROLLOUT}.n", TRAINER)
ROLLOUT_PROMPTS = declare_beside("data.train_batch_size", UPDATES)
USE_V1 = declare_beside("trainer.use_v1", TRAINER)
WARMUP = declare_beside("trainer.critic_warmup", TRAINER)
# Keys of verl's experimental trainers, which do not read trainer.v1.
STEPS_A_VERSION = declare_beside("async_training.trigger_parameter_sync_step", UPDATES)
ROLLOUT_NODES = declare_beside("rollout.nnodes", TRAINER)
MINI_BATCHES_AT_ONCE = declare_beside("async_training.require_batches", UPDATES)
TRAINER_MODE = declare_beside("trainer.v1.trainer_mode", TRAINER)
# Keys of verl after 0.9: the configuration group that chooses a backend, and the key that this group sets.
REMOTE_GROUP = declare_beside("remote_backend", TRAINER)
REMOTE_BACKEND = declare_beside("trainer.remote_backend", TRAINER)
RUNTIME = declare_beside("runtime.backend", TRAINER)


@refuses(
    TRAINER_MODE,
    when="remote_backend, even if its own keys select it: the loss would run where the plugin has no worker",
)
def refuse_loss_elsewhere(values: Values, node: "Settings | Observe") -> Iterator[Refusal]:
    """Yield a refusal if the loss would run in a remote backend, where the plugin has no worker."""
    if values[TRAINER_MODE] == "remote_backend":
        key = TRAINER_MODE
    elif values[REMOTE_BACKEND] is not None:
        key = REMOTE_BACKEND
    elif values[REMOTE_GROUP] is not None:
        key = REMOTE_GROUP
    else:
        return
    reason = f"the loss then runs in that backend and not in verl's workers, where {name_loss(node)} acts"
    yield Refusal(key, values[key], reason, f"Train with verl's own workers, or leave out +{NODE}.")


@refuses(RUNTIME, when="a value other than null and ray, on which the plugin's hooks rely")
def refuse_other_runtime(values: Values, node: "Settings | Observe") -> Iterator[Refusal]:
    """Yield a refusal if verl would run on another runtime than Ray."""
    if values[RUNTIME] not in (None, "ray"):
        reason = f"the hooks through which {name_loss(node)} acts are in verl's start of Ray and in its Ray workers"
        yield Refusal(RUNTIME, values[RUNTIME], reason, f"Set {RUNTIME}=ray, or leave out +{NODE}.")


# This key stands in the node of the mode that trainer.v1.trainer_mode names. `read` adds its value.
SYNC_STEP = "trainer.v1.*.parameter_sync_step"


# --- The engine ------------------------------------------------------------------------------------------------------

# Either of these keys can switch torch.compile off.
TORCH_COMPILE = tuple(
    declare_beside(f"{ACTOR}.{name}", "clipx.compile=auto too, which then compiles nothing")
    for name in ("use_torch_compile", "fsdp_config.use_torch_compile")
)
MODEL_PATH = declare_beside("actor_rollout_ref.model.path", ENGINE)
FUSED_KERNELS = declare_beside("actor_rollout_ref.model.use_fused_kernels", ENGINE)


@refuses(
    FUSED_KERNELS,
    when=(
        "True under FSDP2 with untied embeddings, if the model's configuration is on this machine: torch would stop "
        "the run"
    ),
)
def refuse_sharded_head(values: Values, node: "Settings | Observe") -> Iterator[Refusal]:
    """Yield a refusal if FSDP2 would shard the output embedding with which verl's fused kernels multiply."""
    path = values[MODEL_PATH]
    config = read_model_config(path) if values[STRATEGY] == "fsdp2" and values[FUSED_KERNELS] else None
    if config is not None and not config.get_text_config().tie_word_embeddings:
        reason = (
            f"with {STRATEGY}=fsdp2 and {MODEL_PATH}={path}, whose output embedding is not its input embedding, FSDP2 "
            "shards it by itself, and verl 0.9.1's fused forward pass multiplies with a part of it"
        )
        yield Refusal(FUSED_KERNELS, True, reason, f"Set {FUSED_KERNELS}=False.")


def read_model_config(path: str | None) -> Any:
    """Return a model's configuration in transformers; None if it is not on this machine."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError):
        return None


QAT = declare_beside(f"{ACTOR}.qat.enable", ENGINE)
MTP = declare_beside("actor_rollout_ref.model.mtp.enable", ENGINE)
PREFIX_GROUPER = declare_beside(f"{ACTOR}.use_prefix_grouper", ENGINE)
ROUTER_REPLAY_OF_VEOMNI = declare_beside(f"{ACTOR}.veomni.router_replay.mode", ENGINE)
ROUTER_REPLAY_OF_MEGATRON = declare_beside(f"{ACTOR}.megatron.router_replay.mode", ENGINE)
# A key of verl 0.9.0 and of its main branch, in whose place 0.9.1 reads the two keys above. No engine reads it. If both
# the server and the actor have recorded routes, verl's trainers with a rollout apart drop the server's under R2, and
# the actor's otherwise.
declare_beside(f"{ACTOR}.router_replay.mode", "verl's trainers with a rollout apart", NOT_READ)
DEVICE = declare_beside("trainer.device", ENGINE)


@refuses(
    ROUTER_REPLAY_OF_VEOMNI,
    when="R2 with an extra pass, which would record new routes; under Megatron its own key, except in verl 0.9.1",
)
def refuse_recording_routes_anew(values: Values, node: "Settings | Observe") -> Iterator[Refusal]:
    """Yield a refusal if the extra pass of a method would record routes anew, and not replay those of the update."""
    from verl_clipx.common.verl_version import verl_version
    from verl_clipx.run.schedule import schedule_of

    # By verl's source, its engines record under R2 in every pass without gradient. Only Megatron's engine in verl 0.9.1
    # replays routes that the rows have.
    key_by_recording_engine = {"veomni": ROUTER_REPLAY_OF_VEOMNI}
    if verl_version() != "0.9.1":
        key_by_recording_engine["megatron"] = ROUTER_REPLAY_OF_MEGATRON
    key = key_by_recording_engine.get(values[STRATEGY])
    if key is None or values[key] != "R2":
        return
    passes = schedule_of(values, node).extra_passes
    if passes:
        reason = (
            f"{name_loss(node)} makes a pass over the mini-batch {passes}, in which verl would record new routes and "
            "not replay those of the update, so that the bounds would be those of another policy"
        )
        advice = (
            f"Set {key}=R3, which replays the server's routes, or leave out the pass, by {NODE}.scope or "
            f"{NODE}.select.over."
        )
        yield Refusal(key, "R2", reason, advice)


DYNAMIC_CONTEXT = declare_beside(f"{ACTOR}.megatron.dynamic_context_parallel", ENGINE)


@refuses(DYNAMIC_CONTEXT, when="True under Megatron: each rank would be its own data-parallel group")
def refuse_dynamic_context(values: Values, node: "Settings | Observe") -> Iterator[Refusal]:
    """Yield a refusal if statistics and metrics would be those of a single rank."""
    if values[STRATEGY] == "megatron" and values[DYNAMIC_CONTEXT]:
        reason = (
            "verl then gives each rank its own data-parallel group, so statistics and metrics would be those of one "
            "rank"
        )
        advice = f"Set {DYNAMIC_CONTEXT}=False; a fixed context_parallel_size is supported."
        yield Refusal(DYNAMIC_CONTEXT, True, reason, advice)


ATTENTION = declare_beside("actor_rollout_ref.model.override_config.attn_implementation", ENGINE)
SEQUENCE_PARALLEL = tuple(
    declare_beside(f"{model}.{name}", ENGINE)
    for model in (ACTOR, REFERENCE)
    for name in ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size")
)
WRONG_ATTENTION = (
    "each rank would attend to its own slice of a sequence and train on wrong log-probabilities, because verl patches "
    "only flash attention"
)


def has_sequence_parallel_attention(name: str | None) -> bool:
    """Return whether an attention looks at the whole sequence where each rank has a slice of it.

    Args:
        name: the attention's name in transformers; None means flash_attention_2.
    """
    # verl replaces the kernel call in flash attention (models/transformers/monkey_patch.py), VeOmni that in its own.
    return name is None or name.startswith(("flash_attention", "veomni_flash_attention"))


@refuses(
    f"{ACTOR}.ulysses_sequence_parallel_size",
    when="above 1, wherever it is set, with sdpa or eager attention: each rank would attend to its own slice",
)
def refuse_attention_on_slices(values: Values, node: "Settings | Observe") -> Iterator[Refusal]:
    """Yield a refusal if ranks share a sequence, and the attention does not look beyond a rank's own slice."""
    name = values[ATTENTION]
    key = next((key for key in SEQUENCE_PARALLEL if (values[key] or 1) > 1), None)
    if key is not None and not has_sequence_parallel_attention(name):
        advice = f"Set {ATTENTION}=flash_attention_2 (on a CPU there is none), or {key}=1."
        yield Refusal(key, values[key], f"with {ATTENTION}={name}: {WRONG_ATTENTION}", advice)


# --- The server that samples -----------------------------------------------------------------------------------------

ENGINE_NAME = declare_beside(f"{ROLLOUT}.name", SERVER)
TEMPERATURE = declare_beside(f"{ROLLOUT}.temperature", SERVER)
LOG_PROB_MODE = declare_beside(f"{ROLLOUT}.logprobs_mode", SERVER)
# A key of verl after 0.9, with which score centering asks the server for more log-probabilities.
declare_beside(f"{ROLLOUT}.topk_log_probs", SERVER, NOT_READ)
# verl's vLLM server gives this key precedence over its own arguments.
LOG_PROB_MODE_OF_VLLM = declare_beside(f"{ROLLOUT}.engine_kwargs.vllm.logprobs_mode", SERVER)
TOP_P = declare_beside(f"{ROLLOUT}.top_p", SERVER)
TOP_K = declare_beside(f"{ROLLOUT}.top_k", SERVER)
MIN_P = declare_beside(f"{ROLLOUT}.min_p", SERVER)
# The values at which these settings do not truncate sampling.
WHOLE = {"top_p": 1, "top_k": -1, "min_p": 0}
CALCULATE_LOG_PROBS = declare_beside(f"{ROLLOUT}.calculate_log_probs", SERVER)


def sampling_of(values: Values) -> Sampling:
    """Return how a configuration has the server sample."""
    return Sampling(
        temperature=values.get(TEMPERATURE),
        top_p=values.get(TOP_P),
        top_k=values.get(TOP_K),
        min_p=values.get(MIN_P),
        returns_log_probs=values.get(CALCULATE_LOG_PROBS),
        log_probs=values.get(LOG_PROB_MODE),
        log_probs_of_vllm=values.get(LOG_PROB_MODE_OF_VLLM),
    )


class Mismatch(NamedTuple):
    """Why the rollout's log-probabilities are not the trainer's, although the weights are the same.

    Attributes:
        settings: the keys that make the difference, with their values; the key to change is the first.
        effect: what these settings do to the log-probabilities, as a clause that follows a colon.
        remedy: what to set, as a sentence without its full stop.
    """

    settings: dict[str, Any]
    effect: str
    remedy: str

    def __str__(self) -> str:
        """Return the settings as key=value, separated by commas."""
        return ", ".join(f"{key}={value}" for key, value in self.settings.items())


def find_log_prob_mismatch(sampling: Sampling, engine: str | None) -> Mismatch | None:
    """Return why the rollout's log-probabilities are of another distribution than the trainer's; None if they are not.

    There are four reasons:

    - The server is not vLLM or that of +hardware=cpu, and sampling is truncated: the result depends on its version.
    - The server returns processed log-probabilities, and sampling is truncated.
    - The server returns logits.
    - The server returns raw log-probabilities, and the temperature is not 1.

    The trainer divides the logits by the temperature and takes the softmax over the whole vocabulary. vLLM and the
    server of +hardware=cpu return what logprobs_mode says. verl does not pass this key to other servers.

    Args:
        sampling: how the run's server samples.
        engine: verl's name for this server.
    """
    temperature = sampling.temperature
    truncating = {f"{ROLLOUT}.{name}": value for name, value in sampling.truncates.items()}
    without_truncation = ", ".join(f"{ROLLOUT}.{name}={WHOLE[name]}" for name in sampling.truncates)
    difference = "over the tokens that truncation keeps, and the trainer's are over the whole vocabulary"
    if engine not in ("vllm", "cpu"):
        if not truncating:
            return None
        return Mismatch(
            settings=truncating,
            effect=(
                f"depending on the version of {engine or 'the rollout server'}, its log-probabilities are "
                f"{difference}: every ratio is then off by the probability that is kept"
            ),
            remedy=f"Set {without_truncation}",
        )
    key = LOG_PROB_MODE
    mode = sampling.log_probs
    if engine == "vllm" and sampling.log_probs_of_vllm:
        key = LOG_PROB_MODE_OF_VLLM
        mode = sampling.log_probs_of_vllm
    if mode == "processed_logprobs":
        if not truncating:
            return None
        remedy = f"Set {without_truncation}"
        if temperature == 1:
            remedy += f", or {key}=raw_logprobs"
        return Mismatch(
            settings={**truncating, key: mode},
            effect=(
                f"{engine}'s log-probabilities are {difference}, so that every ratio is off by the probability that is "
                "kept"
            ),
            remedy=remedy,
        )
    # null means vLLM's own default, raw_logprobs.
    if mode not in (None, "raw_logprobs"):
        return Mismatch(
            settings={key: mode},
            effect=f"{engine} returns logits in place of log-probabilities",
            remedy=f"Set {key}=processed_logprobs",
        )
    if temperature == 1:
        return None
    remedy = f"Set {key}=processed_logprobs"
    if truncating:
        remedy += f" and {without_truncation}"
    return Mismatch(
        settings={key: mode, TEMPERATURE: temperature},
        effect=f"{engine}'s log-probabilities are at temperature 1, the trainer's at {temperature}",
        remedy=remedy,
    )


@refuses(
    TOP_P,
    when=(
        "top_p, top_k, min_p, temperature or logprobs_mode, with a method of the plugin, if they make the ratio to the "
        "sampler in the loss wrong"
    ),
)
def refuse_wrong_ratio(values: Values, node: "Settings | Observe") -> Iterator[Refusal]:
    """Yield a refusal if the loss has a ratio to the sampler whose log-probabilities are of another distribution."""
    if not node.trains:
        return
    mismatch = find_log_prob_mismatch(sampling_of(values), values[ENGINE_NAME])
    ratio_setting = find_ratio_to_sampler(correction_of(values), node)
    if mismatch is None or ratio_setting is None:
        return
    key = next(iter(mismatch.settings))
    other_settings = [f"{name}={format_exactly(value)}" for name, value in mismatch.settings.items() if name != key]
    yield Refusal(
        key=key,
        value=mismatch.settings[key],
        reason=f"with {', '.join([ratio_setting, *other_settings])}: {mismatch.effect}",
        advice=f"{mismatch.remedy}.",
    )


class Need(NamedTuple):
    """A setting with which a run needs the rollout's log-probabilities.

    Attributes:
        setting: the setting, as key=value.
        remedy: what to do so that the run does not need them for this setting, as a clause such as "set KEY=null".
    """

    setting: str
    remedy: str


@refuses(
    CALCULATE_LOG_PROBS,
    when=(
        "a value other than True, if the method, its mask or its pull needs the rollout's log-probabilities; False, if "
        "bypass mode or a correction needs them"
    ),
)
def refuse_no_log_probs(values: Values, node: "Settings | Observe") -> Iterator[Refusal]:
    """Yield a refusal if a run needs the rollout's log-probabilities, and the server does not return them."""
    returns_log_probs = values[CALCULATE_LOG_PROBS]
    if returns_log_probs:
        return
    needs = []
    if node.trains:
        needs += find_needs_of_loss(node)
    # None: the key is missing or null. What verl does then with a correction of its own is verl's business, unless a
    # need of the loss stops the run anyway.
    if needs or returns_log_probs is not None:
        needs += find_needs_of_correction(correction_of(values))
    if needs:
        verb = "needs" if len(needs) == 1 else "need"
        yield Refusal(
            key=CALCULATE_LOG_PROBS,
            value=returns_log_probs,
            reason=f"{', '.join(need.setting for need in needs)} {verb} the rollout's log-probabilities",
            advice=f"Set it to True, or {' and '.join(need.remedy for need in needs)}.",
        )


def find_needs_of_correction(correction: Correction) -> list[Need]:
    """Return the settings of verl's rollout correction that need the rollout's log-probabilities."""
    needs = []
    if correction.bypass:
        needs.append(Need(f"{BYPASS}={correction.bypass}", f"set {BYPASS}=False"))
    if correction.weights:
        needs.append(Need(f"{ROLLOUT_IS}={correction.weights}", f"set {ROLLOUT_IS}=null"))
    if correction.rejection:
        needs.append(Need(f"{ROLLOUT_RS}={correction.rejection}", f"set {ROLLOUT_RS}=null"))
    return needs


def find_needs_of_loss(node: "Settings") -> list[Need]:
    """Return the settings of the method, its mask and its pull that need the rollout's log-probabilities."""
    needs = find_comparisons_with_sampler(node)
    if node.pull is not None and node.pull.anchor == "rollout":
        key = f"{node.pull.node_key}.anchor"
        needs.append(Need(f"{key}=rollout", f"set {key}=old"))
    return needs


def find_comparisons_with_sampler(node: "Settings") -> list[Need]:
    """Return the settings by which the method or its mask looks at the ratio to the rollout policy.

    A pull does not count: it adds a term, and corrects no token's weight.
    """
    comparisons = []
    method = node.method
    # With a pull, `asks_for` names what the pull reads too.
    asked_by_method = method.asks_for if node.pull is None else method.asks_for_itself
    if "rollout_log_prob" in asked_by_method:
        comparisons.append(find_need_of_method(method))
    if node.mask is not None:
        rule = node.mask.rule
        comparisons.append(Need(f"{NODE}.mask.rule={rule}", f"leave out +{NODE}/mask={rule}"))
    return comparisons


def find_need_of_method(method: "Method") -> Need:
    """Return the parameter by which a method needs the rollout's log-probabilities, or else the method itself.

    Args:
        method: a method that asks for these log-probabilities.
    """
    fields = {field.name: field for field in dataclasses.fields(method)}
    for name, value in method.parameters.items():
        if value == "rollout":
            key = f"{NODE}.{name}"
            other_values = [choice for choice in fields[name].metadata["allowed"].choices if choice != value]
            remedy = f"set {key}={other_values[0]}" if other_values else f"change {key}"
            return Need(f"{key}={value}", remedy)
    return Need(f"{NODE}.method={method.name}", "choose another method")


def corrects_for_sampler(correction: Correction, node: "Settings | Observe") -> bool:
    """Return whether the gradient takes into account that other weights, or another engine, sampled the tokens.

    Bypass mode, verl's rollout correction, the method and a mask can do so.
    """
    if correction.bypass or correction.weights or correction.rejection:
        return True
    return node.trains and bool(find_comparisons_with_sampler(node))


def find_ratio_to_sampler(correction: Correction, node: "Settings | Observe") -> str | None:
    """Return the first setting, as key=value, that puts a ratio to the rollout policy into the objective, or None."""
    needs = find_needs_of_correction(correction)
    if node.trains:
        needs = [*find_needs_of_loss(node), *needs]
    return needs[0].setting if needs else None


ESTIMATOR = declare_beside("algorithm.adv_estimator", SAMPLES)
GROUP_FILTERING = declare_beside("algorithm.filter_groups.enable", SAMPLES)

# --- Other keys that a run's record and its readers look at: they have no row ----------------------------------------

ENTROPY_COEFFICIENT = f"{ACTOR}.entropy_coeff"
KL_LOSS = f"{ACTOR}.use_kl_loss"
KL_LOSS_COEFFICIENT = f"{ACTOR}.kl_loss_coef"
KL_LOSS_TYPE = f"{ACTOR}.kl_loss_type"
KL_IN_REWARD = "algorithm.use_kl_in_reward"
KL_REWARD_COEFFICIENT = "algorithm.kl_ctrl.kl_coef"
OPTIMIZER = f"{ACTOR}.optim"
LEARNING_RATE = f"{OPTIMIZER}.lr"
RATE_SCHEDULE = f"{OPTIMIZER}.lr_scheduler_type"
RATE_WARMUP = f"{OPTIMIZER}.lr_warmup_steps"
RATE_WARMUP_RATIO = f"{OPTIMIZER}.lr_warmup_steps_ratio"
WEIGHT_DECAY = f"{OPTIMIZER}.weight_decay"
CLIP_GRADIENT = f"{OPTIMIZER}.clip_grad"
TOTAL_STEPS = "trainer.total_training_steps"
TOTAL_EPOCHS = "trainer.total_epochs"
SAVE_EVERY = "trainer.save_freq"
VALIDATE_EVERY = "trainer.test_freq"
VALIDATES_FIRST = "trainer.val_before_train"
OLDEST_ALLOWED = "trainer.v1.sampler.max_off_policy_threshold"
# Whether verl drops samples that are older than that, or waits: drop or wait.
TOO_OLD = "trainer.v1.sampler.max_off_policy_strategy"
VALIDATION_FOLDER = "trainer.validation_data_dir"
# The node of verl's fully asynchronous trainer. Only this trainer has keys below it.
ASYNC_TRAINING = "async_training"
DATA_SEED = "data.seed"
LOADER_SEED = f"{ACTOR}.data_loader_seed"
CHAT_TEMPLATE = f"{MODEL}.custom_chat_template"
TOKENIZER_PATH = f"{MODEL}.tokenizer_path"
LORA_RANK_BEFORE = f"{MODEL}.lora_rank"
LORA_RANK = f"{MODEL}.lora.rank"
LORA_MERGE = f"{MODEL}.lora.merge"
ATTENTION_DROPOUT = f"{MODEL}.override_config.attention_dropout"
VALIDATION_SAMPLES = f"{ROLLOUT}.val_kwargs.n"
ROLLOUT_SEED = f"{ROLLOUT}.seed"
LONGEST_PROMPT = "data.max_prompt_length"
LONGEST_RESPONSE = "data.max_response_length"
CHECKPOINTS_GRADIENTS = "actor_rollout_ref.model.enable_gradient_checkpointing"
RESPONSE_LENGTH = f"{ROLLOUT}.response_length"
CONTEXT = f"{ROLLOUT}.max_model_len"
AGENT_LOOP = f"{ROLLOUT}.agent.default_agent_loop"
ROLLOUT_PRECISION = f"{ROLLOUT}.dtype"
# The keys with the precision of a training, by engine. If FSDP's key is not set, FSDP computes in bfloat16.
MIXED_PRECISION = f"{ACTOR}.fsdp_config.mixed_precision.param_dtype"
TRAINING_PRECISION = {
    "fsdp": MIXED_PRECISION,
    "fsdp2": MIXED_PRECISION,
    **{engine: f"{ACTOR}.{engine}.dtype" for engine in ("megatron", "veomni", "torchtitan")},
}
TENSOR_PARALLEL = f"{ROLLOUT}.tensor_model_parallel_size"
MEGATRON_TENSOR_PARALLEL = f"{ACTOR}.megatron.tensor_model_parallel_size"
MEGATRON_PIPELINE_PARALLEL = f"{ACTOR}.megatron.pipeline_model_parallel_size"
MEGATRON_CONTEXT_PARALLEL = f"{ACTOR}.megatron.context_parallel_size"
NODES = "trainer.nnodes"
FSDP_SIZE = f"{ACTOR}.fsdp_config.fsdp_size"
DEVICES_A_NODE = "trainer.n_gpus_per_node"
CRITIC_MODEL = f"{CRITIC}.model"
CRITIC_MODEL_PATH = f"{CRITIC_MODEL}.path"
ROLLOUT_FOLDER = "trainer.rollout_data_dir"
CHECKPOINT_FOLDER = "trainer.default_local_dir"
CHECKPOINT_FOLDER_ON_HDFS = "trainer.default_hdfs_dir"
# How many checkpoints are kept, whether a checkpoint is removed once it is loaded, and how long before the end of its
# node's time one is saved.
CHECKPOINTS_KEPT = "trainer.max_*_ckpt_to_keep"
DELETES_LOADED_CHECKPOINT = "trainer.del_local_ckpt_after_load"
SAVES_BEFORE_EXPIRY = "trainer.esi_redundant_time"
LOGGERS = "trainer.logger"
LOGGED_VALIDATION_SAMPLES = "trainer.log_val_generations"
RESUME_MODE = "trainer.resume_mode"
RESUME_PATH = "trainer.resume_from_path"
# The value of `RESUME_MODE` with which verl goes on from the checkpoint at `RESUME_PATH`.
NAMED_CHECKPOINT = "resume_path"
LOADED_CONTENTS = f"{ACTOR}.checkpoint.load_contents"
PROJECT_NAME = "trainer.project_name"
EXPERIMENT_NAME = "trainer.experiment_name"
TRAINING_FILES = "data.train_files"
# The number of prompts that verl fetches at once.
FETCHED_PROMPTS = "data.gen_batch_size"
TRAINING_ROWS = "data.train_max_samples"
VALIDATION_FILES = "data.val_files"
# The nodes of the reward function and of the reward model. verl reads the first; its older versions had the second.
REWARD_FUNCTIONS = ("reward.custom_reward_function", "custom_reward_function")
REWARD_MODELS = ("reward.reward_model", "reward_model")
# The keys whose value is a path or an address, or a list of them.
PATHS = (
    MODEL_PATH,
    TOKENIZER_PATH,
    CRITIC_MODEL_PATH,
    TRAINING_FILES,
    VALIDATION_FILES,
    RESUME_PATH,
    *(f"{node}.path" for node in REWARD_FUNCTIONS),
)

# The endings of all other keys that name a file or a model: code, tools, agent loops, quantisation, a teacher.
ENDINGS_OF_FILE_KEYS = (".path", "_path", "_file")
# Parts of keys that have such an ending, but name no file that a training reads.
PARTS_OF_OTHER_KEYS = ("profiler.", "ray_kwargs.", f"{FACTS}.")


def further_files(values: Values) -> dict[str, str]:
    """Return the files and models that a configuration names at other keys than those of `PATHS`.

    Args:
        values: the configuration's leaves by dotted key.

    Returns:
        The paths by dotted key.
    """
    paths: dict[str, str] = {}
    for key, value in values.items():
        is_left_out = key in PATHS or any(part in key for part in PARTS_OF_OTHER_KEYS)
        if key.endswith(ENDINGS_OF_FILE_KEYS) and not is_left_out and isinstance(value, str) and value:
            paths[key] = value
    return paths


# --- What a record keeps as it is -----------------------------------------------------------------------------------

DTYPES = ("bfloat16", "float16", "float32", "float64", "bf16", "fp16", "fp32", "fp64", "16", "32", "64", "auto")
# By key, or by a pattern of keys, the texts that it takes besides verl's default, where verl has neither a registry nor
# an enumeration of them. scripts/declared_keys.py adds them to the texts that it finds in verl.
CHOICES: dict[str, tuple[str, ...]] = {
    LOSS_AGG_MODE: ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    KL_LOSS_TYPE: ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full", "kl+", "k1+", "abs+", "k3+"),
    "*.kl_penalty": ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full"),
    "*.kl_ctrl.type": ("fixed", "adaptive"),
    ROLLOUT_IS: ("token", "sequence"),
    LOSS_TYPE: ("ppo_clip", "reinforce"),
    "model_engine": ("dp", "megatron", "veomni", "torchtitan"),
    "*.strategy": ("fsdp", "fsdp2", "megatron", "veomni", "torchtitan"),
    "*dtype": DTYPES,
    "*.mixed_precision.*": DTYPES,
    "*.lr_scheduler_type": ("constant", "cosine", "linear", "inverse-square-root"),
    "*.optim.optimizer": ("AdamW", "adamw", "adam", "sgd", "muon"),
    "*_contents": ("model", "optimizer", "extra", "hf_model"),
    ATTENTION: ("flash_attention_2", "flash_attention_3", "sdpa", "eager", "flex_attention"),
    "*.rollout.name": ("vllm", "sglang", "trtllm", "hf", "cpu"),
    "*.inference.name": ("vllm", "sglang", "trtllm", "hf", "cpu"),
    LOG_PROB_MODE: ("processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits"),
    LOG_PROB_MODE_OF_VLLM: ("processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits"),
    "*.load_format": ("dummy", "auto", "safetensors"),
    "*.rollout.mode": ("async", "sync"),
    AGENT_LOOP: ("single_turn_agent", "tool_agent", "clipx_seeded_single_turn"),
    "*.router_replay.mode": ("disabled", "R2", "R3"),
    "*.checkpoint_engine.backend": ("naive", "nccl", "hccl", "nixl"),
    "*.recompute_granularity": ("selective", "full"),
    "*.recompute_method": ("uniform", "block"),
    TRAINER_MODE: ("sync", "colocate_async", "separate_async", "remote_backend"),
    TOO_OLD: ("drop", "wait"),
    RESUME_MODE: ("auto", "disable", NAMED_CHECKPOINT),
    DEVICE: ("cuda", "cpu", "npu"),
    RUNTIME: ("ray",),
    "*.truncation": ("left", "right", "middle", "error"),
    "*.filter_groups.metric": ("acc", "score", "seq_reward", "seq_final_reward"),
    "*.reward_manager.name": ("naive", "batch", "dapo", "prime", "limited", "remote", "gdpo"),
    "*.reward_manager": ("naive", "batch", "dapo", "prime"),
}
# Keys whose value names code. verl or the plugin looks it up when a run starts, so that the value cannot be a secret.
NAMES = (LOSS_MODE, ESTIMATOR, f"{NODE}.method", f"{NODE}.function")
# Keys whose value may be a text made of numbers, such as 0.5_2.0.
RANGES = (IS_THRESHOLD, RS_THRESHOLD)
# The node with Ray's settings, whose environment variables may have any value.
RAY = "ray_kwargs"
RAY_ADDRESS = f"{RAY}.ray_init.address"
PLATFORM_OF_WORKERS = f"{RAY}.ray_init.runtime_env.env_vars.VERL_PLATFORM"

# --- What cannot change results ---------------------------------------------------------------------------------------

# Keys in which two runs of the same setting may differ; `.*` covers everything below a key. The keys of the groups in
# configs/hardware are ignored too.
LEFT_OUT = (
    # locations of files
    "data.train_files",
    "data.val_files",
    "*.model.path",
    "*.model.hf_config_path",
    "*.model.tokenizer_path",
    "*.model.use_shm",
    "trainer.default_local_dir",
    "trainer.default_hdfs_dir",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "skip.*",
    # logs, names, intermediate checkpoints
    "trainer.logger",
    "*.project_name",
    "*.experiment_name",
    "trainer.log_val_generations",
    "trainer.val_before_train",
    "trainer.resume_*",
    "trainer.max_*_ckpt_to_keep",
    "trainer.del_local_ckpt_after_load",
    "trainer.esi_redundant_time",
    "*.checkpoint.*",
    "*.profiler.*",
    "*.prometheus.*",
    "global_profiler.*",
    # the machine
    "trainer.device",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.ray_wait_register_center_timeout",
    "ray_kwargs.*",
    "transfer_queue.*",
    "data.*num_workers",
    "data.filter_overlong_prompts_workers",
    "reward.num_workers",
    f"{MODEL_ROOT}.nccl_timeout",
    "*.rollout.agent.num_workers",
    "*micro_batch_size*",
    "*max_token_len_per_gpu",
    "*use_dynamic_bsz",
    "*.ulysses_sequence_parallel_size",
    "*.entropy_from_logits*",
    "*.fsdp_config.fsdp_size",
    "*.fsdp_config.param_offload",
    "*.fsdp_config.optimizer_offload",
    "*.fsdp_config.offload_policy",
    "*.fsdp_config.reshard_after_forward",
    "*.fsdp_config.forward_prefetch",
    "*.model.enable_gradient_checkpointing",
    "*.model.use_remove_padding",
    "*.rollout.tensor_model_parallel_size",
    "*.rollout.gpu_memory_utilization",
    "*.rollout.max_num_*",
    "*.rollout.enforce_eager",
    "*.rollout.free_cache_engine",
    # seeds, and what makes samples a function of them
    "*.seed",
    "*.data_loader_seed",
    "clipx_rollout.sampler.*",
    "clipx_rollout.cpu_dtype",
    # what is recorded about a run
    "clipx.trace*",
    "clipx.metrics",
    "clipx.receipt",
    "clipx.health",
    "clipx.log",
    "trainer.v1.sampler.custom_sampler.*",
    "trainer.v1.sampler.sampler_kwargs.*",
    # derived from other keys
    f"{FACTS}*",
    f"{POLICY_LOSS}.clipx*",
    "*_target_",
    # words of the announced line, and keys that are gone
    "clipx.paper_loss_agg_mode",
    "clipx.correction",
    "clipx.lagged_average",
)

# --- What becomes of a configuration's keys --------------------------------------------------------------------------

READ = tuple(row.key for row in ROWS.values() if row.default is not NOT_READ)


def row_of(key: str) -> KeyRow | None:
    """Return the row of a key: its own, or that of the smallest subtree around it; None if there is no such row."""
    holding = [row for row in ROWS.values() if f"{key}.".startswith(f"{row.key}.")]
    return max(holding, key=lambda row: len(row.key), default=None)


def read(config: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the keys of `READ`, and of `SYNC_STEP`, by full key.

    Args:
        config: verl's whole configuration, or its leaves by dotted key.
    """
    values = {row.key: _value(config, row.key, row.default) for row in ROWS.values() if row.default is not NOT_READ}
    mode = values[TRAINER_MODE] or "sync"
    return values | {SYNC_STEP: _value(config, f"trainer.v1.{mode}.parameter_sync_step", 1)}


def _value(config: DictConfig | Mapping[str, Any], key: str, default: Any) -> Any:
    if not OmegaConf.is_config(config):
        return config.get(key, default)
    # Under +hardware=cpu the device is an interpolation, which raises where verl would see no accelerator.
    value = OmegaConf.select(config, key, default=default, throw_on_resolution_failure=key != DEVICE)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def refuse_values(values: Values, node: "Settings | Observe") -> Iterator[Refusal]:
    """Yield the refusals of all rows.

    Args:
        values: the values of verl's keys, from `read`.
        node: the run's clipx node, built.
    """
    for row in ROWS.values():
        if row.refusal is not None:
            yield from row.refusal(values, node)


# verl passes a node with such a word in its name on to other code, which may give any key a meaning.
PASSED_ON = ("kwargs", "override")
# The names of the policy loss's keys below the actor, each with its full key. Of two keys of one name the first counts.
NAMES_ON_THE_PATH = {
    row.key.rpartition(".")[2]: row.key
    for row in reversed(ROWS.values())
    if row.on_path and row.reader in (LOSSES, AGGREGATION, BESIDE) and row.key.startswith(f"{ACTOR}.")
}


def refuse_misplaced_keys(config: DictConfig) -> Iterator[Refusal]:
    """Yield a refusal for each key that has the name of a key of the policy loss, and is where nothing reads it."""
    for key in entries_by_key(OmegaConf.to_container(config, resolve=False)):
        node, _, name = key.rpartition(".")
        if name not in NAMES_ON_THE_PATH or key in ROWS or key.startswith((f"{NODE}.", *OF_THE_PLUGIN)):
            continue
        if not any(part in node for part in PASSED_ON):
            value = OmegaConf.select(config, key, throw_on_resolution_failure=False)
            advice = f"Set {NAMES_ON_THE_PATH[name]}, which verl reads, or remove {key}."
            yield Refusal(key, value, "nothing reads it there", advice)


def entries_by_key(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return every leaf and every node of a nested configuration by its dotted key.

    Args:
        node: the configuration, or a node of it.
        prefix: the dotted key of the node, with a dot at its end; empty for the whole configuration.
    """
    entries = {}
    for name, value in node.items():
        key = f"{prefix}{name}"
        entries[key] = value
        if isinstance(value, dict):
            entries.update(entries_by_key(value, f"{key}."))
    return entries


class Leaves(Mapping[str, Any]):
    """The leaves of verl's configuration by dotted key, without those below the plugin's nodes in verl's policy loss.

    A value is resolved when it is read. It is None if there is no such key, if the value is missing (???), or if it
    cannot be resolved on this machine, such as the device of a run that is meant for another machine.
    """

    def __init__(self, config: DictConfig):
        self._config = config
        leaves = flat(OmegaConf.to_container(config, resolve=False))
        self._keys = [key for key in leaves if not key.startswith(OF_THE_PLUGIN)]

    def __getitem__(self, key: str) -> Any:
        value = OmegaConf.select(self._config, key, throw_on_resolution_failure=False)
        return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def flat(node: dict[str, Any]) -> dict[str, Any]:
    """Return the leaves of a nested configuration by dotted key; a list is a leaf."""
    return {key: value for key, value in entries_by_key(node).items() if not isinstance(value, dict)}


def nested(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration of dotted keys as nested nodes."""
    root: dict[str, Any] = {}
    for key, value in configuration.items():
        *node_names, name = key.split(".")
        node = root
        for node_name in node_names:
            node = node.setdefault(node_name, {})
        node[name] = value
    return root


def value_at(configuration: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key of a nested configuration; None if the key, or a node above it, is missing."""
    node: Any = configuration
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping | DictConfig) else None
    return node


def below(configuration: Mapping[str, Any], node: str) -> dict[str, Any]:
    """Return the leaves below a node of a configuration of dotted keys, by their keys relative to this node."""
    prefix = f"{node}."
    return {key.removeprefix(prefix): configuration[key] for key in configuration if key.startswith(prefix)}
