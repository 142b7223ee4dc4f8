"""verl's replay buffers, polled often enough for steps that take less than a second.

The stock buffers look for finished trajectories every 2 s. verl passes a custom sampler (``trainer.v1.sampler.
custom_sampler``) fewer arguments than its own buffers; ``configs/hardware/cpu.yaml`` carries the missing ones
(group filtering, refilling of failed groups) through ``sampler_kwargs``, so nothing is lost.
"""

from collections.abc import Mapping
from typing import Any

POLL_INTERVAL_SECONDS = 0.2


def frequent_polling(*, trainer_mode: str, sampler_kwargs: Mapping[str, Any], **given: Any):
    """Build verl's own replay buffer for this trainer mode, with a shorter polling interval.

    Args:
        sampler_kwargs: ``poll_interval`` (seconds), ``filter_groups`` (the node ``algorithm.filter_groups``),
            ``train_batch_size``, ``gen_batch_size``, ``sync_refill_failed_groups``; all optional.
        trainer_mode, given: what verl gives any replay buffer.

    Raises:
        ValueError: group filtering is on and ``algorithm.filter_groups.metric`` is empty.
    """
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

    metric, max_inflight = _group_filter(sampler_kwargs.get("filter_groups"))
    refill_failed = bool(sampler_kwargs.get("sync_refill_failed_groups", False))
    arguments = {
        **given,
        "trainer_mode": trainer_mode,
        "sampler_kwargs": sampler_kwargs,
        "poll_interval": float(sampler_kwargs.get("poll_interval", POLL_INTERVAL_SECONDS)),
        "filter_groups_metric": metric,
        "sync_refill_failed_groups": refill_failed,
    }
    if trainer_mode != "sync":
        return ReplayBufferAsync(**arguments)
    train_batch_size = sampler_kwargs.get("train_batch_size")
    gen_batch_size = sampler_kwargs.get("gen_batch_size") or train_batch_size
    if metric is not None or refill_failed:
        # Prompts are replaced one at a time, so the data loader is read one at a time, as for verl's own buffer.
        gen_batch_size = 1
    return ReplayBuffer(
        **arguments,
        train_batch_size=train_batch_size,
        gen_batch_size=gen_batch_size,
        max_inflight_gen_batches=max_inflight,
    )


def _group_filter(filter_groups: Mapping[str, Any] | None) -> tuple[str | None, int]:
    """Read how groups are filtered.

    Args:
        filter_groups: the node ``algorithm.filter_groups``; None: there is no filtering.

    Returns:
        The metric by which groups are filtered, None without filtering; and how many batches of prompts may be
        generated at once.

    Raises:
        ValueError: filtering is on and no metric is named.
    """
    if filter_groups is None or not filter_groups.get("enable", False):
        return None, 1
    metric = filter_groups.get("metric")
    if not metric:
        raise ValueError("algorithm.filter_groups.metric is empty: name a reward metric, or set enable=False")
    return str(metric), filter_groups.get("max_inflight_gen_batches", 1)
