"""What becomes of each key of verl's configuration under a method of the plugin: one row per key or per subtree.

Every key that verl's losses, aggregation, distillation and rollout correction read has its own row
(scripts/verl_loss_keys.py finds these keys in verl's source). A node that contains such keys has no row as a whole.
Therefore a key that a new verl adds to it has no row, and a test names it. Under +clipx=observe, verl reads all keys as
always.
"""

from typing import NamedTuple

from verl_clipx.base.method import NODE
from verl_clipx.methods import BUILT_IN, METHODS
from verl_clipx.run.clip_keys import ACTOR, MAPPED, OF_OTHER_LOSSES, given, meanings
from verl_clipx.run.support import (
    BYPASS,
    DISTILLATION,
    DISTILLATION_COEFFICIENT,
    DISTILLATION_LOSS,
    LOSS_TYPE,
    ROLLOUT,
    ROLLOUT_IS,
    ROLLOUT_RS,
    TASK_REWARDS,
    WITH_ROLLOUT_IS,
    WITH_ROLLOUT_RS,
)

# What may become of a key, in the words of the page.
READ, TAKEN, REFUSED, IRRELEVANT = "read by verl as always", "taken over", "refused", "irrelevant"


class Row(NamedTuple):
    """What becomes of a key, and of all keys below it.

    Attributes:
        key: the full key.
        fate: READ, TAKEN, REFUSED or IRRELEVANT.
        remark: what the key becomes, when and why it is refused, or why it does not matter.
    """

    key: str
    fate: str
    remark: str


def taken_over_as(key: str) -> str:
    """The parameters that one of verl's clip keys becomes, and the methods that have them, in words.

    Args:
        key: one of `MAPPED`, or clip_ratio.
    """
    takers: dict[str, list[str]] = {}
    for name in BUILT_IN:
        for source, meaning in meanings(METHODS[name]()).items():
            if given(source, {key: 0.5}, ()) is not None:
                takers.setdefault(meaning.parameter, []).append(name)
    parameters = (f"`{NODE}.{parameter}` ({', '.join(names)})" for parameter, names in takers.items())
    return f"{'; '.join(parameters)}; under the other methods only verl's default is allowed"


OF_THE_SAMPLES = "changes the samples, in the same way for every loss"
MISPLACED_CORRECTION = "only verl's bypass loss reads it; set corrections under algorithm.rollout_correction"
BY_VERL = "a value that verl's own code would refuse with the first batch is refused at the start"
BESIDE = "belongs to the loss that is added to the method's"
OF_DISTILLATION = "distillation.distillation_loss"

# The keys that verl's losses read, and the keys beside them.
ON_THE_PATH = (
    *(Row(f"{ACTOR}.{key}", TAKEN, taken_over_as(key)) for key in ("clip_ratio", *MAPPED)),
    Row(
        f"{ACTOR}.policy_loss.loss_mode",
        REFUSED,
        "except for the group's own, which the group sets; +clipx=observe accepts any of verl's",
    ),
    *(
        Row(
            f"{ACTOR}.policy_loss.{key}",
            REFUSED,
            f"except for verl's default, because only verl's own loss {loss} reads it",
        )
        for key, (_, loss) in OF_OTHER_LOSSES.items()
    ),
    Row(f"{ACTOR}.policy_loss.rollout_correction", REFUSED, MISPLACED_CORRECTION),
    Row(
        f"{ACTOR}.loss_agg_mode",
        READ,
        "the line of the run names it; seq-mean-token-sum-norm is refused without loss_scale_factor",
    ),
    Row(f"{ACTOR}.loss_scale_factor", READ, "seq-mean-token-sum-norm requires it"),
    Row(f"{ACTOR}.entropy_coeff", READ, "ppo_loss adds the entropy bonus to the method's loss"),
    Row(f"{ACTOR}.use_kl_loss", READ, "ppo_loss adds the KL loss to the method's loss"),
    Row(f"{ACTOR}.kl_loss_coef", READ, "belongs to that KL loss"),
    Row(f"{ACTOR}.kl_loss_type", READ, "belongs to that KL loss"),
    Row(
        f"{ACTOR}.strategy", READ, "chooses the engine; where no test covers it, some of the receipt's checks only warn"
    ),
    Row(f"{ACTOR}.global_batch_info", IRRELEVANT, "verl's ppo_loss sets it for the aggregation"),
    Row(BYPASS, READ, "makes the ratio the one to the policy that sampled"),
    Row(
        ROLLOUT_IS,
        READ,
        "refused in bypass mode and with a ratio to the policy that sampled, because it would count twice",
    ),
    *(Row(key, READ, f"belongs to these weights; {BY_VERL}") for key in WITH_ROLLOUT_IS),
    Row(ROLLOUT_RS, READ, f"in bypass mode the plugin's losses reject as verl's bypass loss does; {BY_VERL}"),
    *(Row(key, READ, f"belongs to this rejection; {BY_VERL}") for key in WITH_ROLLOUT_RS),
    Row(LOSS_TYPE, REFUSED, "except for ppo_clip, because only verl's bypass loss reads it"),
    Row("algorithm.gamma", READ, OF_THE_SAMPLES),
    Row("algorithm.norm_adv_by_std_in_grpo", READ, OF_THE_SAMPLES),
    Row("algorithm.gdpo_reward_keys", READ, OF_THE_SAMPLES),
    Row("algorithm.gdpo_reward_weights", READ, OF_THE_SAMPLES),
    Row("algorithm.kl_ctrl", READ, "belongs to the KL penalty in the rewards and doesn't touch the loss"),
    Row(DISTILLATION, READ, "adds verl's distillation loss to the method's, and the line names it"),
    Row(TASK_REWARDS, REFUSED, "if it is False under distillation, because verl would then train no policy loss"),
    Row(DISTILLATION_LOSS, READ, BESIDE),
    Row(DISTILLATION_COEFFICIENT, READ, BESIDE),
    *(
        Row(f"{OF_DISTILLATION}.{key}", READ, BESIDE)
        for key in (
            *("topk", "loss_max_clamp", "log_prob_min_clamp", "use_policy_gradient", "policy_loss_mode"),
            *("clip_ratio", "clip_ratio_low", "clip_ratio_high", "use_chunked_topk", "chunked_topk_chunk_size"),
        )
    ),
    Row(f"{OF_DISTILLATION}.global_batch_info", IRRELEVANT, "verl's distillation loss sets it for the aggregation"),
    Row("critic", READ, "the critic has a value loss, model, engine and optimizer of its own"),
)

ENGINE = "of the engine that computes log-probabilities and gradients; docs/support.md says what was run"
SPLIT = "cuts the mini-batch into micro-batches; bounds and metrics don't depend on it"
NOT_TRAINED = "nothing of it reaches the loss"
SERVED = "of the server that samples; docs/support.md says which log-probabilities it may return"

# All other keys that verl's trainer composes, under any of its engines.
ELSEWHERE = (
    Row(f"{ACTOR}.ppo_epochs", READ, "the line names the number of updates"),
    Row(f"{ACTOR}.ppo_mini_batch_size", READ, "the tokens of one update, over which statistics are taken"),
    *(
        Row(f"{ACTOR}.{key}", READ, SPLIT)
        for key in (
            *("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
            "use_remove_padding",
        )
    ),
    *(Row(f"{ACTOR}.{key}", READ, "which samples make a mini-batch") for key in ("shuffle", "data_loader_seed")),
    Row(f"{ACTOR}.rollout_n", READ, "responses of a prompt"),
    Row(f"{ACTOR}.use_torch_compile", READ, f"where it is False, {NODE}.compile=auto compiles nothing either"),
    Row(f"{ACTOR}.grad_clip", READ, "of the whole gradient, after the loss"),
    *(
        Row(f"{ACTOR}.{key}", READ, ENGINE)
        for key in (
            *("fsdp_config", "megatron", "veomni", "torchtitan", "qat", "use_fused_kernels", "use_prefix_grouper"),
            *("ulysses_sequence_parallel_size", "pad_to_length", "freeze_vision_tower"),
            *("entropy_from_logits_with_chunking", "entropy_from_logits_chunk_size", "entropy_checkpointing"),
        )
    ),
    Row(f"{ACTOR}.calculate_entropy", READ, "logs the entropy"),
    Row(f"{ACTOR}.calculate_sum_pi_squared", READ, "for the advantages of optimal_token_baseline"),
    Row(f"{ACTOR}.optim", READ, "what is done with the gradient"),
    *(Row(f"{ACTOR}.{key}", IRRELEVANT, NOT_TRAINED) for key in ("checkpoint", "profiler")),
    *(Row(f"{ACTOR}.{key}", IRRELEVANT, "a name for Hydra") for key in ("_target_", "policy_loss._target_")),
    Row("actor_rollout_ref.ref", READ, "the reference policy, for KL terms"),
    Row("actor_rollout_ref.model", READ, ENGINE),
    Row(ROLLOUT, READ, SERVED),
    *(Row(f"actor_rollout_ref.{key}", IRRELEVANT, NOT_TRAINED) for key in ("hybrid_engine", "nccl_timeout")),
    *(
        Row(f"algorithm.{key}", READ, OF_THE_SAMPLES)
        for key in ("lam", "adv_estimator", "use_kl_in_reward", "kl_penalty", "filter_groups", "use_pf_ppo", "pf_ppo")
    ),
    Row("algorithm._target_", IRRELEVANT, "a name for Hydra"),
    *(
        Row(f"distillation.{key}", READ, "the teachers, and where they run")
        for key in ("n_gpus_per_node", "nnodes", "teacher_models", "teacher_key")
    ),
    *(Row(key, IRRELEVANT, "a name for Hydra") for key in ("distillation._target_", f"{OF_DISTILLATION}._target_")),
    Row("data", READ, "which prompts, and how many make a rollout batch"),
    *(
        Row(key, READ, "where rewards come from")
        for key in ("reward", "reward_model", "custom_reward_function", "sandbox_fusion")
    ),
    Row("trainer", READ, "which trainer, where old_log_probs come from, and for how long"),
    Row("model_engine", READ, ENGINE),
    *(Row(key, IRRELEVANT, NOT_TRAINED) for key in ("global_profiler", "ray_kwargs", "transfer_queue", "skip")),
)

ROWS = (*ON_THE_PATH, *ELSEWHERE)


def row_of(key: str) -> Row | None:
    """The row of a key: its own, or that of the smallest subtree around it. None if there is no such row."""
    holding = [row for row in ROWS if f"{key}.".startswith(f"{row.key}.")]
    return max(holding, key=lambda row: len(row.key), default=None)


def path_table() -> str:
    """The table in docs/support.md of the keys that verl's losses read, one row per key."""
    rows = ["| key | what becomes of it | |", "|---|---|---|"]
    rows += [f"| `{row.key.removeprefix(f'{ACTOR}.')}` | {row.fate} | {row.remark} |" for row in ON_THE_PATH]
    return "\n".join(rows)
