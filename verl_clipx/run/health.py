"""The node clipx.health_limits: the values of a run's health metrics above which the run warns or stops."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from verl_clipx.base.metric import Metric
from verl_clipx.base.parameters import integer, number, parameter, validate
from verl_clipx.base.shared_metrics import (
    ALIKE_PROMPTS,
    CUT_RESPONSES,
    NOT_FINITE,
    NOT_FINITE_LOG_PROBS,
    SKIPPED_UPDATES,
    UNDECIDED,
)

LARGEST = 2**31 - 1
# From the name of each limit to the metrics that it applies to.
LIMITED: dict[str, tuple[Metric, ...]] = {
    "skipped_updates": (SKIPPED_UPDATES,),
    "not_finite": (*NOT_FINITE.values(), NOT_FINITE_LOG_PROBS),
    "alike_prompts": (ALIKE_PROMPTS,),
    "undecided": (UNDECIDED,),
    "cut_responses": (CUT_RESPONSES,),
}


@dataclass(frozen=True, kw_only=True)
class HealthLimits:
    """The largest value of each health metric at which clipx.health does not act yet.

    Raises:
        ValueError: when built with a value outside a parameter's range.
    """

    node: ClassVar[str] = "clipx.health_limits"

    skipped_updates: int = parameter(
        0,
        integer(at_least=0, at_most=LARGEST),
        "updates of a step that verl skipped because their gradient was not finite",
    )
    not_finite: int = parameter(
        0,
        integer(at_least=0, at_most=LARGEST),
        "responses of a step with a reward, an advantage or a log-probability that is not finite",
    )
    alike_prompts: float = parameter(
        0.95,
        number(at_least=0, at_most=1),
        "share of the prompts whose samples all have the same score and so teach nothing",
    )
    undecided: float = parameter(
        0.1, number(at_least=0, at_most=1), "share of the responses on which the verifier has no verdict"
    )
    cut_responses: float = parameter(
        0.5, number(at_least=0, at_most=1), "share of the responses cut at data.max_response_length"
    )

    def __post_init__(self) -> None:
        validate(self, self.node)


def exceeded(limits: HealthLimits, data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The limits that a step's metrics exceed.

    Args:
        data: the step's metrics, as verl logs them.

    Yields:
        The name of the limit; and in words the metric, its value and the limit.
    """
    for limit in fields(limits):
        most = getattr(limits, limit.name)
        for metric in LIMITED[limit.name]:
            for key in (metric.key, f"actor/{metric.key}"):
                if key in data and not float(data[key]) <= most:
                    yield limit.name, f"{key} is {data[key]:g} ({metric.meaning}); {limits.node}.{limit.name}={most:g}"
