"""The hooks in verl's trainer. They act in a run with a clipx node; in any other they only call verl's function.

The run begins with `open_logs`, the hook of verl's `Tracking`, which every trainer makes with the configuration before
its first step.
"""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_clipx.analysis.runs import keys
from verl_clipx.losses.base.method import NODE
from verl_clipx.losses.base.shared_metrics import RECEIPT
from verl_clipx.training.observing import OFF, UPDATES, Observers

if TYPE_CHECKING:
    from verl_clipx.analysis.runs.run_log import Rows
    from verl_clipx.training.worker.fingerprints import BatchHashes

# The names of what observes a run in this process, for the message of a failure.
FINGERPRINTS = "the fingerprints of rollout batches"
HEALTH = "the metrics health/*"
RULES = "the rules of clipx.health"
RECEIPT_IN_RECORD = "the receipt in the run's record"


class TrainedRun:
    """A run with a clipx node, in the process of its trainer. verl calls its `log` as one of its loggers, the last one.

    A step's line in the file log also has `batch`, the fingerprints of its rollout batch, if there are any, and `off`,
    the names of what no longer observes the run because it failed.

    Args:
        config: verl's whole configuration, with the defaults of the clipx node filled in.
        log: the path of the run's file log; None if the plugin keeps none.
    """

    def __init__(self, config: dict[str, Any], log: Path | None):
        from verl_clipx.run.lengths import find_response_limits
        from verl_clipx.run.record import record_of
        from verl_clipx.training.trainer.log import open_log
        from verl_clipx.training.trainer.watch import ReceiptCheck, Watch

        record = record_of(config)
        self._log = log
        self.file = None
        # What the run logged before it was resumed, by step.
        rows_before: Rows = {}
        if log is not None:
            self.file, rows_before = open_log(log, config)
        # The longest response, and the longest prompt and response together, in tokens.
        self.longest = find_response_limits(record)
        # Whether the reward may return verdicts. It does always or never, so the first step shows which.
        self.has_verdicts = True
        # Of the rollout batch that is not in the log yet: the hashes of its rows, the fingerprints of its updates, and
        # the versions of the weights that sampled it.
        self.batch: BatchHashes | None = None
        self.updates: list[int] = []
        self.versions: tuple[int, int] | None = None
        self.observers = Observers()
        self.observers.begin(RECEIPT_IN_RECORD)
        self._log_name = f"the log {log}"
        self._receipt = ReceiptCheck(record)
        self._watch = Watch(record, rows_before)
        # Whether the record has the receipt of this start.
        self._is_receipt_recorded = False

    def log(self, data: dict[str, Any], step: int) -> None:
        """Write a step's metrics to the file log, and look at them.

        Args:
            data: the metrics, by key.
            step: the step's number.

        Raises:
            RuntimeError: they stop the run.
        """
        if self.file is not None:
            self.observers.run(self._log_name, lambda: self._write(data, step))
            self.observers.begin(self._log_name)
            self.observers.run(RECEIPT_IN_RECORD, lambda: self._record_receipt(data))
        self._receipt.look(data, step)
        reason_to_stop = self.observers.run(RULES, lambda: self._watch.look(data, step))
        if reason_to_stop is not None:
            raise RuntimeError(reason_to_stop)
        if keys.STEP in data:
            # After the first step of the training, a failure of what observes it ends it no more.
            self.observers.begin()

    def _record_receipt(self, data: dict[str, Any]) -> None:
        """Write the receipt into the run's record, once, if a step's metrics have it."""
        from verl_clipx.training.trainer.log import receipt_in, record_receipt

        if self._is_receipt_recorded or RECEIPT.key not in receipt_in(data):
            return
        record_receipt(self._log, data)
        self._is_receipt_recorded = True

    def _write(self, data: dict[str, Any], step: int) -> None:
        """Write a step's line to the file log, with the fingerprints of its rollout batch."""
        from verl_clipx.training.trainer.log import format_line
        from verl_clipx.training.worker.fingerprints import fingerprints_of

        hashes = self.batch
        self.batch = None
        fingerprints = None
        if hashes is not None:
            fingerprints = self.observers.run(FINGERPRINTS, lambda: fingerprints_of(hashes))
        self.file.write(format_line(data, step, fingerprints=fingerprints, off=sorted(self.observers.off)))


# The run that this process trains; None if it trains none, or one without a clipx node.
_run: TrainedRun | None = None

# Each hook below gets what wrapt gives a wrapper: the function of verl's, the object that it is bound to, and the
# positional and the named arguments of the call.


def open_logs(wrapped: Any, tracking: Any, positional: tuple, named: dict[str, Any]) -> None:
    """Wrap the constructor of verl's `Tracking`, which opens the logs of a run, and begin the run."""
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
    _run = TrainedRun(config, log)
    # verl logs each step to all of these.
    tracking.logger[NODE] = _run


def add_health(wrapped: Any, _: Any, positional: tuple, named: dict[str, Any]) -> dict[str, Any]:
    """Wrap verl's `compute_data_metrics`, which every trainer calls: keep the batch's hashes, and add health's metrics.

    Returns:
        verl's metrics of the batch, and those of its health.
    """
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
    """Wrap verl's `reduce_metrics`: take the worker's messages out of the metrics before verl averages them.

    There are two messages: the fingerprints of the worker's updates, and which of its observers failed.
    """
    metrics = positional[0] if positional else named["metrics"]
    updates = metrics.pop(f"actor/{UPDATES}", [])
    off_keys = [key for key in metrics if key.startswith(f"actor/{OFF}")]
    for key in off_keys:
        del metrics[key]
    if _run is not None:
        for update in updates:
            # verl's NeoProto leaves the list of a worker's mini-batches within the list.
            if isinstance(update, list):
                _run.updates.extend(update)
            else:
                _run.updates.append(update)
        _run.observers.off.update(key.removeprefix(f"actor/{OFF}") for key in off_keys)
    return wrapped(*positional, **named)


def add_verdicts(wrapped: Any, _: Any, positional: tuple, named: dict[str, Any]) -> None:
    """Wrap what makes a step's metrics in the v1 trainers: keep the weights' versions, and add the verdicts' metric.

    verl's function has what `add_health` does not get: what the reward returned, and which weights sampled.
    """
    if _run is None:
        return wrapped(*positional, **named)
    from verl.trainer.ppo.v1 import trainer_base

    from verl_clipx.training.trainer.health import fetch_undecided_metric
    from verl_clipx.training.worker.fingerprints import NEWEST, OLDEST, span

    call = inspect.signature(wrapped).bind(*positional, **named).arguments
    tags = [tag for tag in call["batch"].tags if not tag.get("is_padding", False)]

    def find_versions() -> tuple[int, int] | None:
        """Return the oldest and the newest version of the weights that sampled the step's rows."""
        return span([tag.get(OLDEST) for tag in tags], [tag.get(NEWEST) for tag in tags])

    _run.versions = _run.observers.run(FINGERPRINTS, find_versions)
    wrapped(*positional, **named)
    if _run.has_verdicts:
        # The trainer's own queue, which need not be TransferQueue's module: a run in one process has another.
        fetch = trainer_base.tq.kv_batch_get
        logged = _run.observers.run(HEALTH, lambda: fetch_undecided_metric(fetch, call["batch"]), {})
        _run.has_verdicts = bool(logged)
        call["metrics"].update(logged)
