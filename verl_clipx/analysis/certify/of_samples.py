"""The questions about what the arms trained on: seeds, prompts, responses, and how old they were."""

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from verl_clipx.analysis.certify.arms import (
    Arms,
    Outcome,
    Verdict,
    decided,
    listed,
    question,
    unrecorded_second_runs,
)
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run import Run
from verl_clipx.common.sentences import percent
from verl_clipx.run.keys import OLDEST_ALLOWED
from verl_clipx.run.trainer import OLDER

# The beginnings of the keys under which verl logs a rollout batch's data, whichever loss trains on it.
DATA_PREFIXES = ("critic/score/", "critic/rewards/", "response_length/", "prompt_length/", "critic/advantages/")
# With fewer different numbers than this, two batches may agree by chance.
FEWEST_NUMBERS = 3
# verl's metrics of the oldest sample, in weight versions.
AGE_KEYS = ("training/off_policy/trajectory_staleness_worst/max", "training/off_policy/trajectory_staleness/max")
# If at most this share of the first batch's responses are different, the samples of a group are taken to repeat.
LARGEST_DISTINCT_SHARE_OF_REPEATS = 0.5


@cache
def data_by_step(run: Run) -> dict[int, tuple[float, ...]]:
    """Return the logged numbers that tell a step's batch from others: its rewards, lengths and advantages.

    A step that lacks one of these numbers is left out, and so is a step with fewer than `FEWEST_NUMBERS` different
    ones. The result is empty if the log has fewer than `FEWEST_NUMBERS` such metrics.

    Returns:
        From a step to the values of its metrics, in the order of the log's columns.
    """
    columns = [key for key in run.log if key.startswith(DATA_PREFIXES)]
    if len(columns) < FEWEST_NUMBERS:
        return {}
    numbers: dict[int, tuple[float, ...]] = {}
    for step, row in run.log[columns].dropna().iterrows():
        if len({*row}) >= FEWEST_NUMBERS:
            numbers[step] = tuple(row)
    return numbers


@question("every seed reached its run", needs="the seed (data.seed)", has=lambda run: run.seed is not None)
def seeds_reach(arms: Arms) -> Outcome:
    """Did every seed reach its run, so that the runs of an arm saw different prompts and drew different samples?"""
    wrong: list[str] = []
    unknown = unrecorded_second_runs(arms)
    compared: set[str] = set()
    pairs = [*itertools.combinations(arms.first, 2), *itertools.combinations(arms.second, 2)]
    for left, right in pairs:
        names = f"{left.name} and {right.name}"
        logged_steps = data_by_step(left).keys() & data_by_step(right).keys()
        if left.seed == right.seed:
            wrong.append(f"{names} have the seed {left.seed}")
        elif comparable_steps(left, right):
            compared.add("prompts and responses")
            unknown += unrecorded_fingerprints(left, right)
            if have_equal_fingerprints(left, right, "prompts"):
                wrong.append(f"{names} trained on the same prompts in {describe_comparable_steps(left, right)}")
            if have_equal_fingerprints(left, right, "responses"):
                wrong.append(f"{names} drew the same responses in {describe_comparable_steps(left, right)}")
        elif logged_steps:
            compared.add("the logged rewards and lengths")
            if all(data_by_step(left)[step] == data_by_step(right)[step] for step in logged_steps):
                wrong.append(f"{names} logged the same rewards and lengths in every step that can be compared")
        else:
            unknown.append(f"samples that can be compared in {names}")
    return decided(wrong, f"{' and '.join(sorted(compared))} differ between the runs of an arm", unknown)


def comparable_steps(left: Run, right: Run) -> list[int]:
    """Return the steps in which both runs have fingerprints by the same definition, in their order."""
    steps = sorted(left.batches.keys() & right.batches.keys())
    return [step for step in steps if definition_of(left.batches[step]) == definition_of(right.batches[step])]


def unrecorded_fingerprints(left: Run, right: Run) -> list[str]:
    """Return what `decided` takes as `unknown` where common steps of two runs lack fingerprints to compare.

    Returns:
        One text on all such steps; an empty list if there is none.
    """
    common = [step for step in left.log.index.intersection(right.log.index) if step > 0]
    missing = sorted({*common} - {*comparable_steps(left, right)})
    if not missing:
        return []
    return [
        f"step {missing[0]} and {len(missing) - 1} more in {left.name} and {right.name}: the fingerprints of "
        f"{describe_comparable_steps(left, right)} are no evidence of others"
    ]


def describe_comparable_steps(left: Run, right: Run) -> str:
    """Say in which steps the fingerprints of two runs can be compared; there must be at least one."""
    steps = comparable_steps(left, right)
    if len(steps) == 1:
        return f"step {steps[0]} alone"
    return f"every one of {len(steps)} steps"


def definition_of(batch: Mapping[str, Any]) -> int:
    """Return the number of the definition that a batch's fingerprints follow.

    Batches whose fingerprints follow the first definition are written without a number.
    """
    return batch.get("definition", 1)


def have_equal_fingerprints(left: Run, right: Run, name: str) -> bool:
    """Return whether a fingerprint of two runs is the same in every comparable step.

    Args:
        left, right: two runs with at least one comparable step.
        name: what the fingerprint is of, "prompts" or "responses".
    """
    steps = comparable_steps(left, right)
    return all(left.batches[step][name] == right.batches[step][name] for step in steps)


@question("the responses of a group differ", needs="fingerprints of responses", has=lambda run: run.batches)
def samples_differ(arms: Arms) -> Outcome:
    """Were the responses of a group drawn with different seeds, or again and again with the same one?

    The first batch shows it best.
    """
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
        if share <= LARGEST_DISTINCT_SHARE_OF_REPEATS:
            wrong.append(f"{run.name}: {percent(share)} of the first batch's")
    return decided(wrong, f"{percent(min(shares, default=0))} or more of the first batch's", unknown)


@question("runs of one seed are paired", needs="fingerprints of prompts", has=lambda run: run.batches)
def are_paired(arms: Arms) -> Outcome:
    """Did runs of one seed see the same prompts in the same order in both arms?"""
    pairs = pairs_by_seed(arms)
    if not pairs:
        return Outcome(Verdict.PASSED, "not paired (no seed in both arms): compare them as independent runs")
    incomparable = [f"{left.name} and {right.name}" for left, right in pairs if not comparable_steps(left, right)]
    if incomparable:
        return Outcome(Verdict.UNKNOWN, f"no step has fingerprints that can be compared in {listed(incomparable)}")
    seeds_of_unlike = [str(left.seed) for left, right in pairs if not have_equal_fingerprints(left, right, "prompts")]
    if seeds_of_unlike:
        reason = f"other prompts under the seed {listed(seeds_of_unlike)}, be it other data or another order"
        return Outcome(Verdict.PASSED, f"not paired ({reason}): compare them as independent runs")
    unknown: list[str] = []
    for left, right in pairs:
        unknown += unrecorded_fingerprints(left, right)
    seeds = [str(left.seed) for left, _ in pairs]
    return decided([], f"paired by seed: {listed(seeds)}", unknown)


def pairs_by_seed(arms: Arms) -> list[tuple[Run, Run]]:
    """Return the pairs of a run of the first arm and a run of the second that have the same seed."""
    pairs = itertools.product(arms.first, arms.second)
    return [(left, right) for left, right in pairs if left.seed == right.seed is not None]


@question("what differs reached the runs")
def arms_part(arms: Arms) -> Outcome:
    """Did the arms train on different samples after the first update? If not, both trained the same loss.

    Before the first update both have the same weights, so equal samples in the first step are no fault.
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
    """Return the common steps, without the first, in which two runs say by the same measure what they trained on.

    The steps are in their order. Step 0, in which a run only validates, is no training step.
    """
    common = sorted({*left.log.index} & {*right.log.index} - {0})
    return [step for step in common[1:] if measure_of(left, step) == measure_of(right, step) is not None]


def measure_of(run: Run, step: int) -> str | None:
    """Return the measure by which a run says what it trained on in a step; None if it does not say it."""
    if step in run.batches and run.batches[step]["sequences"]:
        return f"fingerprints by definition {definition_of(run.batches[step])}"
    if step in data_by_step(run):
        return "logged rewards and lengths"
    return None


def trained_on(run: Run, step: int) -> Any:
    """Return what tells the samples of a step from others: its fingerprint, or the rewards and lengths in the log."""
    if step in run.batches and run.batches[step]["sequences"]:
        return run.batches[step]["rows"]
    return data_by_step(run)[step]


@question("no batch was trained twice")
def trained_once(arms: Arms) -> Outcome:
    """Was no batch trained on twice, and did the updates of each step train the rows of its batch?"""
    wrong: list[str] = []
    unknown: list[str] = []
    for run in arms.runs:
        wrong += [f"{run.name}: {message}" for message in wrong_updates(run)]
        data_of_steps = rows_by_step(run) or data_by_step(run)
        if not data_of_steps:
            unknown.append(f"the batches' data in {run.name}")
        if len({definition_of(batch) for batch in run.batches.values()}) > 1:
            unknown.append(f"fingerprints of one definition in {run.name}, which two versions of the plugin made")
        missing = [step for step in run.values(keys.STEP).index if step > 0 and step not in run.batches]
        if run.batches and missing:
            unknown.append(f"fingerprints of {len(missing)} steps in {run.name}, step {missing[0]} the first of them")
        first_step: dict[Any, int] = {}
        repetitions: list[tuple[int, int]] = []
        for step, data in sorted(data_of_steps.items()):
            if data in first_step:
                repetitions.append((step, first_step[data]))
            else:
                first_step[data] = step
        if repetitions:
            step, earlier = repetitions[0]
            wrong.append(
                f"{run.name}: step {step} has the data of step {earlier}; {len(repetitions)} of {len(data_of_steps)} "
                "repeat one"
            )
    measure = "fingerprints" if all(run.batches for run in arms.runs) else "logged rewards and lengths"
    if all("updates" in batch for run in arms.runs for batch in run.batches.values()):
        measure = f"{measure} and updates"
    return decided(wrong, right=f"by {measure} of each step", unknown=unknown)


def rows_by_step(run: Run) -> dict[int, tuple[int, str]]:
    """Return the fingerprint of each step's rows, with the number of its definition before it.

    Steps in which no token counts are left out.
    """
    rows: dict[int, tuple[int, str]] = {}
    for step, batch in run.batches.items():
        if batch["sequences"]:
            rows[step] = (definition_of(batch), batch["rows"])
    return rows


def wrong_updates(run: Run) -> list[str]:
    """Return messages on the first step in which the rows of a run's updates are wrong; empty if there is none.

    Rows are wrong if an update of an earlier step has the same ones, or if the updates of a step do not have the rows
    of its batch.
    """
    first_step: dict[str, int] = {}
    for step, batch in sorted(run.batches.items()):
        updates = batch.get("updates", [])
        wrong = []
        repeated = [update for update in updates if update in first_step]
        if repeated:
            wrong.append(f"an update of step {step} has the rows of one of step {first_step[repeated[0]]}")
        if updates and not trains_all(updates, batch["rows"]):
            wrong.append(f"the updates of step {step} trained other rows than its batch has")
        if wrong:
            return wrong
        # An update without a token that counts has the fingerprint 0.
        for update in updates:
            if int(update, 16):
                first_step[update] = step
    return []


def trains_all(updates: Sequence[str], rows: str) -> bool:
    """Return whether updates have each row of their batch equally often, as epochs and Lopti's passes do.

    The fingerprint of several rows is the sum of theirs, modulo 2**64.

    Args:
        updates: the fingerprint of each update's rows, in hexadecimal.
        rows: the fingerprint of the batch's rows, in hexadecimal.
    """
    trained = sum(int(update, 16) for update in updates) % 2**64
    return any(trained == int(rows, 16) * times % 2**64 for times in range(1, len(updates) + 1))


@question("no sample was older than allowed", needs="the configuration", has=lambda run: run.configuration)
def not_older(arms: Arms) -> Outcome:
    """Was no sample older than the configuration allows?"""
    wrong: list[str] = []
    unknown: list[str] = []
    ages: list[float] = []
    for run in arms.runs:
        allowed = run.record.trainer.oldest_allowed
        age = oldest_in(run)
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
    """Return the age of a run's oldest sample, in weight versions; None if neither its batches nor its log says it."""
    ages = [step - 1 - batch["versions"][0] for step, batch in run.batches.items() if "versions" in batch]
    for key in AGE_KEYS:
        ages.extend(run.values(key))
    if not ages:
        return None
    return float(max(ages))
