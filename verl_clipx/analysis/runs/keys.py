"""The metrics that a report reads, as verl logs them."""

import re
from collections.abc import Iterable

from verl_clipx.losses.base import shared_metrics as declared
from verl_clipx.losses.base.metric import Metric


def logged(metric: Metric) -> str:
    """Return a metric's key in verl's log: verl puts `actor/` before what its workers log."""
    return metric.logged_as or f"actor/{metric.key}"


# Every trainer of verl's logs this key for each training step, and no worker does.
STEP = "training/global_step"
REWARD = "critic/score/mean"
LOWEST_REWARD = "critic/score/min"
HIGHEST_REWARD = "critic/score/max"
# The standard error of the mean reward, over prompts. Not every run logs it.
REWARD_ERROR = logged(declared.STANDARD_ERROR)
LOWEST_ADVANTAGE = "critic/advantages/min"
HIGHEST_ADVANTAGE = "critic/advantages/max"
# This is no metric of the log. It stands for the scores in the files of validations.
HELD_OUT = "held-out scores"
ENTROPY = "actor/entropy"
# In bypass mode verl has no entropy of the old policy, and logs that of the updates.
ENTROPY_OF_UPDATES = "actor/entropy_loss"
KL = logged(declared.PPO_KL)
GRADIENT_NORM = "actor/grad_norm"
LEARNING_RATE = "actor/lr"
LOSS = "actor/pg_loss"
# The share of tokens that verl's own losses count as clipped.
PG_CLIPPED = logged(declared.PG_CLIPFRAC)
LENGTH = "response_length/mean"
LONGEST = "response_length/max"
# The share of the responses that are as long as the longest one of their batch.
AS_LONG_AS_LONGEST = "response_length/clip_ratio"
# The mean absolute difference between a token's probability under the sampler and the recomputed one.
MISMATCH = "training/rollout_probs_diff_mean"
# Two estimates of the KL divergence KL(sampler || recomputed policy). Only rounding makes the first one negative.
SAMPLER_KL = "rollout_corr/k3_kl"
SAMPLER_KL_1 = "rollout_corr/kl"
# How many versions of the weights the sampler was behind the trainer.
STALENESS = "training/off_policy/trajectory_staleness/mean"
# Prompts that verl dropped with all their responses, for being too old or because all score alike. It logs the number
# only in steps in which it is above 0.
EVICTED = "training/off_policy/evicted_samples"
FILTERED = "training/filter_groups/evicted_samples"
# verl's importance weights of the rollout correction: their mean over tokens, and Kish's effective sample size as a
# share.
WEIGHTS_MEAN = "rollout_corr/rollout_is_mean"
WEIGHTS_SAMPLE_SIZE = "rollout_corr/rollout_is_eff_sample_size"
# The shares of prompts whose samples all score alike, of responses cut at the limit, and of answers without a verdict.
ALIKE = logged(declared.ALIKE_PROMPTS)
CUT = logged(declared.CUT_RESPONSES)
UNDECIDED = logged(declared.UNDECIDED)
# verl's held-out scores in its log, a metric for each data set.
VALIDATIONS = "val-core/*/mean@*"
# Metrics that figures show in per cent.
SHARES = frozenset({ALIKE, CUT, PG_CLIPPED})
SKIPPED_UPDATES = logged(declared.SKIPPED_UPDATES)
NOT_FINITE_RANK = logged(declared.NOT_FINITE_RANK)
# From the plugin's counts of responses with values that are not finite to what a page calls these values.
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
# The shares that rounding alone clips: FLOOR is of the first update of a rollout batch, RECUT of a second measurement.
FLOOR_LOW = logged(declared.FLOOR.clip_fraction_low)
FLOOR_HIGH = logged(declared.FLOOR.clip_fraction_high)
FLOOR_TOKENS = f"{logged(declared.FLOOR.tokens)}/bin_*"
RECUT_LOW = logged(declared.FLOOR_RECUT.clip_fraction_low)
RECUT_HIGH = logged(declared.FLOOR_RECUT.clip_fraction_high)
# Metrics of BAPO and ACPO. They are written out, since the files that declare them need torch. A test compares them.
BOUND_LOW = "actor/clipx/c_low"
BOUND_HIGH = "actor/clipx/c_high"
BOUND_LOW_LAST = "actor/clipx/c_low_last"
BOUND_HIGH_LAST = "actor/clipx/c_high_last"
SHARE_BEFORE = "actor/clipx/positive_share_before"
SHARE_AFTER = "actor/clipx/positive_share_after"
# The number of tokens in each of ACPO's probability bins.
COUNTS = "actor/clipx/count/bin_*"
EPSILON_HIGHEST = "actor/clipx/epsilon_highest"
EPSILON_AVERAGE = "actor/clipx/epsilon_average"
HOLD_MISSED = logged(declared.HELD_MISSED)
MASS = {region: logged(metric) for region, metric in declared.GRADIENT_MASS.items()}

# What `+clipx/mask` takes out, by the sign of the advantage: a share of all tokens, and a number of whole sequences.
MASKED = {"A < 0": logged(declared.MASKED["negative"]), "A > 0": logged(declared.MASKED["positive"])}
MASKED_SEQUENCES = tuple(map(logged, declared.MASKED_SEQUENCES.values()))

# Prefixes of the metrics of the training itself. If such a metric is not finite, the training is broken.
OF_TRAINING = ("actor/", "critic/")
# Metrics that are NaN if there was nothing to compare.
MAY_BE_NAN = frozenset({RECEIPT})
# If several metrics are not finite, these are named first, in this order, since the others follow from them.
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

# The metrics in the figures of reward, bounds, clipping and gradient mass. Other metrics are drawn if they declare a
# chart.
DRAWN = (
    REWARD,
    REWARD_ERROR,
    ENTROPY,
    KL,
    GRADIENT_NORM,
    CLIPPED_LOW,
    CLIPPED_HIGH,
    *MASS.values(),
    LENGTH,
    CUT,
    ALIKE,
    MISMATCH,
    PG_CLIPPED,
    BOUND_LOW,
    BOUND_HIGH,
    BOUND_LOW_LAST,
    BOUND_HIGH_LAST,
    SHARE_BEFORE,
    SHARE_AFTER,
)
DRAWN_IN_BINS = re.compile(r"actor/clipx/epsilon(_last)?/bin_\d+")

# Prefixes of the metrics that only verl's trainers of policies log. A file exported from a panel of W&B may have no
# other metrics.
OF_VERL = ("actor/", "critic/", "response_length/", "val-core/", "health/")
# The prefix of the metrics whose names are the plugin's own. The page's table of numbers has them and those of DRAWN.
OWN = "actor/clipx/"


def is_drawn(key: str) -> bool:
    """Return whether a metric has a figure of its own, so that the figures of declared charts leave it out."""
    return key in DRAWN or DRAWN_IN_BINS.fullmatch(key) is not None


def find_bin_keys(name: str, columns: Iterable[str]) -> list[str]:
    """Return the keys of a metric that is logged for each probability bin, in the order of the bins' numbers.

    Args:
        name: the metric's name without OWN and without the bin, such as `epsilon`.
        columns: the keys among which to look.
    """
    keys_by_number: list[tuple[int, str]] = []
    for column in columns:
        match = re.fullmatch(rf"{OWN}{name}/bin_(\d+)", column)
        if match:
            keys_by_number.append((int(match[1]), column))
    return [column for _, column in sorted(keys_by_number)]
