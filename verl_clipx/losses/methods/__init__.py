"""The methods, one file each. Importing a file registers its method, as it registers a user's own."""

from importlib import import_module
from pkgutil import iter_modules

from verl_clipx.losses.base.method import METHODS, Bounds, FixedBounds, Method, method_named

__all__ = ["BUILT_IN", "METHODS", "Bounds", "FixedBounds", "Method", "method_named"]

for _module in sorted(module.name for module in iter_modules(__path__)):
    import_module(f"{__name__}.{_module}")

BUILT_IN = tuple(METHODS)
