"""Checks that the fingerprints in a log are of the form in which the plugin writes them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# The fields of a fingerprint that every rollout batch has, by the kind of their values.
HASHES = ("prompts", "responses", "rows")
COUNTS = ("groups", "sequences", "tokens", "distinct")


def check_fingerprints(log: Path, batches: Mapping[int, Any]) -> None:
    """Refuse fingerprints that are damaged.

    Args:
        log: the file that they stand in, for the message.
        batches: from a step to the fingerprints of its rollout batch.

    Raises:
        ValueError: fingerprints are no object, or a value in them is of another form than the plugin writes.
    """
    for step, batch in batches.items():
        if not isinstance(batch, Mapping):
            damage = f"`batch` is {repr(batch)[:40]} and no object"
        elif damaged := damaged_fields(batch):
            damage = f"`batch` has no value, or a wrong one, for {', '.join(damaged)}"
        else:
            continue
        raise ValueError(
            f"{log}: the fingerprints of step {step} are damaged: {damage}. Remove `batch` from that line to read the "
            "log without them."
        )


def damaged_fields(batch: Mapping[str, Any]) -> list[str]:
    """Return the fields of a rollout batch's fingerprints that are missing or have a value of another form."""
    damaged = [name for name in HASHES if not is_hash(batch.get(name))]
    damaged += [name for name in COUNTS if not is_count(batch.get(name))]
    # Not every log has the following fields.
    if "definition" in batch and not is_count(batch["definition"]):
        damaged.append("definition")
    if "updates" in batch and not is_list_of(batch["updates"], is_hash):
        damaged.append("updates")
    if "versions" in batch and not is_range_of_versions(batch["versions"]):
        damaged.append("versions")
    return damaged


def is_range_of_versions(value: Any) -> bool:
    """Return whether a value is a list of two weight versions."""
    return is_list_of(value, is_count) and len(value) == 2


def is_hash(value: Any) -> bool:
    """Return whether a value is a text that is a hexadecimal number."""
    try:
        return isinstance(value, str) and int(value, 16) >= 0
    except ValueError:
        return False


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number of 0 or more; true and false are none."""
    return type(value) is int and value >= 0


def is_list_of(value: Any, is_right: Callable[[Any], bool]) -> bool:
    """Return whether a value is a list, and `is_right` holds for each of its entries."""
    return isinstance(value, list) and all(map(is_right, value))
