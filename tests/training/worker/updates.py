"""Updates as a worker makes them, through verl's own ppo_loss, of a mini-batch cut into micro-batches and ranks.

Not covered: engines and real ranks (tests/end_to_end).
"""

import contextlib
import math
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.utils.losses import ppo_loss

from tests.jagged import micro_batch
from verl_clipx.losses.contract.contract import example
from verl_clipx.run.schedule import Schedule
from verl_clipx.training.worker.extra_pass import extra_pass
from verl_clipx.training.worker.loss_function import exclude_rejected_tokens, with_micro_batch
from verl_clipx.training.worker.observers import RankObservers
from verl_clipx.training.worker.plan import plan_step
from verl_clipx.training.worker.receipt import Receipt
from verl_clipx.training.worker.state import ControllerState
from verl_clipx.training.worker.step import OptimizerStep, RolloutBatch

ROWS = [0, 1, 2, 3, 4, 5]
WHOLE = [[ROWS]]
# Ranks of micro-batches of rows.
SPLITS = {"micro-batches": [[[0], [1, 2], [3, 4, 5]]], "ranks": [[[0, 5], [3]], [[1, 2], [4]]]}


class UpdateResult(NamedTuple):
    """An update's loss, its gradient on each token's log-probability, (sequences, length), and verl's metrics."""

    loss: Tensor
    gradient: Tensor
    metrics: dict[str, Any]


def loss_function(config, step=None, observers=()):
    """verl's loss function as the worker wraps it."""
    step = OptimizerStep() if step is None else step
    policy_loss = config.policy_loss
    loss_fn = partial(ppo_loss, config=config)
    return with_micro_batch(
        loss_fn, policy_loss.clipx, policy_loss.run.record.schedule, lambda: step, RankObservers(*observers)
    )


def train(function, batch, split=WHOLE, *, change=None, **extra) -> UpdateResult:
    """One update by verl's loss function, or a wrapped one, on a padded mini-batch.

    `change` is done to verl's micro-batches; `extra`: entropy and reference, as for `micro_batch`.
    """
    log_prob = batch["log_prob"].detach().clone().requires_grad_(True)
    total_loss = 0.0
    metrics_of_ranks = []
    for micro_batches in split:
        metrics_of_rank = {}
        metrics_of_ranks.append(metrics_of_rank)
        for rows in micro_batches:
            data, output = micro_batch({**batch, "log_prob": log_prob}, rows, dp_size=len(split), **extra)
            if change is not None:
                change(data)
            loss, metrics = function(model_output=output, data=data)
            # verl averages gradients over ranks.
            (loss / len(split)).backward()
            total_loss = total_loss + loss.detach() / len(split)
            for key, value in metrics.items():
                if isinstance(value, Metric):
                    metrics_of_rank.setdefault(key, value.init_list()).append(value)
    gathered = {key: [metrics[key] for metrics in metrics_of_ranks] for key in metrics_of_ranks[0]}
    exclude_rejected_tokens(gathered)
    aggregated = {key: Metric.aggregate_dp(values) for key, values in gathered.items()}
    return UpdateResult(total_loss, log_prob.grad, aggregated)


class PassEngine:
    """Runs a loss function over the micro-batches of one rank, as verl's engines do without gradient."""

    def __init__(self, micro_batches):
        self._micro_batches = micro_batches

    def eval_mode(self, **_):
        return contextlib.nullcontext()

    def forward_backward_batch(self, data, loss_function, forward_only):
        assert forward_only
        for part, output in self._micro_batches:
            loss_function(output, part)


def run_extra_pass(policy_loss, batch, split, data, step, seen):
    """What the extra pass finds, summed over the ranks of a split; `data` is verl's whole mini-batch."""
    sums_of_ranks = []
    for micro_batches in split:
        parts = [micro_batch(batch, rows, dp_size=len(split), entropy=batch["entropy"]) for rows in micro_batches]
        sums_of_ranks.append(extra_pass(policy_loss, PassEngine(parts), data, step, seen, cut={}, device="cpu"))
    return {name: sum(sums[name] for sums in sums_of_ranks) for name in sums_of_ranks[0]}


def plan_with_extra_pass(config, batch, split=WHOLE, token_pass=None, all_reduce=lambda vector: vector):
    """A step as the worker plans it, with an extra pass over the ranks and micro-batches of a split."""
    return plan_step(
        config.policy_loss,
        ControllerState(),
        RolloutBatch(token_pass=token_pass),
        micro_batch(batch, ROWS)[0],
        extra_pass=partial(run_extra_pass, config.policy_loss, batch, split),
        all_reduce=all_reduce,
    )


class Update:
    """Runs updates as a worker does, with a receipt.

    Without a decision of the step, each of its micro-batches decides for itself; `loss_fn` comes in verl's place.
    """

    def __init__(self, config, step=None, *, tested=True, loss_fn=None, batch=None):
        self.step = step or OptimizerStep()
        self.batch = batch or RolloutBatch()
        settings = config.policy_loss.clipx
        record = config.policy_loss.run.record
        loss_fn = loss_fn or partial(ppo_loss, config=config)
        self.receipt = Receipt(settings, record, loss_fn, lambda part: part, rank=1, tested=tested)
        self.observers = RankObservers(self.receipt)
        self.loss_function = with_micro_batch(loss_fn, settings, Schedule(), lambda: self.step, self.observers)

    def begin(self):
        settings = self.receipt.settings
        if settings.adaptive and self.step.decision is None:
            object.__setattr__(settings, "scope", "micro_batch")
        self.observers.begin_update(self.step, self.batch)

    def run(
        self,
        micro_batches=(ROWS,),
        *,
        largest_move=0.0,
        nan_at=None,
        rollout_weight=None,
        engine_term=None,
        change=None,
        changed_micro_batches=None,
        loss_factors=None,
        make_outputs=None,
    ):
        """One update, by micro-batches of these rows; returns its gradient on each token's log-probability.

        Args:
            largest_move: at most added to a log-probability of the old policy's to make the current one's.
            nan_at: the row and the place of a token whose current log-probability is NaN.
            rollout_weight: that verl's rollout correction gives each token, for a rollout policy that makes it so.
            engine_term: what an engine adds to the loss, a function of the log-probabilities.
            change: what is done to verl's micro-batches, a function of the data.
            changed_micro_batches: the numbers of those to which it is done; None: all.
            loss_factors: an engine's, on the loss of each micro-batch; a tuple: one for each of its backward passes.
            make_outputs: what else the model's output has, a function of the sequences' offsets.
        """
        batch = example()
        mask = batch["mask"]
        moves = largest_move * torch.linspace(-1, 1, mask.numel()).view(mask.shape)
        current = batch["old_log_prob"] + moves
        if nan_at is not None:
            current[nan_at] = math.nan
        batch["log_prob"] = current.requires_grad_(True)
        if rollout_weight is not None:
            batch["sampler_log_prob"] = batch["old_log_prob"] - math.log(rollout_weight)
        entropy = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
        self.begin()
        for number, rows in enumerate(micro_batches):
            data, output = micro_batch(batch, rows, entropy=entropy, reference=batch["old_log_prob"] - 0.1)
            if rollout_weight is not None:
                data["rollout_is_weights"] = torch.full(mask.shape, rollout_weight)
            if change is not None and (changed_micro_batches is None or number in changed_micro_batches):
                change(data)
            if make_outputs is not None:
                output |= make_outputs(output["log_probs"].offsets())
            loss, _ = self.loss_function(model_output=output, data=data)
            factors = 0.5 if loss_factors is None else loss_factors[number]
            if not isinstance(factors, tuple):
                factors = (factors,)
            for factor in factors:
                added = 0 if engine_term is None else engine_term(output["log_probs"].values())
                (loss * factor + added).backward(retain_graph=True)
        self.observers.end_update(self.step)
        return batch["log_prob"].grad

    def end_rollout_batch(self, updates, updates_before_pass=0):
        """The largest difference, after as many updates in the last pass and before it."""
        return self.metrics(updates, updates_before_pass)["clipx/receipt"]

    def metrics(self, updates, updates_before_pass=0):
        """What is logged, after as many updates in the last pass and before it: the difference, and failed checks."""
        batch = RolloutBatch(update=updates, updates_before_pass=updates_before_pass)
        logged = self.observers.end_rollout_batch(batch)
        assert self.receipt.finished
        return {key: value for key, (value,) in logged.items()}


def aggregate_metrics(function, batch, split=WHOLE):
    """An update's metrics as verl aggregates them."""
    return train(function, batch, split, entropy=batch.get("entropy")).metrics


class VerlsWorker:
    """What the plugin's part of a worker needs of verl's: rank 0 of one, whose rollout batch is one mini-batch."""

    rank = 0
    model_config = SimpleNamespace(tokenizer=None, get=lambda key, default: default)
    engine_config = SimpleNamespace(
        use_dynamic_bsz=False, max_token_len_per_gpu=64, micro_batch_size_per_gpu=6, use_fused_kernels=False
    )

    def __init__(self, config, output):
        self.output = output
        self.engine = SimpleNamespace(
            module=torch.nn.Linear(1, 1),
            is_mp_src_rank_with_outputs=lambda: True,
            get_data_parallel_rank=lambda: 0,
            get_data_parallel_size=lambda: 1,
            get_data_parallel_group=lambda: None,
            optimizer_step=lambda: 1.0,
            infer_batch=lambda: None,
            eval_mode=lambda **_: contextlib.nullcontext(),
            forward_backward_batch=self.forward_of_reversed_rows,
        )
        self.set_loss_fn(partial(ppo_loss, config=config))

    def set_loss_fn(self, loss_fn):
        self.loss_fn = loss_fn

    def forward_of_reversed_rows(self, data, loss_function, forward_only):
        """A pass without gradient over a mini-batch whose rows are in reverse order."""
        assert forward_only
        output = {name: values.detach() for name, values in self.output.items()}
        for name, values in output.items():
            output[name] = torch.nested.as_nested_tensor([*values.unbind()][::-1], layout=torch.jagged)
        loss_function(output, data)

    def forward_backward(self, data):
        """As verl's Tinker worker."""
        _, metrics = self.loss_fn(model_output=self.output, data=data)
        return self._postprocess_output({"metrics": metrics}, forward_only=False)

    def _postprocess_output(self, output, *, forward_only):
        joined = {
            key: [value.aggregate() if isinstance(value, Metric) else value]
            for key, value in output["metrics"].items()
            if key.startswith("clipx")
        }
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": joined})

    def train_batch(self, data):
        output = self.forward_backward(data)
        self.engine.optimizer_step()
        return output

    def train_mini_batch(self, data):
        return self.train_batch(data)
