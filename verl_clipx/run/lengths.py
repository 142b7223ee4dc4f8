"""The lengths at which a run cuts its responses, by verl's configuration."""

from collections.abc import Mapping
from typing import Any


def lengths_of(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Returns the numbers of tokens at which a run cuts its responses, or None: of their own, and with the prompt's."""
    rollout = (config.get("actor_rollout_ref") or {}).get("rollout") or {}
    own = [(config.get("data") or {}).get("max_response_length"), rollout.get("response_length")]
    context = rollout.get("max_model_len")
    # verl's SGLang server leaves one token free.
    context = context - (rollout.get("name") == "sglang") if context else None
    return min((length for length in own if length), default=None), context
