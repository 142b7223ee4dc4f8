"""The training worker: exact metrics, host syncs, skipped updates and what was not finite, distillation, dropout. Not
covered: the real engine (tests/end_to_end).
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PretrainedConfig
from verl.trainer.distillation import distillation_ppo_loss
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.workers.config import DistillationConfig, DistillationLossConfig
from verl.workers.utils.losses import ppo_loss

from tests.host_syncs import counted_host_syncs
from tests.jagged import micro_batch
from tests.messages import assert_names
from tests.training.worker.updates import SPLITS, WHOLE, VerlsWorker, aggregate_metrics, loss_function
from verl_clipx.losses.contract.contract import example
from verl_clipx.run.record import RunRecord
from verl_clipx.run.schedule import Schedule
from verl_clipx.run.trace_format import read_shards, shards_in
from verl_clipx.run.trainer import Trainer
from verl_clipx.training.worker.extra_pass import refuse_dropout
from verl_clipx.training.worker.layout import pad_rows
from verl_clipx.training.worker.loss_function import with_micro_batch
from verl_clipx.training.worker.observe import observe_registered
from verl_clipx.training.worker.skipped_updates import record_gradient_norm
from verl_clipx.training.worker.step import OptimizerStep
from verl_clipx.training.worker.tracer import Tracer
from verl_clipx.training.worker.training_worker import ClipxTraining, clipx_node, planned_batches

ACTOR = "actor_rollout_ref.actor"
ROWS = [0, 1, 2, 3, 4]


def test_without_a_clipx_node_verls_loss_function_stays(actor):
    assert clipx_node(partial(ppo_loss, config=actor())) is None
    assert clipx_node(partial(ppo_loss, config=actor("+clipx=grpo"))) is not None
    assert clipx_node(lambda model_output, data, dp_group=None: None) is None


def test_a_loss_function_without_a_clipx_node_takes_the_place_of_one_with_it(actor, worker_and_data):
    worker, data = worker_and_data("+clipx=grpo")
    assert worker.policy_loss is not None and len(worker.observers) > 0
    plain = partial(ppo_loss, config=actor())
    worker.set_loss_fn(plain)
    assert worker.loss_fn is plain and worker.policy_loss is None and len(worker.observers) == 0
    assert tu.get(worker.train_mini_batch(data), "metrics") == {}


@pytest.mark.parametrize(
    ("kind", "steps", "expected"), [("sync", 6, 6), ("sync", -1, None), ("fully_async", 6, None), (None, 6, 6)]
)
def test_the_number_of_rollout_batches_is_known_where_verl_sets_it_before_the_workers(kind, steps, expected):
    record = RunRecord(trainer=Trainer(kind=kind))
    config = SimpleNamespace(optim=SimpleNamespace(total_training_steps=steps))
    assert planned_batches(record, config) == expected


@pytest.mark.parametrize("wanted", [False, True])
def test_selection_takes_the_entropys_value_and_leaves_its_graph(actor, wanted):
    config = actor("+clipx=grpo", "+clipx/select=high_entropy", f"{ACTOR}.entropy_coeff=0.01")
    batch = example()
    batch["log_prob"].requires_grad_(True)
    data, output = micro_batch(batch, ROWS, entropy=batch["entropy"])
    leaf = output["entropy"].detach().requires_grad_(True)
    step = OptimizerStep(entropy_wanted=wanted)
    loss, _ = loss_function(config, step)(model_output={**output, "entropy": leaf * 1}, data=data)
    loss.backward()
    assert (leaf.grad is not None) == wanted


@pytest.mark.parametrize(
    ("overrides", "needing"),
    [
        (("+clipx=acpo",), "clipx.scope=mini_batch"),
        (("+clipx=bapo", "clipx.scope=lagged"), "clipx.scope=lagged"),
        (("+clipx=grpo", "+clipx/update=lopti"), r"\+clipx/update=lopti"),
        (("+clipx=grpo", "+clipx/select=high_entropy"), r"\+clipx/select"),
        (("+clipx=grpo",), None),
        (("+clipx=acpo", "clipx.scope=micro_batch"), None),
    ],
)
def test_a_worker_that_steps_by_itself_stops_where_the_mini_batch_is_needed(actor, overrides, needing):
    config = actor(*overrides)
    # As in a worker without train_batch.
    policy_loss = config.policy_loss
    loss_fn = partial(ppo_loss, config=config)
    function = with_micro_batch(loss_fn, policy_loss.clipx, policy_loss.run.record.schedule, lambda: None)
    if needing is None:
        whole = aggregate_metrics(function, example(), WHOLE)["clipx/ratio_mean"]
        split = aggregate_metrics(function, example(), SPLITS["micro-batches"])["clipx/ratio_mean"]
        assert split == pytest.approx(whole, rel=1e-6)
        return
    data, output = micro_batch(example(), [0, 1])
    with pytest.raises(RuntimeError, match=rf"{needing} .*train_batch.*Tinker"):
        function(model_output=output, data=data)


class Worker(ClipxTraining, VerlsWorker):
    """The plugin's part of a worker on the stand-in for verl's."""


@pytest.fixture
def worker_and_data(actor, monkeypatch):
    def build(*overrides, kind=Worker):
        """A worker and a mini-batch that was sampled by the weights after step 1."""
        monkeypatch.setattr("verl_clipx.training.worker.training_worker.get_device_id", lambda: "cpu")
        observe_registered("vanilla")
        data, output = micro_batch(example(), ROWS, sequences=len(ROWS))
        data["rm_scores"] = torch.zeros_like(data["advantages"])
        output["log_probs"].requires_grad_(True)
        tu.assign_non_tensor_stack(data, "extra_fields", [{"max_global_steps": 1}] * 5)
        # Its updates have no backward pass, or its rollout is another policy, of which the receipt would warn.
        return kind(actor("clipx.receipt=off", *overrides), output), data

    return build


@pytest.mark.parametrize("group", ["+clipx=grpo", "+clipx=observe"])
@pytest.mark.parametrize("call", ["forward_backward", "train_batch", "train_mini_batch"])
def test_sums_that_no_rollout_batch_makes_metrics_of_are_not_logged(worker_and_data, group, call):
    worker, data = worker_and_data(group, "trainer.critic_warmup=4")
    metrics = tu.get(getattr(worker, call)(data), "metrics")
    assert "clipx/ratio_mean" in metrics
    assert not [key for key in metrics if key.startswith("clipx_sum/")]
    made_of_sums = {"clipx/effective_sample_size"}
    if group == "+clipx=grpo":
        made_of_sums |= {"clipx/staleness/versions", "clipx/staleness/versions_first"}
    assert made_of_sums & metrics.keys() == (made_of_sums if call == "train_mini_batch" else set())


def tracers_of(worker):
    return [observer for observer in worker.observers if isinstance(observer, Tracer)]


def trace_everything(folder):
    """Overrides by which every prompt is traced in every rollout batch."""
    return (
        "+clipx/trace=prompts",
        "clipx.trace.fraction=1",
        "clipx.trace.every=1",
        f"clipx.trace.folder={folder}",
    )


def test_ages_and_traces_count_the_steps_that_trained_the_critic_alone(worker_and_data, tmp_path):
    worker, data = worker_and_data("+clipx=grpo", "trainer.critic_warmup=3", *trace_everything(tmp_path))
    ages = [tu.get(worker.train_mini_batch(data.clone()), "metrics")["clipx/staleness/versions"] for _ in range(2)]
    # Steps 1 and 2 trained the critic, so that step 3 starts from the weights after step 2.
    assert ages == [[pytest.approx(1)], [pytest.approx(2)]]
    (tracer,) = tracers_of(worker)
    assert tracer.writer.flush() and [shard.step for shard in shards_in(tmp_path)] == [3, 4]


def test_a_resumed_sample_is_as_old_as_its_first_token(worker_and_data, tmp_path):
    worker, data = worker_and_data("+clipx=grpo", "trainer.critic_warmup=3", *trace_everything(tmp_path))
    # At the weights after step 2, of which each sequence's last token is: four first tokens are older by 0 to 3.
    ages = [0, 1, 2, 3, 0]
    versions = [{"min_global_steps": 2 - age, "max_global_steps": 2} for age in ages]
    tu.assign_non_tensor_stack(data, "extra_fields", versions)
    tokens = pad_rows(data["response_mask"]).sum(1)
    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    expected = float((tokens * torch.tensor(ages)).sum() / tokens.sum())
    assert metrics["clipx/staleness/versions"] == [0]
    assert metrics["clipx/staleness/versions_first"] == [pytest.approx(expected)]
    (tracer,) = tracers_of(worker)
    assert tracer.writer.flush()
    (shard,) = shards_in(tmp_path)
    assert sorted(set(read_shards(tmp_path, [shard]).to_pandas().age)) == [0, 1, 2, 3]


@pytest.mark.parametrize("hook", ["begin_rollout_batch", "begin_update", "end_update", "end_rollout_batch", "flush"])
def test_traces_that_fail_after_the_first_batch_go_off_and_training_goes_on(
    worker_and_data, tmp_path, monkeypatch, caplog, hook
):
    worker, data = worker_and_data("+clipx=grpo", *trace_everything(tmp_path))
    worker.train_mini_batch(data.clone())
    worker.observers.flush()

    def fail(*_):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Tracer, hook, fail)
    metrics = tu.get(worker.train_mini_batch(data.clone()), "metrics")
    worker.observers.flush()
    assert "clipx/ratio_mean" in metrics
    assert [record.exc_text for record in caplog.records if "the traces failed" in record.getMessage()]
    assert worker.observers.off == {"the traces"}
    worker.train_mini_batch(data.clone())
    assert not tracers_of(worker) and {shard.step for shard in shards_in(tmp_path)} <= {1, 2}


def test_traces_that_fail_in_the_first_batch_end_the_run(worker_and_data, tmp_path, monkeypatch):
    worker, data = worker_and_data("+clipx=grpo", *trace_everything(tmp_path))
    monkeypatch.setattr(Tracer, "end_update", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        worker.train_mini_batch(data)


class VerlsSteppingWorker(VerlsWorker):
    """As verl's worker, a rollout batch being three updates on one mini-batch, which the second one may change."""

    # What the way back through the model multiplies the gradient by.
    gradient_scale = 1.0

    def change_second(self, data):
        """Changes the second update's mini-batch."""

    def train_batch(self, data):
        leaf = self.output["log_probs"]
        leaf.grad = None
        loss, metrics = self.loss_fn(self.output, data)
        loss.backward()
        self.engine.norm = leaf.grad.values().norm() * self.gradient_scale
        self.engine.optimizer_step()
        own_metrics = {key: [value.aggregate()] for key, value in metrics.items() if key.startswith("clipx/")}
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": own_metrics})

    def train_mini_batch(self, data):
        for update in range(3):
            mini_batch = data.clone()
            if update == 1:
                self.change_second(mini_batch)
            output = self.train_batch(mini_batch)
        return output


# Overrides of a run with as many updates on a rollout batch.
THREE_UPDATES = ("data.train_batch_size=3", f"{ACTOR}.ppo_mini_batch_size=1")


class SteppingWorker(ClipxTraining, VerlsSteppingWorker):
    """The plugin's part of a worker on the stand-in for verl's; it counts the reductions over ranks."""

    reductions = 0

    def _all_reduce(self, vector):
        self.reductions += 1
        return super()._all_reduce(vector)

    def set_loss_fn(self, loss_fn):
        self.engine.optimizer_step = lambda: self.engine.norm
        super().set_loss_fn(loss_fn)


def put(value, **places):
    """Return a change that puts a value into fields of a mini-batch, each at some (sequence, token)."""

    def change(data):
        for field, indices in places.items():
            for sequence, token in indices:
                data[field][sequence][token] = value

    return change


def set_all_advantages_to_nan(data):
    """Each of Lopti's passes then has some."""
    data["advantages"].values().fill_(torch.nan)


LAGGED = ("+clipx=acpo", "clipx.scope=lagged")


class NotFinite(NamedTuple):
    """What is not finite in the second update's mini-batch, and what must be said and logged of it.

    Attributes:
        overrides: of the run.
        change: of the mini-batch.
        facts: what the message must name.
        skips: how many updates of a rollout batch verl skips.
        log_probs: the metric's value.
    """

    overrides: Sequence[str]
    change: Callable[[Any], None]
    facts: Sequence[str]
    skips: int = 1
    log_probs: float = 0.0


ONE_NAN_REWARD = put(torch.nan, rm_scores=[(0, 2)], advantages=[(0, 0), (0, 1), (0, 2)])
THREE_NAN_ADVANTAGES = put(torch.nan, advantages=[(2, 0), (2, 1), (3, 0)])
FACTS_OF_NAN_ADVANTAGES = ("advantages (advantages) in 3 tokens of 2 sequences", "uid prompt 1")
NOT_FINITE = {
    "a reward": NotFinite(
        overrides=["+clipx=grpo"],
        change=ONE_NAN_REWARD,
        facts=(
            "rm_scores (rewards) in 1 token of 1 sequence",
            "advantages (advantages) in 3 tokens of 1 sequence",
            "uid prompt 0",
        ),
    ),
    "advantages": NotFinite(
        overrides=["+clipx=grpo"],
        change=THREE_NAN_ADVANTAGES,
        facts=FACTS_OF_NAN_ADVANTAGES,
    ),
    "advantages of an observed loss": NotFinite(
        overrides=["+clipx=observe"],
        change=THREE_NAN_ADVANTAGES,
        facts=FACTS_OF_NAN_ADVANTAGES,
    ),
    "an old log-probability": NotFinite(
        overrides=LAGGED,
        change=put(-torch.inf, old_log_probs=[(0, 1)]),
        facts=("old_log_probs (log-probabilities of the old policy) in 1 token of 1 sequence", "uid prompt 0"),
        log_probs=1.0,
    ),
    "advantages of both passes of Lopti": NotFinite(
        overrides=["+clipx=grpo", "+clipx/update=lopti"],
        change=set_all_advantages_to_nan,
        facts=("advantages (advantages)",),
        skips=2,
    ),
}


def messages_in(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("verl_clipx")]


@pytest.mark.parametrize("name", NOT_FINITE)
def test_skipped_updates_are_counted_and_what_is_not_finite_is_named_once(stepping_worker, caplog, name):
    case = NOT_FINITE[name]
    worker, count_skips = stepping_worker(*case.overrides)
    assert count_skips() == 0 and not messages_in(caplog)
    worker.change_second = case.change
    assert count_skips() == case.skips and count_skips() == case.skips
    (message,) = messages_in(caplog)
    assert_names(message, *case.facts, "verl skips an update", "norm is nan")
    assert worker.logged["clipx/not_finite/rank"] == [0]
    # Those of the current policy follow from the model, on which these mini-batches have no effect.
    assert worker.logged["clipx/not_finite/log_probs"] == [case.log_probs]
    worker.change_second = lambda data: None
    assert count_skips() == 0 and not any("not_finite" in key for key in worker.logged)


@pytest.mark.parametrize("group", ["+clipx=grpo", "+clipx=observe"])
def test_a_gradient_that_is_not_finite_by_itself_is_said_to_be_once(stepping_worker, caplog, group):
    """On the way back through the model, while everything that the loss is computed from is finite."""
    worker, count_skips = stepping_worker(group)
    assert count_skips() == 0 and not messages_in(caplog)
    worker.gradient_scale = torch.inf
    assert count_skips() == 3 and count_skips() == 3
    (message,) = messages_in(caplog)
    assert_names(message, "although everything", "verl skips an update", "norm is inf")
    assert worker.logged["clipx/not_finite/rank"] == [-1]
    assert worker.logged["clipx/not_finite/log_probs"] == [0.0]
    worker.gradient_scale = 1.0
    assert count_skips() == 0 and not any("not_finite" in key for key in worker.logged)


def test_what_verls_trainer_hands_on_of_whole_sequences_ends_no_skipped_update(stepping_worker):
    def add_fields_of_whole_sequences(data):
        rows = [torch.zeros(len(row) + 3) for row in data["advantages"].unbind()]
        data["log_probs"] = data["entropy"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    worker, count_skips = stepping_worker("+clipx=grpo")
    worker.change_second = add_fields_of_whole_sequences
    worker.gradient_scale = torch.inf
    assert count_skips() == 3 and worker.logged["clipx/not_finite/rank"] == [-1]


def test_a_failure_to_name_what_was_not_finite_ends_no_run_after_its_first_rollout_batch(
    stepping_worker, monkeypatch, caplog
):
    worker, count_skips = stepping_worker("+clipx=grpo")
    assert count_skips() == 0
    monkeypatch.setattr("verl_clipx.training.worker.skipped_updates.not_finite_in", lambda data: 1 / 0)
    worker.gradient_scale = torch.inf
    assert (count_skips(), count_skips()) == (3, 3) and caplog.text.count("naming what was not finite failed") == 1


def test_the_rank_of_what_is_not_finite_is_logged_by_every_rank(stepping_worker, monkeypatch):
    worker, count_skips = stepping_worker("+clipx=grpo")
    monkeypatch.setattr(worker.engine, "get_data_parallel_size", lambda: 4, raising=False)
    # Rank 2's share of the sum; this rank, 0, has nothing.
    share_of_rank_2 = torch.tensor([0.0, 0.0, 1.0, 0.0, 3.0], dtype=torch.float64)
    monkeypatch.setattr(worker.skipped_updates, "_all_reduce", lambda vector: vector + share_of_rank_2[: len(vector)])
    worker.gradient_scale = torch.inf
    count_skips()
    assert worker.logged["clipx/not_finite/rank"] == [2.0]
    assert worker.logged["clipx/not_finite/log_probs"] == [3.0]


def test_the_optimizers_step_is_wrapped_once_and_returns_what_it_did(stepping_worker):
    worker, count_skips = stepping_worker("+clipx=grpo")
    wrapped = worker.engine.optimizer_step
    assert count_skips() == 0 and count_skips() == 0
    assert worker.engine.optimizer_step is wrapped
    # Outside an update, as verl's Tinker worker calls it.
    worker.engine.norm = 3.0
    assert worker.engine.optimizer_step() == 3.0


def test_a_step_whose_norm_is_not_finite_is_not_taken():
    step = OptimizerStep()
    optimizer_step = record_gradient_norm(lambda scale: scale * torch.tensor(math.inf), lambda: step)
    assert optimizer_step(scale=2) == math.inf
    assert step.gradient_norm == math.inf and not step.taken


def test_an_engine_that_steps_without_its_optimizer_step_stops_at_the_first_update(stepping_worker):
    worker, count_skips = stepping_worker("+clipx=grpo")
    assert count_skips() == 0
    # As an engine that keeps the method when it is made.
    worker, count_skips = stepping_worker("+clipx=grpo")
    worker.engine.optimizer_step = lambda: 1.0
    with pytest.raises(RuntimeError, match=r"SimpleNamespace .* before set_loss_fn"):
        count_skips()


@pytest.fixture
def stepping_worker(worker_and_data, caplog):
    """Makes a worker of some configuration, and what trains a rollout batch and returns the logged number of skips."""

    def build(*overrides):
        worker, data = worker_and_data(*THREE_UPDATES, *overrides, kind=SteppingWorker)

        def count_skips():
            worker.logged = tu.get(worker.train_mini_batch(data.clone()), "metrics")
            (number,) = worker.logged["clipx/skipped_updates"]
            return number

        return worker, count_skips

    caplog.set_level(logging.WARNING, "verl_clipx")
    return build


def costs_of(train, worker, name):
    """What a call costs: host syncs, calls of a registered loss, hooks, and reductions over the ranks."""
    counts = Counter()
    loss = POLICY_LOSS_REGISTRY[name]
    register_hook = torch.Tensor.register_hook

    def count_loss(**arguments):
        counts["losses"] += 1
        return loss(**arguments)

    def count_hook(*arguments):
        counts["hooks"] += 1
        return register_hook(*arguments)

    reductions_before = worker.reductions
    with pytest.MonkeyPatch.context() as patched, counted_host_syncs() as syncs:
        patched.setitem(POLICY_LOSS_REGISTRY, name, count_loss)
        patched.setattr(torch.Tensor, "register_hook", count_hook)
        train()
    counts["reductions"] = worker.reductions - reductions_before
    return {"host syncs": sorted(syncs.calls), **counts}


def test_after_the_first_rollout_batch_the_receipt_costs_nothing(stepping_worker):
    costs_of_first = {}
    costs_of_second = {}
    for receipt in ("stop", "off"):
        worker, train = stepping_worker(*LAGGED, f"clipx.receipt={receipt}")
        # At ratio 1 throughout, so that the receipt never has all that it looks for.
        _, at_ratio_one = micro_batch(example() | {"log_prob": example()["old_log_prob"]}, ROWS)
        worker.output["log_probs"] = at_ratio_one["log_probs"].requires_grad_(True)
        costs_of_first[receipt] = costs_of(train, worker, "clipx_acpo")
        costs_of_second[receipt] = costs_of(train, worker, "clipx_acpo")
    assert costs_of_second["stop"] == costs_of_second["off"]
    # The first one does cost something, so they can be told apart.
    with_receipt = costs_of_first["stop"]
    without = costs_of_first["off"]
    assert len(with_receipt["host syncs"]) > len(without["host syncs"])
    assert with_receipt["losses"] > without["losses"]


def test_the_statistics_that_bounds_follow_are_the_sums_of_all_ranks(stepping_worker, monkeypatch):
    # Another rank has the same tokens.
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda vector, op, group: vector.mul_(len(group)))

    def count_tokens(group):
        worker, train = stepping_worker(*LAGGED)
        monkeypatch.setattr(worker.engine, "get_data_parallel_group", lambda: group)
        train()
        train()
        return sum(sum(values) for key, values in worker.logged.items() if "count/bin" in key)

    assert count_tokens(group=(0, 1)) == 2 * count_tokens(group=None) > 0


@pytest.mark.parametrize("group", ["+clipx=grpo", "+clipx=observe"])
def test_distillations_loss_of_the_logits_passes_through(actor, group):
    config = actor(group)
    distillation = DistillationConfig(distillation_loss=DistillationLossConfig(loss_mode="forward_kl_topk", topk=2))
    loss_fn = partial(distillation_ppo_loss, config=config, distillation_config=distillation)
    wrapped = with_micro_batch(loss_fn, config.policy_loss.clipx, Schedule(), OptimizerStep)
    batch = example()
    data, output = micro_batch(batch, [0, 1])
    tokens = len(output["log_probs"].values())
    ids = torch.tensor([0, 2]).expand(tokens, 2)
    teacher = torch.tensor([0.5, 0.25]).log().expand(tokens, 2)
    for name, values in (("teacher_ids", ids), ("teacher_logprobs", teacher)):
        data[name] = torch.nested.nested_tensor_from_jagged(values, offsets=output["log_probs"].offsets())
    # As verl's engines call it, from the logits and then from the model's output.
    losses = wrapped(student_logits=torch.zeros(1, tokens, 4), data=data)
    # A uniform student over 4 tokens: 0.5 log(0.5 / 0.25) + 0.25 log(0.25 / 0.25).
    torch.testing.assert_close(losses["distillation_losses"], torch.full((1, tokens), 0.5 * math.log(2)))
    for name, values in losses.items():
        output[name] = torch.nested.nested_tensor_from_jagged(values[0], offsets=output["log_probs"].offsets())
    loss, metrics = wrapped(model_output=output, data=data)
    assert loss.isfinite() and metrics["distillation/loss"].values
    assert ("clipx/ratio_mean" in metrics) == ("observe" not in group)


def test_dropout_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.0))
    # What is applied by a function inside attention no module shows, but the configuration does.
    kinds = ("attention_dropout", "resid_pdrop")
    model.config = PretrainedConfig(**dict.fromkeys(kinds, 0.0))
    refuse_dropout(model)
    for key in kinds:
        model.config = PretrainedConfig(**{key: 0.2})
        with pytest.raises(ValueError, match=rf"{key}=0\.2"):
            refuse_dropout(model)
    refuse_dropout([model[:2], torch.nn.Linear(2, 2)])
    model[1].p = 0.1
    with pytest.raises(ValueError, match=r"1=0\.1\..*scope=lagged or micro_batch"):
        refuse_dropout(model[:2])
