"""docs/swap.md against the code: its rows of verl's losses, each option of ours that it names. Not covered: its table
of verl's keys (tests/losses/methods/test_what_a_method_needs.py), what the forks' options are called, and that a
translation trains the same (tests/golden).
"""

import re
from dataclasses import fields

from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from verl_clipx.losses.configs_folder import configs_folder
from verl_clipx.losses.groups import group_settings
from verl_clipx.losses.methods import METHODS
from verl_clipx.losses.modifiers import MODIFIERS
from verl_clipx.run.config import parameters_of
from verl_clipx.training.worker.registry import is_ours

from .documents import ROOT

PAGE = (ROOT / "docs" / "swap.md").read_text(encoding="utf-8")


def spans(text: str) -> list[str]:
    return text.split("`")[1::2]


def test_every_loss_of_verls_own_has_a_row_and_its_group_exists():
    text = PAGE.split("\n## From verl's own losses\n")[1].split("\n### ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    groups_by_loss = {spans(loss)[0]: spans(group) for loss, group, _ in rows}
    losses_of_verl = {name for name, function in POLICY_LOSS_REGISTRY.items() if not is_ours(function)}
    assert {*groups_by_loss} - {"loss_mode"} == losses_of_verl
    for groups in groups_by_loss.values():
        for group in groups:
            assert (configs_folder() / "clipx" / f"{group}.yaml").is_file(), group


def is_unknown(option: str, groups: set[str]) -> bool:
    """Whether an option of ours doesn't exist under any of the groups."""
    if option.startswith("+"):
        return not (configs_folder() / f"{option.removeprefix('+').replace('=', '/')}.yaml").is_file()
    node, _, name = option.partition("=")[0].removeprefix("clipx.").partition(".")
    if name:
        return name not in {field.name for kind in MODIFIERS[node] for field in fields(kind)}
    return not any(node in parameters_of(METHODS[group_settings(group)["method"]]) for group in groups)


def test_every_option_that_a_forks_option_becomes_exists():
    forks = re.findall(r"(?m)^### .* \([\w-]+/[\w-]+\)$", PAGE)
    assert len(forks) == 4
    for fork in forks:
        text = PAGE.split(f"\n{fork}\n")[1].split("\n#")[0]
        options = [span for span in spans(text) if re.match(r"\+?clipx[./=]", span)]
        groups = {option.partition("=")[2] for option in options if option.startswith("+clipx=")}
        assert options and [option for option in options if is_unknown(option, groups)] == [], fork
    unknown_options = ("clipx.alhpa=3", "clipx.select.share=1", "+clipx=acpi", "+clipx/select=none")
    assert all(is_unknown(option, {"acpo"}) for option in unknown_options)
    assert not is_unknown("clipx.update.eta=1", set())
