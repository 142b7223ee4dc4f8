"""What a run's record keeps of its configuration: values that cannot hold a secret, and a hash in place of others.

A number stays as it is, and so does a text that verl or the plugin lists for its key. Any other text may be a
credential, and so may any value of a key that neither of them declares. The record has 16 bits of a hash in its place,
which tell two values apart, and are too few to find the value by guessing. declared_keys.json lists the declared keys
with their texts (scripts/declared_keys.py). A key of a newer verl is not in this list. Importing this is cheap.
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
# For each of several corrections, separated by commas: a bound, or a lower and an upper bound with _ between them.
RANGE = re.compile(r"[\d.eE+-]{1,20}(?:[_,][\d.eE+-]{1,20}){0,9}")
# The host of an address, perhaps in the brackets of IPv6, and perhaps a port.
HOST_AND_PORT = re.compile(r"(?:\[[^\]]*\]|[^:]*)(?::\d*)?")


class Declared(NamedTuple):
    """The keys that a configuration may have.

    Args:
        numbers: the keys that take numbers.
        texts: by key, the texts that verl or the plugin lists for it; empty if they list none.
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
        configuration: the leaves by dotted key; a list is a leaf. It may itself be what a record keeps: a value that is
            a hash already stays as it is.

    Returns:
        The kept values by the same keys. The keys below `ray_kwargs` are left out, and those below the plugin's nodes
        in verl's policy loss, whose content the record has in its other fields.
    """
    left_out = (keys.RAY, *keys.OF_THE_PLUGIN)
    return {
        str(redact(key)): kept_value(key, value)
        for key, value in configuration.items()
        if not any(key == node or key.startswith(f"{node}.") for node in left_out)
    }


def kept_value(key: str, value: Any) -> Any:
    """Return what a record keeps of a value: the value itself, an address without its credentials, or a hash.

    Args:
        key: the value's dotted key.
        value: a number, a text, None, a list or a mapping. Each item of a list is treated as a value of its own, and a
            mapping as a single value.
    """
    if value is None or value in ("", OPEN, {}):
        return value
    if isinstance(value, list | tuple):
        return [kept_value(key, item) for item in value]
    if isinstance(value, str) and HASH.fullmatch(value):
        return value
    if isinstance(value, str) and key in keys.PATHS and "${" not in value:
        return redact(strip_credentials(value))
    return value if stays(key, value) else hash_of(key, value)


def stays(key: str, value: Any) -> bool:
    """Return whether a record keeps a value as it is; the arguments are those of `kept_value`, and no list."""
    if isinstance(value, str):
        known = texts_of(key)
        is_choice = value in known or all(part.strip() in known for part in value.split(","))
        is_code = key in keys.NAMES and is_name(value)
        return is_choice or is_code or (key in keys.RANGES and RANGE.fullmatch(value) is not None)
    if isinstance(value, bool):
        return key in declared().texts or key.startswith(f"{NODE}.")
    return isinstance(value, int | float) and (takes_numbers(key) or str(value) in texts_of(key))


def texts_of(key: str) -> frozenset[str]:
    """Return the texts that verl or the plugin lists for a key; empty for a key that neither of them declares."""
    return declared().texts.get(key, frozenset())


def is_name(text: str) -> bool:
    """Return whether a text may be the name of an object in a module, or of an entry of a registry."""
    return NAME.fullmatch(text) is not None and redact(text) == text


def takes_numbers(key: str) -> bool:
    """Return whether a record keeps a number at a key as it is."""
    # A key of the clipx node that is not declared is a parameter of the user's own loss.
    return key in declared().numbers or key.startswith(f"{NODE}.")


def hash_of(key: str, value: Any) -> str:
    """Return what a record has in place of a value: 16 bits of the hash of key and value, as hash:0f3c."""
    text = json.dumps([key, value], sort_keys=True, default=str)
    return f"hash:{hashlib.sha256(text.encode()).hexdigest()[:4]}"


def is_hash(value: Any) -> bool:
    """Return whether a value of a record is the hash of another value, or a list with such a hash in it."""
    if isinstance(value, list | tuple):
        return any(map(is_hash, value))
    return isinstance(value, str) and HASH.fullmatch(value) is not None


def strip_credentials(address: str) -> str:
    """Return an address without user, password, query and fragment; a path without :// stays as it is.

    By the standard, user and password end at the last @ before the first /, ? or #. A password that contains such a
    mark, not escaped, is found unless what precedes the mark looks like a host, or a host with a port: then the text
    cannot be told from an address whose path contains @, and is kept.
    """
    scheme, separator, rest = address.partition("://")
    if not separator:
        return address
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    start_of_host = authority.rfind("@") + 1
    if not HOST_AND_PORT.fullmatch(authority, start_of_host):
        # No host looks like this: it is a user with the beginning of a password, which ends at the last @ of all.
        start_of_host = rest.rfind("@") + 1
    without_query = re.split("[?#]", rest[start_of_host:], maxsplit=1)[0]
    return f"{scheme}://{without_query}"
