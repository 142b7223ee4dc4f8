"""Checks that the fingerprints in a log are of the form in which the plugin writes them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HASHES = ("prompts", "responses", "rows")
COUNTS = ("groups", "sequences", "tokens", "distinct")


def check_batches(path: Path, batches: Mapping[int, Any]) -> None:
    """Refuses fingerprints that are damaged.

    Args:
        path: of the log, for the message.
        batches: step to its fingerprints.

    Raises:
        ValueError: a value is of another form; names the file, the step and the key.
    """
    for step, batch in batches.items():
        wrong = wrong_keys(batch) if isinstance(batch, Mapping) else [f"`batch` is {batch!r:.40} and no object"]
        if wrong:
            raise ValueError(
                f"{path}: the fingerprints of step {step} are damaged: {', '.join(wrong)}; remove `batch` from that "
                "line to read the log without them"
            )


def wrong_keys(batch: Mapping[str, Any]) -> list[str]:
    """Returns the keys of a batch's fingerprints whose values are of another form."""
    wrong = [name for name in HASHES if not is_hash(batch.get(name))]
    wrong += [name for name in COUNTS if not is_count(batch.get(name))]
    if "definition" in batch and not is_count(batch["definition"]):
        wrong.append("definition")
    if not is_list_of(batch.get("updates", []), is_hash):
        wrong.append("updates")
    if "versions" in batch and not (is_list_of(batch["versions"], is_count) and len(batch["versions"]) == 2):
        wrong.append("versions")
    return wrong


def is_hash(value: Any) -> bool:
    """Returns whether a value is a hexadecimal number in a text."""
    try:
        return isinstance(value, str) and int(value, 16) >= 0
    except ValueError:
        return False


def is_count(value: Any) -> bool:
    """Returns whether a value is a whole number of 0 or more."""
    return type(value) is int and value >= 0


def is_list_of(value: Any, is_right: Callable[[Any], bool]) -> bool:
    """Returns whether a value is a list whose entries are all right."""
    return isinstance(value, list) and all(map(is_right, value))
