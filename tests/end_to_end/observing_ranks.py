"""What a rank's worker observes of rollout batches, with verl's FSDP2 engine and without Ray."""

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from .training_ranks import actor_config, build_worker, mini_batch

ROWS, UPDATES = 16, 2
GRPO = ("+clipx=grpo", "clipx.receipt=off", "clipx.compile=false")
# Everything of the plugin's that only observes on a rank, by what raises in it and the name that the log gives it.
METRICS, TRACES = "the metrics of the loss", "the traces of rank {}"
PLANTED = {
    "worker.policy_loss.more_sums": METRICS,
    "loss.loss.token_sums": METRICS,
    "worker.loss_function.exact_metrics": METRICS,
    "worker.training_worker.over_remaining": METRICS,
    "worker.training_worker.merged_passes": METRICS,
    "worker.training_worker.ages": METRICS,
    "worker.observe.observed_sums": METRICS,
    "worker.reports.hash_field": "the fingerprints of updates",
    "worker.tracer.tokens_of_method": TRACES,
}
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier")


def share_of(rows: list[Any], rank: int, world: int, order: list[int]) -> list[Any]:
    """A rank's rows, so that each update has the same ones on any number of ranks; `order`: of those of an update."""
    size, part = len(rows) // UPDATES, len(rows) // UPDATES // world
    updates = [[rows[update * size + at] for at in order] for update in range(UPDATES)]
    return [row for of in updates for row in of[rank * part : (rank + 1) * part]]


def train(worker: Any, share: list[Any], micro_batch: int) -> dict[str, Any]:
    from verl.utils import tensordict_utils as tu

    data, size = mini_batch(share, sequences=ROWS // UPDATES), ROWS // UPDATES
    tu.assign_non_tensor(data, mini_batch_size=size, epochs=1, use_dynamic_bsz=False)
    tu.assign_non_tensor(data, micro_batch_size_per_gpu=micro_batch)
    return tu.get(worker.train_mini_batch(data), "metrics")


def fail_in(name: str, whole: Any, calls: list[int], here: bool, *args: Any, **kwargs: Any) -> Any:
    """Stands for a function that raises on one rank, and within an update where each micro-batch calls it."""
    calls[0] += 1
    if here and (calls[0] > 1 or name in ("merged_passes", "ages", "hash_field")):
        raise ZeroDivisionError("planted")
    return whole(*args, **kwargs)


def observe_on_rank(rank: int, world: int, policy: str, rows: str, folder: Path) -> dict[str, Any]:
    """Returns the updates' fingerprints in two orders, and by planted failure each rank's metrics two batches later."""
    from verl.workers.utils.losses import ppo_loss

    worker, loaded = build_worker(Path(policy)), torch.load(rows, weights_only=False)
    worker.engine.optimizer_step = lambda: 1.0
    found: dict[str, Any] = {"orders": [], "collectives": 0, "failed": {}}

    def begin(*overrides: str) -> None:
        worker.set_loss_fn(partial(ppo_loss, config=actor_config(overrides)))

    def counted(function: Any, *args: Any, **kwargs: Any) -> Any:
        found["collectives"] += "verl_clipx" in sys._getframe(2).f_code.co_filename
        return function(*args, **kwargs)

    def forward_step(micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        assert "clipx_row_hash" not in micro_batch
        return type(worker.engine).forward_step(worker.engine, micro_batch, *args, **kwargs)

    begin(*GRPO)
    patches = [
        patch.object(torch.distributed, name, partial(counted, getattr(torch.distributed, name)))
        for name in COLLECTIVES
    ]
    with patch.object(worker.engine, "forward_step", forward_step):
        for patched in patches:
            patched.start()
        for order, micro_batch in (([*range(8)], 1), ([3, 0, 7, 1, 6, 2, 5, 4], 2)):
            metrics = train(worker, share_of(loaded, rank, world, order), micro_batch)
            found["orders"].append(metrics["clipx_updates"])
        for patched in patches:
            patched.stop()
    share = share_of(loaded, rank, world, [*range(8)])
    trace = ("+clipx/trace=prompts", "clipx.trace.fraction=1", "clipx.trace.every=1", f"clipx.trace.folder={folder}")
    for planted in PLANTED:
        module, _, name = f"verl_clipx.{planted}".rpartition(".")
        owner, calls = importlib.import_module(module), [0]
        begin(*(("+clipx=observe",) if "observe" in planted else GRPO), *(trace if "tracer" in planted else ()))
        before = train(worker, share, 1)
        assert "clipx/ratio_mean" in before and not [key for key in before if key.startswith("clipx_off")]

        fail = partial(fail_in, name, getattr(owner, name), calls, rank == world - 1)
        with patch.object(owner, name, fail):
            for _ in range(2):
                metrics = train(worker, share, 1)
        assert calls[0], planted
        of_ranks: list[Any] = [None] * world
        torch.distributed.all_gather_object(of_ranks, {key: value for key, value in metrics.items() if "clipx" in key})
        found["failed"][planted] = of_ranks
    return found
