"""Checks that a loss of your own keeps the contract, and says for each check whether it is kept and, if not, why."""

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from verl_clipx.losses.applying.user_method import find_method
from verl_clipx.losses.contract import contract
from verl_clipx.losses.methods import Method

# What no check of the contract can find. `clipx check-loss` prints it last.
UNSEEN = (
    "Not seen: what changes after more calls, with the time, the environment or the tensors' layout in memory; narrow "
    "bands of the ratio or the probability; statistics that leave out late tokens; other weights on an accelerator or "
    "in batches of more than ten thousand tokens, where only waiting is looked for; waiting in batches of one certain "
    "size, for a stream or event of CUDA, and in copies that a library outside PyTorch makes."
)

# The remark about a weight that ignores the ratio: the sentence that does not hold of it, and the remark's text.
FOLLOWS_THE_RATIO = "The weight follows the ratio of the current to the old policy."
IGNORES_THE_RATIO = (
    "F is the same at every ratio, as in REINFORCE, so that nothing limits how far an update goes. If that isn't what "
    "you mean, multiply by the ratio, or take ratio or bounds into the weight."
)


class Checked(NamedTuple):
    """The outcome of a check.

    Args:
        check: what was checked, in one sentence.
        outcome: whether the loss keeps it.
        why: why the check failed, with the file and line of the loss, why it was skipped, or what the remark is; empty
            if the check is kept.
    """

    check: str
    outcome: Literal["kept", "failed", "skipped", "remark"]
    why: str = ""


def check_method(method: Method) -> Iterator[Checked]:
    """Check the contract on a method, and yield the outcome of each check.

    If the loss itself raises an error, the error is reported as a failed check of its own, and no further check is
    made. The compiled loss is checked last, and only if no other check failed. A weight that ignores the ratio gets a
    remark, which is no failure.
    """
    failed = False
    for check in (*contract.CHECKS, *contract.COMPILED_CHECKS):
        if check in contract.COMPILED_CHECKS and failed:
            return
        name = first_line(check)
        flags_that_lift = [flag for flag in contract.LIFTED_BY.get(check, ()) if getattr(method, flag)]
        try:
            if flags_that_lift:
                raise contract.NotChecked(f"{flags_that_lift[0]}=True")
            check(method)
            yield Checked(check=name, outcome="kept")
        except contract.NotChecked as reason:
            yield Checked(check=name, outcome="skipped", why=str(reason))
        except AssertionError as failure:
            failed = True
            yield Checked(check=name, outcome="failed", why=f"{find_place(method, failure)}{failure}")
            # The other checks would only repeat this failure.
            if check is contract.one_weight_per_token:
                return
        # SystemExit too: a loss that raises it would otherwise end the process before there is a verdict.
        except (Exception, SystemExit) as failure:
            computing = contract.the_loss_can_be_computed
            message = f"{find_place(method, failure)}{type(failure).__name__}: {failure}"
            if check is not computing:
                message += f" It happened while this was checked: {name}"
            yield Checked(check=first_line(computing), outcome="failed", why=message)
            return
        if check is contract.weight_is_the_same_at_each_call and contract.ignores_the_ratio(method):
            yield Checked(check=FOLLOWS_THE_RATIO, outcome="remark", why=IGNORES_THE_RATIO)


def first_line(check: Callable[[Method], None]) -> str:
    """Return what a check is about, in one sentence."""
    return (check.__doc__ or check.__name__).strip().partition("\n")[0]


def find_place(method: Method, failure: BaseException) -> str:
    """Return the file and line of a loss, followed by a colon and a space, or an empty text if they cannot be found.

    The line is the innermost one of the loss's file in the traceback or, if the traceback has none, the first line of
    the loss's definition.
    """
    method_class = type(method)
    try:
        # This is the function if the class was made from a decorated function.
        source_object = attrgetter(method_class.__qualname__)(sys.modules[method_class.__module__])
    except (AttributeError, KeyError):
        # The loss was defined inside a function.
        source_object = method_class
    try:
        file = inspect.getsourcefile(source_object)
    except (OSError, TypeError):
        return ""
    lines_of_file = []
    for frame in traceback.extract_tb(failure.__traceback__):
        if frame.filename == file:
            lines_of_file.append(frame.lineno)
    if lines_of_file:
        # A traceback ends with its innermost frame.
        return f"{file}:{lines_of_file[-1]}: "
    try:
        _, first_line_of_definition = inspect.getsourcelines(source_object)
    except (OSError, TypeError):
        return ""
    return f"{file}:{first_line_of_definition}: "


def check_loss(loss: type[Method] | Callable[..., Any]) -> None:
    """Check the contract on a loss of your own, for use in your tests.

    Args:
        loss: a subclass of `Method`, or a function decorated with `register_loss`.

    Raises:
        AssertionError: the loss breaks the contract; the message names each check that failed.
        ValueError: `loss` is neither of the two, or it cannot be built.
    """
    method = find_method(loss)()
    failures = []
    for checked in check_method(method):
        if checked.outcome == "failed":
            failures.append(f"{checked.check} {checked.why}")
    if failures:
        raise AssertionError("\n".join(failures))
