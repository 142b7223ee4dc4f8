"""The rules of diagnose.

Each rule is a function that returns when a pathology begins in a run, or None if the run does not show it. Its
docstring says when the rule is met. What to do stands in its declaration as `remedy`: a text, or a function that writes
one for a run.
"""

import fnmatch

import numpy
import pandas

from verl_clipx.analysis.diagnose.remedies import (
    advise_more_updates,
    advise_on_alike_samples,
    advise_on_anchored_ratio,
    advise_on_collapsed_weights,
    advise_on_drifting_sampler,
    advise_on_dropped_prompts,
    advise_on_entropy_collapse,
    advise_on_entropy_explosion,
    advise_on_fallen_held_out_score,
    advise_on_fallen_reward,
    advise_on_few_tokens_in_bins,
    advise_on_missed_target,
    advise_on_missing_signal,
    advise_on_one_sided_clipping,
    advise_on_skipped_updates,
    advise_on_values_not_finite,
    advise_on_weights_not_finite,
    advise_scoring_tokens,
)
from verl_clipx.analysis.diagnose.rule import (
    LASTING,
    RULES,
    Kind,
    Onset,
    first_lasting_step,
    rule,
    rule_of_limit,
    say_when_halved,
    training_values,
)
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.evicted import evicted_by_step
from verl_clipx.analysis.runs.floor import (
    combine_measurements,
    could_exceed,
    count_clipped_by_step,
    count_later_clipped,
    exceeds,
    measure_floors,
)
from verl_clipx.analysis.runs.run import Run
from verl_clipx.common.statistics.collapse import KEPT, PART, collapse, last_level, level_steps
from verl_clipx.run.keys import MINI_BATCH, ROLLOUT_PROMPTS, STRATEGY, TOP_K, TOP_P, VALIDATION_FOLDER
from verl_clipx.run.sampling import is_number

__all__ = ["HELD_OUT_FALLS", "REWARD_COLLAPSE", "ROUNDING", "RULES"]

REWARD_COLLAPSE = "reward collapse"
HELD_OUT_FALLS = "held-out score falls while the training reward rises"
NO_SIGNAL = "no learning signal"
FEW_TEACH = "few prompts teach, because samples score alike"
ONE_SIDED = "one-sided clipping"
ONE_UPDATE = "bounds idle: one update a rollout batch"
ROUNDING = "clipping can't be told from rounding"
MISMATCH = "mismatch of rollout and training"
CUT_AT_LIMIT = "responses cut at the limit"
# The rules whose advice is void if the reward, or the batch, is not what it should be.
ADVICE_ON_TRAINING = ("entropy collapse", "entropy explosion", NO_SIGNAL, FEW_TEACH, ONE_SIDED, CUT_AT_LIMIT)

# --- What is not finite ----------------------------------------------------------------------------------------------


@rule(
    "updates taken with a gradient that is not finite",
    Kind.FACT,
    reads=(keys.SKIPPED_UPDATES, keys.GRADIENT_NORM),
    about=(STRATEGY,),
    remedy=advise_on_weights_not_finite,
    link="docs/reading.md#health",
    any_of=True,
)
def find_taken_updates(run: Run) -> Onset | None:
    """The rule is met by an update whose gradient is not finite, under Megatron, with which verl takes it."""
    return _find_not_finite_updates(run) if run.takes_not_finite_updates else None


@rule(
    "skipped updates",
    Kind.FACT,
    reads=(keys.SKIPPED_UPDATES, keys.GRADIENT_NORM),
    remedy=advise_on_skipped_updates,
    link="docs/reading.md#health",
    any_of=True,
)
def find_skipped_updates(run: Run) -> Onset | None:
    """The rule is met by an update whose gradient is not finite, under every other engine, with which verl skips it."""
    return None if run.takes_not_finite_updates else _find_not_finite_updates(run)


def find_steps_with_not_finite_gradient(run: Run) -> list[int]:
    """Return the steps with an update whose gradient is not finite.

    The plugin counts such updates. In a log without this count, they are the steps whose gradient norm is not finite.
    """
    if keys.SKIPPED_UPDATES not in run.log:
        return run.not_finite.get(keys.GRADIENT_NORM, [])
    counts = run.log[keys.SKIPPED_UPDATES]
    return list(counts.index[counts > 0])


def _find_not_finite_updates(run: Run) -> Onset | None:
    """Find the first step with an update whose gradient is not finite, and count such updates since."""
    steps = find_steps_with_not_finite_gradient(run)
    if not steps:
        return None
    trained_since = int((run.log.index >= steps[0]).sum())
    evidence = _say_not_finite_updates(run, steps, trained_since)
    ranks = run.values(keys.NOT_FINITE_RANK)
    if len(ranks):
        first_rank = int(ranks.iloc[0])
        # -1 stands for a value that first appeared in the backward pass.
        evidence += f", first on rank {first_rank}" if first_rank >= 0 else ", in the gradient only"
    return Onset(int(steps[0]), evidence)


def _say_not_finite_updates(run: Run, steps: list[int], trained_since: int) -> str:
    """Say how many updates had a gradient that is not finite, and whether verl skipped or took them.

    Args:
        run: the run.
        steps: the steps with such an update.
        trained_since: how many steps were trained from the first of these steps on.
    """
    if run.takes_not_finite_updates is None:
        fate = "skipped or taken, depending on the engine,"
    else:
        fate = "taken" if run.takes_not_finite_updates else "skipped"
    updates = run.log[keys.SKIPPED_UPDATES][steps].sum() if keys.SKIPPED_UPDATES in run.log else numpy.nan
    if not numpy.isfinite(updates):
        return f"updates {fate} in {len(steps)} of {trained_since} steps since, how many this log does not say"
    # 0 if the run's record does not say how many updates a step has.
    all_updates = (run.schedule.updates_a_step or 0) * trained_since
    if all_updates >= updates:
        return f"{updates:.0f} of {all_updates} updates {fate} since"
    if updates == 1:
        return f"1 update {fate} since"
    return f"{updates:.0f} updates {fate} since"


@rule(
    "values that are not finite",
    Kind.FACT,
    reads=(*keys.HEALTH_COUNTS, *(f"{prefix}*" for prefix in keys.OF_TRAINING)),
    remedy=advise_on_values_not_finite,
    link="docs/reading.md#health",
    any_of=True,
)
def find_values_not_finite(run: Run) -> Onset | None:
    """The rule is met by a value that is not finite in the rewards, advantages or log-probabilities, which the plugin
    checks, in a metric of the training itself (`actor/…`, `critic/…`), or in a held-out score.

    Nothing else shows such values, because means and figures leave them out.
    """
    first_step_by_description: dict[str, int] = {}
    for key, field in keys.HEALTH_COUNTS.items():
        # The number of responses with such a value in the field, in each step.
        counts = run.values(key)
        counts = counts[counts > 0]
        if len(counts):
            description = f"{field} of {int(counts.sum())} responses in {_say_steps(len(counts))}"
            first_step_by_description[description] = int(counts.index[0])
    for key in list_keys_not_finite(run):
        if is_of_training(key):
            steps = run.not_finite[key]
            first_step_by_description[f"{key} in {_say_steps(len(steps))}"] = steps[0]
    return _find_first_onset(first_step_by_description)


@rule(
    "other logged values that are not finite",
    reads=("*",),
    remedy="Check whether what computes them had nothing to compute from: none is a metric of the training itself.",
    link="docs/reading.md#health",
)
def find_others_not_finite(run: Run) -> Onset | None:
    """The rule is met by a value that is not finite in any other metric.

    W&B's own metrics are left out. Their keys begin with an underscore.
    """
    first_step_by_description: dict[str, int] = {}
    for key in list_keys_not_finite(run):
        if not (is_of_training(key) or key.startswith("_")):
            steps = run.not_finite[key]
            first_step_by_description[f"{key} in {_say_steps(len(steps))}"] = steps[0]
    return _find_first_onset(first_step_by_description)


def list_keys_not_finite(run: Run) -> list[str]:
    """Return the metrics that were logged as a value that is not finite, and should be finite.

    First come those from which the others follow, then the others by name. The gradient's norm is left out if the rules
    about updates report it already.
    """
    left_out = set(keys.MAY_BE_NAN)
    if find_steps_with_not_finite_gradient(run):
        left_out.add(keys.GRADIENT_NORM)
    reported = set(run.not_finite) - left_out
    causes = [key for key in keys.FIRST_CAUSES if key in reported]
    return [*causes, *sorted(reported.difference(causes))]


def is_of_training(key: str) -> bool:
    """Return whether a metric is one of the training itself, or stands for the held-out scores.

    If such a metric is not finite, the training or what it learned may be broken.
    """
    return key == keys.HELD_OUT or key.startswith(keys.OF_TRAINING)


# A finding names at most this many metrics and fields that are not finite.
MOST_NAMED = 6


def _find_first_onset(first_step_by_description: dict[str, int]) -> Onset | None:
    """Return one onset for all values that are not finite: the earliest step, and up to MOST_NAMED descriptions.

    None if there are no such values.

    Args:
        first_step_by_description: from the description of each metric or field to the first step at which it is not
            finite. The likeliest cause stands first.
    """
    if not first_step_by_description:
        return None
    named = list(first_step_by_description)[:MOST_NAMED]
    if len(first_step_by_description) > MOST_NAMED:
        named.append(f"and {len(first_step_by_description) - MOST_NAMED} more")
    return Onset(min(first_step_by_description.values()), f"not finite: {'; '.join(named)}")


def _say_steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


# --- Entropy ---------------------------------------------------------------------------------------------------------

# The healthy runs of docs/results/small_runs.md keep 9 % of their entropy.
ENTROPY_LEFT = 0.05


@rule(
    "entropy collapse",
    Kind.TREND,
    reads=(keys.ENTROPY,),
    remedy=advise_on_entropy_collapse,
    link="docs/faq.md",
    heuristic=True,
)
def find_entropy_collapse(run: Run) -> Onset | None:
    """The rule is met while the entropy is below ENTROPY_LEFT of what it was in the first steps."""
    values = training_values(run, keys.ENTROPY)
    # A quick collapse begins within the first steps, so their highest value counts.
    highest_at_first = values.iloc[:LASTING].max()
    if not highest_at_first > 0:
        return None
    step = first_lasting_step(values < ENTROPY_LEFT * highest_at_first)
    if step is None:
        return None
    halved = say_when_halved(values, highest_at_first, step)
    return Onset(step, f"{keys.ENTROPY} {values[step]:.3g}, at most {highest_at_first:.3g} in its first steps{halved}")


# The entropy explodes if it exceeds five times its first value and 1, or twice its first value and 5. About 150 equally
# likely tokens have an entropy of 5.
ENTROPY_TIMES = 5
ENTROPY_FROM = 1.0
ENTROPY_TIMES_IF_HIGH = 2
ENTROPY_HIGH = 5.0


@rule(
    "entropy explosion",
    Kind.TREND,
    reads=(keys.ENTROPY,),
    remedy=advise_on_entropy_explosion,
    link="docs/faq.md",
    heuristic=True,
)
def find_entropy_explosion(run: Run) -> Onset | None:
    """The rule is met while the entropy is high, and far above that of the first step.

    In no healthy run of docs/dev/diagnosis_evidence.md this lasts for so many steps.
    """
    values = training_values(run, keys.ENTROPY)
    # A quick explosion lies within the first three steps, so only the first one counts.
    first = values.iloc[:1].max()
    limit = max(ENTROPY_TIMES * first, ENTROPY_FROM)
    limit_if_high = max(ENTROPY_TIMES_IF_HIGH * first, ENTROPY_HIGH)
    has_risen = (values > limit) | (values > limit_if_high)
    step = first_lasting_step(has_risen)
    if step is None:
        return None
    return Onset(step, f"{keys.ENTROPY} {values[step]:.3g}, {first:.3g} in its first step")


# --- Whether anything teaches ----------------------------------------------------------------------------------------

ADVANTAGE_IS_ZERO = 1e-6
# GRPO's advantages of equal scores can be this far from 0, because the mean of the scores is rounded.
ADVANTAGE_OF_EQUALS = 0.1


@rule(
    NO_SIGNAL,
    Kind.TREND,
    reads=(keys.LOWEST_ADVANTAGE, keys.HIGHEST_ADVANTAGE, keys.ALIKE),
    remedy=advise_on_missing_signal,
    link="docs/reading.md#health",
    any_of=True,
    voids=(FEW_TEACH, ONE_UPDATE),
)
def find_no_signal(run: Run) -> Onset | None:
    """The rule is met while no advantage differs from 0, so that no token has a gradient.

    If advantages are not logged, it is met while all samples of each prompt score alike.
    """
    lowest = keys.LOWEST_ADVANTAGE
    highest = keys.HIGHEST_ADVANTAGE
    advantages = pandas.DataFrame({key: training_values(run, key) for key in (lowest, highest)}).dropna()
    if advantages.empty:
        alike = training_values(run, keys.ALIKE)
        step = first_lasting_step(alike == 1)
        if step is None:
            return None
        return Onset(step, f"{keys.ALIKE} 1, at most {alike.max():g}")
    largest_size = advantages.abs().max(axis=1)
    range_of_scores = run.values(keys.HIGHEST_REWARD) - run.values(keys.LOWEST_REWARD)
    scores_are_equal = range_of_scores.reindex(largest_size.index) == 0
    is_zero = (largest_size <= ADVANTAGE_IS_ZERO) | (scores_are_equal & (largest_size <= ADVANTAGE_OF_EQUALS))
    step = first_lasting_step(is_zero)
    if step is None:
        return None
    return Onset(
        step,
        f"{lowest} {advantages[lowest][step]:.3g}, {highest} {advantages[highest][step]:.3g}, "
        f"as good as 0 in {is_zero.sum()} of {len(is_zero)} steps",
    )


@rule(
    "one batch trained again and again",
    Kind.TREND,
    reads=(keys.REWARD, keys.LENGTH),
    remedy="Look at the queue that serves the batches.",
    link="docs/reading.md#rules",
    voids=ADVICE_ON_TRAINING,
)
def find_repeated_batch(run: Run) -> Onset | None:
    """The rule is met while the samples have exactly the mean score and the mean length of an earlier step.

    A mean length that is a whole number does not count, since all answers may be of one length.
    """
    means = pandas.DataFrame({key: training_values(run, key) for key in (keys.REWARD, keys.LENGTH)}).dropna()
    is_repeated = means.duplicated() & (means[keys.LENGTH] % 1 != 0)
    step = first_lasting_step(is_repeated)
    if step is None:
        return None
    reward = means[keys.REWARD][step]
    length = means[keys.LENGTH][step]
    steps = is_repeated.sum()
    return Onset(
        step, f"{keys.REWARD} {reward:.6g} and {keys.LENGTH} {length:.6g} as in an earlier step, in {steps} steps"
    )


# Prompts whose samples score alike have advantage 0. If nine tenths of the prompts do, only a tenth teaches.
rule_of_limit(
    FEW_TEACH,
    Kind.TREND,
    reads=keys.ALIKE,
    limit=0.9,
    remedy=advise_on_alike_samples,
    link="docs/reading.md#health",
    heuristic=True,
)

# --- Clipping and bounds ---------------------------------------------------------------------------------------------

# Clipping is one-sided if this share of the clipped tokens is on one side, for this many steps in a row. In these steps
# at least this share of all tokens must be clipped.
ONE_SIDE = 0.98
ONE_SIDED_STEPS = 5
LEAST_CLIPPED_SHARE = 0.01
# How far rounding in float32 may take a value from the exact one.
FLOAT32_TOLERANCE = 1e-6


def advise_on_clipped_side(run: Run) -> str:
    """Advise to widen the bound beyond which nearly all clipped tokens are."""
    step = find_one_sided_clipping(run).step
    side = "low" if run.values(keys.CLIPPED_LOW)[step] > run.values(keys.CLIPPED_HIGH)[step] else "high"
    return advise_on_one_sided_clipping(run, side)


@rule(
    ONE_SIDED,
    Kind.TREND,
    reads=(keys.CLIPPED_LOW, keys.CLIPPED_HIGH),
    remedy=advise_on_clipped_side,
    link="docs/methods.md",
    heuristic=True,
)
def find_one_sided_clipping(run: Run) -> Onset | None:
    """The rule is met while nearly all clipped tokens are on one side.

    Of 75 healthy runs one was so in a few steps.
    """
    sides = pandas.DataFrame({key: training_values(run, key) for key in (keys.CLIPPED_LOW, keys.CLIPPED_HIGH)}).dropna()
    if sides.empty:
        return None
    total = sides.sum(axis=1)
    is_one_sided = (total >= LEAST_CLIPPED_SHARE) & (sides.max(axis=1) >= ONE_SIDE * total)
    step = first_lasting_step(is_one_sided, ONE_SIDED_STEPS)
    if step is None:
        return None
    return Onset(step, _list_values(sides.loc[step]))


def _list_values(values: pandas.Series) -> str:
    """List metrics with their values in one step.

    Args:
        values: from a metric's key to its value.
    """
    return ", ".join(f"{key} {value:.3g}" for key, value in values.items())


@rule(
    ONE_UPDATE,
    reads=(keys.RATIO, keys.KL),
    remedy=advise_more_updates,
    link="docs/scopes.md",
)
def find_single_updates(run: Run) -> Onset | None:
    """The rule is met if the ratio is 1 in the whole log because each rollout batch gets a single update.

    No bound acts then.
    """
    ratio = training_values(run, keys.RATIO)
    kl = training_values(run, keys.KL)
    if ratio.empty or kl.empty:
        return None
    # A skipped update leaves the ratio at 1 however many updates a rollout batch gets.
    if find_steps_with_not_finite_gradient(run):
        return None
    updates = run.schedule.updates_on_batch
    if updates is not None and updates > 1:
        return None
    # A policy that nothing moves stays at ratio 1 too, however many updates a rollout batch gets.
    if updates is None and not moves_policy(run):
        return None
    first_step = int(ratio.index[0])
    if only_rounding_moves_ratio(run):
        if keys.CLIPPED_LOW in run.log:
            clipped = training_values(run, keys.CLIPPED_LOW).add(training_values(run, keys.CLIPPED_HIGH)).max()
            evidence = f"{keys.CLIPPED_LOW} and {keys.CLIPPED_HIGH} at most {clipped:.3g} together"
            return Onset(first_step, f"{evidence} in all {len(ratio)} steps, at weights that had not moved")
    else:
        furthest = max((ratio - 1).abs().max(), kl.abs().max())
        if furthest >= FLOAT32_TOLERANCE:
            return None
    return Onset(first_step, f"{keys.RATIO} 1 and {keys.KL} 0 in all {len(ratio)} steps")


def only_rounding_moves_ratio(run: Run) -> bool:
    """Return whether nothing but rounding takes the ratio away from 1 in a whole run.

    The configuration then gives each rollout batch a single update, at the weights that computed `old_log_probs`. The
    worker logs a floor only if the weights have not moved, so a logged floor confirms the configuration.
    """
    return run.schedule.only_at_ratio_one and keys.FLOOR_LOW in run.log


# The tokens of this many steps are counted together, before later updates are compared with the floor.
WINDOW = 5
# Fewer clipped tokens in these steps decide nothing.
FEWEST_CLIPPED = 30


@rule(
    ROUNDING,
    reads=(keys.CLIPPED_LOW, keys.CLIPPED_HIGH, keys.FLOOR_LOW, keys.FLOOR_HIGH, keys.FLOOR_TOKENS),
    remedy=(
        "Compute old_log_probs and the updates in the same micro-batches, which costs nothing. Or compute the logits "
        "in float32, which costs time and memory. Or widen the bounds, which then also clip less of what really moved. "
        "Or leave it as it is."
    ),
    link="docs/floor.md",
    about=(keys.FLOOR_LOW,),
)
def find_clipping_of_rounding(run: Run) -> Onset | None:
    """The rule is met while the later updates on a rollout batch clip no larger share of the tokens than the floor.

    The floor is what the first update clips, at weights that have not moved. The rule does not show that the later
    clipping is rounding: a token may be near a bound for a good reason, and rounding moves it across.
    """
    counts_by_step = count_clipped_by_step(run)
    number_of_windows = max(0, len(counts_by_step) - WINDOW + 1)
    windows = [counts_by_step.iloc[begin : begin + WINDOW] for begin in range(number_of_windows)]
    is_like_floor = pandas.Series([clips_like_floor(run, window) for window in windows], dtype=bool)
    # The state is one of windows, not of steps. It lasts if it holds in several successive windows.
    first_window = first_lasting_step(is_like_floor)
    if first_window is None:
        return None
    window = windows[first_window]
    return Onset(int(window.index[0]), _say_clipped_like_floor(run, window))


def clips_like_floor(run: Run, window: pandas.DataFrame) -> bool:
    """Return whether later updates clip no larger a share than the floor, except by chance.

    False if there are too few tokens to tell.

    Args:
        run: the run.
        window: consecutive rows of `count_clipped_by_step`, whose tokens are counted together.
    """
    later = count_later_clipped(window)
    first, second = measure_floors(run, window)
    floor = combine_measurements(first, second)
    if later.clipped < FEWEST_CLIPPED:
        return False
    if exceeds(later, floor):
        return False
    # With many updates on a rollout batch, the first update has few of its tokens. With too few, even a floor without
    # a clipped token would not be exceeded, so that "not exceeded" says nothing.
    return could_exceed(later, floor)


def _say_clipped_like_floor(run: Run, window: pandas.DataFrame) -> str:
    """Return the evidence: the shares that later updates and first updates clip, and the floor in other micro-batches.

    The floor in other micro-batches is a second measurement, which a run makes once or not at all.

    Args:
        run: the run.
        window: as for `clips_like_floor`.
    """
    later = count_later_clipped(window)
    first, second = measure_floors(run, window)
    parts = [
        f"{keys.CLIPPED_LOW} and {keys.CLIPPED_HIGH} {later.share:.3g} together in later updates "
        f"({later.clipped:.0f} of {later.tokens:.0f} tokens)",
        f"{first.share:.3g} in first ones ({keys.FLOOR_LOW} and {keys.FLOOR_HIGH})",
    ]
    if second is not None:
        parts.append(f"{second.share:.3g} in other micro-batches ({keys.RECUT_LOW} and {keys.RECUT_HIGH})")
    return ", ".join(parts)


def moves_policy(run: Run) -> bool:
    """Return whether the log shows that updates move the policy.

    The log shows it if some gradient norm is above 0 and, in a log with learning rates, some learning rate is too.
    """
    rate = run.values(keys.LEARNING_RATE)
    rate_may_be_positive = rate.empty or bool((rate > 0).any())
    return rate_may_be_positive and bool((run.values(keys.GRADIENT_NORM) > 0).any())


def _find_target_share(run: Run) -> float | None:
    """Return the target that BAPO's search has for the share of positive tokens.

    None if the run has no target, or if its target is for another quantity than the share.
    """
    parameters = run.record.loss.parameters
    is_share = parameters.get("contribution", "share") == "share"
    return parameters.get("target") if is_share else None


@rule(
    "bounds idle: the search never started",
    reads=(keys.SHARE_BEFORE, keys.SHARE_AFTER, keys.BOUND_LOW, keys.BOUND_HIGH, "clipx.target"),
    remedy="Raise clipx.target.",
    link="docs/methods.md#bapo",
    about=("clipx.target", keys.SHARE_BEFORE),
)
def find_search_not_started(run: Run) -> Onset | None:
    """The rule is met if the share was at the target or above before every search, so that no search moved a bound."""
    target = _find_target_share(run)
    share_before = training_values(run, keys.SHARE_BEFORE)
    share_after = training_values(run, keys.SHARE_AFTER)
    if target is None or share_before.empty or share_after.empty:
        return None
    for key in (keys.BOUND_LOW, keys.BOUND_HIGH):
        bound = training_values(run, key)
        if bound.empty or bound.max() - bound.min() >= FLOAT32_TOLERANCE:
            return None
    if share_before.min() < target:
        return None
    evidence = f"{keys.SHARE_BEFORE} {share_before.min():.3g} or more, target {target:g}"
    return Onset(int(share_before.index[0]), evidence)


@rule(
    "bounds idle: too few tokens a bin",
    reads=(keys.COUNTS, "clipx.alpha"),
    remedy=advise_on_few_tokens_in_bins,
    link="docs/methods.md#acpo",
    about=("clipx.alpha", keys.COUNTS),
)
def find_few_tokens(run: Run) -> Onset | None:
    """The rule is met while most bins have at least one token, but so few that none can lie outside the bounds.

    Of n ratios, none is further than √(n − 1) standard deviations σ from their mean. The bounds are alpha σ +
    epsilon_base away from 1, and the mean is taken to be less than epsilon_base away from 1. Bins that keep
    epsilon_base, by min_tokens, or epsilon_max have other bounds. They don't count.
    """
    count_keys = keys.find_bin_keys("count", run.log.columns)
    parameters = run.record.loss.parameters
    alpha = parameters.get("alpha")
    if not count_keys or alpha is None:
        return None
    counts = run.log.loc[run.log.index > 0, count_keys].dropna()
    fewest = max(1, parameters.get("min_tokens") or 1)
    most = alpha**2 + 1
    bins_with_few = ((counts >= fewest) & (counts <= most)).sum(axis=1)
    is_met = bins_with_few > len(count_keys) / 2
    epsilon_max = parameters.get("epsilon_max")
    if epsilon_max is not None:
        if keys.EPSILON_HIGHEST not in run.log:
            return None
        is_met &= run.log[keys.EPSILON_HIGHEST].reindex(counts.index) < epsilon_max
    step = first_lasting_step(is_met)
    if step is None:
        return None
    return Onset(step, f"{keys.COUNTS} at most {most:g} in {bins_with_few[step]} of {len(count_keys)} bins")


@rule(
    "bounds saturated",
    reads=(keys.BOUND_HIGH_LAST, keys.SHARE_AFTER, "clipx.target", "clipx.upper_stop", "clipx.upper_step"),
    remedy="Lower clipx.target.",
    link="docs/methods.md#bapo",
    about=("clipx.target", keys.SHARE_BEFORE),
)
def find_saturated_bounds(run: Run) -> Onset | None:
    """The rule is met while the search for the upper bound ends at its last candidate and still misses the target.

    That is: the upper bound of the step's last update is the last candidate, and the share of positive tokens is below
    the target, on average over the step's updates.
    """
    target = _find_target_share(run)
    parameters = run.record.loss.parameters
    upper_stop = parameters.get("upper_stop")
    upper_step = parameters.get("upper_step")
    if target is None or upper_stop is None or upper_step is None:
        return None
    last_high = training_values(run, keys.BOUND_HIGH_LAST)
    mean_share = training_values(run, keys.SHARE_AFTER)
    last_high, mean_share = last_high.align(mean_share, join="inner")
    # The last candidate is the stop, or less than a step below it. The bound is logged in float32, so that one that is
    # a whole step below the stop may seem to be a little nearer.
    is_last_candidate = last_high > upper_stop - upper_step + FLOAT32_TOLERANCE
    step = first_lasting_step(is_last_candidate & (mean_share < target))
    if step is None:
        return None
    return Onset(
        step,
        f"{keys.BOUND_HIGH_LAST} {last_high[step]:.3g}, {keys.SHARE_AFTER} {mean_share[step]:.3g}, target {target:g}",
    )


# Bounds that miss their target stay at their ceiling (clip_fraction) or floor (second_moment).
rule_of_limit(
    "held target out of reach",
    reads=keys.HOLD_MISSED,
    limit=0.5,
    remedy=advise_on_missed_target,
    link="docs/scopes.md#hold-a-target",
    about=("clipx.hold", keys.HOLD_MISSED),
)

# --- Samples of another policy ---------------------------------------------------------------------------------------

RATIO_IS_NOT_ONE = 1e-2
# Two passes at equal weights differ by noise. Its mean over tokens is far smaller than this.
KL_IS_NOT_ZERO = 1e-3


@rule(
    "ratio anchored to another policy",
    reads=(keys.RATIO, keys.KL, ROLLOUT_PROMPTS, MINI_BATCH),
    remedy=advise_on_anchored_ratio,
    link="docs/scopes.md#staleness",
    heuristic=True,
)
def find_anchored_ratio(run: Run) -> Onset | None:
    """The rule is met while the ratio is not 1 although each rollout batch gets a single update.

    There the ratio is 1 unless old_log_probs are another policy's.
    """
    if run.schedule.updates_a_step != 1:
        return None
    ratio = training_values(run, keys.RATIO)
    # The ratio to the policy that drew the samples is 1 on average, however old they are. Its logarithm is not 0.
    kl = training_values(run, keys.KL).reindex(ratio.index, fill_value=0.0)
    is_off = ((ratio - 1).abs() >= RATIO_IS_NOT_ONE) | (kl.abs() >= KL_IS_NOT_ZERO)
    step = first_lasting_step(is_off)
    if step is None:
        return None
    return Onset(step, f"{keys.RATIO} {ratio[step]:.4g}, {keys.KL} {kl[step]:.3g} at one update a rollout batch")


rule_of_limit(
    MISMATCH,
    reads=keys.MISMATCH,
    limit=0.02,
    remedy="Compare the precision in which the two engines compute.",
    link="docs/scopes.md#staleness",
    heuristic=True,
)

# The sampler jumps away if the mean difference reaches JUMPED, and JUMP_TIMES its highest value before.
# Smaller differences pass for rounding.
JUMPED = 1e-3
JUMP_TIMES = 4
# The difference grows if it ends at this many times what it was at the jump. Then the sampler's weights stay behind.
GROWN = 2
# The sampler left out tokens if the mean of recomputed / sampler's probability is below 1 by at least this much.
LEFT_OUT = 0.02


@rule(
    "sampler jumps away from the trainer",
    reads=(keys.MISMATCH,),
    remedy=advise_scoring_tokens,
    link="docs/certify.md",
    heuristic=True,
    voids=(MISMATCH,),
)
def find_sampler_jump(run: Run) -> Onset | None:
    """The rule is met if, for several steps, the sampler's probabilities differ from the recomputed ones by far more
    than before.
    """
    values = training_values(run, keys.MISMATCH)
    # Only samples of age 0 count. The same weights recompute them, so that only a fault makes the difference jump.
    staleness = training_values(run, keys.STALENESS).reindex(values.index, fill_value=0.0)
    values = values[staleness == 0]
    most_before = values.cummax().shift()
    limit = (JUMP_TIMES * most_before.iloc[LASTING:]).clip(lower=JUMPED).reindex(values.index)
    lowest_from_here = values[::-1].rolling(LASTING).min()[::-1]
    has_jumped = lowest_from_here >= limit
    if not has_jumped.any():
        return None
    onset = has_jumped.idxmax()
    evidence = f"{keys.MISMATCH} {values[onset]:.3g}, at most {most_before[onset]:.3g} before"
    return Onset(int(onset), f"{evidence}; {_explain_sampler_jump(run, values.loc[onset:])}")


def _explain_sampler_jump(run: Run, since: pandas.Series) -> str:
    """Say what a jump of the sampler away from the trainer looks like, from what came after it.

    Args:
        run: the run.
        since: the difference of their probabilities by step, from the jump on.
    """
    last = since.iloc[-LASTING:].median()
    if len(since) < 2 * LASTING:
        explanation = "too early to say whether of older weights or another precision, temperature or mask"
    elif last >= GROWN * since.iloc[0]:
        explanation = f"{last:.3g} in the last, which is as of weights that stay behind"
    else:
        explanation = "which is as of another precision, temperature or mask, or of weights always as late"
    # With r = recomputed / sampler's probability, both estimates of the divergence are means, of r - 1 - log r and
    # of -log r. So their difference is the mean of r - 1. For a sampler that leaves no token out, the mean of r is 1.
    mean_of_ratio_minus_1 = training_values(run, keys.SAMPLER_KL) - training_values(run, keys.SAMPLER_KL_1)
    ratio = 1 + mean_of_ratio_minus_1.loc[since.index[0] :].median()
    if ratio <= 1 - LEFT_OUT:
        explanation += (
            f"; the mean of recomputed / sampler's probability is {ratio:.3g}, as where a mask leaves tokens out"
        )
    return explanation


# The sampler has drifted away from the policy if their divergence reaches DRIFTED, and DRIFT_TIMES its highest value in
# the first steps.
DRIFTED = 0.01
DRIFT_TIMES = 4


@rule(
    "bounds idle while the sampler drifts away",
    reads=(keys.SAMPLER_KL, keys.PG_CLIPPED),
    remedy=advise_on_drifting_sampler,
    link="docs/scopes.md#staleness",
    heuristic=True,
)
def find_drifting_sampler(run: Run) -> Onset | None:
    """The rule is met while nothing is clipped, although the sampler is far away from the policy, and farther than at
    first.

    Bounds that clip nothing cannot keep the two together.
    """
    kl = training_values(run, keys.SAMPLER_KL)
    kl, clipped = kl.align(training_values(run, keys.PG_CLIPPED), join="inner")
    highest_at_first = kl.iloc[:LASTING].max()
    has_drifted = kl >= max(DRIFTED, DRIFT_TIMES * highest_at_first)
    step = first_lasting_step((clipped == 0) & has_drifted)
    if step is None:
        return None
    return Onset(
        step,
        f"{keys.PG_CLIPPED} 0, {keys.SAMPLER_KL} {kl[step]:.3g}, at most {highest_at_first:.3g} in its first steps",
    )


# A smaller share of dropped prompts hardly changes what the trained ones are like.
LEAST_DROPPED_SHARE = 0.1


@rule(
    "prompts dropped for their age",
    reads=(keys.EVICTED, ROLLOUT_PROMPTS),
    about=(keys.EVICTED,),
    remedy=advise_on_dropped_prompts,
    link="docs/scopes.md#stale-samples",
    heuristic=True,
)
def find_dropped_prompts(run: Run) -> Onset | None:
    """The rule is met while at least LEAST_DROPPED_SHARE of the prompts are dropped for their age.

    Prompts with long answers are dropped more often, because they take longer. The trained ones then differ from what
    the policy writes.
    """
    dropped = evicted_by_step(run)
    step = first_lasting_step(find_dropped_shares(run) >= LEAST_DROPPED_SHARE)
    if step is None:
        return None
    prompts = run.record.batch.prompts
    share_of_log = dropped.sum() / (dropped.sum() + prompts * len(dropped))
    mean_at_onset = dropped.loc[step:].iloc[:LASTING].mean()
    evidence = f"{keys.EVICTED} {mean_at_onset:.3g} a step beside {prompts} trained prompts"
    return Onset(step, f"{evidence}, {share_of_log:.0%} of all in this log{_say_lengths(run, dropped)}")


def find_dropped_shares(run: Run) -> pandas.Series:
    """Return, by step, which share of the prompts was dropped for its age, over as many steps as a state must last.

    It is empty if the run does not say how many prompts a step trains.
    """
    prompts = run.record.batch.prompts
    if not prompts:
        return pandas.Series(dtype=float)
    # Prompts grow old together, so that single steps drop many and others none.
    dropped = evicted_by_step(run).rolling(LASTING, min_periods=1).mean()
    return dropped / (dropped + prompts)


def _say_lengths(run: Run, dropped: pandas.Series) -> str:
    """Say how long the trained answers were on average in steps that dropped prompts and in the others.

    Args:
        run: the run.
        dropped: the number of dropped prompts by step, from `evicted_by_step`.

    Returns:
        The end of a sentence, which begins with a semicolon; empty unless the log has lengths of both kinds of steps.
    """
    lengths = training_values(run, keys.LENGTH)
    while_dropping = lengths[lengths.index.isin(dropped.index[dropped > 0])]
    in_others = lengths[lengths.index.isin(dropped.index[dropped == 0])]
    if while_dropping.empty or in_others.empty:
        return ""
    return (
        f"; {keys.LENGTH} {while_dropping.mean():.3g} in the steps that dropped prompts, {in_others.mean():.3g} in the "
        "others"
    )


# The weights of samples that the trained policy itself drew have a mean of 1 and are worth all samples. They are worth
# few samples if either of these is at most this.
WORTH_HALF = 0.5


@rule(
    "importance weights worth few samples",
    reads=(keys.WEIGHTS_MEAN, keys.WEIGHTS_SAMPLE_SIZE),
    about=(keys.WEIGHTS_MEAN, keys.WEIGHTS_SAMPLE_SIZE),
    remedy=advise_on_collapsed_weights,
    link="docs/scopes.md#rollout-correction",
    heuristic=True,
    any_of=True,
)
def find_collapsed_weights(run: Run) -> Onset | None:
    """The rule is met while the weights have a mean of at most a half, or are worth at most half of the samples.

    The product of the ratios of a long answer is near 0 for most answers and huge for a few, which verl then cuts.
    """
    columns = {}
    for key in (keys.WEIGHTS_MEAN, keys.WEIGHTS_SAMPLE_SIZE):
        values = training_values(run, key)
        if len(values):
            columns[key] = values
    weights = pandas.DataFrame(columns)
    if weights.empty:
        return None
    step = first_lasting_step((weights <= WORTH_HALF).any(axis=1))
    if step is None:
        return None
    return Onset(step, _list_values(weights.loc[step]))


def list_truncations(run: Run) -> dict[str, str]:
    """Return the settings that truncate sampling: from each setting with its value to the value that does not."""
    sampling = run.record.sampling
    truncations: dict[str, str] = {}
    if is_number(sampling.top_p) and sampling.top_p < 1:
        truncations[f"{TOP_P} {sampling.top_p:g}"] = "top_p 1"
    if isinstance(sampling.top_k, int) and sampling.top_k > 0:
        truncations[f"{TOP_K} {sampling.top_k}"] = "top_k -1"
    return truncations


def advise_whole_sampling(run: Run) -> str:
    """Advise to sample from the whole distribution."""
    return f"Sample with {' and '.join(list_truncations(run).values())}."


@rule(
    "truncated sampling",
    reads=(TOP_P, TOP_K),
    remedy=advise_whole_sampling,
    link="docs/scopes.md#staleness",
    any_of=True,
    voids=(MISMATCH,),
)
def find_truncated_sampling(run: Run) -> Onset | None:
    """The rule is met if the sampler leaves out tokens, while the loss's probabilities are over all of them."""
    truncations = list_truncations(run)
    steps = run.log.index[run.log.index > 0]
    if not truncations or not len(steps):
        return None
    return Onset(int(steps[0]), " and ".join(truncations))


# --- Gradient, reward and answers ------------------------------------------------------------------------------------

# A gradient norm explodes if it exceeds EXPLOSION times the median of all steps before it. There must be at least
# STEPS_BEFORE of them.
EXPLOSION = 100.0
STEPS_BEFORE = 5


@rule(
    "gradient explosion",
    Kind.TREND,
    reads=(keys.GRADIENT_NORM,),
    remedy="Lower actor.optim.lr.",
    link="docs/reading.md#rules",
    heuristic=True,
)
def find_gradient_explosion(run: Run) -> Onset | None:
    """The rule is met by a step far above the median of the steps before it.

    The healthy runs of docs/results/small_runs.md stay below 20 times this median.
    """
    values = training_values(run, keys.GRADIENT_NORM)
    median_before = values.expanding(STEPS_BEFORE).median().shift()
    has_exploded = (median_before > 0) & (values > EXPLOSION * median_before)
    if not has_exploded.any():
        return None
    step = int(has_exploded.idxmax())
    return Onset(step, f"{keys.GRADIENT_NORM} {values[step]:.3g}, median before {median_before[step]:.3g}")


@rule(
    REWARD_COLLAPSE,
    Kind.TREND,
    reads=(keys.REWARD,),
    remedy=advise_on_fallen_reward,
    link="docs/reading.md",
    heuristic=True,
)
def find_reward_collapse(run: Run) -> Onset | None:
    """The rule is met by a collapse, as `common.statistics.collapse` defines it."""
    values = training_values(run, keys.REWARD)
    place = collapse(values.to_numpy())
    if place is None:
        return None
    step = int(values.index[place])
    return Onset(step, _say_fall_of_reward(values, place, KEPT))


def _say_fall_of_reward(values: pandas.Series, place: int, kept: float) -> str:
    """Return the evidence of a fall: what the reward was before it, and from it on.

    Args:
        values: the reward by step.
        place: the place in `values` at which the level changed.
        kept: the part of its best below which the reward fell.
    """
    since = values.iloc[place : place + level_steps(len(values))]
    best = values.iloc[:place].max()
    evidence = f"{keys.REWARD} {since.mean():.3g} on average over {len(since)} steps, at most {best:.3g} before"
    if values.min() < 0:
        return evidence
    evidence += say_when_halved(values, best, int(values.index[place]))
    # In a slow fall, the steps after its middle don't show how far it went.
    if since.mean() >= kept * best:
        lowest = values.iloc[place:].rolling(len(since)).mean().min()
        evidence += f", {lowest:.3g} at the lowest"
    return evidence


# A level that ends below this part of its best has fallen. A held-out score has fallen below a larger part, since it is
# a mean over many answers.
KEPT_REWARD = 0.75
KEPT_HELD_OUT = 0.9


@rule(
    "reward decline",
    reads=(keys.REWARD,),
    remedy=advise_on_fallen_reward,
    link="docs/reading.md#rules",
    heuristic=True,
)
def find_reward_decline(run: Run) -> Onset | None:
    """The rule is met if the reward fell and was still low at the end, but did not fall far enough for a collapse.

    If held-out scores were logged at least twice, those of one data set must have fallen too.
    """
    values = training_values(run, keys.REWARD)
    rewards = values.to_numpy()
    place = collapse(rewards, KEPT_REWARD)
    has_collapsed = collapse(rewards) is not None
    if place is None or has_collapsed:
        return None
    # As in `collapse`, levels count from 0, or from the lowest reward if that is negative.
    zero = min(0.0, values.min())
    best_level = values.rolling(level_steps(len(values))).mean().max() - zero
    if last_level(rewards) - zero >= KEPT_REWARD * best_level:
        return None
    scores_by_key = {key: run.values(key) for key in fnmatch.filter(run.log, keys.VALIDATIONS)}
    scores_by_key = {key: scores for key, scores in scores_by_key.items() if len(scores) > 1}
    fallen = [key for key, scores in scores_by_key.items() if _has_fallen(scores)]
    # Only the training reward fell, as it does when the prompts grow harder.
    if scores_by_key and not fallen:
        return None
    evidence = f"{_say_fall_of_reward(values, place, KEPT_REWARD)}, {last_level(rewards):.3g} at the end"
    if fallen:
        scores = scores_by_key[fallen[0]]
        best_step = scores.idxmax()
        evidence += f"; {fallen[0]} {scores.iloc[-1]:.3g} at the end, {scores[best_step]:.3g} in step {best_step}"
    return Onset(int(values.index[place]), evidence)


def _has_fallen(scores: pandas.Series) -> bool:
    """Return whether held-out scores end below KEPT_HELD_OUT of their best.

    As in `collapse`, they count from 0, or from the lowest if that is negative.
    """
    zero = min(0.0, scores.min())
    return scores.iloc[-1] - zero < KEPT_HELD_OUT * (scores.max() - zero)


# From this share on, cut answers are a finding.
LEAST_CUT_SHARE = 0.25
# Answers of fewer tokens than this may all be equally long without a limit.
LEAST_LIMIT = 64


@rule(
    CUT_AT_LIMIT,
    Kind.TREND,
    reads=(keys.CUT,),
    instead=(keys.AS_LONG_AS_LONGEST, keys.LONGEST),
    remedy="Raise data.max_response_length.",
    link="docs/reading.md#health",
    heuristic=True,
)
def find_cut_responses(run: Run) -> Onset | None:
    """The rule is met while at least LEAST_CUT_SHARE of the answers end because they are as long as they may be."""
    key = keys.CUT
    values = training_values(run, key)
    if values.empty:
        # Without the plugin, this takes verl's share of responses as long as the batch's longest one. It counts in
        # steps whose longest response is as long as it may be.
        key = keys.AS_LONG_AS_LONGEST
        longest = training_values(run, keys.LONGEST)
        values = training_values(run, key)
        values = values.where(longest.reindex(values.index) >= find_response_limit(run), 0.0)
    step = first_lasting_step(values >= LEAST_CUT_SHARE)
    if step is None:
        return None
    return Onset(step, f"{key} {values[step]:.3g}, at most {values.max():.3g}")


def find_response_limit(run: Run) -> float:
    """Return the most tokens that a response may have, from the configuration or the log; infinity if unknown."""
    limit = run.record.limits.response
    if isinstance(limit, int):
        return limit
    # Without a configuration, the longest response of the whole log is taken for the limit, unless it is short.
    longest = training_values(run, keys.LONGEST).max()
    return float(longest) if longest >= LEAST_LIMIT else numpy.inf


# A trained answer has some number of tokens for each character of an answer in validation. Trained answers are short if
# this number is below this part of what it was around the first validation.
KEPT_LENGTH = 0.8
FEWEST_VALIDATIONS = 3


@rule(
    "trained answers grow shorter than validation's",
    reads=(keys.LENGTH, VALIDATION_FOLDER),
    about=(VALIDATION_FOLDER,),
    remedy=(
        "Find out what drops long answers between sampling and training: training/off_policy/evicted_samples, "
        "rejection, failed rollouts, or a limit of time."
    ),
    link="docs/scopes.md#stale-samples",
    heuristic=True,
)
def find_short_training(run: Run) -> Onset | None:
    """The rule is met from the validation on after which trained answers stay short beside the validation's answers.

    Validations count characters, and the log counts tokens. The number of characters in a token hardly changes in a
    run.
    """
    characters = {reward.step: reward.length for reward in run.held_out if numpy.isfinite(reward.length)}
    lengths = training_values(run, keys.LENGTH)
    if len(characters) < FEWEST_VALIDATIONS or len(lengths) < LASTING:
        return None
    tokens = {step: _find_length_around(lengths, step) for step in characters}
    first = min(characters)
    kept = {step: tokens[step] / tokens[first] * characters[first] / characters[step] for step in characters}
    is_short = pandas.Series(kept).sort_index() < KEPT_LENGTH
    stays_short = is_short[::-1].cummin()[::-1]
    if stays_short.sum() < 2:
        return None
    onset = int(stays_short.idxmax())
    return Onset(
        onset,
        f"{keys.LENGTH} {tokens[onset]:.4g}, {tokens[first]:.4g} around step {first}; validation's answers "
        f"{characters[onset]:.4g} characters, {characters[first]:.4g} in step {first}",
    )


def _find_length_around(lengths: pandas.Series, step: int) -> float:
    """Return the mean length of trained answers in the steps that are nearest to a validation.

    Args:
        lengths: the mean length by step, of at least LASTING steps.
        step: the step of the validation.
    """
    place = int(numpy.searchsorted(lengths.index, step))
    begin = min(max(0, place - LASTING // 2), len(lengths) - LASTING)
    return float(lengths.iloc[begin : begin + LASTING].mean())


rule_of_limit(
    "answers without a verdict",
    reads=keys.UNDECIDED,
    limit=0.1,
    remedy="Look at answers on which the verifier gives up.",
    link="docs/reading.md#health",
    about=(keys.UNDECIDED,),
    heuristic=True,
    voids=(NO_SIGNAL, FEW_TEACH),
)

# The training reward rises if its mean grows by more than this many standard errors.
LEAST_RISE = 2


@rule(
    HELD_OUT_FALLS,
    reads=(keys.VALIDATIONS, keys.REWARD),
    remedy=advise_on_fallen_held_out_score,
    link="docs/reading.md#rules",
    heuristic=True,
    voids=ADVICE_ON_TRAINING,
)
def find_held_out_fall(run: Run) -> Onset | None:
    """The rule is met by a validation whose score falls like a collapse, while the training reward is higher than it
    was around the validation's best score.

    docs/dev/diagnosis_evidence.md counts the false alarms on made-up logs.
    """
    reward = training_values(run, keys.REWARD)
    for key in fnmatch.filter(run.log, keys.VALIDATIONS):
        scores = run.values(key)
        place = collapse(scores.to_numpy(), KEPT_HELD_OUT)
        if place is None:
            continue
        best_step = scores.iloc[:place].idxmax()
        best = scores[best_step]
        since_fall = scores.iloc[place:]
        low = since_fall[since_fall < KEPT_HELD_OUT * best]
        # The mean over some validations fell. None of them need be low by itself.
        if low.empty:
            continue
        fell_at = int(low.index[0])
        around_best = _select_steps_around(reward.loc[: fell_at - 1], best_step, len(reward))
        since = reward.loc[fell_at:]
        error = _estimate_error_of_difference(reward, len(around_best), len(since))
        if since.mean() - around_best.mean() > LEAST_RISE * error:
            evidence = (
                f"{key} {low.iloc[0]:.3g}, in step {best_step} {best:.3g}; {keys.REWARD} on average "
                f"{around_best.mean():.3g} in steps {around_best.index[0]} to {around_best.index[-1]}, "
                f"{since.mean():.3g} since"
            )
            return Onset(fell_at, evidence)
    return None


def _select_steps_around(values: pandas.Series, step: int, log_steps: int) -> pandas.Series:
    """Return the values of the steps around a step: as many as a level is the mean of.

    A mean from the first step on would contain the rise at the beginning of the training.

    Args:
        values: a metric by step.
        step: the step in the middle, if there are enough steps before it.
        log_steps: how many steps the whole log has; a level is taken over a part of them.
    """
    width = max(LASTING, log_steps // PART)
    middle = values.index.searchsorted(step)
    begin = max(0, middle - width // 2)
    return values.iloc[begin : begin + width]


def _estimate_error_of_difference(values: pandas.Series, first_steps: int, second_steps: int) -> float:
    """Return the standard error of the difference of two means over steps, from how much neighbouring steps differ.

    Args:
        values: a metric by step.
        first_steps, second_steps: the number of steps over which each mean is taken.
    """
    deviation = values.diff().std() / 2**0.5
    return deviation * (1 / max(first_steps, 1) + 1 / max(second_steps, 1)) ** 0.5
