"""Every swap that is printed or documented has an override of the node without a plus, at which a verl without the
plugin stops: in pages, recipes, scripts, comments of configurations and messages. All of those on pages are composed by
a verl that has no plugin. Not covered: workers without the plugin (tests/end_to_end/test_nodes_apart.py).
"""

import ast
import json
import re
from pathlib import Path

import pytest

from tests.claims.documents import PAGES, ROOT, Wrong, blocks_of, command_of, inline_code_of
from tests.without_plugin import run_without_plugin
from verl_clipx.losses.groups import SWAP_GUARD, group_names, swap_by

# A choice of a group with what follows it on a command line: words with an equals sign.
SWAP = re.compile(r"""\+clipx=(?:"\$METHOD"|\$METHOD|\w+|…)(?: \\?\n?\s*[+\w./@-]+=[^\s`"',;)]+)*""")
GUARD = re.compile(r"(?:^| )clipx\.\w+(?:\.\w+)*=")
# Readings of a log, in which nothing trains.
READS_ONLY = re.compile(r"clipx replay |clipx check-loss ")
PATTERNS_OF_FILES = ("*.sh", "*.yaml", "*.jinja", "Dockerfile*")


def lines_of(text: str) -> list[str]:
    """The lines of a text, with those that a backslash continues put together."""
    return re.sub(r"\\\n\s*", "", text).splitlines()


def swaps_of_page(page: str) -> list[str]:
    """The overrides of every command of verl's on a page, and of every span of code that has more than one word."""
    commands = []
    for block in blocks_of(page):
        if block.language == "bash":
            commands += lines_of(block.text)
    commands += [span for span in inline_code_of(page) if " " in span]
    swaps = []
    for command in commands:
        if "+clipx=" in command and not READS_ONLY.search(command):
            swaps.append(words_of_swap(command))
    return swaps


def words_of_swap(command: str) -> str:
    """The words of a command that concern the node."""
    try:
        words = command_of(command).words
    except Wrong:
        words = tuple(command.split())
    return " ".join(word for word in words if word.startswith(("+clipx", "clipx.")))


def all_swaps() -> list[str]:
    """Those of all pages but the log, which keeps what its days had."""
    pages = [page for page in PAGES if page.name != "log.md"]
    return sorted({swap for page in pages for swap in swaps_of_page(page.read_text())})


def unguarded(swaps: list[str]) -> list[str]:
    """Those without an override of the node that has no plus."""
    return [swap for swap in swaps if not GUARD.search(swap)]


def test_every_swap_of_a_page_has_an_override_without_a_plus():
    swaps = all_swaps()
    assert len(swaps) > 4
    assert unguarded(swaps) == []


@pytest.mark.parametrize(
    "command", ["python -m verl.trainer.main_ppo … +clipx=acpo", "bash run.sh +clipx=grpo +clipx/mask=icepop"]
)
def test_a_swap_without_one_is_found(command):
    assert len(unguarded(swaps_of_page(f"# Made up\n\n```bash\n{command}\n```\n"))) == 1
    assert len(unguarded(swaps_of_page(f"Use `{command}` here.\n"))) == 1


def test_every_swap_of_a_script_or_a_configuration_has_one():
    folders = ("recipes", "scripts", "configs", "docker", "docs/dev/upstream/recipe")
    files = [file for folder in folders for pattern in PATTERNS_OF_FILES for file in (ROOT / folder).rglob(pattern)]
    wrong = []
    count = 0
    for file in files:
        for line in lines_of(file.read_text()):
            # A name of a group alone, as in a sentence, is no command.
            swaps = [match[0] for match in SWAP.finditer(line) if " " in match[0] or "main_ppo" in line]
            count += len(swaps)
            if not READS_ONLY.search(line):
                wrong += [f"{file.relative_to(ROOT)}: {swap}" for swap in unguarded(swaps)]
    assert count > 10 and wrong == []


# Messages in which a choice is named, and not offered to be typed into a command of verl's.
NAMES_CHOICE = (
    # The word that is wrong, or what to type in its place.
    "Did you mean",
    "nothing reads it",
    "Leave out",
    "sets by itself",
    "sets loss_mode by itself",
    "does not see",
    "is for verl's own losses",
    # What a loss, a log or an environment is.
    "takes the gradient weight",
    "the log has no",
    ", observed (",
    "compose",
    # Readings of a log, in which nothing trains.
    "clipx replay",
    "by default the run's own",
)
# The whole text of these is one choice: a part of the line, and what swap_by puts its guard behind.
CHOICE_ALONE = {" (+clipx=…)", "+clipx=…", "+clipx=observe"}
# The values of constants that texts are made of.
CONSTANTS = {"NODE": "clipx", "OBSERVE": "observe", "SWAP_GUARD": SWAP_GUARD}


def texts_of(file: Path) -> list[str]:
    """The texts in a module's code, docstrings apart; what is put into a text is `…` where it is not known."""
    tree = ast.parse(file.read_text())
    left_out = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            left_out.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            left_out |= {id(part) for part in ast.walk(node) if part is not node}
    kinds = (ast.Constant, ast.JoinedStr)
    return [text_of(node) for node in ast.walk(tree) if isinstance(node, kinds) and id(node) not in left_out]


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.FormattedValue):
        return CONSTANTS.get(ast.unparse(node.value), "…")
    return node.value if isinstance(node.value, str) else ""


def bare_swaps(texts: list[str]) -> list[str]:
    """The texts with a choice that has no override without a plus, but for those that only name it."""
    bare = []
    for text in texts:
        only_names_it = text in CHOICE_ALONE or any(part in text for part in NAMES_CHOICE)
        if unguarded(SWAP.findall(text)) and not only_names_it:
            bare.append(text)
    return bare


def test_every_swap_of_a_message_has_one():
    texts = [text for file in (ROOT / "verl_clipx").rglob("*.py") for text in texts_of(file)]
    assert sum("+clipx=" in text for text in texts) > 20
    assert bare_swaps(texts) == []


def test_a_message_with_a_bare_swap_is_found(tmp_path):
    (tmp_path / "made_up.py").write_text('"""Add +clipx=acpo."""\nraise ValueError(f"{key}: run with +{NODE}=acpo.")\n')
    assert bare_swaps(texts_of(tmp_path / "made_up.py")) == ["…: run with +clipx=acpo."]


# verl's main as a command line starts it, with the overrides of each line of standard input.
COMPOSE = """
import json, sys
from pathlib import Path
import importlib.util
from hydra import compose, initialize_config_dir
assert importlib.util.find_spec("verl_clipx") is None
folder = Path(importlib.util.find_spec("verl").origin).parent / "trainer" / "config"
for words in json.load(sys.stdin):
    try:
        with initialize_config_dir(str(folder), version_base=None):
            compose("ppo_trainer", words)
        print("composed")
    except Exception as error:
        print(str(error).splitlines()[0])
"""


@pytest.mark.slow
def test_a_verl_without_the_plugin_composes_no_swap_of_a_page_and_none_of_a_refusal(folder_without_plugin, tmp_path):
    groups = [group for group in group_names() if group not in ("base", "custom")]
    swaps = [*map(str.split, all_swaps()), *(swap_by(group).split() for group in groups)]
    unguarded_swaps = [["+clipx=acpo"], ["+clipx=grpo", "+clipx/mask=icepop"]]
    overrides_of_runs = json.dumps([*unguarded_swaps, *swaps])
    result = run_without_plugin(folder_without_plugin, tmp_path, "-c", COMPOSE, stdin=overrides_of_runs)
    lines = result.stdout.splitlines()
    assert lines[:2] == ["composed", "composed"], result.stderr
    for swap, line in zip(swaps, lines[2:], strict=True):
        assert line.startswith("Could not override 'clipx."), (swap, line)


@pytest.mark.slow
def test_verls_main_without_the_plugin_stops_before_ray(folder_without_plugin, tmp_path):
    main = ("-m", "verl.trainer.main_ppo")
    result = run_without_plugin(folder_without_plugin, tmp_path, *main, "+clipx=acpo", "clipx.scope=mini_batch")
    assert result.returncode == 1 and "Could not override 'clipx.scope'" in result.stderr, result.stderr
    assert "Ray" not in result.stdout + result.stderr
