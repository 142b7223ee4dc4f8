"""What the tests of all methods have to know of one method: it stands in the method's own test, test_<method>.py.

A test may state, as names of its module:

    PUBLISHED   needed: from each group of the method to the values that its paper or release publishes
    VARIANTS    settings that no group has, with which it must keep the contract too
    GOLDEN      from the name of a reference in golden/manifest.json to its `Setup`
    VERLS       from a name to the settings under which verl has the same loss, an `AsVerl`
    SEEN        what a training with it must show besides what every method's does: a function of the metrics
    SEEN_AS     parameters with which every region that a training reaches is reached
    SEEN_UNDER  overrides without which a few steps don't show it
    ENDS        from a parameter and its end, refused beside the group's other values, to values with which it trains
    NEVER       pairs of a parameter and an end that is refused whatever the others are
    PARTNERS    from a parameter to the one that the refusal of `ENDS` names instead
    TOGETHER    from 0 (the lower ends) or 1 to values with which all parameters at that end train
    DRAWS       true if a token's place decides with others whether it has a gradient, even at ratio 1
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from verl_clipx.losses.methods import BUILT_IN


def fact(method: str, name: str, default: Any) -> Any:
    """What a method's test states under a name, or the default."""
    module = f"{__package__}.test_{method}"
    return getattr(import_module(module), name, default) if find_spec(module) else default


@cache
def facts(name: str) -> dict[Any, Any]:
    """The dictionaries that the methods' tests state under a name, as one."""
    return {key: value for method in BUILT_IN for key, value in fact(method, name, {}).items()}
