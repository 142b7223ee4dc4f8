"""Facts about the methods, taken from their classes."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from verl_clipx.methods import BUILT_IN, METHODS, Method
from verl_clipx.run.config import AROUND, Observe, parameters_of


@functools.cache
def facts() -> dict[str, Any]:
    """Those of every built-in method, of the parameters of all, and of observe. Callers must not change them."""
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
    """The name, default, allowed values, meaning and source of each parameter."""
    return [
        {
            "name": field.name,
            "default": field.default,
            "allowed": field.metadata["allowed"].description,
            "meaning": field.metadata["meaning"],
            "source": field.metadata["source"],
        }
        for field in fields
    ]
