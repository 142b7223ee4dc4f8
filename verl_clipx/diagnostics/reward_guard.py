"""Watches a user's reward function: where it raises, returns something that is no score, or hangs, a message names the
row. verl itself drops the row's prompt with a message in an agent loop's output, or fails later on a tensor.
"""

import inspect
import logging
import numbers
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from wrapt import wrap_function_wrapper

logger = logging.getLogger(__name__)

# Seconds after which a reward that has not returned is named; those of mathematics take at most 5.
PATIENCE = 60.0


def install(reward: ModuleType) -> None:
    """Wraps `get_custom_reward_fn` of verl.trainer.ppo.reward, which loads the function."""
    if hasattr(reward, "get_custom_reward_fn"):
        wrap_function_wrapper(reward, "get_custom_reward_fn", _guarded)


def _guarded(wrapped: Any, _: Any, positional: tuple, named: dict[str, Any]) -> Callable | None:
    function = wrapped(*positional, **named)
    config = positional[0] if positional else named["config"]
    if function is None:
        return None
    chosen = config.reward.custom_reward_function
    return guarded(function, f"{chosen.path}:{chosen.name}")


def guarded(function: Callable, name: str) -> Callable:
    """A reward function that names the row where it fails. It can be pickled if the given one can.

    Args:
        function: a coroutine function or a plain one, which verl calls by keyword.
        name: what messages call it.
    """
    return partial(score_later if inspect.iscoroutinefunction(function) else score, function, name)


def score(function: Callable, name: str, /, *rows: Any, **row: Any) -> Any:
    """What a reward function returns for a row.

    Raises:
        RuntimeError: it raised, or returned no score; names the row.
    """
    with _named(name, row):
        return _checked(function(*rows, **row))


async def score_later(function: Callable, name: str, /, *rows: Any, **row: Any) -> Any:
    """As `score`, for a coroutine function."""
    with _named(name, row):
        return _checked(await function(*rows, **row))


class NoScore(TypeError):
    """A reward function returned something that is no score; the message says what."""


def _checked(result: Any) -> Any:
    if isinstance(result, Mapping) and "score" not in result:
        raise NoScore(f"it returned a dict without score ({', '.join(map(str, result)) or 'an empty one'})")
    found = result["score"] if isinstance(result, Mapping) else result
    # A tensor's or an array's single number is one, as for verl.
    if not isinstance(found, numbers.Real) and not (hasattr(found, "item") and getattr(found, "size", None) != 0):
        raise NoScore(f"it returned {found!r:.60} ({type(found).__name__}) as the score, which must be a number")
    return result


class Watcher:
    """Warns of rows whose reward has not returned in time, once for each; one thread watches all that are under way.

    Args:
        patience: seconds after which it warns.
    """

    def __init__(self, patience: float):
        self._patience = patience
        self._since: dict[object, tuple[float, tuple[Any, ...]]] = {}
        self._thread: threading.Thread | None = None

    @contextmanager
    def over(self, *told: Any) -> Iterator[None]:
        """Watches a row while the block runs.

        Args:
            told: the function's name, the row and the response, for the message.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="clipx-reward", daemon=True)
            self._thread.start()
        row = object()
        self._since[row] = time.monotonic(), told
        try:
            yield
        finally:
            self._since.pop(row, None)

    def _watch(self) -> None:
        while True:
            time.sleep(self._patience / 4)
            for row, (since, told) in list(self._since.items()):
                if time.monotonic() - since > self._patience and self._since.pop(row, None):
                    logger.warning(HANGS, told[0], self._patience, *told[1:])


WATCHER = Watcher(PATIENCE)


@contextmanager
def _named(name: str, row: Mapping[str, Any]) -> Iterator[None]:
    """Names the row where the block raises or hangs."""
    extra = row.get("extra_info")
    # verl's trainers give a numpy.str_.
    where = f"data_source={str(row.get('data_source'))!r}, ground_truth={row.get('ground_truth')!r:.60}"
    if isinstance(extra, Mapping) and "index" in extra:
        where += f", extra_info.index={extra['index']!r}"
    try:
        with WATCHER.over(name, where, row.get("solution_str")):
            yield
    except Exception as error:
        problem = str(error) if isinstance(error, NoScore) else f"it raised {type(error).__name__}: {error}"
        raise RuntimeError(f"clipx: the reward {name} has no score for a row ({where}): {problem}") from error


HANGS = (
    "clipx: the reward %s has not returned for %g s (%s), and the step waits for it. The response: %r. If it never "
    "returns, end the run: it goes on from its last checkpoint."
)
