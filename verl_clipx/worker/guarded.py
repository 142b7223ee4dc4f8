"""An observer that ends no run: after its first rollout batch, an exception turns it off."""

from collections.abc import Callable
from typing import Any

from verl_clipx.common.files import EMPTY
from verl_clipx.common.observing import Part
from verl_clipx.worker.step import Observer


class Guarded:
    """Calls an observer that takes part in no collective, as a part of the run, which may be off on one rank alone."""

    def __init__(self, observer: Observer, part: Part):
        self.observer, self._part = observer, part

    @property
    def finished(self) -> bool:
        """Whether it is not called any more."""
        return self._part.off or self.observer.finished

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *of: self._part.run(lambda: getattr(self.observer, method)(*of), EMPTY)
