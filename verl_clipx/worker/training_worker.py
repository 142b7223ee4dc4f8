"""verl's training worker with the plugin's view of every mini-batch and micro-batch.

Without a clipx node in its configuration it behaves exactly like verl's.
"""

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.metric import AggregationType, Metric

from verl_clipx.base.method import NODE
from verl_clipx.base.shared_metrics import CLOSED_FORM_DIFFERENCE, SKIPPED_UPDATES
from verl_clipx.common.run_files import checkpoint_step
from verl_clipx.driver.announcement import announcement
from verl_clipx.driver.config import Observe, Settings, clip_range
from verl_clipx.driver.hydra_nodes import RunFacts
from verl_clipx.driver.support import ROLLOUT_RS
from verl_clipx.driver.trace import Trace
from verl_clipx.loss.metrics import SUM_KEYS, TOKENS, with_ratios_of_sums
from verl_clipx.loss.rollout_metrics import VERSIONS_SUM, merged_passes, with_staleness, with_updates
from verl_clipx.worker.extra_pass import fingerprint, observe, refuse_attention_on_a_slice, refuse_dropout
from verl_clipx.worker.layout import TokenPass, padded, response_part, restricted
from verl_clipx.worker.not_finite import described, not_finite_in, together
from verl_clipx.worker.observe import SEQUENCE_LEVEL, observe_registered
from verl_clipx.worker.planner import TOLERATED_DIFFERENCE, Observation, StepPlanner
from verl_clipx.worker.rows import AGE, ages
from verl_clipx.worker.state import ControllerState, UnusableState, description, read_state, write_state
from verl_clipx.worker.step import MicroBatch, OptimizerStep, in_micro_batch, micro_batch_of
from verl_clipx.worker.tracer import Tracer

logger = logging.getLogger(__name__)


def clipx_node(loss_fn: Any) -> Settings | Observe | None:
    """The clipx configuration inside verl's loss function; None if the run has none.

    Args:
        loss_fn: what verl's ActorRolloutRefWorker gives to `set_loss_fn`: a partial with the ActorConfig as `config`.
    """
    config = loss_fn.keywords.get("config") if isinstance(loss_fn, partial) else None
    policy_loss = getattr(config, "policy_loss", None)
    node = policy_loss.get("clipx", None) if policy_loss is not None else None
    return node if isinstance(node, Settings | Observe) else None


def with_exact_metrics(
    loss_fn: Callable[..., Any], micro_batch: MicroBatch, model_output: Any, data: Any, dp_group: Any
) -> tuple[Any, dict[str, Any]]:
    """verl's loss, with metrics whose aggregate over micro-batches and ranks is exact over the optimizer mini-batch.

    verl sums a SUM metric over micro-batches and averages it over data-parallel ranks, so a local sum is multiplied by
    the number of ranks and divided by the number of tokens of the whole mini-batch (of Lopti's pass in it).

    Args:
        loss_fn: verl's loss function (model_output, data, dp_group) -> (loss, metrics).
        micro_batch: where the policy loss leaves its sums and values.
        model_output, data, dp_group: the loss function's arguments.
    """
    with in_micro_batch(micro_batch):
        loss, metrics = loss_fn(model_output=model_output, data=data, dp_group=dp_group)
    step, dp_size = micro_batch.step, data["dp_size"]
    # Looked into only now: a micro-batch whose loss is finite is not to wait for the accelerator again.
    if not math.isfinite(micro_batch.loss):
        found = not_finite_in(data, model_output["log_probs"], micro_batch.entropy)
        step.not_finite = together(step.not_finite, found)
    tokens = data["batch_num_tokens"] if step.counted_tokens is None else step.counted_tokens
    scale = dp_size / max(tokens, 1)
    for name, total in micro_batch.sums.items():
        if name != TOKENS and (step.of_rollout_batch or name not in SUM_KEYS):
            metrics[name] = Metric(AggregationType.SUM, total * scale)
    for name, count in micro_batch.counts.items():
        metrics[name] = Metric(AggregationType.SUM, count * dp_size)
    for name, value in micro_batch.values.items():
        metrics[name] = Metric(AggregationType.MEAN, value)
    return loss, metrics


def step_without_worker(settings: Settings) -> OptimizerStep:
    """The optimizer step of a loss call outside train_batch, where nothing was decided beforehand.

    Args:
        settings: the clipx node.

    Raises:
        RuntimeError: the settings need what train_batch decides.
    """
    needing = []
    if settings.adaptive and settings.scope != "micro_batch":
        needing.append(f"{NODE}.scope={settings.scope}")
    if settings.update is not None:
        needing.append(f"+{NODE}/update=lopti")
    if settings.needs_entropy:
        needing.append("entropy" if settings.select is None else f"+{NODE}/select")
    if needing:
        raise RuntimeError(
            f"{', '.join(needing)} under {NODE}.method={settings.method.name} needs the mini-batch before its update, "
            "but this worker calls the loss outside TrainingWorker.train_batch, as verl's Tinker worker does. Train by "
            f"train_mini_batch or train_batch, or use a method with fixed bounds (+{NODE}=grpo) without it."
        )
    return OptimizerStep(of_rollout_batch=False)


def observing(
    loss_fn: Callable[..., Any],
    settings: Settings | Observe,
    current_step: Callable[[], OptimizerStep | None] = OptimizerStep,
    tracer: Tracer | None = None,
) -> Callable[..., Any]:
    """Wraps verl's loss function so that the policy loss sees its micro-batch and its metrics come out exact.

    Args:
        loss_fn: as for `with_exact_metrics`; under distillation also (student_logits, data, ...) -> a dictionary of
            tensors, which passes through.
        settings: the clipx node.
        current_step: the optimizer step under way, or None outside one.
        tracer: takes what is traced, or None.

    Raises:
        RuntimeError: when called outside an optimizer step that the settings need.
    """

    def observed(model_output: Any = None, data: Any = None, dp_group: Any = None, **of_logits: Any) -> Any:
        if of_logits:
            return loss_fn(data=data, **of_logits)
        if isinstance(settings, Observe):
            step = current_step() or OptimizerStep(of_rollout_batch=False)
            micro_batch = MicroBatch(step, traced=traced(tracer, model_output, data))
            return with_exact_metrics(loss_fn, micro_batch, model_output, data, dp_group)
        step = current_step() or step_without_worker(settings)
        micro_batch = micro_batch_of(settings, data, step)
        if settings.needs_entropy:
            width = padded(data["response_mask"]).shape[1]
            micro_batch.entropy = response_part(model_output["entropy"], data, width)
        micro_batch.traced = traced(tracer, model_output, data, micro_batch.entropy)
        if settings.needs_entropy and not step.entropy_wanted:
            model_output = {key: value for key, value in model_output.items() if key != "entropy"}
        if step.token_pass is not None:
            model_output, data = restricted(model_output, data, micro_batch.counted)
        return with_exact_metrics(loss_fn, micro_batch, model_output, data, dp_group)

    return observed


def traced(tracer: Tracer | None, model_output: Any, data: Any, entropy: torch.Tensor | None = None) -> Any:
    """The traced rows of a micro-batch, for `MicroBatch`.

    Args:
        tracer: of this worker, or None.
        model_output, data: the loss function's arguments.
        entropy: (sequences, response length), where it is at hand.
    """
    return None if tracer is None else tracer.rows(data, model_output, entropy)


class ClipxTraining:
    """What a TrainingWorker of verl gains when the run has a clipx node; to be mixed in before it."""

    planner: StepPlanner | None = None
    step: OptimizerStep | None = None
    # Set while `train_mini_batch` runs: which of its passes, which update in it.
    token_pass: TokenPass | None = None
    last_pass: bool = True
    update: int | None = None
    updates_before_pass: int = 0
    # Rollout batches that verl counts so far, and after how many of them the rollout gets new weights.
    rollouts: int = 0
    in_rollout_batch: bool = False
    parameter_sync_step: int = 1
    gradient_norm: float | None = None
    # Updates of the running rollout batch that verl skipped, and what the log has named so far as not finite.
    skipped_updates: int = 0
    named: frozenset[str] = frozenset()
    watching: bool = False
    # Fingerprint of the weights that computed log-probabilities since the latest update; whether the reference's come.
    weights_of_log_probs: torch.Tensor | None = None
    for_reference: bool = False
    # Whether the run has had a sample of older weights; where it can't, the age of samples is a constant.
    stale: bool = False
    # Whether the run has +clipx=observe: no planner, verl's own steps; and whether rollout correction rejects tokens.
    observes: bool = False
    rejects: bool = False
    tracer: Tracer | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn):
        """Installs verl's loss function, wrapped if the run has a clipx node."""
        settings = clipx_node(loss_fn)
        self.observes = isinstance(settings, Observe)
        if settings is None:
            super().set_loss_fn(loss_fn)
            return
        refuse_attention_on_a_slice(self.engine)
        config, device = loss_fn.keywords["config"], get_device_id()
        run, functions = config.policy_loss.run, settings.functions(device)
        self.rejects = run.options.get(ROLLOUT_RS) is not None
        # verl trains the critic alone in the steps before this one, and counts them.
        self.parameter_sync_step = run.batches_a_step
        self.rollouts = max(self.rollouts, (run.critic_warmup - 1) * run.batches_a_step)
        if self.rank == 0:
            # Not logged: verl's workers show warnings alone.
            print(announcement(config.policy_loss), flush=True)
        if settings.trace is not None and self.engine.is_mp_src_rank_with_outputs():
            self.tracer = self._tracer(settings.trace, run, config.optim.total_training_steps)
        if self.observes:
            loss_mode = config.policy_loss.loss_mode
            observe_registered(loss_mode)
            functions.prepare(device, clip_range(config), loss_mode in SEQUENCE_LEVEL)
            self._watch_engine()
        else:
            self.planner = StepPlanner(
                settings,
                observe=self._observe,
                all_reduce=self._all_reduce,
                rejects=self.rejects,
            )
            if settings.observes:
                refuse_dropout(self.engine.module)
            self._watch_engine()
            functions.prepare(device, counted=settings.update is not None)
            if self.rank == 0 and functions.compiled:
                print(COMPILED, flush=True)
        super().set_loss_fn(observing(loss_fn, settings, lambda: self.step, self.tracer))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def infer_batch(self, data):
        """verl's pass without gradient, which computes old_log_probs."""
        self.for_reference = tu.get(data, key="no_lora_adapter", default=False)
        return super().infer_batch(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_mini_batch(self, data):
        """verl's loop over the mini-batches of a rollout batch; with Lopti, once for each group of tokens."""
        self.in_rollout_batch, self.skipped_updates = True, 0
        try:
            with nullcontext() if self.tracer is None else self.tracer.rollout_batch(data, self.rollouts):
                output = self._train_mini_batch(data)
        finally:
            self.in_rollout_batch = False
        self.rollouts += 1
        return output

    def _train_mini_batch(self, data):
        if self.planner is None:
            output = super().train_mini_batch(data)
            if self.observes and output is not None:
                metrics = with_ratios_of_sums(tu.get(output, "metrics")) | self._skipped()
                return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": metrics}).cpu()
            return output
        metrics = {}
        token_passes = self.planner.passes(data)
        try:
            for index, token_pass in enumerate(token_passes):
                self.token_pass, self.last_pass = token_pass, index == len(token_passes) - 1
                self.update, self.updates_before_pass = 0, self.updates_before_pass + (self.update or 0)
                # verl takes keys out of what it is given.
                output = super().train_mini_batch(data if self.last_pass else data.copy())
                if output is not None:
                    metrics[None if token_pass is None else token_pass.name] = self._finished(
                        tu.get(output, "metrics"), updates=self.update * len(token_passes)
                    )
        finally:
            self.token_pass, self.last_pass, self.update, self.updates_before_pass = None, True, None, 0
            self.weights_of_log_probs = None
        if not metrics:
            return None
        merged = merged_passes(metrics) | self._skipped()
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": merged}).cpu()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data):
        """verl's optimizer step, with the bounds decided beforehand."""
        self.gradient_norm = None
        output = self._train_batch(data)
        if self.tracer is not None:
            self.tracer.end_update()
        return output

    def _train_batch(self, data):
        if self.planner is None:
            return self._observed_batch(data)
        if self.token_pass is None and self.planner.settings.update is not None:
            raise RuntimeError(LOPTI_WITHOUT_PASSES)
        group = "" if self.token_pass is None else f"{self.token_pass.name}/"
        self.step = self.planner.plan(
            data,
            position=f"{group}update_{self.update or 0}",
            token_pass=self.token_pass,
            weights_moved=self._weights_moved(),
        )
        self.step.of_rollout_batch = self.in_rollout_batch
        if self.in_rollout_batch:
            age = ages(data, self.rollouts // self.parameter_sync_step)
            if age is not None:
                data[AGE] = age
        if self.planner.settings.needs_entropy:
            self.step.entropy_wanted = tu.get(data, key="calculate_entropy", default=False)
            tu.assign_non_tensor(data, calculate_entropy=True)
        if not self.last_pass:
            tu.assign_non_tensor(data, update_lr_scheduler=False)
        try:
            output = super().train_batch(data)
            difference = self.planner.finish(self.step, taken=self._taken(data))
        finally:
            self.step = None
        if self.update is not None:
            self.update += 1
        if difference is not None and output is not None:
            tu.get(output, "metrics")[CLOSED_FORM_DIFFERENCE.key] = difference
            if difference > TOLERATED_DIFFERENCE:
                logger.warning(RATIO_NOT_ONE, difference)
        return output

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
        """verl's checkpoint, and beside it the state of the bounds."""
        result = super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)
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
        if self.observes:
            self.step = OptimizerStep(of_rollout_batch=self.in_rollout_batch)
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
        taken = self.gradient_norm is None or math.isfinite(self.gradient_norm)
        self.skipped_updates += not taken
        found = self.step.not_finite
        if not taken and not found and self.engine.is_mp_src_rank_with_outputs():
            # Not the policy's loss: perhaps verl's KL term.
            found = not_finite_in(data)
        if new := found.keys() - self.named:
            self.named |= new
            verb = "takes" if taken else "skips"
            logger.warning(NOT_FINITE, verb, self.gradient_norm, self.rank, described(found))
        elif not taken and not found and self.rank == 0 and GRADIENT not in self.named:
            self.named |= {GRADIENT}
            logger.warning(GRADIENT_NOT_FINITE, self.gradient_norm)
        return taken

    def _skipped(self) -> dict[str, list[float]]:
        """The number of updates of this rollout batch that verl skipped."""
        return {SKIPPED_UPDATES.key: [float(self.skipped_updates)]}

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
        before = self.updates_before_pass
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
            logger.warning("the bounds start afresh: %s", state)
            return ControllerState()
        raise RuntimeError(f"{state}. To start the bounds afresh: clipx.missing_state=fresh.")

    def _state_rank(self) -> int:
        # Of the last pipeline stage: the others see no tokens.
        own = self.engine.is_mp_src_rank_with_outputs() and self.engine.get_data_parallel_rank() == 0
        rank = torch.tensor(torch.distributed.get_rank() if own else -1, device=get_device_id())
        torch.distributed.all_reduce(rank, op=torch.distributed.ReduceOp.MAX)
        return int(rank)

    def _observe(self, data: Any, step: OptimizerStep) -> Observation:
        # As verl's train_batch sets them.
        keys = ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu", "use_fused_kernels")
        cut = {key: getattr(self.engine_config, key) for key in keys}
        cut["use_remove_padding"] = self.model_config.get("use_remove_padding", False)
        return observe(self.planner.settings, self.engine, data, step, cut=cut, device=get_device_id())

    def _all_reduce(self, vector: torch.Tensor) -> torch.Tensor:
        total = vector.to(get_device_id())
        group = self.engine.get_data_parallel_group()
        if group is not None:
            total = total.clone()
            torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.SUM, group=group)
        return total

    def _weights_moved(self) -> torch.Tensor | None:
        first = self.update == 0 and self.updates_before_pass == 0
        if not first or self.weights_of_log_probs is None or not self.planner.uses_closed_form:
            return None
        if getattr(self.engine_config, "pipeline_model_parallel_size", 1) > 1:
            # The last stage alone would notice a closed form that is wrong, and a stage cannot observe by itself.
            return None
        return (fingerprint(self.engine.module) != self.weights_of_log_probs).any()

    def _watch_engine(self) -> None:
        if self.watching:
            return
        self.watching = True
        original_step, original_infer = self.engine.optimizer_step, self.engine.infer_batch

        def optimizer_step(*args, **kwargs):
            # The norm reaches the metrics only on ranks with outputs; every rank has to know whether it was taken.
            norm = original_step(*args, **kwargs)
            self.gradient_norm = None if norm is None else float(norm)
            return norm

        def infer_batch(*args, **kwargs):
            output = original_infer(*args, **kwargs)
            # Here, because around it verl may have offloaded the weights.
            if self.planner is not None and self.planner.uses_closed_form and not self.for_reference:
                self.weights_of_log_probs = fingerprint(self.engine.module)
            return output

        self.engine.optimizer_step, self.engine.infer_batch = optimizer_step, infer_batch


LOPTI_WITHOUT_PASSES = (
    f"+{NODE}/update=lopti needs both passes of train_mini_batch, but this worker calls train_batch alone. Train by "
    "train_mini_batch, or leave it out."
)
COMPILED = "clipx: the loss and its statistics are compiled before the first step."
RATIO_NOT_ONE = (
    "clipx: the first update of a rollout batch was taken to start at ratio 1, but its bounds differ by %.3g of their "
    "width: old_log_probs do not come from these weights, or their kernel or precision is another one. From now on "
    "every update is observed."
)
# Among the names of fields, the gradient of a mini-batch in which nothing else is not finite.
GRADIENT = "gradient"
NOT_FINITE = (
    "clipx: verl %s an update whose gradient's norm is %s. Not finite in rank %s's part of its mini-batch: %s. Each is "
    "named once; clipx/skipped_updates counts the updates that verl skips."
)
GRADIENT_NOT_FINITE = (
    "clipx: verl skips an update whose gradient's norm is %s, though all that the loss is computed from is finite on "
    "rank 0: another rank names what is not, or it came up on the way back through the model. Said once; "
    "clipx/skipped_updates counts the updates that verl skips."
)
