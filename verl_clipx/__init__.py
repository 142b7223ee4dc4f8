"""verl-clipx: policy losses with adaptive and soft clipping for veRL.

Importing this package is deliberately cheap, since every process that imports verl imports it.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "register_loss": "verl_clipx.losses.applying.user_method",
    "check_gradient": "verl_clipx.losses.check_gradient",
    "check_loss": "verl_clipx.losses.contract.runner",
    "clip_loss": "verl_clipx.losses.clip_loss",
    "Bounds": "verl_clipx.losses.methods",
    "FixedBounds": "verl_clipx.losses.methods",
    "METHODS": "verl_clipx.losses.methods",
    "Method": "verl_clipx.losses.methods",
    "Tokens": "verl_clipx.losses.base.tokens",
    "of_decision": "verl_clipx.losses.base.metric",
    "of_rollout_batch": "verl_clipx.losses.base.metric",
    "parameter": "verl_clipx.losses.base.parameters",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
