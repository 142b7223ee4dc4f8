"""An advantage estimator that is always zero: the control of benchmarks/quickstart_table.py.

verl imports it in every process through VERL_USE_EXTERNAL_MODULES=zero_advantages.
"""

import torch
from verl.trainer.ppo.core_algos import register_adv_est


@register_adv_est("zero")
def zero_advantages(token_level_rewards: torch.Tensor, **_) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros for advantages and returns, (sequences, response length)."""
    zeros = torch.zeros_like(token_level_rewards)
    return zeros, zeros
