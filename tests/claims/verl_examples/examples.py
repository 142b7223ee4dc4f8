"""verl's example scripts: their command lines, and what came of each with a group of the plugin's.

overrides.json is what scripts/verl_example_overrides.py prints. Beside verl 0.9.1, outcomes.json was written by

    python -m tests.claims.verl_examples.examples > tests/claims/verl_examples/outcomes.json

and read line by line. outcomes_main.json has the lines that the same command printed differently beside verl's main.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from packaging.version import Version

from tests.claims.configuration import ACTOR
from tests.composition import by_hydra
from verl_clipx.common.verl_version import verl_version
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.run.config import completed
from verl_clipx.run.start import named_keys, resolve_into_config

HERE = Path(__file__).parent
GROUPS = ("grpo", "acpo")
# The verls beside which the examples were composed.
RELEASE = "0.9.1"
MAIN = "main"
# What is written down of a method.
SHOWN = {"grpo": ("clip_low", "clip_high", "dual_clip"), "acpo": ("alpha", "epsilon_base", "dual_clip")}


class Example(NamedTuple):
    """A start of verl's main by a script of verl's repository, in the revisions that have it with these arguments."""

    script: str
    revisions: tuple[str, ...]
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of an outcome."""
        return f"{self.script} ({', '.join(self.revisions)})"


@cache
def examples() -> tuple[Example, ...]:
    """All of overrides.json."""
    commands = json.loads((HERE / "overrides.json").read_text())["commands"]
    return tuple(
        Example(command["script"], tuple(command["revisions"]), tuple(command["arguments"])) for command in commands
    )


@cache
def outcomes(verl: str = RELEASE) -> dict[str, dict[str, str]]:
    """Returns what came of each example beside a verl, `RELEASE` or `MAIN`.

    It is an example's name to group to outcome, or to `alone` and why it does not compose.
    """
    written = json.loads((HERE / "outcomes.json").read_text())
    if verl == MAIN:
        written |= json.loads((HERE / "outcomes_main.json").read_text())
    return written


def outcomes_here() -> dict[str, dict[str, str]]:
    """Returns what came of each example beside the verl that Python would import."""
    return outcomes(RELEASE if Version(verl_version()).release < (0, 10) else MAIN)


def outcomes_of(example: Example) -> dict[str, str]:
    """What comes of an example with each group, composed as verl's main does, or `alone` and why it doesn't compose."""
    try:
        _compose(example.arguments)
    except HydraException as error:
        return {"alone": str(error).splitlines()[0]}
    return {group: _outcome([*example.arguments, f"+clipx={group}"], group) for group in GROUPS}


def _compose(arguments: Sequence[str]) -> DictConfig:
    """verl's configuration, under the name that --config-name gives; --config-path always names verl's own folder."""
    options = dict(word.split("=", 1) for word in arguments if word.startswith("--"))
    name = options.get("--config-name", "ppo_trainer")
    return by_hydra(name, *(word for word in arguments if not word.startswith("--")))


def _outcome(overrides: list[str], group: str) -> str:
    """The method's bounds and the keys that are not used, or the keys that are refused."""
    config = _compose(overrides)
    try:
        decision = resolve_into_config(config, named=named_keys(overrides), group=group)
    except Refusal as refusal:
        return f"refused: {', '.join(part.key.removeprefix(f'{ACTOR}.') for part in refusal.all)}"
    node = completed(OmegaConf.to_container(config.clipx))
    values = {name: "null" if node[name] is None else f"{node[name]:g}" for name in SHOWN[group]}
    bounds = ", ".join(f"{name}={value}" for name, value in values.items())
    unused = ", ".join(key.removeprefix(f"{ACTOR}.") for key in decision.record.loss.unused)
    return f"{bounds}{unused and f'; not used: {unused}'}"


def main() -> None:
    """Prints outcomes.json."""
    lines = (f" {json.dumps(example.name)}: {json.dumps(outcomes_of(example))}" for example in examples())
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main()
