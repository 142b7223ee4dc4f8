"""Blanks out credentials in what is echoed: a run's line, explanations, messages.

A credential is known by what it stands under, a key, a variable or an option that names one, by the beginning that its
provider gives it, or by its place in an address. Nothing is guessed from the letters of a value. What is kept in a
run's record goes another way, `run.kept_values`.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

REDACTED = "[redacted]"

# How the tokens of providers begin, and signed JSON tokens.
PREFIX = re.compile(
    r"(?:sk-ant-|sk-proj-|sk-or-|[sr]k_live_|gsk_|xai-|nvapi-|pplx-|pcsk_|lsv2_pt_|gh[opsur]_|github_pat_|glpat-"
    r"|xox[abeprs]-|xapp-|AKIA|ASIA|AIza|ya29\.|GOCSPX-|npm_|pypi-|dop_v1_|SG\.|dckr_pat_|dapi(?=[0-9a-f]{8})|tskey-"
    r"|hvs\.|ntn_|lin_api_|figd_|NRAK-|AGE-SECRET-KEY-|wandb_v\d_|eyJ)[\w.~+-]{8}"
    r"|whsec_|(?:hf_(?:oauth_|jwt_)?|api_org_|sk-)[A-Za-z0-9]{16}"
)
# The end of a name whose value is a credential, once it is divided into words in lower case and in the singular.
CREDENTIAL_NAMES = re.compile(
    r"(?:password|passwd|passphrase|passcode|secret|credential|authorization|cookie|webhook|connection string"
    r"|(?:^| )(?:bearer|pwd|pat|auth)|(?:db|smtp|user|pg) ?pass|(?:api|access|auth)key"
    r"| ?\b(?:api|access|account|storage|secret|private|signing|encryption|license|session|ssh|deploy|shared|master"
    r"|wandb) key(?: id| base)?|(?:auth|access|api|hf|sas)token"
    r"|(?:^|\b(?:auth|access|hf|hub|bearer|refresh|session|id|git\w*|bot|api|sas|wandb|personal|security|private|vault"
    r"|npm|job|jwt|slack|http) )token|(?:auth|access|hf|api) tokens)(?: (?:file|value|ur[il]))?$"
)
# The words of a name: letters in capitals, or in small letters behind at most one capital.
NAME_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Words whose s stays: these end with s in the singular, and "tokens" is no credential, since a text has tokens.
WORDS_WITH_S = ("pass", "access", "sas", "tokens")
# What is longer is no name.
LONGEST_NAME = 120
# What a text consists of: words, blanks, and single marks.
PIECE = re.compile(r"[\w.%+~-]+|\s+|.", re.DOTALL)
QUOTES = ("'", '"')
# Where a value without quotes ends.
ENDS = (*QUOTES, ",", "&", "{", "}", "(", ")", "]", ";", "<", ">", "|", "`")
# Values that are none, and words that stand for one in a program.
NOTHING = ("none", "null", "true", "false", "int", "str", "bytes", "read", "write")
# Names in the query of a signed address, whatever they mean elsewhere.
SIGNATURES = ("sig", "signature", "x-amz-signature", "x-amz-credential", "x-goog-signature", "x-goog-credential")
# Words before a credential in a header.
SCHEMES = ("basic", "bearer", "token")
# Addresses by which whoever knows them can post.
WEBHOOKS = re.compile(
    r"hooks\.slack\.com|(?:\w+\.)?discord(?:app)?\.com/api/webhooks|[\w-]+\.webhook\.office\.com|api\.telegram\.org/bot"
    r"|open\.(?:feishu\.cn|larksuite\.com)/open-apis/bot|qyapi\.weixin\.qq\.com/cgi-bin/webhook"
)
# The most marks and blanks between a name and its value.
NEAR = 12


def redact(value: Any) -> Any:
    """Returns a configuration, a command or a message with `REDACTED` in place of each credential.

    Args:
        value: nested mappings and lists of plain values; it is not changed. Values that are empty, null, true or false
            are no credentials.
    """
    if isinstance(value, Mapping):
        redacted = {}
        for key, part in value.items():
            redacted[key] = REDACTED if is_credential(str(key), part) else redact(part)
        return redacted
    if isinstance(value, list | tuple):
        words = []
        for word_before, word in pairwise([None, *value]):
            is_value_of_option = is_option(word_before) and is_credential(word_before, word)
            words.append(REDACTED if is_value_of_option else redact(word))
        return words
    if isinstance(value, str):
        return redacted_text(value)
    return value


def is_option(word: Any) -> bool:
    """Returns whether a word of a command is an option whose value is the next word."""
    return isinstance(word, str) and word.startswith("--") and "=" not in word


def is_credential(name: str, value: Any) -> bool:
    """Returns whether a value is a credential because of the name that it stands under."""
    text = str(value)
    if value in ("", [], {}) or text.lower() in NOTHING or text.startswith("--"):
        return False
    return names_credential(name) and not is_path(name, text)


def is_path(name: str, value: str) -> bool:
    """Returns whether a value is the path of a file or a folder, under a name that ends as such names do."""
    return name.lower().endswith(("file", "path", "pwd")) and value.startswith(("/", "~", "."))


def names_credential(name: str) -> bool:
    """Returns whether a name is that of a credential.

    Args:
        name: that of a key with dots, a variable or an option; `%5F` in it is an underscore, as in an address.
    """
    parts = name[-LONGEST_NAME:].replace("%5F", "_").split(".")
    # What stands farther in front in a dotted key does not say what the value is.
    words = NAME_WORDS.findall(" ".join(parts[-2:]))
    in_singular = []
    for word in words:
        small = word.lower()
        in_singular.append(small if small in WORDS_WITH_S else small.removesuffix("s"))
    return CREDENTIAL_NAMES.search(" ".join(in_singular)) is not None


def redacted_text(text: str) -> str:
    """Returns a text with `REDACTED` in place of each credential."""
    return "".join(Scan(text).redacted_pieces())


class Scan:
    """A text in pieces, which are looked at once, in their order.

    `place` is the index of the next piece to look at. The methods whose names begin with `end_of` or `end_in` return
    the place behind a credential that begins at `place`. Some of them move `place` first, behind what is shown.

    Args:
        text: whatever is echoed.
    """

    def __init__(self, text: str):
        self.pieces = PIECE.findall(text)
        self.place = 0

    def redacted_pieces(self) -> list[str]:
        """Returns the pieces, with `REDACTED` in place of each credential."""
        redacted: list[str] = []
        while self.place < len(self.pieces):
            start = self.place
            end = self.move_to_credential()
            redacted += self.pieces[start : self.place]
            if end > self.place:
                redacted.append(REDACTED)
            self.place = end
        return redacted

    def piece(self, place: int) -> str:
        """Returns a piece; an empty text before the first one and behind the last one."""
        return self.pieces[place] if 0 <= place < len(self.pieces) else ""

    def move_to_credential(self) -> int:
        """Moves `place` behind the next piece, and on to the credential if that piece says that one follows.

        A piece that is itself the beginning of a credential is not passed.

        Returns:
            The place behind the credential; the new `place` if there is none.
        """
        word = self.pieces[self.place]
        if word.startswith("-----BEGIN"):
            return self.end_of_private_key()
        if PREFIX.match(word.lstrip("-+")):
            return self.end_of_words(self.place)
        self.place += 1
        if word == "/" and self.piece(self.place - 2) == "/" and self.piece(self.place - 3) == ":":
            return self.end_in_address()
        if word.lower() == "bearer" and self.piece(self.place).isspace():
            return self.end_of_bearer()
        is_signature = word.lower() in SIGNATURES and self.piece(self.place - 2) in ("?", "&")
        if not (is_signature or (word[-1].isalnum() and names_credential(word))):
            return self.place
        value = self.value_of(word)
        if value is None:
            return self.place
        is_header = word.lower().endswith(("authorization", "cookie")) and ":" in self.pieces[self.place : value]
        self.place = value
        return self.end_of_header() if is_header else self.end_of_value()

    def end_of_private_key(self) -> int:
        """Returns where the lines of a private key end; here for a certificate or another block."""
        start = self.place
        if "PRIVATE" not in self.pieces[start : start + NEAR]:
            self.place += 1
            return self.place
        # The last line is "-----END PRIVATE KEY-----", in several pieces.
        place = start
        while place < len(self.pieces) and not self.pieces[place].startswith("-----END"):
            place += 1
        if place == len(self.pieces):
            return place
        for end in range(place + 1, len(self.pieces)):
            if self.pieces[end].endswith("-----"):
                return end + 1
        return place + 1

    def end_in_address(self) -> int:
        """Returns where the user and the password of an address end, before its @; here if it has none."""
        start = self.place
        if WEBHOOKS.match("".join(self.pieces[start : start + NEAR])):
            self.place += 1
            return self.end_of_words(self.place, ends=QUOTES)
        host = self.end_of_words(start, ends=(*QUOTES, "/", "?", "#"))
        user = self.pieces[start:host]
        if "@" not in user:
            return start
        end = host - user[::-1].index("@") - 1
        of_web = self.piece(start - 4).endswith(("http", "https"))
        return end if of_web or ":" in self.pieces[start:end] else start

    def end_of_bearer(self) -> int:
        """Returns where the token of a header ends."""
        token = self.piece(self.place + 1)
        if len(token) < 8 or not any(letter.isdigit() for letter in token):
            return self.place
        self.place += 1
        return self.end_of_words(self.place)

    def value_of(self, name: str) -> int | None:
        """Returns where the value of a name begins; None if it has none.

        Args:
            name: the piece before `place`.
        """
        before = self.place - 2
        while self.piece(before) in QUOTES:
            before -= 1
        if self.piece(before) == "=":
            # The name is itself a value.
            return None
        is_default = self.pieces[max(before - 1, 0) : before + 1] == ["oc.env", ":"]
        place = self.end_of_assignment(name, is_default=is_default)
        if place is None or not self.is_value(name, place):
            return None
        return place

    def is_value(self, name: str, place: int) -> bool:
        """Returns whether a value begins at a place behind a name, and not a variable, a call, an option or prose."""
        value = self.piece(place)
        after = self.piece(place + 1)
        is_quoted = self.piece(place - 1) in QUOTES
        if value in ("", *ENDS) or value.lower() in NOTHING or is_path(name, value):
            return False
        if value == "$" and (after in ("{", "(") or after[:1].isalpha() or after[:1] == "_"):
            return False
        if not is_quoted and (after == "(" or value.startswith("--")):
            return False
        is_prose = name == "token" and self.pieces[place - 1].isspace() and self.follows_word()
        return not is_prose

    def end_of_assignment(self, name: str, *, is_default: bool) -> int | None:
        """Returns the place behind what stands between a name and its value; None if the name is not given one.

        Args:
            is_default: whether a comma may stand there, as in `${oc.env:NAME,value}`.
        """
        place = self.place
        if self.piece(place) == "[" and self.piece(place + 2) == "]":
            place += 3
        is_assigned = name.startswith("--") and self.piece(place).isspace()
        while place < self.place + NEAR:
            piece = self.piece(place)
            if piece in ("=", ":") or (piece == "," and is_default):
                if is_assigned and self.piece(place - 1) != ":":
                    return None
                is_assigned = True
            elif piece == "-" and self.piece(place - 1) == ":":
                pass
            elif "\n" in piece or not (piece.isspace() or piece in (*QUOTES, "\\", "]")):
                break
            place += 1
        return place if is_assigned and "\n" not in self.piece(place) else None

    def follows_word(self) -> bool:
        """Returns whether a word stands before the name, as in a sentence."""
        return self.piece(self.place - 2).isspace() and self.piece(self.place - 3)[-1:].isalpha()

    def end_of_value(self) -> int:
        """Returns where the value ends that begins here."""
        place = self.place
        if self.pieces[place] == "[":
            return self.end_of_words(place, ends=("]",), may_contain_blanks=True) + 1
        quote = self.piece(place - 1)
        if quote in QUOTES:
            return self.end_of_quoted(quote)
        if self.pieces[place].lower() in SCHEMES and self.piece(place + 1).isspace():
            place += 2
        return self.end_of_words(place)

    def end_of_header(self) -> int:
        """Returns where the value of a header ends that begins here: with its line, or the quotes around it."""
        place = self.place
        while place < len(self.pieces) and self.pieces[place] not in (*QUOTES, "\\") and "\n" not in self.pieces[place]:
            place += 1
        return place

    def end_of_quoted(self, quote: str) -> int:
        """Returns where a value ends that began behind this quote, before which there may be backslashes."""
        depth = self.backslashes_before(self.place - 1)
        place = self.place
        while place < len(self.pieces):
            if self.pieces[place] == quote and self.backslashes_before(place) == depth:
                return place - depth
            place += 1
        return place

    def backslashes_before(self, place: int) -> int:
        """Returns how many backslashes stand before a piece, at most `NEAR`."""
        count = 0
        while count < NEAR and self.piece(place - 1 - count) == "\\":
            count += 1
        return count

    def end_of_words(self, place: int, ends: tuple[str, ...] = ENDS, *, may_contain_blanks: bool = False) -> int:
        """Returns the place of the first piece that ends a credential; that behind the last piece if none does.

        Args:
            place: where the search begins.
            ends: the pieces that end it.
            may_contain_blanks: whether blanks do not end it.
        """
        while place < len(self.pieces):
            piece = self.pieces[place]
            if piece in ends or (piece.isspace() and not may_contain_blanks):
                break
            place += 1
        return place
