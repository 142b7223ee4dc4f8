r"""Compares two answers by math-verify's grammar and comparison. Only the processes of `processes.py` load this.

math-verify's `parse` is not called: it searches a text for an answer, and if it cannot read the whole box, it takes the
last equation or plain fraction in it. Its grammar reads all of a box or nothing. Before its `verify` is called, this
module decides what math-verify misjudges, or simplifies for minutes.
"""

import re
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from latex2sympy2_extended.math_normalization import normalize_latex
from latex2sympy2_extended.symbols import sympy_singleton_map
from math_verify import LatexExtractionConfig, grader, verify
from mpmath import mpc
from sympy import (
    Abs,
    Add,
    And,
    Basic,
    E,
    Equality,
    Expr,
    Float,
    I,
    MatrixBase,
    Mul,
    Rational,
    Symbol,
    Tuple,
    UnevaluatedExpr,
    solve,
)
from sympy.core.function import Application, AppliedUndef
from sympy.core.relational import Relational
from sympy.sets import FiniteSet, Intersection, Set, Union

from verl_clipx.papers.tasks.math.accounting import MisreadText, check_tree, check_words
from verl_clipx.papers.tasks.math.spelling import is_word

# What `spelling.clean` writes between inequalities that together describe one set of numbers.
_OR = r"\lor "
_AND = r"\land "

MAX_LENGTH = 400
"""In characters. The longest answer among the papers' evaluation sets has 224."""

MAX_DEPTH = 12
"""How many brackets may be open at once."""

# What a text must not contain: mostly what might take all time or memory.
_GROUP = r"\{(?:[^{}]|\{[^{}]*\})*\}|\([^()]*\)"
# A power as an exponent: 2^3^4.
_TOWER = rf"\^\s*(?:{_GROUP}|-?\d+|\\?[A-Za-z]+|\S)\s*\^"
# An exponent in braces or brackets that holds a power, or a number from 10000 on.
_GROUP_AS_EXPONENT = r"\^\s*(?:\{[^{}]*(?:\{[^{}]*)?|\([^()]*)(?:\^|\d{5})"
# An exponent from 10000 on.
_LARGE_EXPONENT = r"\^\s*\d{5}"
# Python's power, which the grammar reads too.
_PYTHON_POWER = r"\*\*"
# The factorial of a number from 1000 on, of a factorial, and of a group with a power or a number from 100 on.
_FACTORIAL = r"\d{4}\s*!|![\s)\]}]*!|(?:\^|\d{3})[^()\[\]]*[)\]}]\s*!"
# Functions that grow as fast as a factorial, of a number from 1000 on.
_FAST_FUNCTION = r"\\(?:[dt]?binom|Gamma|zeta)(?![a-zA-Z])[^\n]{0,12}?\d{4}"
# Operators that iterate.
_ITERATION = r"\\(?:sum|prod|i+nt|lim|bigcup|bigcap)(?![a-zA-Z])"
# Dots take no time, but math-verify would drop them, and read 1,2,\ldots as 1,2.
_DOTS = r"\\ldots(?![a-zA-Z])"
# TeX's commands that define macros or read files.
_MACRO = r"\\(?:input|include|def|newcommand|let|csname)(?![a-zA-Z])"
_REFUSED = re.compile(
    "|".join(
        (
            _TOWER,
            _GROUP_AS_EXPONENT,
            _LARGE_EXPONENT,
            _PYTHON_POWER,
            _FACTORIAL,
            _FAST_FUNCTION,
            _ITERATION,
            _DOTS,
            _MACRO,
        )
    )
)
# With `units=True`, math-verify would take a letter at the end for a unit, and not for a variable.
_NORMALISATION = replace(LatexExtractionConfig().normalization_config, boxed="none", units=False)
_TRIGONOMETRIC = {rf"\{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc")}

# `_protect` looks at what these patterns match, so that the grammar does not misread it.
# A variable or a number with primes, which math-verify drops.
_PRIMED = r"(?P<primed>\\[A-Za-z]+|[A-Za-z]|\d)(?P<index>_(?:\w|\{[^{}]*\}))?(?P<primes>'+)"
# A command with the text, the name or the accented letter to which it belongs.
_COMMAND_WITH_CONTENT = (
    r"\\(?:text\w*|mbox|operatorname|begin|end|math\w+|overline|widehat|widetilde|overrightarrow|vec|bar|hat|tilde)\s*"
    r"\{[^{}]*\}"
)
_OTHER_COMMAND = r"\\[A-Za-z]+(?:\s*\()?"
# The grammar reads E as half of a number, as in 2E3, I as the imaginary unit, and T as what transposes a matrix.
_MISREAD_LETTER = r"[EIT]"
_PROTECTED = re.compile("|".join((_PRIMED, _COMMAND_WITH_CONTENT, _OTHER_COMMAND, _MISREAD_LETTER)))
# Fonts in which a letter is another variable.
_FONT = re.compile(r"\\math(bb|cal|frak|scr|sf|tt)\{([^{}]*)\}")
# The d of dx, in any font.
_DIFFERENTIAL = re.compile(r"\\(?:text\w*|mbox|math(?:rm|it|bf|sf))\s*\{\s*d\s*\}")
# If all symbols were put into small letters, A and a would be one variable.
_CASED = ConversionConfig(lowercase_symbols=False)


class _Grammar(_Latex2Sympy):
    r"""math-verify's grammar, with two changes.

    A text is refused if a part of it would be dropped or misread (`check_tree`). `30^\circ` is read as 30, but inside a
    trigonometric function as 30 degrees, which is pi/6.
    """

    def create_parser(self, text: str) -> Any:
        """Return what the base class calls a parser: its method `math` returns the tree of the text."""
        tree = super().create_parser(text).math()
        check_tree(tree, text)
        # The parser cannot return the tree a second time, because it has used up the tokens.
        return SimpleNamespace(math=lambda: tree)

    def convert_func(self, func: Any) -> Any:
        """Convert a function. While `convert_degrees` is set, the base class converts degrees into radians."""
        convert_degrees_before = self.convert_degrees
        self.convert_degrees = self.convert_degrees or func.start.text in _TRIGONOMETRIC
        try:
            return super().convert_func(func)
        finally:
            self.convert_degrees = convert_degrees_before


# The letters of the numbers that the grammar reads in letters.
_LETTERS_OF_NUMBERS = {E: "e", I: "i"}


def _spell(expression: Any) -> str:
    """Return the name of a symbol, or the joined names of a product of symbols, with e and i for these numbers.

    Raises:
        TypeError: the expression is a matrix.
    """
    if isinstance(expression, Mul) and all(isinstance(factor, Symbol) or factor == E for factor in expression.args):
        return "".join(map(_spell, expression.args))
    return _LETTERS_OF_NUMBERS.get(expression, str(expression))


def _have_the_same_name(gold: Any, answer: Any) -> bool:
    """Return whether two symbols, or products of symbols, have the same name in the same letters."""
    return _spell(gold) == _spell(answer)


# math-verify's own function compares names in small letters, so that A would equal a.
grader.sympy_compare_symbols = _have_the_same_name
_solve_and_compare = grader.sympy_solve_and_compare


def _without_assumptions(equation: Equality) -> Equality:
    """Return an equation whose unknowns may be any complex numbers."""
    return equation.xreplace({unknown: Symbol(unknown.name) for unknown in equation.free_symbols})


def _solve_equations(gold: Relational, answer: Relational, *precision: int) -> bool:
    """Return whether two relations have the same solutions.

    Two equations must have the same complex solutions, and at least one.

    Args:
        precision: the further arguments of math-verify's own function.
    """
    if isinstance(gold, Equality) and isinstance(answer, Equality):
        gold = _without_assumptions(gold)
        answer = _without_assumptions(answer)
        if not solve(gold, gold.free_symbols):
            return False
    return bool(_solve_and_compare(gold, answer, *precision))


# math-verify's own function solves for real numbers, and counts equations without a solution as equal.
grader.sympy_solve_and_compare = _solve_equations
# math-verify takes these letters for Euler's constant.
for _letter in ("gamma", "Gamma"):
    sympy_singleton_map.pop(_letter, None)


def judge(pairs: tuple[tuple[str, str], ...], strict: bool) -> bool | None:
    """Return whether the answers of at least one pair are equal.

    Args:
        pairs: each consists of a right answer and a given one, in the spelling of `spelling.clean`.
        strict: whether two more conditions hold. The answers must also be equal with their roles exchanged, because
            math-verify is not symmetric. A pair or tuple, whose order counts, must equal no list.

    Returns:
        None if no pair is equal, and one cannot be compared.
    """
    undecided = False
    for gold, answer in pairs:
        # Both the grammar and sympy raise exceptions of many kinds.
        try:
            if _are_equal(gold, answer, strict) and (not strict or _are_equal(answer, gold, strict)):
                return True
        except Exception:
            undecided = True
    return None if undecided else False


def _are_equal(gold: str, answer: str, strict: bool) -> bool:
    """Return whether an answer equals the right one.

    Args:
        strict: whether a pair or tuple, whose order counts, must equal no list.

    Raises:
        Exception: one of them cannot be read or compared.
    """
    right, right_unknown = _parse_answer(gold)
    given, given_unknown = _parse_answer(answer)
    if right_unknown and given_unknown and right_unknown != given_unknown:
        return False
    for equation in given.atoms(Equality):
        # An equation between two numbers that differ, as in x = 8 = 7, is false. `doit` unwraps what the grammar has
        # computed, such as a common divisor.
        if not equation.free_symbols and _differ(equation.lhs.doit(), equation.rhs.doit()):
            return False
    only_one_has_equations = right.has(Equality) != given.has(Equality)
    if only_one_has_equations and not (_equations_name_values(right) and _equations_name_values(given)):
        return False
    # Both calls need the other answer before it is changed, so this is one assignment.
    right, given = _named_value(right, given), _named_value(given, right)
    if _differ(right, given):
        return False
    both_are_lists_or_tuples = isinstance(right, Set | Tuple) and isinstance(given, Set | Tuple)
    if strict and both_are_lists_or_tuples and isinstance(right, FiniteSet) != isinstance(given, FiniteSet):
        return False
    if _is_composed_rational(right) and _is_composed_rational(given):
        # math-verify would round them, even if they have thousands of digits.
        first = right.doit()
        second = given.doit()
        if isinstance(first, Rational) and isinstance(second, Rational):
            return bool(first == second)
    # An inequality with an unknown equals the set of its solutions. Without an unknown, it is true or false.
    has_unknown = bool(given.free_symbols)
    # There is no time-out here: math-verify's own raises from a signal handler, and sympy may swallow that exception.
    return verify(right, given, allow_set_relation_comp=has_unknown, timeout_seconds=None, raise_on_error=True)


def _is_composed_rational(expression: Any) -> bool:
    """Return whether an expression is a rational number that is still to be computed, such as 2 to the power of 9."""
    if not isinstance(expression, Expr) or expression.is_Atom:
        return False
    return bool(expression.is_number and expression.is_rational)


class _ParsedAnswer(NamedTuple):
    """An answer as math-verify's grammar reads it.

    Args:
        value: the value. If relations are joined, it is the set of the numbers for which they hold.
        unknown: the variable of an answer that consists of equations or inequalities with one variable; None for any
            other answer.
    """

    value: Any
    unknown: Symbol | None


# The responses to one prompt share their right answer, and parsing costs more than comparing.
@lru_cache(maxsize=256)
def _parse_answer(text: str) -> _ParsedAnswer:
    r"""Return a whole text as math-verify's grammar reads it.

    Raises:
        ValueError: the text is not safe to parse; it cannot be read; it would be misread, see `MisreadText`; or `\lor`
            or `\land` joins something else than relations with one variable.
    """
    if not is_safe_to_parse(text):
        raise ValueError("a text that might exhaust the parser is not read")
    # One of the alternatives must hold. An alternative holds if all its expressions do.
    alternatives = []
    for alternative in _expand_plus_minus(text).split(_OR):
        alternatives.append([_parse(part) for part in alternative.split(_AND)])
    expressions = []
    for parts in alternatives:
        expressions += parts
    unknown = _find_unknown(expressions)
    if len(expressions) == 1:
        return _ParsedAnswer(value=expressions[0], unknown=unknown)
    if unknown is None:
        raise ValueError("what is joined are not relations with one variable")
    solutions = []
    for relations in alternatives:
        solutions.append(Intersection(*[relation.as_set() for relation in relations]))
    return _ParsedAnswer(value=Union(*solutions), unknown=unknown)


def _find_unknown(expressions: list[Any]) -> Symbol | None:
    """Return the only variable of some relations.

    Args:
        expressions: the relations. If there is another expression among them, None is returned.

    Returns:
        None if the relations have several variables, or none.
    """
    if not all(map(_is_relation, expressions)):
        return None
    variables = set().union(*(expression.free_symbols for expression in expressions))
    if len(variables) != 1:
        return None
    return variables.pop()


def _is_relation(value: Any) -> bool:
    """Return whether a value is an equation or inequality, or several that hold together."""
    parts = value.args if isinstance(value, And) else [value]
    return all(isinstance(part, Relational) for part in parts)


def _expand_plus_minus(text: str) -> str:
    r"""Return a text such as `1\pm\sqrt{2}` as a list of the two values that it stands for.

    A text with several such signs is returned unchanged, because it may stand for two values or for four.
    """
    if text.count(r"\pm") != 1:
        return text
    plus = re.sub(r"\\pm(?![a-z])\s*", "+", text)
    minus = re.sub(r"\\pm(?![a-z])\s*", "-", text)
    # Two lists in braces become one set.
    return f"{plus},{minus}".replace(r"\},\{", ",")


def is_safe_to_parse(text: str) -> bool:
    """Return whether a text may be parsed at all. Other texts may exhaust the parser's time or memory.

    A text is safe if it consists of printable ASCII, is at most MAX_LENGTH characters long, nests brackets at most
    MAX_DEPTH deep, and contains nothing that _REFUSED matches. A text with other characters, which may look like ASCII,
    is compared only as text.
    """
    if len(text) > MAX_LENGTH or not text.isascii() or not text.isprintable() or _REFUSED.search(text):
        return False
    depth = 0
    for character in text:
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if depth > MAX_DEPTH:
            return False
    return True


def _parse(text: str) -> Basic | MatrixBase:
    """Return the expression that math-verify's grammar reads in a safe text without `_OR` and `_AND`.

    Raises:
        MisreadText: a part of the text would be dropped or misread.
        ValueError: the text is not one expression, or cannot be read for another reason.
    """
    text = _PROTECTED.sub(_protect, text)
    if "'" in text or '"' in text:
        raise ValueError("primes or quotation marks, which would be dropped")
    text = normalize_latex(text, _NORMALISATION)
    check_words(text)
    # i is the imaginary unit. If sympy refuses that, as at the end of an interval, i is a variable, as it is everywhere
    # in math-verify: what is read as an interval may be meant as a pair of numbers.
    for meaning_of_i in (I, Symbol("i", real=True)):
        sympy_singleton_map["i"] = meaning_of_i
        try:
            parsed = _Grammar(is_real=True, config=_CASED).parse(text)
            if isinstance(parsed, Basic | MatrixBase):
                _check_members(parsed)
                return parsed
        except MisreadText:
            # It would be misread with the other meaning of i, too.
            raise
        except ValueError:
            continue
    raise ValueError("not one expression")


def _check_members(parsed: Basic | MatrixBase) -> None:
    """Raise ValueError if a list has a member twice. sympy's set would keep one of them."""
    for members in parsed.atoms(FiniteSet):
        # The grammar may have kept the list as it was written.
        written = getattr(members, "_unsorted_args", members.args)
        if len(written) != len(members.args):
            raise ValueError("a member that comes twice")


def _protect(match: re.Match[str]) -> str:
    r"""Return a spelling that the grammar does not misread for what `_PROTECTED` has matched.

    A letter that the grammar would misread becomes the name of a variable, in `\text` or `\bm`. Words are written in
    small letters.
    """
    text = match[0]
    if _DIFFERENTIAL.fullmatch(text):
        return "d "
    if match["primes"]:
        return _protect_primes(match["primed"], match["index"] or "", len(match["primes"]))
    font = _FONT.fullmatch(text)
    if font:
        name, letters = font.groups()
        if name == "bb":
            # The grammar knows \mathbb{R} and the other sets of numbers.
            return text
        return _write_variable(name + letters)
    if text in ("E", "I", "T"):
        return r"\text{" + text + "}"
    if text in (r"\gamma", r"\Gamma"):
        return _write_variable(text.removeprefix("\\"))
    command, _, content = text.removesuffix("}").partition("{")
    if not is_word(content.strip()):
        return text
    # The grammar drops blanks, so that "now here" would equal "no where".
    words = "-".join(content.lower().split())
    return command + "{" + words + "}"


def _protect_primes(symbol: str, index: str, primes: int) -> str:
    """Return a spelling of a symbol with primes from which the grammar does not drop the primes.

    Args:
        symbol: a letter, a command such as that of a Greek letter, or a digit. A letter or a command gets another name;
            a digit gets a variable as its factor.
        index: the index between symbol and primes, with its underscore; empty if there is none.
        primes: the number of primes.
    """
    name = "prime" * primes
    if symbol.isdigit():
        return symbol + index + _write_variable(name)
    return _write_variable(symbol.removeprefix("\\") + name) + index


def _write_variable(name: str) -> str:
    """Return what the grammar reads as one variable of that name, which may have several letters."""
    return r"\bm{" + name + "}"


def _named_value(expression: Any, other: Any) -> Any:
    """Return the value that an equation names, such as 5 of f(2) = 5 or of gcd(10, 15) = 5.

    An expression that is not such an equation is returned unchanged, and any expression if `other` has an equation too.
    """
    if not isinstance(expression, Equality) or other.has(Equality):
        return expression
    name = expression.lhs
    is_calculation = isinstance(name, Application) and not name.free_symbols
    if is_calculation or isinstance(name, AppliedUndef | UnevaluatedExpr):
        return expression.rhs
    return expression


def _evaluate(expression: Expr, point: dict[Symbol, float]) -> mpc:
    """Return the value of an expression at a point. It is a number of mpmath's, whose exponent may have any size.

    Raises:
        TypeError: the expression has no value there.
    """
    real, imaginary = expression.evalf(17, subs=point).as_real_imag()
    return mpc(Float(real), Float(imaginary))


def _equations_name_values(expression: Any) -> bool:
    """Return whether the left side of every equation in an expression is the name of a value, or has only numbers."""
    sides = [equation.lhs for equation in expression.atoms(Equality)]
    return all(_is_name(side) or not side.free_symbols for side in sides)


def _is_name(side: Any) -> bool:
    """Return whether a side of an equation is the name of a value: x, m + n or f(2), but not 3x or x^2."""
    if isinstance(side, AppliedUndef | UnevaluatedExpr | Symbol):
        return True
    return isinstance(side, Add | Mul | Abs | Tuple) and all(map(_is_name, side.args))


def _differ(first: Any, second: Any) -> bool:
    """Return whether two expressions clearly differ in value at one point. If they do, they cannot be equal.

    This decides most wrong answers. math-verify would simplify their difference, which takes milliseconds to minutes.
    False is also returned for words, which are symbols here, for percentages, and for expressions without a value.
    """
    if not _may_have_value(first) or not _may_have_value(second):
        return False
    try:
        symbols = first.free_symbols | second.free_symbols
        names = sorted({symbol.name for symbol in symbols})
        # The coordinates are distinct, positive, and have no simple relation to each other.
        point = {symbol: 0.6180339887 + 0.4142135623 * names.index(symbol.name) for symbol in symbols}
        first_value = _evaluate(first, point)
        second_value = _evaluate(second, point)
        difference = abs(first_value - second_value)
        sizes = (abs(first_value), abs(second_value))
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return False
    # math-verify counts numbers with six equal decimals as equal, and therefore all numbers near zero. Here, two
    # numbers other than zero are compared relative to their own size. Otherwise the scale is at least 1.
    is_relative = not symbols and min(sizes) > 0
    scale = max(sizes) if is_relative else max(*sizes, 1.0)
    return difference > 1e-3 * scale


def _may_have_value(expression: Any) -> bool:
    """Return whether an expression may have a value.

    Lists, percentages and single symbols have none here. A word is a single symbol.
    """
    if not isinstance(expression, Expr) or isinstance(expression, Symbol):
        return False
    return not expression.has(UnevaluatedExpr)
