"""Which of verl's fields in a mini-batch are not finite, which makes verl skip the update."""

import logging
from typing import Any, NamedTuple

from torch import Tensor

from verl_clipx.worker.layout import padded, response_part

logger = logging.getLogger(__name__)

# Of verl's mini-batch, causes before what is computed from them; what each is to a reader who doesn't know the name.
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

# Those that a model computes.
OF_LOG_PROBS = ("old_log_probs", "rollout_log_probs", "ref_log_prob", "log_probs", "entropy")


class NotFinite(NamedTuple):
    """How much of a field is not finite.

    Args:
        tokens, sequences: how many, of this rank's part of the mini-batch.
        prompt: uid of the first sequence's prompt; None if the data name none.
    """

    tokens: int
    sequences: int
    prompt: str | None


def not_finite_in(data: Any, log_probs: Tensor | None = None, entropy: Tensor | None = None) -> dict[str, NotFinite]:
    """What of a mini-batch or micro-batch is not finite, by the keys of `FIELDS`; waits for the accelerator.

    Args:
        data: verl's mini-batch or micro-batch. Rewards are looked at in every token, since verl sums them all; the
            rest within response_mask.
        log_probs: the model's output, in verl's layout, or None.
        entropy: (sequences, response length), or None.
    """
    mask = padded(data["response_mask"]).bool()
    values = {name: padded(data[name]) for name in FIELDS if name in data}
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


class NotFiniteLog:
    """Says in a rank's log what was not finite in an update, each field once.

    Args:
        rank: of this process.
    """

    def __init__(self, rank: int):
        self._rank = rank
        self._named: set[str] = set()

    def say(self, found: dict[str, NotFinite], *, taken: bool, norm: float | None) -> None:
        """Warns of what has not been named yet.

        Args:
            found: of this rank's part of the mini-batch.
            taken: whether verl took the update.
            norm: of its gradient.
        """
        if new := found.keys() - self._named:
            self._named |= new
            logger.warning(NOT_FINITE, "takes" if taken else "skips", norm, self._rank, described(found))
        elif not taken and not found and self._rank == 0 and GRADIENT not in self._named:
            self._named.add(GRADIENT)
            logger.warning(GRADIENT_NOT_FINITE, norm)


def together(first: dict[str, NotFinite], second: dict[str, NotFinite]) -> dict[str, NotFinite]:
    """What two micro-batches of one mini-batch have that is not finite; the first one's prompts come first."""
    both = dict(first)
    for name, more in second.items():
        before = both.get(name)
        both[name] = (
            more
            if before is None
            else NotFinite(before.tokens + more.tokens, before.sequences + more.sequences, before.prompt)
        )
    return {name: both[name] for name in FIELDS if name in both}


def described(found: dict[str, NotFinite]) -> str:
    """In words, for the log."""
    return "; ".join(
        f"{name} ({FIELDS[name]}) in {counted(of.tokens, 'token')} of {counted(of.sequences, 'sequence')}"
        + ("" if of.prompt is None else f", first of the prompt with uid {of.prompt}")
        for name, of in found.items()
    )


def counted(number: int, noun: str) -> str:
    """A number and its noun, as in 2 tokens."""
    return f"{number} {noun}" + "s" * (number != 1)


# Among the names of fields, the gradient of a mini-batch in which nothing else is not finite.
GRADIENT = "gradient"
NOT_FINITE = (
    "clipx: verl %s an update whose gradient's norm is %s. Not finite in rank %s's part of its mini-batch: %s. Each is "
    "named only once; clipx/skipped_updates counts the updates that verl skips."
)
GRADIENT_NOT_FINITE = (
    "clipx: verl skips an update whose gradient's norm is %s, although everything that the loss is computed from is "
    "finite on rank 0. Either another rank names what is not finite, or it arose in the backward pass through the "
    "model. This is said only once; clipx/skipped_updates counts the updates that verl skips."
)
