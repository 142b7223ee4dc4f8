"""The questions about what the losses did: steps and updates, the clip, the receipt, the validations."""

import math
from statistics import mean

from verl_clipx.analysis.certify.arms import Arms, Found, decided, listed, question
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.floor import (
    clipped_by_step,
    computes_in_single_precision,
    exceeds,
    floors_of,
    joined,
    later_updates,
)
from verl_clipx.analysis.runs.run import Run
from verl_clipx.common.sentences import percent
from verl_clipx.losses.base.tolerances import TOLERANCES
from verl_clipx.run.record import ReceiptResult

# What a receipt takes for rounding where the record doesn't say in which precision the run computes: bfloat16's.
COARSEST = max(TOLERANCES.values())
# Shares of prompts or updates that differ by less are alike: single ones are lost in sound runs too.
ALIKE = 0.05
# Of a learning rate, which every run computes in the same way.
SAME_RATE = 1e-6


@question("the same steps, with as many updates and prompts", "updates", lambda run: run.schedule.updates_a_step)
def trained_as_much(arms: Arms) -> Found:
    """Did both arms train steps of the same numbers, with as many updates, on as many prompts?"""
    first, *others = arms.runs
    wrong: list[str] = []
    for run in others:
        if steps_of(run) != steps_of(first):
            wrong.append(f"{run.name} has {span_of(run)}, {first.name} has {span_of(first)}")
        for what, amount in amounts_of(run).items():
            of_first = amounts_of(first)[what]
            if amount != of_first:
                wrong.append(f"{run.name}: {amount} {what}, {first.name}: {of_first}")
        wrong += trained_otherwise(first, run)
    wrong += without_gradient(arms)
    wrong += not_finite_unlike(arms)
    wrong += skipped_unlike(arms)
    wrong += counted_unlike(arms)
    each = ", ".join(f"{amount} {what}" for what, amount in amounts_of(first).items())
    right = f"each {span_of(first)}, {each}"
    tokens = [sum(batch["tokens"] for run in arm for batch in run.batches.values()) for arm in arms.both]
    if all(tokens):
        right = f"{right}; tokens {tokens[0]:,} and {tokens[1]:,}"
    return decided(wrong, right)


def trained_otherwise(first: Run, second: Run) -> list[str]:
    """Returns how much two runs trained unlike each other, by their fingerprints and their logged learning rates.

    Their configurations may have equal amounts although a worker or a trainer did not keep to them.
    """
    wrong: list[str] = []
    names = f"{second.name} and {first.name}"
    steps = sorted(first.batches.keys() & second.batches.keys())
    if steps and first.schedule.updates_a_step == second.schedule.updates_a_step:
        numbers = [{len(run.batches[step].get("updates", ())) for step in steps} - {0} for run in (second, first)]
        if all(numbers) and numbers[0] != numbers[1]:
            made = " and ".join(listed([*map(str, sorted(number))]) for number in numbers)
            wrong.append(f"{names} made {made} updates a step, by their fingerprints")
    for what, of_record, of_batch in (("prompts", "prompts", "groups"), ("responses", "responses", "sequences")):
        if steps and getattr(first.record.batch, of_record) == getattr(second.record.batch, of_record):
            counts = [mean(run.batches[step][of_batch] for step in steps) for run in (second, first)]
            if max(counts) - min(counts) > ALIKE * max(counts):
                wrong.append(f"{names} trained {counts[0]:g} and {counts[1]:g} {what} a step, by their fingerprints")
    if first.record.optimizer == second.record.optimizer:
        rates, others = second.values(keys.LEARNING_RATE).align(first.values(keys.LEARNING_RATE), join="inner")
        apart = rates.index[(rates - others).abs() > SAME_RATE * others.abs()]
        if len(apart):
            step = apart[0]
            wrong.append(f"{names} trained step {step} at the learning rates {rates[step]:.3g} and {others[step]:.3g}")
    return wrong


def skipped_unlike(arms: Arms) -> list[str]:
    """Returns that one arm skipped a larger share of its updates, if it did."""
    shares = [mean(skipped_share(run) for run in arm) for arm in arms.both]
    if abs(shares[0] - shares[1]) <= ALIKE:
        return []
    return [f"the arms skipped {percent(shares[0])} and {percent(shares[1])} of their updates"]


def counted_unlike(arms: Arms) -> list[str]:
    """Returns that the loss of one arm counted a larger share of the sampled tokens, or that a run counted none."""
    shares = [[counted_share(run) for run in arm] for arm in arms.both]
    none = [run.name for run, share in zip(arms.runs, [*shares[0], *shares[1]], strict=True) if share == 0]
    if none:
        return [f"no token counted in {listed(none)}, by the fingerprints"]
    if None in [*shares[0], *shares[1]]:
        return []
    first, second = map(mean, shares)
    if abs(first - second) <= ALIKE * max(first, second):
        return []
    return [f"{percent(first)} and {percent(second)} of the sampled tokens counted in the loss, by the fingerprints"]


def counted_share(run: Run) -> float | None:
    """Returns the share of the sampled tokens that counted in the loss; None if the log and the record don't say it."""
    steps = [step for step in run.batches if step in run.log.index]
    counted = sum(run.batches[step]["tokens"] for step in steps)
    batch, lengths = run.record.batch, run.values(keys.LENGTH)
    if not steps or not batch.prompts or not batch.responses or not {*steps} <= {*lengths.index}:
        return None
    return counted / (batch.prompts * batch.responses * float(lengths.loc[steps].sum()))


def skipped_share(run: Run) -> float:
    """Returns the share of a run's updates that were skipped, 0 where the log doesn't say.

    Without the plugin's count, a step whose gradient's norm is not finite skipped at least one.
    """
    updates = run.schedule.updates_a_step * max(len(steps_of(run)), 1)
    if keys.SKIPPED_UPDATES in run.log:
        return float(run.values(keys.SKIPPED_UPDATES).sum()) / updates
    return len(run.not_finite.get(keys.GRADIENT_NORM, [])) / updates


def without_gradient(arms: Arms) -> list[str]:
    """Returns which runs had no gradient in any step, so that nothing was trained."""
    norms = {run.name: run.values(keys.GRADIENT_NORM) for run in arms.runs}
    idle = [name for name, norm in norms.items() if len(norm) and norm.max() == 0]
    return [f"the gradient was 0 in every step of {listed(idle)}"] if idle else []


def not_finite_unlike(arms: Arms) -> list[str]:
    """Returns that a larger share of one arm's responses had values that are not finite, if it was so."""
    shares = [mean(not_finite_share(run) for run in arm) for arm in arms.both]
    if abs(shares[0] - shares[1]) <= ALIKE:
        return []
    of_arms = f"{percent(shares[0])} and {percent(shares[1])}"
    return [f"{of_arms} of the arms' responses had rewards, advantages or log-probabilities that are not finite"]


def not_finite_share(run: Run) -> float:
    """Returns the share of a run's responses with values that are not finite, 0 where the log doesn't say.

    Without the plugin's counts it is the share of the steps whose mean reward is not finite.
    """
    steps = max(len(steps_of(run)), 1)
    responses = (run.record.batch.prompts or 0) * (run.record.batch.responses or 0) * steps
    counts = [float(run.values(key).sum()) for key in keys.HEALTH_COUNTS if key in run.log]
    if counts and responses:
        return max(counts) / responses
    return len(run.not_finite.get(keys.REWARD, [])) / steps


def steps_of(run: Run) -> list[int]:
    """Returns the numbers of a run's training steps; at step 0 it only validates."""
    return [step for step in run.log.index if step > 0]


def span_of(run: Run) -> str:
    """Returns a run's steps in words."""
    steps = steps_of(run)
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}" if steps else "no step"


def amounts_of(run: Run) -> dict[str, int | None]:
    """Returns how much a run trains in each step."""
    return {
        "updates a step": run.schedule.updates_a_step,
        "prompts a step": run.record.batch.prompts,
        "responses a prompt": run.record.batch.responses,
    }


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
            # In float32 a floor of a few tokens need not tell that rounding clips none.
            never_rounds = computes_in_single_precision(run) and not joined(floors).clipped
            if never_rounds or exceeds(later, joined(floors)):
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


def receipt_of(run: Run) -> ReceiptResult:
    """Returns the worst that a run's receipts found.

    The record has the receipt of the last start. The log has that of every start, and is all that an older record has.
    """
    recorded = run.record.receipt
    differences = [recorded.difference, *run.values(keys.RECEIPT)]
    failed = [recorded.failed, *run.values(keys.RECEIPT_FAILED)]
    return ReceiptResult(
        difference=max((float(value) for value in differences if value is not None), default=None),
        tolerance=recorded.tolerance,
        failed=max((math.ceil(value) for value in failed if value is not None), default=None),
    )


def has_receipt(run: Run) -> bool:
    """Returns whether a run has a receipt; one that compared nothing says only that a check did not hold."""
    receipt = receipt_of(run)
    return receipt.difference is not None or receipt.failed is not None


@question("the receipt agrees", "the receipt (clipx.receipt)", has_receipt)
def receipt_passed(arms: Arms) -> Found:
    """Did each run's receipt show that it trained the announced loss?"""
    wrong: list[str] = []
    largest: list[float] = []
    silent: list[str] = []
    for run in arms.runs:
        receipt = receipt_of(run)
        tolerance = receipt.tolerance or COARSEST
        # A run whose receipt only warns goes on with another loss.
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


@question("one validation", "validations (trainer.validation_data_dir)", lambda run: run.held_out)
def same_validation(arms: Arms) -> Found:
    """Were the runs validated on the same problems, each time?"""
    first, *others = arms.runs
    wrong: list[str] = []
    for run in others:
        steps = problems_by_step(run).keys() & problems_by_step(first).keys()
        if not steps:
            wrong.append(f"{run.name} and {first.name} were validated at no common step")
        apart = [step for step in sorted(steps) if problems_by_step(run)[step] != problems_by_step(first)[step]]
        if apart:
            what = f"problems, or in the number of answers to each, at step {apart[0]}"
            wrong.append(f"{run.name} and {first.name} differ in {what}")
        last = [max(problems_by_step(one)) for one in (run, first)]
        if last[0] != last[1]:
            wrong.append(f"{run.name} was last validated at step {last[0]}, {first.name} at step {last[1]}")
    for run in arms.runs:
        if len({*problems_by_step(run).values()}) > 1:
            wrong.append(f"{run.name} was validated on other problems later than at first")
    return decided(wrong, f"{len(first.held_out[0].by_problem)} problems at each of {len(first.held_out)} validations")


def problems_by_step(run: Run) -> dict[int, tuple[int, frozenset[str]]]:
    """Returns the most answers to a problem, and the problems, of each of a run's validations."""
    return {reward.step: (reward.samples, frozenset(reward.by_problem)) for reward in run.held_out}
