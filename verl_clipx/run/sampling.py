"""How the rollout engine samples, and how verl corrects for the policy that sampled: two parts of a run's record.

Importing this is cheap.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sampling:
    """How the rollout engine turns logits into tokens.

    Args:
        temperature: the number by which the logits are divided.
        top_p, top_k, min_p: the settings that truncate the distribution; top_k below 1 truncates nothing.
        returns_log_probs: whether the engine returns the log-probabilities of its tokens.
        log_probs: the kind of these log-probabilities, verl's logprobs_mode.
        log_probs_of_vllm: the same setting among the arguments of vLLM itself, for which it wins over `log_probs`.
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
        """Return the values of those settings that truncate the distribution, by their names."""
        truncating: dict[str, float] = {}
        if is_number(self.top_p) and self.top_p < 1:
            truncating["top_p"] = self.top_p
        if is_number(self.top_k) and self.top_k > 0:
            truncating["top_k"] = self.top_k
        if is_number(self.min_p) and self.min_p > 0:
            truncating["min_p"] = self.min_p
        return truncating


@dataclass(frozen=True)
class Correction:
    """verl's rollout correction: importance weights and rejection of samples, and bypass mode.

    Args:
        bypass: whether old_log_probs are the rollout's own; None if the configuration does not say it.
        weights: the kind of importance weights, verl's rollout_is; None without weights.
        weights_threshold: the cap on these weights.
        weights_normalised: whether these weights are divided by their mean over the batch.
        rejection: the kind of rejection, verl's rollout_rs; None without rejection.
        rejection_threshold: the bound beyond which it rejects.
    """

    bypass: bool | None = None
    weights: str | None = None
    weights_threshold: float | str | None = None
    weights_normalised: bool | None = None
    rejection: str | None = None
    rejection_threshold: float | str | None = None

    @property
    def rejects_in_loss(self) -> bool:
        """Return whether the loss itself has to reject, because verl's trainer does not do it in bypass mode."""
        return bool(self.bypass) and self.rejection is not None


def is_number(value: Any) -> bool:
    """Return whether a value of a configuration is a number. True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
