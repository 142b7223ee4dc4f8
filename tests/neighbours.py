"""Methods that differ from one in a single number, which a check has to tell apart."""

import dataclasses

from verl_clipx.losses.base.method import Method


def neighbours(method: Method, share: float) -> list[Method]:
    """The method with each of its numbers in turn a little larger and a little smaller, a whole number by 1.

    Args:
        share: how far each number is moved, relative to its size.
    """
    near = []
    for name, value in method.parameters.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        for step in (share, -share):
            changed = value + (1 if step > 0 else -1) if isinstance(value, int) else value * (1 + step)
            if changed == value:
                continue
            try:
                near.append(dataclasses.replace(method, **{name: changed}))
            except ValueError:
                # Outside the parameter's range, or in conflict with another parameter.
                continue
    return near
