"""Parts of a run that only observe it: once training has begun, none of them ends it."""

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class Part:
    """A part of a run that only observes. Its first exception after `armed` is said, and it is off from then on.

    Args:
        name: what the message calls it, such as "the traces".
    """

    def __init__(self, name: str):
        self.name = name
        self.armed = False
        self.off = False

    def run(self, function: Callable[[], Any], otherwise: Any = None) -> Any:
        """Calls a function and returns what it returns, or `otherwise` where it fails or the part is off.

        Raises:
            Exception: the function's own, before the part is armed: a run that cannot start is told at once.
        """
        if self.off:
            return otherwise
        try:
            return function()
        except Exception:
            if not self.armed:
                raise
            self.fail()
            return otherwise

    def fail(self) -> None:
        """Turns the part off, and says the exception that is being handled."""
        self.off = True
        logger.exception("clipx: %s failed; training goes on without it. This is said once.", self.name)
