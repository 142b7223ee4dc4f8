"""Facts about the methods, taken from their classes: `python -m verl_clipx.driver.facts` writes them to methods.json.

Importing the classes imports torch, which takes seconds. Therefore the commands that list methods read the file, and a
test compares the file with the classes.
"""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from verl_clipx.common.files import write_text
from verl_clipx.driver.config import AROUND, Observe, parameters_of
from verl_clipx.driver.listing import RECORDED
from verl_clipx.methods import BUILT_IN, METHODS, Method


def facts_of_classes() -> dict[str, Any]:
    """The facts of every built-in method, the parameters that all methods share, and those of observe."""
    return {
        "methods": [facts_of(METHODS[name]) for name in BUILT_IN],
        "around": described(AROUND.values()),
        "observe": described(dataclasses.fields(Observe)),
    }


def facts_of(method: type[Method]) -> dict[str, Any]:
    """A method's name, summary, source, module, and its own parameters."""
    own = [field for name, field in parameters_of(method).items() if name not in AROUND]
    return {
        "name": method.name,
        "summary": method.summary(),
        "source": method.source,
        "module": method.__module__,
        "parameters": described(own),
    }


def described(fields: Iterable[dataclasses.Field]) -> list[dict[str, Any]]:
    """The name, default, allowed values and meaning of each parameter."""
    return [
        {
            "name": field.name,
            "default": field.default,
            "allowed": field.metadata["allowed"].description,
            "meaning": field.metadata["meaning"],
        }
        for field in fields
    ]


if __name__ == "__main__":
    write_text(RECORDED, json.dumps(facts_of_classes(), indent=1, ensure_ascii=False) + "\n")
