"""The hooks in verl's trainer. They act in a run with a clipx node; in any other they call verl's function, no more.

`Tracking` is the first of them to see a run's configuration: every trainer makes one before its first step.
"""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_clipx.analysis.runs import keys
from verl_clipx.losses.base.method import NODE
from verl_clipx.training.worker.reports import OFF, UPDATES

if TYPE_CHECKING:
    from verl_clipx.training.worker.fingerprints import BatchHashes


class TrainedRun:
    """A run with a clipx node, in the process of its trainer. verl logs each of its steps to it, after all other logs.

    A step's line in the file log also has `batch`, the fingerprints of its rollout batch, if there are any, and `off`,
    which parts of the run failed and observe it no more.

    Args:
        log: the run's file log, if the plugin keeps one.
    """

    def __init__(self, config: dict[str, Any], log: Path | None):
        from verl_clipx.run.lengths import lengths_of
        from verl_clipx.training.observing import Part
        from verl_clipx.training.trainer.log import open_log
        from verl_clipx.training.trainer.watch import ReceiptCheck, Watch

        # The log, and what the run logged before it was resumed.
        self.file, before = (None, {}) if log is None else open_log(log, config)
        self.longest = lengths_of(config)
        # A reward returns a verdict always or never.
        self.has_verdicts = True
        # Of the rollout batch that is not in the log yet: the hashes of its rows, those of its updates, and the
        # versions of the weights that sampled it.
        self.batch: BatchHashes | None = None
        self.updates: list[int] = []
        self.versions: tuple[int, int] | None = None
        # The parts of the worker that are off.
        self.off: set[str] = set()
        self.fingerprints, self.health = Part("the fingerprints of rollout batches"), Part("the metrics health/*")
        self._receipt, self._rules = ReceiptCheck(config), Part("the rules of clipx.health")
        self._watch = Watch(config, before, stops=config[NODE].get("health") == "stop")
        self._parts, self._lines = (self.fingerprints, self.health, self._rules), Part(f"the log {log}")

    def log(self, data: dict[str, Any], step: int) -> None:
        """Writes a step's metrics to the file log and looks at them; raises RuntimeError if they stop the run."""
        if self.file is not None:
            self._lines.run(lambda: self._write(data, step))
            self._lines.armed = True
        self._receipt.look(data, step)
        stop = self._rules.run(lambda: self._watch.look(data, step))
        if stop is not None:
            raise RuntimeError(stop)
        if keys.STEP in data:
            for part in self._parts:
                part.armed = True

    def _write(self, data: dict[str, Any], step: int) -> None:
        from verl_clipx.training.trainer.log import line_of
        from verl_clipx.training.worker.fingerprints import fingerprints_of

        hashes, self.batch = self.batch, None
        batch = None if hashes is None else self.fingerprints.run(lambda: fingerprints_of(hashes))
        off = self.off | {part.name for part in self._parts if part.off}
        self.file.write(line_of(data, step, batch=batch, off=sorted(off)))


# What this process trains; None: no run, or one without a clipx node.
_run: TrainedRun | None = None


def open_logs(wrapped: Any, tracking: Any, positional: tuple, named: dict[str, Any]) -> None:
    """Wraps the constructor of verl's `Tracking`, which opens the logs of a run."""
    global _run
    call = inspect.signature(wrapped).bind(*positional, **named)
    call.apply_defaults()
    config, backends = call.arguments["config"] or {}, call.arguments["default_backend"]
    _run = None
    if not config.get(NODE):
        return wrapped(*positional, **named)
    from verl_clipx.run.config import completed
    from verl_clipx.run.run_files import own_log_path

    # Groups leave out the defaults of a method, which rules and record need.
    config = {**config, NODE: completed(config[NODE])}
    if (log := own_log_path(config)) is not None:
        # In the place of verl's own.
        others = [name for name in ([backends] if isinstance(backends, str) else backends) if name != "file"]
        call.arguments["default_backend"] = others
    wrapped(*call.args, **call.kwargs)
    _run = tracking.logger[NODE] = TrainedRun(config, log)


def add_health(wrapped: Any, _: Any, positional: tuple, named: dict[str, Any]) -> dict[str, Any]:
    """Wraps verl's `compute_data_metrics`, which every trainer calls: adds health, keeps the batch's fingerprints."""
    metrics = wrapped(*positional, **named)
    if _run is None:
        return metrics
    from verl_clipx.training.trainer.health import step_metrics
    from verl_clipx.training.worker.fingerprints import hash_batch, join

    batch, run = positional[0] if positional else named["batch"], _run

    if run.file is not None:
        run.batch = run.fingerprints.run(lambda: join(run.batch, hash_batch(batch, run.versions, run.updates)))
        run.updates = []
    return metrics | run.health.run(lambda: step_metrics(batch, run.longest), {})


def hear_worker(wrapped: Any, _: Any, positional: tuple, named: dict[str, Any]) -> dict[str, Any]:
    """Wraps verl's `reduce_metrics`: takes out of a rollout batch's metrics, before verl averages them, what the worker
    says to this process.
    """
    metrics = positional[0] if positional else named["metrics"]
    updates = metrics.pop(f"actor/{UPDATES}", [])
    off = [key for key in metrics if key.startswith(f"actor/{OFF}")]
    for key in off:
        del metrics[key]
    if _run is not None:
        _run.updates += updates
        _run.off |= {key.removeprefix(f"actor/{OFF}") for key in off}
    return wrapped(*positional, **named)


def add_verdicts(wrapped: Any, _: Any, positional: tuple, named: dict[str, Any]) -> None:
    """Wraps how the v1 trainers make a step's metrics, which know what a reward returns and which weights sampled."""
    if _run is None:
        return wrapped(*positional, **named)
    from verl.trainer.ppo.v1 import trainer_base

    from verl_clipx.training.trainer.health import verdicts
    from verl_clipx.training.worker.fingerprints import NEWEST, OLDEST, span

    call = inspect.signature(wrapped).bind(*positional, **named).arguments
    tags = [tag for tag in call["batch"].tags if not tag.get("is_padding", False)]
    _run.versions = _run.fingerprints.run(lambda: span(*([tag.get(key) for tag in tags] for key in (OLDEST, NEWEST))))
    wrapped(*positional, **named)
    if _run.has_verdicts:
        # The trainer's own queue, which need not be TransferQueue's module: a run in one process has another.
        logged = _run.health.run(lambda: verdicts(trainer_base.tq.kv_batch_get, call["batch"]), {})
        _run.has_verdicts = bool(logged)
        call["metrics"].update(logged)
