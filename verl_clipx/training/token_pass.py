"""One pass of Lopti's update: tokens of the other group keep their place but lose every gradient."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_clipx.tokens.lopti import low_probability
from verl_clipx.training.modifiers import LoptiConfig
from verl_clipx.training.token_layout import flat, in_model_layout, padded, replaced, response_part


@dataclass(frozen=True)
class TokenPass:
    """One pass over the rollout batch.

    Args:
        name: low or high, the group of tokens that is updated.
        eta: the threshold on the old policy's probability.
        equal: whether a probability equal to eta is low.
    """

    name: str
    eta: float | Tensor
    equal: bool

    def tokens(self, data: Any) -> Tensor:
        """The tokens of this pass: bool, (sequences, response length).

        Args:
            data: verl's mini-batch or micro-batch.
        """
        low = low_probability(padded(data["old_log_probs"]), eta=self.eta, equal=self.equal)
        group = low if self.name == "low" else ~low
        return group & padded(data["response_mask"]).bool()


def passes(config: LoptiConfig, eta: float | Tensor) -> list[TokenPass]:
    """The passes of an update in their order.

    Args:
        config: Lopti's configuration.
        eta: its threshold, or the one measured for its quantile.
    """
    return [TokenPass(name, eta, config.equal) for name in config.passes]


def restricted(model_output: Any, data: Any, tokens: Tensor) -> tuple[dict[str, Any], Any]:
    """A micro-batch in which only some tokens have advantages, gradients, entropy and a distance to the reference.

    The response mask stays, so that every aggregation keeps its normaliser.

    Args:
        model_output: verl's model output: log_probs and possibly entropy, over prompts and responses.
        data: verl's micro-batch.
        tokens: bool, (sequences, response length): those that keep everything.

    Returns:
        Model output and micro-batch; the given ones are not changed.
    """
    output = dict(model_output.items())
    log_probs = output["log_probs"]
    values = flat(log_probs)
    kept = in_model_layout(tokens, data, values.shape[0])
    output["log_probs"] = replaced(log_probs, torch.where(kept, values, values.detach()))
    if output.get("entropy") is not None:
        entropy = flat(output["entropy"])
        output["entropy"] = replaced(output["entropy"], torch.where(kept, entropy, torch.zeros_like(entropy)))
    data = data.copy()
    advantages = padded(data["advantages"])
    data["advantages"] = torch.where(tokens, advantages, torch.zeros_like(advantages))
    if "ref_log_prob" in data:
        current = response_part(log_probs, data, tokens.shape[1])
        data["ref_log_prob"] = torch.where(tokens, padded(data["ref_log_prob"]).to(current.dtype), current)
    return output, data
