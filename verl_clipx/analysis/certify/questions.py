"""The questions about two arms, a function each, which returns the answer with its evidence."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.floor import (
    clipped_by_step,
    computes_in_single_precision,
    exceeds,
    floors_of,
    later_updates,
)
from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.settings import differing_values
from verl_clipx.common.sentences import percent
from verl_clipx.run.keys import ACTOR, LOSS_AGG_MODE, OLDEST_ALLOWED, POLICY_LOSS, REWARD_FUNCTIONS, REWARD_MODELS
from verl_clipx.run.record import TOLERANCES
from verl_clipx.run.trainer import OLDER

# In which two arms may differ where the command line says nothing: the loss.
LOSS = ("clipx", "clipx.*", f"{POLICY_LOSS}.*", f"{ACTOR}.clip_ratio*")
# What verl logs of a rollout batch's data, whichever loss trains on it.
OF_DATA = ("critic/score/", "critic/rewards/", "response_length/", "prompt_length/", "critic/advantages/")
REWARDS = (*REWARD_FUNCTIONS, *REWARD_MODELS)
AGES = ("training/off_policy/trajectory_staleness_worst/max", "training/off_policy/trajectory_staleness/max")
# A share of different responses in the first batch at which seeds are taken to repeat.
FEW = 0.5
# What a receipt takes for rounding where the record doesn't say in which precision the run computes: bfloat16's.
COARSEST = max(TOLERANCES.values())


class Verdict(Enum):
    """An answer to a question."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "not recorded"


@dataclass(frozen=True)
class Answer:
    """A question with its verdict, and the evidence in words."""

    question: str
    verdict: Verdict
    evidence: str


@dataclass(frozen=True)
class Arms:
    """Two arms of runs, each at least one, and patterns of the keys in which the arms are to differ."""

    first: Sequence[Run]
    second: Sequence[Run]
    vary: Sequence[str] = field(default=())

    @property
    def both(self) -> tuple[Sequence[Run], Sequence[Run]]:
        """The two arms."""
        return self.first, self.second

    @property
    def runs(self) -> list[Run]:
        """All runs, those of the first arm first."""
        return [*self.first, *self.second]


def answers_of(arms: Arms) -> list[Answer]:
    """Returns an answer to every question."""
    return [Answer(question, *ask(arms)) for question, ask in QUESTIONS.items()]


Found = tuple[Verdict, str]


QUESTIONS: dict[str, Callable[[Arms], Found]] = {}


def question(text: str, needs: str = "", has: Callable[[Run], Any] = bool) -> Callable:
    """Declares the question that the decorated function answers, of runs that all have what it needs."""

    def declare(ask: Callable[[Arms], Found]) -> Callable[[Arms], Found]:
        def answer(arms: Arms) -> Found:
            without = [run.name for run in arms.runs if needs and not has(run)]
            return (Verdict.UNKNOWN, f"{needs}: not recorded in {listed(without)}") if without else ask(arms)

        QUESTIONS[text] = answer
        return answer

    return declare


def decided(wrong: Sequence[str], right: str, unknown: Sequence[str] = ()) -> Found:
    """Returns a failure with all that is wrong, else what is not recorded, else that the question passed."""
    if wrong:
        return Verdict.FAILED, "; ".join(wrong)
    return (Verdict.UNKNOWN, f"no record of {'; '.join(unknown)}") if unknown else (Verdict.PASSED, right)


def listed(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@question("the arms differ in nothing but what should differ", "the configuration", lambda run: run.configuration)
def differ_as_stated(arms: Arms) -> Found:
    """Do the arms differ in what should differ, and in nothing else?"""
    values, patterns = differing_values(arms.runs), tuple(arms.vary) or LOSS
    cut = len(arms.first)
    between = [key for key, of_runs in values.items() if {*of_runs[:cut]} != {*of_runs[cut:]}]
    others = [key for key in between if not any(fnmatchcase(key, pattern) for pattern in patterns)]
    idle = [pattern for pattern in arms.vary if not any(fnmatchcase(key, pattern) for key in between)]
    wrong = [
        *(f"{key} is {values[key][0] or 'unset'} and {values[key][cut] or 'unset'}" for key in others),
        *(f"--vary {pattern}: the arms do not differ in it" for pattern in idle),
    ]
    if not between and not idle:
        wrong.append("the arms have one configuration: nothing is compared")
    if others and not arms.vary:
        wrong[-1] += " (what should differ beside the loss: --vary KEY)"
    return decided(wrong, f"in {listed(between)}")


@question("the runs of an arm differ in seeds only", "the configuration", lambda run: run.configuration)
def differ_in_seeds_only(arms: Arms) -> Found:
    """Do the runs of an arm differ in their seeds only?"""
    keys_within = sorted({key for arm in arms.both for key in differing_values(list(arm))})
    wrong = [f"the runs of one arm differ in {key}" for key in keys_within]
    return decided(wrong, "no other key differs", missing_seeds(arms))


def missing_seeds(arms: Arms) -> list[str]:
    """Returns what an arm of one run lacks, as `decided` takes what is not recorded; empty if both have two runs."""
    names = [arm[0].name for arm in arms.both if len(arm) == 1]
    if not names:
        return []
    return [f"a second run in the arm of {' and in that of '.join(names)}: one seed supports no comparison"]


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
    seen = set()
    for left, right in [pair for arm in arms.both for pair in itertools.combinations(arm, 2)]:
        names = f"{left.name} and {right.name}"
        if left.seed == right.seed:
            wrong.append(f"{names} have the seed {left.seed}")
        elif comparable_steps(left, right):
            seen.add("prompts and responses")
            if shared(left, right, "prompts") == 1:
                wrong.append(f"{names} trained on the same prompts in every step")
            if shared(left, right, "responses") == 1:
                wrong.append(f"{names} drew the same responses in every step")
        elif steps := data_by_step(left).keys() & data_by_step(right).keys():
            seen.add("the logged rewards and lengths")
            if all(data_by_step(left)[step] == data_by_step(right)[step] for step in steps):
                wrong.append(f"{names} logged the same rewards and lengths in every step")
        else:
            unknown.append(f"samples that can be compared in {names}")
    return decided(wrong, f"{' and '.join(sorted(seen))} differ between the runs of an arm", unknown)


def comparable_steps(left: Run, right: Run) -> list[int]:
    """Returns the steps of which two runs have fingerprints by one definition."""
    steps = left.batches.keys() & right.batches.keys()
    return [step for step in steps if definition_of(left.batches[step]) == definition_of(right.batches[step])]


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
    pairs = [(left, right) for left in arms.first for right in arms.second if left.seed == right.seed is not None]
    apart = [f"{left.name} and {right.name}" for left, right in pairs if not comparable_steps(left, right)]
    if apart:
        return Verdict.UNKNOWN, f"no step has fingerprints that can be compared in {listed(apart)}"
    paired = [str(left.seed) for left, right in pairs if shared(left, right, "prompts") == 1]
    if pairs and len(paired) == len(pairs):
        return Verdict.PASSED, f"paired by seed: {listed(paired)}"
    reason = "another order of prompts under one seed" if pairs else "no seed in both arms"
    return Verdict.PASSED, f"not paired ({reason}): compare them as independent runs"


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
    by += " and updates" * all("updates" in batch for run in arms.runs for batch in run.batches.values())
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
    if key := next((key for key in AGES if key in run.log), None):
        ages.extend(run.values(key))
    return float(max(ages)) if len(ages) else None


@question("as many steps, updates and prompts", "updates", lambda run: run.schedule.updates_a_step)
def trained_as_much(arms: Arms) -> Found:
    """Did both arms train as many steps and updates, on as many prompts?"""
    amounts = {}
    for run in arms.runs:
        batch, steps = run.record.batch, int((run.log.index > 0).sum())
        amounts[run.name] = (steps, run.schedule.updates_a_step, batch.prompts, batch.responses)
    first, *others = amounts.items()
    names = ("steps", "updates a step", "prompts a step", "responses a prompt")
    wrong = [
        f"{name}: {value} {what}, {first[0]}: {of_first}"
        for name, amount in others
        for what, value, of_first in zip(names, amount, first[1], strict=True)
        if value != of_first
    ]
    tokens = [sum(batch["tokens"] for arm in of for batch in arm.batches.values()) for of in arms.both]
    trained = f"; tokens {tokens[0]:,} and {tokens[1]:,}" if all(tokens) else ""
    each = ", ".join(f"{value} {what}" for what, value in zip(names, first[1], strict=True))
    return decided(wrong, f"each {each}{trained}")


@question("the clip acted")
def clip_acts(arms: Arms) -> Found:
    """Could the clip act in each run, and did it, on more tokens than rounding explains?"""
    wrong: list[str] = []
    unknown: list[str] = []
    shares: list[str] = []
    for run in arms.runs:
        clipped = run.values(keys.CLIPPED_LOW).add(run.values(keys.CLIPPED_HIGH)).dropna()
        clipped = clipped if len(clipped) else run.values(keys.PG_CLIPPED)
        if run.schedule.only_at_ratio_one:
            idle = "one update a rollout batch, at ratio 1 but for rounding"
            wrong.append(f"{run.name}: {idle}: bounds have nothing else to act on")
        elif not len(clipped):
            unknown.append(f"the share of tokens clipped in {run.name}")
        elif clipped.max() <= 0:
            wrong.append(f"{run.name}: no token was clipped in any step")
        elif len(table := clipped_by_step(run)):
            later, floors = later_updates(table), floors_of(run, table)
            of_floors = " and ".join(percent(floor.share) for floor in floors)
            if exceeds(later, floors):
                shares.append(f"{run.name} {percent(later.share)} in later updates, {of_floors} by rounding")
            else:
                alike = f"{percent(later.share)} of tokens clipped in later updates, {of_floors} where nothing moved"
                wrong.append(f"{run.name}: {alike}, a difference that chance explains")
        elif keys.CLIPPED_LOW not in run.log:
            shares.append(f"{run.name} {percent(float(clipped.mean()))} by verl's count, rounding included")
        elif not computes_in_single_precision(run):
            unknown.append(f"how much of the clipping is rounding in {run.name}")
        else:
            shares.append(f"{run.name} {percent(float(clipped.mean()))}")
    return decided(wrong, f"tokens clipped: {listed(shares)}", unknown)


def receipt_logged(run: Run) -> bool:
    """Returns whether a run logged its receipt; one that compared nothing logs only that a check did not hold."""
    return bool(len(run.values(keys.RECEIPT)) or len(run.values(keys.RECEIPT_FAILED)))


@question("the receipt agrees", "the receipt (clipx.receipt)", receipt_logged)
def receipt_passed(arms: Arms) -> Found:
    """Did each run's receipt show that it trained the announced loss?"""
    wrong: list[str] = []
    largest: list[float] = []
    silent: list[str] = []
    for run in arms.runs:
        difference = float(run.values(keys.RECEIPT).max())
        tolerance = run.record.receipt.tolerance or COARSEST
        failed = run.values(keys.RECEIPT_FAILED)
        # A run whose receipt only warns goes on with another loss.
        if math.isnan(difference):
            wrong.append(f"{run.name}: no token was compared")
        elif difference > tolerance:
            wrong.append(f"{run.name}: {difference:.2g} of a token's gradient, more than {tolerance:g}")
        if len(failed) and failed.max() > 0:
            wrong.append(f"{run.name}: its receipt warned of {failed.max():.3g} checks that did not hold")
        if not len(failed):
            silent.append(run.name)
        largest.append(difference)
    right = f"largest difference {max(largest):.2g} of a token's gradient; swap.md lists what it cannot see"
    if silent:
        right = f"{right}; {listed(silent)} did not log {keys.RECEIPT_FAILED}, so a warning would not be seen"
    return decided(wrong, right)


@question("one denominator", LOSS_AGG_MODE, lambda run: run.record.aggregation)
def same_denominator(arms: Arms) -> Found:
    """Is the loss averaged in the same way in both arms?"""
    modes = sorted({run.record.aggregation for run in arms.runs})
    wrong = [f"{LOSS_AGG_MODE} is {' and '.join(modes)}"] if len(modes) > 1 else []
    return decided(wrong, ", ".join(modes))


@question("one reward", "the configuration", lambda run: run.configuration)
def same_reward(arms: Arms) -> Found:
    """Is the reward the same function, of the same file?"""
    named = {
        run.name: {key: run.configuration[key] for key in run.configuration if key.startswith(REWARDS)}
        for run in arms.runs
    }
    reference = named[arms.runs[0].name]
    wrong = [f"{name} has another reward than {arms.runs[0].name}" for name, of in named.items() if of != reference]
    of_file = bool(arms.runs[0].record.reward.paths)
    hashes = {run.record.reward.hash for run in arms.runs}
    if of_file and None in hashes and not wrong:
        return Verdict.UNKNOWN, "the hash of the reward's file: not recorded in runs of earlier versions"
    wrong += ["the reward's file differs between runs"] * (of_file and len(hashes) > 1)
    return decided(wrong, "one file by its hash" if of_file else "verl's own, chosen by the data's source")


@question("one validation", "validations (trainer.validation_data_dir)", lambda run: run.held_out)
def same_validation(arms: Arms) -> Found:
    """Were the runs validated on the same problems?"""
    problems = {run.name: frozenset(run.held_out[0].by_problem) for run in arms.runs}
    first, *others = problems.items()
    wrong = [f"{name} and {first[0]} differ in problems" for name, of in others if of != first[1]]
    return decided(wrong, f"{len(first[1])} problems")
