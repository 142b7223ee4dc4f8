"""verl's training worker, extended by what the plugin does for every mini-batch and micro-batch.

Without a clipx node in its configuration it behaves exactly like verl's.
"""

import logging
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from verl_clipx.base.method import NODE
from verl_clipx.common.run_files import checkpoint_step
from verl_clipx.loss.metrics import with_ratios_of_sums
from verl_clipx.loss.rollout_metrics import VERSIONS_SUM, merged_passes, with_staleness, with_updates
from verl_clipx.run.announcement import announcement
from verl_clipx.run.config import Observe, Settings, clip_range
from verl_clipx.run.facts import RunFacts
from verl_clipx.run.support import untested
from verl_clipx.run.trace import Trace
from verl_clipx.run.verl_keys import BYPASS, ROLLOUT_RS
from verl_clipx.worker.engine_watch import EngineWatch
from verl_clipx.worker.extra_pass import extra_pass, refuse_attention_on_a_slice, refuse_dropout
from verl_clipx.worker.layout import padded
from verl_clipx.worker.loss_function import call_of, over_remaining, with_micro_batch
from verl_clipx.worker.observe import SEQUENCE_LEVEL, observe_registered
from verl_clipx.worker.planner import MiniBatchStatistics, StepPlanner
from verl_clipx.worker.receipt import Receipt, in_half_precision
from verl_clipx.worker.rejection import rejection_of
from verl_clipx.worker.rows import AGE, ages
from verl_clipx.worker.skipped_updates import SkippedUpdates
from verl_clipx.worker.state import description, restored_state, state_rank, write_state
from verl_clipx.worker.step import FIRST, OptimizerStep, RolloutBatch, UpdateObserver
from verl_clipx.worker.tracer import Tracer

logger = logging.getLogger(__name__)


def clipx_node(loss_fn: Any) -> Settings | Observe | None:
    """The clipx configuration inside verl's loss function; None if the run has none.

    Args:
        loss_fn: what verl's ActorRolloutRefWorker passes to `set_loss_fn`: a partial with the ActorConfig as `config`.
    """
    config = loss_fn.keywords.get("config") if isinstance(loss_fn, partial) else None
    policy_loss = getattr(config, "policy_loss", None)
    node = policy_loss.get("clipx", None) if policy_loss is not None else None
    return node if isinstance(node, Settings | Observe) else None


class ClipxTraining:
    """Mixin that stands before verl's TrainingWorker and adds to it what a run with a clipx node needs."""

    # None without a clipx node. The planner is also None under +clipx=observe, where the steps are verl's own.
    watch: EngineWatch | None = None
    skipped: SkippedUpdates | None = None
    planner: StepPlanner | None = None
    # None unless the run asks for them.
    tracer: Tracer | None = None
    receipt: Receipt | None = None
    # The current rollout batch and optimizer step.
    batch: RolloutBatch | None = None
    step: OptimizerStep | None = None
    # How many rollout batches verl has counted so far, and after how many of them the rollout gets new weights.
    rollouts: int = 0
    parameter_sync_step: int = 1
    # Whether the run has had a sample of older weights. Until then, the age of every sample is 0 and is not logged.
    stale: bool = False
    # Whether verl's trainer rejects tokens before the worker gets them.
    rejects: bool = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn):
        """Installs verl's loss function, wrapped if the run has a clipx node.

        Raises:
            RuntimeError: ranks share sequences, and the model's attention does not support it.
            ValueError: the model has dropout, which the extra pass would leave out; the trace has no folder; or verl's
                registry lacks the loss to observe.
        """
        settings = clipx_node(loss_fn)
        if settings is None:
            super().set_loss_fn(loss_fn)
            return
        refuse_attention_on_a_slice(self.engine)
        config, device = loss_fn.keywords["config"], get_device_id()
        run, functions = config.policy_loss.run, settings.functions(device)
        self.rejects = run.options.get(ROLLOUT_RS) is not None and not run.options.get(BYPASS)
        # verl counts the steps before critic_warmup too, in which it trains only the critic.
        self.parameter_sync_step = run.batches_a_step
        self.rollouts = max(self.rollouts, (run.critic_warmup - 1) * run.batches_a_step)
        if self.rank == 0:
            # Printed and not logged, because verl's workers show only warnings.
            print(announcement(config.policy_loss), flush=True)
        if settings.trace is not None and self.engine.is_mp_src_rank_with_outputs():
            self.tracer = self._tracer(settings.trace, run, config.optim.total_training_steps)
        if self.watch is None:
            self.watch = EngineWatch(self.engine)
            self.skipped = SkippedUpdates(self.engine, self.watch, self.rank, self._all_reduce)
        if isinstance(settings, Observe):
            loss_mode = config.policy_loss.loss_mode
            observe_registered(loss_mode)
            functions.prepare(device, clip_range(config), loss_mode in SEQUENCE_LEVEL)
        else:
            self._plan_with(settings, loss_fn)
            functions.prepare(device, counted=settings.update is not None)
            if self.rank == 0 and functions.compiled:
                print(COMPILED, flush=True)
        super().set_loss_fn(with_micro_batch(loss_fn, settings, lambda: self.step, self.tracer, self.receipt))

    def _plan_with(self, settings: Settings, loss_fn: partial) -> None:
        """Creates the planner, and the observers that the settings ask for."""
        policy_loss = loss_fn.keywords["config"].policy_loss
        self.planner = StepPlanner(
            settings,
            extra_pass=self._extra_pass,
            all_reduce=self._all_reduce,
            at_ratio_one=policy_loss.run.makes_one_update,
            rejects=self.rejects,
            rejection=rejection_of(policy_loss),
        )
        if self.planner.needs_extra_pass:
            refuse_dropout(self.engine.module)
        if settings.receipt != "off":
            self.receipt = Receipt(
                settings,
                policy_loss.run,
                loss_fn,
                partial(call_of, settings),
                self._all_reduce,
                rank=self.rank,
                tested=not untested(policy_loss.run.options),
                half=in_half_precision(self.engine_config),
            )

    @property
    def observers(self) -> list[UpdateObserver]:
        """Everything that observes each update of a rollout batch."""
        return [one for one in (self.receipt,) if one is not None]

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_mini_batch(self, data):
        """verl's loop over the mini-batches of a rollout batch. With Lopti, it runs once for each group of tokens."""
        if self.watch is None:
            return super().train_mini_batch(data)
        self.batch = RolloutBatch()
        try:
            with nullcontext() if self.tracer is None else self.tracer.rollout_batch(data, self.rollouts):
                metrics = self._train_rollout_batch(data)
        finally:
            self.batch = None
        self.rollouts += 1
        return None if metrics is None else tu.get_tensordict({}, {"metrics": metrics}).cpu()

    def _train_rollout_batch(self, data):
        metrics = {}
        token_passes = [None] if self.planner is None else self.planner.passes(data)
        for index, token_pass in enumerate(token_passes):
            last = index == len(token_passes) - 1
            self.batch.begin(token_pass, last=last)
            # verl removes keys from the data that it is given.
            output = super().train_mini_batch(data if last else data.copy())
            if output is not None:
                metrics[None if token_pass is None else token_pass.name] = self._finished(
                    tu.get(output, "metrics"), updates=self.batch.update * len(token_passes)
                )
        others = {}
        for observer in self.observers:
            others |= observer.end_rollout_batch(self.batch)
        return merged_passes(metrics) | self.skipped.end_rollout_batch(self.batch) | others if metrics else None

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data):
        """verl's optimizer step, with the bounds decided beforehand.

        Raises:
            RuntimeError: Lopti in a worker that calls only train_batch; or the receipt found a difference and stops.
        """
        if self.watch is None:
            return super().train_batch(data)
        self.watch.gradient_norm = None
        self.step = step = self._observed_step(data) if self.planner is None else self._planned_step(data)
        observers = [] if self.batch is None else self.observers
        try:
            for observer in observers:
                observer.begin_update(step, self.batch)
            output = super().train_batch(data)
            for observer in observers:
                observer.end_update(step)
            taken = self.skipped.end_update(step, self.batch, data)
        finally:
            self.step = None
        if self.batch is not None:
            self.batch.update += 1
        if self.planner is not None:
            self.planner.finish(step, taken=taken)
            if output is not None:
                over_remaining(tu.get(output, "metrics"))
        if self.tracer is not None:
            self.tracer.end_update(step.decided_from)
        return output

    def _planned_step(self, data: Any) -> OptimizerStep:
        """Plans the next optimizer step, and adds to verl's data what its micro-batches need."""
        batch, settings = self.batch or FIRST, self.planner.settings
        if batch.token_pass is None and settings.update is not None:
            raise RuntimeError(LOPTI_WITHOUT_PASSES)
        step = self.planner.plan(data, position=batch.position, token_pass=batch.token_pass)
        step.of_rollout_batch = self.batch is not None
        if self.batch is not None:
            age = ages(data, self.rollouts // self.parameter_sync_step)
            if age is not None:
                data[AGE] = age
        if settings.needs_entropy:
            step.entropy_wanted = tu.get(data, key="calculate_entropy", default=False)
            tu.assign_non_tensor(data, calculate_entropy=True)
        if not batch.last_pass:
            tu.assign_non_tensor(data, update_lr_scheduler=False)
        return step

    def _observed_step(self, data: Any) -> OptimizerStep:
        step = OptimizerStep(of_rollout_batch=self.batch is not None)
        if self.rejects:
            left = padded(data["response_mask"]).sum(dtype=torch.float64)
            step.counted_tokens = float(self._all_reduce(left))
        return step

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
        """Saves verl's checkpoint and, in the same folder, the state of the bounds."""
        if self.watch is None:
            return super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)
        try:
            result = super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)
        except Exception:
            # torch's own message for a full disk is "unexpected pos 4540608 vs 4540496".
            folder = next(one for one in (Path(local_path), *Path(local_path).parents) if one.exists())
            logger.error(UNSAVED, local_path, shutil.disk_usage(folder).free / 1e6)
            raise
        if self.planner is not None:
            self.planner.flush()
            if torch.distributed.get_rank() == state_rank(self.engine, get_device_id()):
                write_state(Path(local_path), self.planner.state, description(self.planner.method))
        if self.tracer is not None:
            self.tracer.writer.flush()
        return result

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False):
        """Loads verl's checkpoint and the state of the bounds, which one rank reads and sends to the others.

        Raises:
            RuntimeError: the bounds need a state, and the checkpoint has none that is usable.
        """
        if self.watch is None:
            return super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
        # The name of verl's folder says how many steps its weights were trained for.
        step = checkpoint_step(local_path)
        if self.planner is not None and local_path is not None:
            rank = state_rank(self.engine, get_device_id())
            self.planner.restore(restored_state(Path(local_path), self.planner.settings, rank, get_device_id()))
        self.rollouts = max(self.rollouts, step * self.parameter_sync_step)
        return super().load_checkpoint(local_path, hdfs_path, del_local_after_load)

    def _tracer(self, trace: Trace, run: RunFacts, last: int) -> Tracer:
        return Tracer(
            trace,
            rank=self.engine.get_data_parallel_rank(),
            ranks=self.engine.get_data_parallel_size(),
            tokenizer=self.model_config.tokenizer,
            batches_a_step=run.batches_a_step,
            last=last,
        )

    def _finished(self, metrics: dict[str, list[Any]], *, updates: int) -> dict[str, list[Any]]:
        """The metrics of a pass, with those added that need whole mini-batches or all of the pass's updates."""
        metrics = with_ratios_of_sums(metrics)
        if self.planner is None:
            return metrics
        settings = self.planner.settings
        metrics = with_updates(metrics, settings.method, each=settings.detailed)
        self.stale = self.stale or any(metrics.get(VERSIONS_SUM, ()))
        before = self.batch.updates_before_pass
        return with_staleness(
            metrics, updates_before=before, updates=updates, moves=self.stale, detailed=settings.detailed
        )

    def _extra_pass(self, data: Any, step: OptimizerStep) -> MiniBatchStatistics:
        # The keys that verl's train_batch sets.
        keys = ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu", "use_fused_kernels")
        cut = {key: getattr(self.engine_config, key) for key in keys}
        cut["use_remove_padding"] = self.model_config.get("use_remove_padding", False)
        settings, rejection = self.planner.settings, self.planner.rejection
        return extra_pass(settings, self.engine, data, step, rejection=rejection, cut=cut, device=get_device_id())

    def _all_reduce(self, vector: torch.Tensor) -> torch.Tensor:
        total = vector.to(get_device_id())
        group = self.engine.get_data_parallel_group()
        if group is not None:
            total = total.clone()
            torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.SUM, group=group)
        return total


LOPTI_WITHOUT_PASSES = (
    f"+{NODE}/update=lopti needs both passes of train_mini_batch, but this worker calls only train_batch. Train with "
    f"train_mini_batch, or remove +{NODE}/update=lopti."
)
UNSAVED = (
    "clipx: verl could not save %s; its disk has %.0f MB left. If the disk is full, free some space and start the run "
    "again: it resumes from the previous checkpoint."
)
COMPILED = "clipx: compiling the loss and its statistics before the first step."
