"""Checks that a loss of your own keeps the contract, and says for each check whether it is kept, and why not."""

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from verl_clipx.losses.applying.user_method import find_method
from verl_clipx.losses.contract import contract
from verl_clipx.losses.methods import Method

UNSEEN = (
    "Not seen: what changes after more calls, with the time, the environment or the tensors' layout in memory; narrow "
    "bands of the ratio or the probability; statistics that leave out late tokens; other weights on an accelerator or "
    "in batches of more than ten thousand tokens, where only waiting is looked for; waiting in batches of one certain "
    "size, for a stream or event of CUDA, and in copies that a library outside PyTorch makes."
)


FOLLOWS_THE_RATIO = "The weight follows the ratio of the current to the old policy."
IGNORES_THE_RATIO = (
    "F is the same at every ratio, as in REINFORCE, so that nothing limits how far an update goes. If that isn't what "
    "you mean, multiply by the ratio, or take ratio or bounds into the weight."
)


class Checked(NamedTuple):
    """A check in one sentence, and why it failed, with the file and line of the loss, was skipped or is remarked on."""

    check: str
    outcome: Literal["kept", "failed", "skipped", "remark"]
    why: str = ""


def check_method(method: Method) -> Iterator[Checked]:
    """Checks the contract on a method.

    An error that the loss itself raises is its own finding, and ends the checks. The compiled loss is checked last,
    only if no other check failed. A weight that ignores the ratio gets a remark, which is no failure.
    """
    failed = False
    for check in (*contract.CHECKS, *contract.COMPILED_CHECKS):
        name = first_line(check)
        lifted = [flag for flag in contract.LIFTED_BY.get(check, ()) if getattr(method, flag)]
        if check in contract.COMPILED_CHECKS and failed:
            return
        try:
            if lifted:
                raise contract.NotChecked(f"{lifted[0]}=True")
            check(method)
            yield Checked(name, "kept")
        except contract.NotChecked as reason:
            yield Checked(check=name, outcome="skipped", why=str(reason))
        except AssertionError as failure:
            failed = True
            yield Checked(check=name, outcome="failed", why=f"{place_of(method, failure)}{failure}")
            # The others would only repeat it.
            if check is contract.one_weight_per_token:
                return
        # A loss that ends the process would end it without a verdict.
        except (Exception, SystemExit) as failure:
            computing = contract.the_loss_can_be_computed
            message = f"{place_of(method, failure)}{type(failure).__name__}: {failure}"
            if check is not computing:
                message += f" This is what happened while checking: {name}"
            yield Checked(check=first_line(computing), outcome="failed", why=message)
            return
        if check is contract.weight_is_the_same_at_each_call and contract.ignores_the_ratio(method):
            yield Checked(check=FOLLOWS_THE_RATIO, outcome="remark", why=IGNORES_THE_RATIO)


def first_line(check: Callable[[Method], None]) -> str:
    """Says what a check is about, in one sentence."""
    return (check.__doc__ or check.__name__).strip().partition("\n")[0]


def place_of(method: Method, failure: BaseException) -> str:
    """Returns the file and line of a loss, followed by a colon; empty for a loss that no file defines.

    The line is the one that raised or, if no line of the file did, the first line of the loss's definition.
    """
    kind = type(method)
    try:
        # This is the function if the class was made from a decorated function.
        defined = attrgetter(kind.__qualname__)(sys.modules[kind.__module__])
        file = inspect.getsourcefile(defined)
        _, line = inspect.getsourcelines(defined)
    except (AttributeError, KeyError, OSError, TypeError):
        return ""
    for frame in traceback.extract_tb(failure.__traceback__):
        if frame.filename == file:
            # The last of them is where it was raised.
            line = frame.lineno
    return f"{file}:{line}: "


def check_loss(loss: type[Method] | Callable[..., Any]) -> None:
    """Checks the contract on a loss of your own, for use in your tests.

    Args:
        loss: a subclass of `Method`, or a function decorated with `register_loss`.

    Raises:
        AssertionError: the loss breaks the contract; names each check that failed.
        ValueError: `loss` is neither of the two, or it cannot be built.
    """
    failures = [f"{name} {why}" for name, outcome, why in check_method(find_method(loss)()) if outcome == "failed"]
    if failures:
        raise AssertionError("\n".join(failures))
