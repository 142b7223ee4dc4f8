"""What a method needs besides its class, each missing thing by name in one message: its group; its test with published
values and numbers that are not ours; its places in README and docs. Not covered: what these say.
"""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import MISSING

from tests.claims.documents import ROOT
from verl_clipx.losses.groups import group_names, groups_of, read_node
from verl_clipx.losses.methods import BUILT_IN, METHODS

from .facts import fact, facts

FOLDER = Path(__file__).parent
CLIP_KEYS = runpy.run_path(str(ROOT / "scripts" / "key_tables.py"))["clip_key_table"]()
# What a method's test states or imports to compare it with numbers that are not ours: golden vectors, verl's own loss,
# or a formula by autograd.
COMPARISONS = ("GOLDEN", "SAME_IN_VERL", "assert_gradient_of")


def read_page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def find_missing_files(method: str) -> Iterator[str]:
    if method not in groups_of(method):
        yield f"configs/clipx/{method}.yaml, which chooses it and states what deviates from the class"
    test = FOLDER / f"test_{method}.py"
    if not test.exists():
        yield f"tests/losses/methods/{test.name} (tests/losses/methods/facts.py says what it may state)"


def find_missing_numbers(method: str) -> Iterator[str]:
    test = f"tests/losses/methods/test_{method}.py"
    for group in groups_of(method):
        # What a user has to give is not published.
        if group not in fact(method, "PUBLISHED", {}) and MISSING not in read_node(group).values():
            yield f"PUBLISHED in {test}: the published values of +clipx={group}"
    if not any(fact(method, name, None) for name in COMPARISONS):
        yield f"numbers that are not ours in {test}: one of {', '.join(COMPARISONS)}"


def find_missing_on_pages(method: str) -> Iterator[str]:
    formulas = read_page("docs/methods.md").split("\n## Formulas\n")[1]
    if not re.search(rf"\b{method}\b", formulas):
        yield "docs/methods.md, 'Formulas': its row in the table of F by region"
    for number in re.findall(r"\d{4}\.\d{5}", METHODS[method].source):
        if number not in formulas:
            yield f"docs/methods.md, 'Formulas': {number}, which its source names"
    advice = read_page("README.md").split("## Which method when")[1].split("\n## ")[0]
    chosen = [row.split("|")[2] for row in advice.splitlines() if row.startswith("|")]
    if not {*re.findall(r"\w+", " ".join(chosen))} & {*groups_of(method)}:
        yield "README.md, 'Which method when': a row with one of its groups"
    if CLIP_KEYS not in read_page("docs/swap.md") and f"`{method}`" in CLIP_KEYS:
        yield "docs/swap.md: the table of verl's keys (scripts/key_tables.py prints it)"


@pytest.mark.parametrize("method", BUILT_IN)
def test_nothing_is_missing(method):
    missing = [*find_missing_files(method), *find_missing_numbers(method), *find_missing_on_pages(method)]
    if missing:
        pytest.fail("\n- ".join([f"{method} still needs", *missing]), pytrace=False)


def test_no_published_values_are_of_a_group_that_is_not_there():
    assert facts("PUBLISHED").keys() <= {*group_names()}
