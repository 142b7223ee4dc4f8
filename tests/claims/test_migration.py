"""docs/migrate.md against the code: what verl's keys become, which losses verl has, which of our options it names.

Covers: the table of keys is the one that the driver translates by; every loss of verl's own has a row, and its group
exists; every option of ours that a fork's option becomes exists. Not covered: what the forks' options are called, and
that a translation trains the same (tests/golden compares with the released functions).
"""

import re
from dataclasses import fields

import pytest
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl_clipx.run.clip_keys import DRO_BETA, meanings

from verl_clipx.common.configs_folder import configs_folder
from verl_clipx.methods import BUILT_IN, METHODS
from verl_clipx.modifiers import MODIFIERS
from verl_clipx.run import clip_keys
from verl_clipx.run.config import parameters_of
from verl_clipx.run.listing import group_settings
from verl_clipx.worker.registry import is_ours

from .documents import ROOT

PAGE = (ROOT / "docs" / "migrate.md").read_text(encoding="utf-8")
KEYS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg", DRO_BETA)
FORMULAS = {
    clip_keys.as_it_is: "x",
    clip_keys.below_one: "1 − x",
    clip_keys.above_one: "1 + x",
    clip_keys.below_zero: "exp(−x)",
    clip_keys.above_zero: "exp(x)",
}


def becomes(method: str) -> str:
    """What each of verl's keys becomes under a method: the cells of its row."""
    known = meanings(METHODS[method]())
    cells = (known.get(key) for key in KEYS)
    return " | ".join("refused" if one is None else f"`{one.parameter}` = {FORMULAS[one.value]}" for one in cells)


def table_of_keys() -> str:
    """The page's table, a row for the methods to which the keys are the same."""
    rows: dict[str, list[str]] = {}
    for method in BUILT_IN:
        rows.setdefault(becomes(method), []).append(f"`{method}`")
    head = " | ".join(["`+clipx=`", *(f"`{key}=x`" for key in KEYS)])
    return "\n".join(
        [f"| {head} |", "|---" * (len(KEYS) + 1) + "|", *(f"| {', '.join(rows[r])} | {r} |" for r in rows)]
    )


def rows_of(section: str) -> list[list[str]]:
    """The cells of the rows of a section's tables, without their heads."""
    text = PAGE.split(f"\n{section}\n")[1].split("\n#")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"(?m)^\| .*\|$", text)]


def spans(text: str) -> list[str]:
    return text.split("`")[1::2]


def test_the_table_of_keys_is_the_one_that_the_driver_translates_by():
    assert PAGE.split("<!-- verl's keys -->\n")[1].split("\n<!-- end -->")[0] == table_of_keys()


def test_every_loss_of_verls_own_has_a_row_and_its_group_exists():
    _, *rows = rows_of("## From verl's own losses")
    ours = {spans(loss)[0]: spans(group) for loss, group, _ in rows}
    assert {*ours} == {name for name, function in POLICY_LOSS_REGISTRY.items() if not is_ours(function)}
    for groups in ours.values():
        assert all((configs_folder() / "clipx" / f"{group}.yaml").is_file() for group in groups)


def unknown(option: str, groups: set[str]) -> bool:
    """Whether an option of ours doesn't exist under any of the groups."""
    key = option.partition("=")[0].removeprefix("+")
    if option.startswith("+"):
        return not (configs_folder() / f"{option.removeprefix('+').replace('=', '/')}.yaml").is_file()
    node, _, name = key.removeprefix("clipx.").partition(".")
    if name:
        return name not in {field.name for field in fields(MODIFIERS[node])}
    return not any(node in parameters_of(METHODS[group_settings(group)["method"]]) for group in groups)


FORKS = re.findall(r"(?m)^### .* \([\w-]+/[\w-]+\)$", PAGE)


@pytest.mark.parametrize("section", FORKS)
def test_every_option_that_a_forks_option_becomes_exists(section):
    text = PAGE.split(f"\n{section}\n")[1].split("\n#")[0]
    groups = set(re.findall(r"\+clipx=(\w+)", text))
    options = [span for *_, cell in rows_of(section) for span in spans(cell) if re.match(r"\+?clipx[./=]", span)]
    assert len(FORKS) == 4 and options and [option for option in options if unknown(option, groups)] == []


def test_an_option_that_does_not_exist_is_found():
    assert unknown("clipx.alhpa=3", {"acpo"}) and unknown("clipx.select.share=1", {"acpo"})
    assert unknown("+clipx=acpi", set()) and unknown("+clipx/select=none", set())
    assert not unknown("clipx.alpha=3", {"acpo"}) and not unknown("clipx.update.eta=1", set())
