"""The rules of diagnose.

Each is a function that finds the onset in a run, with the comment in its first line saying when the rule is met. What
to do is its docstring, or a function of `remedies` that is named as `remedy`.
"""

import fnmatch

import numpy
import pandas

from verl_clipx.analysis.diagnose.remedies import (
    calm_entropy,
    change_prompts,
    correct_sampler,
    explain_skipped,
    fill_bins,
    find_signal,
    go_back_before_fall,
    go_back_to_best,
    keep_entropy,
    keep_old_groups,
    make_more_updates,
    name_sources,
    raise_target,
    recompute_ratio,
    resume_before,
    score_tokens,
    weigh_tokens,
    widen_side,
)
from verl_clipx.analysis.diagnose.rule import (
    LASTING,
    RULES,
    Kind,
    Onset,
    first_lasting_step,
    onset_at,
    rule,
    rule_of_limit,
    say_when_halved,
    training_values,
)
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.evicted import evicted_by_step
from verl_clipx.analysis.runs.floor import clipped_by_step, could_exceed, exceeds, floors_of, joined, later_updates
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
# Rules whose advice is void where the reward, or the batch, is not what it should be.
ADVICE_ON_TRAINING = ("entropy collapse", "entropy explosion", NO_SIGNAL, FEW_TEACH, ONE_SIDED, CUT_AT_LIMIT)

# --- What is not finite ----------------------------------------------------------------------------------------------

TAKEN = "updates taken with a gradient that is not finite"
OF_NORM = {"reads": (keys.SKIPPED_UPDATES, keys.GRADIENT_NORM), "link": "docs/reading.md#health", "any_of": True}


@rule(TAKEN, Kind.FACT, about=(STRATEGY,), remedy=resume_before, **OF_NORM)
def find_taken_updates(run: Run) -> Onset | None:
    # Met by an update whose gradient is not finite, under Megatron, where verl takes it.
    return _find_not_finite_updates(run) if run.takes_not_finite_updates else None


@rule("skipped updates", Kind.FACT, remedy=explain_skipped, **OF_NORM)
def find_skipped_updates(run: Run) -> Onset | None:
    # Met by an update whose gradient is not finite, under every other engine, where verl skips it.
    return None if run.takes_not_finite_updates else _find_not_finite_updates(run)


def steps_with_not_finite_gradient(run: Run) -> list[int]:
    """Returns the steps with an update whose gradient is not finite.

    The plugin counts such updates. In a log without its count, the gradient's norm is not finite in these steps.
    """
    if keys.SKIPPED_UPDATES not in run.log:
        return run.not_finite.get(keys.GRADIENT_NORM, [])
    counts = run.log[keys.SKIPPED_UPDATES]
    return list(counts.index[counts > 0])


def _find_not_finite_updates(run: Run) -> Onset | None:
    """Finds the first step with an update whose gradient is not finite, and counts such updates since."""
    steps = steps_with_not_finite_gradient(run)
    if not steps:
        return None
    trained_since = int((run.log.index >= steps[0]).sum())
    evidence = _count_not_finite_updates(run, steps, trained_since)
    ranks = run.values(keys.NOT_FINITE_RANK)
    if len(ranks):
        # -1: it came up in the backward pass.
        evidence += f", first on rank {int(ranks.iloc[0])}" if ranks.iloc[0] >= 0 else ", in the gradient only"
    return Onset(int(steps[0]), evidence)


def _count_not_finite_updates(run: Run, steps: list[int], trained_since: int) -> str:
    """Says how many updates had a gradient that is not finite, and what became of them.

    Args:
        steps: those with such an update.
        trained_since: how many steps were trained since the first of them.
    """
    if run.takes_not_finite_updates is None:
        fate = "skipped or taken, depending on the engine,"
    else:
        fate = "taken" if run.takes_not_finite_updates else "skipped"
    updates = run.log[keys.SKIPPED_UPDATES][steps].sum() if keys.SKIPPED_UPDATES in run.log else numpy.nan
    if not numpy.isfinite(updates):
        return f"updates {fate} in {len(steps)} of {trained_since} steps since, how many this log does not say"
    # 0 where the run's record does not say how many updates a step has.
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
    remedy=name_sources,
    link="docs/reading.md#health",
    any_of=True,
)
def find_values_not_finite(run: Run) -> Onset | None:
    # Met by such a value in a field that the plugin checks, or in a metric of the training's own numbers. Means and
    # figures leave these values out, so that nothing else shows them.
    begins: dict[str, int] = {}
    for key, what in keys.HEALTH_COUNTS.items():
        counts = run.values(key)
        counts = counts[counts > 0]
        if len(counts):
            begins[f"{what} of {int(counts.sum())} responses in {_steps(len(counts))}"] = int(counts.index[0])
    for key in keys_not_finite(run):
        if is_of_training(key):
            steps = run.not_finite[key]
            begins[f"{key} in {_steps(len(steps))}"] = steps[0]
    return _onset_of_first(begins)


@rule("other logged values that are not finite", reads=("*",), link="docs/reading.md#health")
def find_others_not_finite(run: Run) -> Onset | None:
    """Check whether what computes them had nothing to compute from: the training itself does not read them."""
    # Met by such a value in any other metric but W&B's own, whose keys begin with an underscore.
    others = [key for key in keys_not_finite(run) if not (is_of_training(key) or key.startswith("_"))]
    return _onset_of_first({f"{key} in {_steps(len(run.not_finite[key]))}": run.not_finite[key][0] for key in others})


def keys_not_finite(run: Run) -> list[str]:
    """Returns the metrics that were logged as a value that is not finite and should be.

    Those from which the others follow come first, then the others by name. The gradient's norm is left out where the
    rules about updates report it already.
    """
    reported = set(keys.MAY_BE_NAN)
    if steps_with_not_finite_gradient(run):
        reported.add(keys.GRADIENT_NORM)
    unreported = set(run.not_finite) - reported
    causes = [key for key in keys.FIRST_CAUSES if key in unreported]
    return [*causes, *sorted(unreported.difference(causes))]


def is_of_training(key: str) -> bool:
    """Returns whether the training computes from a metric, so that it is broken where this is not finite."""
    return key == keys.HELD_OUT or key.startswith(keys.OF_TRAINING)


# A finding names this many values that are not finite.
MOST_NAMED = 6


def _onset_of_first(begins: dict[str, int]) -> Onset | None:
    """Returns the onset of values that are not finite; None if there are none.

    Args:
        begins: from what a sentence says of such a value to the first step that has it, the likeliest cause first.
    """
    if not begins:
        return None
    named = list(begins)[:MOST_NAMED]
    if len(begins) > MOST_NAMED:
        named.append(f"and {len(begins) - MOST_NAMED} more")
    return Onset(min(begins.values()), f"not finite: {'; '.join(named)}")


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


# --- Entropy ---------------------------------------------------------------------------------------------------------

# Healthy runs of docs/results/small_runs.md keep 9 % of their entropy.
ENTROPY_LEFT = 0.05


@rule("entropy collapse", Kind.TREND, reads=(keys.ENTROPY,), remedy=keep_entropy, link="docs/faq.md", heuristic=True)
def find_entropy_collapse(run: Run) -> Onset | None:
    # Met while the entropy is below ENTROPY_LEFT of what it was in the first steps.
    values = training_values(run, keys.ENTROPY)
    # The highest of the first steps, since a quick collapse begins within them.
    begun_at = values.iloc[:LASTING].max()
    if not begun_at > 0:
        return None
    step = first_lasting_step(values < ENTROPY_LEFT * begun_at)
    evidence = "{} {:.3g}, at most {:.3g} in its first steps{}"
    return onset_at(
        step,
        lambda onset: evidence.format(keys.ENTROPY, values[onset], begun_at, say_when_halved(values, begun_at, onset)),
    )


# An entropy explodes if it exceeds either limit: five times the first one and 1, or twice the first one and 5, which is
# the entropy of about 150 equally likely tokens.
ENTROPY_TIMES = 5
ENTROPY_FROM = 1.0
ENTROPY_TIMES_IF_HIGH = 2
ENTROPY_HIGH = 5.0


@rule(
    "entropy explosion",
    Kind.TREND,
    reads=(keys.ENTROPY,),
    remedy=calm_entropy,
    link="docs/faq.md",
    heuristic=True,
)
def find_entropy_explosion(run: Run) -> Onset | None:
    # Met while the entropy is high and far above its first step. No healthy run of docs/dev/diagnosis_evidence.md is
    # for so many steps.
    values = training_values(run, keys.ENTROPY)
    # The first step alone, since a quick explosion lies within the first three.
    first = values.iloc[:1].max()
    limit = max(ENTROPY_TIMES * first, ENTROPY_FROM)
    limit_if_high = max(ENTROPY_TIMES_IF_HIGH * first, ENTROPY_HIGH)
    risen = (values > limit) | (values > limit_if_high)
    return onset_at(
        first_lasting_step(risen), lambda onset: f"{keys.ENTROPY} {values[onset]:.3g}, {first:.3g} in its first step"
    )


# --- Whether anything teaches ----------------------------------------------------------------------------------------

ADVANTAGE_IS_ZERO = 1e-6
# GRPO's advantages of equal scores can be this far from 0, since the mean of the scores is rounded.
ADVANTAGE_OF_EQUALS = 0.1


@rule(
    NO_SIGNAL,
    Kind.TREND,
    reads=(keys.LOWEST_ADVANTAGE, keys.HIGHEST_ADVANTAGE, keys.ALIKE),
    remedy=find_signal,
    link="docs/reading.md#health",
    any_of=True,
    voids=(FEW_TEACH, ONE_UPDATE),
)
def find_no_signal(run: Run) -> Onset | None:
    # Met while no advantage differs from 0, so that no token has a gradient. Where advantages are not logged, it is met
    # while all samples of each prompt score alike.
    lowest = keys.LOWEST_ADVANTAGE
    highest = keys.HIGHEST_ADVANTAGE
    sides = pandas.DataFrame({key: training_values(run, key) for key in (lowest, highest)}).dropna()
    if sides.empty:
        alike = training_values(run, keys.ALIKE)
        return onset_at(first_lasting_step(alike == 1), lambda onset: f"{keys.ALIKE} 1, at most {alike.max():g}")
    furthest = sides.abs().max(axis=1)
    scores = run.values(keys.HIGHEST_REWARD) - run.values(keys.LOWEST_REWARD)
    equal = scores.reindex(furthest.index) == 0
    none = (furthest <= ADVANTAGE_IS_ZERO) | (equal & (furthest <= ADVANTAGE_OF_EQUALS))
    evidence = f"{lowest} {{:.3g}}, {highest} {{:.3g}}, as good as 0 in {none.sum()} of {len(none)} steps"
    return onset_at(
        first_lasting_step(none), lambda onset: evidence.format(sides[lowest][onset], sides[highest][onset])
    )


@rule(
    "one batch trained again and again",
    Kind.TREND,
    reads=(keys.REWARD, keys.LENGTH),
    link="docs/reading.md#rules",
    voids=ADVICE_ON_TRAINING,
)
def find_repeated_batch(run: Run) -> Onset | None:
    """Look at the queue that serves the batches."""
    # Met while both the mean score and the mean length of the samples are exactly those of an earlier step. A mean
    # length that is a whole number is left out: all answers may be of one length.
    means = pandas.DataFrame({key: training_values(run, key) for key in (keys.REWARD, keys.LENGTH)}).dropna()
    again = means.duplicated() & (means[keys.LENGTH] % 1 != 0)
    evidence = f"{keys.REWARD} {{:.6g}} and {keys.LENGTH} {{:.6g}} as in an earlier step, in {again.sum()} steps"
    return onset_at(first_lasting_step(again), lambda onset: evidence.format(*means.loc[onset]))


# Prompts whose samples score alike have advantage 0: if they are nine tenths, only a tenth of the prompts teaches.
rule_of_limit(
    FEW_TEACH,
    Kind.TREND,
    reads=keys.ALIKE,
    limit=0.9,
    remedy=change_prompts,
    link="docs/reading.md#health",
    heuristic=True,
)

# --- Clipping and bounds ---------------------------------------------------------------------------------------------

# Clipping is one-sided if this part of it is on one side, where it concerns at least this share of the tokens and for
# this many steps in a row.
ONE_SIDE = 0.98
WORTH_CLIPPING = 0.01
LONG = 5
# How far rounding in float32 may take a value from the one that it stands for.
FLOAT32_TOLERANCE = 1e-6


def widen_clipped_side(run: Run) -> str:
    """Names the bound that nearly all clipped tokens are beyond."""
    step = find_one_sided_clipping(run).step
    side = "low" if run.values(keys.CLIPPED_LOW)[step] > run.values(keys.CLIPPED_HIGH)[step] else "high"
    return widen_side(run, side)


@rule(
    ONE_SIDED,
    Kind.TREND,
    reads=(keys.CLIPPED_LOW, keys.CLIPPED_HIGH),
    remedy=widen_clipped_side,
    link="docs/methods.md",
    heuristic=True,
)
def find_one_sided_clipping(run: Run) -> Onset | None:
    # Met while nearly all clipped tokens are on one side. Of 75 healthy runs one was so in a few steps.
    sides = pandas.DataFrame({key: training_values(run, key) for key in (keys.CLIPPED_LOW, keys.CLIPPED_HIGH)}).dropna()
    total = sides.sum(axis=1)
    step = (
        first_lasting_step((total >= WORTH_CLIPPING) & (sides.max(axis=1) >= ONE_SIDE * total), LONG)
        if len(sides)
        else None
    )
    return onset_at(step, lambda onset: ", ".join(f"{key} {share:.3g}" for key, share in sides.loc[onset].items()))


@rule(
    ONE_UPDATE,
    reads=(keys.RATIO, keys.KL),
    remedy=make_more_updates,
    link="docs/scopes.md",
)
def find_single_updates(run: Run) -> Onset | None:
    # Met where the ratio is 1 in the whole log because each rollout batch gets a single update, so that no bound acts.
    ratio = training_values(run, keys.RATIO)
    kl = training_values(run, keys.KL)
    if ratio.empty or kl.empty:
        return None
    # A skipped update leaves the ratio at 1 however many updates a rollout batch gets.
    if steps_with_not_finite_gradient(run):
        return None
    updates = run.schedule.updates_on_batch
    if updates is not None and updates > 1:
        return None
    # A policy that nothing moves stays at ratio 1 too, in however many updates.
    if updates is None and not moves(run):
        return None
    first_step = int(ratio.index[0])
    if only_rounding_moves(run):
        if keys.CLIPPED_LOW in run.log:
            clipped = training_values(run, keys.CLIPPED_LOW).add(training_values(run, keys.CLIPPED_HIGH)).max()
            evidence = f"{keys.CLIPPED_LOW} and {keys.CLIPPED_HIGH} at most {clipped:.3g} together"
            return Onset(first_step, f"{evidence} in all {len(ratio)} steps, at weights that had not moved")
    else:
        furthest = max((ratio - 1).abs().max(), kl.abs().max())
        if furthest >= FLOAT32_TOLERANCE:
            return None
    return Onset(first_step, f"{keys.RATIO} 1 and {keys.KL} 0 in all {len(ratio)} steps")


def only_rounding_moves(run: Run) -> bool:
    """Returns whether nothing but rounding takes the ratio away from 1 in a whole run.

    The configuration then gives each rollout batch a single update, at the weights that computed `old_log_probs`. The
    worker logs the floor only of an update at these weights: that it did confirms the configuration.
    """
    return run.schedule.only_at_ratio_one and keys.FLOOR_LOW in run.log


# Later updates are compared with the floor over this many steps together, if they clip at least this many tokens there.
WINDOW = 5
FEWEST_CLIPPED = 30


@rule(
    ROUNDING,
    reads=(keys.CLIPPED_LOW, keys.CLIPPED_HIGH, keys.FLOOR_LOW, keys.FLOOR_HIGH, keys.FLOOR_TOKENS),
    link="docs/floor.md",
    about=(keys.FLOOR_LOW,),
)
def find_clipping_of_rounding(run: Run) -> Onset | None:
    """Cut old_log_probs and updates into the same micro-batches (it costs nothing), compute the logits in float32 (time
    and memory), widen the bounds (they then also clip less of what moved), or leave it.
    """
    # Met while the later updates on a rollout batch clip no larger share of the tokens than its first update, the
    # floor, whose weights have not moved. This does not show that the later clipping is rounding: rounding also moves
    # tokens that lie near a bound for good reasons.
    counts_by_step = clipped_by_step(run)
    last_steps = counts_by_step.index[WINDOW - 1 :]
    like_floor = [clips_like_floor(run, counts_by_step.loc[:step].tail(WINDOW)) for step in last_steps]
    step = first_lasting_step(pandas.Series(like_floor, index=last_steps, dtype=bool))
    if step is None:
        return None
    window = counts_by_step.loc[:step].tail(WINDOW)
    return Onset(int(window.index[0]), _say_clipped_like_floor(run, window))


def clips_like_floor(run: Run, window: pandas.DataFrame) -> bool:
    """Returns whether later updates clip no larger share than the floor, where enough tokens were counted to tell.

    Args:
        window: consecutive rows of `clipped_by_step`, whose tokens are counted together.
    """
    later = later_updates(window)
    floor = joined(floors_of(run, window))
    if later.clipped < FEWEST_CLIPPED:
        return False
    if exceeds(later, floor):
        return False
    # Where a rollout batch gets many updates, the first ones have few tokens. If so few that even a floor of 0 would
    # not be exceeded, nothing can be told.
    return could_exceed(later, floor)


def _say_clipped_like_floor(run: Run, window: pandas.DataFrame) -> str:
    """Returns the evidence: the shares that later updates, first updates and the floor's second measurement clip.

    Args:
        window: as for `clips_like_floor`.
    """
    later = later_updates(window)
    first, *second_measurement = floors_of(run, window)
    parts = [
        f"{keys.CLIPPED_LOW} and {keys.CLIPPED_HIGH} {later.share:.3g} together in later updates "
        f"({later.clipped:.0f} of {later.tokens:.0f} tokens)",
        f"{first.share:.3g} in first ones ({keys.FLOOR_LOW} and {keys.FLOOR_HIGH})",
    ]
    for recut in second_measurement:
        parts.append(f"{recut.share:.3g} in other micro-batches ({keys.RECUT_LOW} and {keys.RECUT_HIGH})")
    return ", ".join(parts)


def moves(run: Run) -> bool:
    """Returns whether the log shows that updates move the policy: they have a gradient, and a rate if it is logged."""
    rate = run.values(keys.LEARNING_RATE)
    has_rate = rate.empty or bool((rate > 0).any())
    return has_rate and bool((run.values(keys.GRADIENT_NORM) > 0).any())


def _target(run: Run) -> float | None:
    """Returns BAPO's target for the share of positive tokens; None if its search has a target for something else."""
    parameters = run.record.loss.parameters
    is_share = parameters.get("contribution", "share") == "share"
    return parameters.get("target") if is_share else None


@rule(
    "bounds idle: the search never started",
    reads=(keys.SHARE_BEFORE, keys.SHARE_AFTER, keys.BOUND_LOW, keys.BOUND_HIGH, "clipx.target"),
    link="docs/methods.md#bapo",
    about=("clipx.target", keys.SHARE_BEFORE),
)
def find_search_not_started(run: Run) -> Onset | None:
    """Raise clipx.target."""
    # Met where the share was at the target or above before every search, which is why the search moved no bound.
    share = training_values(run, keys.SHARE_BEFORE)
    after = training_values(run, keys.SHARE_AFTER)
    target = _target(run)
    bounds = [training_values(run, key) for key in (keys.BOUND_LOW, keys.BOUND_HIGH)]
    idle = all(len(bound) and bound.max() - bound.min() < FLOAT32_TOLERANCE for bound in bounds)
    if target is None or share.empty or after.empty or not idle or share.min() < target:
        return None
    return Onset(int(share.index[0]), f"{keys.SHARE_BEFORE} {share.min():.3g} or more, target {target:g}")


@rule(
    "bounds idle: too few tokens a bin",
    reads=(keys.COUNTS, "clipx.alpha"),
    remedy=fill_bins,
    link="docs/methods.md#acpo",
    about=("clipx.alpha", keys.COUNTS),
)
def find_few_tokens(run: Run) -> Onset | None:
    # Met while most bins have so few tokens that none can lie outside the bounds: of n tokens none lies further than
    # √(n − 1) standard deviations from their mean, and the bounds are at alpha standard deviations.
    names = keys.of_bins("count", run.log.columns)
    alpha = run.record.loss.parameters.get("alpha")
    if not names or alpha is None:
        return None
    counts = run.log.loc[run.log.index > 0, names].dropna()
    most = alpha**2 + 1
    few = ((counts > 0) & (counts <= most)).sum(axis=1)
    evidence = f"{keys.COUNTS} at most {most:g} in {{}} of {len(names)} bins"
    return onset_at(first_lasting_step(few > len(names) / 2), lambda onset: evidence.format(few[onset]))


@rule(
    "bounds saturated",
    reads=(keys.BOUND_HIGH_LAST, keys.SHARE_AFTER, "clipx.target", "clipx.upper_stop", "clipx.upper_step"),
    link="docs/methods.md#bapo",
    about=("clipx.target", keys.SHARE_BEFORE),
)
def find_saturated_bounds(run: Run) -> Onset | None:
    """Lower clipx.target."""
    # Met while the upper bound is the search's last candidate and the target is still missed.
    target = _target(run)
    parameters = run.record.loss.parameters
    upper_stop = parameters.get("upper_stop")
    upper_step = parameters.get("upper_step")
    if target is None or upper_stop is None or upper_step is None:
        return None
    high = training_values(run, keys.BOUND_HIGH_LAST)
    share = training_values(run, keys.SHARE_AFTER)
    high, share = high.align(share, join="inner")
    # The last candidate is the stop, or less than a step below it.
    is_last = high > upper_stop - upper_step + FLOAT32_TOLERANCE
    evidence = "{} {:.3g}, {} {:.3g}, target {:g}"
    return onset_at(
        first_lasting_step(is_last & (share < target)),
        lambda onset: evidence.format(keys.BOUND_HIGH_LAST, high[onset], keys.SHARE_AFTER, share[onset], target),
    )


# Bounds that miss their target stay at their ceiling (clip_fraction) or floor (second_moment).
rule_of_limit(
    "held target out of reach",
    reads=keys.HOLD_MISSED,
    limit=0.5,
    remedy=raise_target,
    link="docs/scopes.md#hold-a-target",
    about=("clipx.hold", keys.HOLD_MISSED),
)

# --- Samples of another policy ---------------------------------------------------------------------------------------

RATIO_IS_NOT_ONE = 1e-2
# Two passes at equal weights differ by noise, whose mean over tokens is far smaller than this.
KL_IS_NOT_ZERO = 1e-3


@rule(
    "ratio anchored to another policy",
    reads=(keys.RATIO, keys.KL, ROLLOUT_PROMPTS, MINI_BATCH),
    remedy=recompute_ratio,
    link="docs/scopes.md#staleness",
    heuristic=True,
)
def find_anchored_ratio(run: Run) -> Onset | None:
    # Met while the ratio is not 1 although each rollout batch gets a single update, at which it is 1 unless
    # old_log_probs are another policy's.
    ratio = training_values(run, keys.RATIO)
    # The ratio to the policy that drew the samples is 1 on average, however old they are; its logarithm is not 0.
    kl = training_values(run, keys.KL).reindex(ratio.index, fill_value=0.0)
    moved = ((ratio - 1).abs() >= RATIO_IS_NOT_ONE) | (kl.abs() >= KL_IS_NOT_ZERO)
    step = first_lasting_step(moved) if run.schedule.updates_a_step == 1 else None
    evidence = "{} {:.4g}, {} {:.3g} at one update a rollout batch"
    return onset_at(step, lambda onset: evidence.format(keys.RATIO, ratio[onset], keys.KL, kl[onset]))


rule_of_limit(
    MISMATCH,
    reads=keys.MISMATCH,
    limit=0.02,
    remedy="Compare the precision in which the two engines compute.",
    link="docs/scopes.md#staleness",
    heuristic=True,
)

# Probabilities that differ by less than a thousandth on average, or by less than four times the most before, pass for
# rounding.
JUMPED = 1e-3
JUMP_TIMES = 4
# The difference grows if it ends at this many times what it was at the jump: the sampler's weights stay behind.
GROWN = 2
# A mean of recomputed over sampler's probability that is below 1 by this much shows tokens that the sampler left out.
LEFT_OUT = 0.02


@rule(
    "sampler jumps away from the trainer",
    reads=(keys.MISMATCH,),
    remedy=score_tokens,
    link="docs/certify.md",
    heuristic=True,
    voids=(MISMATCH,),
)
def find_sampler_jump(run: Run) -> Onset | None:
    # Met once the sampler's probabilities differ from the recomputed ones by far more than before, for several steps.
    values = training_values(run, keys.MISMATCH)
    # Only samples of age 0 count: the same weights recompute them, so that only a fault makes the difference jump.
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
    """Says what a jump of the sampler away from the trainer looks like, by what came after it.

    Args:
        since: the difference of their probabilities by step, from the jump on.
    """
    last = since.iloc[-LASTING:].median()
    if len(since) < 2 * LASTING:
        explanation = "too early to say whether of older weights or another precision, temperature or mask"
    elif last >= GROWN * since.iloc[0]:
        explanation = f"{last:.3g} in the last, which is as of weights that stay behind"
    else:
        explanation = "which is as of another precision, temperature or mask, or of weights always as late"
    # The mean of the recomputed over the sampler's probability, by both estimates of the divergence; it is 1 for a
    # sampler that leaves no token out.
    excess = training_values(run, keys.SAMPLER_KL) - training_values(run, keys.SAMPLER_KL_1)
    ratio = 1 + excess.loc[since.index[0] :].median()
    if ratio <= 1 - LEFT_OUT:
        explanation += (
            f"; the mean of recomputed / sampler's probability is {ratio:.3g}, as where a mask leaves tokens out"
        )
    return explanation


# The sampler has drifted away if the divergence reaches this, and this many times the most of the first steps.
DRIFTED = 0.01
DRIFT_TIMES = 4


@rule(
    "bounds idle while the sampler drifts away",
    reads=(keys.SAMPLER_KL, keys.PG_CLIPPED),
    remedy=correct_sampler,
    link="docs/scopes.md#staleness",
    heuristic=True,
)
def find_drifting_sampler(run: Run) -> Onset | None:
    # Met while nothing is clipped, although the policy is far from the one that sampled, and farther than at first.
    kl = training_values(run, keys.SAMPLER_KL)
    kl, clipped = kl.align(training_values(run, keys.PG_CLIPPED), join="inner")
    first = kl.iloc[:LASTING].max()
    step = first_lasting_step((clipped == 0) & (kl >= max(DRIFTED, DRIFT_TIMES * first)))
    evidence = f"{keys.PG_CLIPPED} 0, {keys.SAMPLER_KL} {{:.3g}}, at most {first:.3g} in its first steps"
    return onset_at(step, lambda onset: evidence.format(kl[onset]))


# A tenth of what was generated: less hardly changes what the rest is like.
IS_EVICTED = 0.1


@rule(
    "prompts dropped for their age",
    reads=(keys.EVICTED, ROLLOUT_PROMPTS),
    about=(keys.EVICTED,),
    remedy=keep_old_groups,
    link="docs/scopes.md#stale-samples",
    heuristic=True,
)
def find_evicted_groups(run: Run) -> Onset | None:
    # Met while at least IS_EVICTED of the prompts are dropped. Those with long answers grow old, so that the trained
    # ones differ from what the policy writes.
    evicted = evicted_by_step(run)
    shares = evicted_shares(run)
    step = first_lasting_step(shares >= IS_EVICTED)
    if step is None:
        return None
    prompts = run.record.batch.prompts
    whole = evicted.sum() / (evicted.sum() + prompts * len(evicted))
    begun = evicted.loc[step:].iloc[:LASTING].mean()
    evidence = f"{keys.EVICTED} {begun:.3g} a step beside {prompts} trained prompts, {whole:.0%} of all in this log"
    return Onset(step, evidence + _length_while_evicting(run, evicted))


def evicted_shares(run: Run) -> pandas.Series:
    """Returns which share of a step's prompts was dropped for its age, over as many steps as a state must last.

    Empty if the run does not say how many prompts a step trains.
    """
    prompts = run.record.batch.prompts
    if not prompts:
        return pandas.Series(dtype=float)
    # Groups grow old together, so that single steps drop many and others none.
    evicted = evicted_by_step(run).rolling(LASTING, min_periods=1).mean()
    return evicted / (evicted + prompts)


def _length_while_evicting(run: Run, evicted: pandas.Series) -> str:
    """Says how long the trained answers were in steps that dropped prompts and in the others; nothing if all did."""
    lengths = training_values(run, keys.LENGTH)
    dropping = lengths[lengths.index.isin(evicted.index[evicted > 0])]
    others = lengths[lengths.index.isin(evicted.index[evicted == 0])]
    if dropping.empty or others.empty:
        return ""
    return f"; {keys.LENGTH} {dropping.mean():.3g} in steps that drop some, {others.mean():.3g} in others"


# The weights of samples that the trained policy itself drew have a mean of 1 and are worth all samples.
WORTH_HALF = 0.5


@rule(
    "importance weights worth few samples",
    reads=(keys.WEIGHTS_MEAN, keys.WEIGHTS_SAMPLE_SIZE),
    about=(keys.WEIGHTS_MEAN, keys.WEIGHTS_SAMPLE_SIZE),
    remedy=weigh_tokens,
    link="docs/scopes.md#rollout-correction",
    heuristic=True,
    any_of=True,
)
def find_collapsed_weights(run: Run) -> Onset | None:
    # Met while the weights have a mean of at most a half, or are worth at most half of the samples. The product of the
    # ratios of a long answer is near 0 for most answers and huge for a few, which verl then cuts.
    logged = {key: training_values(run, key) for key in (keys.WEIGHTS_MEAN, keys.WEIGHTS_SAMPLE_SIZE)}
    weights = pandas.DataFrame({key: values for key, values in logged.items() if len(values)})
    if weights.empty:
        return None
    step = first_lasting_step((weights <= WORTH_HALF).any(axis=1))
    return onset_at(step, lambda onset: ", ".join(f"{key} {value:.3g}" for key, value in weights.loc[onset].items()))


def truncations(run: Run) -> dict[str, str]:
    """Returns, for each option that cuts the sampled distribution, the evidence with the value that would not."""
    sampling = run.record.sampling
    cuts: dict[str, str] = {}
    if is_number(sampling.top_p) and sampling.top_p < 1:
        cuts[f"{TOP_P} {sampling.top_p:g}"] = "top_p 1"
    if isinstance(sampling.top_k, int) and sampling.top_k > 0:
        cuts[f"{TOP_K} {sampling.top_k}"] = "top_k -1"
    return cuts


def sample_whole(run: Run) -> str:
    """Advises to sample from the whole distribution."""
    return f"Sample with {' and '.join(truncations(run).values())}."


@rule(
    "truncated sampling",
    reads=(TOP_P, TOP_K),
    remedy=sample_whole,
    link="docs/scopes.md#staleness",
    any_of=True,
    voids=(MISMATCH,),
)
def find_truncated_sampling(run: Run) -> Onset | None:
    # Met where the sampler leaves out tokens, while the loss's probabilities are those of the whole distribution.
    cuts = truncations(run)
    steps = run.log.index[run.log.index > 0]
    if not cuts or not len(steps):
        return None
    return Onset(int(steps[0]), " and ".join(cuts))


# --- Gradient, reward and answers ------------------------------------------------------------------------------------

# A gradient norm explodes at this many times the median of all steps before, of which there are at least so many.
EXPLOSION = 100.0
STEPS_BEFORE = 5


@rule("gradient explosion", Kind.TREND, reads=(keys.GRADIENT_NORM,), link="docs/reading.md#rules", heuristic=True)
def find_gradient_explosion(run: Run) -> Onset | None:
    """Lower actor.optim.lr."""
    # Met by a step far above the median before: healthy runs of docs/results/small_runs.md stay below 20 times theirs.
    values = training_values(run, keys.GRADIENT_NORM)
    before = values.expanding(STEPS_BEFORE).median().shift()
    has_exploded = (before > 0) & (values > EXPLOSION * before)
    step = has_exploded.idxmax() if has_exploded.any() else None
    return onset_at(step, lambda onset: f"{keys.GRADIENT_NORM} {values[onset]:.3g}, median before {before[onset]:.3g}")


@rule(
    REWARD_COLLAPSE,
    Kind.TREND,
    reads=(keys.REWARD,),
    remedy=go_back_before_fall,
    link="docs/reading.md",
    heuristic=True,
)
def find_reward_collapse(run: Run) -> Onset | None:
    # Met by a collapse as the report defines it.
    values = training_values(run, keys.REWARD)
    place = collapse(values.to_numpy())
    if place is None:
        return None
    step = int(values.index[place])
    return Onset(step, _fall_of_reward(values, place, KEPT))


def _fall_of_reward(values: pandas.Series, place: int, kept: float) -> str:
    """Returns the evidence of a fall: what the reward was before it, and from it on.

    Args:
        values: the reward by step.
        place: the place in `values` at which the level changed.
        kept: the part of its best that the reward fell below.
    """
    since = values.iloc[place : place + level_steps(len(values))]
    best = values.iloc[:place].max()
    evidence = f"{keys.REWARD} {since.mean():.3g} on average over {len(since)} steps, at most {best:.3g} before"
    if values.min() < 0:
        return evidence
    evidence += say_when_halved(values, best, int(values.index[place]))
    # Of a slow fall, the steps after its middle don't show how far it went.
    if since.mean() >= kept * best:
        lowest = values.iloc[place:].rolling(len(since)).mean().min()
        evidence += f", {lowest:.3g} at the lowest"
    return evidence


# A level that ends below this part of its best has fallen; that of validations, which are fewer, may keep more.
KEPT_REWARD = 0.75
KEPT_HELD_OUT = 0.9


@rule(
    "reward decline",
    reads=(keys.REWARD,),
    remedy=go_back_before_fall,
    link="docs/reading.md#rules",
    heuristic=True,
)
def find_reward_decline(run: Run) -> Onset | None:
    # Met where the reward fell for good, though not far enough for a collapse, and a held-out score, if there is one,
    # fell too.
    values = training_values(run, keys.REWARD)
    rewards = values.to_numpy()
    place = collapse(rewards, KEPT_REWARD)
    if place is None or collapse(rewards) is not None:
        return None
    lowest = min(0.0, values.min())
    best = values.rolling(level_steps(len(values))).mean().max() - lowest
    if last_level(rewards) - lowest >= KEPT_REWARD * best:
        return None
    validations = {key: run.values(key) for key in fnmatch.filter(run.log, keys.VALIDATIONS)}
    validated = {key: scores for key, scores in validations.items() if len(scores) > 1}
    fallen = [key for key, scores in validated.items() if scores.iloc[-1] < KEPT_HELD_OUT * scores.max()]
    # Of harder prompts, say, only the training reward falls.
    if validated and not fallen:
        return None
    evidence = f"{_fall_of_reward(values, place, KEPT_REWARD)}, {last_level(rewards):.3g} at the end"
    if fallen:
        scores = validated[fallen[0]]
        best_step = scores.idxmax()
        evidence += f"; {fallen[0]} {scores.iloc[-1]:.3g} at the end, in step {best_step} {scores[best_step]:.3g}"
    return Onset(int(values.index[place]), evidence)


# The share of cut answers from which they are a finding.
ARE_CUT = 0.25
# Answers of fewer tokens than this may all be equally long without a limit.
LEAST_LIMIT = 64


@rule(
    CUT_AT_LIMIT,
    Kind.TREND,
    reads=(keys.CUT,),
    instead=(keys.AS_LONG_AS_LONGEST, keys.LONGEST),
    link="docs/reading.md#health",
    heuristic=True,
)
def find_cut_responses(run: Run) -> Onset | None:
    """Raise data.max_response_length."""
    # Met while ARE_CUT of the answers or more end because they are as long as they may be.
    key = keys.CUT
    values = training_values(run, key)
    if values.empty:
        # Without the plugin, verl's count of responses as long as the batch's longest serves, in steps whose longest
        # response is as long as it may be.
        key = keys.AS_LONG_AS_LONGEST
        longest = training_values(run, keys.LONGEST)
        limit = response_limit(run)
        values = training_values(run, key)
        values = values.where(longest.reindex(values.index) >= limit, 0.0)
    return onset_at(
        first_lasting_step(values >= ARE_CUT), lambda onset: f"{key} {values[onset]:.3g}, at most {values.max():.3g}"
    )


def response_limit(run: Run) -> float:
    """Returns the most tokens of a response, by the configuration or by the log; infinity if neither tells them."""
    limit = run.record.limits.response
    if isinstance(limit, int):
        return limit
    # Without a configuration, the longest response of the whole log is taken for the limit, unless it is short.
    longest = training_values(run, keys.LONGEST).max()
    return float(longest) if longest >= LEAST_LIMIT else numpy.inf


# Trained answers are short if they have less than this part of the tokens for each character that validation writes, as
# compared with the first validation.
KEPT_LENGTH = 0.8
FEWEST_VALIDATIONS = 3


@rule(
    "trained answers grow shorter than validation's",
    reads=(keys.LENGTH, VALIDATION_FOLDER),
    about=(VALIDATION_FOLDER,),
    link="docs/scopes.md#stale-samples",
    heuristic=True,
)
def find_short_training(run: Run) -> Onset | None:
    """Find out what drops long answers between sampling and training: training/off_policy/evicted_samples, rejection,
    failed rollouts, or a limit of time.
    """
    # Met from a validation on after which trained answers stay short beside what the policy writes there. Characters
    # are not tokens, but how many characters a token has hardly changes in a run.
    written = {validation.step: validation.length for validation in run.held_out if numpy.isfinite(validation.length)}
    lengths = training_values(run, keys.LENGTH)
    if len(written) < FEWEST_VALIDATIONS or len(lengths) < LASTING:
        return None
    around = {step: _length_around(lengths, step) for step in written}
    first = min(written)
    kept = pandas.Series({step: around[step] / around[first] * written[first] / written[step] for step in written})
    short = kept.sort_index() < KEPT_LENGTH
    stays_short = short[::-1].cummin()[::-1]
    if stays_short.sum() < 2:
        return None
    onset = int(stays_short.idxmax())
    wrote = f"validation's answers {written[onset]:.4g} characters, {written[first]:.4g} in step {first}"
    return Onset(onset, f"{keys.LENGTH} {around[onset]:.4g}, {around[first]:.4g} around step {first}; {wrote}")


def _length_around(lengths: pandas.Series, step: int) -> float:
    """Returns the mean length of trained answers in the steps that are nearest to a validation."""
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

# The training reward rises if its mean grows by this many standard errors.
RISES = 2


@rule(
    HELD_OUT_FALLS,
    reads=(keys.VALIDATIONS, keys.REWARD),
    remedy=go_back_to_best,
    link="docs/reading.md#rules",
    heuristic=True,
    voids=ADVICE_ON_TRAINING,
)
def find_held_out_fall(run: Run) -> Onset | None:
    # Met by a validation whose score falls like a collapse, while the training reward is higher than around its best.
    # docs/dev/diagnosis_evidence.md counts the false alarms on made-up logs.
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
        # The means over some validations fell: no single one of them need be low.
        if low.empty:
            continue
        fell_at = int(low.index[0])
        around_best = _steps_around(reward.loc[: fell_at - 1], best_step, len(reward))
        since = reward.loc[fell_at:]
        if since.mean() - around_best.mean() > RISES * _error_of_difference(reward, len(around_best), len(since)):
            evidence = (
                f"{key} {low.iloc[0]:.3g}, in step {best_step} {best:.3g}; {keys.REWARD} on average "
                f"{around_best.mean():.3g} in steps {around_best.index[0]} to {around_best.index[-1]}, "
                f"{since.mean():.3g} since"
            )
            return Onset(fell_at, evidence)
    return None


def _steps_around(values: pandas.Series, step: int, log_steps: int) -> pandas.Series:
    """Returns the values of as many steps around a step as a level is taken over.

    A mean from the first step on would have the climb of the start in it.

    Args:
        values: a metric by step.
        step: the step in the middle, if there are as many before and after it.
        log_steps: how many steps the whole log has, of which a level is a part.
    """
    width = max(LASTING, log_steps // PART)
    middle = values.index.searchsorted(step)
    begin = max(0, middle - width // 2)
    return values.iloc[begin : begin + width]


def _error_of_difference(values: pandas.Series, first_steps: int, second_steps: int) -> float:
    """Returns the standard error of the difference of two means over steps, from how much neighbouring steps differ.

    Args:
        values: a metric by step.
        first_steps, second_steps: over how many of its steps each mean is taken.
    """
    deviation = values.diff().std() / 2**0.5
    return deviation * (1 / max(first_steps, 1) + 1 / max(second_steps, 1)) ** 0.5
