"""What went wrong in a run and since when: one table of rules, from which command, page and documentation follow."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import pandas

from verl_clipx.common.statistics.collapse import KEPT, collapse
from verl_clipx.diagnose.base_rates import MEASURES, usual
from verl_clipx.runs import keys
from verl_clipx.runs.run import Run

PAGE = "docs/diagnosis.md"

COUNT = "actor/clipx/count/bin_*"

# Steps in a row that a state must last: one bad rollout batch is no pathology.
LASTING = 3
ENTROPY_LEFT = 0.05
MOST_ALIKE = 0.9
ONE_SIDE, WORTH_CLIPPING, LONG = 0.98, 0.01, 5
RATIO_IS_ONE = 1e-6
RATIO_IS_NOT_ONE = 1e-2
# Two passes at equal weights differ by noise, whose mean over tokens is far smaller than this.
KL_IS_NOT_ZERO = 1e-3
MOST_MISMATCH = 0.02
EXPLOSION, STEPS_BEFORE = 100.0, 5
MOST_CUT = 0.25


# The names of rules whose facts the report's page can also state elsewhere, for several runs at once.
ONE_UPDATE, NO_SEARCH = "bounds idle: one update a rollout batch", "bounds idle: the search never started"
REWARD_COLLAPSE = "reward collapse"
COLLAPSE_REMEDY = "Go back to a checkpoint before, with narrower bounds or a lower learning rate."


class Onset(NamedTuple):
    """When a state began, and what shows it.

    Args:
        step: its first training step.
        evidence: numbers, each with its metric's name.
    """

    step: int
    evidence: str


@dataclass(frozen=True)
class Rule:
    """A pathology and how a log shows it.

    Args:
        name: in the field's terms; lower case.
        columns: the metrics or keys of the record that it reads.
        onset: finds the onset in a run; None if the run does not show the pathology or lacks what the rule reads.
        threshold: in words.
        reason: why the threshold is what it is.
        heuristic: whether the threshold rests on policies of about a million parameters or on judgement.
        remedy: what to do.
        link: the page of the documentation that says more.
        any_of: whether one of the columns is enough.
    """

    name: str
    columns: tuple[str, ...]
    onset: Callable[[Run], Onset | None]
    threshold: str
    reason: str
    heuristic: bool
    remedy: str
    link: str
    any_of: bool = False


class Diagnosis(NamedTuple):
    """A rule that a run meets."""

    run: str
    rule: Rule
    onset: Onset

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
        """What the threshold rests on, usual values, the remedy and the page that says more."""
        basis = "The threshold is heuristic. " if self.rule.heuristic else ""
        shares = "; ".join(f"{name}{usual(name)}" for name in self.rule.columns if name in MEASURES)
        basis += f"To compare: {shares}. " if shares else ""
        return f"{basis}{self.rule.remedy} See {self.rule.link}."


def diagnose(run: Run) -> list[Diagnosis]:
    """The rules that a run meets, the earliest onset first."""
    found = [Diagnosis(run.name, rule, onset) for rule in RULES if (onset := rule.onset(run))]
    return sorted(found, key=lambda one: one.onset.step)


def lacking(rule: Rule, run: Run) -> list[str]:
    """What a rule reads and a run does not have; empty if the rule can be judged."""
    missing = [
        key
        for key in rule.columns
        if not (keys.of_bins("count", run.log) if key == COUNT else _is_logged(run, key) or key in run.configuration)
    ]
    return missing if not rule.any_of or len(missing) == len(rule.columns) else []


def _is_logged(run: Run, key: str) -> bool:
    return key in run.log and bool(numpy.isfinite(run.log[key].to_numpy(dtype=float)).any())


def judged(run: Run) -> str:
    """Says that no rule found anything, how many rules the log and record allow to judge, and what the rest need.

    Raises:
        ValueError: nothing that the run logged is a finite number, so that no rule says anything of its training.
    """
    if not any(_is_logged(run, key) for key in run.log):
        raise ValueError(f"{run.name}: no metric in its log has a finite number, so nothing can be said of the run.")
    needs = {rule.name: missing for rule in RULES if (missing := lacking(rule, run))}
    if not needs:
        return f"None of the {len(RULES)} rules found anything in {run.name}."
    parts: set[str] = set()
    methods: set[str] = set()
    for rule in RULES:
        missing = needs.get(rule.name, [])
        parameters = {key for key in rule.columns if key.startswith("clipx.")}
        of_another = parameters and not parameters & run.configuration.keys()
        if of_another and {key for key in rule.columns if "/" in key} <= {*missing}:
            methods.add(rule.link.partition("#")[2].upper())
        else:
            parts |= {key if "/" in key or run.configuration else "the run's configuration" for key in missing}
    other_methods = [f"a run of {' or '.join(sorted(methods))}"] if methods else []
    return (
        f"None of the {len(RULES) - len(needs)} rules that {run.name} allows to judge found anything. "
        f"{len(needs)} need what it does not have: {', '.join([*other_methods, *sorted(parts)])}."
    )


def _trained(run: Run, key: str) -> pandas.Series:
    values = run.values(key)
    return values[values.index > 0]


def _lasts(state: pandas.Series, steps: int = LASTING) -> int | None:
    """The first step from which a state lasted for so many logged steps."""
    begun = numpy.flatnonzero(state.astype(int).rolling(steps).sum() == steps)
    return int(state.index[begun[0] - steps + 1]) if len(begun) else None


def _beyond(key: str, limit: float) -> Callable[[Run], Onset | None]:
    """A rule on one metric that stays at or above a limit."""

    def onset(run: Run) -> Onset | None:
        values = _trained(run, key)
        step = _lasts(values >= limit)
        return None if step is None else Onset(step, f"{key} {values[step]:.3g}, at most {values.max():.3g}")

    return onset


def _entropy(run: Run) -> Onset | None:
    values = _trained(run, keys.ENTROPY)
    # The greatest, since a quick collapse lies within these steps.
    first = values.iloc[:LASTING].max()
    step = _lasts(values < ENTROPY_LEFT * first) if first > 0 else None
    if step is None:
        return None
    return Onset(step, f"{keys.ENTROPY} {values[step]:.3g}, at most {first:.3g} in its first steps")


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
    wide = values[(before > 0) & (values > EXPLOSION * before)]
    if wide.empty:
        return None
    step = int(wide.index[0])
    return Onset(step, f"{keys.GRADIENT_NORM} {wide[step]:.3g}, median before {before[step]:.3g}")


def _one_sided(run: Run) -> Onset | None:
    sides = pandas.DataFrame(
        {"low": _trained(run, keys.CLIPPED_LOW), "high": _trained(run, keys.CLIPPED_HIGH)}
    ).dropna()
    total = sides.sum(axis=1)
    step = _lasts((total >= WORTH_CLIPPING) & (sides.max(axis=1) >= ONE_SIDE * total), LONG) if len(sides) else None
    if step is None:
        return None
    low, high = sides.loc[step]
    return Onset(step, f"{keys.CLIPPED_LOW} {low:.3g}, {keys.CLIPPED_HIGH} {high:.3g}")


def _single_update(run: Run) -> Onset | None:
    ratio, kl = _trained(run, keys.RATIO), _trained(run, keys.KL)
    # An update that verl skipped leaves the ratio at 1 whatever the mini-batch.
    if run.skipped_updates is not None:
        return None
    if ratio.empty or kl.empty or (ratio - 1).abs().max() >= RATIO_IS_ONE or kl.abs().max() >= RATIO_IS_ONE:
        return None
    return Onset(int(ratio.index[0]), f"{keys.RATIO} 1 and {keys.KL} 0 in all {len(ratio)} steps")


def _anchored(run: Run) -> Onset | None:
    ratio = _trained(run, keys.RATIO)
    # The mean ratio of samples to the policy that drew them is 1, however old they are; its logarithm's is not 0.
    kl = _trained(run, keys.KL).reindex(ratio.index, fill_value=0.0)
    moved = ((ratio - 1).abs() >= RATIO_IS_NOT_ONE) | (kl.abs() >= KL_IS_NOT_ZERO)
    step = _lasts(moved) if run.updates_a_step == 1 else None
    if step is None:
        return None
    return Onset(step, f"{keys.RATIO} {ratio[step]:.4g}, {keys.KL} {kl[step]:.3g} at one update a rollout batch")


def _target(run: Run) -> float | None:
    """The target of the search, if it is a target for the share that is logged."""
    is_share = run.configuration.get("clipx.contribution", "share") == "share"
    return run.configuration.get("clipx.target") if is_share else None


def _search(run: Run) -> Onset | None:
    share, after = _trained(run, keys.SHARE_BEFORE), _trained(run, keys.SHARE_AFTER)
    target = _target(run)
    bounds = [_trained(run, key) for key in (keys.BOUND_LOW, keys.BOUND_HIGH)]
    idle = all(len(one) and one.max() - one.min() < RATIO_IS_ONE for one in bounds)
    if target is None or share.empty or after.empty or not idle or share.min() < target:
        return None
    return Onset(int(share.index[0]), f"{keys.SHARE_BEFORE} {share.min():.3g} or more, target {target:g}")


def _saturated(run: Run) -> Onset | None:
    target = _target(run)
    stop, by = (run.configuration.get(f"clipx.{name}") for name in ("upper_stop", "upper_step"))
    high, share = _trained(run, keys.BOUND_HIGH_LAST).align(_trained(run, keys.SHARE_AFTER), join="inner")
    # The last candidate is the stop, or less than a step below it.
    step = None if None in (target, stop, by) else _lasts((high > stop - by + RATIO_IS_ONE) & (share < target))
    if step is None:
        return None
    return Onset(
        step, f"{keys.BOUND_HIGH_LAST} {high[step]:.3g}, {keys.SHARE_AFTER} {share[step]:.3g}, target {target:g}"
    )


def _few_tokens(run: Run) -> Onset | None:
    names, alpha = keys.of_bins("count", run.log.columns), run.configuration.get("clipx.alpha")
    if not names or alpha is None:
        return None
    counts = run.log.loc[run.log.index > 0, names].dropna()
    few = (counts > 0) & (counts <= alpha**2 + 1)
    step = _lasts(few.sum(axis=1) > len(names) / 2)
    if step is None:
        return None
    return Onset(step, f"{COUNT} at most {alpha**2 + 1:g} in {few.loc[step].sum()} of {len(names)} bins")


def _truncated(run: Run) -> Onset | None:
    rollout = "actor_rollout_ref.rollout"
    top_p, top_k = (run.configuration.get(f"{rollout}.{key}") for key in ("top_p", "top_k"))
    cut = [f"{rollout}.top_p {top_p:g}"] if isinstance(top_p, int | float) and top_p < 1 else []
    cut += [f"{rollout}.top_k {top_k}"] if isinstance(top_k, int) and top_k > 0 else []
    trained = run.log.index[run.log.index > 0]
    return Onset(int(trained[0]), " and ".join(cut)) if cut and len(trained) else None


def _skipped(run: Run) -> Onset | None:
    found = run.skipped_updates
    if found is None:
        return None
    if found.updates is None:
        count = f"updates skipped in {found.steps} of {found.trained} steps since, how many this log does not say"
    else:
        all_updates = (run.updates_a_step or 0) * found.trained
        of_all = f" of {all_updates}" if all_updates >= found.updates else ""
        count = f"{found.updates}{of_all} update{'' if found.updates == 1 and not of_all else 's'} skipped since"
    named = ", ".join(
        f"{key} in {len(at)} step{'s' * (len(at) > 1)}"
        for key in keys.FINITE
        if key != keys.GRADIENT_NORM and (at := run.not_finite.get(key))
    )
    return Onset(found.first, f"{count}; not finite in this log: {named}" if named else count)


RULES = (
    Rule(
        "entropy collapse", (keys.ENTROPY,), _entropy,
        f"below {ENTROPY_LEFT:.0%} of the greatest of its first {LASTING} steps, {LASTING} steps in a row",
        "healthy runs of docs/results/cpu_small.md fall to 9 % for as long", True,
        "Raise the upper bound (+clipx=dapo), or take a method that keeps improbable tokens "
        "(+clipx=acpo, +clipx=cispo).", "docs/faq.md",
    ),
    Rule(
        "few prompts teach, because samples score alike", (keys.ALIKE,), _beyond(keys.ALIKE, MOST_ALIKE),
        f"{MOST_ALIKE:.0%} of the prompts or more, {LASTING} steps in a row",
        "such prompts have advantage 0, so fewer than a tenth teach", True,
        "Take easier or harder prompts, more samples a prompt, or filter groups.", "docs/dev/reliability.md#health",
    ),
    Rule(
        "one-sided clipping", (keys.CLIPPED_LOW, keys.CLIPPED_HIGH), _one_sided,
        f"{ONE_SIDE:.0%} on one side, of at least {WORTH_CLIPPING:.0%} of the tokens, {LONG} steps in a row",
        "below that share clipping hardly matters; one of 75 healthy runs was so in a few steps", True,
        "Move that side's bound, or let a method adapt it.", "docs/methods.md",
    ),
    Rule(
        ONE_UPDATE, (keys.RATIO, keys.KL), _single_update,
        f"ratio 1 and KL 0 to {RATIO_IS_ONE:g} in every step", "rounding of float32", False,
        "Make actor.ppo_mini_batch_size smaller than data.train_batch_size.", "docs/scopes.md",
    ),
    Rule(
        NO_SEARCH,
        (keys.SHARE_BEFORE, keys.SHARE_AFTER, keys.BOUND_LOW, keys.BOUND_HIGH, "clipx.target"), _search,
        "the share of positive tokens at or above the target in every step, bounds constant",
        "the search's own condition", False, "Raise clipx.target.", "docs/methods.md#bapo",
    ),
    Rule(
        "bounds idle: too few tokens a bin", (COUNT, "clipx.alpha"), _few_tokens,
        f"alpha² + 1 tokens or fewer in most bins, {LASTING} steps in a row",
        "among n tokens none lies further than √(n − 1) standard deviations from their mean", False,
        "Take larger mini-batches, fewer bins or a smaller clipx.alpha.", "docs/methods.md#acpo",
    ),
    Rule(
        "bounds saturated",
        (keys.BOUND_HIGH_LAST, keys.SHARE_AFTER, "clipx.target", "clipx.upper_stop", "clipx.upper_step"),
        _saturated, f"the upper bound at its last candidate and the target missed, {LASTING} steps in a row",
        "the search has nowhere left to go", False, "Raise clipx.upper_stop or lower clipx.target.",
        "docs/methods.md#bapo",
    ),
    Rule(
        "ratio anchored to another policy",
        (keys.RATIO, keys.KL, "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"), _anchored,
        f"mean ratio further than {RATIO_IS_NOT_ONE:g} from 1, or KL further than {KL_IS_NOT_ZERO:g} from 0, at one "
        f"update a rollout batch, {LASTING} steps in a row",
        "the first update's ratio is 1 unless its old log-probabilities are another policy's", True,
        "Look at bypass mode and staleness: the clip acts on the mismatch too.", "docs/scopes.md#staleness",
    ),
    Rule(
        "mismatch of rollout and training", (keys.MISMATCH,), _beyond(keys.MISMATCH, MOST_MISMATCH),
        f"mean difference of probability {MOST_MISMATCH:g} or more, {LASTING} steps in a row", "judgement", True,
        "Compare the engines' precision and versions, or correct it (algorithm.rollout_correction).",
        "docs/scopes.md#staleness",
    ),
    Rule(
        "truncated sampling", ("actor_rollout_ref.rollout.top_p", "actor_rollout_ref.rollout.top_k"), _truncated,
        "top_p below 1 or top_k above 0", "the loss's probabilities are of the whole distribution", False,
        "Sample with top_p 1 and top_k -1.", "docs/scopes.md#staleness", any_of=True,
    ),
    Rule(
        "gradient explosion", (keys.GRADIENT_NORM,), _gradient,
        f"{EXPLOSION:g} times the median of the steps before, of which there are {STEPS_BEFORE} or more",
        "healthy runs of docs/results/cpu_small.md stay below 20 times their median", True,
        "Lower the learning rate or actor.grad_clip.", "docs/dev/reliability.md",
    ),
    Rule(
        REWARD_COLLAPSE, (keys.REWARD,), _reward,
        f"mean of a tenth of the steps below {KEPT:.0%} of the best before, beyond noise",
        "the report's own definition of a collapse", True,
        COLLAPSE_REMEDY, "docs/report.md",
    ),
    Rule(
        "skipped updates", (keys.SKIPPED_UPDATES, keys.GRADIENT_NORM), _skipped,
        "any", "verl skips an update only where its gradient is not finite", False,
        "The policy stayed as it was, so that clipping and bounds do not show how the method trains. Find the values "
        "that are not finite: the run's output names rank, fields and prompts.",
        "docs/dev/reliability.md#health", any_of=True,
    ),
    Rule(
        "responses cut at the limit", (keys.CUT,), _beyond(keys.CUT, MOST_CUT),
        f"{MOST_CUT:.0%} of the responses or more, {LASTING} steps in a row", "judgement", True,
        "Raise data.max_response_length, or look whether responses ramble.", "docs/dev/reliability.md#health",
    ),
)  # fmt: skip


def table() -> str:
    """The rules as a table in Markdown, for docs/diagnosis.md."""
    rows = [
        f"| {rule.name} | {', '.join(f'`{name}`' for name in rule.columns)} | {rule.threshold} "
        f"| {rule.reason}{' (heuristic)' if rule.heuristic else ''} | {rule.remedy} "
        f"| [{rule.link.removeprefix('docs/')}]({rule.link.removeprefix('docs/')}) |"
        for rule in RULES
    ]
    return "\n".join(
        ["| finding | reads | threshold | its reason | remedy | more |", "|---|---|---|---|---|---|", *rows]
    )
