"""How the rollout engine samples, and how verl corrects for the policy that sampled: two parts of a run's record.

Importing this is cheap.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sampling:
    """How the rollout engine turns logits into tokens.

    Args:
        temperature: the logits' divisor.
        top_p, top_k, min_p: what truncates the distribution; top_k below 1 truncates nothing.
        returns_log_probs: whether the engine returns the log-probabilities of its tokens.
        log_probs: which ones, its logprobs_mode.
        log_probs_of_vllm: the same among the arguments of vLLM itself, which go before `log_probs` there.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    returns_log_probs: bool | None = None
    log_probs: str | None = None
    log_probs_of_vllm: str | None = None

    @property
    def truncates(self) -> dict[str, float]:
        """Return the settings that cut the distribution, by their names."""
        cuts: dict[str, float] = {}
        if is_number(self.top_p) and self.top_p < 1:
            cuts["top_p"] = self.top_p
        if is_number(self.top_k) and self.top_k > 0:
            cuts["top_k"] = self.top_k
        if is_number(self.min_p) and self.min_p > 0:
            cuts["min_p"] = self.min_p
        return cuts


@dataclass(frozen=True)
class Correction:
    """verl's rollout correction.

    Args:
        bypass: whether old_log_probs are the rollout's own.
        weights, weights_threshold: the kind of importance weights and their cap.
        weights_normalised: whether these weights are divided by their mean over the batch.
        rejection, rejection_threshold: the kind of rejection and its bound.
    """

    bypass: bool | None = None
    weights: str | None = None
    weights_threshold: float | str | None = None
    weights_normalised: bool | None = None
    rejection: str | None = None
    rejection_threshold: float | str | None = None

    @property
    def rejects_in_loss(self) -> bool:
        """Return whether the loss itself has to reject: in bypass mode verl's trainer does not."""
        return bool(self.bypass) and self.rejection is not None


def is_number(value: Any) -> bool:
    """Return whether a value of a configuration is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)
