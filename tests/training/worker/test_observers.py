"""A rank's observers: hooks that don't exist, an observer that raises in each hook, on one rank of two, and the metrics
of the loss in verl's Tinker worker. The ranks' reports are joined here as verl joins them. Not covered: verl's own
joining, which tests/end_to_end/test_observing.py has.
"""

import pytest
from verl.utils import tensordict_utils as tu

from tests.jagged import micro_batch
from tests.training.worker.updates import ROWS, VerlsWorker
from verl_clipx.losses.contract.contract import example
from verl_clipx.training.observing import OFF
from verl_clipx.training.worker import loss_function
from verl_clipx.training.worker.observers import HOOKS, METRICS, REPORT, RankObservers
from verl_clipx.training.worker.receipt import Receipt
from verl_clipx.training.worker.step import Observer
from verl_clipx.training.worker.tracer import Tracer
from verl_clipx.training.worker.training_worker import ClipxTraining
from verl_clipx.training.worker.update_fingerprints import UpdateFingerprints

# What is called on the ranks' observers to have each hook called, and with which arguments.
CALLS = {
    "begin_rollout_batch": ("begin_rollout_batch", None, None),
    "begin_update": ("begin_update", None, None),
    "end_micro_batch": ("end_micro_batch", None, None, None, None, None),
    "report": ("report", ()),
    "hear": ("hear", {}),
    "end_update": ("end_update", None),
    "end_rollout_batch": ("end_rollout_batch", None),
    "flush": ("flush",),
}
NAME = "the planted one"


def make_failing(hook):
    """An observer whose hook of this name raises, and which keeps how often that was called."""

    def fail(self, *_):
        self._calls.append(hook)
        raise ZeroDivisionError("planted")

    observer = type("Failing", (Observer,), {hook: fail})()
    observer._calls = []
    return observer


def call(observers, hook):
    name, *arguments = CALLS[hook]
    return getattr(observers, name)(*arguments)


class LoggingObserver(Observer):
    """Logs one metric at the end of each rollout batch."""

    def end_rollout_batch(self, batch):
        return {"logged": [1.0]}


def test_every_hook_has_a_call_here():
    assert sorted(HOOKS) == sorted(CALLS)


def test_a_hook_that_does_not_exist_is_refused_when_the_observer_is_added():
    misspelt = make_failing("end_rollout_bach")
    with pytest.raises(TypeError, match=r"Failing\.end_rollout_bach: .* hooks are .*end_rollout_batch"):
        RankObservers().add(misspelt)


@pytest.mark.parametrize("kind", [Receipt, Tracer, UpdateFingerprints])
def test_the_products_observers_have_no_other_public_method(kind):
    observer = object.__new__(kind)
    assert [*RankObservers(observer)] == [observer]


@pytest.mark.parametrize("hook", CALLS)
def test_an_observer_that_raises_is_said_once_and_the_others_go_on(hook, caplog):
    failing = make_failing(hook)
    logging = LoggingObserver()
    observers = RankObservers()
    observers.add(failing, NAME)
    observers.add(logging)
    observers.begin()
    for _ in range(2):
        call(observers, hook)
    assert failing._calls == [hook]
    assert [record.getMessage() for record in caplog.records] == [
        "clipx: the planted one failed; training goes on without it. This is said once."
    ]
    assert observers.end_rollout_batch(None) == {"logged": [1.0], f"clipx_off/{NAME}": [1.0]}
    assert [*observers] == [logging]


@pytest.mark.parametrize("hook", CALLS)
def test_an_observer_that_raises_on_one_rank_is_off_on_both(hook, caplog):
    ranks = [RankObservers(), RankObservers()]
    for observer, observers in zip((LoggingObserver(), make_failing(hook)), ranks, strict=True):
        observers.begin()
        observers.add(observer, NAME)
        call(observers, hook)
    assert [observers.off for observers in ranks] == [set(), {NAME}]
    sent = [[observers.report([])[REPORT]] for observers in ranks]
    for observers in ranks:
        observers.hear({REPORT: sent})
        observers.end_rollout_batch(None)
        assert observers.off == {NAME} and not observers
    assert [record.getMessage() for record in caplog.records] == [
        "clipx: the planted one failed; training goes on without it. This is said once."
    ]


@pytest.mark.parametrize("hook", sorted(CALLS.keys() - {"report", "hear"}))
def test_without_a_name_the_exception_ends_the_run(hook):
    observers = RankObservers(make_failing(hook))
    observers.begin()
    with pytest.raises(ZeroDivisionError, match="planted"):
        call(observers, hook)


@pytest.mark.parametrize("hook", CALLS)
def test_before_the_run_has_begun_the_exception_ends_it(hook):
    observers = RankObservers()
    observers.add(make_failing(hook), NAME)
    with pytest.raises(ZeroDivisionError, match="planted"):
        call(observers, hook)


def test_each_observer_hears_what_it_reported_on_every_rank():
    class Counting(Observer):
        def __init__(self, number):
            self._number = number
            self._heard = []

        def report(self):
            return self._number

        def hear(self, reports):
            self._heard.append(reports)

    counting = [Counting(3), Counting(4)]
    ranks = [RankObservers(), RankObservers()]
    for observer, observers in zip(counting, ranks, strict=True):
        observers.add(LoggingObserver(), "another one")
        observers.add(observer, "the counting one")
    # Two micro-batches a rank, of which the last says what holds for the update.
    sent = [[observers.report([])[REPORT] for _ in range(2)] for observers in ranks]
    for observers in ranks:
        observers.hear({REPORT: sent})
    assert [observer._heard for observer in counting] == [[[3, 4]], [[3, 4]]]


class Worker(ClipxTraining, VerlsWorker):
    """The plugin's part of a worker on the stand-in for verl's."""


@pytest.fixture
def tinker_worker(actor, monkeypatch):
    """A worker, and what calls its forward_backward as verl's Tinker worker does, and returns the metrics."""
    monkeypatch.setattr("verl_clipx.training.worker.training_worker.get_device_id", lambda: "cpu")
    data, output = micro_batch(example(), ROWS)
    output["log_probs"].requires_grad_(True)
    worker = Worker(actor("+clipx=grpo", "clipx.receipt=off"), output)
    return worker, lambda: tu.get(worker.forward_backward(data.clone()), "metrics")


def raise_planted(*_):
    raise ZeroDivisionError("planted")


def test_in_tinkers_worker_the_losss_metrics_go_off_after_the_first_update(tinker_worker, monkeypatch, caplog):
    worker, forward_backward = tinker_worker
    assert "clipx/ratio_mean" in forward_backward()
    monkeypatch.setattr(loss_function, "exact_metrics", raise_planted)
    for _ in range(2):
        # Who calls the worker sees it too.
        assert forward_backward() == {f"{OFF}{METRICS}": [1.0]}
    assert worker.observers.off == {METRICS}
    assert [record.getMessage() for record in caplog.records] == [
        "clipx: the metrics of the loss failed; training goes on without it. This is said once."
    ]


def test_in_tinkers_worker_they_go_off_where_another_rank_has_lost_them(tinker_worker, monkeypatch):
    worker, forward_backward = tinker_worker
    forward_backward()
    join_of_one_rank = VerlsWorker._postprocess_output

    def join_with_another_rank(self, output, **named):
        joined = join_of_one_rank(self, output, **named)
        metrics = tu.get(joined, "metrics")
        (report,) = metrics[REPORT]
        metrics[REPORT] = [[report], [report._replace(off=(METRICS,))]]
        return joined

    with monkeypatch.context() as patched:
        patched.setattr(VerlsWorker, "_postprocess_output", join_with_another_rank)
        assert forward_backward() == {f"{OFF}{METRICS}": [1.0]}
    assert worker.observers.off == {METRICS}


def test_in_tinkers_worker_a_failure_in_the_first_update_ends_the_run(tinker_worker, monkeypatch):
    _, forward_backward = tinker_worker
    monkeypatch.setattr(loss_function, "exact_metrics", raise_planted)
    with pytest.raises(ZeroDivisionError, match="planted"):
        forward_backward()


def test_a_pass_without_gradient_leaves_no_report_and_begins_nothing(tinker_worker, monkeypatch):
    worker, forward_backward = tinker_worker
    joined = worker._postprocess_output({"metrics": worker.observers.report([])}, forward_only=True)
    assert tu.get(joined, "metrics") == {}
    monkeypatch.setattr(loss_function, "exact_metrics", raise_planted)
    with pytest.raises(ZeroDivisionError):
        forward_backward()
