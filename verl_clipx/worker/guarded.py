"""An observer that ends no run: after its first rollout batch, an exception turns it off."""

from collections.abc import Mapping
from typing import Any

from verl_clipx.common.files import EMPTY
from verl_clipx.common.observing import Part
from verl_clipx.worker.step import Observer, RolloutBatch


class Guarded(Observer):
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

    def begin_rollout_batch(self, *of: Any) -> None:
        self._part.run(lambda: self.observer.begin_rollout_batch(*of))

    def begin_update(self, *of: Any) -> None:
        self._part.run(lambda: self.observer.begin_update(*of))

    def end_micro_batch(self, *of: Any) -> None:
        self._part.run(lambda: self.observer.end_micro_batch(*of))

    def end_update(self, *of: Any) -> None:
        self._part.run(lambda: self.observer.end_update(*of))

    def end_rollout_batch(self, batch: RolloutBatch) -> Mapping[str, list[float]]:
        metrics = self._part.run(lambda: self.observer.end_rollout_batch(batch), EMPTY)
        self._part.armed = True
        return metrics

    def flush(self) -> None:
        self._part.run(self.observer.flush)
