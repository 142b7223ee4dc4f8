"""What the tests of all methods have to know of one method: it stands in the method's own test, test_<method>.py.

A test may state, as names of its module:

    PUBLISHED
        needed: from each group of the method to the values that its paper or release publishes
    VARIANTS
        settings that no group has, with which the method must keep the contract too
    GOLDEN
        from the name of a reference in golden/manifest.json to its `Setup`
    SAME_IN_VERL
        from a name to the settings under which verl has the same loss, a `SameInVerl`
    check_training
        a function of a training's metrics: checks what it must show besides what every method's does
    PARAMETERS_IN_TRAINING
        parameters with which a training has tokens in every region that the method can reach
    OVERRIDES_IN_TRAINING
        overrides of that training, without which its few steps would not show what is checked
    VALUES_BESIDE_AN_END
        from a parameter and an end of its range, with which the group's other values are refused, to other values with
        which the method trains at that end
    NEVER_VALID
        pairs of a parameter and an end of its range that is refused whatever the other parameters are
    REFUSED_INSTEAD
        from a parameter to those that a refusal of one of its ends names in its place
    ALL_AT_AN_END
        from 0 (the lower ends) or 1 (the upper ones) to values with which all other parameters at that end train
    DRAWS_TOKENS
        true if the method draws tokens, so that a token's place decides whether it has a gradient, even at ratio 1
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
