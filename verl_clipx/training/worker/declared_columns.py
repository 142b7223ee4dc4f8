"""Reads a rollout batch of which verl sends references: a worker gets the columns that its entry point declares.

verl's NeoProto sends batches so, in the older trainer. verl's declaration lacks columns that the plugin reads, such as
the prompts' uid, and a column that nobody declares is dropped without a word.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from verl_clipx.training.worker.skipped_updates import REWARDS

# What verl's module of workers calls its declaration for the training of a rollout batch.
DECLARATION = "_TRAIN_BATCH_SPEC"
# The columns that verl's own losses may do without.
OURS = ("uid", "session_id", "extra_fields", "rollout_log_probs", "rollout_is_weights", "loss_mask", *REWARDS)


def with_columns(data: Any, compute: Callable[[Any], Any]) -> Any:
    """Returns what `compute` returns for a rollout batch, with every column that the plugin reads.

    Args:
        data: the batch as the worker gets it. One that came whole is handed on as it is.
        compute: trains on a batch whose columns are here.

    Raises:
        RuntimeError: verl would drop a column that the batch has.
    """
    prepare = getattr(data, "prepare_engine_batch", None)
    if prepare is None:
        return compute(data)
    context = prepare(declaration())
    dropped = [name for name in OURS if name in data.ref_table and name not in context.payload]
    if dropped:
        raise RuntimeError(f"verl's data plane drops {', '.join(dropped)} before the worker. {ADVICE}")
    return context.finalize(compute(context.payload))


def declaration() -> Any:
    """Returns verl's declaration of what the training of a rollout batch reads, with our columns; raises as above."""
    from verl.workers import engine_workers

    declared = getattr(engine_workers, DECLARATION, None)
    names = {field.name for field in dataclasses.fields(declared)} if dataclasses.is_dataclass(declared) else set()
    if "optional_keys" not in names:
        raise RuntimeError(
            f"verl sends references to a rollout batch's columns, and {engine_workers.__name__} has no "
            f"{DECLARATION} with optional_keys, in which the plugin declares those that it reads "
            f"({', '.join(OURS)}). {ADVICE}"
        )
    return dataclasses.replace(declared, optional_keys=(*declared.optional_keys, *OURS))


ADVICE = "Train with trainer.use_v1=True or, where verl has the key, with trainer.data_plane=classic."
