"""What went wrong in a run and since when: one table of rules, from which command, page and documentation follow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import filter as matching
from typing import NamedTuple

import numpy
import pandas

from verl_clipx.common.statistics.collapse import KEPT, collapse
from verl_clipx.diagnose.advice import (
    after_skipped,
    less_entropy,
    more_entropy,
    other_prompts,
    some_signal,
    with_values,
)
from verl_clipx.runs import keys
from verl_clipx.runs.run import Run

COUNT = "actor/clipx/count/bin_*"

# Steps in a row that a state must last: one bad rollout batch is no pathology.
LASTING = 3
ENTROPY_LEFT = 0.05
# An entropy far above where it began, of which e^5 is as of about 150 equally likely tokens.
ENTROPY_TIMES, ENTROPY_FROM, ENTROPY_TWICE, ENTROPY_HIGH = 5, 1.0, 2, 5.0
MOST_ALIKE = 0.9
# Of equal scores, whose mean is rounded, GRPO's advantages can be as far from 0.
ADVANTAGE_IS_ZERO, ADVANTAGE_OF_EQUALS = 1e-6, 0.1
ONE_SIDE, WORTH_CLIPPING, LONG = 0.98, 0.01, 5
RATIO_IS_ONE = 1e-6
RATIO_IS_NOT_ONE = 1e-2
# Two passes at equal weights differ by noise, whose mean over tokens is far smaller than this.
KL_IS_NOT_ZERO = 1e-3
MOST_MISMATCH = 0.02
EXPLOSION, STEPS_BEFORE = 100.0, 5
MOST_CUT = 0.25
MOST_UNDECIDED = 0.1
MOST_MISSED = 0.5
KEPT_HELD_OUT = 0.9

REWARD_COLLAPSE = "reward collapse"
HELD_OUT_FALLS = "held-out score falls while the training reward rises"


class Onset(NamedTuple):
    """The first training step of a state, and what shows it: numbers, each with its metric's name."""

    step: int
    evidence: str


class Kind(Enum):
    """What a rule is good for while a run trains."""

    FACT = "fact"
    """Whatever else is in the log, it stays true: it is said while the run trains, and `clipx.health=stop` ends it."""

    TREND = "trend"
    """It is said while the run trains: how often beginnings of healthy logs meet it was counted."""

    REMARK = "remark"
    """It is said of a finished run alone."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A pathology and how a log shows it.

    Args:
        name: in the field's terms; lower case.
        reads: the metrics or keys of the record that it reads; a * stands for anything in a metric's key.
        onset: finds the onset in a run; None if the run does not show the pathology or lacks what the rule reads.
        threshold: in words.
        reason: why the threshold is what it is.
        remedy: what to do, the same for all runs or by what a run says; see `advice.with_values`.
        link: the page of the documentation that says more.
        about: metrics or keys of the configuration; the rule is only about runs with one of them, by default all.
        kind: what it is good for while a run trains.
        heuristic: whether the threshold rests on policies of about a million parameters or on judgement.
        any_of: whether one of what it reads is enough.
    """

    name: str
    reads: tuple[str, ...]
    onset: Callable[[Run], Onset | None]
    threshold: str
    reason: str
    remedy: str | Callable[[Run], str]
    link: str
    about: tuple[str, ...] = ()
    kind: Kind = Kind.REMARK
    heuristic: bool = False
    any_of: bool = False


class Diagnosis(NamedTuple):
    """A rule that a run meets, and what to do about it."""

    run: str
    rule: Rule
    onset: Onset
    remedy: str

    @property
    def head(self) -> str:
        """The claim, one sentence."""
        return f"{self.run}: {self.rule.name} from step {self.onset.step} on."

    @property
    def text(self) -> str:
        """The evidence, the remedy and the page that says more."""
        return f"{self.onset.evidence}. {self.advice}"

    @property
    def advice(self) -> str:
        """What the threshold rests on, the remedy and the page that says more."""
        basis = "The threshold is heuristic. " if self.rule.heuristic else ""
        return f"{basis}{self.remedy} See {self.rule.link}."


def diagnose(run: Run, rules: Sequence[Rule] | None = None) -> list[Diagnosis]:
    """The rules, by default of all, that a run meets, the earliest onset first.

    Args:
        run: a whole one, or one that still trains, with its log so far.
    """
    chosen = RULES if rules is None else rules
    met = [
        Diagnosis(run.name, rule, onset, with_values(run, rule.remedy)) for rule in chosen if (onset := rule.onset(run))
    ]
    return sorted(met, key=lambda one: one.onset.step)


def keys_missing_for(rule: Rule, run: Run) -> list[str]:
    """What a rule reads and a run does not have; empty if the rule can be judged."""
    missing = [key for key in rule.reads if not (_is_logged(run, key) or key in run.configuration)]
    return missing if not rule.any_of or len(missing) == len(rule.reads) else []


def _is_logged(run: Run, key: str) -> bool:
    return any(numpy.isfinite(run.log[one].to_numpy(dtype=float)).any() for one in matching(run.log, key))


def cover(run: Run) -> dict[str, list[str]]:
    """The rules that are about a run, and what each misses in its log and record: nothing if it can be checked.

    Raises:
        ValueError: nothing that the run logged is a finite number and no rule is met: nothing is known of its training.
    """
    if not (_is_logged(run, "*") or diagnose(run)):
        raise ValueError(f"{run.name}: no metric in its log has a finite number, so nothing can be said of the run.")
    return {rule.name: keys_missing_for(rule, run) for rule in RULES if _is_about(rule, run)}


def _is_about(rule: Rule, run: Run) -> bool:
    given = {key for key, value in run.configuration.items() if value is not None}
    return not rule.about or any(_is_logged(run, one) or matching(given, f"{one}*") for one in rule.about)


def _trained(run: Run, key: str) -> pandas.Series:
    values = run.values(key)
    return values[values.index > 0]


def _lasts(state: pandas.Series, steps: int = LASTING) -> int | None:
    """The first step from which a state lasted for so many logged steps."""
    begun = numpy.flatnonzero(state.astype(int).rolling(steps).sum() == steps)
    return int(state.index[begun[0] - steps + 1]) if len(begun) else None


def _onset(step: int | None, say: Callable[[int], str]) -> Onset | None:
    return None if step is None else Onset(int(step), say(step))


def _beyond(key: str, limit: float) -> Callable[[Run], Onset | None]:
    """A rule on one metric that stays at or above a limit."""

    def onset(run: Run) -> Onset | None:
        values = _trained(run, key)
        return _onset(_lasts(values >= limit), lambda at: f"{key} {values[at]:.3g}, at most {values.max():.3g}")

    return onset


def _entropy(run: Run) -> Onset | None:
    values = _trained(run, keys.ENTROPY)
    # The greatest, since a quick collapse lies within these steps.
    first = values.iloc[:LASTING].max()
    step = _lasts(values < ENTROPY_LEFT * first) if first > 0 else None
    return _onset(step, lambda at: f"{keys.ENTROPY} {values[at]:.3g}, at most {first:.3g} in its first steps")


def _entropy_explosion(run: Run) -> Onset | None:
    values = _trained(run, keys.ENTROPY)
    first = values.iloc[:LASTING].max()
    risen = (values > max(ENTROPY_TIMES * first, ENTROPY_FROM)) | (values > max(ENTROPY_TWICE * first, ENTROPY_HIGH))
    return _onset(_lasts(risen), lambda at: f"{keys.ENTROPY} {values[at]:.3g}, at most {first:.3g} in its first steps")


def _no_signal(run: Run) -> Onset | None:
    lowest, highest = keys.LOWEST_ADVANTAGE, keys.HIGHEST_ADVANTAGE
    sides = pandas.DataFrame({key: _trained(run, key) for key in (lowest, highest)}).dropna()
    if sides.empty:
        alike = _trained(run, keys.ALIKE)
        return _onset(_lasts(alike == 1), lambda at: f"{keys.ALIKE} 1, at most {alike.max():g}")
    furthest, scores = sides.abs().max(axis=1), run.values(keys.HIGHEST_REWARD) - run.values(keys.LOWEST_REWARD)
    equal = scores.reindex(furthest.index) == 0
    step = _lasts((furthest <= ADVANTAGE_IS_ZERO) | (equal & (furthest <= ADVANTAGE_OF_EQUALS)))
    return _onset(step, lambda at: f"{lowest} {sides[lowest][at]:.3g}, {highest} {sides[highest][at]:.3g}")


def _reward(run: Run) -> Onset | None:
    values = _trained(run, keys.REWARD)
    at = collapse(values.to_numpy())
    if at is None:
        return None
    after = values.iloc[at : at + LASTING].mean()
    return Onset(int(values.index[at]), f"{keys.REWARD} {after:.3g} on average, {values.iloc[:at].max():.3g} before")


def _gradient(run: Run) -> Onset | None:
    values = _trained(run, keys.GRADIENT_NORM)
    before = values.expanding(STEPS_BEFORE).median().shift()
    wide = values.index[(before > 0) & (values > EXPLOSION * before)]
    step = wide[0] if len(wide) else None
    return _onset(step, lambda at: f"{keys.GRADIENT_NORM} {values[at]:.3g}, median before {before[at]:.3g}")


def _one_sided(run: Run) -> Onset | None:
    sides = pandas.DataFrame({key: _trained(run, key) for key in (keys.CLIPPED_LOW, keys.CLIPPED_HIGH)}).dropna()
    total = sides.sum(axis=1)
    step = _lasts((total >= WORTH_CLIPPING) & (sides.max(axis=1) >= ONE_SIDE * total), LONG) if len(sides) else None
    return _onset(step, lambda at: ", ".join(f"{key} {share:.3g}" for key, share in sides.loc[at].items()))


def _single_update(run: Run) -> Onset | None:
    ratio, kl = _trained(run, keys.RATIO), _trained(run, keys.KL)
    # An update that verl skipped leaves the ratio at 1 whatever the mini-batch.
    if run.skipped_updates is not None or ratio.empty or kl.empty:
        return None
    if (ratio - 1).abs().max() >= RATIO_IS_ONE or kl.abs().max() >= RATIO_IS_ONE:
        return None
    return Onset(int(ratio.index[0]), f"{keys.RATIO} 1 and {keys.KL} 0 in all {len(ratio)} steps")


def _anchored(run: Run) -> Onset | None:
    ratio = _trained(run, keys.RATIO)
    # The mean ratio of samples to the policy that drew them is 1, however old they are; its logarithm's is not 0.
    kl = _trained(run, keys.KL).reindex(ratio.index, fill_value=0.0)
    moved = ((ratio - 1).abs() >= RATIO_IS_NOT_ONE) | (kl.abs() >= KL_IS_NOT_ZERO)
    step = _lasts(moved) if run.schedule.updates_a_step == 1 else None
    evidence = "{} {:.4g}, {} {:.3g} at one update a rollout batch"
    return _onset(step, lambda at: evidence.format(keys.RATIO, ratio[at], keys.KL, kl[at]))


def _held_out(run: Run) -> Onset | None:
    reward = _trained(run, keys.REWARD)
    for key in matching(run.log, keys.VALIDATIONS):
        values = run.values(key)
        if (at := collapse(values.to_numpy(), KEPT_HELD_OUT)) is None:
            continue
        best = values.iloc[: at + 1].idxmax()
        low = values.iloc[at:][values.iloc[at:] < KEPT_HELD_OUT * values[best]]
        until, since = reward.loc[:best].mean(), reward.loc[low.index[0] if len(low) else numpy.inf :].mean()
        if since > until:
            what = f"{key} {low.iloc[0]:.3g}, in step {best} {values[best]:.3g}; {keys.REWARD} on average "
            return Onset(int(low.index[0]), f"{what}{until:.3g} until then, {since:.3g} since")
    return None


def _target(run: Run) -> float | None:
    """The target of the search, if it is a target for the share that is logged."""
    is_share = run.configuration.get("clipx.contribution", "share") == "share"
    return run.configuration.get("clipx.target") if is_share else None


def _search(run: Run) -> Onset | None:
    share, after = _trained(run, keys.SHARE_BEFORE), _trained(run, keys.SHARE_AFTER)
    target = _target(run)
    bounds = [_trained(run, key) for key in (keys.BOUND_LOW, keys.BOUND_HIGH)]
    idle = all(len(bound) and bound.max() - bound.min() < RATIO_IS_ONE for bound in bounds)
    if target is None or share.empty or after.empty or not idle or share.min() < target:
        return None
    return Onset(int(share.index[0]), f"{keys.SHARE_BEFORE} {share.min():.3g} or more, target {target:g}")


def _saturated(run: Run) -> Onset | None:
    target = _target(run)
    stop, by = (run.configuration.get(f"clipx.{name}") for name in ("upper_stop", "upper_step"))
    high, share = _trained(run, keys.BOUND_HIGH_LAST).align(_trained(run, keys.SHARE_AFTER), join="inner")
    # The last candidate is the stop, or less than a step below it.
    step = None if None in (target, stop, by) else _lasts((high > stop - by + RATIO_IS_ONE) & (share < target))
    evidence = "{} {:.3g}, {} {:.3g}, target {:g}"
    return _onset(step, lambda at: evidence.format(keys.BOUND_HIGH_LAST, high[at], keys.SHARE_AFTER, share[at], target))


def _few_tokens(run: Run) -> Onset | None:
    names, alpha = keys.of_bins("count", run.log.columns), run.configuration.get("clipx.alpha")
    if not names or alpha is None:
        return None
    counts, most = run.log.loc[run.log.index > 0, names].dropna(), alpha**2 + 1
    few = ((counts > 0) & (counts <= most)).sum(axis=1)
    return _onset(
        _lasts(few > len(names) / 2), lambda at: f"{COUNT} at most {most:g} in {few[at]} of {len(names)} bins"
    )


def _truncated(run: Run) -> Onset | None:
    rollout = "actor_rollout_ref.rollout"
    top_p, top_k = (run.configuration.get(f"{rollout}.{key}") for key in ("top_p", "top_k"))
    cut = [f"{rollout}.top_p {top_p:g}"] if isinstance(top_p, int | float) and top_p < 1 else []
    cut += [f"{rollout}.top_k {top_k}"] if isinstance(top_k, int) and top_k > 0 else []
    trained = run.log.index[run.log.index > 0]
    return Onset(int(trained[0]), " and ".join(cut)) if cut and len(trained) else None


def _skipped(run: Run) -> Onset | None:
    skipped = run.skipped_updates
    if skipped is None:
        return None
    fate = run.fate_of_skipped if run.fate_of_skipped != "taken" else "taken with a gradient that is not finite"
    count = f"updates {fate} in {skipped.steps} of {skipped.trained} steps since, how many this log does not say"
    if skipped.updates is not None:
        all_updates = (run.schedule.updates_a_step or 0) * skipped.trained
        of_all = f" of {all_updates}" if all_updates >= skipped.updates else ""
        count = f"{skipped.updates}{of_all} update{'' if skipped.updates == 1 and not of_all else 's'} {fate} since"
    ranks = run.values(keys.NOT_FINITE_RANK)
    if len(ranks):
        # -1: it came up in the backward pass.
        count += f", first on rank {int(ranks.iloc[0])}" if ranks.iloc[0] >= 0 else ", in the gradient only"
    return Onset(skipped.first, count)


def _not_finite(run: Run) -> Onset | None:
    begins: dict[str, int] = {}
    for key, what in keys.HEALTH_COUNTS.items():
        counts = run.values(key)
        if len(counts := counts[counts > 0]):
            begins[f"{what} of {int(counts.sum())} responses in {_steps(len(counts))}"] = int(counts.index[0])
    for key in keys.FINITE:
        # That the gradient is not finite is what a skipped update says.
        if key != keys.GRADIENT_NORM and (at := run.not_finite.get(key)):
            begins[f"{key} in {_steps(len(at))}"] = at[0]
    return Onset(min(begins.values()), f"not finite: {'; '.join(begins)}") if begins else None


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count > 1)}"


RULES = (
    Rule(
        name="skipped updates",
        reads=(keys.SKIPPED_UPDATES, keys.GRADIENT_NORM),
        onset=_skipped,
        threshold="any",
        reason="a gradient that is not finite: verl skips the update, but under Megatron takes it",
        remedy=after_skipped,
        link="docs/reading.md#health",
        kind=Kind.FACT,
        any_of=True,
    ),
    Rule(
        name="values that are not finite",
        reads=(*keys.HEALTH_COUNTS, *(key for key in keys.FINITE if key != keys.GRADIENT_NORM)),
        onset=_not_finite,
        threshold="any",
        reason="a sound run has none",
        remedy="Means and figures leave these values out. Look at the reward of the prompts that the output names.",
        link="docs/reading.md#health",
        kind=Kind.FACT,
        any_of=True,
    ),
    Rule(
        name="entropy collapse",
        reads=(keys.ENTROPY,),
        onset=_entropy,
        threshold=f"below {ENTROPY_LEFT:.0%} of the greatest of its first {LASTING} steps, {LASTING} steps in a row",
        reason="healthy runs of docs/results/cpu_small.md fall to 9 % for as long",
        remedy=more_entropy,
        link="docs/faq.md",
        kind=Kind.TREND,
        heuristic=True,
    ),
    Rule(
        name="entropy explosion",
        reads=(keys.ENTROPY,),
        onset=_entropy_explosion,
        threshold=f"{ENTROPY_TIMES} times the greatest of its first {LASTING} steps and above {ENTROPY_FROM:g}, or "
        f"{ENTROPY_TWICE} times and above {ENTROPY_HIGH:g}, {LASTING} steps in a row",
        reason="no healthy run of docs/dev/diagnosis_evidence.md rises above its first steps for as long; an entropy "
        "of 5 is that of 150 equally likely tokens",
        remedy=less_entropy,
        link="docs/faq.md",
        kind=Kind.TREND,
        heuristic=True,
    ),
    Rule(
        name="no learning signal",
        reads=(keys.LOWEST_ADVANTAGE, keys.HIGHEST_ADVANTAGE, keys.ALIKE),
        onset=_no_signal,
        threshold=f"advantages of 0 to {ADVANTAGE_IS_ZERO:g}, of equal scores to {ADVANTAGE_OF_EQUALS:g}, or without "
        f"them all prompts alike, {LASTING} steps in a row",
        reason="an advantage of 0 has no gradient; the mean of equal scores is rounded",
        remedy=some_signal,
        link="docs/reading.md#health",
        kind=Kind.TREND,
        any_of=True,
    ),
    Rule(
        name="few prompts teach, because samples score alike",
        reads=(keys.ALIKE,),
        onset=_beyond(keys.ALIKE, MOST_ALIKE),
        threshold=f"{MOST_ALIKE:.0%} of the prompts or more, {LASTING} steps in a row",
        reason="such prompts have advantage 0, so fewer than a tenth teach",
        remedy=other_prompts,
        link="docs/reading.md#health",
        kind=Kind.TREND,
        heuristic=True,
    ),
    Rule(
        name="one-sided clipping",
        reads=(keys.CLIPPED_LOW, keys.CLIPPED_HIGH),
        onset=_one_sided,
        threshold=f"{ONE_SIDE:.0%} on one side, of at least {WORTH_CLIPPING:.0%} of the tokens, {LONG} steps in a row",
        reason="below that share clipping hardly matters; one of 75 healthy runs was so in a few steps",
        remedy="Move that side's bound (actor.clip_ratio_low, actor.clip_ratio_high), or let a method adapt it.",
        link="docs/methods.md",
        kind=Kind.TREND,
        heuristic=True,
    ),
    Rule(
        name="bounds idle: one update a rollout batch",
        reads=(keys.RATIO, keys.KL),
        onset=_single_update,
        threshold=f"ratio 1 and KL 0 to {RATIO_IS_ONE:g} in every step",
        reason="rounding of float32",
        remedy="Make actor.ppo_mini_batch_size smaller than data.train_batch_size.",
        link="docs/scopes.md",
    ),
    Rule(
        name="bounds idle: the search never started",
        reads=(keys.SHARE_BEFORE, keys.SHARE_AFTER, keys.BOUND_LOW, keys.BOUND_HIGH, "clipx.target"),
        onset=_search,
        threshold="the share of positive tokens at or above the target in every step, bounds constant",
        reason="the search's own condition",
        remedy="Raise clipx.target.",
        link="docs/methods.md#bapo",
        about=("clipx.target", keys.SHARE_BEFORE),
    ),
    Rule(
        name="bounds idle: too few tokens a bin",
        reads=(COUNT, "clipx.alpha"),
        onset=_few_tokens,
        threshold=f"alpha² + 1 tokens or fewer in most bins, {LASTING} steps in a row",
        reason="among n tokens none lies further than √(n − 1) standard deviations from their mean",
        remedy="Take larger mini-batches, fewer bins or a smaller clipx.alpha.",
        link="docs/methods.md#acpo",
        about=("clipx.alpha", COUNT),
    ),
    Rule(
        name="bounds saturated",
        reads=(keys.BOUND_HIGH_LAST, keys.SHARE_AFTER, "clipx.target", "clipx.upper_stop", "clipx.upper_step"),
        onset=_saturated,
        threshold=f"the upper bound at its last candidate and the target missed, {LASTING} steps in a row",
        reason="the search has nowhere left to go",
        remedy="Raise clipx.upper_stop or lower clipx.target.",
        link="docs/methods.md#bapo",
        about=("clipx.target", keys.SHARE_BEFORE),
    ),
    Rule(
        name="held target out of reach",
        reads=(keys.HOLD_MISSED,),
        onset=_beyond(keys.HOLD_MISSED, MOST_MISSED),
        threshold=f"in {MOST_MISSED:.0%} of a step's updates or more, {LASTING} steps in a row",
        reason="the bounds then stay at their ceiling (clip_fraction) or floor (second_moment)",
        remedy="Raise clipx.hold.value, move that end, or make fewer updates on each rollout batch.",
        link="docs/scopes.md#hold-a-target",
        about=("clipx.hold", keys.HOLD_MISSED),
    ),
    Rule(
        name="ratio anchored to another policy",
        reads=(keys.RATIO, keys.KL, "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"),
        onset=_anchored,
        threshold=f"mean ratio further than {RATIO_IS_NOT_ONE:g} from 1, or KL further than {KL_IS_NOT_ZERO:g} from "
        f"0, at one update a rollout batch, {LASTING} steps in a row",
        reason="the first update's ratio is 1 unless its old log-probabilities are another policy's",
        remedy="Look at bypass mode and staleness: the clip acts on the mismatch too.",
        link="docs/scopes.md#staleness",
        heuristic=True,
    ),
    Rule(
        name="mismatch of rollout and training",
        reads=(keys.MISMATCH,),
        onset=_beyond(keys.MISMATCH, MOST_MISMATCH),
        threshold=f"mean difference of probability {MOST_MISMATCH:g} or more, {LASTING} steps in a row",
        reason="judgement",
        remedy="Compare the engines' precision and versions, or correct it (algorithm.rollout_correction).",
        link="docs/scopes.md#staleness",
        heuristic=True,
    ),
    Rule(
        name="truncated sampling",
        reads=("actor_rollout_ref.rollout.top_p", "actor_rollout_ref.rollout.top_k"),
        onset=_truncated,
        threshold="top_p below 1 or top_k above 0",
        reason="the loss's probabilities are of the whole distribution",
        remedy="Sample with top_p 1 and top_k -1.",
        link="docs/scopes.md#staleness",
        any_of=True,
    ),
    Rule(
        name="gradient explosion",
        reads=(keys.GRADIENT_NORM,),
        onset=_gradient,
        threshold=f"{EXPLOSION:g} times the median of the steps before, of which there are {STEPS_BEFORE} or more",
        reason="healthy runs of docs/results/cpu_small.md stay below 20 times their median",
        remedy="Lower actor.optim.lr or actor.grad_clip.",
        link="docs/reading.md#rules",
        kind=Kind.TREND,
        heuristic=True,
    ),
    Rule(
        name=REWARD_COLLAPSE,
        reads=(keys.REWARD,),
        onset=_reward,
        threshold=f"mean of a tenth of the steps below {KEPT:.0%} of the best before, beyond noise",
        reason="the report's own definition of a collapse",
        remedy="Go back to a checkpoint before, with narrower bounds or a lower actor.optim.lr.",
        link="docs/reading.md",
        kind=Kind.TREND,
        heuristic=True,
    ),
    Rule(
        name="responses cut at the limit",
        reads=(keys.CUT,),
        onset=_beyond(keys.CUT, MOST_CUT),
        threshold=f"{MOST_CUT:.0%} of the responses or more, {LASTING} steps in a row",
        reason="judgement",
        remedy="Raise data.max_response_length, or rollout.max_model_len where that is reached, or look whether "
        "responses ramble.",
        link="docs/reading.md#health",
        kind=Kind.TREND,
        heuristic=True,
    ),
    Rule(
        name="answers without a verdict",
        reads=(keys.UNDECIDED,),
        onset=_beyond(keys.UNDECIDED, MOST_UNDECIDED),
        threshold=f"{MOST_UNDECIDED:.0%} of the responses or more, {LASTING} steps in a row",
        reason="judgement",
        remedy="Look at answers on which the verifier gives up, and at its time limit.",
        link="docs/reading.md#health",
        about=(keys.UNDECIDED,),
        heuristic=True,
    ),
    Rule(
        name=HELD_OUT_FALLS,
        reads=(keys.VALIDATIONS, keys.REWARD),
        onset=_held_out,
        threshold=f"the mean of {LASTING} validations below {KEPT_HELD_OUT:.0%} of the best before, beyond noise",
        reason="false alarms on made-up validations in docs/dev/diagnosis_evidence.md",
        remedy="Go back to the best checkpoint; look at training answers for what the reward likes and the task does "
        "not, and at repeated epochs of the same prompts.",
        link="docs/reading.md#rules",
        heuristic=True,
    ),
)
