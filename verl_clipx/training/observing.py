"""What only observes a run: once the run has begun, it does not end it."""

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

# Keys under which the worker tells the trainer's process something among a rollout batch's metrics: the fingerprint of
# each update, and what is off. The second is the beginning of a key, and the name of what is off follows.
UPDATES = "clipx_updates"
OFF = "clipx_off/"


class Observers:
    """Everything in one process that only observes a run. Each function that observes is called under a name.

    The first exception under a name is logged, and from then on nothing is called under that name: it is off.

    Attributes:
        off: the names that are off.
    """

    def __init__(self) -> None:
        self.off: set[str] = set()
        # Whether exceptions under any name no longer end the run, and the names of which this holds in any case.
        self._has_begun = False
        self._begun_names: set[str] = set()

    def begin(self, *names: str) -> None:
        """Let exceptions no longer end the run: under these names, or under all names if none is given."""
        if not names:
            self._has_begun = True
        self._begun_names.update(names)

    def run(self, name: str, function: Callable[[], Any], otherwise: Any = None) -> Any:
        """Call a function, unless its name is off.

        Args:
            name: what the message of a failure calls the function, such as "the traces".
            function: observes the run.
            otherwise: what is returned if the function fails or its name is off.

        Returns:
            What the function returns, or `otherwise`.

        Raises:
            Exception: the function's own, before `begin`: a run whose observers fail from the start should stop at
                once.
        """
        if name in self.off:
            return otherwise
        try:
            return function()
        except Exception:
            if not self._has_begun and name not in self._begun_names:
                raise
            self.fail(name)
            return otherwise

    def fail(self, name: str) -> None:
        """Switch a name off, and log the exception that is being handled."""
        self.off.add(name)
        logger.exception("clipx: %s failed; training goes on without it. This is said once.", name)
