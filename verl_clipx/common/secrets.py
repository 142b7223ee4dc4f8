"""Credentials in configurations: they are known by the names of keys and their own shapes, and never shown.

Both lists are our own. detect-secrets, the one scanner on PyPI whose patterns can be imported, lacks the shapes of
training's own services (Hugging Face, Anthropic, Google, signed addresses, Bearer headers) and reads source code.

Source: the providers' documentation of their tokens; gitleaks, config/gitleaks.toml.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

REDACTED = "[redacted]"

# Matches keys in capitals and with hyphens too: OPENAI_API_KEY, hf-token; but not `tokens` and `pad_token`, parts of a
# text.
_NAME = (
    r"(?:(?:api|access|account|secret|private|signing|encryption|license|ssh|wandb)[_.-]?keys?"
    r"|(?:auth|access|hf|hub|bearer|refresh|session|id|github|gitlab|slack|bot|api|sas|wandb|personal|security)[_-]?token"
    r"|passwd|password|passphrase|(?<=_)pwd|(?<![a-z])secrets?|credentials?(?:\.\w+)*|(?:proxy-)?authorization"
    r"|(?:basic|http|proxy)[_-]auth|cookies?|webhook(?:[_-]?ur[li])?|sas[_-]?ur[li]|connection[_-]?string)"
)
_KEY = re.compile(rf"{_NAME}(?![a-z])|(?:^|[.])token$", re.IGNORECASE)
# In a text: an override or part of a query, a member of a JSON object, or an option with its value (or list).
_ASSIGNED = re.compile(
    rf"((?:{_NAME}[\"']?\s*[=:]|(?<![\w-])(?:--)?token(?:=|[\"']\s*:)|(?<![\w.-])--(?:[\w.-]*{_NAME}|token)\s(?!\s*-))\s*[\"']?)"
    r"(\[(?!redacted\])[^\]]*\]?|[^\s,&{}\"'\[][^\s,&{}\"']*)",
    re.IGNORECASE,
)
# Headers whose value has blanks in it: it ends with the line or the quotes around it.
_HEADER = re.compile(r"((?:authorization|cookie)[\"']?\s*[:=]\s*[\"']?)[^\"'\r\n]+", re.IGNORECASE)
_SHAPES = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----.*?(?:-----END [A-Z0-9 ]*-----|\Z)"
    r"|(?<=bearer )(?=\S*\d)[\w.~+/=-]{16,}"
    r"|(?<=wandb login )[\w-]{40,}"
    # Amazon's, Google's and Azure's signed addresses
    r"|(?<=[?&])(?:sig|signature|x-(?:amz|goog)-(?:signature|credential))=[^&\s\"']+"
    # addresses by which whoever knows them can post
    r"|(?<=://)(?:hooks\.slack\.com|(?:\w+\.)?discord(?:app)?\.com/api/webhooks|[\w-]+\.webhook\.office\.com"
    r"|open\.(?:feishu\.cn|larksuite\.com)/open-apis/bot|qyapi\.weixin\.qq\.com/cgi-bin/webhook"
    r"|api\.telegram\.org/bot)[^\s\"',]*"
    r"|(?<![\w-])(?-i:"
    r"hf_[A-Za-z0-9]{30,}|api_org_[A-Za-z0-9]{30,}|gh[opsur]_[A-Za-z0-9]{30,}|github_pat_\w{30,}"
    r"|gl(?:pat|dt|ft|soat|rt|cbt|ptt|agent|imt|oas)-[\w-]{20,}|xox[a-z]-[\w-]{10,}|xapp-[\w-]{10,}"
    r"|sk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}|sk-[a-f0-9]{32}|[rs]k_(?:live|test)_\w{16,}|gsk_\w{30,}|nvapi-[\w-]{30,}"
    r"|r8_\w{30,}|wandb_v1_\w{30,}|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}|AIza[\w-]{35}|ya29\.[\w-]{20,}"
    r"|GOCSPX-[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|npm_\w{30,}|pypi-[\w-]{50,}|SG\.[\w-]{16,}\.[\w-]{16,}"
    r"|dop_v1_[a-f0-9]{64}|\d{8,10}:[\w-]{35}(?![\w-]))",
    re.IGNORECASE | re.DOTALL,
)
# An option, whose value is the next word in a list.
_OPTION = re.compile(r"--[\w.-]+")
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s]+(?=@)")


def redact(value: Any) -> Any:
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
        return [_of_key(one, two) if _is_option(one) and not _is_option(two) else redact(two) for one, two in pairs]
    if isinstance(value, str):
        shown = _IN_ADDRESS.sub(REDACTED, _SHAPES.sub(REDACTED, value))
        return _ASSIGNED.sub(rf"\1{REDACTED}", _HEADER.sub(rf"\1{REDACTED}", shown))
    return value


def _is_option(part: Any) -> bool:
    return isinstance(part, str) and _OPTION.fullmatch(part) is not None


def _of_key(key: str, value: Any) -> Any:
    if _KEY.search(key) and not (value is None or isinstance(value, bool) or value in ("", [], {})):
        return REDACTED
    return redact(value)
