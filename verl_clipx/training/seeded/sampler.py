"""verl's replay buffer with the rows of a batch in a fixed order, regardless of the order of arrival.

The order decides which rows form a mini-batch and which rank gets them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from verl_clipx.run.keys import AGENT_LOOP, ENGINE_NAME, GROUP_FILTERING, SYNC_STEP, TRAINER_MODE

SEEDED_ENGINES = ("vllm", "cpu")
# From a key to what it must be, and why.
NEEDED = {
    TRAINER_MODE: ("sync", "in other modes batches depend on timing"),
    SYNC_STEP.replace("*", "sync"): (1, "otherwise the first samples to arrive win"),
    GROUP_FILTERING: (False, "otherwise the number of prompts that are drawn depends on timing"),
    "clipx_rollout.versions_old": (0, "only training in one process (benchmarks/one_process) keeps weights"),
}


class SeededReplayBuffer(ReplayBuffer):
    """verl's replay buffer of the ``sync`` mode, whose batches are ordered by prompt and sample."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """Wait for a batch, and return it with its rows ordered, and verl's metrics."""
        batch, metrics = super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        if batch.keys:
            fields = tq.kv_batch_get(keys=batch.keys, partition_id=partition_id, select_fields=["extra_fields"])
            batch.reorder(row_order(batch.keys, [getattr(row, "data", row) for row in fields["extra_fields"]]))
        return batch, metrics


def row_order(keys: Sequence[str], extra_fields: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the order of a batch's rows: by the prompt's index in the data set, then by sample.

    Prompts with the same index are ordered by the seeds of their samples. If these are equal too, the same prompt
    occurs twice with the same samples; rows of the two occurrences are not mixed.

    Args:
        keys: verl's ``{uid}_{session}_{output}``.
        extra_fields: one mapping per key, with ``prompt_index`` and ``sampling_seed``.

    Returns:
        Positions in ``keys``, first row first.

    Raises:
        ValueError: a row lacks these fields.
    """
    groups: dict[str, list[tuple]] = {}
    for row, (key, fields) in enumerate(zip(keys, extra_fields, strict=True)):
        if "sampling_seed" not in fields:
            raise ValueError(
                f"+clipx/rollout=seeded: the sample {key} has no seed, so another agent loop made it. Leave "
                f"{AGENT_LOOP} as the group sets it, and the column agent_name "
                "out of the data."
            )
        uid, session, output = key.rsplit("_", 2)
        index = fields["prompt_index"]
        # An index may be a number or a text; numbers come first.
        is_text = isinstance(index, str)
        rank = (is_text, index, int(session), int(output), fields["sampling_seed"], row)
        groups.setdefault(uid, []).append(rank)
    ranks_of_groups = [sorted(group) for group in groups.values()]

    def rank_of_group(group: list[tuple]) -> tuple:
        """Return what groups are ordered by: the prompt's index, then their samples, but not the order of arrival."""
        index = group[0][:2]
        samples = [rank[2:-1] for rank in group]
        return index, samples

    ranks_of_groups.sort(key=rank_of_group)
    return [rank[-1] for group in ranks_of_groups for rank in group]


def seeded(
    *, trainer_mode: str, trainer_config: Mapping[str, Any], sampler_kwargs: Mapping[str, Any], **given: Any
) -> SeededReplayBuffer:
    """Build verl's replay buffer with ordered rows, for settings in which nothing else depends on timing.

    Args:
        sampler_kwargs: ``rollout_name``, ``filter_groups`` (the node ``algorithm.filter_groups``),
            ``train_batch_size``, ``gen_batch_size``, ``sync_refill_failed_groups``; optional: ``poll_interval``
            (seconds), ``versions_old`` (of `+clipx/rollout=stale`).
        trainer_mode, trainer_config, given: what verl gives any replay buffer.

    Raises:
        ValueError: a setting makes batches depend on timing, or the engine takes no seed per request.
    """
    filter_groups = sampler_kwargs.get("filter_groups") or {}
    # In the order of NEEDED.
    values = (
        trainer_mode,
        trainer_config.get("parameter_sync_step", 1),
        bool(filter_groups.get("enable", False)),
        sampler_kwargs.get("versions_old", 0),
    )
    for key, value in zip(NEEDED, values, strict=True):
        wanted, why = NEEDED[key]
        if value != wanted:
            raise ValueError(f"+clipx/rollout=seeded with {key}={value}: must be {wanted}; {why}")
    engine = sampler_kwargs["rollout_name"]
    if engine not in SEEDED_ENGINES:
        allowed = f"{' or '.join(SEEDED_ENGINES)}: they accept a seed with every request"
        raise ValueError(f"+clipx/rollout=seeded with {ENGINE_NAME}={engine}: must be {allowed}")
    train_batch_size = sampler_kwargs["train_batch_size"]
    gen_batch_size = sampler_kwargs.get("gen_batch_size") or train_batch_size
    refill_failed = bool(sampler_kwargs["sync_refill_failed_groups"])
    if refill_failed:
        # Prompts are replaced one at a time, so the data loader is read one at a time, as for verl's own buffer.
        gen_batch_size = 1
    if "poll_interval" in sampler_kwargs:
        given["poll_interval"] = float(sampler_kwargs["poll_interval"])
    return SeededReplayBuffer(
        **given,
        trainer_mode=trainer_mode,
        trainer_config=trainer_config,
        sampler_kwargs=sampler_kwargs,
        train_batch_size=train_batch_size,
        gen_batch_size=gen_batch_size,
        sync_refill_failed_groups=refill_failed,
    )
