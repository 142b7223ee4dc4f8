"""The lengths at which a run cuts its responses, by its record."""

from typing import NamedTuple

from verl_clipx.run.record import RunRecord
from verl_clipx.run.sampling import is_number


class ResponseLimits(NamedTuple):
    """The limits on a response, in tokens. None means that there is no such limit, or that it is no number.

    Attributes:
        response: the limit on the response itself.
        prompt_and_response: the limit on the prompt and the response together.
    """

    response: int | None
    prompt_and_response: int | None


def find_response_limits(record: RunRecord) -> ResponseLimits:
    """Return the limits at which a run cuts its responses."""
    limits = record.limits
    of_response = [length for length in (limits.response, limits.generated) if is_number(length) and length > 0]
    context = limits.context
    if not is_number(context) or context <= 0:
        context = None
    # verl's SGLang server leaves one token of the context free.
    elif record.rollout.name == "sglang":
        context -= 1
    return ResponseLimits(response=min(of_response, default=None), prompt_and_response=context)
