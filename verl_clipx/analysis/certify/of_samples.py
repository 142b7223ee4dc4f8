"""The questions about what the arms trained on: seeds, prompts, responses, and how old they were."""

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from verl_clipx.analysis.certify.arms import Arms, Found, Verdict, decided, listed, missing_seeds, question
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run import Run
from verl_clipx.common.sentences import percent
from verl_clipx.run.keys import OLDEST_ALLOWED
from verl_clipx.run.trainer import OLDER

# What verl logs of a rollout batch's data, whichever loss trains on it.
OF_DATA = ("critic/score/", "critic/rewards/", "response_length/", "prompt_length/", "critic/advantages/")
AGES = ("training/off_policy/trajectory_staleness_worst/max", "training/off_policy/trajectory_staleness/max")
# A share of different responses in the first batch at which seeds are taken to repeat.
FEW = 0.5


@cache
def data_by_step(run: Run) -> dict[int, tuple[float, ...]]:
    """Returns what the log has of each step's data, without steps that lack it or in which it is all equal."""
    columns = [key for key in run.log if key.startswith(OF_DATA)]
    if len(columns) < 3:
        return {}
    return {step: tuple(row) for step, row in run.log[columns].dropna().iterrows() if len({*row}) > 2}


@question("every seed reached its run", "the seed (data.seed)", lambda run: run.seed is not None)
def seeds_reach(arms: Arms) -> Found:
    """Did every seed reach its run, so that it saw other prompts and drew other samples?"""
    wrong: list[str] = []
    unknown = missing_seeds(arms)
    seen: set[str] = set()
    for left, right in [pair for arm in arms.both for pair in itertools.combinations(arm, 2)]:
        names = f"{left.name} and {right.name}"
        logged = data_by_step(left).keys() & data_by_step(right).keys()
        if left.seed == right.seed:
            wrong.append(f"{names} have the seed {left.seed}")
        elif comparable_steps(left, right):
            seen.add("prompts and responses")
            unknown += uncovered(left, right)
            if shared(left, right, "prompts") == 1:
                wrong.append(f"{names} trained on the same prompts in {covered(left, right)}")
            if shared(left, right, "responses") == 1:
                wrong.append(f"{names} drew the same responses in {covered(left, right)}")
        elif logged:
            seen.add("the logged rewards and lengths")
            if all(data_by_step(left)[step] == data_by_step(right)[step] for step in logged):
                wrong.append(f"{names} logged the same rewards and lengths in every step")
        else:
            unknown.append(f"samples that can be compared in {names}")
    return decided(wrong, f"{' and '.join(sorted(seen))} differ between the runs of an arm", unknown)


def comparable_steps(left: Run, right: Run) -> list[int]:
    """Returns the steps of which two runs have fingerprints by one definition, in their order."""
    steps = sorted(left.batches.keys() & right.batches.keys())
    return [step for step in steps if definition_of(left.batches[step]) == definition_of(right.batches[step])]


def uncovered(left: Run, right: Run) -> list[str]:
    """Returns which common steps of two runs lack fingerprints to compare, as `decided` takes what is not recorded."""
    common = [step for step in left.log.index.intersection(right.log.index) if step > 0]
    without = sorted({*common} - {*comparable_steps(left, right)})
    if not without:
        return []
    evidence = f"the fingerprints of {covered(left, right)} are no evidence of others"
    return [f"step {without[0]} and {len(without) - 1} more in {left.name} and {right.name}: {evidence}"]


def covered(left: Run, right: Run) -> str:
    """Returns in words in which steps the fingerprints of two runs can be compared."""
    steps = comparable_steps(left, right)
    return f"step {steps[0]} alone" if len(steps) == 1 else f"every one of {len(steps)} steps"


def definition_of(batch: Mapping[str, Any]) -> int:
    """Returns the number of the definition that a batch's fingerprints follow; the first is written without one."""
    return batch.get("definition", 1)


def shared(left: Run, right: Run, name: str) -> float:
    """Returns in which share of the comparable steps of two runs, at least one, a fingerprint is the same."""
    steps = comparable_steps(left, right)
    return sum(left.batches[step][name] == right.batches[step][name] for step in steps) / len(steps)


@question("the responses of a group differ", "fingerprints of responses", lambda run: run.batches)
def samples_differ(arms: Arms) -> Found:
    """Were the responses of a group drawn apart, or by one seed again and again? The first batch says it best."""
    wrong: list[str] = []
    unknown: list[str] = []
    shares: list[float] = []
    for run in arms.runs:
        batch = run.batches[min(run.batches)]
        if not batch["sequences"]:
            unknown.append(f"responses with tokens that count in the first batch of {run.name}")
            continue
        share = batch["distinct"] / batch["sequences"]
        shares.append(share)
        if share <= FEW:
            wrong.append(f"{run.name}: {percent(share)} of the first batch's")
    return decided(wrong, f"{percent(min(shares, default=0))} or more of the first batch's", unknown)


@question("runs of one seed are paired", "fingerprints of prompts", lambda run: run.batches)
def are_paired(arms: Arms) -> Found:
    """Did runs of one seed see the same prompts in the same order in both arms?"""
    pairs = pairs_by_seed(arms)
    if not pairs:
        return Verdict.PASSED, "not paired (no seed in both arms): compare them as independent runs"
    apart = [f"{left.name} and {right.name}" for left, right in pairs if not comparable_steps(left, right)]
    if apart:
        return Verdict.UNKNOWN, f"no step has fingerprints that can be compared in {listed(apart)}"
    others = [pair for pair in pairs if shared(*pair, "prompts") < 1]
    if others:
        seeds = listed([str(left.seed) for left, _ in others])
        reason = f"other prompts under the seed {seeds}, be it other data or another order"
        return Verdict.PASSED, f"not paired ({reason}): compare them as independent runs"
    unknown = [text for pair in pairs for text in uncovered(*pair)]
    return decided([], f"paired by seed: {listed([str(left.seed) for left, _ in pairs])}", unknown)


def pairs_by_seed(arms: Arms) -> list[tuple[Run, Run]]:
    """Returns the pairs of a run of each arm that have one seed."""
    pairs = itertools.product(arms.first, arms.second)
    return [(left, right) for left, right in pairs if left.seed == right.seed is not None]


@question("what differs reached the runs")
def arms_part(arms: Arms) -> Found:
    """Did the arms train on other samples once a first update was made? The same ones mean that both trained one loss.

    Before the first update both have the same weights, so that equal samples in the first step are as it should be.
    """
    wrong: list[str] = []
    unknown: list[str] = []
    for left, right in itertools.product(arms.first, arms.second):
        names = f"{left.name} and {right.name}"
        steps = later_steps(left, right)
        if not steps:
            unknown.append(f"what {names} trained on in a common step after the first")
        elif all(trained_on(left, step) == trained_on(right, step) for step in steps):
            wrong.append(f"{names} trained on the same samples in all {len(steps)} steps after the first")
    return decided(wrong, "the arms trained on other samples after the first step", unknown)


def later_steps(left: Run, right: Run) -> list[int]:
    """Returns the steps after the first of which two runs say by one measure what they trained on, in their order."""
    common = sorted({*left.log.index} & {*right.log.index} - {0})
    return [step for step in common[1:] if measure_of(left, step) == measure_of(right, step) is not None]


def measure_of(run: Run, step: int) -> str | None:
    """Returns by which measure a run says what it trained on in a step; None if it doesn't."""
    if step in run.batches and run.batches[step]["sequences"]:
        return f"fingerprints by definition {definition_of(run.batches[step])}"
    return "logged rewards and lengths" if step in data_by_step(run) else None


def trained_on(run: Run, step: int) -> Any:
    """Returns what tells the samples of a step from others: its fingerprint, or the rewards and lengths in the log."""
    if step in run.batches and run.batches[step]["sequences"]:
        return run.batches[step]["rows"]
    return data_by_step(run)[step]


@question("no batch was trained twice")
def trained_once(arms: Arms) -> Found:
    """Was no batch trained on twice, and did the updates of each step train what its batch has?"""
    wrong, unknown = [], []
    for run in arms.runs:
        wrong += [f"{run.name}: {what}" for what in wrong_updates(run)]
        of_step = rows_by_step(run) or data_by_step(run)
        if not of_step:
            unknown.append(f"the batches' data in {run.name}")
        if len({definition_of(batch) for batch in run.batches.values()}) > 1:
            unknown.append(f"fingerprints of one definition in {run.name}, which two versions of the plugin made")
        missing = [step for step in run.values(keys.STEP).index if step > 0 and step not in run.batches]
        if run.batches and missing:
            unknown.append(f"fingerprints of {len(missing)} steps in {run.name}, step {missing[0]} the first of them")
        first: dict[Any, int] = {}
        again = [(step, first[rows]) for step, rows in sorted(of_step.items()) if first.setdefault(rows, step) != step]
        if again:
            step, before = again[0]
            wrong.append(
                f"{run.name}: step {step} has the data of step {before}; {len(again)} of {len(of_step)} repeat one"
            )
    by = "fingerprints" if all(run.batches for run in arms.runs) else "logged rewards and lengths"
    if all("updates" in batch for run in arms.runs for batch in run.batches.values()):
        by = f"{by} and updates"
    return decided(wrong, f"by {by} of each step", unknown)


def rows_by_step(run: Run) -> dict[int, tuple[int, str]]:
    """Returns the fingerprint of each step's rows with its definition, without steps in which no token counts."""
    return {step: (definition_of(batch), batch["rows"]) for step, batch in run.batches.items() if batch["sequences"]}


def wrong_updates(run: Run) -> list[str]:
    """Returns what is wrong with the rows of a run's updates: those of an earlier step, or not those of their batch."""
    first: dict[str, int] = {}
    for step, batch in sorted(run.batches.items()):
        updates = batch.get("updates", [])
        wrong = []
        repeated = [update for update in updates if update in first]
        if repeated:
            wrong.append(f"an update of step {step} has the rows of one of step {first[repeated[0]]}")
        if updates and not trains_all(updates, batch["rows"]):
            wrong.append(f"the updates of step {step} trained other rows than its batch has")
        if wrong:
            return wrong
        # An update without a token that counts has the fingerprint 0.
        first |= {update: step for update in updates if int(update, 16)}
    return []


def trains_all(updates: Sequence[str], rows: str) -> bool:
    """Returns whether updates have each row of their batch equally often, as epochs and Lopti's passes do.

    Args:
        updates: the fingerprint of each update's rows, in hexadecimal.
        rows: that of the batch's.
    """
    trained = sum(int(update, 16) for update in updates) % 2**64
    return any(trained == int(rows, 16) * times % 2**64 for times in range(1, len(updates) + 1))


@question("no sample was older than allowed", "the configuration", lambda run: run.configuration)
def not_older(arms: Arms) -> Found:
    """Was no sample older than the configuration allows?"""
    wrong, unknown, ages = [], [], []
    for run in arms.runs:
        allowed, age = run.record.trainer.oldest_allowed, oldest_in(run)
        if age is None and run.record.trainer.kind == OLDER:
            continue
        if age is None:
            unknown.append(f"the age of samples in {run.name}")
            continue
        if allowed is None:
            unknown.append(f"a limit ({OLDEST_ALLOWED}) in {run.name}")
            continue
        ages.append(age)
        if age > allowed:
            wrong.append(f"{run.name}: {age:g} versions, {allowed} allowed")
    right = f"at most {max(ages):g} versions" if ages else "the trainer samples what it trains on"
    return decided(wrong, right, unknown)


def oldest_in(run: Run) -> float | None:
    """Returns how many versions old a run's oldest sample was; None if neither its batches nor verl's metrics say."""
    ages = [step - 1 - batch["versions"][0] for step, batch in run.batches.items() if "versions" in batch]
    for key in AGES:
        ages.extend(run.values(key))
    return float(max(ages)) if len(ages) else None
