"""verl's single-turn agent loop with a seed for every sample, so that a rollout is a function of the run's seed."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from verl_clipx.training.seeded import AGENT_LOOP

# The fields of a prompt that the v1 trainer adds or the data set has, which name its step and sample.
NEEDED = ("global_steps", "index", "session_id")


def sampling_seed(
    seed: int, global_step: int, index: int | str, session: int, messages: Sequence[dict[str, Any]]
) -> int:
    """Return the seed of one sample, the same in every process and on every machine.

    Args:
        seed: the run's.
        global_step: training step that the sample belongs to; validation counts as the step that it follows.
        index: the prompt's index in its data set.
        session: the sample's number among those of its prompt.
        messages: the prompt. It distinguishes prompts with the same index: from several files, from training and
            validation, or without an index (verl uses 0). Text enters in full, images and the like only by their type.

    Returns:
        A seed in [0, 2**31), which every engine accepts.
    """
    parts = [seed, global_step, index, session, list(messages)]
    text = json.dumps(parts, sort_keys=True, default=lambda value: type(value).__name__)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


@register(AGENT_LOOP)
class SeededSingleTurnAgentLoop(SingleTurnAgentLoop):
    """verl's single-turn agent loop, whose requests carry a seed made from ``actor_rollout_ref.rollout.seed``."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs) -> AgentLoopOutput:
        """Generate one response.

        Args:
            sampling_params: shared by the samples of a prompt, and therefore left as it is.
            priority: verl's, for the server.
            kwargs: the prompt's fields from the data set, and what verl's v1 trainer adds (``global_steps``,
                ``session_id``).

        Returns:
            verl's output; ``extra_fields`` also has ``prompt_index`` and ``sampling_seed``, by which `sampler.py`
            orders rows.

        Raises:
            ValueError: the trainer did not say which step and sample this is.
        """
        missing = [key for key in NEEDED if key not in kwargs]
        if missing:
            raise ValueError(
                f"+clipx/rollout=seeded: no {', '.join(missing)}; it needs the v1 trainer, trainer.use_v1=True"
            )
        index = plain(kwargs["index"])
        seed = sampling_seed(
            self.rollout_config.seed,
            global_step=plain(kwargs["global_steps"]),
            index=index,
            session=plain(kwargs["session_id"]),
            messages=kwargs["raw_prompt"],
        )
        output = await super().run({**sampling_params, "seed": seed}, priority=priority, **kwargs)
        output.extra_fields.update(prompt_index=index, sampling_seed=seed)
        return output


def plain(value: Any) -> int | str:
    """Convert a field to a Python scalar; depending on type and batch size it arrives from Python, NumPy or torch."""
    return value.item() if hasattr(value, "item") else value
