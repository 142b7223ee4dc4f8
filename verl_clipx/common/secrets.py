"""Replaces credentials in texts that are echoed: a run's line, explanations, messages.

A credential is known by the key, the variable or the option that it is the value of, by the beginning that its provider
gives it, or by its place in an address (a URL). Nothing is guessed from the letters of a value. A run's record is
treated differently, by `run.kept_values`.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

REDACTED = "[redacted]"

# The beginnings of providers' tokens, and that of signed JSON tokens.
PREFIX = re.compile(
    r"(?:sk-ant-|sk-proj-|sk-or-|[sr]k_live_|gsk_|xai-|nvapi-|pplx-|pcsk_|lsv2_pt_|gh[opsur]_|github_pat_|glpat-"
    r"|xox[abeprs]-|xapp-|AKIA|ASIA|AIza|ya29\.|GOCSPX-|npm_|pypi-|dop_v1_|SG\.|dckr_pat_|dapi(?=[0-9a-f]{8})|tskey-"
    r"|hvs\.|ntn_|lin_api_|figd_|NRAK-|AGE-SECRET-KEY-|wandb_v\d_|eyJ)[\w.~+-]{8}"
    r"|whsec_|(?:hf_(?:oauth_|jwt_)?|api_org_|sk-)[A-Za-z0-9]{16}"
)
# The end of a name whose value is a credential. The name has been divided into words in lower case and in the singular,
# with a blank between two words.
CREDENTIAL_NAMES = re.compile(
    r"""
    (?:
        # The end of the last word, so that "dbpassword" counts too.
        password | passwd | passphrase | passcode | secret | credential | authorization | cookie | webhook
        | connection\ string
        # Whole words only, since other words end like these: "compat" is no credential.
        | (?:^|\ ) (?:bearer | pwd | pat | auth)
        # "pass" alone is also a verb, so that it counts only of these.
        | (?:db | smtp | user | pg) \ ? pass
        # Keys and tokens whose kind and "key" or "token" are written as one word.
        | (?:api | access | auth) key
        | (?:auth | access | api | hf | sas) token
        # Keys of these kinds, since a mapping has keys too.
        | \b (?:
            api | access | account | storage | secret | private | signing | encryption | license | session | ssh
            | deploy | shared | master | wandb
        ) \ key (?:\ id | \ base)?
        # A token that is the whole name, or of one of these kinds, since a text has tokens too.
        | ^ token
        | \b (?:
            auth | access | hf | hub | bearer | refresh | session | id | git\w* | bot | api | sas | wandb | personal
            | security | private | vault | npm | job | jwt | slack | http
        ) \ token
        | (?:auth | access | hf | api) \ tokens
    )
    # What may follow: the credential stands in a file, for example.
    (?:\ (?:file | value | uri | url))?
    $
    """,
    re.VERBOSE,
)
# The words of a name: letters in capitals, or in small letters behind at most one capital.
NAME_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Words that keep their s. The first three end with s in the singular. "tokens" is no credential, since a text has
# tokens.
WORDS_WITH_S = ("pass", "access", "sas", "tokens")
# Only this many characters at the end of a name are searched, so that a long piece of text costs little.
LONGEST_NAME = 120
# The underscore as a URL writes it, with hexadecimal digits in capitals or not.
UNDERSCORE_IN_URL = re.compile("%5f", re.IGNORECASE)
# What a text consists of: words, blanks, and single marks.
PIECE = re.compile(r"[\w.%+~-]+|\s+|.", re.DOTALL)
QUOTES = ("'", '"')
# What follows the apostrophe of an English word, such as "it's", which is no quote.
AFTER_APOSTROPHE = ("s", "t", "d", "m", "re", "ve", "ll")
# The marks that end a value without quotes.
ENDS = (*QUOTES, ",", "&", "{", "}", "(", ")", "]", ";", "<", ">", "|", "`")
# Values that are no credentials, and words that stand for a value in a program.
NOTHING = ("none", "null", "true", "false", "int", "str", "bytes", "read", "write")
# Names that stand for a signature in the query of an address, whatever they mean elsewhere.
SIGNATURES = ("sig", "signature", "x-amz-signature", "x-amz-credential", "x-goog-signature", "x-goog-credential")
# Words before a credential in a header.
SCHEMES = ("basic", "bearer", "token")
# Addresses to which anyone who knows them can post.
WEBHOOKS = re.compile(
    r"hooks\.slack\.com|(?:\w+\.)?discord(?:app)?\.com/api/webhooks|[\w-]+\.webhook\.office\.com|api\.telegram\.org/bot"
    r"|open\.(?:feishu\.cn|larksuite\.com)/open-apis/bot|qyapi\.weixin\.qq\.com/cgi-bin/webhook"
)
# At most this many marks and blanks stand between a name and its value. Other searches for what is near use it too.
NEAR = 12


def redact(value: Any) -> Any:
    """Return a copy of a configuration, a command or a message with `REDACTED` in place of each credential.

    Args:
        value: nested mappings and lists of plain values. Values that are empty, null, true or false are no credentials.
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
    """Return whether a word of a command is an option whose value is the next word."""
    return isinstance(word, str) and word.startswith("--") and "=" not in word


def is_credential(name: str, value: Any) -> bool:
    """Return whether a value is a credential because of its name."""
    text = str(value)
    if value in ("", [], {}) or text.lower() in NOTHING or text.startswith("--"):
        return False
    return names_credential(name) and not is_path(name, text)


def is_path(name: str, value: str) -> bool:
    """Return whether a value is the path of a file or a folder, and its name ends like the name of a path."""
    return name.lower().endswith(("file", "path", "pwd")) and value.startswith(("/", "~", "."))


def names_credential(name: str) -> bool:
    """Return whether a name is the name of a credential.

    Args:
        name: the name of a key with dots, a variable or an option. `%5F`, the underscore as a URL writes it, counts as
            one.
    """
    parts = UNDERSCORE_IN_URL.sub("_", name[-LONGEST_NAME:]).split(".")
    # The parts of a dotted key before the last two do not say what the value is.
    words = NAME_WORDS.findall(" ".join(parts[-2:]))
    words_in_singular = []
    for word in words:
        singular = word.lower()
        if singular not in WORDS_WITH_S:
            singular = singular.removesuffix("s")
        words_in_singular.append(singular)
    return CREDENTIAL_NAMES.search(" ".join(words_in_singular)) is not None


def redacted_text(text: str) -> str:
    """Return a text with `REDACTED` in place of each credential."""
    return "".join(Scan(text).redacted_pieces())


class Scan:
    """A text in pieces, which are looked at once, in their order.

    A place is the index of a piece. `place` is the place of the next piece to look at. The methods whose names begin
    with `end_of` or `end_in` return the place after a credential that begins at `place`. Some of them first move
    `place` past what is shown.

    Args:
        text: the text that is echoed.
    """

    def __init__(self, text: str):
        self.pieces = PIECE.findall(text)
        self.place = 0

    def redacted_pieces(self) -> list[str]:
        """Return the pieces, with `REDACTED` in place of each credential."""
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
        """Return the piece at a place; "" if the place is before the first piece or after the last."""
        if 0 <= place < len(self.pieces):
            return self.pieces[place]
        return ""

    def move_to_credential(self) -> int:
        """Move `place` past the next piece, and on to the credential if that piece says that one follows.

        If the next piece is itself the beginning of a credential, `place` stays.

        Returns:
            The place after the credential; the new `place` if there is no credential.
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
        """Return the place after the lines of a private key; the place after this piece for any other block."""
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
        """Return the place of the @ after an address's user and password; `place` if the address has none.

        The secret part of a webhook's address is a credential too.
        """
        start = self.place
        if WEBHOOKS.match("".join(self.pieces[start : start + NEAR])):
            self.place += 1
            return self.end_of_words(self.place, ends=QUOTES)
        host = self.end_of_words(start, ends=(*QUOTES, "/", "?", "#"))
        user = self.pieces[start:host]
        if "@" not in user:
            return start
        end = host - user[::-1].index("@") - 1
        # Elsewhere, as in ssh://git@host, a user without a password is no credential.
        is_of_web = self.piece(start - 4).endswith(("http", "https"))
        has_password = ":" in self.pieces[start:end]
        if is_of_web or has_password:
            return end
        return start

    def end_of_bearer(self) -> int:
        """Return the place after the token that follows the word "Bearer"; `place` if no token follows."""
        token = self.piece(self.place + 1)
        if len(token) < 8 or not any(letter.isdigit() for letter in token):
            return self.place
        self.place += 1
        return self.end_of_words(self.place)

    def value_of(self, name: str) -> int | None:
        """Return the place at which the value of a name begins; None if the name has no value.

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
        """Return whether a literal value begins at a place, and not a variable, a call, an option or prose.

        Args:
            name: the name before the value.
            place: the place after the signs of assignment.
        """
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
        """Return the place of the value that is assigned to a name; None if no value is assigned.

        The value comes after the index, colon, equals sign, quotes and blanks that follow the name.

        Args:
            name: the piece before `place`.
            is_default: whether a comma assigns the value, as in `${oc.env:NAME,value}`.
        """
        place = self.place
        if self.piece(place) == "[" and self.piece(place + 2) == "]":
            place += 3
        is_assigned = name.startswith("--") and self.piece(place).isspace()
        while place < self.place + NEAR:
            piece = self.piece(place)
            if piece in ("=", ":") or (piece == "," and is_default):
                # A second sign of assignment compares, as in `==`. After a colon it belongs to `:=` or `::`.
                if is_assigned and self.piece(place - 1) != ":":
                    return None
                is_assigned = True
            elif piece == "-" and self.piece(place - 1) == ":":
                # The sign of a shell's default, as in `${NAME:-value}`.
                pass
            elif "\n" in piece or not (piece.isspace() or piece in (*QUOTES, "\\", "]")):
                break
            place += 1
        if not is_assigned or "\n" in self.piece(place):
            return None
        return place

    def follows_word(self) -> bool:
        """Return whether a word stands before the name, as in a sentence."""
        return self.piece(self.place - 2).isspace() and self.piece(self.place - 3)[-1:].isalpha()

    def end_of_value(self) -> int:
        """Return the place after the value that begins at `place`."""
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
        """Return the place after the header value that begins at `place`.

        The value ends with its line, or before the quote that closes the text around it. Its own quotes, as those of a
        cookie's value or of a parameter, do not end it.
        """
        surrounding = self.quote_around_place()
        for place in range(self.place, len(self.pieces)):
            piece = self.pieces[place]
            if "\n" in piece:
                return place
            # An escaped line end, as in JSON, or the end of a line that the shell continues.
            if piece == "\\" and self.piece(place + 1).startswith(("n", "r", "\n")):
                return place
            depth = self.backslashes_before(place)
            if (piece, depth) == surrounding:
                return place - depth
        return len(self.pieces)

    def quote_around_place(self) -> tuple[str, int] | None:
        """Return the innermost quote that is open at `place`, and how many backslashes stand before it.

        None is returned if no quote was opened on the line before `place`.
        """
        start = self.place
        while start > 0 and "\n" not in self.pieces[start - 1]:
            start -= 1
        open_quotes: list[tuple[str, int]] = []
        for place in range(start, self.place):
            if self.pieces[place] not in QUOTES or self.is_apostrophe(place):
                continue
            quote = (self.pieces[place], self.backslashes_before(place))
            if quote in open_quotes:
                # It closes that quote, and those within that were not closed.
                open_quotes = open_quotes[: open_quotes.index(quote)]
            else:
                open_quotes.append(quote)
        if not open_quotes:
            return None
        return open_quotes[-1]

    def is_apostrophe(self, place: int) -> bool:
        """Return whether a piece is the apostrophe of an English word, such as "it's"."""
        follows_letter = self.piece(place - 1)[-1:].isalpha()
        return self.pieces[place] == "'" and follows_letter and self.piece(place + 1) in AFTER_APOSTROPHE

    def end_of_quoted(self, quote: str) -> int:
        """Return the place after the value between quotes that begins at `place`.

        Args:
            quote: the quote before `place`. Backslashes may stand before it, and then before the closing quote too.
        """
        depth = self.backslashes_before(self.place - 1)
        for place in range(self.place, len(self.pieces)):
            if self.pieces[place] == quote and self.backslashes_before(place) == depth:
                return place - depth
        return len(self.pieces)

    def backslashes_before(self, place: int) -> int:
        """Return how many backslashes stand before a piece, at most `NEAR`."""
        count = 0
        while count < NEAR and self.piece(place - 1 - count) == "\\":
            count += 1
        return count

    def end_of_words(self, place: int, ends: tuple[str, ...] = ENDS, *, may_contain_blanks: bool = False) -> int:
        """Return the place of the first piece that ends a credential; the place after the last piece if none does.

        Args:
            place: the place where the search begins.
            ends: the pieces that end the credential.
            may_contain_blanks: whether the credential may contain blanks, so that they do not end it.
        """
        while place < len(self.pieces):
            piece = self.pieces[place]
            if piece in ends or (piece.isspace() and not may_contain_blanks):
                break
            place += 1
        return place
