"""verl-clipx: policy losses with adaptive and soft clipping for veRL.

The public names are those of `__all__`, which docs/own_loss.md and docs/elsewhere.md show at work; everything else may
move. Importing this package is deliberately cheap, since every process that imports verl imports it. A public name is
imported where it is first used, and needs torch then.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# What `from verl_clipx import NAME` promises, and the module of the losses that has it.
_PUBLIC = {
    # The losses as functions of tensors, a trainer's gradient held against one of them, and every loss by name.
    "clip_loss": "verl_clipx.losses.clip_loss",
    "check_gradient": "verl_clipx.losses.check_gradient",
    "METHODS": "verl_clipx.losses.methods",
    # What a loss of your own is written with: a function, or a class with bounds.
    "register_loss": "verl_clipx.losses.applying.user_method",
    "Method": "verl_clipx.losses.methods",
    "FixedBounds": "verl_clipx.losses.methods",
    "Bounds": "verl_clipx.losses.methods",
    "Tokens": "verl_clipx.losses.base.tokens",
    "Width": "verl_clipx.losses.base.width",
    # Its parameters, and the values that they take.
    "parameter": "verl_clipx.losses.base.parameters",
    "number": "verl_clipx.losses.base.parameters",
    "integer": "verl_clipx.losses.base.parameters",
    "choice": "verl_clipx.losses.base.parameters",
    # Its metrics: of a decision, or of a rollout batch.
    "of_decision": "verl_clipx.losses.base.metric",
    "of_rollout_batch": "verl_clipx.losses.base.metric",
    # What `clipx check-loss` checks of it, for a test of your own.
    "check_loss": "verl_clipx.losses.contract.runner",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
