"""Reading README, CONTRIBUTING, CHANGELOG and docs: the code blocks, the inline code, the links.

A block with commands that no test can run says why in an HTML comment right above it, which readers don't see:
`<!-- needs: GPUs, the hub -->`. The reasons are those of REASONS. `<!-- prints -->` stands right above a block with
what the block before prints, in lines of any length; `…` there stands for any text.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "AGENTS", "SECURITY"))]
PAGES += sorted((ROOT / "docs").rglob("*.md"))

# What a command may need that a test does not have; minutes and hours are its own running time.
REASONS = frozenset({"GPUs", "a cluster", "the hub", "the network", "Docker", "minutes", "hours"})
LANGUAGES = frozenset({"bash", "python", "yaml", ""})

_MARK = re.compile(r"<!--\s*needs:\s*(?P<reasons>.*?)\s*-->\s*")
_PRINTS = re.compile(r"<!--\s*prints\s*-->\s*")
_ASSIGNMENT = re.compile(r"[A-Z_][A-Z0-9_]*=")
_SUBSTITUTION = re.compile(r"(?:export )?(?P<name>[A-Z_][A-Z0-9_]*)=\$\((?P<command>.*)\)")
# Words, quoted parts and white space, then a comment, which begins where a word could.
_COMMENT = re.compile(
    r"""(?P<code>(?:(?!(?<!\S)\#)[^\s'"\\]|\\.|'[^']*'|"(?:\\.|[^"\\])*"|\s)*)(?:\#\s*(?P<comment>.*))?"""
)


class Wrong(ValueError):
    """Something printed in a page is not so."""


@dataclass(frozen=True)
class Block:
    """A code block.

    Args:
        language: its info string.
        text: what is in it.
        line: the number of its first line in the page.
        needs: what the mark above it says that its commands need; empty without a mark.
        printed: whether it is marked as what the block before prints.
    """

    language: str
    text: str
    line: int
    needs: frozenset[str] = frozenset()
    printed: bool = False


@dataclass(frozen=True)
class Command:
    """A command as bash would start it, before variables are replaced.

    Args:
        text: its line.
        line: the line's number in the page.
        words: program and arguments, without quotes.
        variables: the assignments before the program.
        needs: why no test can run it, as the mark above its block says; empty without a mark.
        stored_in: the variable that its output goes to, if any.
    """

    text: str
    line: int
    words: tuple[str, ...]
    variables: dict[str, str]
    needs: frozenset[str] = frozenset()
    stored_in: str | None = None


def blocks_of(page: str) -> list[Block]:
    """The code blocks of a page's text, also those within lists.

    Raises:
        Wrong: a language that is none of LANGUAGES, a mark with an unknown reason, or one that stands above no block.
    """
    blocks, needs, printed = [], frozenset(), False
    for token in MarkdownIt().parse(page):
        if token.type in ("fence", "code_block"):
            # A fence's content begins after its opening line.
            line = token.map[0] + 1 + (token.type == "fence")
            blocks.append(Block(token.info.strip(), token.content, line, needs, printed))
            needs, printed = frozenset(), False
        elif needs or printed:
            raise Wrong(f"line {token.map[0] if token.map else 0}: a mark belongs right above a code block")
        elif token.type == "html_block":
            needs = _reasons(token.map[0] + 1, token.content)
            printed = bool(_PRINTS.fullmatch(token.content))
    if needs or printed:
        raise Wrong("the page's last line: a mark belongs right above a code block")
    for block in blocks:
        if block.language not in LANGUAGES:
            raise Wrong(f"line {block.line}: a block of {block.language!r}; the tests read {sorted(LANGUAGES)}")
    return blocks


def is_as_printed(block: str, output: str) -> bool:
    """Whether a block shows an output: the same words in lines of any length, `…` standing for any text."""
    parts = (re.escape(" ".join(part.split())) for part in block.split("…"))
    return bool(re.fullmatch(" ?.* ?".join(parts), " ".join(output.split())))


def inline_code_of(page: str) -> list[str]:
    """Every span of inline code in a page's text."""
    parsed = MarkdownIt("commonmark").enable("table").parse(page)
    return [child.content for token in parsed for child in token.children or () if child.type == "code_inline"]


def links_of(page: str) -> list[str]:
    """The targets of a page's links and figures."""
    parsed = MarkdownIt("commonmark").enable("table").parse(page)
    found = [child.attrGet("href") or child.attrGet("src") for token in parsed for child in token.children or ()]
    return [str(target) for target in found if target]


def commands_of(block: Block) -> list[Command]:
    """The commands of a block, a command of a `&&` chain each for itself; an output has none.

    Raises:
        Wrong: shell syntax that a test cannot follow.
    """
    if block.printed:
        return []
    return [command for number, line in _whole_lines(block) for command in _commands_of_line(number, line, block.needs)]


def command_of(text: str) -> Command:
    """The command of one span of inline code.

    Raises:
        Wrong: quotes that do not close.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise Wrong(str(error)) from None
    return _command(text, 0, words, frozenset())


def _whole_lines(block: Block) -> Iterator[tuple[int, str]]:
    whole, first = "", block.line
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        if not whole:
            first = number
        if line.endswith("\\"):
            whole += line[:-1]
            continue
        yield first, whole + line
        whole = ""
    if whole:
        raise Wrong(f"line {first}: ends in a backslash, and nothing follows")


def _commands_of_line(number: int, line: str, needs: frozenset[str]) -> Iterator[Command]:
    match = _COMMENT.fullmatch(line)
    if match is None:
        raise Wrong(f"line {number}: quotes that do not close")
    code = match["code"].strip()
    if re.search(r"\bneeds:", match["comment"] or ""):
        raise Wrong(f"line {number}: a mark for the tests belongs above the block: <!-- needs: REASON -->")
    if not code:
        return
    substitution = _SUBSTITUTION.fullmatch(code)
    inner = substitution["command"] if substitution else code
    lexer = shlex.shlex(inner, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split, lexer.commenters = True, ""
    chain: list[list[str]] = [[]]
    for word in lexer:
        if word == "&&":
            chain.append([])
        elif word and set(word) <= set("&|;"):
            raise Wrong(f"line {number}: {word}; the tests follow && only")
        else:
            chain[-1].append(word)
    for words in chain:
        yield _command(line.strip(), number, words, needs, substitution["name"] if substitution else None)


def _reasons(number: int, comment: str) -> frozenset[str]:
    """The reasons of an HTML comment that is a mark; none of another comment."""
    match = _MARK.fullmatch(comment)
    if match is None:
        return frozenset()
    reasons = frozenset(match["reasons"].split(", "))
    if unknown := reasons - REASONS:
        raise Wrong(f"line {number}: needs: {', '.join(sorted(unknown))}; the reasons are {', '.join(sorted(REASONS))}")
    return reasons


def _command(text: str, number: int, words: list[str], needs: frozenset[str], stored_in: str | None = None) -> Command:
    variables = {}
    while words and _ASSIGNMENT.match(words[0]):
        name, _, value = words[0].partition("=")
        variables[name] = value
        words = words[1:]
    return Command(text, number, tuple(words), variables, needs, stored_in)
