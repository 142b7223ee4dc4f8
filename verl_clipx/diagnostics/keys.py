"""The metrics that a report reads, as verl logs them."""

from collections.abc import Iterable

REWARD = "critic/score/mean"
# Over prompts, of the mean above; not every run logs it.
REWARD_ERROR = "critic/score/standard_error"
# Of the validations' files, which are no metric of the log.
HELD_OUT = "held-out scores"
ENTROPY = "actor/entropy"
ENTROPY_ESTIMATE = "actor/clipx/entropy_clip_estimate"
KL = "actor/ppo_kl"
GRADIENT_NORM = "actor/grad_norm"
SKIPPED_UPDATES = "actor/clipx/skipped_updates"
NOT_FINITE_RANK = "actor/clipx/not_finite/rank"
# Of a run's health: what each number is, as a page says it; shares of a step, then counts.
HEALTH_SHARES = {
    "health/alike_prompts": "prompts whose samples all scored alike",
    "health/undecided": "answers on which the verifier had no verdict",
    "health/cut_responses": "responses cut at their greatest length",
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
EPSILON_HIGHEST = "actor/clipx/epsilon_highest"
MASS = {region: f"actor/clipx/gradient_mass/{region}" for region in ("LN", "HP", "LP", "HN", "M")}

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

# What the figures show, and so the table of numbers: these, and those that begin with the names of adaptive bounds.
SHOWN = (REWARD, REWARD_ERROR, ENTROPY, ENTROPY_ESTIMATE, KL, RATIO, CLIPPED_LOW, CLIPPED_HIGH, *MASS.values())
ADAPTIVE = ("actor/clipx/epsilon", "actor/clipx/sigma", "actor/clipx/count", "actor/clipx/c_", "actor/clipx/positive_")


def of_bins(name: str, columns: Iterable[str]) -> list[str]:
    """The keys of a metric that ACPO logs per probability bin, in order of bins.

    Args:
        name: epsilon, epsilon_last, sigma or count.
        columns: of a log.
    """
    prefix = f"actor/clipx/{name}/bin_"
    found = [column for column in columns if column.startswith(prefix) and column.removeprefix(prefix).isdecimal()]
    return sorted(found, key=lambda column: int(column.removeprefix(prefix)))
