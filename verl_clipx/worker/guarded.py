"""An observer that ends no run: after its first rollout batch, an exception turns it off."""

from collections.abc import Callable
from typing import Any

from verl_clipx.common.files import EMPTY
from verl_clipx.common.observing import Part
from verl_clipx.worker.step import Observer


class Guarded:
    """Calls an observer that takes part in no collective, so that it may be off on one rank alone.

    Args:
        name: what the message calls it.
    """

    def __init__(self, observer: Observer, name: str):
        self.observer, self._part = observer, Part(name)

    @property
    def finished(self) -> bool:
        """Whether it is not called any more."""
        return self._part.off or self.observer.finished

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*of: Any) -> Any:
            returned = self._part.run(lambda: getattr(self.observer, method)(*of), EMPTY)
            self._part.armed |= method == "end_rollout_batch"
            return returned

        return call
