"""The hooks in verl's trainer. They act in a run with a clipx node; in any other they call verl's function, no more.

`Tracking` is the first of them to see a run's configuration: every trainer makes one before its first step.
"""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_clipx.analysis.runs import keys
from verl_clipx.losses.base.method import NODE
from verl_clipx.losses.base.shared_metrics import RECEIPT
from verl_clipx.training.observing import OFF, UPDATES, Observers

if TYPE_CHECKING:
    from verl_clipx.training.worker.fingerprints import BatchHashes

# What observes a run in this process.
FINGERPRINTS = "the fingerprints of rollout batches"
HEALTH = "the metrics health/*"
RULES = "the rules of clipx.health"
RECEIPT_IN_RECORD = "the receipt in the run's record"


class TrainedRun:
    """A run with a clipx node, in the process of its trainer. verl logs each of its steps to it, after all other logs.

    A step's line in the file log also has `batch`, the fingerprints of its rollout batch, if there are any, and `off`,
    the names of what observes the run no more, as it failed.

    Args:
        log: the run's file log, if the plugin keeps one.
    """

    def __init__(self, config: dict[str, Any], log: Path | None):
        from verl_clipx.run.lengths import lengths_of
        from verl_clipx.run.record import record_of
        from verl_clipx.training.trainer.log import open_log
        from verl_clipx.training.trainer.watch import ReceiptCheck, Watch

        record = record_of(config)
        # The log, and what the run logged before it was resumed.
        self._log = log
        self.file, before = (None, {}) if log is None else open_log(log, config)
        self.longest = lengths_of(record)
        # A reward returns a verdict always or never.
        self.has_verdicts = True
        # Of the rollout batch that is not in the log yet: the hashes of its rows, those of its updates, and the
        # versions of the weights that sampled it.
        self.batch: BatchHashes | None = None
        self.updates: list[int] = []
        self.versions: tuple[int, int] | None = None
        self.observers = Observers()
        self.observers.begin(RECEIPT_IN_RECORD)
        self._log_name = f"the log {log}"
        self._receipt = ReceiptCheck(record)
        self._watch = Watch(record, before)
        # Whether the record has the receipt of this start.
        self._is_receipt_recorded = False

    def log(self, data: dict[str, Any], step: int) -> None:
        """Writes a step's metrics to the file log and looks at them; raises RuntimeError if they stop the run."""
        if self.file is not None:
            self.observers.run(self._log_name, lambda: self._write(data, step))
            self.observers.begin(self._log_name)
            self.observers.run(RECEIPT_IN_RECORD, lambda: self._record_receipt(data))
        self._receipt.look(data, step)
        stop = self.observers.run(RULES, lambda: self._watch.look(data, step))
        if stop is not None:
            raise RuntimeError(stop)
        if keys.STEP in data:
            self.observers.begin()

    def _record_receipt(self, data: dict[str, Any]) -> None:
        """Writes the receipt into the run's record, once, if a step's metrics have it."""
        from verl_clipx.training.trainer.log import receipt_in, record_receipt

        if self._is_receipt_recorded or RECEIPT.key not in receipt_in(data):
            return
        record_receipt(self._log, data)
        self._is_receipt_recorded = True

    def _write(self, data: dict[str, Any], step: int) -> None:
        """Writes a step's line to the file log, with the fingerprints of its rollout batch."""
        from verl_clipx.training.trainer.log import line_of
        from verl_clipx.training.worker.fingerprints import fingerprints_of

        hashes = self.batch
        self.batch = None
        batch = None if hashes is None else self.observers.run(FINGERPRINTS, lambda: fingerprints_of(hashes))
        self.file.write(line_of(data, step, batch=batch, off=sorted(self.observers.off)))


# What this process trains; None: no run, or one without a clipx node.
_run: TrainedRun | None = None


def open_logs(wrapped: Any, tracking: Any, positional: tuple, named: dict[str, Any]) -> None:
    """Wraps the constructor of verl's `Tracking`, which opens the logs of a run."""
    global _run
    call = inspect.signature(wrapped).bind(*positional, **named)
    call.apply_defaults()
    config = call.arguments["config"] or {}
    backends = call.arguments["default_backend"]
    _run = None
    if not config.get(NODE):
        return wrapped(*positional, **named)
    from verl_clipx.run.config import completed
    from verl_clipx.run.run_files import own_log_path

    # Groups leave out the defaults of a method, which rules and record need.
    config = {**config, NODE: completed(config[NODE])}
    log = own_log_path(config)
    if log is not None:
        # The plugin's log takes the place of verl's own.
        names = [backends] if isinstance(backends, str) else backends
        call.arguments["default_backend"] = [name for name in names if name != "file"]
    wrapped(*call.args, **call.kwargs)
    _run = tracking.logger[NODE] = TrainedRun(config, log)


def add_health(wrapped: Any, _: Any, positional: tuple, named: dict[str, Any]) -> dict[str, Any]:
    """Wraps verl's `compute_data_metrics`, which every trainer calls: adds health, keeps the batch's fingerprints."""
    metrics = wrapped(*positional, **named)
    if _run is None:
        return metrics
    from verl_clipx.training.trainer.health import step_metrics
    from verl_clipx.training.worker.fingerprints import hash_batch, join

    batch = positional[0] if positional else named["batch"]
    run = _run

    if run.file is not None:
        run.batch = run.observers.run(
            FINGERPRINTS, lambda: join(run.batch, hash_batch(batch, run.versions, run.updates))
        )
        run.updates = []
    return metrics | run.observers.run(HEALTH, lambda: step_metrics(batch, run.longest), {})


def take_worker_messages(wrapped: Any, _: Any, positional: tuple, named: dict[str, Any]) -> dict[str, Any]:
    """Wraps verl's `reduce_metrics`, and takes the worker's messages out of the metrics before verl averages them.

    There are two messages: the hashes of the worker's updates, and which of its observers failed.
    """
    metrics = positional[0] if positional else named["metrics"]
    updates = metrics.pop(f"actor/{UPDATES}", [])
    off_keys = [key for key in metrics if key.startswith(f"actor/{OFF}")]
    for key in off_keys:
        del metrics[key]
    if _run is not None:
        for update in updates:
            # verl's NeoProto leaves the list of a worker's mini-batches within the list.
            _run.updates += update if isinstance(update, list) else [update]
        _run.observers.off |= {key.removeprefix(f"actor/{OFF}") for key in off_keys}
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

    def versions() -> tuple[int, int] | None:
        return span([tag.get(OLDEST) for tag in tags], [tag.get(NEWEST) for tag in tags])

    _run.versions = _run.observers.run(FINGERPRINTS, versions)
    wrapped(*positional, **named)
    if _run.has_verdicts:
        # The trainer's own queue, which need not be TransferQueue's module: a run in one process has another.
        logged = _run.observers.run(HEALTH, lambda: verdicts(trainer_base.tq.kv_batch_get, call["batch"]), {})
        _run.has_verdicts = bool(logged)
        call["metrics"].update(logged)
