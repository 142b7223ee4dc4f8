r"""Refuses texts that math-verify misreads: a part of the text is not in the value, or words are taken for factors.

Two answers are equal only if every token of both is part of the values that were compared. math-verify's grammar
accepts more than its conversion uses: it drops the index of a number, and computes `\phantom{7}` as 7, dy/dx as 0 and
`10\text{ girls and }12` as a product. This module therefore lists what becomes part of a value. Anything else is
refused. A refused answer is right only if it is spelled as the right answer is.

In this module, `node` is always a node of a parse tree. It stands for a rule of the grammar and has children, or it
stands for a token. A fault is what is wrong with a node, in a few words for a message.
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
# The lists of grammar.yaml by their names. Each has names of rules or of tokens, or texts of tokens.
_LISTS = {name: frozenset(members.split()) for name, members in _GRAMMAR.items()}
# The rules of factors without an operator between them, as in 2ab, and of a sign before such factors.
_FACTORS = {"unary", "unary_nofunc"}
# The rules of a power.
_POWERS = {"exp", "exp_nofunc"}
_VECTOR_ACCENT = re.compile(r"\\(?:vec|overrightarrow|hat)\b")
# A text, or a letter with an accent: the grammar takes a text for an accent, too. The first group is the command of a
# text, and the second is the content of the braces.
_ACCENT = re.compile(r"\\(?:(text|mbox)|bar|overline|vec|overrightarrow|(?:wide)?(?:hat|tilde)|d?dot|bm)\s*\{(.*)\}")

# A text that has no brackets, or is in one pair of them. math-verify drops the brackets, so that the choice (A) is A.
_TEXT = re.compile(r"\s*(?:\([^()]*\)|[^()]*)\s*")

# A proper or an improper fraction of two whole numbers.
_FRACTION = re.compile(r"\\[dtc]?frac\{(\d+)\}\{(\d+)\}")
# An angle in degrees.
_ANGLE = re.compile(r"\d+\^.*circ\}?")

# What `check_words` leaves out: commands, and the content of their braces if it cannot be a product.
_COMMAND = re.compile(r"\\(?:begin|end|text|mbox|bm|math[a-z]+|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
# Several letters, a blank and another letter are words. Letters without a blank between them are factors, as in 2ab.
# However, four or more letters with a vowel are a word, unless all of them are from a to e, as in abcde.
_WORD = re.compile(
    r"[A-Za-z]{2,}\s+[A-Za-z]|[A-Za-z]\s+[A-Za-z]{2,}"
    r"|(?<![A-Za-z])(?![a-e]+(?![A-Za-z]))(?=[A-Za-z]*[AEIOUaeiou])[A-Za-z]{4,}"
)


class MisreadText(ValueError):
    """Raised for a text that math-verify would misread. The message says which part of it, and why."""


def check_words(text: str) -> None:
    """Refuse a text that has words in plain letters, which the grammar takes for products of variables.

    Raises:
        MisreadText: it has such words.
    """
    word = _WORD.search(_COMMAND.sub(";", text))
    if word:
        raise MisreadText(f"{word[0]!r} is a word, not a product")


def check_tree(tree: Any, text: str) -> None:
    """Refuse a text unless each of its characters becomes part of the value, as it was meant to be.

    Args:
        tree: the parse tree of the text.

    Raises:
        MisreadText: a node of the tree has a fault, or a part of the text is not in the tree.
    """
    # The positions of the characters that are in a token.
    covered: set[int] = set()
    for node in _nodes(tree):
        if isinstance(node, TerminalNode):
            covered.update(range(node.symbol.start, node.symbol.stop + 1))
            fault = _fault_of_token(node)
        else:
            fault = _fault_of_rule(node)
        if fault:
            raise MisreadText(f"{fault}: {node.getText()!r}")
    uncovered = ""
    for position, character in enumerate(text):
        if position not in covered and not character.isspace():
            uncovered += character
    if uncovered:
        raise MisreadText(f"{uncovered!r} is left over")


def _fault_of_token(node: Any) -> str | None:
    """Return why a token does not become part of the value as it was meant to be; None if it does."""
    name = _token_name(node)
    text = node.getText().strip()
    is_end = node.symbol.type == Token.EOF
    is_in_degree_sign = _rule_name(node.parentCtx) == "degree"
    if is_end or is_in_degree_sign:
        return None
    if name not in _LISTS["tokens"] and text != ",":
        return "no part of a value"
    if name in ("OTHER_SYMBOL_CMD", "SYMBOL") and text not in _LISTS["symbols"]:
        return "an operator, not a variable"
    if text == r"\infty" and _is_operand(node):
        return "infinity, which absorbs what is added to it"
    if name == "ACCENT":
        return _fault_of_accent(node, text)
    if name == "PLUS_MINUS" and any(_rule_name(ancestor) == "ordered_tuple" for ancestor in _ancestors(node)):
        return "two signs, not two members"
    return None


def _fault_of_accent(node: Any, text: str) -> str | None:
    r"""Return what is wrong with an accent such as `\vec{v}`, or with a text such as `\text{even}`; None if nothing is.

    Args:
        node: the token.
        text: the token's text without white space around it.
    """
    accent = _ACCENT.fullmatch(text)
    if accent is None:
        return "no accent of a variable"
    text_command, content = accent.groups()
    if text_command is None:
        return None
    # A single letter is a factor in any font.
    is_letter = len(content.strip(" ()")) == 1
    if not is_letter and not _stands_alone(node):
        return "a word, not a factor"
    if not _TEXT.fullmatch(content):
        return "a text with signs that would be dropped"
    return None


def _fault_of_rule(node: Any) -> str | None:
    """Return why a rule does not become the value that it was meant to be; None if it does."""
    rule = _rule_name(node)
    if rule not in _LISTS["rules"]:
        return "no part of a value"
    check = _CHECKS.get(rule)
    return check(node) if check else None


def _fault_of_index(node: Any) -> str | None:
    r"""Return what is wrong with the index of a power, a number or a function; None if nothing is, or it has no index.

    math-verify uses the index of `\log`, which is the base, and that of a function called by a letter, as in f_1(2). It
    would drop any other index.
    """
    has_index = any(_rule_name(child) == "subexpr" for child in node.getChildren())
    if not has_index:
        return None
    if _rule_name(node) == "func":
        is_logarithm = node.start.text == r"\log"
        if is_logarithm or _is_called_by_letter(node):
            return None
    return "an index that would be dropped"


def _fault_of_function(node: Any) -> str | None:
    r"""Return what is wrong with the exponent or the index of a function; None if nothing is.

    The exponents of f^{-1}(2) and f^2(2) mean an inverse and an iteration, but math-verify would compute powers of
    f(2). The exponent in `\sin^2 x` does mean a power.
    """
    if _is_called_by_letter(node) and node.supexpr() is not None:
        return "an inverse or an iteration, not a power"
    return _fault_of_index(node)


def _is_called_by_letter(function: Any) -> bool:
    r"""Return whether a function is called by a letter, as f in f_1(2), and not by a command such as `\sin`."""
    return function.atom_expr_no_supexpr() is not None


def _fault_of_membership(node: Any) -> str | None:
    r"""Return what is wrong with a relation such as `x \in A`; None for one with another sign.

    The right side must be a set whose members are known, such as `\{1, 2\}` or an interval. It must not be a letter, a
    number or a list.
    """
    is_membership = bool(node.IN())
    if not is_membership:
        return None
    # The children are the member, the sign and the set.
    set_node = node.getChild(2)
    # The grammar wraps a plain set in several other rules, each with a single child.
    while _rule_name(set_node) != "set_atom" and set_node.getChildCount() == 1:
        set_node = set_node.getChild(0)
    if _rule_name(set_node) == "set_atom":
        return None
    return "a set whose members are not known"


def _fault_of_fraction(node: Any) -> str | None:
    r"""Return what is wrong with a fraction that is a derivative, such as `\frac{dy}{dx}`; None for any other."""
    if _is_under_derivative(node.lower):
        return "a derivative, not a fraction"
    return None


def _fault_of_product(node: Any) -> str | None:
    r"""Return what is wrong with a product or quotient; None if nothing is.

    The quotient dy/dx is a derivative. The factors of a product may be vectors: between letters, `\times` is a vector
    product as often as a product of numbers. `\cdot` is taken for a product of numbers, unless both sides have a
    vector's accent.
    """
    if node.getChildCount() < 3:
        # The rule also stands around a single factor.
        return None
    left, operator, right = node.getChildren()
    operator_name = _token_name(operator)
    if operator_name in ("DIV", "CMD_DIV") and _is_under_derivative(right):
        return "a derivative, not a fraction"
    if operator_name == "CMD_TIMES" and _has_variable(left) and _has_variable(right):
        return "perhaps a product of vectors"
    if operator_name == "CMD_CDOT" and _has_vector_accent(left) and _has_vector_accent(right):
        return "a product of vectors"
    return None


def _fault_of_group(node: Any) -> str | None:
    r"""Return what is wrong with `\{x\}` or `[x]` beside something else; None if nothing is.

    As an operand, `\{x\}` means a fractional part, and `[x]` an integer part. Square brackets around more than one
    token, as in 2[x+1], are accepted, because they only group.
    """
    bracket = _token_name(node.getChild(0))
    is_in_braces = bracket in ("L_BRACE_VISUAL", "L_BRACE_CMD")
    # Three tokens are the two brackets and a single token between them.
    is_token_in_brackets = bracket == "L_BRACKET" and len([*_tokens(node)]) == 3
    may_be_part_of_number = is_in_braces or is_token_in_brackets
    if may_be_part_of_number and not _stands_alone(node):
        return "perhaps a part of a number"
    return None


def _fault_of_list(node: Any) -> str | None:
    """Return what is wrong with a list in brackets that has both semicolons and commas; None for any other list.

    math-verify would drop the semicolons, and read (1, 2; 3) as (1, 2, 3). It reads 1, 2; 3, without brackets,
    correctly: as (1, 2) and 3.

    Args:
        node: of the rule `semicolon_elements`, which is around every list, with or without a semicolon.
    """
    groups = [child for child in node.getChildren() if _rule_name(child) == "comma_elements"]
    has_semicolon = len(groups) > 1
    # The parent of a list without brackets is `set_elements`. Any other parent contains the brackets.
    has_brackets = _rule_name(node.parentCtx) != "set_elements"
    if not has_semicolon or not has_brackets:
        return None
    # A group with more than one child has commas.
    if any(group.getChildCount() > 1 for group in groups):
        return "commas and semicolons in one bracket"
    return None


def _fault_of_factors(node: Any) -> str | None:
    r"""Return what is wrong with factors that have no operator between them; None if nothing is.

    These are refused: a second number, as in 6ft2in; a whole number before a fraction with which it is no mixed number,
    as in `2\frac{3}{2}`; and a fraction after an angle, as in `30^\circ\frac12`.
    """
    factors = [child for child in node.getChildren() if _rule_name(child) in ("postfix", "postfix_nofunc")]
    for index, (before, after) in enumerate(pairwise(factors)):
        ends_two_letters = index > 0 and _is_letter(factors[index - 1]) and _is_letter(before)
        if _is_second_number(before, after, ends_two_letters):
            return "a second number, not a factor"
        fraction = _FRACTION.fullmatch(after.getText())
        if fraction is None:
            continue
        is_proper = int(fraction[1]) < int(fraction[2])
        # A whole number and a proper fraction are a mixed number, if there is no other factor.
        if before.getText().isdigit() and (len(factors) > 2 or not is_proper):
            return "a factor or a part of a mixed number"
        if _ANGLE.fullmatch(before.getText()):
            return "a part of an angle, not a factor"
    return None


def _is_second_number(before: Any, after: Any, ends_two_letters: bool) -> bool:
    """Return whether a factor begins a second value after another factor, as in 6ft2in.

    Args:
        before, after: the nodes of the two factors.
        ends_two_letters: whether `before` is a letter, and so is the factor before it. They may be a unit.
    """
    if _symbolic_name(after.start) in _LISTS["numbers"]:
        if _has_letter(before):
            return True
        # One token that is no letter is a number. In a mixed number, a fraction follows it, not another number.
        tokens = [token for token in _tokens(before) if _rule_name(token.parentCtx) != "degree"]
        if len(tokens) == 1:
            return True
    return ends_two_letters and not _has_letter(after)


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
    "semicolon_elements": _fault_of_list,
}
"""The functions that return the fault of a node, by the name of the node's rule."""


def _is_letter(node: Any) -> bool:
    """Return whether a factor is a single letter, or a token of letters such as a Greek one."""
    return node.start is node.stop and _symbolic_name(node.start) in _LISTS["letters"]


def _has_letter(node: Any) -> bool:
    """Return whether any token of a node is a letter, or has letters."""
    return any(_token_name(token) in _LISTS["letters"] for token in _tokens(node))


def _has_vector_accent(node: Any) -> bool:
    r"""Return whether a node has an accent that marks a vector, such as `\vec`."""
    return _VECTOR_ACCENT.search(node.getText()) is not None


def _is_under_derivative(node: Any) -> bool:
    r"""Return whether a denominator is a derivative's: it has dx, or a difference such as `\Delta x`."""
    for part in _nodes(node):
        if _token_name(part) == "DIFFERENTIAL":
            return True
        if _rule_name(part) in _FACTORS:
            factors = [child.getText().strip() for child in part.getChildren()]
            # The last factor is left out, because these letters are variables if nothing follows them.
            if any(factor in (r"\Delta", r"\delta", "d") for factor in factors[:-1]):
                return True
    return False


def _has_variable(node: Any) -> bool:
    """Return whether a product has a variable outside exponents, indices and functions. It may be a vector.

    Neither e nor pi is a variable.
    """
    if isinstance(node, TerminalNode):
        is_number = _token_name(node) == "EXP_E" or node.getText().strip() == r"\pi"
        return _token_name(node) in _LISTS["letters"] and not is_number
    if _rule_name(node) in ("supexpr", "func", "abs_group", "subexpr"):
        return False
    children = [*node.getChildren()]
    if _rule_name(node) in _POWERS and len(children) > 1:
        # An exponent does not count, so only the base is left.
        children = children[:1]
    return any(map(_has_variable, children))


def _stands_alone(node: Any) -> bool:
    """Return whether there is nothing beside a node but brackets around it.

    Then it is a whole answer, a whole member of a list or a matrix, or a whole index.
    """
    for child, parent in pairwise([node, *_ancestors(node)]):
        if _rule_name(parent) == "subexpr":
            return True
        # A group's children are its opening bracket, its content and its closing bracket.
        is_in_brackets = _rule_name(parent) == "group" and child is parent.getChild(1)
        if parent.getChildCount() > 1 and not is_in_brackets:
            return _rule_name(parent) in _LISTS["rules_around_wholes"]
    return True


def _is_operand(node: Any) -> bool:
    """Return whether a token is an operand of an operation. A sign before it is no operation here."""
    for child, parent in pairwise([node, *_ancestors(node)]):
        # One of these rules is directly around another one only if it adds a sign.
        is_sign = _rule_name(parent) in _FACTORS and _rule_name(child) in _FACTORS
        if parent.getChildCount() > 1 and not is_sign:
            return _rule_name(parent) in _LISTS["operations"]
    return False


def _ancestors(node: Any) -> Iterator[Any]:
    """Yield the nodes that contain a node, from its parent to the root."""
    while node.parentCtx is not None:
        node = node.parentCtx
        yield node


def _nodes(node: Any) -> Iterator[Any]:
    """Yield a node and all nodes below it, each before its children."""
    yield node
    if not isinstance(node, TerminalNode):
        for child in node.getChildren():
            yield from _nodes(child)


def _tokens(node: Any) -> Iterator[Any]:
    """Yield the tokens of which a node consists, in the order of the text."""
    for part in _nodes(node):
        if isinstance(part, TerminalNode):
            yield part


def _rule_name(node: Any) -> str:
    """Return the name of a node's rule in the grammar; empty for a token."""
    if isinstance(node, TerminalNode):
        return ""
    return PSParser.ruleNames[node.getRuleIndex()]


def _token_name(node: Any) -> str:
    """Return the name of a node's token in the grammar; empty for a rule."""
    if isinstance(node, TerminalNode):
        return _symbolic_name(node.symbol)
    return ""


def _symbolic_name(symbol: Any) -> str:
    """Return the name that the grammar has for a token; empty for the end of the text.

    Args:
        symbol: what the lexer has read: the `symbol` of a token's node, or the `start` or `stop` of a rule's node.
    """
    if symbol.type > 0:
        return PSParser.symbolicNames[symbol.type]
    return ""
