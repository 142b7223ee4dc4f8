"""verl's single-turn agent loop with a seed for every sample. It records what verl's own files do not say."""

from collections.abc import Sequence
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from verl_clipx.training.seeded.agent_loop import SeededSingleTurnAgentLoop, plain


class EvaluationAgentLoop(SeededSingleTurnAgentLoop):
    """Gives every response a reward of 0. In place of the reward's parts, it says which sample of which question it is.

    verl writes both into `trainer.validation_data_dir`. The rewards themselves are computed from these files
    afterwards, so a reward that raises an error loses no response.

    Args:
        stop_token_ids: tokens that end a response.
    """

    def __init__(self, *args: Any, stop_token_ids: Sequence[int], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._stop_token_ids = frozenset(stop_token_ids)

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs) -> AgentLoopOutput:
        """Generate one response.

        Its seed does not depend on the checkpoint's step, so that checkpoints share their random numbers, which makes
        comparisons of them more precise.
        """
        output = await super().run(sampling_params, priority=priority, **{**kwargs, "global_steps": 0})
        tokens = output.response_ids
        output.reward_score = 0.0
        output.extra_fields["reward_extra_info"] = {
            "index": plain(kwargs["index"]),
            "sample": plain(kwargs["session_id"]),
            "seed": output.extra_fields["sampling_seed"],
            "length": len(tokens),
            "truncated": len(tokens) >= self.response_length and tokens[-1] not in self._stop_token_ids,
        }
        return output
