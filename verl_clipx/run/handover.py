"""What the driver of a run hands to its workers. They see only the actor's part of verl's configuration."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from verl_clipx.run.config import Observe, Settings
from verl_clipx.run.record import RunRecord


@dataclass(frozen=True)
class Handover:
    """What the driver has resolved of a run; it stands in the node `run` of verl's policy loss.

    Args:
        record: the run's record as far as it is known before the run starts, without the configuration and the hashes
            of content. Texts are whole in it, whereas the record beside the log has hashes of some.
        trace_folder: the folder of the traces if clipx.trace.folder does not name one; None if it does, or if nothing
            is traced.
    """

    record: RunRecord = field(default_factory=RunRecord)
    trace_folder: str | None = None

    def complete(self, settings: Settings | Observe) -> Settings | Observe:
        """Return a clipx node with what it gets from the run.

        That is the values taken over from verl's keys, the folder of the traces, and that verl compiles nothing.

        Args:
            settings: the clipx node as the configuration has it, built.
        """
        loss = self.record.loss
        changes: dict[str, Any] = {}
        if settings.trace is not None and settings.trace.folder is None:
            changes["trace"] = dataclasses.replace(settings.trace, folder=self.trace_folder)
        if isinstance(settings, Settings) and settings.compile == "auto" and loss.uncompiled_by:
            changes["compile"] = False
        if loss.taken and isinstance(settings, Settings):
            values = {parameter: source["value"] for parameter, source in loss.taken.items()}
            changes["method"] = dataclasses.replace(settings.method, **values)
        return dataclasses.replace(settings, **changes)
