"""Runs a check in a process of its own, because a loss that ends its process must not end `clipx check-loss` too."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Literal

# What the child sends: a row that the check yielded, an error that the check raised, or that the check is done.
Kind = Literal["row", "error", "done"]


class EndedEarly(Exception):
    """The process of a check ended before the check did. The message says how."""


def in_child(check: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Yield what a check yields in a fork of this process, or in this process where the platform has no fork.

    Args:
        check: yields values that can be pickled.

    Raises:
        EndedEarly: the fork ended before the check did, whatever its exit code.
        ValueError: the check raised a ValueError or an OSError. The message is the same.
        ModuleNotFoundError: the check raised it.
    """
    if not hasattr(os, "fork"):
        yield from check()
        return
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_rows, args=(check, sender))
    process.start()
    sender.close()
    try:
        while True:
            kind, content = receive(receiver, process)
            if kind == "done":
                return
            if kind == "error":
                raise content
            yield content
    finally:
        receiver.close()
        process.kill()
        process.join()


def receive(receiver: Connection, process: Any) -> tuple[Kind, Any]:
    """Return what the child sends next: its kind, and the row or the error.

    Args:
        receiver: this process's end of the pipe.
        process: the child.

    Raises:
        EndedEarly: the child has ended without sending that it is done.
    """
    try:
        return receiver.recv()
    except EOFError:
        process.join()
    code = process.exitcode
    # A signal ended the child if the code is negative.
    how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    raise EndedEarly(
        f"the process of the check ended {how} before there was a verdict. "
        "Remove what ends a process from the loss and its module."
    ) from None


def send_rows(check: Callable[[], Iterator[Any]], sender: Connection) -> None:
    """Send what a check yields, and then that it is done, or the error that it raised. This runs in the child."""
    work_without_threads()
    try:
        for row in check():
            sender.send(("row", row))
    except ModuleNotFoundError as error:
        sender.send(("error", error))
    except (OSError, ValueError) as error:
        sender.send(("error", ValueError(str(error))))
    else:
        sender.send(("done", None))


def work_without_threads() -> None:
    """Make torch and its compiler use this thread alone.

    The threads of the original process do not exist in a fork, and waiting for one would never end.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if "torch._inductor.config" in sys.modules:
        sys.modules["torch._inductor.config"].compile_threads = 1
