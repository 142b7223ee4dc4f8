"""Reads the sampling parameters of one request, as verl's agent loops send them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The limit on the length of a response. If a request has both, the first one counts.
LENGTH_KEYS = ("max_tokens", "max_new_tokens")
ACCEPTED_KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "repetition_penalty",
    "logprobs",
    "seed",
    "ignore_eos",
    "stop_token_ids",
    *LENGTH_KEYS,
)


@dataclass(frozen=True)
class SamplingParameters:
    """How to sample one response.

    Args:
        max_tokens: largest number of tokens to generate, at least 1.
        temperature: divisor of the logits, at least 0; 0 takes the most likely token.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; in (0, 1].
        top_k: keep this many most likely tokens; 0 or -1 keeps all.
        stop_token_ids: tokens that end the response; they belong to it.
        seed: seed of this request's random numbers, or None to let the server choose.

    Raises:
        ValueError: a parameter is outside its range.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    seed: int | None = None

    def __post_init__(self):
        _require("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        _require("temperature", self.temperature, self.temperature >= 0, "at least 0")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _require("top_k", self.top_k, self.top_k >= -1, "above 0, or -1 or 0 for no limit")


def _require(key: str, value: float, is_allowed: bool, allowed: str) -> None:
    """Raise ValueError if a sampling parameter has a value that is not allowed; `allowed` says which values are."""
    if not is_allowed:
        raise ValueError(f"sampling parameter {key}={value!r}: must be {allowed}")


def read_sampling_parameters(
    given: Mapping[str, Any],
    *,
    default_max_tokens: int,
    room_in_context: int,
    end_token_ids: frozenset[int],
    ignore_eos: bool = False,
) -> SamplingParameters:
    """Turn an agent loop's sampling parameters into `SamplingParameters`.

    Args:
        given: the request's parameters: keys in `ACCEPTED_KEYS`, and any other key with the value None.
        default_max_tokens: length limit if the request names none.
        room_in_context: number of tokens for which the model's context still has room, at least 1. No response gets
            longer.
        end_token_ids: the model's end tokens, which end the response unless they are ignored.
        ignore_eos: whether to generate past the end tokens, if the request does not say.

    Raises:
        ValueError: a parameter is not supported, or outside its range.
    """
    unknown = sorted(key for key, value in given.items() if key not in ACCEPTED_KEYS and value is not None)
    if unknown:
        values = ", ".join(f"{key}={given[key]!r}" for key in unknown)
        raise ValueError(f"the CPU rollout does not support {values}. It supports {', '.join(ACCEPTED_KEYS)}")
    penalty = given.get("repetition_penalty")
    if penalty not in (None, 1.0):
        raise ValueError(f"repetition_penalty={penalty!r}: the CPU rollout accepts only 1.0")
    limits = [given[key] for key in LENGTH_KEYS if given.get(key) is not None]
    max_tokens = int(limits[0]) if limits else default_max_tokens
    stop_token_ids = frozenset(given.get("stop_token_ids") or ())
    if not _or_default(given.get("ignore_eos"), ignore_eos):
        stop_token_ids |= end_token_ids
    # -1 is vLLM's name for no limit, and 0 the one that is used here.
    top_k = int(_or_default(given.get("top_k"), 0))
    if top_k == -1:
        top_k = 0
    seed = given.get("seed")
    return SamplingParameters(
        # As in vLLM, a request that has used up its budget still gets one token.
        max_tokens=max(1, min(max_tokens, room_in_context)),
        temperature=float(_or_default(given.get("temperature"), 1.0)),
        top_p=float(_or_default(given.get("top_p"), 1.0)),
        top_k=top_k,
        stop_token_ids=stop_token_ids,
        seed=None if seed is None else int(seed),
    )


def _or_default(value: Any, default: Any) -> Any:
    """Return a value, or the default in the place of None."""
    return default if value is None else value
