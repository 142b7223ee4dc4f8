"""Fetches the columns of a rollout batch that the plugin reads, where verl sends the worker only references to them.

Development versions of verl do this in their older trainer, by a protocol named NeoProto. A worker gets the columns
that its entry point declares. verl's declaration lacks columns that the plugin reads, such as the prompts' uid, and a
column that nobody declares is dropped without a word.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from verl_clipx.training.worker.skipped_updates import REWARDS

# What verl's module of workers calls its declaration for the training of a rollout batch.
DECLARATION = "_TRAIN_BATCH_SPEC"
# The columns that the plugin reads and that verl's declaration may lack.
OURS = ("uid", "session_id", "extra_fields", "rollout_log_probs", "rollout_is_weights", "loss_mask", *REWARDS)


def compute_with_columns(data: Any, compute: Callable[[Any], Any]) -> Any:
    """Fetch the columns of a rollout batch, call a function with the batch, and return what the function returns.

    Args:
        data: the batch as the worker gets it: with references to its columns, or with all its columns. In the second
            case it is passed on unchanged.
        compute: called with the batch after its columns were fetched.

    Raises:
        RuntimeError: verl would drop a column that the batch has and the plugin reads, or verl has no declaration that
            the plugin can extend (`make_declaration`).
    """
    prepare = getattr(data, "prepare_engine_batch", None)
    if prepare is None:
        return compute(data)
    # As in verl's own `run_engine_batch`: `payload` is the batch with the columns that were fetched, and `finalize`
    # turns what is computed from it into what verl's caller expects.
    context = prepare(make_declaration())
    dropped = [name for name in OURS if name in data.ref_table and name not in context.payload]
    if dropped:
        raise RuntimeError(f"verl's data plane drops {', '.join(dropped)} before the worker. {ADVICE}")
    return context.finalize(compute(context.payload))


def make_declaration() -> Any:
    """Return verl's declaration of what the training on a rollout batch reads, with the columns of `OURS` added.

    Raises:
        RuntimeError: verl has no declaration with optional keys.
    """
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
