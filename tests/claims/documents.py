"""Reading README, CONTRIBUTING, CHANGELOG and docs: the code blocks, their commands, the inline code, the links.

A block with commands that no test can run says why in an HTML comment right above it, which readers don't see:
`<!-- needs: GPUs, the hub -->`. The reasons are those of REASONS. `<!-- prints -->` stands right above a block with
what the block before prints, in lines of any length; `…` there stands for any text.
"""

import re
import shlex
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "AGENTS", "SECURITY"))]
PAGES += sorted((ROOT / "docs").rglob("*.md"))

# What a command may need that a test does not have; minutes and hours are its own running time.
REASONS = frozenset({"GPUs", "a cluster", "the hub", "the network", "Docker", "minutes", "hours"})

_MARK = re.compile(r"<!--\s*(needs:\s*(?P<reasons>.*?)|prints)\s*-->\s*")
_SUBSTITUTION = re.compile(r"(?:export )?(?P<name>[A-Z_][A-Z0-9_]*)=\$\((?P<command>.*)\)")


class Wrong(ValueError):
    """Something printed in a page is not so."""


@dataclass(frozen=True)
class Block:
    """A code block: its info string, its text, the number of its first line, and what the mark above it says."""

    language: str
    text: str
    line: int
    needs: frozenset[str] = frozenset()
    printed: bool = False


@dataclass(frozen=True)
class Command:
    """A command's words without quotes, the assignments before them, and the variable that its output goes to."""

    words: tuple[str, ...]
    variables: dict[str, str]
    stored_in: str | None = None


def blocks_of(page: str) -> list[Block]:
    """The code blocks of a page's text, also those within lists; Wrong for a mark that is none, or above no block."""
    blocks, mark = [], None
    for token in MarkdownIt().parse(page):
        if token.type in ("fence", "code_block"):
            # A fence's content begins after its opening line.
            line = token.map[0] + 1 + (token.type == "fence")
            needs = frozenset((mark["reasons"] or "").split(", ") if mark and mark["reasons"] else ())
            if not needs <= REASONS:
                raise Wrong(f"line {line}: {', '.join(needs - REASONS)}; the reasons are {', '.join(sorted(REASONS))}")
            blocks.append(Block(token.info.strip(), token.content, line, needs, bool(mark and not needs)))
            mark = None
        elif mark:
            break
        elif token.type == "html_block":
            mark = _MARK.fullmatch(token.content)
    if mark:
        raise Wrong(f"{mark[0].strip()}: a mark belongs right above a code block")
    return blocks


def is_as_printed(block: str, output: str) -> bool:
    """Whether a block shows an output: the same words in lines of any length, `…` standing for any text."""
    parts = (re.escape(" ".join(part.split())) for part in block.split("…"))
    return bool(re.fullmatch(" ?.* ?".join(parts), " ".join(output.split())))


def _inline(page: str) -> list:
    parsed = MarkdownIt("commonmark").enable("table").parse(page)
    return [child for token in parsed for child in token.children or ()]


def inline_code_of(page: str) -> list[str]:
    """Every span of inline code in a page's text."""
    return [child.content for child in _inline(page) if child.type == "code_inline"]


def links_of(page: str) -> list[str]:
    """The targets of a page's links and figures."""
    targets = (child.attrGet("href") or child.attrGet("src") for child in _inline(page))
    return [str(target) for target in targets if target]


def commands_of(block: Block) -> list[Command]:
    """The commands of a block, each on a line; an output has none."""
    lines = [] if block.printed else block.text.replace("\\\n", " ").splitlines()
    return [command for command in map(command_of, lines) if command.words]


def command_of(line: str) -> Command:
    """The command of a line or a span of inline code; Wrong for quotes that do not close, and several commands."""
    stored = _SUBSTITUTION.fullmatch(line.strip())
    lexer = shlex.shlex(stored["command"] if stored else line, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    try:
        words = [*lexer]
    except ValueError as error:
        raise Wrong(f"{line}: {error}") from None
    if any(word and set(word) <= set("&|;") for word in words):
        raise Wrong(f"{line}: print one command on a line")
    variables = dict(word.split("=", 1) for word in takewhile(re.compile(r"[A-Z_][A-Z0-9_]*=").match, words))
    return Command(tuple(words[len(variables) :]), variables, stored["name"] if stored else None)
