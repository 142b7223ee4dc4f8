"""What only observes a run: once the run has begun, it does not end it."""

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

# What the worker tells the trainer's process among a rollout batch's metrics: the fingerprint of each update, and, each
# in a key of its own, the names of what is off.
UPDATES = "clipx_updates"
OFF = "clipx_off/"


class Observers:
    """Everything in one process that only observes a run, each under a name that its message has.

    The first exception under a name is said, and everything of that name is off from then on.

    Attributes:
        off: the names that are off.
    """

    def __init__(self) -> None:
        self.off: set[str] = set()
        self._has_begun = False
        self._begun: set[str] = set()

    def begin(self, *names: str) -> None:
        """Has exceptions no longer end the run: under the given names, or under all of them if none is given."""
        if not names:
            self._has_begun = True
        self._begun.update(names)

    def run(self, name: str, function: Callable[[], Any], otherwise: Any = None) -> Any:
        """Calls a function and returns what it returns, or `otherwise` where it fails or its name is off.

        Args:
            name: what the message calls it, such as "the traces".

        Raises:
            Exception: the function's own, before `begin`: a run that cannot start is told at once.
        """
        if name in self.off:
            return otherwise
        try:
            return function()
        except Exception:
            if not self._has_begun and name not in self._begun:
                raise
            self.fail(name)
            return otherwise

    def fail(self, name: str) -> None:
        """Switches a name off, and says the exception that is being handled."""
        self.off.add(name)
        logger.exception("clipx: %s failed; training goes on without it. This is said once.", name)
