"""Calls a function in a fork of this process, which alone sees what the function writes to memory."""

import multiprocessing
import os
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

# How long the fork may take. A loss on the contract's few tokens takes milliseconds.
SECONDS = 60


class NoAnswer(Exception):
    """The fork gave no answer; the message says why."""


def call_in_fork(function: Callable[[], list[float]]) -> list[float]:
    """Call a function in a fork of this process.

    The fork begins with everything that this process has written so far. What the function writes to memory is seen by
    the fork alone.

    Args:
        function: takes nothing and returns numbers, which the fork sends back.

    Returns:
        What the function returned.

    Raises:
        NoAnswer: the platform has no fork, the function raised an error, or the fork ended without an answer or did not
            answer in time.
    """
    if not hasattr(os, "fork"):
        raise NoAnswer("this platform cannot copy a process (fork)")
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_answer, args=(function, sender))
    with warnings.catch_warnings():
        # Python warns about forking a process with threads. The fork has none of these threads, and starts none.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()
    try:
        if not receiver.poll(SECONDS):
            raise NoAnswer(f"a copy of the process did not answer within {SECONDS} seconds")
        answer = receiver.recv()
    except EOFError:
        raise NoAnswer("a copy of the process ended without an answer") from None
    finally:
        receiver.close()
        process.kill()
        process.join()
    # The text of an error, from `send_answer`.
    if isinstance(answer, str):
        raise NoAnswer(f"the loss could not be computed in a copy of the process: {answer}")
    return answer


def send_answer(function: Callable[[], list[float]], sender: Connection) -> None:
    """Send what the function returns or, if it raises an error, the error as text. This runs in the fork."""
    # The fork has none of torch's worker threads, and a computation that waited for one would never end.
    torch.set_num_threads(1)
    try:
        answer = function()
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}"
    sender.send(answer)
