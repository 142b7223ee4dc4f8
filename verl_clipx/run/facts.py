"""The facts about a run beside its loss: resolved once, and carried to the workers in the configuration's own node."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from verl_clipx.run.config import Observe, Settings
from verl_clipx.run.keys import LOSS_AGG_MODE, TORCH_COMPILE, WARMUP
from verl_clipx.run.schedule import Schedule


@dataclass(frozen=True)
class RunFacts:
    """The parts of a run's configuration that its loss, its line and its receipt depend on.

    What is only known later (total steps, ranks, precision) is no part of it.

    Args:
        group: the group that was chosen (+clipx=<group>), or None if unknown.
        taken: from each of the method's parameters that takes over a key of verl's to that `key` (below
            actor_rollout_ref.actor), its value as `given`, and the parameter's `value`.
        unused: verl's clip keys, in full, that are set and that the method does not read, with their values.
        trace_folder: where traces go unless clipx.trace.folder says so, or None if nothing is traced.
        options: the keys of `keys.READ` with their values.
        schedule: what the updates on a rollout batch consist of.
        untested: the run's options that no test has run anywhere.
        identity: hashes of the settings and the sources in the driver, with which each worker compares its own.
        line: what the run prints of itself, in the driver and in its workers.
    """

    group: str | None = None
    taken: dict[str, dict[str, Any]] = field(default_factory=dict)
    unused: dict[str, Any] = field(default_factory=dict)
    trace_folder: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=Schedule)
    untested: list[str] = field(default_factory=list)
    identity: dict[str, str] = field(default_factory=dict)
    line: str = ""

    def complete(self, settings: Settings | Observe) -> Settings | Observe:
        """The settings with what they get from the run: taken-over values, the traces' folder, verl's compile switch.

        Args:
            settings: as the clipx node says.
        """
        changes: dict[str, Any] = {}
        if settings.trace is not None and settings.trace.folder is None:
            changes["trace"] = dataclasses.replace(settings.trace, folder=self.trace_folder)
        if isinstance(settings, Settings) and settings.compile == "auto" and self.uncompiled_by:
            changes["compile"] = False
        if self.taken and isinstance(settings, Settings):
            values = {parameter: source["value"] for parameter, source in self.taken.items()}
            changes["method"] = dataclasses.replace(settings.method, **values)
        return dataclasses.replace(settings, **changes)

    @property
    def loss_agg_mode(self) -> str:
        """verl's aggregation mode."""
        return self.options.get(LOSS_AGG_MODE, "token-mean")

    @property
    def critic_warmup(self) -> int:
        """Training steps before this one train only the critic."""
        return self.options.get(WARMUP) or 0

    @property
    def uncompiled_by(self) -> str | None:
        """The first of verl's own switches of torch.compile that is off, which clipx.compile=auto follows, or None."""
        return next((key for key in TORCH_COMPILE if self.options.get(key) is False), None)
