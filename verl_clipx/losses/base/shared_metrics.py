"""Declares every metric that does not belong to a method, once each. To add one, add an entry.

Regions of tokens are named after DGPO (Eqs. 2-6). The first letter is L for a ratio below the lower bound and H for one
above the upper bound; the second is N for a negative and P for a positive advantage. M is every other token, also one
whose ratio equals a bound or whose advantage is 0. PPO clips LN and HP, and does not clip LP and HN.
"""

from dataclasses import dataclass
from functools import partial
from operator import neg
from typing import Any

from verl_clipx.losses.base.metric import Metric, Over

REGIONS = ("LN", "HP", "LP", "HN", "M")
# The names of two sums: the gradient mass of M, split by the advantage's sign.
NEGATIVE_M = "mass/M, A < 0"
POSITIVE_M = "mass/M, A > 0"


def effective_sample_size(mean_ratio: float, mean_squared_ratio: float) -> float:
    """Return Kish's effective sample size of tokens that are weighted by their ratios, as a share of the tokens.

    Of n tokens it is (sum r)^2 / (sum r^2), and its share (sum r)^2 / (n sum r^2), which is the square of the mean of r
    divided by the mean of r^2.

    Args:
        mean_ratio: the mean of r over the tokens.
        mean_squared_ratio: the mean of r^2 over the tokens.

    Returns:
        In [0, 1]; 0 without tokens.
    """
    if mean_squared_ratio == 0:
        return 0.0
    return mean_ratio**2 / mean_squared_ratio


# All metrics that are declared here, in the order in which `clipx metrics` lists those of a section.
METRICS: list[Metric] = []


def declare(name: str, meaning: str, unit: str, over: Over, **further: Any) -> Metric:
    """Declare a metric, and return it; the arguments are as for `Metric`."""
    metric = Metric(name=name, meaning=meaning, unit=unit, over=over, **further)
    METRICS.append(metric)
    return metric


# Each declares a metric of one section. The arguments that are still missing are as for `Metric`.
declare_clipped = partial(declare, unit="fraction of tokens", over=Over.TOKENS, section="What was clipped")
declare_moved = partial(declare, section="How far the policy moved")
declare_mass = partial(declare, unit="|F·A| per token", over=Over.TOKENS, section="Where the gradient comes from")

# The meaning of the metrics of the regions' gradient mass.
MASS_OF_REGION = "sum of |F·A| over the tokens in the region, divided by the number of all tokens"

CLIP_FRACTION_LOW = declare_clipped(
    "clip_fraction_low",
    "fraction of tokens with A < 0 and a ratio (M2PO: log-ratio) below the lower bound (LN)",
    sums=("LN",),
    chart="clipped tokens",
)
CLIP_FRACTION_HIGH = declare_clipped(
    "clip_fraction_high",
    "fraction of tokens with A > 0 and a ratio (M2PO: log-ratio) above the upper bound (HP)",
    sums=("HP",),
    chart="clipped tokens",
)
PG_CLIPFRAC = declare_clipped(
    "pg_clipfrac",
    "the sum of `clip_fraction_low` and `clip_fraction_high`, in every method: what PPO would clip; under the name "
    "that verl's dashboards use",
    sums=("LN", "HP"),
    logged_as="actor/pg_clipfrac",
)
declare_clipped(
    "pg_clipfrac_lower",
    "fraction of tokens with A < 0 and a ratio above the dual clip, in methods that have one",
    sums=("dual_clipped",),
    logged_as="actor/pg_clipfrac_lower",
)
RATIO_MEAN = declare_moved(
    "ratio_mean", "mean importance-sampling ratio", unit="1", over=Over.TOKENS, sums=("ratio",), chart="mean ratio"
)
PPO_KL = declare_moved(
    "ppo_kl",
    "mean of -log ratio, an estimate of the KL divergence from the current to the old policy",
    unit="nats per token",
    over=Over.TOKENS,
    sums=("log_ratio",),
    compute=neg,
    logged_as="actor/ppo_kl",
)
declare_moved(
    "effective_sample_size",
    "(Σr)² / (n Σr²): which share of its n tokens a mini-batch is worth when they are weighted by the ratio r",
    unit="fraction of tokens",
    over=Over.UPDATE,
    sums=("ratio", "squared_ratio"),
    compute=effective_sample_size,
    chart="effective sample size",
)


def declare_gradient_mass(region: str, sums: tuple[str, ...]) -> Metric:
    """Declare the gradient mass of a region, made of these sums over tokens."""
    return declare_mass(f"gradient_mass/{region}", MASS_OF_REGION, sums=sums, chart="gradient mass")


# From a region to the metric of its gradient mass.
GRADIENT_MASS = {
    "LN": declare_gradient_mass("LN", sums=("mass/LN",)),
    "HP": declare_gradient_mass("HP", sums=("mass/HP",)),
    "LP": declare_gradient_mass("LP", sums=("mass/LP",)),
    "HN": declare_gradient_mass("HN", sums=("mass/HN",)),
    "M": declare_gradient_mass("M", sums=(NEGATIVE_M, POSITIVE_M)),
}
# From the sign of the advantage to the metric of its tokens' gradient mass.
CONTRIBUTION = {
    "positive": declare_mass(
        "contribution/positive",
        "sum of |F·A| over the tokens with A > 0, divided by the number of all tokens",
        sums=("mass/HP", "mass/LP", POSITIVE_M),
        chart="contribution",
    ),
    "negative": declare_mass(
        "contribution/negative",
        "sum of |F·A| over the tokens with A < 0, divided by the number of all tokens",
        sums=("mass/LN", "mass/HN", NEGATIVE_M),
        chart="contribution",
    ),
}

# The metrics that are made of sums over tokens for every method: all that are declared so far.
TOKEN_METRICS = tuple(METRICS)


@dataclass(frozen=True)
class Floor:
    """The metrics of one measurement of the floor: how far rounding alone moves ratios that would be 1 without it.

    Attributes:
        log_ratio: the mean of |log r|.
        clip_fraction_low, clip_fraction_high: as the clip fractions of the same names.
        tokens: the number of tokens in each bin of the old policy's probability.
        log_ratio_sum: the sum of log r in each bin.
        squared_sum: the sum of (log r)^2 in each bin.
    """

    log_ratio: Metric
    clip_fraction_low: Metric
    clip_fraction_high: Metric
    tokens: Metric
    log_ratio_sum: Metric
    squared_sum: Metric

    @property
    def means(self) -> tuple[Metric, ...]:
        """The metrics that are divided by the number of tokens."""
        return self.log_ratio, self.clip_fraction_low, self.clip_fraction_high


# The number of equally wide bins of the old policy's probability. ACPO's default is the same, but either may change.
FLOOR_BINS = 5


def declare_floor(name: str, where: str) -> Floor:
    """Declare the metrics of a measurement of the floor.

    Args:
        name: what their keys begin with, after `clipx/`.
        where: the tokens that are measured, as the end of each metric's meaning.
    """
    declare_floor_metric = partial(declare, over=Over.ROLLOUT_BATCH, section="How much is rounding")
    in_bin = f"{where}, per bin of the old policy's probability ({FLOOR_BINS} equally wide ones)"
    return Floor(
        log_ratio=declare_floor_metric(
            f"{name}/log_ratio", f"mean of abs(log ratio) {where}", "nats per token", chart="floor: abs(log ratio)"
        ),
        clip_fraction_low=declare_floor_metric(
            f"{name}/clip_fraction_low", f"`clip_fraction_low` {where}", "fraction of tokens"
        ),
        clip_fraction_high=declare_floor_metric(
            f"{name}/clip_fraction_high", f"`clip_fraction_high` {where}", "fraction of tokens"
        ),
        tokens=declare_floor_metric(f"{name}/tokens", f"number of tokens {in_bin}", "tokens", numbered="bin"),
        log_ratio_sum=declare_floor_metric(
            f"{name}/log_ratio_sum", f"sum of log ratio {in_bin}", "nats", numbered="bin"
        ),
        squared_sum=declare_floor_metric(
            f"{name}/squared_sum", f"sum of the squared log ratio {in_bin}", "nats²", numbered="bin"
        ),
    )


FLOOR = declare_floor(
    "floor",
    "in a rollout batch's first update, where only rounding moves the ratio from 1; logged only if old_log_probs "
    "were computed with the weights that this update starts from",
)
FLOOR_RECUT = declare_floor(
    "floor_recut",
    "in the first update after a start, measured once more before it with the same rows in reverse order and in "
    "smaller micro-batches",
)
FLOORS = (FLOOR, FLOOR_RECUT)

declare_health = partial(declare, over=Over.ROLLOUT_BATCH, section="Health")
ALIKE_PROMPTS = declare_health(
    "health/alike_prompts",
    "share of the prompts with several samples whose samples all score alike; unless the loss has another term, they "
    "teach nothing",
    "fraction of prompts",
    logged_as="health/alike_prompts",
)
CUT_RESPONSES = declare_health(
    "health/cut_responses",
    "share of the responses with `data.max_response_length` tokens, or as many as `rollout.max_model_len` leaves "
    "beside the prompt. (verl's `response_length/clip_ratio`: as many as the batch's longest response.)",
    "fraction of responses",
    logged_as="health/cut_responses",
)
UNDECIDED = declare_health(
    "health/undecided",
    "share of the responses on which the verifier has no verdict; logged if the reward returns `undecided`",
    "fraction of responses",
    logged_as="health/undecided",
)
# From what is not finite to the metric. The trainer's process logs these, so that `observe` has them too.
NOT_FINITE = {
    name: declare_health(
        f"health/not_finite/{name}",
        f"responses of the step with {meaning} that is not finite (NaN or infinite)",
        "responses",
        logged_as=f"health/not_finite/{name}",
    )
    for name, meaning in {
        "rewards": "a reward",
        "advantages": "an advantage",
        "log_probs": "a log-probability (old or rollout policy's, in trainers that pass them to verl's metrics)",
    }.items()
}
NOT_FINITE_LOG_PROBS = declare_health(
    "not_finite/log_probs",
    "sequences of skipped updates with a log-probability or entropy that is not finite; logged only in such steps",
    "sequences",
)
NOT_FINITE_RANK = declare_health(
    "not_finite/rank",
    "the first data-parallel rank that had a value that is not finite in a skipped update, or -1 if it came up in the "
    "backward pass through the model; the rank's output names field and prompt",
    "rank",
)

declare_token_fraction = partial(declare, unit="fraction of tokens", over=Over.TOKENS, section="The run")
declare_run_metric = partial(declare, over=Over.ROLLOUT_BATCH, section="The run")
declare_hold_metric = partial(declare, over=Over.DECISION)

SKIPPED_UPDATES = declare_run_metric(
    "skipped_updates",
    "number of the rollout batch's updates in which the norm of the gradient was not finite. verl skips such an "
    "update, but takes it under Megatron. Under Lopti, the updates of both passes are counted",
    "updates",
)
RECEIPT = declare_run_metric(
    "receipt",
    "largest difference between the announced gradient on log_prob and the one that the loss has, in the first rollout "
    "batch after each start",
    "of a token's gradient",
)
RECEIPT_FAILED = declare_run_metric(
    "receipt_failed",
    "number of the receipt's checks that did not hold, over all ranks, where they only warned; 0 if all held",
    "checks",
)
STANDARD_ERROR = declare_run_metric(
    "critic/score/standard_error",
    "standard error of verl's `critic/score/mean`, over prompts; logged in every run with the plugin, and without "
    "the prefix `actor/`",
    "score",
    logged_as="critic/score/standard_error",
)
HELD_WIDTH = declare_hold_metric(
    "hold/width",
    "`+clipx/hold`: the width w that holds the target, of bounds 1 / (1 + w) and 1 + w, or -w and w on a difference",
    "1",
    chart="held width",
)
HELD_REACHED = declare_hold_metric(
    "hold/reached", "`+clipx/hold`: the target's value at this width, by the histogram that it was solved from", "1"
)
HELD_MISSED = declare_hold_metric(
    "hold/missed",
    "`+clipx/hold`: share of the updates in which no width between floor and ceiling meets the target",
    "fraction of updates",
)
SELECTED = declare_token_fraction(
    "selected_fraction",
    "entropy selection over the mini-batch: fraction of tokens that are kept",
)
REJECTED = declare_token_fraction(
    "rejected_fraction",
    "`+clipx/mask`, and bypass mode with `rollout_rs`: fraction of the tokens taken out; every other number is of "
    "those that are left. In decoupled mode verl logs `rollout_corr/rollout_rs_masked_fraction`",
)
# From the sign of the advantage to the metric of what `+clipx/mask` takes out. A sequence has the sign of the mean of
# its advantages.
SIGNS = ("negative", "positive")
MASKED = {
    sign: declare_token_fraction(
        f"masked_fraction/{sign}",
        f"`+clipx/mask`: fraction of the tokens that are masked and have a {sign} advantage",
        chart="masked tokens",
    )
    for sign in SIGNS
}
MASKED_SEQUENCES = {
    sign: declare(
        f"masked_sequences/{sign}",
        f"`+clipx/mask`: number of the update's sequences of which every token is masked, with a {sign} advantage",
        "sequences",
        Over.DECISION,
        section="The run",
        adds_up=True,
    )
    for sign in SIGNS
}
VERSIONS = declare_run_metric(
    "staleness/versions",
    "mean age of the tokens in weight versions, which is the number of rollout batches trained since their sequence's "
    "last token was sampled; logged from the run's first sample on that is older than 0",
    "weight versions",
    chart="age of the samples",
)
VERSIONS_FIRST = declare_run_metric(
    "staleness/versions_first",
    "the same since their sequence's first token was sampled: higher where generations were interrupted and resumed "
    "with newer weights",
    "weight versions",
    chart="age of the samples",
)
