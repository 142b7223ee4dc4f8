"""The numbers of tokens at which a run cuts its responses."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Lengths(NamedTuple):
    """The numbers of tokens at which a response is cut, or None: of its own, and with its prompt's."""

    response: int | None = None
    context: int | None = None


def lengths_of(config: Mapping[str, Any]) -> Lengths:
    """Returns the numbers of tokens at which a run cuts its responses, by verl's configuration."""
    rollout = (config.get("actor_rollout_ref") or {}).get("rollout") or {}
    own = [(config.get("data") or {}).get("max_response_length"), rollout.get("response_length")]
    context = rollout.get("max_model_len")
    # verl's SGLang server leaves one token free.
    context = context - (rollout.get("name") == "sglang") if context else None
    return Lengths(min((length for length in own if length), default=None), context)
