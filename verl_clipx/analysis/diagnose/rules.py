"""The rules of diagnose, each with what it reads and, as its docstring, what to do; all else follows from them."""

from fnmatch import filter as matching

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
    halved,
    lasts,
    onset_at,
    rule,
    rule_of_limit,
    trained,
)
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.evicted import evicted_by_step
from verl_clipx.analysis.runs.floor import clipped_by_step, could_exceed, exceeds, floors_of, joined, later_updates
from verl_clipx.analysis.runs.run import Run
from verl_clipx.common.statistics.collapse import KEPT, PART, collapse, last_level, level_steps
from verl_clipx.run.keys import MINI_BATCH, ROLLOUT_PROMPTS, STRATEGY, TOP_K, TOP_P, VALIDATION_FOLDER
from verl_clipx.run.sampling import is_number

__all__ = ["HELD_OUT_FALLS", "REWARD_COLLAPSE", "RULES"]

REWARD_COLLAPSE = "reward collapse"
HELD_OUT_FALLS = "held-out score falls while the training reward rises"
NO_SIGNAL = "no learning signal"
FEW_TEACH = "few prompts teach, because samples score alike"
ONE_SIDED = "one-sided clipping"
ONE_UPDATE = "bounds idle: one update a rollout batch"
MISMATCH = "mismatch of rollout and training"
CUT_AT_LIMIT = "responses cut at the limit"
# Whose advice is void where the reward, or the batch, is not what it should be.
ADVICE_ON_TRAINING = ("entropy collapse", "entropy explosion", NO_SIGNAL, FEW_TEACH, ONE_SIDED, CUT_AT_LIMIT)

# --- What is not finite ----------------------------------------------------------------------------------------------

TAKEN = "updates taken with a gradient that is not finite"
OF_NORM = {"reads": (keys.SKIPPED_UPDATES, keys.GRADIENT_NORM), "link": "docs/reading.md#health", "any_of": True}


@rule(TAKEN, Kind.FACT, about=(STRATEGY,), remedy=resume_before, **OF_NORM)
def find_taken_updates(run: Run) -> Onset | None:
    return _not_finite_updates(run) if run.fate_of_skipped == "taken" else None


@rule("skipped updates", Kind.FACT, remedy=explain_skipped, **OF_NORM)
def find_skipped_updates(run: Run) -> Onset | None:
    # verl skips an update whose gradient is not finite, but under Megatron takes it.
    return _not_finite_updates(run) if run.fate_of_skipped != "taken" else None


def steps_skipped(run: Run) -> list[int]:
    """Returns the steps with such an update: by the plugin's count or, in a log without it, by the gradient's norm."""
    if keys.SKIPPED_UPDATES not in run.log:
        return run.not_finite.get(keys.GRADIENT_NORM, [])
    counts = run.log[keys.SKIPPED_UPDATES]
    return list(counts.index[counts > 0])


def _not_finite_updates(run: Run) -> Onset | None:
    """Finds the first step with an update whose gradient is not finite, and counts such updates since."""
    steps = steps_skipped(run)
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
    fate = run.fate_of_skipped
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
    # Means and figures leave these values out.
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
    # W&B's own keys begin with an underscore.
    others = [key for key in keys_not_finite(run) if not (is_of_training(key) or key.startswith("_"))]
    return _onset_of_first({f"{key} in {_steps(len(run.not_finite[key]))}": run.not_finite[key][0] for key in others})


def keys_not_finite(run: Run) -> list[str]:
    """Returns what was logged as a value that is not finite and should be, the first causes first."""
    unsaid = {*run.not_finite} - keys.MAY_BE_NAN
    # That the gradient is not finite is what a skipped update says, unless the log counts none.
    if steps_skipped(run):
        unsaid -= {keys.GRADIENT_NORM}
    causes = [key for key in keys.FIRST_CAUSES if key in unsaid]
    return [*causes, *sorted(unsaid - {*causes})]


def is_of_training(key: str) -> bool:
    """Returns whether the training computes from a metric, so that it is broken where this is not finite."""
    return key == keys.HELD_OUT or key.startswith(keys.OF_TRAINING)


MOST_NAMED = 6


def _onset_of_first(begins: dict[str, int]) -> Onset | None:
    """Returns the first step of several values that are not finite, and names the first of these."""
    if not begins:
        return None
    named = list(begins)[:MOST_NAMED]
    if len(begins) > MOST_NAMED:
        named.append(f"and {len(begins) - MOST_NAMED} more")
    return Onset(min(begins.values()), f"not finite: {'; '.join(named)}")


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


# --- Entropy ---------------------------------------------------------------------------------------------------------

ENTROPY_LEFT = 0.05


@rule("entropy collapse", Kind.TREND, reads=(keys.ENTROPY,), remedy=keep_entropy, link="docs/faq.md", heuristic=True)
def find_entropy_collapse(run: Run) -> Onset | None:
    # Little is left of its highest value in the first steps: healthy runs of docs/results/small_runs.md keep 9 %.
    values = trained(run, keys.ENTROPY)
    # The highest of them, since a quick collapse begins within these steps.
    begun_at = values.iloc[:LASTING].max()
    if not begun_at > 0:
        return None
    step = lasts(values < ENTROPY_LEFT * begun_at)
    evidence = "{} {:.3g}, at most {:.3g} in its first steps{}"
    return onset_at(
        step, lambda onset: evidence.format(keys.ENTROPY, values[onset], begun_at, halved(values, begun_at, onset))
    )


# An entropy far above where it began, of which e^5 is as of about 150 equally likely tokens.
ENTROPY_TIMES = 5
ENTROPY_FROM = 1.0
ENTROPY_TWICE = 2
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
    # It is far above its first step, and high: no healthy run of docs/dev/diagnosis_evidence.md is for as long.
    values = trained(run, keys.ENTROPY)
    # Not of the first three, since a quick explosion lies within them.
    first = values.iloc[:1].max()
    risen = (values > max(ENTROPY_TIMES * first, ENTROPY_FROM)) | (values > max(ENTROPY_TWICE * first, ENTROPY_HIGH))
    return onset_at(lasts(risen), lambda onset: f"{keys.ENTROPY} {values[onset]:.3g}, {first:.3g} in its first step")


# --- Whether anything teaches ----------------------------------------------------------------------------------------

# Of equal scores, whose mean is rounded, GRPO's advantages can be as far from 0.
ADVANTAGE_IS_ZERO = 1e-6
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
    # No advantage differs from 0, so that none has a gradient; without a log of them, all prompts are alike.
    lowest = keys.LOWEST_ADVANTAGE
    highest = keys.HIGHEST_ADVANTAGE
    sides = pandas.DataFrame({key: trained(run, key) for key in (lowest, highest)}).dropna()
    if sides.empty:
        alike = trained(run, keys.ALIKE)
        return onset_at(lasts(alike == 1), lambda onset: f"{keys.ALIKE} 1, at most {alike.max():g}")
    furthest = sides.abs().max(axis=1)
    scores = run.values(keys.HIGHEST_REWARD) - run.values(keys.LOWEST_REWARD)
    equal = scores.reindex(furthest.index) == 0
    none = (furthest <= ADVANTAGE_IS_ZERO) | (equal & (furthest <= ADVANTAGE_OF_EQUALS))
    evidence = f"{lowest} {{:.3g}}, {highest} {{:.3g}}, as good as 0 in {none.sum()} of {len(none)} steps"
    return onset_at(lasts(none), lambda onset: evidence.format(sides[lowest][onset], sides[highest][onset]))


@rule(
    "one batch trained again and again",
    Kind.TREND,
    reads=(keys.REWARD, keys.LENGTH),
    link="docs/reading.md#rules",
    voids=ADVICE_ON_TRAINING,
)
def find_repeated_batch(run: Run) -> Onset | None:
    """Look at the queue that serves the batches."""
    # Mean score and mean length, both of many samples, are each exactly what they were in an earlier step.
    means = pandas.DataFrame({key: trained(run, key) for key in (keys.REWARD, keys.LENGTH)}).dropna()
    again = means.duplicated() & (means[keys.LENGTH] % 1 != 0)
    evidence = f"{keys.REWARD} {{:.6g}} and {keys.LENGTH} {{:.6g}} as in an earlier step, in {again.sum()} steps"
    return onset_at(lasts(again), lambda onset: evidence.format(*means.loc[onset]))


# Such prompts have advantage 0, so fewer than a tenth teach.
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

ONE_SIDE = 0.98
WORTH_CLIPPING = 0.01
LONG = 5
# Differences that float32 may leave.
RATIO_IS_ONE = 1e-6


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
    # Nearly all that is clipped is on one side, where it matters; of 75 healthy runs one was so in a few steps.
    sides = pandas.DataFrame({key: trained(run, key) for key in (keys.CLIPPED_LOW, keys.CLIPPED_HIGH)}).dropna()
    total = sides.sum(axis=1)
    step = lasts((total >= WORTH_CLIPPING) & (sides.max(axis=1) >= ONE_SIDE * total), LONG) if len(sides) else None
    return onset_at(step, lambda onset: ", ".join(f"{key} {share:.3g}" for key, share in sides.loc[onset].items()))


@rule(
    ONE_UPDATE,
    reads=(keys.RATIO, keys.KL),
    remedy=make_more_updates,
    link="docs/scopes.md",
)
def find_single_updates(run: Run) -> Onset | None:
    updates = run.schedule.updates_on_batch
    ratio = trained(run, keys.RATIO)
    kl = trained(run, keys.KL)
    # An update that verl skipped leaves the ratio at 1 whatever the mini-batch.
    if steps_skipped(run) or ratio.empty or kl.empty:
        return None
    # In half precision rounding moves both, and a run that logs its floor says that nothing else does.
    rounds = run.schedule.only_at_ratio_one and keys.FLOOR_LOW in run.log
    if not rounds and ((ratio - 1).abs().max() >= RATIO_IS_ONE or kl.abs().max() >= RATIO_IS_ONE):
        return None
    # Several updates stay at ratio 1 where nothing moves the policy, which is another finding.
    if updates is None and not moves(run):
        return None
    if updates is not None and updates > 1:
        return None
    if rounds and keys.CLIPPED_LOW in run.log:
        clipped = trained(run, keys.CLIPPED_LOW).add(trained(run, keys.CLIPPED_HIGH)).max()
        what = f"{keys.CLIPPED_LOW} and {keys.CLIPPED_HIGH} at most {clipped:.3g} together"
        return Onset(int(ratio.index[0]), f"{what} in all {len(ratio)} steps, at weights that had not moved")
    return Onset(int(ratio.index[0]), f"{keys.RATIO} 1 and {keys.KL} 0 in all {len(ratio)} steps")


# Steps whose tokens are counted together, and how few clipped ones among them say nothing.
WINDOW, FEWEST_CLIPPED = 5, 30


@rule(
    "clipping can't be told from rounding",
    reads=(keys.CLIPPED_LOW, keys.CLIPPED_HIGH, keys.FLOOR_LOW, keys.FLOOR_HIGH, keys.FLOOR_TOKENS),
    link="docs/floor.md",
    about=(keys.FLOOR_LOW,),
)
def find_clipping_of_rounding(run: Run) -> Onset | None:
    """Cut old_log_probs and updates into the same micro-batches (it costs nothing), compute the logits in float32 (time
    and memory), widen the bounds (they then also clip less of what moved), or leave it.
    """
    # Rounding also moves tokens that are near a bound for good reasons, so nothing says that it is rounding.
    table = clipped_by_step(run)
    steps = table.index[WINDOW - 1 :]
    alike = [clips_like_floor(run, table.loc[:step].tail(WINDOW)) for step in steps]
    step = lasts(pandas.Series(alike, index=steps, dtype=bool))
    if step is None:
        return None
    window = table.loc[:step].tail(WINDOW)
    later, (first, *second) = later_updates(window), floors_of(run, window)
    evidence = f"{keys.CLIPPED_LOW} and {keys.CLIPPED_HIGH} {later.share:.3g} together in later updates "
    evidence += (
        f"({later.clipped:.0f} of {later.tokens:.0f} tokens), {first.share:.3g} in first ones ({keys.FLOOR_LOW} "
    )
    evidence += f"and {keys.FLOOR_HIGH})"
    if second:
        evidence += f", {second[0].share:.3g} in other micro-batches ({keys.RECUT_LOW} and {keys.RECUT_HIGH})"
    return Onset(int(window.index[0]), evidence)


def clips_like_floor(run: Run, window: pandas.DataFrame) -> bool:
    """Returns whether later updates clip no larger share than the floor, of enough tokens to tell.

    Args:
        window: some rows of `clipped_by_step`.
    """
    later, floor = later_updates(window), joined(floors_of(run, window))
    if later.clipped < FEWEST_CLIPPED or exceeds(later, floor):
        return False
    # Where a rollout batch has many updates, the first ones have so few tokens that chance explains that none of them
    # is clipped, whatever the later ones clip.
    return could_exceed(later, floor)


def moves(run: Run) -> bool:
    """Returns whether the log shows that updates move the policy: they have a gradient, and a rate if it is logged."""
    rate = run.values(keys.LEARNING_RATE)
    has_rate = rate.empty or bool((rate > 0).any())
    return has_rate and bool((run.values(keys.GRADIENT_NORM) > 0).any())


def _target(run: Run) -> float | None:
    """Returns the target of the search, if it is a target for the share that is logged."""
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
    # By the search's own condition: the share is at or above the target in every step, and the bounds are constant.
    share = trained(run, keys.SHARE_BEFORE)
    after = trained(run, keys.SHARE_AFTER)
    target = _target(run)
    bounds = [trained(run, key) for key in (keys.BOUND_LOW, keys.BOUND_HIGH)]
    idle = all(len(bound) and bound.max() - bound.min() < RATIO_IS_ONE for bound in bounds)
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
    # Among n tokens none lies further than √(n − 1) standard deviations from their mean: too few in most bins.
    names = keys.of_bins("count", run.log.columns)
    alpha = run.record.loss.parameters.get("alpha")
    if not names or alpha is None:
        return None
    counts = run.log.loc[run.log.index > 0, names].dropna()
    most = alpha**2 + 1
    few = ((counts > 0) & (counts <= most)).sum(axis=1)
    evidence = f"{keys.COUNTS} at most {most:g} in {{}} of {len(names)} bins"
    return onset_at(lasts(few > len(names) / 2), lambda onset: evidence.format(few[onset]))


@rule(
    "bounds saturated",
    reads=(keys.BOUND_HIGH_LAST, keys.SHARE_AFTER, "clipx.target", "clipx.upper_stop", "clipx.upper_step"),
    link="docs/methods.md#bapo",
    about=("clipx.target", keys.SHARE_BEFORE),
)
def find_saturated_bounds(run: Run) -> Onset | None:
    """Lower clipx.target."""
    # The upper bound is the last candidate and the target is missed: the search has nowhere left to go.
    target = _target(run)
    stop, by = (run.record.loss.parameters.get(name) for name in ("upper_stop", "upper_step"))
    high, share = trained(run, keys.BOUND_HIGH_LAST).align(trained(run, keys.SHARE_AFTER), join="inner")
    # The last candidate is the stop, or less than a step below it.
    step = None if None in (target, stop, by) else lasts((high > stop - by + RATIO_IS_ONE) & (share < target))
    evidence = "{} {:.3g}, {} {:.3g}, target {:g}"
    return onset_at(
        step, lambda onset: evidence.format(keys.BOUND_HIGH_LAST, high[onset], keys.SHARE_AFTER, share[onset], target)
    )


# The bounds then stay at their ceiling (clip_fraction) or floor (second_moment).
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
    # The first update's ratio is 1 unless its old log-probabilities are another policy's.
    ratio = trained(run, keys.RATIO)
    # The mean ratio of samples to the policy that drew them is 1, however old they are; its logarithm's is not 0.
    kl = trained(run, keys.KL).reindex(ratio.index, fill_value=0.0)
    moved = ((ratio - 1).abs() >= RATIO_IS_NOT_ONE) | (kl.abs() >= KL_IS_NOT_ZERO)
    step = lasts(moved) if run.schedule.updates_a_step == 1 else None
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

# A probability that differs by a thousandth passes for rounding, and so does four times the most before.
JUMPED = 1e-3
JUMP_TIMES = 4
GROWN = 2
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
    # Samples of age 0 are of the weights that recompute them, so that the engines differ as much as they did before.
    values = trained(run, keys.MISMATCH)
    values = values[trained(run, keys.STALENESS).reindex(values.index, fill_value=0.0) == 0]
    before = values.cummax().shift()
    lowest = values[::-1].rolling(LASTING).min()[::-1]
    jumped = values.index[lowest >= (JUMP_TIMES * before.iloc[LASTING:]).clip(lower=JUMPED).reindex(values.index)]
    if not len(jumped):
        return None
    onset = jumped[0]
    last = values.iloc[-LASTING:].median()
    says = "which is as of another precision, temperature or mask, or of weights always as late"
    if len(values.loc[onset:]) < 2 * LASTING:
        says = "too early to say whether of older weights or another precision, temperature or mask"
    elif last >= GROWN * values[onset]:
        says = f"{last:.3g} in the last, which is as of weights that stay behind"
    # By both estimates of the divergence: of a sampler that leaves no token out this is 1.
    ratio = 1 + (trained(run, keys.SAMPLER_KL) - trained(run, keys.SAMPLER_KL_1)).loc[onset:].median()
    if ratio <= 1 - LEFT_OUT:
        says += f"; the mean of recomputed / sampler's probability is {ratio:.3g}, as where a mask leaves tokens out"
    return Onset(int(onset), f"{keys.MISMATCH} {values[onset]:.3g}, at most {before[onset]:.3g} before; {says}")


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
    # Nothing is clipped, although the policy is far from the one that sampled, and farther than it was at first.
    kl, clipped = trained(run, keys.SAMPLER_KL).align(trained(run, keys.PG_CLIPPED), join="inner")
    first = kl.iloc[:LASTING].max()
    step = lasts((clipped == 0) & (kl >= max(DRIFTED, DRIFT_TIMES * first)))
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
    # Old groups are those with long answers, so that what is left differs from what the policy writes.
    evicted = evicted_by_step(run)
    shares = evicted_shares(run)
    step = lasts(shares >= IS_EVICTED)
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
    lengths = trained(run, keys.LENGTH)
    dropping = lengths[lengths.index.isin(evicted.index[evicted > 0])]
    others = lengths[lengths.index.isin(evicted.index[evicted == 0])]
    if dropping.empty or others.empty:
        return ""
    return f"; {keys.LENGTH} {dropping.mean():.3g} in steps that drop some, {others.mean():.3g} in others"


# The weights of samples from the trained policy itself have a mean of 1, and are worth all samples.
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
    # The product over a long answer is near 0 for most answers and huge for a few, which verl then cuts.
    logged = {key: trained(run, key) for key in (keys.WEIGHTS_MEAN, keys.WEIGHTS_SAMPLE_SIZE)}
    weights = pandas.DataFrame({key: values for key, values in logged.items() if len(values)})
    if weights.empty:
        return None
    step = lasts((weights <= WORTH_HALF).any(axis=1))
    return onset_at(step, lambda onset: ", ".join(f"{key} {value:.3g}" for key, value in weights.loc[onset].items()))


def truncations(run: Run) -> dict[str, str]:
    """Returns what cuts the sampled distribution: evidence, and the value that would not."""
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
    # The loss's probabilities are of the whole distribution.
    cuts = truncations(run)
    steps = run.log.index[run.log.index > 0]
    if not cuts or not len(steps):
        return None
    return Onset(int(steps[0]), " and ".join(cuts))


# --- Gradient, reward and answers ------------------------------------------------------------------------------------

EXPLOSION = 100.0
STEPS_BEFORE = 5


@rule("gradient explosion", Kind.TREND, reads=(keys.GRADIENT_NORM,), link="docs/reading.md#rules", heuristic=True)
def find_gradient_explosion(run: Run) -> Onset | None:
    """Lower actor.optim.lr."""
    # It is far above its median before: healthy runs of docs/results/small_runs.md stay below 20 times theirs.
    values = trained(run, keys.GRADIENT_NORM)
    before = values.expanding(STEPS_BEFORE).median().shift()
    wide = values.index[(before > 0) & (values > EXPLOSION * before)]
    step = wide[0] if len(wide) else None
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
    # The report's own definition of a collapse.
    values = trained(run, keys.REWARD)
    place = collapse(values.to_numpy())
    if place is None:
        return None
    step = int(values.index[place])
    return Onset(step, _fall_of_reward(values, place, KEPT))


def _fall_of_reward(values: pandas.Series, place: int, kept: float) -> str:
    """Says what the reward was before and from the place on at which its level changed.

    Args:
        kept: the part of its best that the reward fell below.
    """
    since = values.iloc[place : place + level_steps(len(values))]
    best = values.iloc[:place].max()
    evidence = f"{keys.REWARD} {since.mean():.3g} on average over {len(since)} steps, at most {best:.3g} before"
    if values.min() < 0:
        return evidence
    evidence += halved(values, best, int(values.index[place]))
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
    # It fell for good, though not to the quarter of a collapse, and so did a held-out score, if there is one.
    values = trained(run, keys.REWARD)
    rewards = values.to_numpy()
    place = collapse(rewards, KEPT_REWARD)
    if place is None or collapse(rewards) is not None:
        return None
    lowest = min(0.0, values.min())
    best = values.rolling(level_steps(len(values))).mean().max() - lowest
    if last_level(rewards) - lowest >= KEPT_REWARD * best:
        return None
    validations = {key: run.values(key) for key in matching(run.log, keys.VALIDATIONS)}
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
    key = keys.CUT
    values = trained(run, keys.CUT)
    if values.empty:
        # verl counts responses as long as the batch's longest, which are cut where that is as long as may be.
        key = keys.AS_LONG_AS_LONGEST
        longest = trained(run, keys.LONGEST)
        limit = response_limit(run)
        values = trained(run, key)
        values = values.where(longest.reindex(values.index) >= limit, 0.0)
    return onset_at(lasts(values >= ARE_CUT), lambda onset: f"{key} {values[onset]:.3g}, at most {values.max():.3g}")


def response_limit(run: Run) -> float:
    """Returns the most tokens of a response, by the configuration or by the log; infinity if neither tells them."""
    limit = run.record.limits.response
    if isinstance(limit, int):
        return limit
    # So many responses of exactly the greatest length of a whole log are cut there.
    longest = trained(run, keys.LONGEST).max()
    return float(longest) if longest >= LEAST_LIMIT else numpy.inf


# Trained tokens for each character that validation writes, as a share of what they were at the first validation.
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
    # The policy writes longer answers, but what it is trained on does not follow. Characters are not tokens, but
    # how many characters a token has hardly changes in a run.
    written = {validation.step: validation.length for validation in run.held_out if numpy.isfinite(validation.length)}
    lengths = trained(run, keys.LENGTH)
    if len(written) < FEWEST_VALIDATIONS or len(lengths) < LASTING:
        return None
    around = {step: _length_around(lengths, step) for step in written}
    first = min(written)
    kept = pandas.Series({step: around[step] / around[first] * written[first] / written[step] for step in written})
    short = kept.sort_index() < KEPT_LENGTH
    # From its onset on, to the end of the log.
    ends = short[::-1].cummin()[::-1]
    if ends.sum() < 2:
        return None
    onset = int(ends.idxmax())
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

# Standard errors by which the training reward's mean must be higher, from the differences of neighbouring steps.
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
    # A collapse of the validations; docs/dev/diagnosis_evidence.md counts its false alarms on made-up ones.
    reward = trained(run, keys.REWARD)
    for key in matching(run.log, keys.VALIDATIONS):
        values = run.values(key)
        place = collapse(values.to_numpy(), KEPT_HELD_OUT)
        if place is None:
            continue
        best = values.iloc[:place].idxmax()
        since_fall = values.iloc[place:]
        low = since_fall[since_fall < KEPT_HELD_OUT * values[best]]
        fell = low.index[0] if len(low) else numpy.inf
        before = reward.loc[: fell - 1]
        since = reward.loc[fell:]
        # Steps around the best score: a mean from the first step on has the climb of the start.
        width = max(LASTING, len(reward) // PART)
        around = before.iloc[max(0, before.index.searchsorted(best) - width // 2) :][:width]
        error = reward.diff().std() / 2**0.5 * (1 / max(len(around), 1) + 1 / max(len(since), 1)) ** 0.5
        if since.mean() - around.mean() > RISES * error:
            steps = f"in steps {around.index[0]} to {around.index[-1]}"
            what = f"{key} {low.iloc[0]:.3g}, in step {best} {values[best]:.3g}; {keys.REWARD} on average "
            return Onset(int(fell), f"{what}{around.mean():.3g} {steps}, {since.mean():.3g} since")
    return None
