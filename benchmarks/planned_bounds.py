"""The bounds that the worker's planner would have decided on in a traced run: for benchmarks/real_sampled_bounds.py."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from sampled_bounds import QUANTILE
from shared import actor_config
from torch import Tensor

from verl_clipx.base.tokens import OPTIONAL, Inputs
from verl_clipx.diagnostics.replay.tokens import traced_step
from verl_clipx.diagnostics.runs import read_run
from verl_clipx.driver.config import Settings
from verl_clipx.loss.bounds import bounds_difference
from verl_clipx.loss.token_trace import token_trace
from verl_clipx.worker.extra_pass import of_each_sequence
from verl_clipx.worker.planner import MiniBatchStatistics, StepPlanner
from verl_clipx.worker.sampling import by_group
from verl_clipx.worker.step import OptimizerStep

METHODS = ("acpo", "bapo", "m2po")
RULES = {f"precision {share}": f"clipx.precision={share}" for share in (0.03, 0.1, 0.3)}
RULES["lagged"] = "clipx.scope=lagged"
# The first rollout batch is fresh and the others one version old, so from the third on the last one is of their kind.
FIRST = 3


class Planned:
    """The worker's planner under a rule, on updates whose tokens are known.

    Args:
        settings: the clipx node.
    """

    def __init__(self, settings: Settings):
        self.settings, self._inputs = settings, None
        self._planner = StepPlanner(settings, extra_pass=self._extra_pass, all_reduce=lambda vector: vector)

    def step(self, inputs: Inputs, update: int, exact: Tensor) -> OptimizerStep:
        """What the worker decides for an update.

        Args:
            inputs: of the whole mini-batch.
            update: number within the rollout batch.
            exact: statistics of all its tokens.
        """
        self._inputs = inputs
        data = {
            "response_mask": inputs.mask,
            "old_log_probs": inputs.old_log_prob,
            "rollout_log_probs": inputs.old_log_prob,
            "advantages": inputs.advantages,
        }
        step = self._planner.plan(data, position=f"update_{update}", token_pass=None, weights_moved=None)
        step.collected = exact
        self._planner.finish(step, taken=True)
        return step

    def _extra_pass(self, data: dict[str, Tensor], step: OptimizerStep) -> MiniBatchStatistics:
        functions, nothing = self.settings.functions("cpu"), torch.zeros(0)
        if step.sample is None:
            return MiniBatchStatistics(functions.statistics(self._inputs), nothing, nothing)
        chosen = Inputs(*(None if one is None else one[step.sample.rows] for one in self._inputs))
        found = by_group(of_each_sequence(functions, chosen), step.sample.group)
        return MiniBatchStatistics(found, nothing, nothing)


@dataclass
class Found:
    """Of the updates of one rule and seed.

    Args:
        shares: of the sequences that passed, each update's.
        predicted, real: standard error and error of the bounds, of each update whose bounds are not exact.
        other, clipped: share of the tokens whose F is another one, and of those that the exact bounds clip.
    """

    shares: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    real: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)


def compared(run: Path, steps: int) -> Iterator[tuple[str, str, Found]]:
    """What each method's rules would have done in a run."""
    settings = {
        (method, rule): actor_config(
            f"+clipx={method}", override, "actor_rollout_ref.rollout.calculate_log_probs=true"
        ).policy_loss.clipx
        for method in METHODS
        for rule, override in RULES.items()
    }
    planners = {key: Planned(one) for key, one in settings.items()}
    found = {key: Found() for key in settings}
    of_run = read_run(run)
    for number in range(1, steps + 1):
        for traced in traced_step(of_run, number):
            for (name, rule), planned in planners.items():
                method = planned.settings.method
                known = {one: getattr(traced.batch.inputs, one) if one in method.asks_for else None for one in OPTIONAL}
                inputs = traced.batch.inputs._replace(counted=None, **known)
                exact = planned.settings.functions("cpu").statistics(inputs)
                step = planned.step(inputs, traced.update, exact)
                if number < FIRST:
                    continue
                own, whole = (
                    token_trace(method, None, inputs, method.decide(of), 1.0) for of in (step.statistics, exact)
                )
                values, mask = found[name, rule], inputs.mask
                values.other.append(float((own.weight != whole.weight)[mask].double().mean()))
                beyond = (whole.bounded < whole.low) | (whole.bounded > whole.high)
                values.clipped.append(float(beyond[mask].double().mean()))
                values.shares.append(0.0 if step.passed is None else step.passed)
                if step.passed is None or step.estimated:
                    values.real.append(bounds_difference(method, step.statistics, exact))
                    values.predicted.append(step.predicted_error or 0.0)
    for (name, rule), values in found.items():
        yield name, rule, values


def cells(of_seeds: list[Found], lagged: bool) -> list[str]:
    """Of a row of the table."""
    shares, real, predicted, clipped = (
        [value for one in of_seeds for value in getattr(one, key)] for key in ("shares", "real", "predicted", "clipped")
    )
    within = [error <= QUANTILE * standard for error, standard in zip(real, predicted, strict=True)]
    other = [statistics.mean(one.other) for one in of_seeds]
    return [
        "none" if lagged else f"{statistics.mean(shares):.0%}",
        f"{len(real)} of {len(shares)}",
        f"{statistics.median(predicted):.1%}" if real and not lagged else "",
        f"{statistics.median(real):.1%} ({max(real):.1%})" if real else "",
        f"{statistics.mean(within):.0%}" if real and not lagged else "",
        f"{statistics.mean(other):.3%} ({min(other):.3%} to {max(other):.3%})",
        f"{statistics.mean(clipped):.2%}",
    ]
