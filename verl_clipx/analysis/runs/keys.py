"""The metrics that a report reads, as verl logs them."""

import re
from collections.abc import Iterable

from verl_clipx.losses.base import shared_metrics as declared
from verl_clipx.losses.base.metric import Metric


def logged(metric: Metric) -> str:
    """Returns a metric's key in verl's log: verl puts `actor/` before what its workers log."""
    return metric.logged_as or f"actor/{metric.key}"


# Every trainer of verl's logs this key for each training step, and no worker does.
STEP = "training/global_step"
REWARD, LOWEST_REWARD, HIGHEST_REWARD = (f"critic/score/{what}" for what in ("mean", "min", "max"))
LOWEST_ADVANTAGE = "critic/advantages/min"
HIGHEST_ADVANTAGE = "critic/advantages/max"
# The standard error of that mean over prompts; not every run logs it.
REWARD_ERROR = logged(declared.STANDARD_ERROR)
# Stands for the scores in the files of validations; no metric of the log.
HELD_OUT = "held-out scores"
ENTROPY = "actor/entropy"
# In bypass mode verl has no entropy of the old policy, and logs that of the updates.
ENTROPY_OF_UPDATES = "actor/entropy_loss"
KL = logged(declared.PPO_KL)
GRADIENT_NORM = "actor/grad_norm"
LEARNING_RATE = "actor/lr"
LOSS = "actor/pg_loss"
# What verl's own losses say of clipping.
PG_CLIPPED = logged(declared.PG_CLIPFRAC)
LENGTH = "response_length/mean"
LONGEST = "response_length/max"
# The share of responses as long as the batch's longest.
AS_LONG_AS_LONGEST = "response_length/clip_ratio"
MISMATCH = "training/rollout_probs_diff_mean"
# Of the policy that sampled from the recomputed one, by an estimate that only rounding makes negative.
SAMPLER_KL = "rollout_corr/k3_kl"
SAMPLER_KL_1 = "rollout_corr/kl"
# Weight versions between the sampler's and the trainer's.
STALENESS = "training/off_policy/trajectory_staleness/mean"
# Prompts that verl dropped with all their responses, for being too old or because all score alike. It logs the number
# only in steps in which it is above 0.
EVICTED = "training/off_policy/evicted_samples"
FILTERED = "training/filter_groups/evicted_samples"
# verl's importance weights of the rollout correction: their mean over tokens, and Kish's effective sample size as a
# share.
WEIGHTS_MEAN = "rollout_corr/rollout_is_mean"
WEIGHTS_SAMPLE_SIZE = "rollout_corr/rollout_is_eff_sample_size"
ALIKE, CUT, UNDECIDED = map(logged, (declared.ALIKE_PROMPTS, declared.CUT_RESPONSES, declared.UNDECIDED))
# verl's validation in its log, a metric for each data set.
VALIDATIONS = "val-core/*/mean@*"
# Metrics that figures show in per cent.
SHARES = frozenset({ALIKE, CUT, PG_CLIPPED})
SKIPPED_UPDATES = logged(declared.SKIPPED_UPDATES)
NOT_FINITE_RANK = logged(declared.NOT_FINITE_RANK)
# What of a run is not finite, and what a page calls each number.
HEALTH_COUNTS = {
    logged(declared.NOT_FINITE["rewards"]): "rewards",
    logged(declared.NOT_FINITE["advantages"]): "advantages",
    logged(declared.NOT_FINITE["log_probs"]): "log-probabilities",
    logged(declared.NOT_FINITE_LOG_PROBS): "log-probabilities in skipped updates",
}
RATIO = logged(declared.RATIO_MEAN)
RECEIPT = logged(declared.RECEIPT)
RECEIPT_FAILED = logged(declared.RECEIPT_FAILED)
CLIPPED_LOW = logged(declared.CLIP_FRACTION_LOW)
CLIPPED_HIGH = logged(declared.CLIP_FRACTION_HIGH)
# What the first update of a rollout batch clips, at ratio 1 but for rounding, and what a second measurement of it does.
FLOOR_LOW = logged(declared.FLOOR.clip_fraction_low)
FLOOR_HIGH = logged(declared.FLOOR.clip_fraction_high)
FLOOR_TOKENS = f"{logged(declared.FLOOR.tokens)}/bin_*"
RECUT_LOW = logged(declared.FLOOR_RECUT.clip_fraction_low)
RECUT_HIGH = logged(declared.FLOOR_RECUT.clip_fraction_high)
# Of BAPO and ACPO, whose files need torch: a test holds these names.
BOUND_LOW = "actor/clipx/c_low"
BOUND_HIGH = "actor/clipx/c_high"
BOUND_LOW_LAST = "actor/clipx/c_low_last"
BOUND_HIGH_LAST = "actor/clipx/c_high_last"
SHARE_BEFORE = "actor/clipx/positive_share_before"
SHARE_AFTER = "actor/clipx/positive_share_after"
# ACPO's numbers of tokens, of every bin.
COUNTS = "actor/clipx/count/bin_*"
EPSILON_HIGHEST = "actor/clipx/epsilon_highest"
EPSILON_AVERAGE = "actor/clipx/epsilon_average"
HOLD_MISSED = logged(declared.HELD_MISSED)
MASS = {region: logged(metric) for region, metric in declared.GRADIENT_MASS.items()}

# What `+clipx/mask` takes out: shares of all tokens by the sign of their advantage, and whole responses an update.
MASKED = {"A < 0": logged(declared.MASKED["negative"]), "A > 0": logged(declared.MASKED["positive"])}
MASKED_SEQUENCES = tuple(map(logged, declared.MASKED_SEQUENCES.values()))

# Begins what the training itself computes: where such a value is not finite, the training is not.
OF_TRAINING = ("actor/", "critic/")
# NaN here says that there was nothing to compare.
MAY_BE_NAN = frozenset({RECEIPT})
# Of values that are not finite these are named first, in this order, since the others follow from them.
FIRST_CAUSES = (
    REWARD,
    "critic/rewards/mean",
    "critic/advantages/mean",
    "critic/returns/mean",
    GRADIENT_NORM,
    LOSS,
    ENTROPY,
    KL,
    RATIO,
    CLIPPED_LOW,
    CLIPPED_HIGH,
    HELD_OUT,
)

# What the figures of reward, bounds, clipping and gradient mass draw; the other declared metrics are drawn by chart.
DRAWN = (
    *(REWARD, REWARD_ERROR, ENTROPY, KL, GRADIENT_NORM, CLIPPED_LOW, CLIPPED_HIGH, *MASS.values()),
    *(LENGTH, CUT, ALIKE, MISMATCH, PG_CLIPPED),
    *(BOUND_LOW, BOUND_HIGH, BOUND_LOW_LAST, BOUND_HIGH_LAST, SHARE_BEFORE, SHARE_AFTER),
)
DRAWN_IN_BINS = re.compile(r"actor/clipx/epsilon(_last)?/bin_\d+")

# Begins what only verl's trainers of policies log; of a panel of W&B, it may be all that there is.
OF_VERL = ("actor/", "critic/", "response_length/", "val-core/", "health/")
# Begins everything that the plugin logs by a name of its own; the page's table of numbers has it beside DRAWN.
OWN = "actor/clipx/"


def is_drawn(key: str) -> bool:
    """Returns whether a metric has a figure of its own, so that the figures of declared charts leave it out."""
    return key in DRAWN or DRAWN_IN_BINS.fullmatch(key) is not None


def of_bins(name: str, columns: Iterable[str]) -> list[str]:
    """Returns the keys of a metric that is logged per probability bin, as ACPO's epsilon and count are, by bin."""
    numbered = {column: re.fullmatch(rf"{OWN}{name}/bin_(\d+)", column) for column in columns}
    return sorted(filter(numbered.get, numbered), key=lambda column: int(numbered[column][1]))
