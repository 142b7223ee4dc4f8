"""What is known of an optimizer step and a micro-batch beyond the arguments of verl's policy losses."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.losses.base.method import Bounds
from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.losses.modifiers.masks import apply_mask_rule
from verl_clipx.run.config import Observe, Settings
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.run.keys import CALCULATE_LOG_PROBS
from verl_clipx.run.schedule import position
from verl_clipx.training.observing import Observers
from verl_clipx.training.worker.layout import AGE, TokenPass, pad_rows, prompt_groups, response_part, restrict


class NotFinite(NamedTuple):
    """How much of a field is not finite in this rank's part of the mini-batch.

    Args:
        tokens: the number of tokens whose value is not finite.
        sequences: the number of sequences with such a token.
        prompt: the uid of the first such sequence's prompt; None if it is unknown.
    """

    tokens: int
    sequences: int
    prompt: str | None


class MeasuredFloor(NamedTuple):
    """This rank's second measurement of the floor.

    Args:
        sums: from metric key to a sum that becomes a mean over tokens.
        bins: from metric key to a sum that stays as it is.
        log_probs: from the hash of a row's old_log_probs (`rows.hash_rows_with`) to the log-probabilities that the
            measurement gave the tokens of its response, in nats, (tokens,).
    """

    sums: dict[str, float]
    bins: dict[str, float]
    log_probs: dict[int, Tensor]


@dataclass
class OptimizerStep:
    """One optimizer step of the worker. Numbers of tokens are over all ranks.

    Args:
        token_pass: Lopti's pass; None without Lopti.
        statistics: what the bounds are decided from, (statistics_size,), float64; None: each micro-batch uses its own.
        decision: what the method decided from the statistics; None: each micro-batch decides from its own.
        decided_from: the tokens that the statistics were computed from.
        counted_tokens: the number of the mini-batch's tokens that count, as the extra pass saw them if there is one;
            None: as many as verl says.
        selected_tokens: the number of the mini-batch's selected tokens, 0-d; None without selection.
        entropy_bucket: the bucket at which entropy selection over the mini-batch ends, 0-d; None without it.
        entropy_wanted: whether the run itself asks for the entropy, for its metric or its bonus.
        collected: the statistics of each micro-batch of this rank's training pass; None if nobody needs them.
        of_rollout_batch: whether the update is one of a rollout batch, at whose end sums become metrics.
        at_ratio_one: whether the weights are those of old_log_probs, so that the ratio is 1 but for rounding.
        row_hashes: the hashes of this rank's rows of the mini-batch, int64, (rows,); None if there are none.
        recut: the floor as it was measured before the update with other micro-batches; None if it was not.
        not_finite: from a field to what is known not to be finite in this rank's mini-batch.
        optimizer_stepped: whether the engine's optimizer step was called. Every rank knows it.
        gradient_norm: the norm of the step's gradient, which every rank knows; None before the optimizer's step.
    """

    token_pass: TokenPass | None = None
    statistics: Tensor | None = None
    decision: Tensor | None = None
    decided_from: DecidedFrom = DecidedFrom.MICRO_BATCH
    counted_tokens: float | None = None
    selected_tokens: Tensor | None = None
    entropy_bucket: Tensor | None = None
    entropy_wanted: bool = False
    collected: list[Tensor] | None = None
    of_rollout_batch: bool = True
    at_ratio_one: bool = False
    row_hashes: Tensor | None = None
    recut: MeasuredFloor | None = None
    not_finite: dict[str, NotFinite] = field(default_factory=dict)
    optimizer_stepped: bool = False
    gradient_norm: float | None = None

    @property
    def taken(self) -> bool:
        """Return whether the optimizer takes the step: verl skips one whose gradient is not finite."""
        return self.gradient_norm is None or math.isfinite(self.gradient_norm)


@dataclass
class RolloutBatch:
    """How far a worker has come with the rollout batch that it trains on.

    Args:
        number: how many rollout batches verl counted before this one.
        token_pass: Lopti's current pass; None without Lopti.
        last_pass: whether no other pass follows.
        update: the number of the pass's next update, from 0.
        updates_before_pass: how many updates the earlier passes made.
        skipped: how many updates verl has skipped.
        not_finite: from a field to what was not finite in this rank's mini-batches of the skipped updates.
    """

    number: int = 0
    token_pass: TokenPass | None = None
    last_pass: bool = True
    update: int = 0
    updates_before_pass: int = 0
    skipped: int = 0
    not_finite: dict[str, NotFinite] = field(default_factory=dict)

    def begin(self, token_pass: TokenPass | None, *, last: bool) -> None:
        """Begin the next pass over the rollout batch.

        Args:
            token_pass: Lopti's; None without Lopti.
            last: whether no other pass follows.
        """
        self.updates_before_pass += self.update
        self.token_pass = token_pass
        self.last_pass = last
        self.update = 0

    @property
    def is_first(self) -> bool:
        """Return whether no update on the rollout batch was made yet."""
        return self.update == 0 and self.updates_before_pass == 0

    @property
    def position(self) -> str:
        """Return the name of the next update within the rollout batch."""
        pass_name = None if self.token_pass is None else self.token_pass.name
        return position(self.update, pass_name)


class Observer:
    """Observes the updates on rollout batches. A method that a subclass does not override does nothing.

    Only `begin_rollout_batch`, `begin_update`, `end_update`, `end_rollout_batch` and `flush` may use collectives, since
    every rank calls them. Once the observer is `finished` at the end of a rollout batch, it is not called any more.
    """

    finished = False

    def begin_rollout_batch(self, data: Any, batch: RolloutBatch) -> None:
        """Called before the first update.

        Args:
            data: verl's data of the rollout batch on the host, to which the observer may add fields.
            batch: the rollout batch.
        """

    def begin_update(self, step: OptimizerStep, batch: RolloutBatch) -> None:
        """Called when an optimizer step is planned, before its micro-batches."""

    def end_micro_batch(
        self, micro_batch: "MicroBatch", loss: Tensor, model_output: Any, data: Any, dp_group: Any
    ) -> None:
        """Called between the loss of a micro-batch and its backward pass, on ranks that compute a loss.

        Args:
            micro_batch: filled in by the loss.
            loss: the scalar that verl's loss function returned.
            model_output, data, dp_group: as verl's engine gave them, with all tokens also under Lopti.
        """

    def report(self) -> Any:
        """Called once for each micro-batch, on ranks that compute a loss.

        It may not wait for the accelerator. It is not called for an observer without a name, whose exceptions end the
        run.

        Returns:
            A message to all ranks. The last one of an update reaches them in `hear`.
        """
        return None

    def hear(self, reports: list[Any]) -> None:
        """Called after the update, on ranks with outputs, for observers with a name.

        Args:
            reports: the last message of each rank.
        """

    def end_update(self, step: OptimizerStep) -> None:
        """Called after the optimizer's step."""

    def end_rollout_batch(self, batch: RolloutBatch) -> dict[str, list[Any]]:
        """Called after the last update. Return metrics of the rollout batch by key."""
        return {}

    def flush(self) -> None:
        """Called when a checkpoint is saved. The observer puts what it observed so far on the disk, or warns."""


class AppliedMethod(NamedTuple):
    """What a method of the plugin did to a micro-batch's tokens. Tensors are (sequences, length).

    Args:
        settings: the run's.
        inputs: what the method saw.
        decision: what the bounds were made of.
        correction: the factor of verl's rollout correction on F; None without one.
        kept: the tokens that selection and +clipx/mask keep and bypass mode does not reject, bool.
        unmasked: the tokens that bypass mode does not reject, before +clipx/mask, bool.
        whole: the response mask as it came, before bypass mode rejects tokens and +clipx/mask takes some out, bool.
    """

    settings: Settings
    inputs: Inputs
    decision: Tensor
    correction: Tensor | None
    kept: Tensor
    unmasked: Tensor
    whole: Tensor

    # Where nothing may take tokens out of a mask, the loss hands on the same object. So these properties do not look at
    # the tokens, which would wait for the accelerator.

    @property
    def mask_may_lack_tokens(self) -> bool:
        """Return whether bypass mode may reject tokens, or +clipx/mask may take some out."""
        return self.inputs.mask is not self.whole

    @property
    def kept_may_lack_tokens(self) -> bool:
        """Return whether entropy selection, bypass mode or +clipx/mask may take tokens out."""
        return self.kept is not self.whole


class AppliedLoss(NamedTuple):
    """What one of verl's losses did to a micro-batch's tokens. Tensors are (sequences, length).

    Args:
        inputs: what the loss saw.
        gradient: the gradient of the loss on the log-probabilities.
        bounds: those of the loss.
        by_sequence: whether they act on a sequence's ratio.
        loss_agg_mode: how verl averages the losses of tokens.
        config: verl's ActorConfig.
    """

    inputs: Inputs
    gradient: Tensor
    bounds: Bounds
    by_sequence: bool
    loss_agg_mode: str
    config: Any


@dataclass
class MicroBatch:
    """One micro-batch inside a training worker's loss call.

    Args:
        step: the optimizer step that it belongs to.
        rollout_log_prob: the rollout policy's, (sequences, response length), padded; None if the rollout has none.
        entropy: the current policy's in nats, (sequences, response length); None if nothing needs it.
        group: int64, (sequences,): equal numbers for the responses to one prompt; None if nothing needs it.
        age: weight versions since each sequence's first and last token were generated, int64, (sequences, 2); None if
            unknown.
        counted: bool, (sequences, response length): the tokens of Lopti's pass; None without Lopti.
        applied: filled by the loss: what it did to the tokens.
        sums: filled by the loss: from metric key to a sum over this micro-batch's tokens.
        values: filled by the loss: from metric key to a number that is no sum.
        counts: filled by the loss: from metric key to a number that adds up over the mini-batch's micro-batches.
        loss: filled by the loss: its value.
        observers: the observers under which the metrics are computed. Outside a training worker they are this
            micro-batch's own, and an exception ends the call.
    """

    step: OptimizerStep = field(default_factory=OptimizerStep)
    rollout_log_prob: Tensor | None = None
    entropy: Tensor | None = None
    group: Tensor | None = None
    age: Tensor | None = None
    counted: Tensor | None = None
    applied: AppliedMethod | AppliedLoss | None = None
    sums: dict[str, float] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    loss: float = 0.0
    observers: Observers = field(default_factory=Observers)


_current: ContextVar[MicroBatch | None] = ContextVar("verl_clipx_micro_batch", default=None)


def current_micro_batch() -> MicroBatch | None:
    """Return the micro-batch whose loss is being computed; None outside a training worker."""
    return _current.get()


@contextmanager
def in_micro_batch(micro_batch: MicroBatch) -> Iterator[MicroBatch]:
    """Make a micro-batch the current one within a block, and yield it."""
    token = _current.set(micro_batch)
    try:
        yield micro_batch
    finally:
        _current.reset(token)


def micro_batch_of(
    settings: Settings | Observe, step: OptimizerStep, data: Any, model_output: Any = None
) -> MicroBatch:
    """Collect what a method may need beyond the arguments of verl's policy losses.

    Args:
        settings: the run's.
        step: the optimizer step.
        data: verl's data of a mini-batch or of one of its micro-batches.
        model_output: the model's output for it, which may have the entropy; None before a pass.

    Returns:
        A micro-batch with what the data and the output have of this. The loss will fill in the rest.
    """
    micro_batch = MicroBatch(step=step)
    if model_output is not None and model_output.get("entropy", None) is not None:
        response_length = pad_rows(data["response_mask"]).shape[1]
        micro_batch.entropy = response_part(model_output["entropy"], data, response_length)
    if isinstance(settings, Observe):
        return micro_batch
    if "rollout_log_probs" in data:
        micro_batch.rollout_log_prob = pad_rows(data["rollout_log_probs"])
    if "group" in settings.method.asks_for:
        micro_batch.group = prompt_groups(data)
    if step.token_pass is not None:
        micro_batch.counted = step.token_pass.tokens(data)
    micro_batch.age = data.get(AGE, None)
    return micro_batch


def inputs_of(settings: Settings, micro_batch: MicroBatch, **tensors: Tensor) -> Inputs:
    """Return the inputs of a method's formulas for one micro-batch.

    Tokens outside Lopti's pass have no advantage, as in the loss. Those that +clipx/mask removes are not in the mask.

    Args:
        settings: the run's.
        micro_batch: has the optional fields that the settings ask for.
        tensors: the other fields of `Inputs` by name, (sequences, length) each.

    Raises:
        ValueError: the method needs a field that is missing. The message says how to provide it.
    """
    optional = {name: getattr(micro_batch, name) for name in settings.asks_for}
    for name, tensor in optional.items():
        if tensor is None:
            raise ValueError(f"clipx_{settings.method.name} needs {name}: {REMEDIES[name]}.")
    if micro_batch.counted is not None:
        tensors["advantages"] = torch.where(micro_batch.counted, tensors["advantages"], 0.0)
    inputs = Inputs(**tensors, counted=micro_batch.counted, **optional)
    return inputs._replace(mask=apply_mask_rule(settings.mask, inputs))


def prepare_call(
    settings: Settings | Observe, step: OptimizerStep, model_output: Any, data: Any
) -> tuple[MicroBatch, Any, Any]:
    """Prepare a call of verl's loss function.

    Under Lopti the function gets the tokens of the pass alone. It gets the entropy only if verl asked for it.

    Args:
        settings: the run's.
        step: the optimizer step.
        model_output, data: as verl's engine gives them.

    Returns:
        The micro-batch, as the policy loss will find it; and the output and the data that verl's loss function gets.
    """
    micro_batch = micro_batch_of(settings, step, data, model_output)
    if isinstance(settings, Settings) and settings.needs_entropy and not step.entropy_wanted:
        model_output = {key: value for key, value in model_output.items() if key != "entropy"}
    if step.token_pass is not None:
        model_output, data = restrict(model_output, data, micro_batch.counted)
    return micro_batch, model_output, data


REMEDIES = {
    "rollout_log_prob": f"have the rollout return its log-probabilities ({CALCULATE_LOG_PROBS}="
    "True), or, outside verl, pass rollout_log_prob=",
    "entropy": "the plugin's training worker provides it; outside verl, pass entropy=",
    "group": "the plugin's training worker numbers the prompts; outside verl, pass group=",
}
