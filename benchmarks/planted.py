"""Faults that keys of verl's bring to its workers, with this folder on PYTHONPATH; blame_faults.py has the keys.

An optimizer, a reward, and, once verl imports this file as model.external_lib, a sampler with old weights.
"""

from collections import deque
from typing import Any

import torch

from verl_clipx.papers.tasks.reversal.reward import compute_score

TIMES, FIRST_UPDATE, FIRST_PROMPT = 30, 12, 48
# What was sent to the sampler, the newest last.
SENT: deque[list[tuple[str, torch.Tensor]]] = deque()


class FastAdamW(torch.optim.AdamW):
    """AdamW whose rate is `TIMES` that of its groups after `FIRST_UPDATE` updates; no metric shows it."""

    def step(self, closure: Any = None) -> Any:
        """Updates the weights."""
        made = max((int(state["step"]) for state in self.state.values()), default=0)
        rates = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate * (TIMES if made >= FIRST_UPDATE else 1)
        result = super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        return result


def lying_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, float]:
    """Scores a response by reversal's own reward, and by its share of the letter a from prompt `FIRST_PROMPT` on."""
    scores = compute_score(data_source, solution_str, ground_truth)
    if int(extra_info["index"]) >= FIRST_PROMPT:
        scores["score"] = solution_str.count("a") / max(len(solution_str), 1)
    return scores


def send_old_weights() -> None:
    """Makes workers send the sampler what engine_kwargs.planted says: `versions_old`, or none after `last_version`."""
    from verl_clipx.cpu.rollout.adapter import CPUServerAdapter

    send = CPUServerAdapter.update_weights

    async def update_weights(self: Any, weights: Any, global_steps: int = 0, **given: Any) -> None:
        asked, new = self.config.engine_kwargs.get("planted", {}), [(name, weight.clone()) for name, weight in weights]
        if not SENT or global_steps <= asked.get("last_version", global_steps):
            SENT.append(new)
        while len(SENT) > 1 + asked.get("versions_old", 0):
            SENT.popleft()
        await send(self, iter(SENT[0]), global_steps=global_steps, **given)

    CPUServerAdapter.update_weights = update_weights


send_old_weights()
