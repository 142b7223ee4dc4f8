"""Credentials in configurations, commands and messages: known by the names of keys and by their form, never shown.

Both are our own. Scanners' rules, such as gitleaks' and kingfisher's, know providers' tokens and neither the keys of a
configuration nor a command line; on PyPI they are binaries of 20 MB, and detect-secrets reads source code.
A token of lower-case letters alone, under no key that names a credential, may look like words, and then stays, as a
value that looks like a variable or a call does.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

REDACTED = "[redacted]"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Not the plural of anything here: a text has tokens, and a key ends with pass.
_PLURAL = ("tokens", "pass", "access", "sas", "eos", "bos", "cls")
# In the words of a key, in lower case and each in the singular: what names a credential,
_NAMES = re.compile(
    r"(?:password|passwd|passphrase|passcode|secret|credential|authorization|(?:api|access|auth)key)\b"
    r"|\b(?:cookie|webhook|connection string|sas ur[il])\b|(?:\b(?:auth|bearer|pwd|pat)|(?:auth|access|api|hf)token)$"
    r"|\b(?:api|access|account|storage|secret|private|signing|encryption|license|session|ssh|deploy|shared|master|wandb)"
    r" key\b"
    r"|\b(?:auth|access|hf|hub|bearer|refresh|session|id|git\w+|bot|api|sas|wandb|personal|security|private) tokens?$"
)
# what does so where its value is a text, but for a token of a text and a pass of an update,
_NAMES_TEXT = re.compile(
    r"^(?!.*\b(?:pad|[ebs]os|unk|cls|sep|mask|stop|start|end|begin|special|image|video|audio|tool|think|text|new|max|min"
    r"|num|per|first|second|last|next|extra|forward|backward|single|one|two|all|lopti|token|update|train|eval|of|by) )"
    r".*(?: (?:token|pass)|(?:db|smtp|user)pass)$"
)
# and what names a hash or an id, which stays if it is hexadecimal.
_NAMES_HASH = re.compile(
    r"\b(?:commit|rev(?:ision)?|sha|hashe?|digest|md|checksum|snapshot|head|blob|tree|resolve|u?u?id|policy|protocol"
    r"|definition|rule)\b"
)
# What is no value but stands for one: a shell's variable or command (a default in it is looked at by itself), an array,
# a call or a type in a program, a permission of GitHub's.
_STANDS_FOR = re.compile(
    r"\W*(?:\$(?:[A-Z][A-Z0-9_]*(?:[/$].*)?|[a-z_]*(?:token|secret|password|key)|\(.*)?|write|read|[|>][-+]?|(?:int|str)\b.*)"
    r"|\s?=\s?\([a-z_.]+| = [a-z_.]+\(.*"
)
# In an object that names a credential, the keys of its name and of its value.
_NAMING, _NAMED = re.compile("name|key|var|header", re.I), re.compile("val|content|literal|data", re.I)
# What a search may begin at any place ends within so many characters: otherwise a text of letters alone takes a time
# that grows with the square of its length.
_LONG = 1000
_NAME, _QUOTE = r"(?P<name>[\w.%+-]{0,120}\w)", r"\\{0,8}[\"']"
_VALUE = (
    rf"(?P<value>(?P<quote>{_QUOTE})(?:(?!(?P=quote))(?:\\.|[^\n])){{0,{_LONG}}}"
    rf"|\[(?!redacted\])[^\]]{{0,{_LONG}}}\]?"
    rf"|[^\s,&{{}}\"'\[](?:[^\s,&{{}}\"']|,(?![\s{{}}\"']|[\w.+\" ]{{0,120}}[=:]|$)){{0,{_LONG}}})"
)
# The rest of a value that is longer.
_REST = re.compile(r"[^\s,&{}\"']*")
# On the next line only what fills it, or a text in YAML's form: more is a node of its own.
_TO_VALUE = r"(?!= )(?:\s*[|>][-+]?\s*\n\s*|[^\S\n]*(?!\s)|\s*(?=\S*[^\s:][^\S\n]*$))"
# In a text: an override, a part of a query or a member of an object; a default; a pair of name and value, in
# either order; an option or what a program sets.
_ASSIGNED = (
    re.compile(
        rf"(?m)(?<![\w%]){_NAME}(?:\[\w*\])?(?P<between>(?:{_QUOTE}\]?)?\s*[=:]{_TO_VALUE}(?:-(?=[^\s-]))?){_VALUE}"
    ),
    re.compile(rf"(?:(?<=oc\.env:)|(?<=\$\{{)){_NAME}(?P<between>\s*,\s*|:?[-=]){_VALUE}"),
    re.compile(
        rf"\w(?:{_QUOTE})?\s*[=:]\s*(?:{_QUOTE})?{_NAME}"
        rf"(?P<between>(?:{_QUOTE})?\s*,?\s*(?:{_QUOTE})?(?i:val|content|literal|data)\w*(?:{_QUOTE})?\s*[=:]\s*){_VALUE}"
    ),
    re.compile(
        rf"\b[Vv]al\w*(?:{_QUOTE})?(?P<between>\s*[=:]\s*){_VALUE}"
        rf"(?=(?P=quote)?\s*,?\s*(?:{_QUOTE})?\w*(?i:name|key)(?:{_QUOTE})?\s*[=:]\s*(?:{_QUOTE})?{_NAME})"
    ),
    re.compile(rf"(?:(?<![\w.-])--|\b(?:set(?:env)?|ENV)\s+(?:-\w+\s+)*){_NAME}(?P<between>\s+)(?!-){_VALUE}"),
)
# Credentials behind a group, which stays.
_BEHIND = re.compile(
    # headers, whose value has blanks in it: it ends with the line or the quotes around it
    r"((?:authorization|cookie)\\*[\"']?\s*[:=]\s*\\*[\"']?)[^\"'\\\r\n]+"
    r"|(\bbearer\s+)(?=\S*\d)[\w.~+/=-]{8,}|(\bbasic\s+)(?-i:(?=\S+[A-Z0-9=])[\w+/-]{8,}={0,2})"
    # Amazon's, Google's and Azure's signed addresses, and those by which whoever knows them can post
    r"|([?&](?:sig|signature|x-(?:amz|goog)-(?:signature|credential))=)[^&\s\"']+"
    r"|(://(?:hooks\.slack\.com|(?:\w+\.)?discord(?:app)?\.com/api/webhooks|[\w-]+\.webhook\.office\.com|api\.telegram\.org"
    r"/bot|open\.(?:feishu\.cn|larksuite\.com)/open-apis/bot|qyapi\.weixin\.qq\.com/cgi-bin/webhook))[^\s\"',]*"
    # options of programs, netrc
    r"|(\s(?:-[uUa]|--(?:proxy-)?user|--auth)[\s=]*)(?!\d+:\d+\b)(?:[^\s:\"']*:|[\w\\]+%)[^\s\"']+"
    r"|(\b(?:sshpass|mysql\w*|mariadb\w*|mongo\w*|sqlcmd|login)\s(?:[^\n|;&]{0,300}?\s)??-[pP]\s*)(?!-)\S+"
    r"|(\b(?:redis-cli\s(?:[^\n|;&]{0,300}?\s)??-a|ldap\w+\s(?:[^\n|;&]{0,300}?\s)??-w|openssl\s(?:[^\n|;&]{0,300}?\s)??-k)\s*)(?!-)\S+"
    r"|(\s-pass(?:in|out)?\s+pass:)\S+|(<(?:\w*pass(?:word|wd)|\w*secret|\w*token|api_?key)>)[^<]+"
    r"|(\b(?:machine\s+\S+|default)\s+(?:login\s+\S+\s+)?password\s+)\S+"
    # a user with a password before a host, and whatever stands before one in an address of the web
    r"|(://)(?:[^/\s:@]{0,200}:(?!\d{1,5}(?:[/\s]|$))[^\s@]{0,1000}(?:@[^/\s@]{1,200}){0,3}"
    r"|(?<=http://|ttps://)[^/\s]{1,1000})(?=@)"
    r"|((?<![\w@./:-]))[A-Za-z][\w.+-]*:[^\s@/:,]{3,}(?=@(?!sha256:)[\w-]*[A-Za-z.])",
    re.IGNORECASE,
)
_KEYS = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----.*?(?:-----END [A-Z0-9 ]*-----|\Z)|\bA(?:KI|SI|BI|CC)A[A-Z0-9]{16}\b",
    re.S,
)
_TOKEN = re.compile(r"[A-Za-z0-9][\w+/~.-]{18,}[A-Za-z0-9]=*")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|^raysubmit_\w{16}$|^.*\.whl$", re.I)
_HEX = re.compile(
    r"(?<![0-9a-f])(?=[0-9a-f]*\d)(?=\d*[a-f])[0-9a-f]{20,}|(?<![0-9A-F])(?=[0-9A-F]*\d)(?=\d*[A-F])[0-9A-F]{20,}"
)
# Bits by which a letter is rarer in words than at random, and those of changes of kind: to a capital at the beginning
# of a word, to another capital, to and from a digit.
_LETTERS = (("etaoinshr", -1), ("dl", 0), ("cumwfgypb", 0.8), ("vk", 2), ("jxqz", 5))
_RARITY = {letter: bits for letters, bits in _LETTERS for letter in letters}
_CHANGES = (
    ("(?<=[a-z])[A-Z](?=[a-z])", 0.75),
    ("[a-z](?=[A-Z](?![a-z]))", 2.25),
    (r"[A-Za-z](?=\d)", 1.5),
    (r"\d(?=[A-Za-z])", 3),
)


def redact(value: Any, key: str = "") -> Any:
    """Returns a configuration, a command or a message with `REDACTED` in place of each credential.

    Args:
        value: nested mappings and lists of plain values; it is not changed. Values that are empty, null, true or false
            are no credentials.
        key: the dotted key at which it stands.
    """
    if isinstance(value, Mapping):
        # {name: HF_TOKEN, value: …}
        named = any(
            _NAMING.search(str(name)) and isinstance(part, str) and _names(part, part) for name, part in value.items()
        )
        secret = {
            name for name, part in value.items() if _names(str(name), part) or (named and _NAMED.match(str(name)))
        }
        return {name: REDACTED if name in secret else redact(part, f"{key}.{name}") for name, part in value.items()}
    if isinstance(value, list | tuple):
        pair = len(value) == 2 and isinstance(value[0], str)
        words = [
            REDACTED if isinstance(one, str) and (pair or one[:2] == "--") and _names(one, two) else redact(two, key)
            for one, two in pairwise([None, *value])
        ]
        # A command's words, of which one says what the next is: no character of a text is between them.
        shown = _BEHIND.sub(_behind, "\x1f".join(word if isinstance(word, str) else "" for word in words)).split("\x1f")
        pairs = zip(words, shown if len(shown) == len(words) else words, strict=True)
        return [new if isinstance(word, str) else word for word, new in pairs]
    return _in_text(value, key) if isinstance(value, str) else value


def _words(key: str) -> str:
    words = (word.lower() for word in _WORDS.findall(unquote(key)))
    return " ".join(word if word in _PLURAL else word.removesuffix("s") for word in words)


def _names(key: str, value: Any) -> bool:
    """Returns whether a key names a credential, where it has a value."""
    words, text = _words(key), str(value)
    if value in ("", [], {}) or text.lower() in ("none", "null", "true", "false") or text[:2] == "--":
        return False
    if _NAMES.search(words) or re.search(r"(?:^[+-]*|\.)token$", key, re.I):
        return not (words.endswith(("pwd", "file", "path")) and text[0] in "/~.")
    is_text = isinstance(value, str) and not re.fullmatch(r"[\d.+e-]+|\W.*\W", text)
    return is_text and _NAMES_TEXT.search(words) is not None


def _in_text(text: str, key: str) -> str:
    text = _BEHIND.sub(_behind, _KEYS.sub(REDACTED, text))
    for pattern in _ASSIGNED:
        shown, place = "", 0
        while part := pattern.search(text, place):
            bare = part["value"].lstrip("\\\"'-")
            # Prose has "the token = …", "a token: …", and of a key of verl's "rollout_is=token: a word …".
            is_apart = part["name"] == "token" and " " in part["between"]
            before = text[max(0, part.start("name") - 20) : part.start("name")]
            is_option = before.rstrip("\"'").endswith("=") and re.fullmatch("[a-z]+", part["value"])
            is_prose = is_apart and (is_option or re.search("[a-z] $", before))
            is_value = not is_prose and not _STANDS_FOR.fullmatch(part["between"] + part["value"])
            if bare and is_value and not bare.startswith(REDACTED) and _names(part["name"], bare):
                shown += text[place : part.start("value")] + (part["quote"] or "") + REDACTED
                place = _end_of_value(part)
            else:
                # What looked like its value may be a name itself.
                shown += text[place : part.end("name")]
                place = part.end("name")
        text = shown + text[place:]
    return _TOKEN.sub(lambda part: _of_token(part, key), text)


def _end_of_value(part: re.Match) -> int:
    """Returns where a value ends, also if it is longer than the search looks."""
    end, closing = part.end("value"), part["quote"]
    if len(part["value"]) <= _LONG:
        return end
    if part["value"].startswith("["):
        closing = "]"
    if closing is None:
        return _REST.match(part.string, end).end()
    place = part.string.find(closing, end)
    return len(part.string) if place < 0 else place


def _behind(part: re.Match) -> str:
    return next(group for group in part.groups() if group is not None) + REDACTED


def _of_token(part: re.Match, key: str) -> str:
    """Returns a long token with `REDACTED` in place of the parts between slashes that look drawn at random."""
    before, shown = part.string[: part.start()], []
    for segment in part[0].split("/"):
        in_path = before[-1:] == "/" and "://" not in before[-99:]
        is_hash = (
            in_path or before[-1:] == "@" or _NAMES_HASH.search(f"{_words(key)} {_words(before[-40:]).split(' ')[-1]}")
        )
        rest = _UUID.sub("", _HEX.sub("", segment) if is_hash else segment)
        shown.append(REDACTED if _is_random(rest) else segment)
        before += segment + "/"
    is_base64 = REDACTED not in shown and re.fullmatch(r"[A-Za-z0-9+/]{39,}=*", part[0]) and not _HEX.search(part[0])
    return REDACTED if is_base64 and _is_random(part[0]) else "/".join(shown)


def _is_random(token: str) -> bool:
    """Returns whether a token's letters and digits look drawn at random, rather than those of words and numbers."""
    runs = re.findall(r"(?![0-9a-f]{1,19}\b)[A-Za-z0-9]{5,}", token.replace("_", " "))
    text = " ".join(dict.fromkeys(runs))
    changes = sum(bits * len(re.findall(pattern, text)) for pattern, bits in _CHANGES)
    bits = changes + sum(_RARITY.get(letter, 0) for letter in text.lower())
    return _HEX.search(text) is not None or (len(text) > 16 and bits > 0.25 * len(text) + 9)
