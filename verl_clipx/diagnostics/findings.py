"""Sentences about the runs, each chosen by a test on their numbers."""

import itertools
from typing import NamedTuple

import numpy
import pandas
from scipy.stats import binomtest

from verl_clipx.diagnostics import keys
from verl_clipx.diagnostics.intervals import Interval, difference_interval, mean_interval
from verl_clipx.diagnostics.runs import Setting

# Below this share of the tokens a method "hardly" clips.
HARDLY = 0.01
# A ratio nearer to 1 than this is 1, up to rounding.
ROUNDING = 1e-6
# Of the log's numbers: a bound that moves by less stands still.
STILL = 1e-9
# Of a test of signs: below this probability of chance a direction is claimed.
SIGNIFICANT = 0.05


class Finding(NamedTuple):
    """A claim and what it rests on.

    Args:
        head: the claim, one sentence.
        text: the numbers.
    """

    head: str
    text: str


def number(value: float, digits: int = 3) -> str:
    """A number with a real minus sign."""
    return f"{value:.{digits}f}".replace("-", "−")


def percent(value: float) -> str:
    """A share in per cent, with two digits below one per cent."""
    return f"{number(100 * value, 2 if abs(value) < HARDLY else 1)}\u202f%"


def between(values: pandas.Series, digits: int = 2) -> str:
    """From the smallest to the largest, or the one value."""
    low, high = (number(value, digits) for value in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


def clipped(setting: Setting) -> pandas.Series:
    """The share of tokens outside the bounds on the side where PPO clips, by step; empty if no run logs it."""
    return setting.mean(keys.CLIPPED_LOW).add(setting.mean(keys.CLIPPED_HIGH))


def mass_shares(setting: Setting) -> pandas.DataFrame:
    """Each region's share of the gradient mass, a row a step; without rows if no run logs it."""
    mass = pandas.DataFrame({region: setting.mean(key) for region, key in keys.MASS.items()}).dropna()
    total = mass.sum(axis=1)
    return mass[total > 0].div(total[total > 0], axis=0)


def entropy_changes(setting: Setting) -> pandas.DataFrame:
    """By step: the Entropy-Clip `estimate`, and the `change` of entropy to the next step; without rows if unknown."""
    entropy = setting.mean(keys.ENTROPY)
    following = entropy.rename(lambda step: step - 1)
    return pandas.DataFrame({"estimate": setting.mean(keys.ENTROPY_ESTIMATE), "change": following - entropy}).dropna()


def same_signs(changes: pandas.DataFrame) -> tuple[int, int]:
    """In how many steps estimate and change have one sign, and of how many; a 0 has none.

    Args:
        changes: from `entropy_changes`.
    """
    signs = numpy.sign(changes)
    known = signs[(signs != 0).all(axis=1)]
    return int((known.estimate == known.change).sum()), len(known)


def went_as_estimated(settings: list[Setting]) -> str:
    """Whether entropy moved as the Entropy-Clip Rule says, over the steps of all settings."""
    same, steps = numpy.sum([same_signs(entropy_changes(setting)) for setting in settings], axis=0).tolist()
    if steps == 0 or binomtest(same, steps).pvalue >= SIGNIFICANT:
        return f"The Entropy-Clip estimate does not tell which way entropy goes: right in {same} of {steps} steps"
    if 2 * same > steps:
        return f"Entropy moved the way of the Entropy-Clip estimate in {same} of {steps} steps"
    return f"Entropy moved against the Entropy-Clip estimate in {steps - same} of {steps} steps"


def what_clipping_did(setting: Setting) -> Finding:
    """What the method did to tokens, or why it did nothing."""
    share, label = clipped(setting), setting.label
    if share.empty:
        return Finding(
            f"What {label} clips is not known.",
            "Its log has no actor/clipx metrics: the loss is not of this plugin. +clipx=observe adds them to verl’s.",
        )
    if share.max() == 0:
        ratio = setting.mean(keys.RATIO)
        if not ratio.empty and (ratio - 1).abs().max() < ROUNDING and setting.mean(keys.KL).abs().max() < ROUNDING:
            reason = (
                "The ratio was 1 throughout: each rollout batch got one update, and clipping cannot act in the first. "
                "Make actor.ppo_mini_batch_size smaller than data.train_batch_size."
            )
        else:
            reason = f"No token left the bounds on the side where PPO clips, in {len(share)} steps."
        return Finding(f"{label} clipped nothing.", reason)
    head = f"{label} hardly clips." if share.max() < HARDLY else f"{label} clips {percent(share.mean())} of the tokens."
    low, high = (setting.mean(key).mean() for key in (keys.CLIPPED_LOW, keys.CLIPPED_HIGH))
    text = (
        f"On average {percent(low)} of the tokens lay below the lower bound with A < 0 and {percent(high)} above the "
        f"upper with A > 0; most in step {share.idxmax()}, {percent(share.max())}."
    )
    masses = mass_shares(setting)
    kept = float(masses[["LN", "HP"]].sum(axis=1).mean()) if len(masses) else 0.0
    if kept > 0:
        head = f"{label} keeps a gradient outside its bounds."
        text += (
            f" Those tokens have {percent(kept)} of the gradient’s mass |F·A|; under PPO’s clip they would have none."
        )
    return Finding(head, text)


def what_bounds_did(setting: Setting) -> Finding | None:
    """How adaptive bounds moved, or why they did not; None for bounds that do not adapt."""
    if not setting.mean(keys.BOUND_HIGH).empty:
        return _of_search(setting)
    names = setting.bins("epsilon")
    return _of_bins(setting, names) if names else None


def _of_search(setting: Setting) -> Finding:
    low, high, before = (setting.mean(key) for key in (keys.BOUND_LOW, keys.BOUND_HIGH, keys.SHARE_BEFORE))
    moves = [bound.max() - bound.min() > STILL for bound in (low, high)]
    bounds = f"The lower bound was {between(low)}, the upper {between(high)}"
    if any(moves):
        names = " and ".join(name for name, moved in zip(("lower", "upper"), moves, strict=True) if moved)
        after = setting.mean(keys.SHARE_AFTER)
        text = f"{bounds}. Positive tokens contributed {between(before)} at the starting bounds"
        text += f", {between(after)} at those found." if len(after) else "."
        return Finding(f"{setting.label} moves its {names} bound.", text)
    starts = [setting.parameter(f"{side}_start") for side in ("lower", "upper")]
    target = setting.parameter("target", 0.4)
    is_share = setting.parameter("contribution", "share") == "share"
    at_starts = None in starts or numpy.allclose([low.iloc[0], high.iloc[0]], starts, rtol=0, atol=1e-6)
    if is_share and at_starts and len(before) and before.min() >= target:
        head = f"{setting.label}’s search never started."
        text = (
            f"The share of positive tokens was {between(before)}, at or above the target of {target:g} in every step."
        )
        return Finding(head, f"{text} {bounds}.")
    return Finding(f"{setting.label}’s bounds stood still.", f"{bounds} in all {len(low)} steps.")


def _of_bins(setting: Setting, names: list[str]) -> Finding:
    first, last = setting.mean(names[0]), setting.mean(names[-1])
    edge = 1 / len(names)
    text = (
        f"The ratio may leave 1 by ε, which was {between(first)} for tokens of probability below {edge:g} and "
        f"{between(last)} above {1 - edge:g} (means over a step’s updates). Bounds of 0.8 and 1.2 are ε = 0.2."
    )
    if setting.mean(keys.EPSILON_HIGHEST).size:
        text += f" The widest of any update was {number(setting.table(keys.EPSILON_HIGHEST).to_numpy().max(), 2)}."
    spread = max(setting.mean(name).max() - setting.mean(name).min() for name in names)
    if spread < STILL and (first - last).abs().max() < STILL:
        return Finding(f"{setting.label}’s bounds stood still.", text)
    if first.median() > 1.5 * last.median():
        return Finding(f"{setting.label}’s bounds are wide where the policy is unsure.", text)
    return Finding(f"{setting.label}’s bounds hardly differ between probability bins.", text)


def small_bins(setting: Setting) -> Finding | None:
    """A warning where ACPO's bins hold so few tokens that none can be clipped."""
    counts = [setting.mean(name).mean() for name in setting.bins("count")]
    alpha = setting.parameter("alpha", 3.0)
    few = [count for count in counts if 0 < count <= alpha**2 + 1]
    if not few:
        return None
    held = f"{between(pandas.Series(few), 0)} token{'' if max(few) < 1.5 else 's'}"
    have = "has" if len(few) == 1 else "have"
    return Finding(
        f"{len(few)} of {setting.label}’s {len(counts)} bins {have} too few tokens to clip.",
        f"Among n tokens none lies further than σ√(n − 1) from their mean, so with n ≤ {alpha**2 + 1:g} none "
        f"exceeds {alpha:g}σ. On average a mini-batch had {held} there: larger ones may show another picture.",
    )


def rewards(settings: list[Setting]) -> list[Finding]:
    """Whether rewards can be told apart, in training and held out, for each pair with the first setting.

    Args:
        settings: of one alone, whether its held-out reward rose.
    """
    if len(settings) == 1:
        return [finding for finding in [_rise(settings[0])] if finding]
    pairs = [(settings[0], other) for other in settings[1:]]
    level = 1 - 0.05 / len(pairs)
    found = [compare(one, two, level) for one, two in pairs for compare in (_compared, _compared_held_out)]
    return [finding for finding in found if finding]


def _compared(one: Setting, two: Setting, level: float) -> Finding | None:
    first, second = one.table(keys.REWARD), two.table(keys.REWARD)
    steps = first.index.intersection(second.index)
    steps = steps[steps > 0]
    if len(steps) < 2:
        return None
    first, second = first.loc[steps], second.loc[steps]
    if first.shape == second.shape and (first.to_numpy() == second.to_numpy()).all():
        return Finding(
            f"The rewards of {one.label} and {two.label} are equal.", f"They are so in all {len(steps)} steps."
        )
    found, over = _difference(first, second, level, "steps, as if they were independent")
    text = f"The mean over {len(steps)} steps is {_means(one, first, two, second)} {over}."
    if found.low <= 0 <= found.high:
        return Finding(f"The rewards of {one.label} and {two.label} cannot be told apart.", text)
    best, worst = (two, one) if found.mean > 0 else (one, two)
    return Finding(f"{best.label} collected more reward than {worst.label}.", text)


def _compared_held_out(one: Setting, two: Setting, level: float) -> Finding | None:
    """The last validation that all runs have, if an update came before it and their problems are the same."""
    runs = [run for setting in (one, two) for run in setting.runs]
    step = max(set.intersection(*({reward.step for reward in run.held_out} for run in runs)), default=0)
    if step == 0:
        return None
    # A row a problem, a column a run.
    rewards = [next(reward for reward in run.held_out if reward.step == step) for run in runs]
    table = pandas.DataFrame([reward.by_problem for reward in rewards]).T
    if len(table) < 2 or table.isna().any(axis=None):
        return None
    first, second = table.iloc[:, : len(one.runs)], table.iloc[:, len(one.runs) :]
    found, over = _difference(first, second, level, f"{len(table)} problems")
    text = f"After step {step} the mean is {_means(one, first, two, second)} {over}."
    if found.low <= 0 <= found.high:
        return Finding(f"On held-out problems {one.label} and {two.label} cannot be told apart.", text)
    best, worst = (two, one) if found.mean > 0 else (one, two)
    return Finding(f"On held-out problems {best.label} is ahead of {worst.label}.", text)


def _difference(first: pandas.DataFrame, second: pandas.DataFrame, level: float, rows: str) -> tuple[Interval, str]:
    """Second minus first, a column a run: over seeds where both have two, else over rows; and how to say so."""
    if min(first.shape[1], second.shape[1]) > 1:
        found = difference_interval(first.mean(), second.mean(), level)
        basis = f"{first.shape[1]} and {second.shape[1]} seeds"
    else:
        found = mean_interval(second.mean(axis=1) - first.mean(axis=1), level)
        basis = f"{rows}; to cover seeds takes two runs of each setting"
    return found, f"(difference {signed(found)}, {100 * level:.3g}\u202f% interval over {basis})"


def _means(one: Setting, first: pandas.DataFrame, two: Setting, second: pandas.DataFrame) -> str:
    return f"{number(first.to_numpy().mean())} with {one.label} and {number(second.to_numpy().mean())} with {two.label}"


def signed(interval: Interval) -> str:
    """A difference with its interval."""
    low, high = number(interval.low), number(interval.high)
    return f"{'+' if interval.mean >= 0 else ''}{number(interval.mean)}, {low} to {high}"


def _rise(setting: Setting) -> Finding | None:
    held_out = setting.runs[0].held_out
    if len(setting.runs) > 1 or len(held_out) < 2:
        return None
    before, after = held_out[0], held_out[-1]
    overlap = before.low <= after.high and after.low <= before.high
    rose = "rose" if after.mean > before.mean else "fell"
    head = "The held-out reward did not clearly change." if overlap else f"The held-out reward {rose}."
    verb = "overlap" if overlap else "do not overlap"
    return Finding(
        head,
        f"{before} before (step {before.step}), {after} after (step {after.step}): means and 95\u202f% intervals over "
        f"{after.problems} problems, which {verb}.",
    )


def unequal_starts(settings: list[Setting]) -> Finding | None:
    """A warning where runs of one seed were not fed the same samples: the first batch is drawn before any update."""
    runs = [run for setting in settings for run in setting.runs if run.seed is not None]
    for one, two in itertools.combinations(runs, 2):
        first, second = (run.values(keys.REWARD).get(1) for run in (one, two))
        if one.seed == two.seed and None not in (first, second) and abs(first - second) > ROUNDING:
            return Finding(
                "The seed did not fix the samples.",
                f"Step 1 is sampled before any update, yet scores {number(first)} in {one.name} and {number(second)} "
                f"in {two.name}. +clipx/rollout=seeded makes them equal.",
            )
    return None


def findings(settings: list[Setting]) -> list[Finding]:
    """All sentences, those on tokens first."""
    found: list[Finding | None] = []
    for setting in settings:
        found += [what_clipping_did(setting), what_bounds_did(setting), small_bins(setting)]
    return [finding for finding in [*found, *rewards(settings), unequal_starts(settings)] if finding]
