"""The lengths at which a run cuts its responses, by verl's configuration."""

from collections.abc import Mapping
from typing import Any

from verl_clipx.run.keys import CONTEXT, ENGINE_NAME, LONGEST_RESPONSE, RESPONSE_LENGTH, value_at


def lengths_of(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Returns the numbers of tokens at which a run cuts its responses, or None: of their own, and with the prompt's."""
    own = [value_at(config, key) for key in (LONGEST_RESPONSE, RESPONSE_LENGTH)]
    context = value_at(config, CONTEXT) or None
    # verl's SGLang server leaves one token free.
    if context and value_at(config, ENGINE_NAME) == "sglang":
        context -= 1
    return min((length for length in own if length), default=None), context
