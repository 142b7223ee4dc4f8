"""verl's training worker, extended by what the plugin does for every mini-batch and micro-batch.

Without a clipx node in its configuration it behaves exactly like verl's.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from verl_clipx.losses.applying.metrics import (
    AGE_KEY_BY_SUM_KEY,
    add_metrics_over_updates,
    merge_metrics_of_passes,
    rename_ages,
    replace_sums_with_metrics,
)
from verl_clipx.losses.base.method import NODE
from verl_clipx.run.config import Observe, Settings
from verl_clipx.run.record import RunRecord
from verl_clipx.run.run_files import checkpoint_step
from verl_clipx.run.trainer import FULLY_ASYNC
from verl_clipx.training.worker.declared_columns import compute_with_columns
from verl_clipx.training.worker.extra_pass import extra_pass, refuse_attention_on_a_slice, refuse_dropout
from verl_clipx.training.worker.layout import AGE, ages
from verl_clipx.training.worker.loss_function import exclude_rejected_tokens, with_micro_batch
from verl_clipx.training.worker.observe import observe_registered
from verl_clipx.training.worker.observers import METRICS, REPORT, RankObservers
from verl_clipx.training.worker.plan import plan_step, token_passes
from verl_clipx.training.worker.receipt import Receipt
from verl_clipx.training.worker.recut import measure_recut
from verl_clipx.training.worker.skipped_updates import SkippedUpdates, check_gradient_norm, record_gradient_norm
from verl_clipx.training.worker.state import ControllerState, restored_state, state_rank, write_state
from verl_clipx.training.worker.step import OptimizerStep, RolloutBatch
from verl_clipx.training.worker.trace_writer import TRACES
from verl_clipx.training.worker.tracer import Tracer
from verl_clipx.training.worker.update_fingerprints import FINGERPRINTS, HASHES, UpdateFingerprints


def clipx_node(loss_fn: Any) -> Settings | Observe | None:
    """Return the clipx node of the ActorConfig that verl's loss function, a partial, is bound to; None without one."""
    config = loss_fn.keywords.get("config") if isinstance(loss_fn, partial) else None
    node = getattr(getattr(config, "policy_loss", None), "clipx", None)
    return node if isinstance(node, Settings | Observe) else None


class ClipxTraining:
    """Adds to verl's TrainingWorker what a run with a clipx node needs.

    It is a mixin. A class that derives from it names it before verl's TrainingWorker.
    """

    # verl's ActorConfig, and its policy-loss node with the clipx node; None in a run without one.
    actor_config: Any = None
    policy_loss: Any = None
    skipped_updates: SkippedUpdates | None = None
    # What the bounds remember from step to step. +clipx=observe has no bounds, and its state is not saved.
    state: ControllerState
    # The pass over a mini-batch before its update; None if no step needs one.
    extra_pass: partial | None = None
    # The observers of the run, which the wrapped loss function shares; empty without a clipx node.
    observers: RankObservers | tuple[()] = ()
    # The current rollout batch and optimizer step.
    batch: RolloutBatch | None = None
    step: OptimizerStep | None = None
    # How many rollout batches verl has counted so far.
    rollout_batch_count: int = 0
    # Whether the floor was measured a second time since the start, with other micro-batches.
    has_measured_recut: bool = False
    # Whether an update has shown that the worker learns the norm of its gradient.
    is_norm_known: bool = False
    # Whether the run has had a sample of older weights. Until then, the age of every sample is 0 and is not logged.
    has_stale_samples: bool = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn):
        """Install verl's loss function.

        If the run has a clipx node, the function is wrapped, and the state of the bounds and the observers begin anew.

        Raises:
            RuntimeError: the ranks share sequences and the attention does not support it, or the receipt finds other
                settings than the driver's.
            ValueError: the model has dropout and the run needs the extra pass, or the traces have no folder.
        """
        settings = clipx_node(loss_fn)
        if settings is None:
            # Whatever an earlier call installed, this worker now trains as verl's own.
            self.policy_loss = None
            self.observers = ()
            super().set_loss_fn(loss_fn)
            return
        refuse_attention_on_a_slice(self.engine)
        config = loss_fn.keywords["config"]
        self.actor_config = config
        self.policy_loss = config.policy_loss
        self.state = ControllerState()
        self.observers = self._observers(settings, loss_fn)
        # So that `self.step` learns the norm of its gradient, on every rank.
        self.engine.optimizer_step = record_gradient_norm(self.engine.optimizer_step, lambda: self.step)
        self.is_norm_known = False
        self.skipped_updates = SkippedUpdates(self.engine, self.rank, self._all_reduce, self.observers)
        record = config.policy_loss.run.record
        # Before step critic_warmup verl trains only the critic, and counts these steps too.
        critic_steps = max((record.length.critic_warmup or 0) - 1, 0)
        self.rollout_batch_count = max(self.rollout_batch_count, critic_steps * record.schedule.batches_a_step)
        if self.rank == 0:
            # Printed and not logged, because verl's workers show only warnings.
            print(record.line, flush=True)
        self._prepare(settings, config)
        super().set_loss_fn(
            with_micro_batch(
                loss_fn, settings, record.schedule, current_step=lambda: self.step, observers=self.observers
            )
        )

    def _prepare(self, settings: Settings | Observe, config: Any) -> None:
        """Prepare what the loss needs before the first step: the extra pass, and compiled functions."""
        if isinstance(settings, Observe):
            observe_registered(config.policy_loss.loss_mode)
            return
        device = get_device_id()
        functions = settings.functions(device)
        if config.policy_loss.run.record.schedule.may_need_extra_pass:
            refuse_dropout(self.engine.module)
            self.extra_pass = partial(extra_pass, config.policy_loss, self.engine, cut=self._cut(), device=device)
        functions.prepare(device, counted=settings.update is not None, asks_for=settings.asks_for)
        if self.rank == 0 and functions.compiled:
            print(COMPILED, flush=True)

    def _observers(self, settings: Settings | Observe, loss_fn: partial) -> RankObservers:
        """Make the observers of this rank's updates: the fingerprints and, if asked for, the receipt and the traces."""
        config = loss_fn.keywords["config"]
        observers = RankObservers()
        observers.add(UpdateFingerprints(), FINGERPRINTS)
        record = config.policy_loss.run.record
        engine = self.engine
        if isinstance(settings, Settings) and settings.receipt != "off":
            dtype = dtype_of(self.engine_config)
            receipt = Receipt(
                settings=settings,
                record=record,
                loss_fn=loss_fn,
                all_reduce=self._all_reduce,
                rank=engine.get_data_parallel_rank(),
                tested=not record.untested,
                half=dtype not in FULL_PRECISION,
                scaled=dtype in SCALED,
                has_outputs=engine.is_mp_src_rank_with_outputs(),
            )
            # Without a name, so that its exceptions end the run.
            observers.add(receipt)
        if settings.trace is not None and engine.is_mp_src_rank_with_outputs():
            tracer = Tracer(
                settings.trace,
                observers=observers,
                tokenizer=self.model_config.tokenizer,
                rank=engine.get_data_parallel_rank(),
                ranks=engine.get_data_parallel_size(),
                batches_a_step=record.schedule.batches_a_step,
                batch_count=planned_batches(record, config),
            )
            observers.add(tracer, TRACES)
        return observers

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_mini_batch(self, data):
        """verl's loop over the mini-batches of a rollout batch. With Lopti, it runs once for each pass."""
        if self.policy_loss is None:
            return super().train_mini_batch(data)
        return compute_with_columns(data, self._train_and_count)

    def _train_and_count(self, data):
        """Train on a rollout batch and count it; return its metrics, or None on a rank without outputs."""
        self.batch = RolloutBatch(self.rollout_batch_count)
        try:
            metrics = self._train_rollout_batch(data)
        finally:
            self.batch = None
        self.rollout_batch_count += 1
        return None if metrics is None else tu.get_tensordict({}, {"metrics": metrics}).cpu()

    def _train_rollout_batch(self, data):
        """Train on a rollout batch in all passes; return its metrics by key, or None on a rank without outputs."""
        observers = self.observers
        version = self.rollout_batch_count // self.policy_loss.run.record.schedule.batches_a_step
        age = observers.run(METRICS, lambda: ages(data, version))
        if age is not None and isinstance(self.policy_loss.clipx, Settings):
            data[AGE] = age
        observers.begin_rollout_batch(data, self.batch)
        passes = token_passes(self.policy_loss)
        metrics_of_passes = {}
        for token_pass in passes:
            is_last = token_pass is passes[-1]
            self.batch.begin(token_pass, last=is_last)
            # verl removes keys from the data that it is given, and a later pass needs them.
            data_of_pass = data if is_last else data.copy()
            output = super().train_mini_batch(data_of_pass)
            if output is not None:
                pass_name = None if token_pass is None else token_pass.name
                metrics_of_passes[pass_name] = tu.get(output, "metrics")
        metrics_of_batch = self.skipped_updates.end_rollout_batch(self.batch)
        metrics_of_batch |= observers.end_rollout_batch(self.batch)
        if not metrics_of_passes:
            return None

        def merge_passes() -> dict[str, list[Any]]:
            """Return the metrics of all passes, each complete by itself."""
            completed = {name: self._complete_metrics(metrics) for name, metrics in metrics_of_passes.items()}
            return merge_metrics_of_passes(completed)

        merged = observers.run(METRICS, merge_passes)
        if merged is None:
            # The plugin's metrics of the loss failed. What is left are verl's own, of the last pass.
            last_metrics = list(metrics_of_passes.values())[-1]
            merged = observers.drop_metrics(last_metrics)
        return merged | metrics_of_batch

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data):
        """verl's optimizer step, with the bounds decided beforehand."""
        if self.policy_loss is None:
            return super().train_batch(data)
        batch = self.batch
        observers = self.observers
        if batch is None:
            # Outside train_mini_batch each update counts as the first of a rollout batch, and nothing observes it.
            batch = RolloutBatch()
            observers = RankObservers()
        # Taken out before verl moves the mini-batch to the accelerator: the hashes are read on the host.
        row_hashes = data.pop(HASHES, None)
        step = self._plan_step(data, batch)
        self.step = step
        step.row_hashes = row_hashes
        self._measure_recut(step, data)
        try:
            observers.begin_update(step, batch)
            output = super().train_batch(data)
            if not self.is_norm_known:
                check_gradient_norm(self.engine, step)
                self.is_norm_known = True
            observers.end_update(step)
            self.skipped_updates.end_update(step, batch, data)
        finally:
            self.step = None
        self.state.end_step(step, batch.position)
        batch.update += 1
        return output

    def _postprocess_output(self, output, *, forward_only, **named):
        """Join a pass's metrics over the ranks as verl does, and complete the plugin's that need a whole update.

        verl's Tinker worker makes an update without train_batch, and joins its metrics here as well.
        """
        joined = super()._postprocess_output(output, forward_only=forward_only, **named)
        if self.policy_loss is None:
            return joined
        metrics = tu.get(joined, "metrics")
        observers = self.observers
        if forward_only:
            metrics.pop(REPORT, None)
            return joined
        observers.hear(metrics)
        observers.run(METRICS, lambda: exclude_rejected_tokens(metrics))
        observers.drop_metrics(metrics)
        if self.batch is None:
            # Without rollout batches, a run has begun after its first update, and each update logs what is off.
            observers.begin()
            metrics.update(observers.off_metrics())
        return joined

    def _plan_step(self, data: Any, batch: RolloutBatch) -> OptimizerStep:
        """Plan the next optimizer step, and add to verl's data what its micro-batches need.

        Args:
            data: this rank's mini-batch.
            batch: the rollout batch that the update counts to. Outside train_mini_batch it is one made for the update,
                and `self.batch` is None.

        Raises:
            RuntimeError: the run has Lopti, whose passes only train_mini_batch makes.
        """
        settings = self.policy_loss.clipx
        schedule = self.policy_loss.run.record.schedule
        if batch.token_pass is None and schedule.passes:
            raise RuntimeError(LOPTI_WITHOUT_PASSES)
        step = plan_step(
            self.policy_loss,
            self.state,
            batch,
            data,
            extra_pass=self.extra_pass,
            all_reduce=self._all_reduce,
        )
        step.of_rollout_batch = self.batch is not None
        step.at_ratio_one = step.of_rollout_batch and schedule.starts_at_ratio_one and batch.is_first
        if isinstance(settings, Settings) and settings.needs_entropy:
            # The plugin reads the entropy; verl's loss function gets it only if verl asked for it.
            step.entropy_wanted = tu.get(data, key="calculate_entropy", default=False)
            tu.assign_non_tensor(data, calculate_entropy=True)
        if not batch.last_pass:
            # Lopti's passes together are one step of the learning rate's schedule, which the last of them makes.
            tu.assign_non_tensor(data, update_lr_scheduler=False)
        return step

    def _measure_recut(self, step: OptimizerStep, data: Any) -> None:
        """Measure the floor of the first update after a start a second time, with other micro-batches."""
        if self.has_measured_recut or not step.at_ratio_one:
            return
        self.has_measured_recut = True
        step.recut = measure_recut(self.actor_config, self.engine, data, step, cut=self._cut())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
        """Save verl's checkpoint and, in the same folder, the state of the bounds."""
        result = super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)
        if self.policy_loss is None:
            return result
        settings = self.policy_loss.clipx
        if isinstance(settings, Settings):
            if self.state.waiting is not None:
                self.state.keep_waiting(self._all_reduce(self.state.waiting.of_this_rank))
            if torch.distributed.get_rank() == state_rank(self.engine, get_device_id()):
                write_state(Path(local_path), self.state, settings.method)
        self.observers.flush()
        return result

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False):
        """Load verl's checkpoint and the state of the bounds, which one rank reads and sends to the others."""
        if self.policy_loss is None:
            return super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
        settings = self.policy_loss.clipx
        if local_path is not None and isinstance(settings, Settings):
            rank = state_rank(self.engine, get_device_id())
            self.state = restored_state(Path(local_path), settings, rank, get_device_id())
        # The name of verl's folder says how many steps its weights were trained for.
        trained_batches = checkpoint_step(local_path) * self.policy_loss.run.record.schedule.batches_a_step
        self.rollout_batch_count = max(self.rollout_batch_count, trained_batches)
        return super().load_checkpoint(local_path, hdfs_path, del_local_after_load)

    def _complete_metrics(self, metrics: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Return the metrics of a pass, with those that are made of whole mini-batches or of all its updates.

        Args:
            metrics: the pass's, from a key to its value in each update.
        """
        metrics = replace_sums_with_metrics(metrics)
        settings = self.policy_loss.clipx
        if isinstance(settings, Observe):
            return metrics
        if any(age for key in AGE_KEY_BY_SUM_KEY for age in metrics.get(key, ())):
            self.has_stale_samples = True
        return rename_ages(add_metrics_over_updates(metrics, settings.method), shown=self.has_stale_samples)

    def _cut(self) -> dict[str, Any]:
        """Return how verl's train_batch divides a mini-batch into micro-batches, by the keys of data that it sets."""
        keys = ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu", "use_fused_kernels")
        cut = {key: getattr(self.engine_config, key) for key in keys}
        cut["use_remove_padding"] = self.model_config.get("use_remove_padding", False)
        return cut

    def _all_reduce(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the sum of a vector over the data-parallel ranks, all of which have to call this."""
        total = vector.to(get_device_id())
        group = self.engine.get_data_parallel_group()
        if group is not None:
            total = total.clone()
            torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.SUM, group=group)
        return total


def planned_batches(record: RunRecord, config: Any) -> int | None:
    """Return how many rollout batches the whole run has; None if the worker cannot know it.

    verl's trainers set the number in the configuration before they build their workers. Only the fully asynchronous
    trainer sets it afterwards: its workers keep verl's default, or what the user has set for the learning rate.

    Args:
        record: the run's.
        config: verl's ActorConfig.
    """
    total_steps = config.optim.total_training_steps
    if record.trainer.kind == FULLY_ASYNC or total_steps <= 0:
        return None
    return total_steps


# verl's names of float32.
FULL_PRECISION = ("fp32", "float32", "32")

# verl's names of float16, in which its engines scale gradients so that they don't underflow.
SCALED = ("fp16", "float16", "16")


def dtype_of(config: Any) -> str:
    """Return verl's name of the dtype that an engine computes in; `config` is the engine's."""
    precision = getattr(config, "mixed_precision", None)
    if not isinstance(precision, Mapping):
        # verl's default.
        return "bf16"
    return str(precision.get("param_dtype", "bf16"))


LOPTI_WITHOUT_PASSES = (
    f"+{NODE}/update=lopti needs both passes of train_mini_batch, but this worker calls only train_batch. Train with "
    f"train_mini_batch, or remove +{NODE}/update=lopti."
)
COMPILED = "clipx: compiling the loss and its statistics before the first step."
