r"""Refuses a text of which the grammar leaves something out of the value, or in which it takes words for factors.

Two answers are equal only if every token of both is part of the values that were compared. math-verify's grammar
accepts more than its conversion uses: it drops the index of a number, and computes `\phantom{7}` as 7, dy/dx as 0 and
`10\text{ girls and }12` as a product. This module therefore lists what becomes part of a value. Anything else is
refused, and a refused answer is right only if it is spelled as the right answer is.
"""

import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from itertools import pairwise
from typing import Any

import yaml
from antlr4 import TerminalNode, Token
from latex2sympy2_extended.antlr_parser import PSParser

_GRAMMAR = yaml.safe_load(files("verl_clipx.papers.tasks.math").joinpath("grammar.yaml").read_text(encoding="utf-8"))
_LISTS = {name: frozenset(members.split()) for name, members in _GRAMMAR.items()}
_FACTORS = {"unary", "unary_nofunc"}
_POWERS = {"exp", "exp_nofunc"}
_VECTOR = re.compile(r"\\(?:vec|overrightarrow|hat)\b")
_ACCENT = re.compile(r"\\(?:(text|mbox)|bar|overline|vec|overrightarrow|(?:wide)?(?:hat|tilde)|d?dot|bm)\s*\{(.*)\}")

# Brackets in a text are dropped, so that the choice (A) is A.
_TEXT = re.compile(r"\s*(?:\([^()]*\)|[^()]*)\s*")

_COMMAND = re.compile(r"\\(?:begin|end|text|mbox|bm|math[a-z]+|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
# Letters without a blank between them are factors, as in 2ab, unless they can be spoken. More than three from the
# beginning of the alphabet cannot.
_WORD = re.compile(
    r"[A-Za-z]{2,}\s+[A-Za-z]|[A-Za-z]\s+[A-Za-z]{2,}"
    r"|(?<![A-Za-z])(?![a-e]+(?![A-Za-z]))(?=[A-Za-z]*[AEIOUaeiou])[A-Za-z]{4,}"
)


def check_words(text: str) -> None:
    """Raise ValueError if a text has words in plain letters, which the grammar takes for products of variables."""
    word = _WORD.search(_COMMAND.sub(";", text))
    if word:
        raise ValueError(f"{word[0]!r} is a word, not a product")


def check_tree(tree: Any, text: str) -> None:
    """Raise ValueError unless every character of a text is part of the value that its parse tree is converted to."""
    covered: set[int] = set()
    for node in _nodes(tree):
        if isinstance(node, TerminalNode):
            covered.update(range(node.symbol.start, node.symbol.stop + 1))
            fault = _fault_of_token(node)
        else:
            fault = _fault_of_rule(node)
        if fault:
            raise ValueError(f"{fault}: {node.getText()!r}")
    left = [character for place, character in enumerate(text) if place not in covered and not character.isspace()]
    if left:
        raise ValueError(f"{''.join(left)!r} is left over")


def _fault_of_token(node: Any) -> str | None:
    kind = _kind(node)
    text = node.getText().strip()
    if node.symbol.type == Token.EOF or _rule(node.parentCtx) == "degree":
        return None
    if kind not in _LISTS["tokens"] and text != ",":
        return "no part of a value"
    if kind in ("OTHER_SYMBOL_CMD", "SYMBOL") and text not in _LISTS["symbols"]:
        return "an operator, not a variable"
    if text == r"\infty" and _is_operand(node):
        return "infinity, which absorbs what is added to it"
    if kind == "ACCENT":
        accent = _ACCENT.fullmatch(text)
        if accent is None:
            return "no accent of a variable"
        if accent[1] and len(accent[2].strip(" ()")) != 1 and not _stands_alone(node):
            return "a word, not a factor"
        if accent[1] and not _TEXT.fullmatch(accent[2]):
            return "a text with signs that would be dropped"
    if kind == "PLUS_MINUS" and any(_rule(above) == "ordered_tuple" for above in _above(node)):
        return "two signs, not two members"
    return None


def _fault_of_rule(node: Any) -> str | None:
    rule = _rule(node)
    if rule not in _LISTS["rules"]:
        return "no part of a value"
    check = _CHECKS.get(rule)
    return check(node) if check else None


def _fault_of_index(node: Any) -> str | None:
    has_index = any(_rule(child) == "subexpr" for child in node.getChildren())
    is_base = _rule(node) == "func" and (node.start.text == r"\log" or node.atom_expr_no_supexpr() is not None)
    return "an index that would be dropped" if has_index and not is_base else None


def _fault_of_function(node: Any) -> str | None:
    if node.atom_expr_no_supexpr() is not None and node.supexpr() is not None:
        return "an inverse or an iteration, not a power"
    return _fault_of_index(node)


def _fault_of_membership(node: Any) -> str | None:
    if not node.IN():
        return None
    members = node.getChild(2)
    while members.getChildCount() == 1 and _rule(members) != "set_atom":
        members = members.getChild(0)
    return None if _rule(members) == "set_atom" else "a set of which no member is known"


def _fault_of_fraction(node: Any) -> str | None:
    return "a derivative, not a fraction" if _has_differential(node.lower) else None


def _fault_of_product(node: Any) -> str | None:
    if node.getChildCount() < 3:
        return None
    left, sign, right = node.getChildren()
    if _kind(sign) in ("DIV", "CMD_DIV") and _has_differential(right):
        return "a derivative, not a fraction"
    if _kind(sign) == "CMD_TIMES" and _has_base(left) and _has_base(right):
        return "perhaps a product of vectors"
    if _kind(sign) == "CMD_CDOT" and _VECTOR.search(left.getText()) and _VECTOR.search(right.getText()):
        return "a product of vectors"
    return None


def _fault_of_group(node: Any) -> str | None:
    bracket = _kind(node.getChild(0))
    if bracket in ("L_BRACE_VISUAL", "L_BRACE_CMD") or (bracket == "L_BRACKET" and len([*_tokens(node)]) == 3):
        return None if _stands_alone(node) else "perhaps a part of a number"
    return None


def _fault_of_members(node: Any) -> str | None:
    members = [child for child in node.getChildren() if _rule(child) == "comma_elements"]
    is_list = _rule(node.parentCtx) == "set_elements"
    if len(members) > 1 and not is_list and any(member.getChildCount() > 1 for member in members):
        return "members, and members of members"
    return None


def _fault_of_factors(node: Any) -> str | None:
    """Return what is wrong with factors without a sign between them.

    A number after a letter or another number begins a second value, as in 6ft2in, unless it is a mixed number.
    """
    factors = [child for child in node.getChildren() if _rule(child) in ("postfix", "postfix_nofunc")]
    for place, (before, after) in enumerate(pairwise(factors)):
        has_letter = not _LISTS["letters"].isdisjoint(map(_kind, _tokens(before)))
        is_number = len([token for token in _tokens(before) if _rule(token.parentCtx) != "degree"]) == 1
        if _kind_of(after.start) in _LISTS["numbers"] and (has_letter or is_number):
            return "a second number, not a factor"
        after_word = place > 0 and all(map(_is_letter, factors[place - 1 : place + 1]))
        if after_word and _LISTS["letters"].isdisjoint(map(_kind, _tokens(after))):
            return "a second number, not a factor"
        fraction = re.fullmatch(r"\\[dtc]?frac\{(\d+)\}\{(\d+)\}", after.getText())
        if fraction and before.getText().isdigit() and (len(factors) > 2 or int(fraction[1]) >= int(fraction[2])):
            return "a factor or a part of a mixed number"
        if fraction and re.fullmatch(r"\d+\^.*circ\}?", before.getText()):
            return "a part of an angle, not a factor"
    return None


_CHECKS: dict[str, Callable[[Any], str | None]] = {
    "exp": _fault_of_index,
    "exp_nofunc": _fault_of_index,
    "number_subexpr": _fault_of_index,
    "func": _fault_of_function,
    "relation": _fault_of_membership,
    "set_elements_relation": _fault_of_membership,
    "frac": _fault_of_fraction,
    "mp": _fault_of_product,
    "mp_nofunc": _fault_of_product,
    "unary": _fault_of_factors,
    "unary_nofunc": _fault_of_factors,
    "group": _fault_of_group,
    "semicolon_elements": _fault_of_members,
}


def _is_letter(factor: Any) -> bool:
    return factor.start is factor.stop and _kind_of(factor.start) in _LISTS["letters"]


def _has_differential(node: Any) -> bool:
    r"""Return whether a denominator has the differential of a variable: dx, or a difference such as \Delta x."""
    for below in _nodes(node):
        if _kind(below) == "DIFFERENTIAL":
            return True
        if _rule(below) in _FACTORS:
            names = [child.getText().strip() for child in below.getChildren()]
            if any(name in (r"\Delta", r"\delta", "d") for name in names[:-1]):
                return True
    return False


def _has_base(node: Any) -> bool:
    """Return whether a product has a variable, which may be a vector, outside of exponents and functions."""
    if isinstance(node, TerminalNode):
        return _kind(node) in _LISTS["letters"] - {"EXP_E"} and node.getText().strip() != r"\pi"
    if _rule(node) in ("supexpr", "func", "abs_group", "subexpr"):
        return False
    children = [*node.getChildren()]
    if _rule(node) in _POWERS and len(children) > 1:
        children = children[:1]
    return any(map(_has_base, children))


def _stands_alone(node: Any) -> bool:
    """Return whether a word or a group is the whole of an answer, of a member of a list, or of an index."""
    for below, above in pairwise([node, *_above(node)]):
        if _rule(above) == "subexpr":
            return True
        if above.getChildCount() > 1 and not (_rule(above) == "group" and below is above.getChild(1)):
            return _rule(above) in _LISTS["wholes"]
    return True


def _is_operand(node: Any) -> bool:
    """Return whether a token is computed with, beyond a sign before it."""
    for below, above in pairwise([node, *_above(node)]):
        has_sign = _rule(above) in _FACTORS and _rule(below) in _FACTORS
        if above.getChildCount() > 1 and not has_sign:
            return _rule(above) in _LISTS["operations"]
    return False


def _above(node: Any) -> Iterator[Any]:
    while node.parentCtx is not None:
        node = node.parentCtx
        yield node


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    if not isinstance(node, TerminalNode):
        for child in node.getChildren():
            yield from _nodes(child)


def _tokens(node: Any) -> Iterator[Any]:
    return (below for below in _nodes(node) if isinstance(below, TerminalNode))


def _rule(node: Any) -> str:
    return "" if isinstance(node, TerminalNode) else PSParser.ruleNames[node.getRuleIndex()]


def _kind(node: Any) -> str:
    return _kind_of(node.symbol) if isinstance(node, TerminalNode) else ""


def _kind_of(terminal: Any) -> str:
    return PSParser.symbolicNames[terminal.type] if terminal.type > 0 else ""
