"""The metrics that a report reads, as verl logs them."""

import re
from collections.abc import Iterable

REWARD, LOWEST_REWARD, HIGHEST_REWARD = (f"critic/score/{what}" for what in ("mean", "min", "max"))
LOWEST_ADVANTAGE, HIGHEST_ADVANTAGE = "critic/advantages/min", "critic/advantages/max"
# The standard error of that mean over prompts; not every run logs it.
REWARD_ERROR = "critic/score/standard_error"
# Stands for the scores in the files of validations; no metric of the log.
HELD_OUT = "held-out scores"
ENTROPY = "actor/entropy"
# In bypass mode verl has no entropy of the old policy, and logs that of the updates.
ENTROPY_OF_UPDATES = "actor/entropy_loss"
KL = "actor/ppo_kl"
GRADIENT_NORM = "actor/grad_norm"
# What verl's own losses say of clipping.
PG_CLIPPED = "actor/pg_clipfrac"
LENGTH = "response_length/mean"
MISMATCH = "training/rollout_probs_diff_mean"
ALIKE, CUT, UNDECIDED = "health/alike_prompts", "health/cut_responses", "health/undecided"
# verl's validation in its log, a metric for each data set.
VALIDATIONS = "val-core/*/mean@*"
# Metrics that figures show in per cent.
SHARES = (ALIKE, CUT, PG_CLIPPED)
SKIPPED_UPDATES = "actor/clipx/skipped_updates"
NOT_FINITE_RANK = "actor/clipx/not_finite/rank"
# A run's health, and what a page calls each number: shares of a step, then counts.
HEALTH_SHARES = {
    ALIKE: "prompts whose samples all scored alike",
    UNDECIDED: "answers on which the verifier had no verdict",
    CUT: "responses cut at their greatest length",
}
HEALTH_COUNTS = {
    "health/not_finite/rewards": "rewards",
    "health/not_finite/advantages": "advantages",
    "health/not_finite/log_probs": "log-probabilities",
    "actor/clipx/not_finite/log_probs": "log-probabilities in skipped updates",
}
RATIO = "actor/clipx/ratio_mean"
CLIPPED_LOW = "actor/clipx/clip_fraction_low"
CLIPPED_HIGH = "actor/clipx/clip_fraction_high"
BOUND_LOW, BOUND_HIGH = "actor/clipx/c_low", "actor/clipx/c_high"
BOUND_LOW_LAST, BOUND_HIGH_LAST = "actor/clipx/c_low_last", "actor/clipx/c_high_last"
SHARE_BEFORE, SHARE_AFTER = "actor/clipx/positive_share_before", "actor/clipx/positive_share_after"
HOLD_MISSED = "actor/clipx/hold/missed"
EPSILON_HIGHEST = "actor/clipx/epsilon_highest"
MASS = {region: f"actor/clipx/gradient_mass/{region}" for region in ("LN", "HP", "LP", "HN", "M")}
# The share of tokens within the bounds, of runs with clipx.metrics=all.
IN_M = "actor/clipx/region_fraction/M"

# What `+clipx/mask` takes out: shares of all tokens by the sign of their advantage, and whole responses an update.
MASKED = {"A < 0": "actor/clipx/masked_fraction/negative", "A > 0": "actor/clipx/masked_fraction/positive"}
MASKED_SEQUENCES = ("actor/clipx/masked_sequences/negative", "actor/clipx/masked_sequences/positive")

# What is expected to be finite at every step of a run, the first causes first.
FINITE = (
    REWARD,
    "critic/rewards/mean",
    "critic/advantages/mean",
    "critic/returns/mean",
    GRADIENT_NORM,
    "actor/pg_loss",
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
    """Whether a metric has a figure of its own, so that the figures of declared charts leave it out."""
    return key in DRAWN or DRAWN_IN_BINS.fullmatch(key) is not None


def of_bins(name: str, columns: Iterable[str]) -> list[str]:
    """The keys of a metric that ACPO logs per probability bin (epsilon, epsilon_last, sigma, count), by bin."""
    numbered = {column: re.fullmatch(rf"{OWN}{name}/bin_(\d+)", column) for column in columns}
    return sorted(filter(numbered.get, numbered), key=lambda column: int(numbered[column][1]))
