"""Credentials in configurations: they are found by the names of keys and the form of addresses, and never shown."""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

REDACTED = "[redacted]"

# Matches keys in capitals and with hyphens too: OPENAI_API_KEY, hf-token; but not `tokens`, the parts of a text.
_NAME = r"(?:(?:api|access|secret|private)[_-]?keys?|(?:auth|access|hf|hub|bearer)[_-]?token|passwd|password)"
_KEY = re.compile(rf"{_NAME}(?![a-z])", re.IGNORECASE)
# In a text: an override or part of a query, a member of a JSON object, or an option with its value (or list).
_ASSIGNED = re.compile(
    rf"((?:{_NAME}[\"']?\s*[=:]|(?<![\w.-])--[\w.-]*{_NAME}\s(?!\s*-))\s*[\"']?)(\[[^\]]*\]?|[^\s,&{{}}\"']+)",
    re.IGNORECASE,
)
# An option, whose value is the next word in a list.
_OPTION = re.compile(r"--[\w.-]+")
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s]+(?=@)")


def redacted(value: Any) -> Any:
    """A configuration with `REDACTED` in place of each credential.

    Args:
        value: nested mappings and lists of plain values; it is not changed.

    Returns:
        The same as dicts, lists and plain values. Values that are empty, null, true or false are no credentials.
    """
    if isinstance(value, Mapping):
        return {key: _of_key(str(key), part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        pairs = pairwise([None, *value])
        return [_of_key(one, two) if _is_option(one) and not _is_option(two) else redacted(two) for one, two in pairs]
    if isinstance(value, str):
        return _ASSIGNED.sub(rf"\1{REDACTED}", _IN_ADDRESS.sub(REDACTED, value))
    return value


def _is_option(part: Any) -> bool:
    return isinstance(part, str) and _OPTION.fullmatch(part) is not None


def _of_key(key: str, value: Any) -> Any:
    if _KEY.search(key) and not (value is None or isinstance(value, bool) or value in ("", [], {})):
        return REDACTED
    return redacted(value)
