"""The questions about what the losses did: steps and updates, the clip, the receipt, the validations."""

import math
from collections.abc import Sequence
from statistics import mean

import pandas

from verl_clipx.analysis.certify.arms import Arms, Outcome, Verdict, decided, listed, question
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.floor import (
    combine_measurements,
    computes_in_single_precision,
    count_clipped_by_step,
    count_later_clipped,
    exceeds,
    measure_floors,
)
from verl_clipx.analysis.runs.run import Run
from verl_clipx.common.sentences import percent
from verl_clipx.losses.base.tolerances import TOLERANCES
from verl_clipx.run.record import ReceiptResult

# The tolerance of a receipt whose record does not have one: bfloat16's, the largest.
COARSEST_TOLERANCE = max(TOLERANCES.values())
# Two shares of responses or updates are alike if they differ by no more than this: sound runs lose a few as well.
LARGEST_DIFFERENCE_OF_SHARES = 0.05
# Two amounts are alike if they differ by no more than this part of the larger one.
LARGEST_RELATIVE_DIFFERENCE = 0.05
# Two learning rates are the same up to this part of one, since every run computes them in the same way.
LARGEST_DIFFERENCE_OF_RATES = 1e-6


@question(
    "the same steps, with as many updates and prompts",
    needs="updates",
    has=lambda run: run.schedule.updates_a_step,
)
def trained_as_much(arms: Arms) -> Outcome:
    """Did all runs train the same steps with the same amounts in each, and did no arm lose more than the other?

    Each run is compared with the first one in its steps, its learning rates, and its numbers of updates, prompts and
    responses. Each run must have had a gradient. The arms must be alike in the share of responses with values that are
    not finite, of skipped updates, and of sampled tokens that counted.
    """
    reference, *compared = arms.runs
    wrong: list[str] = []
    for run in compared:
        if steps_of(run) != steps_of(reference):
            wrong.append(f"{run.name} has {span_of(run)}, {reference.name} has {span_of(reference)}")
        expected_amounts = amounts_of(reference)
        for unit, amount in amounts_of(run).items():
            expected = expected_amounts[unit]
            if amount != expected:
                wrong.append(f"{run.name}: {amount} {unit}, {reference.name}: {expected}")
        wrong += unlike_in_updates(reference, run)
        wrong += unlike_in_samples(reference, run)
        wrong += unlike_in_rate(reference, run)
    wrong += without_gradient(arms)
    wrong += not_finite_unlike(arms)
    wrong += skipped_unlike(arms)
    wrong += counted_unlike(arms)
    amounts = ", ".join(f"{amount} {unit}" for unit, amount in amounts_of(reference).items())
    right = f"each {span_of(reference)}, {amounts}"
    tokens_of_first = sum(tokens_of(run) for run in arms.first)
    tokens_of_second = sum(tokens_of(run) for run in arms.second)
    if tokens_of_first and tokens_of_second:
        right = f"{right}; tokens {tokens_of_first:,} and {tokens_of_second:,}"
    return decided(wrong, right)


def tokens_of(run: Run) -> int:
    """Return how many tokens counted in a run's loss, by its fingerprints; 0 if it has none."""
    return sum(batch["tokens"] for batch in run.batches.values())


def common_batches(reference: Run, run: Run) -> list[int]:
    """Return the steps of which both runs have fingerprints, in their order."""
    return sorted(reference.batches.keys() & run.batches.keys())


def unlike_in_updates(reference: Run, run: Run) -> list[str]:
    """Return a message if two runs made different numbers of updates a step, by their fingerprints.

    A worker or a trainer may not keep to the configured number. Runs whose configured numbers differ get no message
    here, since the comparison of their amounts says so.
    """
    if reference.schedule.updates_a_step != run.schedule.updates_a_step:
        return []
    steps = common_batches(reference, run)
    expected = numbers_of_updates(reference, steps)
    numbers = numbers_of_updates(run, steps)
    if not expected or not numbers or numbers == expected:
        return []
    listed_numbers = listed([str(number) for number in sorted(numbers)])
    listed_expected = listed([str(number) for number in sorted(expected)])
    return [
        f"{run.name} and {reference.name} made {listed_numbers} and {listed_expected} updates a step, "
        "by their fingerprints"
    ]


def numbers_of_updates(run: Run, steps: Sequence[int]) -> set[int]:
    """Return the numbers of updates that a run made in some of its steps, by its fingerprints, without 0."""
    numbers = {len(run.batches[step].get("updates", ())) for step in steps}
    return numbers - {0}


def unlike_in_samples(reference: Run, run: Run) -> list[str]:
    """Return messages if two runs trained different mean numbers of prompts or responses a step.

    The numbers are those of the fingerprints. As in `unlike_in_updates`, a number is compared only if the
    configurations of both runs agree on it.
    """
    steps = common_batches(reference, run)
    if not steps:
        return []
    names = f"{run.name} and {reference.name}"
    messages = []
    if reference.record.batch.prompts == run.record.batch.prompts:
        prompts = mean(run.batches[step]["groups"] for step in steps)
        expected = mean(reference.batches[step]["groups"] for step in steps)
        if are_unlike(prompts, expected):
            messages.append(f"{names} trained {prompts:g} and {expected:g} prompts a step, by their fingerprints")
    if reference.record.batch.responses == run.record.batch.responses:
        responses = mean(run.batches[step]["sequences"] for step in steps)
        expected = mean(reference.batches[step]["sequences"] for step in steps)
        if are_unlike(responses, expected):
            messages.append(f"{names} trained {responses:g} and {expected:g} responses a step, by their fingerprints")
    return messages


def are_unlike(first: float, second: float) -> bool:
    """Return whether two amounts differ by more than `LARGEST_RELATIVE_DIFFERENCE` of the larger one."""
    return abs(first - second) > LARGEST_RELATIVE_DIFFERENCE * max(first, second)


def unlike_in_rate(reference: Run, run: Run) -> list[str]:
    """Return a message on the first step that two runs logged with different learning rates; empty if there is none.

    Runs whose records have different optimizers are not compared: their rates differ as their configurations say.
    """
    if reference.record.optimizer != run.record.optimizer:
        return []
    # The inner join keeps the steps that both runs logged.
    rates, expected = run.values(keys.LEARNING_RATE).align(reference.values(keys.LEARNING_RATE), join="inner")
    differences = (rates - expected).abs()
    unlike_steps = rates.index[differences > LARGEST_DIFFERENCE_OF_RATES * expected.abs()]
    if not len(unlike_steps):
        return []
    step = unlike_steps[0]
    return [
        f"{run.name} and {reference.name} trained step {step} at the learning rates {rates[step]:.3g} and "
        f"{expected[step]:.3g}"
    ]


def skipped_unlike(arms: Arms) -> list[str]:
    """Return a message if one arm skipped a clearly larger share of its updates than the other."""
    first = mean(skipped_share(run) for run in arms.first)
    second = mean(skipped_share(run) for run in arms.second)
    if abs(first - second) <= LARGEST_DIFFERENCE_OF_SHARES:
        return []
    return [f"the arms skipped {percent(first)} and {percent(second)} of their updates"]


def counted_unlike(arms: Arms) -> list[str]:
    """Return a message on which tokens counted in the losses; empty if the arms are alike.

    There is a message if the loss of a run counted no token, or if the losses of one arm counted a larger share of the
    sampled tokens than those of the other.
    """
    names = [run.name for run in arms.runs if counted_share(run) == 0]
    if names:
        return [f"no token counted in {listed(names)}, by the fingerprints"]
    first_shares = [counted_share(run) for run in arms.first]
    second_shares = [counted_share(run) for run in arms.second]
    if None in first_shares or None in second_shares:
        return []
    first = mean(first_shares)
    second = mean(second_shares)
    if not are_unlike(first, second):
        return []
    return [f"{percent(first)} and {percent(second)} of the sampled tokens counted in the loss, by the fingerprints"]


def counted_share(run: Run) -> float | None:
    """Return the share of the sampled tokens that counted in the loss; None if the log or the record lacks a part."""
    steps = [step for step in run.batches if step in run.log.index]
    batch = run.record.batch
    if not steps or not batch.prompts or not batch.responses:
        return None
    # Mean response lengths, in tokens.
    lengths = run.values(keys.LENGTH)
    if not {*steps} <= {*lengths.index}:
        return None
    counted = sum(run.batches[step]["tokens"] for step in steps)
    sampled = batch.prompts * batch.responses * float(lengths.loc[steps].sum())
    return counted / sampled


def skipped_share(run: Run) -> float:
    """Return the share of a run's updates that were skipped; 0 if the log does not say it.

    Without the plugin's count, one skipped update is assumed for each step whose gradient norm is not finite.
    """
    updates = run.schedule.updates_a_step * max(len(steps_of(run)), 1)
    if keys.SKIPPED_UPDATES in run.log:
        return float(run.values(keys.SKIPPED_UPDATES).sum()) / updates
    return len(run.not_finite.get(keys.GRADIENT_NORM, [])) / updates


def without_gradient(arms: Arms) -> list[str]:
    """Return a message on the runs in which every finite gradient norm is 0, so that nothing was trained.

    A run that logged no finite gradient norm is not named.
    """
    names = []
    for run in arms.runs:
        finite_norms = run.values(keys.GRADIENT_NORM)
        if len(finite_norms) and finite_norms.max() == 0:
            names.append(run.name)
    if not names:
        return []
    return [f"no step had a finite gradient other than 0 in {listed(names)}"]


def not_finite_unlike(arms: Arms) -> list[str]:
    """Return a message if one arm had a clearly larger share of responses with values that are not finite."""
    first = mean(not_finite_share(run) for run in arms.first)
    second = mean(not_finite_share(run) for run in arms.second)
    if abs(first - second) <= LARGEST_DIFFERENCE_OF_SHARES:
        return []
    return [
        f"{percent(first)} and {percent(second)} of the arms' responses had rewards, advantages or log-probabilities "
        "that are not finite"
    ]


def not_finite_share(run: Run) -> float:
    """Return the share of a run's responses with values that are not finite; 0 if the log does not say it.

    It is the largest of the plugin's counts over the number of responses. Where the counts or the number of responses
    are unknown, it is the share of the steps whose mean reward is not finite.
    """
    steps = max(len(steps_of(run)), 1)
    responses = (run.record.batch.prompts or 0) * (run.record.batch.responses or 0) * steps
    counts = [float(run.values(key).sum()) for key in keys.HEALTH_COUNTS if key in run.log]
    if counts and responses:
        return max(counts) / responses
    return len(run.not_finite.get(keys.REWARD, [])) / steps


def steps_of(run: Run) -> list[int]:
    """Return the numbers of a run's training steps; at step 0 it only validates."""
    return [step for step in run.log.index if step > 0]


def span_of(run: Run) -> str:
    """Say how many training steps a run has, and which are the first and the last."""
    steps = steps_of(run)
    if not steps:
        return "no step"
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}"


def amounts_of(run: Run) -> dict[str, int | None]:
    """Return how much a run trains, by its configuration.

    Returns:
        From a unit to a number; None where the number is unknown.
    """
    return {
        "updates a step": run.schedule.updates_a_step,
        "prompts a step": run.record.batch.prompts,
        "responses a prompt": run.record.batch.responses,
    }


@question("the clip acted")
def clip_acts(arms: Arms) -> Outcome:
    """Could the clip act in each run, and did it act on more tokens than rounding explains?"""
    wrong: list[str] = []
    unknown: list[str] = []
    shares: list[str] = []
    for run in arms.runs:
        outcome = judge_clip(run)
        if outcome.verdict is Verdict.FAILED:
            wrong.append(outcome.evidence)
        elif outcome.verdict is Verdict.UNKNOWN:
            unknown.append(outcome.evidence)
        else:
            shares.append(outcome.evidence)
    return decided(wrong, right=f"tokens clipped: {listed(shares)}", unknown=unknown)


def judge_clip(run: Run) -> Outcome:
    """Decide whether the clip acted in a run.

    The evidence is what is wrong, what is not recorded, or the share of clipped tokens, each with the run's name.
    """
    if run.schedule.only_at_ratio_one:
        return Outcome(
            Verdict.FAILED,
            f"{run.name}: one update a rollout batch, at ratio 1 but for rounding: bounds have nothing else to act on",
        )
    # The plugin counts the tokens clipped at each bound. A run without the plugin has only verl's count.
    clipped = run.values(keys.CLIPPED_LOW).add(run.values(keys.CLIPPED_HIGH)).dropna()
    if not len(clipped):
        clipped = run.values(keys.PG_CLIPPED)
    if not len(clipped):
        return Outcome(Verdict.UNKNOWN, f"the share of tokens clipped in {run.name}")
    if clipped.max() <= 0:
        return Outcome(Verdict.FAILED, f"{run.name}: no token was clipped in any step")
    table = count_clipped_by_step(run)
    if len(table):
        return compare_with_floor(run, table)
    share = percent(float(clipped.mean()))
    if keys.CLIPPED_LOW not in run.log:
        return Outcome(Verdict.PASSED, f"{run.name} {share} by verl's count, rounding included")
    if not computes_in_single_precision(run):
        return Outcome(Verdict.UNKNOWN, f"how much of the clipping is rounding in {run.name}")
    return Outcome(Verdict.PASSED, f"{run.name} {share}")


def compare_with_floor(run: Run, table: pandas.DataFrame) -> Outcome:
    """Decide whether a run's later updates clip more tokens than rounding does; the outcome is as in `judge_clip`.

    Args:
        run: a run that logged its floor, which is the clipping of the first updates, before anything has moved.
        table: what `count_clipped_by_step` returned for the run, not empty.
    """
    later = count_later_clipped(table)
    first, second = measure_floors(run, table)
    floor = combine_measurements(first, second)
    floor_shares = percent(first.share)
    if second is not None:
        floor_shares += f" and {percent(second.share)}"
    # In float32 rounding clips no token, so a floor of 0 is believed however few tokens it was measured on.
    never_rounds = computes_in_single_precision(run) and not floor.clipped
    if never_rounds or exceeds(later, floor):
        return Outcome(
            Verdict.PASSED, f"{run.name} {percent(later.share)} in later updates, {floor_shares} by rounding"
        )
    return Outcome(
        Verdict.FAILED,
        f"{run.name}: {percent(later.share)} of tokens clipped in later updates, {floor_shares} where nothing moved, "
        "a difference that chance explains",
    )


def receipt_of(run: Run) -> ReceiptResult:
    """Return the worst result of a run's receipts.

    The record has the receipt of the last start, unless it is an older record, which has none. The log has the receipts
    of all starts.
    """
    recorded = run.record.receipt
    differences = [float(value) for value in run.values(keys.RECEIPT)]
    if recorded.difference is not None:
        differences.append(float(recorded.difference))
    failed_checks = [math.ceil(value) for value in run.values(keys.RECEIPT_FAILED)]
    if recorded.failed is not None:
        failed_checks.append(math.ceil(recorded.failed))
    return ReceiptResult(
        difference=max(differences, default=None),
        tolerance=recorded.tolerance,
        failed=max(failed_checks, default=None),
    )


def has_receipt(run: Run) -> bool:
    """Return whether a run has a receipt.

    A receipt that compared no token has no difference; it says only how many checks did not hold.
    """
    receipt = receipt_of(run)
    return receipt.difference is not None or receipt.failed is not None


@question("the receipt agrees", needs="the receipt (clipx.receipt)", has=has_receipt)
def receipt_passed(arms: Arms) -> Outcome:
    """Did each run's receipt show that it trained the announced loss?"""
    wrong: list[str] = []
    largest: list[float] = []
    silent: list[str] = []
    for run in arms.runs:
        receipt = receipt_of(run)
        tolerance = receipt.tolerance or COARSEST_TOLERANCE
        # Under clipx.receipt=warn a run goes on although it trains another loss.
        if receipt.difference is None:
            wrong.append(f"{run.name}: no token was compared")
        elif receipt.difference > tolerance:
            wrong.append(f"{run.name}: {receipt.difference:.2g} of a token's gradient, more than {tolerance:g}")
        if receipt.failed is None:
            silent.append(run.name)
        elif receipt.failed > 0:
            wrong.append(f"{run.name}: its receipt warned of {receipt.failed} checks that did not hold")
        if receipt.difference is not None:
            largest.append(receipt.difference)
    worst = max(largest, default=0.0)
    right = f"largest difference {worst:.2g} of a token's gradient; docs/swap.md#the-receipt lists what it cannot see"
    if silent:
        right = f"{right}; {listed(silent)} did not log {keys.RECEIPT_FAILED}, so a warning would not be seen"
    return decided(wrong, right)


@question("one validation", needs="validations (trainer.validation_data_dir)", has=lambda run: run.held_out)
def same_validation(arms: Arms) -> Outcome:
    """Were the runs validated on the same problems at every validation?"""
    reference, *compared = arms.runs
    expected = problems_by_step(reference)
    wrong: list[str] = []
    for run in compared:
        validations = problems_by_step(run)
        names = f"{run.name} and {reference.name}"
        common_steps = sorted(validations.keys() & expected.keys())
        if not common_steps:
            wrong.append(f"{names} were validated at no common step")
        unlike_steps = [step for step in common_steps if validations[step] != expected[step]]
        if unlike_steps:
            wrong.append(f"{names} differ in problems, or in the number of answers to each, at step {unlike_steps[0]}")
        last_step = max(validations)
        expected_last_step = max(expected)
        if last_step != expected_last_step:
            wrong.append(
                f"{run.name} was last validated at step {last_step}, {reference.name} at step {expected_last_step}"
            )
    for run in arms.runs:
        if len({*problems_by_step(run).values()}) > 1:
            wrong.append(f"{run.name} was validated on other problems later than at first")
    number_of_problems = len(reference.held_out[0].by_problem)
    return decided(wrong, right=f"{number_of_problems} problems at each of {len(reference.held_out)} validations")


def problems_by_step(run: Run) -> dict[int, tuple[int, frozenset[str]]]:
    """Return what each of a run's validations asked.

    Returns:
        From a step to the largest number of answers to a problem, and the problems.
    """
    return {reward.step: (reward.samples, frozenset(reward.by_problem)) for reward in run.held_out}
