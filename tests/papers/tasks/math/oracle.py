r"""Evaluates answers without any parser of the product, to judge whether a changed answer still has the same value.

It reads numbers, letters and the usual operators; letters take fixed values, and so an expression becomes a number.
Lists, sets, relations and words have no value here.
"""

import cmath
import hashlib
import math
import re
import unicodedata

TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d[\d]*(?:\.\d+)?|\.\d+|[A-Za-z]|\S")
TYPESETTING = re.compile(
    r"\\(?:left|right|bigl?|bigr|displaystyle|textstyle|middle|q?quad|thinspace)(?![A-Za-z])|\\[,;:!> ]|~|\$|¹"
)
# Currencies, and units after a value, which an answer may have or not.
CURRENCY = re.compile(r"\\\$|[€£₹¥]")
UNIT = re.compile(
    r"(?<=[\d}])\s*\\(?:text|mathrm)\s*\{[^{}]*\}(?:\^\{?-?\d\}?)?$|(?<=\d)\s+[a-z]{2,}$|(?<=\d)[a-z]{4,}$"
)
LETTER_IN_A_FONT = re.compile(r"\\(?:text|mathrm)\{([ei]?)\}")
CLOSING = {"(": ")", "[": "]", "{": "}", "|": "|"}
CONSTANTS = {"e": math.e, "i": 1j, r"\pi": math.pi, r"\infty": 1e300}
FUNCTIONS = {
    r"\sin": cmath.sin,
    r"\cos": cmath.cos,
    r"\tan": cmath.tan,
    r"\cot": lambda x: 1 / cmath.tan(x),
    r"\ln": cmath.log,
    r"\log": cmath.log10,
    r"\exp": cmath.exp,
}
GREEK_NAMES = "alpha beta gamma delta epsilon theta lambda mu phi rho sigma omega Delta Gamma Sigma Psi Theta"
GREEK = {rf"\{name}" for name in GREEK_NAMES.split()}


class Unreadable(ValueError):
    pass


def letter_value(name):
    """A number between 1 and 2 that belongs to a name."""
    return 1 + int(hashlib.sha256(name.encode()).hexdigest()[:12], 16) / 16**12


class Reader:
    """A recursive descent over the tokens of one expression."""

    def __init__(self, tokens):
        self.tokens, self.place = tokens, 0

    def peek(self):
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def take(self, wanted=None):
        token = self.peek()
        if not token or (wanted is not None and token != wanted):
            raise Unreadable(f"{token!r} for {wanted!r}")
        self.place += 1
        return token

    def whole(self):
        value = self.sum()
        if self.peek():
            raise Unreadable(self.peek())
        return value

    def sum(self):
        value = self.product()
        while self.peek() in ("+", "-"):
            sign = self.take()
            value = value + self.product() if sign == "+" else value - self.product()
        return value

    def product(self):
        if self.peek() in ("+", "-"):
            return -self.product() if self.take() == "-" else self.product()
        value, before = self.power(), self.tokens[self.place - 1]
        while True:
            token = self.peek()
            if token in (r"\cdot", r"\times", "*"):
                self.take()
                value = value * self.signed()
            elif token in ("/", ":", r"\div"):
                self.take()
                value = value / self.signed()
            elif token and (token[0].isdigit() or token[0] == "."):
                if before[0].isdigit() or before[0].isalpha():
                    raise Unreadable("a number after a number or a letter")
                value = value * self.power()
            elif token in ("(", "[", "{") or token.isalpha() or token in self.starts():
                start = self.place
                factor = self.power()
                mixed = before.isdigit() and token == r"\frac" and 0 < abs(factor) < 1
                mixed = mixed and all(t[0].isdigit() or t in "{}" for t in self.tokens[start + 1 : self.place])
                value = value + factor if mixed else value * factor
            else:
                return value
            before = self.tokens[self.place - 1]

    def starts(self):
        return {r"\frac", r"\dfrac", r"\tfrac", r"\sqrt", r"\pi", r"\infty", *FUNCTIONS, *GREEK}

    def signed(self):
        return -self.power() if self.peek() == "-" and self.take() else self.power()

    def power(self):
        value = self.atom()
        while self.peek() in ("^", "!"):
            if self.take() == "!":
                if abs(value) > 300 or value != int(value.real):
                    raise Unreadable("a large factorial")
                value = complex(math.factorial(int(value.real)))
            elif self.peek() == r"\circ":
                self.take()
            elif self.tokens[self.place : self.place + 3] == ["{", r"\circ", "}"]:
                self.place += 3
            else:
                value = value ** self.argument()
        return value

    def argument(self):
        """What TeX takes after a command or a caret: a group, or one digit, letter or command."""
        if self.peek() == "{":
            self.take()
            value = self.sum()
            self.take("}")
            return value
        token = self.peek()
        if token.isdigit() and len(token) > 1:
            self.tokens[self.place] = token[1:]
            return complex(int(token[0]))
        return self.atom()

    def atom(self):
        token = self.take()
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return complex(float(token))
        if token in CLOSING:
            return self.bracketed(token)
        if token in (r"\frac", r"\dfrac", r"\tfrac"):
            above = self.argument()
            return above / self.argument()
        if token == r"\sqrt":
            return self.root()
        if token in FUNCTIONS:
            return self.function(token)
        if token in CONSTANTS:
            return complex(CONSTANTS[token])
        if token.isalpha() or token in GREEK:
            return self.letter(token)
        raise Unreadable(token)

    def bracketed(self, opening):
        value = self.sum()
        self.take(CLOSING[opening])
        return complex(abs(value)) if opening == "|" else value

    def root(self):
        """The square root of an argument, or another one, whose degree stands in square brackets before it."""
        degree = 2
        if self.peek() == "[":
            self.take()
            degree = self.sum()
            self.take("]")
        return self.argument() ** (1 / degree)

    def function(self, name):
        """A function of what follows it, with a power, or the base of a logarithm, between the two."""
        power = 1
        if self.peek() == "^":
            self.take()
            power = self.argument()
        if name == r"\log" and self.peek() == "_":
            self.take()
            base = self.argument()
            return (cmath.log(self.power()) / cmath.log(base)) ** power
        start = self.place
        argument = self.product() if self.peek() != "(" else self.power()
        if r"\circ" in self.tokens[start : self.place]:
            argument = argument * math.pi / 180
        return FUNCTIONS[name](argument) ** power

    def letter(self, name):
        """The value of a letter, which its index distinguishes."""
        if self.peek() == "_":
            self.take()
            start = self.place
            self.argument()
            name += "_" + "".join(self.tokens[start : self.place]).strip("{}")
        return complex(letter_value(name))


def value_of(text):
    """The value of an expression, those of a pair and its brackets, or the sorted ones of a list.

    An equation has the value of what it names.

    Raises Unreadable.
    """
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text).strip(" ,")
    pair = re.fullmatch(r"(?:\\left)?([(\[])([^()\[\]]*,[^()\[\]]*?)(?:\\right)?([)\]])", text)
    if pair:
        return pair[1], *map(_value_of, pair[2].split(",")), pair[3]
    if "," in text and not set("()[]<>") & set(text):
        members = text.replace(r"\left", "").replace(r"\right", "").replace(r"\{", "").replace(r"\}", "").split(",")
        return tuple(sorted(map(_value_of, members)))
    return _value_of(text)


def _value_of(text):
    text = re.sub(r"\A[^=<>]*=", "", text)
    text = unicodedata.normalize("NFKC", CURRENCY.sub("", text)).replace("−", "-").replace("∘", r"^\circ ")
    text = LETTER_IN_A_FONT.sub(r"\1", text)
    text = re.sub(r"\\(Delta|pi|times|cdot)", r"\\\1 ", text)
    text = UNIT.sub("", TYPESETTING.sub(" ", text).rstrip(" .,"))
    text = re.sub(r"(?<!\^)(?<!\^\{)\\circ|°|\\degree", r"^\\circ", text)
    tokens = TOKEN.findall(text)
    try:
        value = Reader(tokens).whole()
        size = 10.0 ** (math.floor(math.log10(abs(value))) if value else 0)
        return round(value.real / size, 9) + 0.0, round(value.imag / size, 9) + 0.0, size
    except (ArithmeticError, ValueError, IndexError, TypeError) as error:
        raise Unreadable(text) from error
