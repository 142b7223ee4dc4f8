"""The hooks in verl's trainer. They act in a run with a clipx node; in any other they call verl's function, no more.

`Tracking` is the first of them to see a run's configuration: every trainer makes one before its first step.
"""

import functools
import inspect
from types import ModuleType
from typing import Any

from wrapt import wrap_function_wrapper

from verl_clipx.base.method import NODE
from verl_clipx.runs import keys
from verl_clipx.worker.reports import OFF, UPDATES


class TrainedRun:
    """A run with a clipx node, in the process of its trainer. verl logs each of its steps to it, after all other logs.

    Args:
        file: the run's file log, if the plugin keeps one.
        before: what the run logged before it was resumed, by step.
    """

    def __init__(self, config: dict[str, Any], before: dict[int, dict[str, float]], file: Any = None):
        from verl_clipx.common.observing import Part
        from verl_clipx.run.lengths import lengths_of
        from verl_clipx.trainer.receipt import ReceiptCheck
        from verl_clipx.trainer.watch import Watch

        self.longest = lengths_of(config)
        # A reward returns a verdict always or never.
        self.has_verdicts = True
        self.file = file
        # Of the updates whose rollout batch is not in the log yet, and the versions of the weights that sampled it.
        self.updates: list[int] = []
        self.versions: tuple[int, int] | None = None
        self.fingerprints, self.health = Part("the fingerprints of rollout batches"), Part("the metrics health/*")
        self._receipt, self._rules = ReceiptCheck(config), Part("the rules of clipx.health")
        self._watch = Watch(config, before, stops=config[NODE].get("health") == "stop")
        self._parts = (self.fingerprints, self.health, self._rules)
        if file is not None:
            file.parts = self._parts

    def log(self, data: dict[str, Any], step: int) -> None:
        """Looks at a step's metrics, which are in the logs; raises RuntimeError if they stop the run."""
        self._receipt.look(data, step)
        stop = self._rules.run(lambda: self._watch.look(data, step))
        if stop is not None:
            raise RuntimeError(stop)
        if keys.STEP in data:
            for part in self._parts:
                part.armed = True


# What this process trains; None: no run, or one without a clipx node.
_run: TrainedRun | None = None


def install_logs(tracking: ModuleType) -> None:
    """Wraps the constructor of verl.utils.tracking's `Tracking`, which opens the logs of a run."""
    wrap_function_wrapper(tracking, "Tracking.__init__", _open_logs)


def install_metrics(metric_utils: ModuleType) -> None:
    """Wraps `compute_data_metrics` of verl.trainer.ppo.metric_utils, which every trainer imports by name and calls.

    It must be wrapped when its module is imported, which is before a trainer imports the name.
    """
    wrap_function_wrapper(metric_utils, "compute_data_metrics", _add_health)


def install_verdicts(trainers: ModuleType) -> None:
    """Wraps how the v1 trainers make a step's metrics, which know what a reward returns and which weights sampled."""
    if hasattr(trainers, "tq") and hasattr(getattr(trainers, "PPOTrainer", None), "_compute_metrics"):
        wrap_function_wrapper(trainers, "PPOTrainer._compute_metrics", functools.partial(_add_verdicts, trainers))


def _open_logs(wrapped: Any, tracking: Any, positional: tuple, named: dict[str, Any]) -> None:
    global _run
    call = inspect.signature(wrapped).bind(*positional, **named)
    call.apply_defaults()
    config, backends = call.arguments["config"] or {}, call.arguments["default_backend"]
    _run = None
    if not config.get(NODE):
        return wrapped(*positional, **named)
    from verl_clipx.run.config import completed
    from verl_clipx.trainer.log import FileLog, open_logs

    # Groups leave out the defaults of a method, which rules and record need.
    config = {**config, NODE: completed(config[NODE])}

    def open_verls(names: list[str]) -> None:
        call.arguments["default_backend"] = names
        wrapped(*call.args, **call.kwargs)

    before = open_logs(tracking, [backends] if isinstance(backends, str) else list(backends), config, open_verls)
    file = tracking.logger.get("file")
    _run = tracking.logger[NODE] = TrainedRun(config, before, file if isinstance(file, FileLog) else None)


def _add_health(wrapped: Any, _: Any, positional: tuple, named: dict[str, Any]) -> dict[str, Any]:
    metrics = wrapped(*positional, **named)
    if _run is None:
        return metrics
    from verl_clipx.trainer.health import step_metrics
    from verl_clipx.worker.fingerprints import fingerprints_of, hexadecimal, join

    batch, run = positional[0] if positional else named["batch"], _run

    def fingerprint() -> dict[str, Any]:
        updates = {"updates": [hexadecimal([of]) for of in run.updates]} if run.updates else {}
        return join(run.file.batch, fingerprints_of(batch, run.versions) | updates)

    if run.file is not None:
        run.file.batch = run.fingerprints.run(fingerprint)
        run.updates = []
    return metrics | run.health.run(lambda: step_metrics(batch, run.longest), {})


def hear_worker(metrics: dict[str, Any]) -> None:
    """Takes out of the metrics of a rollout batch, before verl averages them, what the worker says to this process."""
    updates = metrics.pop(f"actor/{UPDATES}", [])
    off = [key for key in metrics if key.startswith(f"actor/{OFF}")]
    for key in off:
        del metrics[key]
    if _run is not None and _run.file is not None:
        _run.updates += updates
        _run.file.off |= {key.removeprefix(f"actor/{OFF}") for key in off}


def _add_verdicts(trainers: ModuleType, wrapped: Any, _: Any, positional: tuple, named: dict[str, Any]) -> Any:
    if _run is None:
        return wrapped(*positional, **named)
    from verl_clipx.trainer.health import verdicts
    from verl_clipx.worker.fingerprints import NEWEST, OLDEST, span

    call = inspect.signature(wrapped).bind(*positional, **named).arguments
    tags = [tag for tag in call["batch"].tags if not tag.get("is_padding", False)]
    _run.versions = _run.fingerprints.run(lambda: span(*([tag.get(key) for tag in tags] for key in (OLDEST, NEWEST))))
    wrapped(*positional, **named)
    if not _run.has_verdicts:
        return None
    logged = _run.health.run(lambda: verdicts(trainers.tq.kv_batch_get, call["batch"]), {})
    _run.has_verdicts = bool(logged)
    call["metrics"].update(logged)
    return None
