"""verl's training worker with the plugin's view of every mini-batch and micro-batch.

Without a clipx node in its configuration it behaves exactly like verl's.
"""

import logging
import math
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
from verl_clipx.base.shared_metrics import (
    CLOSED_FORM_DIFFERENCE,
    NOT_FINITE_LOG_PROBS,
    NOT_FINITE_RANK,
    PREDICTED_ERROR,
    REAL_ERROR,
    RECEIPT,
    SAMPLED,
    SKIPPED_UPDATES,
)
from verl_clipx.common.decided_from import DecidedFrom
from verl_clipx.common.run_files import checkpoint_step
from verl_clipx.driver.announcement import announcement
from verl_clipx.driver.config import Observe, Settings, clip_range
from verl_clipx.driver.hydra_nodes import RunFacts
from verl_clipx.driver.receipt import stops
from verl_clipx.driver.support import BYPASS, ROLLOUT_RS
from verl_clipx.driver.trace import Trace
from verl_clipx.loss.metrics import with_ratios_of_sums
from verl_clipx.loss.rollout_metrics import VERSIONS_SUM, merged_passes, with_staleness, with_updates
from verl_clipx.worker.anatomy import AnatomySums
from verl_clipx.worker.engine_watch import EngineWatch
from verl_clipx.worker.extra_pass import extra_pass, refuse_attention_on_a_slice, refuse_dropout
from verl_clipx.worker.layout import padded
from verl_clipx.worker.loss_function import call_of, over_remaining, with_micro_batch
from verl_clipx.worker.not_finite import OF_LOG_PROBS, NotFiniteLog, not_finite_in, together
from verl_clipx.worker.observe import SEQUENCE_LEVEL, observe_registered
from verl_clipx.worker.planner import MiniBatchStatistics, StepPlanner, tolerated_difference
from verl_clipx.worker.receipt import Receipt
from verl_clipx.worker.rejection import rejection_of
from verl_clipx.worker.rows import AGE, ages
from verl_clipx.worker.shadow import ShadowLosses
from verl_clipx.worker.state import ControllerState, UnusableState, description, read_state, write_state
from verl_clipx.worker.step import FIRST, OptimizerStep, RolloutBatch
from verl_clipx.worker.tracer import Tracer

logger = logging.getLogger(__name__)


# Of verl's engine.
PIPELINE = "pipeline_model_parallel_size"


def sampling_metrics(step: OptimizerStep) -> dict[str, float]:
    """What an optimizer step logs under clipx.precision; nothing without it."""
    found = {SAMPLED: step.passed, PREDICTED_ERROR: step.predicted_error, REAL_ERROR: step.error_before}
    return {metric.key: value for metric, value in found.items() if value is not None}


def clipx_node(loss_fn: Any) -> Settings | Observe | None:
    """The clipx configuration inside verl's loss function; None if the run has none.

    Args:
        loss_fn: what verl's ActorRolloutRefWorker gives to `set_loss_fn`: a partial with the ActorConfig as `config`.
    """
    config = loss_fn.keywords.get("config") if isinstance(loss_fn, partial) else None
    policy_loss = getattr(config, "policy_loss", None)
    node = policy_loss.get("clipx", None) if policy_loss is not None else None
    return node if isinstance(node, Settings | Observe) else None


class ClipxTraining:
    """What a TrainingWorker of verl gains when the run has a clipx node; to be mixed in before it."""

    # None under +clipx=observe, whose steps are verl's own, and without a clipx node.
    planner: StepPlanner | None = None
    tracer: Tracer | None = None
    watch: EngineWatch | None = None
    receipt: Receipt | None = None
    shadow: ShadowLosses | None = None
    anatomy: AnatomySums | None = None
    not_finite: NotFiniteLog | None = None
    # The rollout batch under way, and the optimizer step.
    batch: RolloutBatch | None = None
    step: OptimizerStep | None = None
    # The tokens behind the bounds of the latest optimizer step.
    decided_from: DecidedFrom = DecidedFrom.MICRO_BATCH
    # Rollout batches that verl counts so far, and after how many of them the rollout gets new weights.
    rollouts: int = 0
    parameter_sync_step: int = 1
    # Whether the pass without gradient that is under way computes the reference's log-probabilities.
    for_reference: bool = False
    # Whether the run has had a sample of older weights; where it can't, the age of samples is a constant.
    stale: bool = False
    # Whether verl's trainer rejects tokens before the worker gets them.
    rejects: bool = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn):
        """Installs verl's loss function, wrapped if the run has a clipx node."""
        settings = clipx_node(loss_fn)
        if settings is None:
            super().set_loss_fn(loss_fn)
            return
        refuse_attention_on_a_slice(self.engine)
        config, device = loss_fn.keywords["config"], get_device_id()
        run, functions = config.policy_loss.run, settings.functions(device)
        self.rejects = run.options.get(ROLLOUT_RS) is not None and not run.options.get(BYPASS)
        # verl trains the critic alone in the steps before this one, and counts them.
        self.parameter_sync_step = run.batches_a_step
        self.rollouts = max(self.rollouts, (run.critic_warmup - 1) * run.batches_a_step)
        if self.rank == 0:
            # Not logged: verl's workers show warnings alone.
            print(announcement(config.policy_loss), flush=True)
        if settings.trace is not None and self.engine.is_mp_src_rank_with_outputs():
            self.tracer = self._tracer(settings.trace, run, config.optim.total_training_steps)
        if self.watch is None:
            self.watch, self.not_finite = EngineWatch(self.engine, self._wants_fingerprint), NotFiniteLog(self.rank)
        if isinstance(settings, Observe):
            loss_mode = config.policy_loss.loss_mode
            observe_registered(loss_mode)
            functions.prepare(device, clip_range(config), loss_mode in SEQUENCE_LEVEL)
        else:
            self._refuse_sampling(settings)
            self.planner = StepPlanner(
                settings,
                extra_pass=self._extra_pass,
                all_reduce=self._all_reduce,
                rejects=self.rejects,
                rejection=rejection_of(config.policy_loss),
                tolerated=tolerated_difference(self.engine_config),
                rank=self.engine.get_data_parallel_rank(),
                ranks=self.engine.get_data_parallel_size(),
            )
            if self.planner.needs_extra_pass:
                refuse_dropout(self.engine.module)
            functions.prepare(device, counted=settings.update is not None)
            if self.rank == 0 and functions.compiled:
                print(COMPILED, flush=True)
            if settings.detailed:
                self.anatomy = AnatomySums(run, self._all_reduce, device)
            if settings.shadow is not None:
                self.shadow = ShadowLosses(settings, device, self._all_reduce)
            if settings.receipt != "off":
                self.receipt = Receipt(
                    settings,
                    run,
                    loss_fn,
                    partial(call_of, settings),
                    self._all_reduce,
                    stops=stops(settings.receipt, run.options),
                )
        super().set_loss_fn(with_micro_batch(loss_fn, settings, lambda: self.step, self.tracer, self.receipt))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def infer_batch(self, data):
        """verl's pass without gradient, which computes old_log_probs."""
        self.for_reference = tu.get(data, key="no_lora_adapter", default=False)
        return super().infer_batch(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_mini_batch(self, data):
        """verl's loop over the mini-batches of a rollout batch; with Lopti, once for each group of tokens."""
        self.batch = RolloutBatch()
        try:
            with nullcontext() if self.tracer is None else self.tracer.rollout_batch(data, self.rollouts):
                output = self._train_mini_batch(data)
        finally:
            self.batch = None
        self.rollouts += 1
        return output

    def _train_mini_batch(self, data):
        if self.planner is None:
            output = super().train_mini_batch(data)
            if self.watch is not None and output is not None:
                metrics = with_ratios_of_sums(tu.get(output, "metrics")) | self._skipped()
                return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": metrics}).cpu()
            return output
        metrics = {}
        token_passes = self.planner.passes(data)
        try:
            for index, token_pass in enumerate(token_passes):
                last = index == len(token_passes) - 1
                self.batch.begin(token_pass, last=last)
                # verl takes keys out of what it is given.
                output = super().train_mini_batch(data if last else data.copy())
                if output is not None:
                    metrics[None if token_pass is None else token_pass.name] = self._finished(
                        tu.get(output, "metrics"), updates=self.batch.update * len(token_passes)
                    )
        finally:
            self.watch.weights_of_log_probs = None
        receipt = self._receipt()
        others = {} if self.anatomy is None else self.anatomy.end_rollout_batch()
        others |= {} if self.shadow is None else self.shadow.end_rollout_batch()
        if not metrics:
            return None
        merged = merged_passes(metrics) | self._skipped() | receipt | others
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": merged}).cpu()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data):
        """verl's optimizer step, with the bounds decided beforehand."""
        if self.watch is not None:
            self.watch.gradient_norm = None
        self.decided_from = DecidedFrom.MICRO_BATCH
        output = self._train_batch(data)
        if self.tracer is not None:
            self.tracer.end_update(self.decided_from)
        return output

    def _train_batch(self, data):
        if self.planner is None:
            return self._observed_batch(data)
        batch = self.batch or FIRST
        if batch.token_pass is None and self.planner.settings.update is not None:
            raise RuntimeError(LOPTI_WITHOUT_PASSES)
        self.step = self.planner.plan(
            data, position=batch.position, token_pass=batch.token_pass, weights_moved=self._weights_moved()
        )
        self.step.of_rollout_batch, self.decided_from = self.batch is not None, self.step.decided_from
        if self.shadow is not None and self.batch is not None:
            self.step.kept = []
        if self.anatomy is not None and self.batch is not None:
            self.step.anatomy, self.step.equal_weights = self.anatomy, self.anatomy.at_equal_weights(self.batch)
        receipt = self.receipt if self.receipt is not None and self.receipt.open and self.batch is not None else None
        if receipt is not None:
            receipt.begin_update(self.step)
        if self.batch is not None:
            age = ages(data, self.rollouts // self.parameter_sync_step)
            if age is not None:
                data[AGE] = age
        if self.planner.settings.needs_entropy:
            self.step.entropy_wanted = tu.get(data, key="calculate_entropy", default=False)
            tu.assign_non_tensor(data, calculate_entropy=True)
        if not batch.last_pass:
            tu.assign_non_tensor(data, update_lr_scheduler=False)
        step = self.step
        try:
            output = super().train_batch(data)
            if receipt is not None:
                receipt.end_update(self.step)
            difference = self.planner.finish(self.step, taken=self._taken(data))
            if self.step.kept is not None:
                self.shadow.end_update(self.step.kept)
        finally:
            self.step = None
        if output is not None:
            over_remaining(tu.get(output, "metrics"))
        if self.batch is not None:
            self.batch.update += 1
        if output is not None:
            tu.get(output, "metrics").update(sampling_metrics(step))
        if difference is not None and output is not None:
            tu.get(output, "metrics")[CLOSED_FORM_DIFFERENCE.key] = difference
            if difference > self.planner.tolerated:
                logger.warning(RATIO_NOT_ONE, difference)
        return output

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
        """verl's checkpoint, and beside it the state of the bounds."""
        try:
            result = super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)
        except Exception:
            # torch says of a full disk "unexpected pos 4540608 vs 4540496".
            folder = next(one for one in (Path(local_path), *Path(local_path).parents) if one.exists())
            logger.error(UNSAVED, local_path, shutil.disk_usage(folder).free / 1e6)
            raise
        if self.planner is not None:
            self.planner.flush()
            if torch.distributed.get_rank() == self._state_rank():
                write_state(Path(local_path), self.planner.state, description(self.planner.method))
        if self.tracer is not None:
            self.tracer.writer.flush()
        return result

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False):
        """verl's checkpoint, and the state of the bounds, read by the rank that wrote it and sent to the others."""
        # verl's folder says how many rollout batches its weights were trained on.
        step = checkpoint_step(local_path)
        if self.planner is not None and local_path is not None:
            self.planner.restore(self._restored_state(Path(local_path)))
        self.rollouts = max(self.rollouts, step * self.parameter_sync_step)
        return super().load_checkpoint(local_path, hdfs_path, del_local_after_load)

    def _observed_batch(self, data: Any) -> Any:
        if self.watch is not None:
            self.step = OptimizerStep(of_rollout_batch=self.batch is not None)
            if self.rejects:
                left = padded(data["response_mask"]).sum(dtype=torch.float64)
                self.step.counted_tokens = float(self._all_reduce(left))
        try:
            output = super().train_batch(data)
            if self.step is not None:
                self._taken(data)
            return output
        finally:
            self.step = None

    def _taken(self, data: Any) -> bool:
        """Whether verl took the update that is ending, which it skips where the gradient's norm is not finite.

        Counts one that it skipped, and names in the log what of this rank's mini-batch is not finite, each field once.
        """
        norm = self.watch.gradient_norm
        taken = norm is None or math.isfinite(norm)
        if self.batch is not None:
            self.batch.skipped += not taken
        found = self.step.not_finite
        if not taken and not found and self.engine.is_mp_src_rank_with_outputs():
            # Not the policy's loss: perhaps verl's KL term.
            found = not_finite_in(data)
        self.not_finite.say(found, taken=taken, norm=norm)
        if self.batch is not None and not taken:
            self.batch.not_finite = together(self.batch.not_finite, found)
        return taken

    def _skipped(self) -> dict[str, list[float]]:
        """The number of updates of this rollout batch that verl skipped, and of those what was not finite and where."""
        logged = {SKIPPED_UPDATES.key: [float(self.batch.skipped)]}
        if self.batch.skipped:
            # The gradient's norm is that of all ranks, so that all of them are here.
            found = self.batch.not_finite
            of_ranks = torch.zeros(self.engine.get_data_parallel_size() + 1, dtype=torch.float64)
            of_ranks[self.engine.get_data_parallel_rank()] = float(bool(found))
            of_ranks[-1] = max((found[name].sequences for name in OF_LOG_PROBS if name in found), default=0)
            *wrong, sequences = self._all_reduce(of_ranks).tolist()
            first = next((rank for rank, number in enumerate(wrong) if number), -1)
            logged |= {NOT_FINITE_RANK.key: [float(first)], NOT_FINITE_LOG_PROBS.key: [sequences]}
        return logged

    def _receipt(self) -> dict[str, list[float]]:
        """What the receipt found, after the first rollout batch only."""
        if self.receipt is None or not self.receipt.open:
            return {}
        largest = self.receipt.end_rollout_batch(self.batch.update)
        if self.rank == 0:
            print(f"clipx: {self.receipt}", flush=True)
        return {RECEIPT.key: [largest]}

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
        """Of a pass, the metrics that take the sums over its mini-batches, or the values of all its updates."""
        settings = self.planner.settings
        metrics = with_updates(with_ratios_of_sums(metrics), settings.method, each=settings.detailed)
        self.stale = self.stale or any(metrics.get(VERSIONS_SUM, ()))
        before = self.batch.updates_before_pass
        return with_staleness(
            metrics, updates_before=before, updates=updates, moves=self.stale, detailed=settings.detailed
        )

    def _restored_state(self, folder: Path) -> ControllerState:
        found: list[Any] = [None]
        source = self._state_rank()
        if torch.distributed.get_rank() == source:
            try:
                found = [read_state(folder, description(self.planner.method))]
            except UnusableState as error:
                found = [error]
        torch.distributed.broadcast_object_list(found, src=source)
        (state,) = found
        if isinstance(state, ControllerState):
            state.statistics = {key: vector.to(get_device_id()) for key, vector in state.statistics.items()}
            return state
        settings = self.planner.settings
        if settings.missing_state == "fresh" or not settings.adaptive or settings.scope == "micro_batch":
            logger.warning("clipx: the bounds start afresh: %s", state)
            return ControllerState()
        raise RuntimeError(f"{state}. To start the bounds afresh, set clipx.missing_state=fresh.")

    def _state_rank(self) -> int:
        # Of the last pipeline stage: the others see no tokens.
        own = self.engine.is_mp_src_rank_with_outputs() and self.engine.get_data_parallel_rank() == 0
        rank = torch.tensor(torch.distributed.get_rank() if own else -1, device=get_device_id())
        torch.distributed.all_reduce(rank, op=torch.distributed.ReduceOp.MAX)
        return int(rank)

    def _extra_pass(self, data: Any, step: OptimizerStep) -> MiniBatchStatistics:
        # As verl's train_batch sets them.
        keys = ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu", "use_fused_kernels")
        cut = {key: getattr(self.engine_config, key) for key in keys}
        cut["use_remove_padding"] = self.model_config.get("use_remove_padding", False)
        planner, device = self.planner, get_device_id()
        return extra_pass(
            planner.settings, self.engine, data, step, rejection=planner.rejection, cut=cut, device=device
        )

    def _all_reduce(self, vector: torch.Tensor) -> torch.Tensor:
        total = vector.to(get_device_id())
        group = self.engine.get_data_parallel_group()
        if group is not None:
            total = total.clone()
            torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.SUM, group=group)
        return total

    def _refuse_sampling(self, settings: Settings) -> None:
        stages = getattr(self.engine_config, PIPELINE, 1)
        if settings.precision and stages > 1:
            raise ValueError(
                f"{NODE}.precision={settings.precision:g} with {PIPELINE}={stages}: only the last stage knows how many "
                f"sequences suffice, but all stages must pass the same ones. Set {NODE}.precision=0, or {PIPELINE}=1."
            )

    def _weights_moved(self) -> torch.Tensor | None:
        if self.batch is None or not self.batch.at_start or not self.planner.uses_closed_form:
            return None
        if getattr(self.engine_config, PIPELINE, 1) > 1:
            # Only the last stage would notice a closed form that is wrong, and no stage makes an extra pass by itself.
            return None
        return self.watch.weights_moved()

    def _wants_fingerprint(self) -> bool:
        return self.planner is not None and self.planner.uses_closed_form and not self.for_reference


LOPTI_WITHOUT_PASSES = (
    f"+{NODE}/update=lopti needs both passes of train_mini_batch, but this worker calls only train_batch. Train by "
    "train_mini_batch, or leave it out."
)
UNSAVED = (
    "clipx: verl could not save %s, whose disk has %.0f MB left. If it is full, make room and start the run again: "
    "it resumes from the checkpoint before."
)
COMPILED = "clipx: compiling the loss and its statistics before the first step."
RATIO_NOT_ONE = (
    "clipx: the first update of a rollout batch was assumed to start at ratio 1, but its bounds differ by %.3g of "
    "their width. Either old_log_probs do not come from these weights, or they were computed with another kernel or "
    "precision. From now on every update has an extra pass."
)
