"""The lengths at which a run cuts its responses, by its record."""

from verl_clipx.run.record import RunRecord


def lengths_of(record: RunRecord) -> tuple[int | None, int | None]:
    """Return the numbers of tokens at which a run cuts its responses, or None: of their own, and with the prompt's."""
    limits = record.limits
    own = [length for length in (limits.response, limits.generated) if length]
    context = limits.context or None
    # verl's SGLang server leaves one token free.
    if context and record.rollout.name == "sglang":
        context -= 1
    return min(own, default=None), context
