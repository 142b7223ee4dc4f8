"""What a run's record keeps of its configuration: values that cannot hold a secret, and a hash in place of others.

A number, and a text that verl or the plugin lists for its key, stay as they are. Any other text, and whatever stands at
a key that neither declares, may be a credential. 16 bits of a hash tell two of them apart, and nobody can guess one
from so few. declared_keys.json has the keys with their texts (scripts/declared_keys.py); what it lacks, as a
key of a newer verl, is kept as a hash too. Importing this is cheap.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from verl_clipx.common.secrets import redact
from verl_clipx.losses.base.parameters import NODE
from verl_clipx.run import keys

TABLE = Path(__file__).with_name("declared_keys.json")
# Hydra's mark of a value that is not yet set.
OPEN = "???"
HASH = re.compile(r"hash:[0-9a-f]{4}")
# The name of an object in a module, or of an entry of a registry.
NAME = re.compile(r"[A-Za-z_][\w.]{0,99}(?::[A-Za-z_]\w{0,99})?")
# A bound, or a lower and an upper one, of each of several corrections.
RANGE = re.compile(r"[\d.eE+-]{1,20}(?:[_,][\d.eE+-]{1,20}){0,9}")


class Declared(NamedTuple):
    """The keys that a configuration may have.

    Args:
        numbers: those that take numbers.
        texts: from every key to the texts that it takes beside other ones.
    """

    numbers: frozenset[str]
    texts: Mapping[str, frozenset[str]]


@cache
def declared() -> Declared:
    """Return the keys that verl and the plugin declare."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    numbers = frozenset(key for key, entry in table.items() if entry.get("numbers"))
    texts = {key: frozenset(entry.get("texts", ())) for key, entry in table.items()}
    return Declared(numbers=numbers, texts=texts)


def kept_configuration(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record keeps of a configuration.

    Args:
        configuration: dotted key to value; a list is a value. What the record keeps already stays as it is.

    Returns:
        The same keys, without those of Ray's start and of the plugin's nodes in verl's, which the record's fields have.
    """
    left_out = (keys.RAY, *keys.OF_THE_PLUGIN)
    return {
        str(redact(key)): kept_value(key, value)
        for key, value in configuration.items()
        if not any(key == node or key.startswith(f"{node}.") for node in left_out)
    }


def kept_value(key: str, value: Any) -> Any:
    """Return a value as a record keeps it: itself, an address without its credentials, or its hash.

    Args:
        key: the dotted key at which it stands.
        value: plain; each item of a list is kept by itself, and a mapping as a whole.
    """
    if value is None or value in ("", OPEN, {}):
        return value
    if isinstance(value, list | tuple):
        return [kept_value(key, item) for item in value]
    if isinstance(value, str) and HASH.fullmatch(value):
        return value
    if isinstance(value, str) and key in keys.PATHS and "${" not in value:
        return redact(bare_address(value))
    return value if stays(key, value) else hash_of(key, value)


def stays(key: str, value: Any) -> bool:
    """Return whether a record keeps a single value of a key as it is."""
    if isinstance(value, str):
        known = texts_of(key)
        is_choice = value in known or all(part.strip() in known for part in value.split(","))
        is_code = key in keys.NAMES and is_name(value)
        return is_choice or is_code or (key in keys.RANGES and RANGE.fullmatch(value) is not None)
    if isinstance(value, bool):
        return key in declared().texts or key.startswith(f"{NODE}.")
    return isinstance(value, int | float) and (takes_numbers(key) or str(value) in texts_of(key))


def texts_of(key: str) -> frozenset[str]:
    """Return the texts that verl or the plugin lists for a key; none for one that neither declares."""
    return declared().texts.get(key, frozenset())


def is_name(text: str) -> bool:
    """Return whether a text may be the name of an object in a module, or of an entry of a registry."""
    return NAME.fullmatch(text) is not None and redact(text) == text


def takes_numbers(key: str) -> bool:
    """Return whether a number at a key stays; any key of the clipx node is a parameter, if only of a user's loss."""
    return key in declared().numbers or key.startswith(f"{NODE}.")


def hash_of(key: str, value: Any) -> str:
    """Return 16 bits of a hash of a value at a key."""
    text = json.dumps([key, value], sort_keys=True, default=str)
    return f"hash:{hashlib.sha256(text.encode()).hexdigest()[:4]}"


def is_hash(value: Any) -> bool:
    """Return whether a value of a record stands for another one."""
    if isinstance(value, list | tuple):
        return any(map(is_hash, value))
    return isinstance(value, str) and HASH.fullmatch(value) is not None


def bare_address(path: str) -> str:
    """Return an address without user, password, query and fragment; a path without :// stays as it is."""
    scheme, mark, rest = path.partition("://")
    if not mark:
        return path
    place = re.split("[?#]", rest, maxsplit=1)[0]
    host, slash, below = place.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{below}"
