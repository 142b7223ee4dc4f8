"""The rules of diagnose, each with what it reads and, as its docstring, what to do; all else follows from them."""

from fnmatch import filter as matching

import numpy
import pandas

from verl_clipx.common.statistics.collapse import PART, collapse
from verl_clipx.diagnose.rule import LASTING, RULES, Kind, Onset, halved, lasts, onset_at, rule, rule_of_limit, trained
from verl_clipx.runs import keys
from verl_clipx.runs.run import Run

__all__ = ["HELD_OUT_FALLS", "REWARD_COLLAPSE", "RULES"]

REWARD_COLLAPSE = "reward collapse"
HELD_OUT_FALLS = "held-out score falls while the training reward rises"

# --- What is not finite ----------------------------------------------------------------------------------------------


def named_in_output(run: Run) -> str:
    """Says where values that are not finite are named: only this plugin does."""
    if any(key in run.log for key in (keys.SKIPPED_UPDATES, *keys.HEALTH_COUNTS)):
        return "Look at the prompts and fields that the run's output names."
    return "Run again with +clipx=observe, whose output names rank, fields and prompts."


def after_skipped(run: Run) -> str:
    """Says what skipped updates leave, and what to look at."""
    the = "The" if run.fate_of_skipped == "skipped" else "If skipped, the"
    return f"{the} policy stayed as it was, so that such a step shows less of the method. {named_in_output(run)}"


TAKEN = "updates taken with a gradient that is not finite"
OF_NORM = {"reads": (keys.SKIPPED_UPDATES, keys.GRADIENT_NORM), "link": "docs/reading.md#health", "any_of": True}


@rule(TAKEN, Kind.FACT, about=("actor_rollout_ref.actor.strategy",), **OF_NORM)
def find_taken_updates(run: Run) -> Onset | None:
    """The weights may not be finite since: resume from a checkpoint before."""
    return _not_finite_updates(run) if run.fate_of_skipped == "taken" else None


@rule("skipped updates", Kind.FACT, remedy=after_skipped, **OF_NORM)
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
    steps, fate, updates = steps_skipped(run), run.fate_of_skipped, numpy.nan
    if not steps:
        return None
    trained = int((run.log.index >= steps[0]).sum())
    count = f"updates {fate} in {len(steps)} of {trained} steps since, how many this log does not say"
    if keys.SKIPPED_UPDATES in run.log:
        updates = run.log[keys.SKIPPED_UPDATES][steps].sum()
    if numpy.isfinite(updates):
        all_updates = (run.schedule.updates_a_step or 0) * trained
        of_all = f" of {all_updates}" if all_updates >= updates else ""
        count = f"{updates:.0f}{of_all} update{'' if updates == 1 and not of_all else 's'} {fate} since"
    ranks = run.values(keys.NOT_FINITE_RANK)
    if len(ranks):
        # -1: it came up in the backward pass.
        count += f", first on rank {int(ranks.iloc[0])}" if ranks.iloc[0] >= 0 else ", in the gradient only"
    return Onset(int(steps[0]), count)


# That the gradient is not finite is what a skipped update says.
OTHER_FINITE = tuple(key for key in keys.FINITE if key != keys.GRADIENT_NORM)


@rule(
    "values that are not finite",
    Kind.FACT,
    reads=(*keys.HEALTH_COUNTS, *OTHER_FINITE),
    remedy=named_in_output,
    link="docs/reading.md#health",
    any_of=True,
)
def find_values_not_finite(run: Run) -> Onset | None:
    # Means and figures leave these values out.
    begins: dict[str, int] = {}
    for key, what in keys.HEALTH_COUNTS.items():
        counts = run.values(key)
        if len(counts := counts[counts > 0]):
            begins[f"{what} of {int(counts.sum())} responses in {_steps(len(counts))}"] = int(counts.index[0])
    begins |= {f"{key} in {_steps(len(at))}": at[0] for key in OTHER_FINITE if (at := run.not_finite.get(key))}
    return Onset(min(begins.values()), f"not finite: {'; '.join(begins)}") if begins else None


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count > 1)}"


# --- Entropy ---------------------------------------------------------------------------------------------------------

DAPO = 1.28
ENTROPY_LEFT = 0.05


def more_entropy(run: Run) -> str:
    """Advises against a collapse of entropy: a higher bound or, if it is DAPO's or higher, another method."""
    ours = run.configuration.get("clipx.method", "observe") != "observe"
    bound = run.configuration.get("clipx.clip_high" if ours else "actor_rollout_ref.actor.clip_ratio_high")
    high = bound + (not ours) if isinstance(bound, int | float) else 0.0
    if high < DAPO:
        return f"Raise the upper bound{f' of {high:g}' * (high > 0)} to {DAPO} (+clipx=dapo)."
    other = "cispo" if run.method == "acpo" else "acpo"
    return f"The upper bound is {high:g} already: take +clipx={other}, which gives improbable tokens more room."


@rule("entropy collapse", Kind.TREND, reads=(keys.ENTROPY,), remedy=more_entropy, link="docs/faq.md", heuristic=True)
def find_entropy_collapse(run: Run) -> Onset | None:
    # Of its greatest value in the first steps little is left: healthy runs of docs/results/cpu_small.md keep 9 %.
    values = trained(run, keys.ENTROPY)
    # The greatest, since a quick collapse lies within these steps.
    first = values.iloc[:LASTING].max()
    step = lasts(values < ENTROPY_LEFT * first) if first > 0 else None
    evidence = "{} {:.3g}, at most {:.3g} in its first steps{}"
    return onset_at(step, lambda at: evidence.format(keys.ENTROPY, values[at], first, halved(values, first, at)))


# An entropy far above where it began, of which e^5 is as of about 150 equally likely tokens.
ENTROPY_TIMES, ENTROPY_FROM, ENTROPY_TWICE, ENTROPY_HIGH = 5, 1.0, 2, 5.0


@rule("entropy explosion", Kind.TREND, reads=(keys.ENTROPY,), link="docs/faq.md", heuristic=True)
def find_entropy_explosion(run: Run) -> Onset | None:
    """Go back to a checkpoint before, with a lower actor.optim.lr."""
    # It is far above its first step, and high: no healthy run of docs/dev/diagnosis_evidence.md is for as long.
    values = trained(run, keys.ENTROPY)
    # Not of the first three, since a quick explosion lies within them.
    first = values.iloc[:1].max()
    risen = (values > max(ENTROPY_TIMES * first, ENTROPY_FROM)) | (values > max(ENTROPY_TWICE * first, ENTROPY_HIGH))
    return onset_at(lasts(risen), lambda at: f"{keys.ENTROPY} {values[at]:.3g}, {first:.3g} in its first step")


# --- Whether anything teaches ----------------------------------------------------------------------------------------

# Of equal scores, whose mean is rounded, GRPO's advantages can be as far from 0.
ADVANTAGE_IS_ZERO, ADVANTAGE_OF_EQUALS = 1e-6, 0.1


def other_prompts(run: Run) -> str:
    """Advises harder or easier prompts where samples score alike, if the log says what they score."""
    mean, low, high = (run.values(key) for key in (keys.REWARD, keys.LOWEST_REWARD, keys.HIGHEST_REWARD))
    if mean.empty or not low.min() < high.max():
        return "Take prompts whose samples score differently."
    score = f"The mean score is {mean.iloc[-1]:.3g} in the last step, of {low.min():g} to {high.max():g} in all steps"
    return f"{score}: take {'harder' if mean.iloc[-1] > (low.min() + high.max()) / 2 else 'easier'} prompts."


def some_signal(run: Run) -> str:
    """Advises where no advantage differs from 0: whether the prompts are all solved, or none scores, or they differ."""
    low, high = (run.values(key) for key in (keys.LOWEST_REWARD, keys.HIGHEST_REWARD))
    if low.empty or not low.tail(1).equals(high.tail(1)):
        return other_prompts(run)
    # A score that never changed is the greatest if it is above 0, as scores of 0 and 1 are.
    score, least = low.iloc[-1], min(low.min(), 0.0)
    said = f"All samples of the last step score {score:g}"
    if score > least and score >= high.max():
        return f"{said}, the most in this log, so nothing is left to learn: take harder prompts."
    return f"{said}, so nothing is learned: look whether the reward function reads the answers as it should."


@rule(
    "no learning signal",
    Kind.TREND,
    reads=(keys.LOWEST_ADVANTAGE, keys.HIGHEST_ADVANTAGE, keys.ALIKE),
    remedy=some_signal,
    link="docs/reading.md#health",
    any_of=True,
)
def find_no_signal(run: Run) -> Onset | None:
    # No advantage differs from 0, so that none has a gradient; without a log of them, all prompts are alike.
    lowest, highest = keys.LOWEST_ADVANTAGE, keys.HIGHEST_ADVANTAGE
    sides = pandas.DataFrame({key: trained(run, key) for key in (lowest, highest)}).dropna()
    if sides.empty:
        alike = trained(run, keys.ALIKE)
        return onset_at(lasts(alike == 1), lambda at: f"{keys.ALIKE} 1, at most {alike.max():g}")
    furthest, scores = sides.abs().max(axis=1), run.values(keys.HIGHEST_REWARD) - run.values(keys.LOWEST_REWARD)
    equal = scores.reindex(furthest.index) == 0
    none = (furthest <= ADVANTAGE_IS_ZERO) | (equal & (furthest <= ADVANTAGE_OF_EQUALS))
    evidence = f"{lowest} {{:.3g}}, {highest} {{:.3g}}, as good as 0 in {none.sum()} of {len(none)} steps"
    return onset_at(lasts(none), lambda at: evidence.format(sides[lowest][at], sides[highest][at]))


@rule("one batch trained again and again", Kind.TREND, reads=(keys.REWARD, keys.LENGTH), link="docs/reading.md#rules")
def find_repeated_batch(run: Run) -> Onset | None:
    """Look at the queue that serves the batches."""
    # Mean score and mean length, both of many samples, are each exactly what they were in an earlier step.
    means = pandas.DataFrame({key: trained(run, key) for key in (keys.REWARD, keys.LENGTH)}).dropna()
    again = means.duplicated() & (means[keys.LENGTH] % 1 != 0)
    evidence = f"{keys.REWARD} {{:.6g}} and {keys.LENGTH} {{:.6g}} as in an earlier step, in {again.sum()} steps"
    return onset_at(lasts(again), lambda at: evidence.format(*means.loc[at]))


# Such prompts have advantage 0, so fewer than a tenth teach.
rule_of_limit(
    "few prompts teach, because samples score alike",
    Kind.TREND,
    reads=keys.ALIKE,
    limit=0.9,
    remedy=other_prompts,
    link="docs/reading.md#health",
    heuristic=True,
)

# --- Clipping and bounds ---------------------------------------------------------------------------------------------

ONE_SIDE, WORTH_CLIPPING, LONG = 0.98, 0.01, 5
# Differences that float32 may leave.
RATIO_IS_ONE = 1e-6


def wider_side(run: Run) -> str:
    """Names the bound that nearly all clipped tokens are beyond."""
    at = find_one_sided_clipping(run).step
    side = "low" if run.values(keys.CLIPPED_LOW)[at] > run.values(keys.CLIPPED_HIGH)[at] else "high"
    name = f"clipx.clip_{side}"
    return f"Widen that side's bound, {name if name in run.configuration else f'actor.clip_ratio_{side}'}."


@rule(
    "one-sided clipping",
    Kind.TREND,
    reads=(keys.CLIPPED_LOW, keys.CLIPPED_HIGH),
    remedy=wider_side,
    link="docs/methods.md",
    heuristic=True,
)
def find_one_sided_clipping(run: Run) -> Onset | None:
    # Nearly all that is clipped is on one side, where it matters; of 75 healthy runs one was so in a few steps.
    sides = pandas.DataFrame({key: trained(run, key) for key in (keys.CLIPPED_LOW, keys.CLIPPED_HIGH)}).dropna()
    total = sides.sum(axis=1)
    step = lasts((total >= WORTH_CLIPPING) & (sides.max(axis=1) >= ONE_SIDE * total), LONG) if len(sides) else None
    return onset_at(step, lambda at: ", ".join(f"{key} {share:.3g}" for key, share in sides.loc[at].items()))


@rule("bounds idle: one update a rollout batch", reads=(keys.RATIO, keys.KL), link="docs/scopes.md")
def find_single_updates(run: Run) -> Onset | None:
    """Make actor.ppo_mini_batch_size smaller than data.train_batch_size."""
    ratio, kl = trained(run, keys.RATIO), trained(run, keys.KL)
    # An update that verl skipped leaves the ratio at 1 whatever the mini-batch.
    if steps_skipped(run) or ratio.empty or kl.empty:
        return None
    if (ratio - 1).abs().max() >= RATIO_IS_ONE or kl.abs().max() >= RATIO_IS_ONE:
        return None
    return Onset(int(ratio.index[0]), f"{keys.RATIO} 1 and {keys.KL} 0 in all {len(ratio)} steps")


def _target(run: Run) -> float | None:
    """Returns the target of the search, if it is a target for the share that is logged."""
    is_share = run.configuration.get("clipx.contribution", "share") == "share"
    return run.configuration.get("clipx.target") if is_share else None


@rule(
    "bounds idle: the search never started",
    reads=(keys.SHARE_BEFORE, keys.SHARE_AFTER, keys.BOUND_LOW, keys.BOUND_HIGH, "clipx.target"),
    link="docs/methods.md#bapo",
    about=("clipx.target", keys.SHARE_BEFORE),
)
def find_search_not_started(run: Run) -> Onset | None:
    """Raise clipx.target."""
    # By the search's own condition: the share is at or above the target in every step, and the bounds are constant.
    share, after = trained(run, keys.SHARE_BEFORE), trained(run, keys.SHARE_AFTER)
    target = _target(run)
    bounds = [trained(run, key) for key in (keys.BOUND_LOW, keys.BOUND_HIGH)]
    idle = all(len(bound) and bound.max() - bound.min() < RATIO_IS_ONE for bound in bounds)
    if target is None or share.empty or after.empty or not idle or share.min() < target:
        return None
    return Onset(int(share.index[0]), f"{keys.SHARE_BEFORE} {share.min():.3g} or more, target {target:g}")


@rule(
    "bounds idle: too few tokens a bin",
    reads=(keys.COUNTS, "clipx.alpha"),
    link="docs/methods.md#acpo",
    about=("clipx.alpha", keys.COUNTS),
)
def find_few_tokens(run: Run) -> Onset | None:
    """Make actor.ppo_mini_batch_size larger."""
    # Among n tokens none lies further than √(n − 1) standard deviations from their mean: too few in most bins.
    names, alpha = keys.of_bins("count", run.log.columns), run.configuration.get("clipx.alpha")
    if not names or alpha is None:
        return None
    counts, most = run.log.loc[run.log.index > 0, names].dropna(), alpha**2 + 1
    few = ((counts > 0) & (counts <= most)).sum(axis=1)
    evidence = f"{keys.COUNTS} at most {most:g} in {{}} of {len(names)} bins"
    return onset_at(lasts(few > len(names) / 2), lambda at: evidence.format(few[at]))


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
    stop, by = (run.configuration.get(f"clipx.{name}") for name in ("upper_stop", "upper_step"))
    high, share = trained(run, keys.BOUND_HIGH_LAST).align(trained(run, keys.SHARE_AFTER), join="inner")
    # The last candidate is the stop, or less than a step below it.
    step = None if None in (target, stop, by) else lasts((high > stop - by + RATIO_IS_ONE) & (share < target))
    evidence = "{} {:.3g}, {} {:.3g}, target {:g}"
    return onset_at(
        step, lambda at: evidence.format(keys.BOUND_HIGH_LAST, high[at], keys.SHARE_AFTER, share[at], target)
    )


# The bounds then stay at their ceiling (clip_fraction) or floor (second_moment).
rule_of_limit(
    "held target out of reach",
    reads=keys.HOLD_MISSED,
    limit=0.5,
    remedy="Raise clipx.hold.value.",
    link="docs/scopes.md#hold-a-target",
    about=("clipx.hold", keys.HOLD_MISSED),
)

# --- Samples of another policy ---------------------------------------------------------------------------------------

RATIO_IS_NOT_ONE = 1e-2
# Two passes at equal weights differ by noise, whose mean over tokens is far smaller than this.
KL_IS_NOT_ZERO = 1e-3


@rule(
    "ratio anchored to another policy",
    reads=(keys.RATIO, keys.KL, "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"),
    link="docs/scopes.md#staleness",
    heuristic=True,
)
def find_anchored_ratio(run: Run) -> Onset | None:
    """Look whether algorithm.rollout_correction.bypass_mode is on: the clip acts on the mismatch too."""
    # The first update's ratio is 1 unless its old log-probabilities are another policy's.
    ratio = trained(run, keys.RATIO)
    # The mean ratio of samples to the policy that drew them is 1, however old they are; its logarithm's is not 0.
    kl = trained(run, keys.KL).reindex(ratio.index, fill_value=0.0)
    moved = ((ratio - 1).abs() >= RATIO_IS_NOT_ONE) | (kl.abs() >= KL_IS_NOT_ZERO)
    step = lasts(moved) if run.schedule.updates_a_step == 1 else None
    evidence = "{} {:.4g}, {} {:.3g} at one update a rollout batch"
    return onset_at(step, lambda at: evidence.format(keys.RATIO, ratio[at], keys.KL, kl[at]))


rule_of_limit(
    "mismatch of rollout and training",
    reads=keys.MISMATCH,
    limit=0.02,
    remedy="Compare the precision in which the two engines compute.",
    link="docs/scopes.md#staleness",
    heuristic=True,
)

# A probability that differs by a thousandth passes for rounding, and so does four times the most before.
JUMPED, JUMP_TIMES, GROWN, LEFT_OUT = 1e-3, 4, 2, 0.02


@rule("sampler jumps away from the trainer", reads=(keys.MISMATCH,), link="docs/certify.md", heuristic=True)
def find_sampler_jump(run: Run) -> Onset | None:
    """Score its traced tokens with the checkpoints around that step: clipx recompute RUN CHECKPOINT…"""
    # Samples of age 0 are of the weights that recompute them, so that the engines differ as much as they did before.
    values = trained(run, keys.MISMATCH)
    values = values[trained(run, keys.STALENESS).reindex(values.index, fill_value=0.0) == 0]
    before, lowest = values.cummax().shift(), values[::-1].rolling(LASTING).min()[::-1]
    jumped = values.index[lowest >= (JUMP_TIMES * before.iloc[LASTING:]).clip(lower=JUMPED).reindex(values.index)]
    if not len(jumped):
        return None
    at, last = jumped[0], values.iloc[-LASTING:].median()
    says = "which is as of another precision, temperature or mask, or of weights always as late"
    if len(values.loc[at:]) < 2 * LASTING:
        says = "too early to say whether of older weights or another precision, temperature or mask"
    elif last >= GROWN * values[at]:
        says = f"{last:.3g} in the last, which is as of weights that stay behind"
    # By both estimates of the divergence: of a sampler that leaves no token out this is 1.
    ratio = 1 + (trained(run, keys.SAMPLER_KL) - trained(run, keys.SAMPLER_KL_1)).loc[at:].median()
    if ratio <= 1 - LEFT_OUT:
        says += f"; the mean of recomputed / sampler's probability is {ratio:.3g}, as where a mask leaves tokens out"
    return Onset(int(at), f"{keys.MISMATCH} {values[at]:.3g}, at most {before[at]:.3g} before; {says}")


DRIFTED, DRIFT_TIMES = 0.01, 4


@rule(
    "bounds idle while the sampler drifts away",
    reads=(keys.SAMPLER_KL, keys.PG_CLIPPED),
    link="docs/scopes.md#staleness",
    heuristic=True,
)
def find_drifting_sampler(run: Run) -> Onset | None:
    """Correct for the sampler (algorithm.rollout_correction): the clip's ratio is to recomputed log-probabilities."""
    # Nothing is clipped, although the policy is far from the one that sampled, and farther than it was at first.
    kl, clipped = trained(run, keys.SAMPLER_KL).align(trained(run, keys.PG_CLIPPED), join="inner")
    first = kl.iloc[:LASTING].max()
    step = lasts((clipped == 0) & (kl >= max(DRIFTED, DRIFT_TIMES * first)))
    evidence = f"{keys.PG_CLIPPED} 0, {keys.SAMPLER_KL} {{:.3g}}, at most {first:.3g} in its first steps"
    return onset_at(step, lambda at: evidence.format(kl[at]))


TOP_P, TOP_K = "actor_rollout_ref.rollout.top_p", "actor_rollout_ref.rollout.top_k"


@rule("truncated sampling", reads=(TOP_P, TOP_K), link="docs/scopes.md#staleness", any_of=True)
def find_truncated_sampling(run: Run) -> Onset | None:
    """Sample with top_p 1 and top_k -1."""
    # The loss's probabilities are of the whole distribution.
    top_p, top_k = (run.configuration.get(key) for key in (TOP_P, TOP_K))
    cut = [f"{TOP_P} {top_p:g}"] if isinstance(top_p, int | float) and top_p < 1 else []
    cut += [f"{TOP_K} {top_k}"] if isinstance(top_k, int) and top_k > 0 else []
    steps = run.log.index[run.log.index > 0]
    return Onset(int(steps[0]), " and ".join(cut)) if cut and len(steps) else None


# --- Gradient, reward and answers ------------------------------------------------------------------------------------

EXPLOSION, STEPS_BEFORE = 100.0, 5


@rule("gradient explosion", Kind.TREND, reads=(keys.GRADIENT_NORM,), link="docs/reading.md#rules", heuristic=True)
def find_gradient_explosion(run: Run) -> Onset | None:
    """Lower actor.optim.lr."""
    # It is far above its median before: healthy runs of docs/results/cpu_small.md stay below 20 times theirs.
    values = trained(run, keys.GRADIENT_NORM)
    before = values.expanding(STEPS_BEFORE).median().shift()
    wide = values.index[(before > 0) & (values > EXPLOSION * before)]
    step = wide[0] if len(wide) else None
    return onset_at(step, lambda at: f"{keys.GRADIENT_NORM} {values[at]:.3g}, median before {before[at]:.3g}")


@rule(REWARD_COLLAPSE, Kind.TREND, reads=(keys.REWARD,), link="docs/reading.md", heuristic=True)
def find_reward_collapse(run: Run) -> Onset | None:
    """Go back to a checkpoint before the fall, with a lower actor.optim.lr."""
    # The report's own definition of a collapse.
    values = trained(run, keys.REWARD)
    at = collapse(values.to_numpy())
    if at is None:
        return None
    after, best, step = values.iloc[at : at + LASTING].mean(), values.iloc[:at].max(), int(values.index[at])
    fell = halved(values, best, step) if values.min() >= 0 else ""
    return Onset(step, f"{keys.REWARD} {after:.3g} on average over {LASTING} steps, at most {best:.3g} before{fell}")


ARE_CUT, LIMIT = 0.25, "data.max_response_length"


@rule(
    "responses cut at the limit",
    Kind.TREND,
    reads=(keys.CUT,),
    instead=(keys.AS_LONG_AS_LONGEST, keys.LONGEST, LIMIT),
    link="docs/reading.md#health",
    heuristic=True,
)
def find_cut_responses(run: Run) -> Onset | None:
    """Raise data.max_response_length."""
    key, values = keys.CUT, trained(run, keys.CUT)
    if values.empty and LIMIT in run.configuration:
        # verl counts responses as long as the batch's longest, which are cut where that is as long as may be.
        key, longest = keys.AS_LONG_AS_LONGEST, trained(run, keys.LONGEST)
        values = trained(run, key).where(longest >= run.configuration[LIMIT], 0.0)
    return onset_at(lasts(values >= ARE_CUT), lambda at: f"{key} {values[at]:.3g}, at most {values.max():.3g}")


rule_of_limit(
    "answers without a verdict",
    reads=keys.UNDECIDED,
    limit=0.1,
    remedy="Look at answers on which the verifier gives up.",
    link="docs/reading.md#health",
    about=(keys.UNDECIDED,),
    heuristic=True,
)

KEPT_HELD_OUT = 0.9
# Standard errors by which the training reward's mean must be higher, from the differences of neighbouring steps.
RISES = 2


@rule(HELD_OUT_FALLS, reads=(keys.VALIDATIONS, keys.REWARD), link="docs/reading.md#rules", heuristic=True)
def find_held_out_fall(run: Run) -> Onset | None:
    """Go back to the checkpoint with the best held-out score."""
    # A collapse of the validations; docs/dev/diagnosis_evidence.md counts its false alarms on made-up ones.
    reward = trained(run, keys.REWARD)
    for key in matching(run.log, keys.VALIDATIONS):
        values = run.values(key)
        if (at := collapse(values.to_numpy(), KEPT_HELD_OUT)) is None:
            continue
        best = values.iloc[: at + 1].idxmax()
        low = values.iloc[at:][values.iloc[at:] < KEPT_HELD_OUT * values[best]]
        fell = low.index[0] if len(low) else numpy.inf
        before, since = reward.loc[: fell - 1], reward.loc[fell:]
        # Steps around the best score: a mean from the first step on has the climb of the start.
        width = max(LASTING, len(reward) // PART)
        around = before.iloc[max(0, before.index.searchsorted(best) - width // 2) :][:width]
        error = reward.diff().std() / 2**0.5 * (1 / max(len(around), 1) + 1 / max(len(since), 1)) ** 0.5
        if since.mean() - around.mean() > RISES * error:
            steps = f"in steps {around.index[0]} to {around.index[-1]}"
            what = f"{key} {low.iloc[0]:.3g}, in step {best} {values[best]:.3g}; {keys.REWARD} on average "
            return Onset(int(fell), f"{what}{around.mean():.3g} {steps}, {since.mean():.3g} since")
    return None
