"""Finds the fields of verl's mini-batch that are not finite, which make verl skip the update."""

from typing import Any, NamedTuple

from torch import Tensor

from verl_clipx.worker.layout import pad_rows, response_part

# The fields of verl's mini-batch, causes before what is computed from them, each with an explanation for the log.
REWARDS = ("rm_scores", "token_level_scores", "token_level_rewards")
FIELDS = {
    **dict.fromkeys(REWARDS, "rewards"),
    "values": "values of the critic",
    "old_log_probs": "log-probabilities of the old policy",
    "rollout_log_probs": "log-probabilities of the rollout",
    "ref_log_prob": "log-probabilities of the reference",
    "rollout_is_weights": "weights of the rollout correction",
    "advantages": "advantages",
    "log_probs": "log-probabilities of the current policy",
    "entropy": "entropies of the current policy",
}

# Those of the model's output. verl's v1 trainer hands on the old policy's under these names, over prompt and response.
OF_OUTPUT = ("log_probs", "entropy")

# The fields that a model computes.
OF_LOG_PROBS = ("old_log_probs", "rollout_log_probs", "ref_log_prob", "log_probs", "entropy")


class NotFinite(NamedTuple):
    """How much of a field is not finite in this rank's part of the mini-batch, and the uid of the first such prompt."""

    tokens: int
    sequences: int
    prompt: str | None


def not_finite_in(data: Any, log_probs: Tensor | None = None, entropy: Tensor | None = None) -> dict[str, NotFinite]:
    """What is not finite in a mini-batch or micro-batch, by the keys of `FIELDS`. Waits for the accelerator.

    Rewards are checked in every token, because verl sums all of them; other fields only within response_mask.
    `log_probs` is the model's output in verl's layout, `entropy` (sequences, response length).
    """
    mask = pad_rows(data["response_mask"]).bool()
    values = {name: pad_rows(data[name]) for name in FIELDS if name in data and name not in OF_OUTPUT}
    if log_probs is not None:
        values["log_probs"] = response_part(log_probs, data, mask.shape[1])
    if entropy is not None:
        values["entropy"] = entropy
    prompts = [str(getattr(name, "data", name)) for name in data["uid"]] if "uid" in data else None
    found = {}
    for name in filter(values.__contains__, FIELDS):
        wrong = ~values[name].isfinite()
        rows = (wrong if name in REWARDS else wrong & mask).sum(1).tolist()
        if any(rows):
            first = next(index for index, tokens in enumerate(rows) if tokens)
            found[name] = NotFinite(sum(rows), sum(map(bool, rows)), None if prompts is None else prompts[first])
    return found


def merge_counts(first: dict[str, NotFinite], second: dict[str, NotFinite]) -> dict[str, NotFinite]:
    """What is not finite in two micro-batches of one mini-batch, of which the first comes earlier."""
    both = dict(first)
    for name, more in second.items():
        before = both.get(name, NotFinite(0, 0, more.prompt))
        both[name] = NotFinite(before.tokens + more.tokens, before.sequences + more.sequences, before.prompt)
    return {name: both[name] for name in FIELDS if name in both}


def describe(found: dict[str, NotFinite]) -> str:
    """What is not finite, in words for the log."""
    return "; ".join(
        f"{name} ({FIELDS[name]}) in {with_noun(of.tokens, 'token')} of {with_noun(of.sequences, 'sequence')}"
        + ("" if of.prompt is None else f", first of the prompt with uid {of.prompt}")
        for name, of in found.items()
    )


def with_noun(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)
