"""Calls a function in a copy of this process, in which nothing that the function remembers has been written yet."""

import multiprocessing
import os
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

# A loss on the contract's few tokens takes milliseconds.
SECONDS = 60


class NoAnswer(Exception):
    """The copy of this process gave no answer; says why."""


def in_a_copy(function: Callable[[], list[float]]) -> list[float]:
    """Calls a function in a fork of this process; what it writes to memory is seen by the fork alone.

    Args:
        function: takes nothing and returns numbers, which the fork sends back.

    Returns:
        What the function returned.

    Raises:
        NoAnswer: the platform has no fork, the function raised an error, or the copy did not answer in time.
    """
    if not hasattr(os, "fork"):
        raise NoAnswer("this platform cannot copy a process (fork)")
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(function, sender))
    with warnings.catch_warnings():
        # Python warns of threads, which the copy does not have; it starts none either.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()
    try:
        if not receiver.poll(SECONDS):
            raise NoAnswer(f"a copy of the process did not answer within {SECONDS} seconds")
        numbers = receiver.recv()
    except EOFError:
        raise NoAnswer("a copy of the process ended without an answer") from None
    finally:
        receiver.close()
        process.kill()
        process.join()
    if numbers is None:
        raise NoAnswer("the loss could not be computed in a copy of the process")
    return numbers


def answer(function: Callable[[], list[float]], sender: Connection) -> None:
    """Send what the function returns, or None if it raises an error; runs in the copy."""
    # Threads of the original do not exist here, and waiting for one would not end.
    torch.set_num_threads(1)
    try:
        numbers = function()
    except BaseException:
        numbers = None
    sender.send(numbers)
