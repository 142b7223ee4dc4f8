"""What the driver of a run hands to its workers, which see no more of verl's configuration than the actor's part."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from verl_clipx.run.config import Observe, Settings
from verl_clipx.run.record import RunRecord


@dataclass(frozen=True)
class Handover:
    """What was resolved once, in the node `run` of verl's policy loss.

    Args:
        record: the run's record as far as it is known before the run starts. Its texts and its line are whole, and it
            has no configuration and no hash of content; the record beside the log keeps less of a text.
        trace_folder: where traces go unless clipx.trace.folder says so, or None if nothing is traced.
    """

    record: RunRecord = field(default_factory=RunRecord)
    trace_folder: str | None = None

    def complete(self, settings: Settings | Observe) -> Settings | Observe:
        """The settings with what they get from the run: taken-over values, the traces' folder, verl's compile switch.

        Args:
            settings: as the clipx node says.
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
